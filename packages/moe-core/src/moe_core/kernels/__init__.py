"""Device code and what launches it.

From bottom to top: ``launch`` (starting, recording and compiling kernels), ``device`` (device functions that kernels
share), ``ops`` (sort, quantize, permute, reduce), ``gemm`` (grouped GEMMs and the fused layer), ``experts`` (base
classes of experts on these kernels), ``tuning`` (measured launch configurations), ``libraries`` (adapters of kernel
libraries). Nothing here imports the layers above: the interface, values of ``spec`` and the reference are all that it
uses.
"""
