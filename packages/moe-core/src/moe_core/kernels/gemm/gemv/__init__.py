"""Portable GEMV kernels for few tokens, whose (token, expert) pairs are not sorted."""
