"""Device code of the portable and the Marlin-class backend's own; see `moe_core.gemm.as_stored`."""
