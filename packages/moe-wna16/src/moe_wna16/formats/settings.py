"""What the configs of GPTQ, AWQ and AutoRound say in the same words."""

from __future__ import annotations

from moe_core.checkpoint.experts import LayerExperts
from moe_core.checkpoint.overrides import with_overrides
from moe_core.checkpoint.quant_args import QuantEntries

from moe_wna16.formats.stored import Stored

#: the widths of codes that are read
BITS = (4, 8)


def group_size(entries: QuantEntries) -> int:
    """Columns that share a scale, -1 for all of a row.  Raises CheckpointError for anything else."""
    size = entries.integer(entries.name_of("group_size", "q_group_size"), least=-1)
    if size is None or size == 0:
        raise entries.error("group_size", "the columns of a group, or -1 for all")
    return size


def code_bits(entries: QuantEntries) -> int | None:
    """Bits of a code."""
    return entries.integer(entries.name_of("bits", "w_bit", "wbits"))


def overridden(entries: QuantEntries, layer: LayerExperts) -> QuantEntries:
    """The entries as they hold for the layer's experts; AutoRound keeps ``extra_config`` in GPTQ's and AWQ's forms."""
    return with_overrides(with_overrides(entries, "dynamic", layer), "extra_config", layer)


def quantised_inputs(entries: QuantEntries) -> str | None:
    """Why the activations are not in 16 bits (or 32), in one clause; None if they are."""
    bits = entries.integer("act_bits", 16)
    return None if bits in (16, 32) else f"act_bits is {bits}, expected 16"


def symmetry(entries: QuantEntries, layer: LayerExperts, stored: Stored) -> bool:
    """Whether ``sym`` says that weights are symmetric; where it says nothing, whether there are no zero points."""
    if entries.entries.get("sym") is not None:
        return entries.boolean("sym")
    return stored.zero is None or not any(layer.has(projection, stored.zero) for projection in layer.projections)


def said(entries: QuantEntries) -> str:
    """The bits and groups, and where they are said."""
    size = group_size(entries)
    return f"{code_bits(entries)} bits {'by channel' if size == -1 else f'in groups of {size}'}: {entries.where}"
