"""Kernels of other engines as phases of ours, where those are installed. Taken only where they are asked for."""
