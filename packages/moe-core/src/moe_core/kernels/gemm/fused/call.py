"""One call of a fused layer: its tensors, and the helpers that activation schemes use."""

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
    """One call of a layer.

    Attributes:
        w13: Weight of gemm1.
        w2: Weight of gemm2.
        x: [rows, K] hidden states, or codes if ``x_scale`` is given.
        routing: Routing, or the batch.
        plan: Launch configurations.
        workspace: Workspace tensors by name.
        adapters: LoRA adapters of the call, or None.
        x_scale: [rows, groups] scales of ``x``, or None.
    """

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
        """Rows of h; batched: rows of all buffers."""
        return self.routing.num_pairs

    @property
    def by_pair(self) -> Rows:
        """Meaning of tile rows in a tensor by pair; for batched rows all meanings agree."""
        return "pair" if isinstance(self.routing, Routing) else "position"

    @property
    def by_token(self) -> Rows:
        """Meaning of tile rows in x."""
        return "token" if isinstance(self.routing, Routing) else "position"

    def order(
        self, rows: QuantizeRows | None = None, *, positions: bool = False, zero: Tensor | None = None
    ) -> Schedule:
        """Sort the pairs (batched: list the tiles).

        Args:
            rows: Rows that the same launch quantizes, or None.
            positions: Whether to return the sorted position of each pair.
            zero: Tensor that the same launch clears, or None.

        Returns:
            The schedule of the tiles.
        """
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
        """Quantize ``rows`` in a separate launch; see `quantize_rows`.

        Args:
            rows: Rows, destination and quantization.
            in_use: Selector of the rows in use; None selects the pairs in use.
            positions: Sorted position of each pair, or None to quantize in place.
            by_expert: Whether the result depends on the expert.
        """
        x_scale = None if positions is None else self.x_scale
        in_use, pdl = in_use or self.routing.in_use, self.plan.pdl
        quantize_rows(rows, in_use, positions=positions, by_expert=by_expert, x_scale=x_scale, pdl=pdl)

    def order_and_quantize(
        self, rows: QuantizeRows, scatters: bool, *, by_expert: bool = False, zero: Tensor | None = None
    ) -> Schedule:
        """Sort the pairs and quantize ``rows`` of x.

        Args:
            rows: Rows, destination and quantization.
            scatters: Whether rows go straight into the sorted order, which takes a separate launch.
            by_expert: Whether the result depends on the expert.
            zero: Tensor that the sort clears, or None.

        Returns:
            The schedule of the tiles.
        """
        order = self.order(None if scatters else rows, positions=scatters, zero=zero)
        if scatters:
            self.quantize(rows, positions=order.positions, by_expert=by_expert)
        return order

    def warp_specializes(self, config: TileConfig, weight: GemmWeight) -> bool:
        """Whether the warp-specialized kernel is requested and can read the weight and these rows.

        Args:
            config: Launch configuration of the GEMM.
            weight: Weight of the GEMM.

        Returns:
            True if it can; never with adapters.
        """
        special = weight.warp_specialized
        reads = special is not None and weight.matrix is not None and self.plan.block_m in special.rows
        return config.warp_specialized and reads and self.adapters is None

    def quantized(self, name: str) -> tuple[Tensor, Tensor | None]:
        """Return the workspaces for quantized rows.

        Args:
            name: "x", "h" or "sorted".

        Returns:
            Values, and scales or None.
        """
        return self.workspace[f"{name}_values"], self.workspace.get(f"{name}_scales")

    def partials(self, split: int, columns: int) -> Tensor:
        """Return the workspace for split-K partial sums.

        Args:
            split: Number of programs that share a mainloop.
            columns: Columns of the result.

        Returns:
            float32 [pairs * split, columns].
        """
        return self.workspace["partials"][: self.pairs * split * columns].view(-1, columns)
