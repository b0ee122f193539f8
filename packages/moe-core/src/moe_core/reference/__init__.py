"""The truth that kernels are measured against: exact quantizers, the float64 layer, tolerances, torch experts."""
