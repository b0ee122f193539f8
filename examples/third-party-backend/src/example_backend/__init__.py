"""A backend of one's own for the fp8 scheme; see :mod:`example_backend.experts`."""
