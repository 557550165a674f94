"""The workshop: what only this project measures, in a checkout or on its own machines. No wheel contains it."""
