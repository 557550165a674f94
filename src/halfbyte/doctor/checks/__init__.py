"""The checks, grouped by what they examine. Importing this package registers them in the order of docs/doctor.md."""

from halfbyte.doctor.checks import cluster, gpu, memory, serving, software, storage, wsl

__all__ = ["cluster", "gpu", "memory", "serving", "software", "storage", "wsl"]
