"""Device code: `@triton.jit` functions only. Importing this package's modules needs Triton."""
