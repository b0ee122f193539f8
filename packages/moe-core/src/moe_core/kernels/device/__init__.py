"""Device functions shared by kernels: casts, registers, activations, waits, prefetch."""
