"""Shared code of adapters for kernel libraries: base classes, layouts, limits.

Imports no library.
"""
