"""Kernels of other engines as phases of ours, if those engines are installed. They run only when selected by a gate."""
