"""Groups of columns for tools that quantize columns in another order (``g_idx``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from moe_core import CheckpointError
from moe_core.api.formats import LayerExperts
from torch import Tensor

from moe_wna16.formats.packing import INDICES, Packing


@dataclass(frozen=True, eq=False)
class ColumnGroups:
    """Column groups of one layer.

    Each tensor is read once: :meth:`of` reads until one is not in order, :meth:`load` the remaining ones.

    Attributes:
        layer: the experts in the checkpoint.
        packing: tensors of the tool.
        group: columns per group if they are in order, -1 for all.
        permuted: the columns of some expert are grouped in another order.
        zeros: stored zero points [1, ...] by projection, if they are equal for all experts. They are read together with
            the
            groups, for the whole matrices of a symmetric type.
        window: (begin, end, size) of the requested columns of down; None for all.
    """

    layer: LayerExperts
    packing: Packing
    group: int
    permuted: bool
    zeros: Mapping[str, Tensor]
    _read: Mapping[tuple[int, str], Tensor | None]
    window: tuple[int, int, int] | None = None

    @staticmethod
    def of(layer: LayerExperts, packing: Packing, group: int, symmetric: bool) -> ColumnGroups:
        """Read ``g_idx`` of the whole layer, since tools also write it for ordered columns.

        It is not validated here; invalid values count as permuted.

        Args:
            layer: the experts in the checkpoint.
            packing: tensors of the tool.
            group: columns per group, -1 for all.
            symmetric: the weights are symmetric.

        Returns:
            The groups; equal requests for a layer share one result.
        """
        # cached: several formats for one tool's files, and a model's plan before its layers, request the same
        key = (ColumnGroups, packing, group, symmetric)
        return layer.once(key, lambda: ColumnGroups._of(layer, packing, group, symmetric))

    @staticmethod
    def _of(layer: LayerExperts, packing: Packing, group: int, symmetric: bool) -> ColumnGroups:
        suffix, zero = packing.suffix("g_idx"), packing.suffix("zero_point") if symmetric else None
        known: dict[tuple[int, str], Tensor | None] = {}
        zeros: dict[str, Tensor] = {}
        projections = [p for p in sorted(layer.projections) if suffix is not None and layer.has(p, suffix)]
        if suffix is None or any(layer.dtype(projection, suffix) not in INDICES for projection in projections):
            return ColumnGroups(layer, packing, group, bool(projections), zeros, known)
        expected = {p: in_order(layer.shape(p, suffix)[-1:], group) for p in projections}
        beside = [
            (p, zero)
            for p in projections
            if zero is not None and layer.has(p, zero) and layer.dtype(p, zero) in (torch.int32, torch.int8)
        ]
        # if columns are in another order, the first expert already shows it
        for experts in filter(None, (range(1), range(1, layer.num_experts))):
            others = beside if experts.start else []
            found = layer.stacked_together([*((p, suffix) for p in projections), *others], experts)
            for projection in projections:
                known.update(
                    _groups_read(found[projection, suffix], expected[projection], experts, projection, packing)
                )
            for key in others:
                first = layer.stacked(*key, (0,))
                if torch.equal(found[key], first.expand_as(found[key])):
                    zeros[key[0]] = first
            if any(groups is not None for groups in known.values()):
                return ColumnGroups(layer, packing, group, True, zeros, known)
        return ColumnGroups(layer, packing, group, False, zeros, known)

    def load(
        self,
        projections: Sequence[str],
        *,
        cols: int,
        groups: int,
        experts: Sequence[int],
        device: torch.device | str,
    ) -> Tensor:
        """Return the group of each column, for matrices stacked along the rows.

        Args:
            projections: names of the stacked projections.
            cols: number of columns.
            groups: number of groups.
            experts: experts to read.
            device: device of the result.

        Returns:
            int32 [len(experts), cols].

        Raises:
            CheckpointError: a group is out of range or has no column, or the projections differ.
        """
        layer, suffix = self.layer, self.packing.suffix("g_idx") or "g_idx"
        begin, end, row = (0, cols, cols) if self._is_whole(projections[0]) else self.window or (0, cols, cols)
        out = torch.empty(len(experts), cols, dtype=torch.int32, device="cpu")
        for slot, expert in enumerate(experts):
            for projection in projections:
                own = self._groups(expert, projection)
                found = in_order((row,), self.group) if own is None else own.long()
                if own is not None:
                    scale = layer.name(expert, projection, self.packing.suffix("scale") or "")
                    _check(found, layer.name(expert, projection, suffix), groups, scale)
                found = found[begin:end]
                if projection == projections[0]:
                    out[slot].copy_(found)
                elif not torch.equal(out[slot].long(), found):
                    first = int((out[slot] != found).nonzero()[0])
                    raise CheckpointError(
                        f"{_name(layer, expert, projection, suffix)} is {int(found[first])} at [{first}], expected "
                        f"{int(out[slot, first])} as {_name(layer, expert, projections[0], suffix)}: projections of "
                        "the same inputs must group their columns alike"
                    )
        return out.to(device)

    def row_length(self, projection: str, cols: int) -> int:
        """Return the number of columns over which a row's groups are counted.

        For permuted columns these are the columns of the whole row, not only of the window.

        Args:
            projection: name of the projection.
            cols: number of columns.
        """
        return cols if self.window is None or not self.permuted or self._is_whole(projection) else self.window[2]

    def _is_whole(self, projection: str) -> bool:
        return self.window is None or projection != "down"

    def _groups(self, expert: int, projection: str) -> Tensor | None:
        """Return the stored group of each column, or None if columns are in order."""
        suffix = self.packing.suffix("g_idx")
        if suffix is None or not self.layer.has(projection, suffix):
            return None
        if (expert, projection) in self._read:
            return self._read[expert, projection]
        found = self.layer.tensor(expert, projection, suffix)
        return None if _is_unset(found, self.packing) else found


def in_order(shape: Sequence[int], group: int) -> Tensor:
    """Return the int64 groups of ordered columns.

    Args:
        shape: [K].
        group: columns per group, -1 for all.
    """
    columns = torch.arange(shape[0] if shape else 0, device="cpu")
    return columns // group if group > 0 else torch.zeros_like(columns)


def _groups_read(
    found: Tensor, expected: Tensor, experts: Sequence[int], projection: str, packing: Packing
) -> dict[tuple[int, str], Tensor | None]:
    """Return the entries for ``ColumnGroups._read`` of some experts' ``found`` [n, K]."""
    if torch.equal(found, expected.to(found.dtype).expand_as(found)):
        return dict.fromkeys(((expert, projection) for expert in experts), None)
    kept: dict[tuple[int, str], Tensor | None] = {}
    for expert, one in zip(experts, found, strict=True):
        ordered = torch.equal(one.long(), expected) or _is_unset(one, packing)
        kept[expert, projection] = None if ordered else one.clone()
    return kept


def _is_unset(g_idx: Tensor, packing: Packing) -> bool:
    return packing.unset_g_idx and bool((g_idx == -1).all())


def _check(g_idx: Tensor, name: str, groups: int, scale: str) -> None:
    bad = (g_idx < 0) | (g_idx >= groups)
    if bool(bad.any()):
        at = int(bad.nonzero()[0])
        raise CheckpointError(
            f"{name} is {int(g_idx[at])} at [{at}], expected 0 to {groups - 1}: {scale} has {groups} groups"
        )
    counts = torch.bincount(g_idx, minlength=groups)
    if bool((counts == 0).any()):
        empty = int((counts == 0).nonzero()[0])
        raise CheckpointError(
            f"{name} puts no column into group {empty}, expected columns in all {groups} groups of {scale}"
        )


def _name(layer: LayerExperts, expert: int, projection: str, suffix: str) -> str:
    """Return the name of the tensor, or describe the projection if the tensor is missing."""
    if layer.has(projection, suffix):
        return layer.name(expert, projection, suffix)
    return f"the group of columns of {layer.prefix}.{expert}'s {projection} (no {suffix})"
