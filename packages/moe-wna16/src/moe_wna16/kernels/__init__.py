"""Device code of the portable backend; see `moe_wna16.kernels.layer`."""
