"""Sizes of tiles."""

from __future__ import annotations


def power_of_two(value: int) -> int:
    """The smallest power of two that is not below ``value``; 1 for 0 and less."""
    return 1 << max(value - 1, 0).bit_length()


def max_tiles(pairs: int, experts: int, block_m: int) -> int:
    """Most tiles that ``pairs`` rows over ``experts`` experts can make: each expert may have one partial tile."""
    return min(experts, pairs) + pairs // block_m
