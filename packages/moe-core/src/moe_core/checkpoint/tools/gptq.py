"""Interpret the configs of GPTQ and AWQ for one layer's experts.

AutoRound's config (`auto_round`) has additional entries. The tools support settings for individual modules
(:mod:`moe_core.checkpoint.tools.overrides`). AutoRound's overrides also appear in checkpoints that it exports in the
formats of GPTQ and AWQ.
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
    """Settings as they apply to the layer's experts.

    Entries are validated on access; an invalid one raises CheckpointError.

    Attributes:
        entries: The settings, including overrides for the experts.
    """

    entries: QuantEntries

    @property
    def where(self) -> str:
        """The location of the settings, for messages."""
        return self.entries.where

    @property
    def bits(self) -> int | None:
        """The number of bits per code."""
        return self.entries.integer(self.entries.name_of("bits", "w_bit", "wbits"))

    @property
    def group_size(self) -> int:
        """The number of columns that share a scale; -1 for all columns of a row."""
        entries = self.entries
        size = entries.integer(entries.name_of("group_size", "q_group_size"), least=-1)
        if size is None or size == 0:
            raise entries.error("group_size", "the columns of a group, or -1 for all")
        return size

    @property
    def act_bits(self) -> int | None:
        """The number of bits of the activations; 16 by default."""
        return self.entries.integer("act_bits", 16)

    @property
    def quantized_inputs(self) -> str | None:
        """Why the activations do not have 16 (or 32) bits, as one clause; None if they do."""
        return None if self.act_bits in (16, 32) else f"act_bits is {self.act_bits}, expected 16"

    @property
    def summary(self) -> str:
        """A description of bits and groups with the location of the settings."""
        size = self.group_size
        return f"{self.bits} bits {'by channel' if size == -1 else f'in groups of {size}'}: {self.where}"


def gptq_settings(quantization: Mapping[str, Any], layer: LayerExperts) -> GptqSettings:
    """Interpret the settings of GPTQ or AWQ for a layer.

    Args:
        quantization: Quantization settings of the checkpoint.
        layer: The layer's expert tensors.

    Returns:
        The settings as they apply to the layer's experts.

    Raises:
        CheckpointError: Experts or projections have different settings.
    """
    return layer.understood(quantization, _gptq)


def _gptq(quantization: Mapping[str, Any], layer: LayerExperts) -> GptqSettings:
    return GptqSettings(settings_entries(quantization, layer, "dynamic", "extra_config"))


def settings_entries(quantization: Mapping[str, Any], layer: LayerExperts, *overrides: str) -> QuantEntries:
    """Apply module overrides to the settings of a tool.

    Args:
        quantization: Quantization settings of the checkpoint.
        layer: The layer's expert tensors.
        *overrides: Names of the objects with overrides.

    Returns:
        The entries as they apply to the layer's experts.

    Raises:
        CheckpointError: Experts or projections have different settings.
    """
    entries = QuantEntries(quantization, f"{layer.checkpoint.path / 'config.json'}: quantization_config")
    for part in overrides:
        entries = with_overrides(entries, part, layer)
    return entries
