"""``quant_method: mxfp4``: gpt-oss, as OpenAI's releases and transformers keep it.

All experts of a layer in one tensor each:

===============================  ==============================================================
``gate_up_proj_blocks``          uint8 [E, 2N, K/32, 16]: two codes in a byte, the even column low
``gate_up_proj_scales``          uint8 [E, 2N, K/32], e8m0
``gate_up_proj_bias``            bfloat16 [E, 2N]
``down_proj_blocks``, ...        the same of [E, K, N/32, 16]
===============================  ==============================================================

Gate and up rows lie in turns: row 2i is gate i, row 2i + 1 is up i, in the bias too.  Activations are in 16 bits.  The
limit of the activation function is config.json's ``swiglu_limit``.

Tensors that other tools write one by one (``weight``, ``weight_packed`` with ``weight_scale``) are read under this
name, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_core.api.formats import LayerExperts, QuantizedFormat

from moe_mxfp4.formats.mxfp4_layout import Mxfp4Storage


class GptOssMxfp4Format(QuantizedFormat):
    """See the module docstring."""

    name = "MXFP4 (gpt-oss)"
    quant_methods = ("mxfp4",)

    def storage(self, quantization: Mapping[str, Any], layer: LayerExperts) -> Mxfp4Storage | str:
        return Mxfp4Storage(None, "MXFP4 weights: quant_method mxfp4", weight="blocks", scale="scales")
