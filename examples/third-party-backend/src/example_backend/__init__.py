"""Example of a third-party backend for the fp8 scheme; see :mod:`example_backend.experts`."""
