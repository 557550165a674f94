"""Measurements of the product: one module per question; each gives results of the one schema."""
