"""Launch parameters of one fused MoE call, and the rule that chooses them.

No Triton here: plans are plain data, so that a rule can be read, tested and swept without a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class TileConfig:
    """Launch parameters of the tile kernel for one of the two products.

    ``block_m`` rows and ``block_n`` columns of the result per program (of each half when gated), ``num_stages`` steps
    of the k loop in flight, ``group_m`` row tiles that walk through the columns together, ``swap`` the transposed
    product, ``tma`` weights through the tensor memory accelerator, ``split`` programs that share the k loop of a tile.
    ``specialised`` asks for the scheme's own kernel for the device, where it has one that fits; the other values then
    hold where it does not.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    group_m: int = 1
    swap: bool = False
    tma: bool = False
    split: int = 1
    specialised: bool = False


@dataclass(frozen=True)
class TilePlan:
    """Sorted tiles: sort, up product, down product, reduce."""

    up: TileConfig
    down: TileConfig
    pdl: bool = False

    @property
    def block_m(self) -> int:
        """Rows of the tiles that pairs are sorted into; a product with a smaller tile takes it in pieces."""
        return max(self.up.block_m, self.down.block_m)

    def unsplit(self) -> TilePlan:
        """The same without shared loops, whose parts need a place for every row that there could be."""
        return replace(self, up=replace(self.up, split=1), down=replace(self.down, split=1))

    def interpreted(self) -> TilePlan:
        """The same for Triton's interpreter, which knows neither dependent launches nor warp specialisation."""
        return TilePlan(replace(self.up, specialised=False), replace(self.down, specialised=False))
