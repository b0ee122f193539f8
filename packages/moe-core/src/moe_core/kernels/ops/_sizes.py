"""Tile size arithmetic."""

from __future__ import annotations


def power_of_two(value: int) -> int:
    """Return the smallest power of two not below ``value``; 1 for 0 and negative values."""
    return 1 << max(value - 1, 0).bit_length()


def max_tiles(pairs: int, experts: int, block_m: int) -> int:
    """Return the largest number of tiles for ``pairs`` rows.

    Each expert has at most one partial tile.
    """
    return min(experts, pairs) + pairs // block_m
