"""What knows time and comparison: benchmarks, the environment they ran in, and what they mean."""
