"""Small random-weight checkpoint in GPTQModel's int4 format with groups of 128."""

from __future__ import annotations

import torch
from moe_core import kInt4Static, quantize_weight
from moe_core.api.formats import qwen3_moe
from torch import Tensor

GROUP = 128

#: eight zero points of 8, stored minus one
_ZEROS = 0x77777777


def _store(weight: Tensor) -> dict[str, Tensor]:
    experts, rows, columns = weight.shape
    codes, scale, *_ = quantize_weight(weight, kInt4Static.with_group(1, GROUP).with_scale_dtype(torch.float16))
    return {
        # a word holds eight columns of a row; the words of a row are stacked vertically
        ".qweight": codes.view(torch.int32).mT,
        ".qzeros": torch.full((experts, columns // GROUP, rows // 8), _ZEROS, dtype=torch.int32),
        ".scales": scale.mT,
        ".g_idx": (torch.arange(columns, dtype=torch.int32) // GROUP).repeat(experts, 1),
    }


MODEL = qwen3_moe(
    {
        "bits": 4,
        "checkpoint_format": "gptq",
        "desc_act": False,
        "group_size": GROUP,
        "lm_head": False,
        "pack_dtype": "int32",
        "quant_method": "gptq",
        "sym": True,
    },
    _store,
)
