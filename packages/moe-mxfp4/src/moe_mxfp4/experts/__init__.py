"""Backends: one file each, readable alone from claims to apply."""
