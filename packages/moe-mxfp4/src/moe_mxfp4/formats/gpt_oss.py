"""gpt-oss (``quant_method: mxfp4``), as in OpenAI's releases and transformers.

Each tensor holds all experts of a layer:

===============================  ==============================================================
``gate_up_proj_blocks``          uint8 [E, 2N, K/32, 16]: two codes in a byte, the even column low
``gate_up_proj_scales``          uint8 [E, 2N, K/32], e8m0
``gate_up_proj_bias``            bfloat16 [E, 2N]
``down_proj_blocks``, ...        the same of [E, K, N/32, 16]
===============================  ==============================================================

Gate and up rows are interleaved, also in the bias: row 2i is gate i, row 2i + 1 is up i. Activations are 16-bit. The
limit of the activation function is ``swiglu_limit`` in config.json.

Tensors that other tools write one by one (``weight``, ``weight_packed`` with ``weight_scale``) are also read under this
``quant_method``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_core.api.formats import LayerExperts, QuantizedFormat

from moe_mxfp4.formats.mxfp4_layout import Mxfp4Storage


class GptOssMxfp4Format(QuantizedFormat):
    """Reader of gpt-oss MXFP4; the module docstring describes the tensors."""

    name = "MXFP4 (gpt-oss)"
    quant_methods = ("mxfp4",)

    def storage(self, quantization: Mapping[str, Any], layer: LayerExperts) -> Mxfp4Storage | str:
        return Mxfp4Storage(None, "MXFP4 weights: quant_method mxfp4", weight="blocks", scale="scales")
