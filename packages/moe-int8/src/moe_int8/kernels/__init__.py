"""Device code of the INT8 schemes (Triton)."""
