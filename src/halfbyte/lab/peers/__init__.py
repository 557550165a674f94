"""Other engines, measured as their own users run them: built from a registry, started as processes, never imported."""
