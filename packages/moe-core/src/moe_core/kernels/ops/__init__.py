"""Portable Triton ops shared by all schemes, each with a PyTorch reference.

Import the submodules directly. Triton is imported when a kernel first runs.
"""
