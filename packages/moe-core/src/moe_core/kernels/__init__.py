"""Device code and the host code that launches it.

The subpackages, from bottom to top:

    launch      start, record and compile kernels
    device      device functions shared by kernels
    ops         sort, quantize, permute, reduce
    gemm        grouped GEMMs and the fused MoE layer
    experts     base classes of the experts that run on these kernels
    tuning      measured launch configurations
    libraries   adapters of kernel libraries

No module here imports a layer above. They use only the interface, values of ``spec`` and the reference.
"""
