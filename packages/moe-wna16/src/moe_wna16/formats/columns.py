"""Which group each column belongs to, where a tool quantised columns in another order than they lie (``g_idx``)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from moe_core import CheckpointError
from moe_core.checkpoint.experts import LayerExperts
from torch import Tensor

from moe_wna16.formats.stored import Stored

#: what tools keep groups of columns in
DTYPES = (torch.int32, torch.int64)


def is_permuted(layer: LayerExperts, stored: Stored, group: int) -> bool:
    """Whether any expert's columns are grouped otherwise than one after the other, ``group`` at a time (-1: all).

    Reads ``g_idx`` of the whole layer: tools write it for columns that lie in order, too.  It is not checked here; what
    is broken counts as permuted.
    """
    suffix = stored.g_idx
    if suffix is None:
        return False
    for projection in sorted(layer.projections):
        if not layer.has(projection, suffix):
            continue
        if layer.dtype(projection, suffix) not in DTYPES:
            return True
        expected = in_order(layer.shape(projection, suffix)[-1:], group)
        for expert in range(layer.num_experts):
            found = layer.tensor(expert, projection, suffix).long()
            if not torch.equal(found, expected) and not _is_unset(found, stored):
                return True
    return False


def in_order(shape: Sequence[int], group: int) -> Tensor:
    """int64 groups of columns of the ``shape`` [K] that lie in order."""
    columns = torch.arange(shape[0] if shape else 0)
    return columns // group if group > 0 else torch.zeros_like(columns)


def _is_unset(g_idx: Tensor, stored: Stored) -> bool:
    return stored.unset_g_idx and bool((g_idx == -1).all())


def load_groups(
    layer: LayerExperts,
    projections: Sequence[str],
    stored: Stored,
    *,
    cols: int,
    group: int,
    groups: int,
    experts: Sequence[int],
    device: torch.device | str,
) -> Tensor:
    """int32 [len(experts), cols]: the group of each column, of matrices that lie below one another.

    Raises CheckpointError for one out of range, for groups without a column, and for projections that differ.
    """
    suffix = stored.g_idx or "g_idx"
    out = torch.empty(len(experts), cols, dtype=torch.int32)
    for slot, expert in enumerate(experts):
        for projection in projections:
            found = in_order((cols,), group)
            if layer.has(projection, suffix):
                own = layer.tensor(expert, projection, suffix).long()
                found = found if _is_unset(own, stored) else own
                _check(
                    found, layer.name(expert, projection, suffix), groups, layer.name(expert, projection, stored.scale)
                )
            if projection == projections[0]:
                out[slot].copy_(found)
            elif not torch.equal(out[slot].long(), found):
                first = int((out[slot] != found).nonzero()[0])
                raise CheckpointError(
                    f"{_name(layer, expert, projection, suffix)} is {int(found[first])} at [{first}], expected "
                    f"{int(out[slot, first])} as {_name(layer, expert, projections[0], suffix)}: projections of the "
                    "same inputs must group their columns alike"
                )
    return out.to(device)


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
    """The tensor's name; of one that is not there, its projection's."""
    if layer.has(projection, suffix):
        return layer.name(expert, projection, suffix)
    return f"the group of columns of {layer.prefix}.{expert}'s {projection} (no {suffix})"
