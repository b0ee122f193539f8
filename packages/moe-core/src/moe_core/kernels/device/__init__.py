"""Device functions that kernels share: casts, values in registers, activations, waiting, prefetching."""
