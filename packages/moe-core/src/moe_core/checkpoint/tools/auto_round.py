"""Interpret AutoRound's config for one layer's experts.

It has GPTQ's entries, and the data types of weights and activations. The name of an OCP MX type determines how e8m0
scales are computed from the values. ``mx_fp`` rounds the exponent of the largest magnitude down (``floor(log2(amax)) -
emax``); ``mx_fp_rceil`` rounds up (``ceil(log2(amax / max))``). AutoRound's presets MXFP4 and MXFP8 write ``mx_fp``;
MXFP4_RCEIL and MXFP8_RCEIL write ``mx_fp_rceil``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_core.checkpoint.config.quant_args import one_of
from moe_core.checkpoint.experts.layer_experts import LayerExperts
from moe_core.checkpoint.tools.gptq import GptqSettings, settings_entries
from moe_core.spec.quant_key import QuantKey, kMxfp4Dynamic, kMxfp4DynamicDown, kMxfp8Dynamic, kMxfp8DynamicDown

#: Number of columns that share a scale in MX types.
_GROUP = 32
#: Activation keys, keyed by number of bits and AutoRound's data type.
MX_ACTIVATIONS: Mapping[tuple[int, str], QuantKey] = {
    **{(4, name): kMxfp4DynamicDown for name in ("mx_fp", "mx_fp4", "mx_fp4e2m1")},
    **{(4, name): kMxfp4Dynamic for name in ("mx_fp_rceil", "mx_fp4_rceil", "mx_fp4e2m1_rceil")},
    **{(8, name): kMxfp8DynamicDown for name in ("mx_fp", "mx_fp8", "mx_fp8e4m3")},
    **{(8, name): kMxfp8Dynamic for name in ("mx_fp_rceil", "mx_fp8_rceil", "mx_fp8e4m3_rceil")},
}
#: Names of e2m1 and e4m3 weights. How their scales were computed does not matter, since they are stored.
_MX_WEIGHTS = frozenset(MX_ACTIVATIONS) | {(4, "mx_fp4_rceil_v2")}


class AutoRoundSettings(GptqSettings):
    """AutoRound's settings as they apply to the layer's experts."""

    @property
    def data_type(self) -> str | None:
        """The data type of the weights ("int", "mx_fp" …)."""
        return self.entries.text("data_type", "int")

    def not_mx_weights(self, bits: int) -> str | None:
        """Return why the weights are not MXFP4 or MXFP8.

        Args:
            bits: 4 for MXFP4, 8 for MXFP8.

        Returns:
            The reason as one clause, or None if the weights have this type.
        """
        data_type = self.data_type
        if self.bits != bits or (bits, data_type) not in _MX_WEIGHTS:
            return f"data_type is {data_type!r} with {self.bits} bits, expected 'mx_fp' with {bits}"
        return self._wrong_group("group_size")

    def mx_activation(self, *bits: int) -> QuantKey | str | None:
        """Return the quantization of the activations for MX weights.

        Args:
            *bits: Numbers of bits that the scheme supports for activations in addition to 16: 4, 8 or both.

        Returns:
            The activation key, None for 16 bits, or, as one clause, why the activations are not supported.
        """
        act_bits = self.act_bits
        if act_bits == 16:
            return None
        data_type = self.entries.text("act_data_type", self.data_type)
        key = MX_ACTIVATIONS.get((act_bits or 0, str(data_type)))
        if key is None or act_bits not in bits:
            expected = one_of([str(n) for n in (*bits, 16)])
            return f"act_data_type is {data_type!r} with {act_bits} bits, expected 'mx_fp' with {expected}"
        reason = self._wrong_group("act_group_size")
        if reason is not None:
            return reason
        return key if self.entries.boolean("act_dynamic", True) else "act_dynamic is false, expected true"

    def _wrong_group(self, name: str) -> str | None:
        found = self.entries.integer(name, _GROUP, least=-1)
        return None if found == _GROUP else f"{name} is {found}, expected {_GROUP}"


def is_auto_rounds(quantization: Mapping[str, Any]) -> bool:
    """Return whether AutoRound wrote the settings, in its own format or in that of another tool.

    Args:
        quantization: Quantization settings of the checkpoint.

    Returns:
        True if they have AutoRound's entries.
    """
    return any(quantization.get(name) is not None for name in ("autoround_version", "data_type", "extra_config"))


def auto_round_settings(quantization: Mapping[str, Any], layer: LayerExperts) -> AutoRoundSettings:
    """Interpret AutoRound's settings for a layer.

    Args:
        quantization: Quantization settings of the checkpoint.
        layer: The layer's expert tensors.

    Returns:
        The settings as they apply to the layer's experts.

    Raises:
        CheckpointError: Experts or projections have different settings.
    """
    return layer.understood(quantization, _auto_round)


def _auto_round(quantization: Mapping[str, Any], layer: LayerExperts) -> AutoRoundSettings:
    return AutoRoundSettings(settings_entries(quantization, layer, "extra_config"))
