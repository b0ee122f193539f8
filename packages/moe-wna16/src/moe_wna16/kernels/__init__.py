"""Device code of weights that are read as stored; see `moe_core.kernels.gemm.as_stored`."""
