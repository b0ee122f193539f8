"""Device code for weights in the checkpoint's layout; see `moe_core.kernels.gemm.as_stored`."""
