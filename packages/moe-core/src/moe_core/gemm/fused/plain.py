"""Activations that are not quantised; their columns are gathered where those of the weights are permuted."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moe_core.gemm.fused.call import Call, Order
from moe_core.gemm.fused.scheme import TILE, ActivationScheme, CallShape, padded
from moe_core.gemm.launch import OperandA, Result
from moe_core.gemm.tile_kernel import TOKEN
from moe_core.workspace import WorkspaceSpec


@dataclass(frozen=True, eq=False)
class Columns:
    """Columns of activations as a weight has them.

    ``k`` of them; ``index`` int32 [E, k] and ``pre_scales`` float32 [E, K]: see `gather_columns`, None: the same.
    """

    k: int
    index: Tensor | None = None
    pre_scales: Tensor | None = None

    def gathers(self, columns: int) -> bool:
        """Whether activations of so many columns are gathered before the GEMM."""
        return (self.index is not None or self.pre_scales is not None) and self.k == columns

    def indexes(self, columns: int) -> bool:
        """Whether the GEMM reads them column by column: groups were filled up to whole ones."""
        return self.k != columns


@dataclass(frozen=True, eq=False)
class PlainScheme(ActivationScheme):
    """x and h in the dtype of x.

    ``x`` and ``h``: columns as w13 and w2 have them; ``gathered``: the most columns of x and h that are gathered, 0
    where none are.
    """

    x: Columns
    h_columns: Columns
    gathered: tuple[int, int] = (0, 0)

    @property
    def h_by_pair(self) -> bool:  # type: ignore[override]
        return self.h_columns.index is not None or self.h_columns.pre_scales is not None

    def operands(self, shape: CallShape) -> tuple[WorkspaceSpec, ...]:
        pairs, most = shape.pairs, max(self.gathered)
        return (
            WorkspaceSpec("h", (pairs, padded(shape.config.intermediate_size)), shape.config.dtype),
            WorkspaceSpec("gathered", (pairs if most else 0, padded(most)), shape.config.dtype),
        )

    def quantize_x(self, call: Call) -> tuple[Order, OperandA]:
        order = call.order()
        return order, self._rows(call, call.x, self.x, call.by_token, by_token=True)

    def result(self, call: Call) -> Result:
        return Result.of(call.workspace["h"])

    def h(self, call: Call, order: Order, which: int) -> OperandA:
        return self._rows(call, call.workspace["h"], self.h_columns, which, by_token=False)

    def _rows(self, call: Call, x: Tensor, columns: Columns, which: int, *, by_token: bool) -> OperandA:
        """Operand A: ``x`` itself, or gathered by pair."""
        present = call.w2.n if by_token else call.w13.n
        k, index, pre_scales = columns.k, columns.index, columns.pre_scales
        padded_rows = not (by_token or present % TILE)
        if columns.gathers(present):
            x = call.gathered(x[:, :present], padded(k), by_token=by_token, index=index, pre_scales=pre_scales)
            which, padded_rows = call.by_pair, True
        sizes = (x.data_ptr(), x.stride(0) * x.element_size())
        reachable = not columns.indexes(present) and all(size % 16 == 0 for size in sizes)
        aligned = reachable and present % 8 == 0
        if not columns.indexes(present):
            arguments = (x, x.stride(0)) if padded_rows else (x, x.stride(0), k)
            special: tuple[int, ...] | None = () if reachable else None
            if which == TOKEN.value:
                # gathered by the warp-specialised kernel itself, as the compiler knows it can: 32 bytes at a time
                special = (call.routing.top_k,) if reachable and k % 16 == 0 and x.stride(0) % 16 == 0 else None
            return OperandA(arguments, which, aligned=aligned, warp_specialised=special)
        if index is None:
            raise TypeError(f"the weight has {k} columns, the activations {present}, and there is no index")
        stride = 0 if pre_scales is None else pre_scales.stride(0)
        indexed = (x, x.stride(0), k, index, index.stride(0), pre_scales, stride)
        return OperandA(indexed, which, aligned=aligned)
