"""What the configs of GPTQ, AWQ and AutoRound say in the same words."""

from __future__ import annotations

from moe_core.checkpoint.experts import LayerExperts
from moe_core.checkpoint.quant_args import QuantEntries

from moe_wna16.formats.stored import Stored

#: the widths of codes that are read
BITS = (4, 8)


def group_size(entries: QuantEntries) -> int:
    """Columns that share a scale, -1 for all of a row.  Raises CheckpointError for anything else."""
    name = "group_size" if "group_size" in entries.entries else "q_group_size"
    size = entries.integer(name, least=-1)
    if size is None or size == 0:
        raise entries.error("group_size", "the columns of a group, or -1 for all")
    return size


def symmetry(entries: QuantEntries, layer: LayerExperts, stored: Stored) -> bool:
    """Whether ``sym`` says that weights are symmetric; where it says nothing, whether there are no zero points."""
    if entries.entries.get("sym") is not None:
        return entries.boolean("sym")
    return stored.zero is None or not any(layer.has(projection, stored.zero) for projection in layer.projections)


def said(entries: QuantEntries) -> str:
    """The bits and groups, and where they are said."""
    size = group_size(entries)
    bits = entries.entries.get("bits", entries.entries.get("w_bit"))
    return f"{bits} bits {'by channel' if size == -1 else f'in groups of {size}'}: {entries.where}"
