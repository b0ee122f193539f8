"""What the configs of GPTQ and AWQ say of one layer's experts; AutoRound (`auto_round`) has the same entries and more.

The tools have settings for some modules only (:mod:`moe_core.checkpoint.tools.overrides`); AutoRound's stand in the
forms of GPTQ and AWQ too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moe_core.checkpoint.config.quant_args import QuantEntries
from moe_core.checkpoint.experts.layer_experts import LayerExperts
from moe_core.checkpoint.tools.overrides import with_overrides


@dataclass(frozen=True)
class GptqSettings:
    """The settings as they hold for the layer's experts.

    An entry is read, and refused by a CheckpointError if it is broken, when it is asked for.
    """

    entries: QuantEntries

    @property
    def where(self) -> str:
        return self.entries.where

    @property
    def bits(self) -> int | None:
        """Bits of a code."""
        return self.entries.integer(self.entries.name_of("bits", "w_bit", "wbits"))

    @property
    def group_size(self) -> int:
        """Columns that share a scale, -1 for all of a row."""
        entries = self.entries
        size = entries.integer(entries.name_of("group_size", "q_group_size"), least=-1)
        if size is None or size == 0:
            raise entries.error("group_size", "the columns of a group, or -1 for all")
        return size

    @property
    def act_bits(self) -> int | None:
        """Bits of the activations, 16 where nothing is said."""
        return self.entries.integer("act_bits", 16)

    @property
    def quantised_inputs(self) -> str | None:
        """Why the activations are not in 16 bits (or 32), in one clause; None if they are."""
        return None if self.act_bits in (16, 32) else f"act_bits is {self.act_bits}, expected 16"

    @property
    def summary(self) -> str:
        """The bits and groups, and where they are said."""
        size = self.group_size
        return f"{self.bits} bits {'by channel' if size == -1 else f'in groups of {size}'}: {self.where}"


def gptq_settings(quantization: Mapping[str, Any], layer: LayerExperts) -> GptqSettings:
    """Those of GPTQ and AWQ; CheckpointError where experts or projections would differ."""
    return layer.understood(quantization, _gptq)


def _gptq(quantization: Mapping[str, Any], layer: LayerExperts) -> GptqSettings:
    return GptqSettings(settings_entries(quantization, layer, "dynamic", "extra_config"))


def settings_entries(quantization: Mapping[str, Any], layer: LayerExperts, *overrides: str) -> QuantEntries:
    """The entries as they hold for the layer's experts, with what the objects ``overrides`` say of some modules."""
    entries = QuantEntries(quantization, f"{layer.checkpoint.path / 'config.json'}: quantization_config")
    for part in overrides:
        entries = with_overrides(entries, part, layer)
    return entries
