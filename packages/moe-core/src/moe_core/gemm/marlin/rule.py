"""Launch parameters of the family: a rule from counts and sizes, for any shape.

The mean number of rows per expert decides.  With few, a call streams weights: tiles of 16 or 32 rows, and several
programs share the k loop of a tile where tiles are too few.  With many, the tensor cores decide: the more rows a tile
has, the more products a widened weight enters.  Every product is transposed (`swap`).  Tiles of 4-bit words have 128
rows of weights and four warps: the 16-bit numbers of more do not fit their registers.  8-bit words take twice the
shared memory: tiles of 128 rows of activations would leave one program of four warps on a multiprocessor, and get 256
rows of weights and eight warps, or two steps in flight.  Figures behind the thresholds: docs/design/mixed_input.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_core.gemm.plan import TileConfig, TilePlan

#: rows of weights of a tile; of some with 8-bit words twice as many
BLOCK_N = 128
#: float32 numbers that split products may leave for the launch that adds them up
MAX_PARTS = 1 << 21
#: programs of four warps that 132 multiprocessors hold at a time
_RESIDENT = 528


def marlin_plan(
    tokens: int,
    top_k: int,
    num_experts: int,
    hidden_size: int,
    intermediate_size: int,
    *,
    bits: int = 4,
    dtype_bytes: int = 2,
    gated: bool = True,
    split: bool = True,
    capability: int = 90,
) -> TilePlan:
    """The plan for ``tokens`` x ``top_k`` pairs over ``num_experts`` (all of the layer, local or not).

    ``bits`` of a code, 4 or 8; ``dtype_bytes`` of the activations, 2 or 4; ``gated``: the up product has two halves;
    ``split``: programs may share k loops; ``capability`` 90 for sm_90, 0 for no NVIDIA GPU.
    """
    pairs = tokens * top_k
    mean = pairs / num_experts
    if dtype_bytes == 4:
        # no tensor cores: a small tile keeps the operands in registers
        config = TileConfig(16, BLOCK_N, 8, 1, 1, swap_ab=True)
        return TilePlan(config, config)
    if capability < 90 or capability >= 120:
        # about 100 KB of shared memory per program
        rows, warps = (16, 4) if mean <= 12 else (32, 8) if mean <= 24 else (64, 8)
        config = TileConfig(rows, BLOCK_N, warps, 2, 1 if rows == 16 else 8, swap_ab=True)
        return TilePlan(config, config, capability >= 90)
    down_steps = _steps(intermediate_size)
    if mean <= 12:
        experts = min(pairs, num_experts)
        width = intermediate_size * (2 if gated else 1)
        up, down = TileConfig(16, BLOCK_N, 4, 4, 1, True, True), TileConfig(16, BLOCK_N, 4, 3, 1, True, True)
        if not split:
            return TilePlan(up, down)
        tiles, steps = experts * -(-width // BLOCK_N), _steps(hidden_size)
        # parts of eight steps at least, and up to three rounds; shorter ones only where multiprocessors are left over
        up_split = _split(tiles, steps, pairs * width, (1800, 8), (720, 5), (512, 4))
        tiles = experts * -(-hidden_size // BLOCK_N)
        limits = ((1056, 28), (400, 5), (264, 3)) if bits == 4 else ((264, 4),)
        down_split = _split(tiles, down_steps, pairs * hidden_size, *limits)
        up = TileConfig(16, BLOCK_N, 4, 4 if steps > 16 else 3, 1, True, True, up_split)
        stages = 4 if bits == 8 and down_steps // down_split > 16 else 3
        down = TileConfig(16, BLOCK_N, 4, stages, 1, True, True, down_split)
        # where launches are a good part of the time; else programs that come early only take bandwidth
        return TilePlan(up, down, pairs <= 64 and tiles <= 2 * _RESIDENT)
    few = TileConfig(32, BLOCK_N, 4, 3, 1 if mean <= 24 else 8, True, True)
    some = TileConfig(64, BLOCK_N, 4, 3, 8, swap_ab=True)
    many = TileConfig(128, BLOCK_N, 4, 3, 8, swap_ab=True)
    if mean <= 24:
        # short programs: what they are made of matters more than how many products a weight enters
        return TilePlan(few, TileConfig(16, BLOCK_N, 4, 3, 1, True, True) if down_steps <= 4 else few)
    if bits == 8:
        wide = TileConfig(64, 2 * BLOCK_N, 8, 3, 8, True, True)
        down = wide if mean <= 96 and down_steps > 8 else some
        if mean <= 384:
            return TilePlan(few if mean <= 48 else some, down)
        # h has room for whole tiles of 128 columns, which 256 rows of a product without halves may exceed
        if gated or _steps(intermediate_size) % 2 == 0:
            return TilePlan(TileConfig(128, 2 * BLOCK_N, 8, 3, 8, True, True), down)
        return TilePlan(TileConfig(128, BLOCK_N, 4, 2, 8, True, True), down)
    if mean <= 48:
        return TilePlan(few, TileConfig(64, BLOCK_N, 4, 3, 1, True, True))
    if mean <= 96:
        return TilePlan(some, some)
    return TilePlan(many, many if mean > 384 else some)


@dataclass(frozen=True)
class VectorConfig:
    """Launch parameters of a matrix times a vector: ``block_n`` rows, ``block_w`` words of each at a time."""

    block_n: int
    block_w: int
    num_warps: int


@dataclass(frozen=True)
class VectorPlan:
    """The layer without tensor cores: up product, down product."""

    gemm1: VectorConfig
    gemm2: VectorConfig
    pdl: bool = False


def vector_plan(
    tokens: int,
    top_k: int,
    num_experts: int,
    hidden_size: int,
    intermediate_size: int,
    *,
    bits: int = 4,
    gated: bool = True,
    capability: int = 90,
) -> VectorPlan | None:
    """The plan for one token, or two that hardly share an expert; None for more, which share what is read of weights.

    Arguments as for :func:`marlin_plan`.
    """
    pairs = tokens * top_k
    shared = tokens > 2 or (tokens == 2 and 8 * pairs > num_experts)
    if shared or pairs * hidden_size > MAX_PARTS:
        return None
    up = _vector_config(pairs * intermediate_size * (2 if gated else 1), _steps(hidden_size) * 4 * bits, bits, 16)
    down = _vector_config(pairs * hidden_size, _steps(intermediate_size) * 4 * bits, bits, 32)
    return VectorPlan(up, down, 90 <= capability < 120)


def _vector_config(rows: int, words: int, bits: int, block_n: int) -> VectorConfig:
    """For ``rows`` of so many words; ``block_n`` of 8-bit codes, which are bound by memory, not by instructions."""
    if words <= 64:
        return VectorConfig(32, 32, 4)
    if rows <= 16 * _RESIDENT and words >= 256:
        # few programs: more of a row at a time
        return VectorConfig(16, 256, 4)
    if bits == 4:
        return VectorConfig(16, 256 if words >= 512 and words % 256 == 0 else 128, 2)
    return VectorConfig(block_n, 128, 4)


def _steps(columns: int) -> int:
    return -(-columns // 128)


def _split(tiles: int, steps: int, size: int, *limits: tuple[int, int]) -> int:
    """Programs that share a tile's loop, a power of two.

    ``size`` numbers of the result; ``limits``: (most programs, fewest steps of each), of which one must hold.
    """
    split = 1
    while tiles < _RESIDENT and split < 16 and size * split * 2 <= MAX_PARTS:
        twice = split * 2
        if not any(tiles * twice <= programs and steps // twice >= least for programs, least in limits):
            break
        split = twice
    return split
