"""The embedded model's problems: the seeded generators (`tasks`) and the scorer that runs them (`suite`)."""
