"""Device code that every scheme shares: Triton kernels, each with a twin in torch.

Import the submodules; Triton is imported when a kernel first runs.
"""
