"""AutoRound FP8: ``quant_method: auto-round`` with ``data_type: fp`` and 8 bits.

Covers FP8_BLOCK, FP8_STATIC, FPW8A16 and their variants. AutoRound's export ``format="fp8"`` has the same config and
tensors under ``quant_method: fp8``.

Per expert and projection: ``weight`` e4m3 [N, K] and scales in the model's dtype or float32, whose form depends on
``group_size``:

=================  ==================================  ============================================
``group_size``     scale                               shape
=================  ==================================  ============================================
0                  ``weight_scale``                    [] or [1]
-1                 ``weight_scale``                    [N]
[rows, columns]    ``weight_scale_inv``, multiplied    [ceil(N / rows), ceil(K / columns)]
=================  ==================================  ============================================

Activations are 16-bit (``act_bits``), static with ``input_scale`` (``act_dynamic: false``), or quantized at run time
according to ``act_group_size``: 0 with one scale, -1 per token, else in groups. ``extra_config`` overrides the config
for individual layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_core import (
    PER_CHANNEL,
    PER_TENSOR,
    GroupShape,
    QuantKey,
    kFp8Dynamic128Sym,
    kFp8DynamicTensorSym,
    kFp8DynamicTokenSym,
    kFp8StaticTensorSym,
)
from moe_core.api.formats import LayerExperts, QuantEntries, QuantizedFormat, auto_round_settings, is_auto_rounds, short

from moe_fp8.formats.fp8_layout import Fp8Storage

#: names of e4m3
_TYPES = ("fp", "fp8", "fp8_e4m3")
_EXPECTED = "fp, fp8 or fp8_e4m3"


class AutoRoundFp8Format(QuantizedFormat):
    """Reader of AutoRound's FP8 exports; the module docstring describes the tensors."""

    name = "AutoRound FP8"
    quant_methods = ("auto-round", "intel/auto-round", "fp8")

    def storage(self, quantization: Mapping[str, Any], layer: LayerExperts) -> Fp8Storage | str:
        if quantization.get("quant_method") == "fp8" and not is_auto_rounds(quantization):
            return "no entry of AutoRound (data_type, extra_config, autoround_version)"
        settings = auto_round_settings(quantization, layer)
        entries = settings.entries
        if settings.data_type not in _TYPES or settings.bits != 8:
            return f"data_type is {settings.data_type!r} with {settings.bits} bits, expected {_EXPECTED} with 8"
        fmt = entries.text("fmt", "e4m3")
        if fmt != "e4m3":
            return f"fmt is {fmt!r}, expected 'e4m3'"
        group = _group(entries)
        if group is None:
            return f"group_size is {short(entries.entries.get('group_size'))}, expected 0, -1 or [rows, columns]"
        activation = _activation(entries, settings.act_bits)
        if isinstance(activation, str):
            return activation
        why = f"group_size {short(entries.entries.get('group_size'))} with 8 bits, act_bits {settings.act_bits}"
        if group in (PER_TENSOR, PER_CHANNEL):
            return Fp8Storage(group, activation, why)
        return Fp8Storage(group, activation, why, scale="weight_scale_inv")


def _group(entries: QuantEntries) -> GroupShape | None:
    if isinstance(entries.entries.get("group_size"), list):
        block = entries.block("group_size")
        return None if block is None else GroupShape(*block)
    return {0: PER_TENSOR, -1: PER_CHANNEL}.get(entries.integer("group_size", 0, least=-1) or 0)


def _activation(entries: QuantEntries, bits: int | None) -> QuantKey | str | None:
    """Return the activation key, None for 16 bits, or the reason why it is not supported."""
    if bits in (16, 32):
        return None
    data_type = entries.text("act_data_type", "fp")
    if bits != 8 or data_type not in _TYPES:
        return f"act_data_type is {data_type!r} with {bits} bits, expected {_EXPECTED} with 8 or 16"
    size = entries.integer("act_group_size", 0, least=-1) or 0
    if not entries.boolean("act_dynamic", True):
        return kFp8StaticTensorSym if size == 0 else f"act_group_size is {size} of static activations, expected 0"
    known = {0: kFp8DynamicTensorSym, -1: kFp8DynamicTokenSym}
    return known[size] if size in known else kFp8Dynamic128Sym.with_group(1, size)
