"""Reference for kernel tests: quantizers, float64 layer, tolerances, torch experts."""
