"""Storage of int4 and int8 experts: validation and conversion to canonical form.

Codes become unsigned, in canonical bytes. Scales keep the file's dtype if all of the layer's agree, else they become
float32. Zero points become what is subtracted from a code. Scales may be negative: AutoRound assigns the code -8 to a
group's largest weight, whatever its sign.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from moe_core import (
    CheckpointError,
    CheckpointWarning,
    QuantKey,
    kInt4Static,
    kInt4StaticAsym,
    kInt8Static,
    kInt8StaticAsym,
)
from moe_core.api.formats import (
    FLOATS,
    ExpertStorage,
    LayerExperts,
    Matrix,
    QuantizedLayout,
    TensorRule,
    is_interleaved,
)
from torch import Tensor

from moe_wna16.formats.columns import ColumnGroups
from moe_wna16.formats.packing import Packing, group_count


@dataclass(frozen=True)
class WNA16Storage(ExpertStorage):
    """Quantization of one layer's int4 and int8 experts; see the base class.

    Attributes:
        packing: tensors of the tool.
        group: columns that share a scale, -1 for a whole row.
        symmetric: the zero point is the middle of the code range; stored zero points must agree.
        why: origin of the quantization config, for messages.
        activation: quantization of the activations; None for 16-bit activations.
        ordered: the config states that columns are grouped in another order, so ``g_idx`` is required.
    """

    supports_interleaved = True

    packing: Packing
    group: int
    symmetric: bool
    why: str
    activation: QuantKey | None = None
    ordered: bool = False

    def layout(self, layer: LayerExperts) -> WNA16Layout:
        packing, pre_scale = self.packing, self.packing.suffix("pre_scale")
        columns = ColumnGroups.of(layer, packing, self.group, self.symmetric)
        symmetric, zero_points = (kInt4Static, kInt4StaticAsym) if packing.bits == 4 else (kInt8Static, kInt8StaticAsym)
        key = (symmetric if self.symmetric else zero_points).with_group(1, self.group)
        rules = packing.rules(self.group)
        key = replace(
            key.with_scale_dtype(_scale_dtype(layer, rules)),
            permuted=columns.permuted,
            pre_scaled=pre_scale is not None and any(layer.has(p, pre_scale) for p in layer.projections),
        )
        rules = tuple(self._row(rule, key) for rule in rules)
        mixed = is_interleaved(layer)
        return WNA16Layout(layer, key, self.activation, self, rules, interleaved=mixed, columns=columns)

    def _row(self, rule: TensorRule, key: QuantKey) -> TensorRule:
        """Return a row of the packing's table that this config needs."""
        if rule.role == "g_idx":
            return replace(rule, required=self.ordered and self.group != -1)
        if rule.role not in ("scale", "zero_point"):
            return rule
        # in permuted order, columns of any shard may belong to any group
        rule = replace(rule, sliced=("rows",) if key.permuted else rule.sliced)
        if rule.role == "zero_point":
            return replace(rule, required=not self.symmetric, read=not self.symmetric)
        arrange, dtype = rule.arrange, key.scale.dtype
        return replace(rule, arrange=lambda stored, m: (arrange(stored, m) if arrange else stored).to(dtype))


def _scale_dtype(layer: LayerExperts, rules: Sequence[TensorRule]) -> torch.dtype:
    """Return the scales' dtype: the file's if all of the layer's agree, else float32."""
    suffixes = [suffix for rule in rules if rule.role == "scale" for suffix in rule.suffixes]
    found = {layer.dtype(p, suffix) for p in layer.projections for suffix in suffixes if layer.has(p, suffix)}
    dtype = found.pop() if len(found) == 1 else None
    return dtype if dtype in FLOATS else torch.float32


@dataclass(frozen=True, eq=False, kw_only=True)
class WNA16Layout(QuantizedLayout):
    """Layout of the layer's matrices.

    Attributes:
        columns: which columns share scales.
    """

    columns: ColumnGroups

    def columns_of(self, begin: int, end: int, size: int) -> QuantizedLayout:
        columns = replace(self.columns, window=(begin, end, size))
        return replace(super().columns_of(begin, end, size), columns=columns)  # type: ignore[call-arg]

    def finish(
        self, tensors: dict[str, Tensor], matrix: Matrix, experts: Sequence[int], device: torch.device | str
    ) -> None:
        if self.weight_key.symmetric:
            self._check_symmetric(matrix, experts)
        if self.weight_key.permuted:
            row = self.columns.row_length(matrix.projections[0], matrix.cols)
            tensors["g_idx"] = self.columns.load(
                matrix.projections,
                cols=matrix.cols,
                groups=group_count(row, self.columns.group),
                experts=experts,
                device=device,
            )
        if self.weight_key.pre_scaled:
            tensors["pre_scale"] = self._pre_scale(tensors.get("pre_scale"), matrix, experts, device)

    def _check_symmetric(self, matrix: Matrix, experts: Sequence[int]) -> None:
        """Check that stored zero points of a symmetric type are the middle of the code range."""
        layer, half = self.layer, 1 << (self.columns.packing.bits - 1)
        for projection in matrix.projections:
            found = self.find(projection, "zero_point")
            if found is None:
                continue
            rule, suffix = found
            # usually equal for all experts
            same = self.columns.zeros.get(projection) if self.columns.window is None else None
            if same is None:
                stored = layer.stacked(projection, suffix, experts)
                same = stored[: 1 if bool((stored == stored[0]).all()) else None]
            zeros = rule.arrange(same, matrix) if rule.arrange is not None else same
            bad = zeros != half
            if not bool(bad.any()):
                continue
            slot, row, group = (int(i) for i in bad.nonzero()[0])
            name = layer.name(experts[slot], projection, suffix)
            mistaken = self.columns.packing.other_version(zeros)
            if mistaken is not None:
                text = f"{name} and others {mistaken}; weights are symmetric, so that the zero point is {half}"
                warnings.warn(text, CheckpointWarning, stacklevel=2)
                continue
            raise CheckpointError(
                f"{name} says the zero point {int(zeros[slot, row, group])} for row {row} and group {group}, expected "
                f"{half} everywhere: weights are symmetric ({self.storage.why})"
            )

    def _pre_scale(
        self, stored: Tensor | None, matrix: Matrix, experts: Sequence[int], device: torch.device | str
    ) -> Tensor:
        """Return the factors of the input columns, float32 [E, cols]; 1 if the file has none."""
        if stored is None:
            return torch.ones(len(experts), matrix.cols, dtype=torch.float32, device=device)
        each = stored.view(len(experts), -1, matrix.cols)
        unlike = each != each[:, :1]
        if bool(unlike.any()):
            slot, part, column = (int(i) for i in unlike.nonzero()[0])
            suffix, expert = self.columns.packing.suffix("pre_scale") or "", experts[slot]
            first, other = (self.layer.name(expert, matrix.projections[at], suffix) for at in (0, part))
            raise CheckpointError(
                f"{other} is {float(each[slot, part, column]):g} at [{column}], expected "
                f"{float(each[slot, 0, column]):g} as {first}: projections of the same inputs must scale them alike"
            )
        return each[:, 0].contiguous()
