"""Launch parameters of one fused MoE call, and the rule that chooses them.

No Triton here: plans are plain data, so that a rule can be read, tested and swept without a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TileConfig:
    """Launch parameters of the tile kernel for one of the two products.

    ``block_n`` columns of the result per program (of each half when gated), ``num_stages`` steps of the k loop in
    flight, ``group_m`` row tiles that walk through the columns together, ``swap`` the transposed product,
    ``tma`` weights through the tensor memory accelerator.
    """

    block_n: int
    num_warps: int
    num_stages: int
    group_m: int = 1
    swap: bool = False
    tma: bool = False


@dataclass(frozen=True)
class VectorConfig:
    """Launch parameters of a matrix-vector kernel: ``rows`` x (``groups`` quantisation groups) per step."""

    rows: int
    groups: int
    num_warps: int = 4
    num_stages: int = 1


@dataclass(frozen=True)
class TilePlan:
    """Sorted tiles of ``block_m`` rows: sort, up product, down product, reduce."""

    block_m: int
    up: TileConfig
    down: TileConfig
    pdl: bool = False


@dataclass(frozen=True)
class VectorPlan:
    """Every pair by itself: up product, down product with the sum over top-k."""

    up: VectorConfig
    down: VectorConfig
    pdl: bool = False


Plan = TilePlan | VectorPlan


def max_tiles(pairs: int, experts: int, block_m: int) -> int:
    """Most tiles that ``pairs`` rows over ``experts`` experts can make: each expert may have one partial tile."""
    return min(experts, pairs) + pairs // block_m
