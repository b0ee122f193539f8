"""Device code of the FP8 schemes; imports Triton."""
