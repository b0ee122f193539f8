"""One call of a fused layer: its tensors, and what activation schemes ask of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from moe_core.kernels.gemm.plan import TileConfig, TilePlan
from moe_core.kernels.gemm.tiles.launch import GemmWeight, InUse, Routing, Rows
from moe_core.kernels.gemm.tiles.lora import Adapters
from moe_core.kernels.gemm.tiles.quantize_rows import quantize_rows
from moe_core.kernels.ops.batch import Batch, batch_rows
from moe_core.kernels.ops.sort import QuantizeRows, Schedule, sort_pairs


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a layer of two weights; ``x`` [rows, K], which are codes with ``x_scale`` [rows, groups] if given."""

    w13: GemmWeight
    w2: GemmWeight
    x: Tensor
    routing: Routing | Batch
    plan: TilePlan
    workspace: Mapping[str, Tensor]
    adapters: Adapters | None
    x_scale: Tensor | None = None

    @property
    def pairs(self) -> int:
        """Rows of h; batched: of all buffers."""
        return self.routing.num_pairs

    @property
    def by_pair(self) -> Rows:
        """What a row of a tensor by pair is to the tile kernel; batched rows are all the same."""
        return "pair" if isinstance(self.routing, Routing) else "position"

    @property
    def by_token(self) -> Rows:
        """What a row of x is to it."""
        return "token" if isinstance(self.routing, Routing) else "position"

    def order(
        self, rows: QuantizeRows | None = None, *, positions: bool = False, zero: Tensor | None = None
    ) -> Schedule:
        """Sort the pairs (batched: list the tiles), and quantise ``rows`` and clear ``zero`` beside that."""
        routing, plan, work = self.routing, self.plan, self.workspace
        if isinstance(routing, Batch):
            return batch_rows(routing, plan.block_m, workspace=work, rows=rows, zero=zero, pdl=plan.pdl)
        return sort_pairs(
            routing.ids,
            routing.num_experts,
            plan.block_m,
            workspace=work,
            expert_map=routing.expert_map,
            rows=rows,
            positions=positions,
            zero=zero,
            pdl=plan.pdl,
        )

    def quantize(
        self, rows: QuantizeRows, in_use: InUse | None = None, positions: Tensor | None = None, by_expert: bool = False
    ) -> None:
        """Quantise ``rows``, by pair or others ``in_use``, by a launch of its own; see `quantize_rows`."""
        x_scale = None if positions is None else self.x_scale
        in_use, pdl = in_use or self.routing.in_use, self.plan.pdl
        quantize_rows(rows, in_use, positions=positions, by_expert=by_expert, x_scale=x_scale, pdl=pdl)

    def order_and_quantize(
        self, rows: QuantizeRows, scatters: bool, *, by_expert: bool = False, zero: Tensor | None = None
    ) -> Schedule:
        """As :meth:`order`; ``scatters``: ``rows`` of x go straight into the sorted order, by a launch of its own."""
        order = self.order(None if scatters else rows, positions=scatters, zero=zero)
        if scatters:
            self.quantize(rows, positions=order.positions, by_expert=by_expert)
        return order

    def warp_specialises(self, config: TileConfig, weight: GemmWeight) -> bool:
        """Whether the warp-specialised kernel is asked for, and can read the weight and these rows."""
        special = weight.warp_specialised
        reads = special is not None and weight.matrix is not None and self.plan.block_m in special.rows
        return config.warp_specialised and reads and self.adapters is None

    def quantized(self, name: str) -> tuple[Tensor, Tensor | None]:
        """Scratch memory for the values and scales of ``name``: "x", "h" or "sorted"."""
        return self.workspace[f"{name}_values"], self.workspace.get(f"{name}_scales")

    def partials(self, split: int, columns: int) -> Tensor:
        """[pairs * split, columns] float32 of programs that share k loops."""
        return self.workspace["partials"][: self.pairs * split * columns].view(-1, columns)
