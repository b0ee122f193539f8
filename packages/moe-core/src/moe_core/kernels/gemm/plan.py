"""Launch configurations of one fused MoE call.

This module does not import Triton. Plans are plain data, so that heuristics can be read, tested and swept without a
GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property


@dataclass(frozen=True)
class TileConfig:
    """Launch configuration of the tile kernel for one of the two GEMMs.

    Attributes:
        block_m: Rows of the output tile that one program computes.
        block_n: Columns of the output tile (of each half if the GEMM is gated).
        num_warps: Warps per program.
        num_stages: Stages of the software pipeline over k.
        group_m: Row tiles that are rasterized together, so that they share weights in L2.
        swap_ab: Whether to compute the transposed tile, with the weights as the first operand.
        tma: Whether to read weights through TMA descriptors.
        split_k: Number of programs that share the mainloop of a tile.
        warp_specialized: Whether to use the scheme's warp-specialized kernel where one is applicable. Otherwise the
            tile kernel runs with the remaining fields.
        uniform: Whether to scale partial sums in the way that every tile height supports, even if this height has a
            faster way.
        short_tiles: Whether the warp-specialized kernel computes tiles of at most 64 rows two column blocks at a time.
        max_registers: Register limit per thread, set where the compiler's own choice costs one resident program per SM.
            0 means no limit.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    group_m: int = 1
    swap_ab: bool = False
    tma: bool = False
    split_k: int = 1
    warp_specialized: bool = False
    uniform: bool = False
    short_tiles: bool = False
    max_registers: int = 0


@dataclass(frozen=True)
class TilePlan:
    """Launch configurations of a layer's two GEMMs.

    Attributes:
        gemm1: Configuration of the first GEMM.
        gemm2: Configuration of the second GEMM.
        pdl: Whether launches overlap (programmatic dependent launch).
    """

    gemm1: TileConfig
    gemm2: TileConfig
    pdl: bool = False

    @cached_property
    def block_m(self) -> int:
        """Rows of the tiles that pairs are sorted into; a GEMM with a smaller tile divides them."""
        return max(self.gemm1.block_m, self.gemm2.block_m)

    def unsplit(self) -> TilePlan:
        """Return this plan without split-K, whose partial sums need space for every possible row."""
        return TilePlan(replace(self.gemm1, split_k=1), replace(self.gemm2, split_k=1), self.pdl)

    def interpreted(self) -> TilePlan:
        """Return this plan without the features that Triton's interpreter lacks.

        These are dependent launches and warp specialization.
        """
        gemm1, gemm2 = (replace(config, warp_specialized=False) for config in (self.gemm1, self.gemm2))
        return TilePlan(gemm1, gemm2)


@dataclass(frozen=True)
class GemvConfig:
    """Launch parameters of a GEMV over packed weights.

    Attributes:
        block_n: Rows of weights per program (of both halves if gated).
        block_w: Words of each row that are multiplied at a time. With ``mma_sync``: words of each row that are
            prefetched.
        num_warps: Warps per program.
        mma_sync: Whether to multiply 4-bit words by `mma.sync`. Four warps then take 64 rows, or share the columns of
            32 or 16 rows.
        num_stages: Number of ``block_w`` word blocks that the kernel of 8-bit weights and activations prefetches.
        along_m: Whether neighboring programs take the same weight rows, for all pairs. Weights that pairs share then
            come from L2.
    """

    block_n: int
    block_w: int
    num_warps: int
    mma_sync: bool = False
    num_stages: int = 1
    along_m: bool = False


@dataclass(frozen=True)
class GemvPlan:
    """Launch parameters of the layer for few tokens.

    Attributes:
        gemm1: Configuration of gemm1.
        gemm2: Configuration of gemm2.
        pdl: Whether launches overlap (programmatic dependent launch).
        fuse_finalize: Whether gemm2 programs take all pairs of a token, one per warp group, and sum them. The number of
            pairs must be a power of two, at most one per warp; packed words support one pair only. ``gemm2.block_n``
            then counts the rows of all pairs.
    """

    gemm1: GemvConfig
    gemm2: GemvConfig
    pdl: bool = False
    fuse_finalize: bool = False

    def interpreted(self) -> GemvPlan:
        """Return this plan for Triton's interpreter, without dependent launches and `mma.sync`."""
        gemm1, gemm2 = (
            replace(config, mma_sync=False, block_w=128) if config.mma_sync else config
            for config in (self.gemm1, self.gemm2)
        )
        return replace(self, gemm1=gemm1, gemm2=gemm2, pdl=False)
