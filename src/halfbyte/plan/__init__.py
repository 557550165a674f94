"""Phases, plans and selections: which kernels run, why, and what really ran."""
