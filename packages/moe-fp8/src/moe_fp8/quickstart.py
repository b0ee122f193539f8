"""Small random-weight checkpoint in the format of Qwen3-MoE's FP8 releases."""

from __future__ import annotations

from moe_core import kFp8Static128BlockSym, quantize_weight
from moe_core.api.formats import qwen3_moe
from torch import Tensor

_LAYERS = 2


def _store(weight: Tensor) -> dict[str, Tensor]:
    codes, scale, *_ = quantize_weight(weight, kFp8Static128BlockSym)
    return {".weight": codes, ".weight_scale_inv": scale}


MODEL = qwen3_moe(
    {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": [f"model.layers.{layer}.mlp.gate" for layer in range(_LAYERS)],
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    _store,
    _LAYERS,
)
