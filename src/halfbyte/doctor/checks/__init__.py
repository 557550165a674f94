"""The checks, by what they look at. Importing this registers them all, in the order of docs/doctor.md."""

from halfbyte.doctor.checks import cluster, gpu, memory, serving, software, storage

__all__ = ["cluster", "gpu", "memory", "serving", "software", "storage"]
