"""Small random-weight checkpoint in llm-compressor's W8A8 format."""

from __future__ import annotations

import torch
from moe_core import kInt8StaticChannelSym, quantize_weight
from moe_core.api.formats import qwen3_moe
from torch import Tensor

_INT8 = {"num_bits": 8, "type": "int", "symmetric": True}


def _store(weight: Tensor) -> dict[str, Tensor]:
    # quantize with the scale as stored
    codes, scale, *_ = quantize_weight(weight, kInt8StaticChannelSym.with_scale_dtype(torch.bfloat16))
    return {".weight": codes, ".weight_scale": scale}


MODEL = qwen3_moe(
    {
        "config_groups": {
            "group_0": {
                "format": "int-quantized",
                "input_activations": {**_INT8, "dynamic": True, "strategy": "token"},
                "targets": ["Linear"],
                "weights": {**_INT8, "dynamic": False, "strategy": "channel"},
            }
        },
        "format": "int-quantized",
        "ignore": ["model.layers.0.mlp.gate", "lm_head"],
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    },
    _store,
)
