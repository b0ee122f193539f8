"""Backends, one self-contained file each, from claims to apply."""
