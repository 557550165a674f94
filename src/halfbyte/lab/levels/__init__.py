"""Judgements of the product: is it right, and does it stay right under load."""
