"""Small random-weight checkpoint in GPTQModel's int4 format with groups of 128."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from moe_core import kInt4Static, quantize_weight
from moe_core.api.formats import write_folder
from torch import Tensor

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, GROUP = 512, 256, 16, 4, 128

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "dtype": "bfloat16",
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": 4 * HIDDEN,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": INTERMEDIATE,
    "norm_topk_prob": True,
    "num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "num_hidden_layers": 1,
    "quantization_config": {
        "bits": 4,
        "checkpoint_format": "gptq",
        "desc_act": False,
        "group_size": GROUP,
        "lm_head": False,
        "pack_dtype": "int32",
        "quant_method": "gptq",
        "sym": True,
    },
}

#: eight zero points of 8, stored minus one
_ZEROS = 0x77777777


def layer_tensors(generator: torch.Generator) -> dict[str, Tensor]:
    """Generate the layer's MoE block: router, and per expert GPTQ tensors with float16 scales.

    Args:
        generator: source of the random weights.

    Returns:
        Tensors by checkpoint name: ``qweight``, ``qzeros``, ``scales``, ``g_idx``.
    """

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) / math.sqrt(shape[-1])

    prefix = "model.layers.0.mlp"
    tensors = {f"{prefix}.gate.weight": normal(EXPERTS, HIDDEN).bfloat16()}
    sizes = {
        "gate_proj": (INTERMEDIATE, HIDDEN),
        "up_proj": (INTERMEDIATE, HIDDEN),
        "down_proj": (HIDDEN, INTERMEDIATE),
    }
    key = kInt4Static.with_group(1, GROUP).with_scale_dtype(torch.float16)
    for projection, (rows, cols) in sizes.items():
        codes, scale, _ = quantize_weight(normal(EXPERTS, rows, cols), key)
        for expert in range(EXPERTS):
            name = f"{prefix}.experts.{expert}.{projection}"
            # a word holds eight columns of a row; the words of a row are stacked vertically
            tensors[f"{name}.qweight"] = codes[expert].view(torch.int32).mT.contiguous()
            tensors[f"{name}.qzeros"] = torch.full((cols // GROUP, rows // 8), _ZEROS, dtype=torch.int32)
            tensors[f"{name}.scales"] = scale[expert].mT.contiguous()
            tensors[f"{name}.g_idx"] = torch.arange(cols, dtype=torch.int32) // GROUP
    return tensors


def write_checkpoint(folder: Path, seed: int = 0) -> None:
    """Write config.json and one safetensors file.

    Args:
        folder: target folder.
        seed: seed of the random weights.
    """
    tensors = layer_tensors(torch.Generator().manual_seed(seed))
    write_folder(folder, CONFIG, [("model.safetensors", tensors)])
