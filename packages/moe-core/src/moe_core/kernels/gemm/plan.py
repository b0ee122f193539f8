"""Launch configurations of one fused MoE call.

No Triton here: plans are plain data, so that heuristics can be read, tested and swept without a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class TileConfig:
    """Launch configuration of the tile kernel for one of the two GEMMs.

    - ``block_m`` x ``block_n``: the tile of the result that a program computes (of each half where gated)
    - ``num_stages`` of the k loop's software pipeline; ``num_warps`` of a program
    - ``group_m``: row tiles that are rasterised together, so that they share weights in L2
    - ``swap_ab``: compute the transposed tile, weights first
    - ``tma``: read weights through tensor-map descriptors
    - ``split_k``: programs that share the k loop of a tile
    - ``warp_specialised``: take the scheme's warp-specialised kernel where it has one that fits; elsewhere the other
      values hold
    - ``uniform``: products are scaled in the way that every tile height can, also where this one has a faster way
    - ``short_tiles``: the warp-specialised kernel computes two column blocks at a time of tiles with at most 64 rows
    - ``max_registers`` of a thread, where the compiler would take so many that one program less fits a multiprocessor;
      0: as it likes
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    group_m: int = 1
    swap_ab: bool = False
    tma: bool = False
    split_k: int = 1
    warp_specialised: bool = False
    uniform: bool = False
    short_tiles: bool = False
    max_registers: int = 0


@dataclass(frozen=True)
class TilePlan:
    """Launch configurations of a layer's two GEMMs.

    ``pdl``: programmatic dependent launch, with which launches overlap.
    """

    gemm1: TileConfig
    gemm2: TileConfig
    pdl: bool = False

    @property
    def block_m(self) -> int:
        """Rows of the tiles that pairs are sorted into; a GEMM with a smaller tile divides them."""
        return max(self.gemm1.block_m, self.gemm2.block_m)

    def unsplit(self) -> TilePlan:
        """The same without split-K, whose partial sums need room for every row that there could be."""
        return TilePlan(replace(self.gemm1, split_k=1), replace(self.gemm2, split_k=1), self.pdl)

    def interpreted(self) -> TilePlan:
        """The same for Triton's interpreter, which knows neither dependent launches nor warp specialisation."""
        gemm1, gemm2 = (replace(config, warp_specialised=False) for config in (self.gemm1, self.gemm2))
        return TilePlan(gemm1, gemm2)
