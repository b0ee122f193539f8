"""Device code of weights that are read as stored; see `moe_core.gemm.as_stored`."""
