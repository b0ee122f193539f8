"""Checkpoint formats, one file each: from a tool's tensors to canonical weights."""
