"""Small random-weight checkpoint in the format of Qwen3-MoE's FP8 releases."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from moe_core import kFp8Static128BlockSym, quantize_moe_weights
from moe_core.api.formats import write_folder
from torch import Tensor

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, LAYERS = 512, 256, 16, 4, 2

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
    "num_hidden_layers": LAYERS,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": [f"model.layers.{layer}.mlp.gate" for layer in range(LAYERS)],
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
}


def layer_tensors(layer: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Generate one layer's MoE block: router, and per expert FP8 weights with block scales.

    Args:
        layer: index of the layer.
        generator: source of the random weights.

    Returns:
        Tensors by checkpoint name.
    """

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) / math.sqrt(shape[-1])

    weights = quantize_moe_weights(
        normal(EXPERTS, 2 * INTERMEDIATE, HIDDEN),
        normal(EXPERTS, HIDDEN, INTERMEDIATE),
        gated=True,
        weight_key=kFp8Static128BlockSym,
    )
    w13_scale, w2_scale = weights.weight_scales
    prefix = f"model.layers.{layer}.mlp"
    tensors = {
        f"{prefix}.gate.weight": normal(EXPERTS, HIDDEN).bfloat16(),
        f"model.layers.{layer}.post_attention_layernorm.weight": torch.ones(HIDDEN, dtype=torch.bfloat16),
    }
    grid_rows = w13_scale.shape[1] // 2
    for expert in range(EXPERTS):
        parts = {
            "gate_proj": (weights.w13[expert, :INTERMEDIATE], w13_scale[expert, :grid_rows]),
            "up_proj": (weights.w13[expert, INTERMEDIATE:], w13_scale[expert, grid_rows:]),
            "down_proj": (weights.w2[expert], w2_scale[expert]),
        }
        for projection, (weight, scale) in parts.items():
            name = f"{prefix}.experts.{expert}.{projection}"
            tensors[f"{name}.weight"] = weight.contiguous()
            tensors[f"{name}.weight_scale_inv"] = scale.contiguous()
    return tensors


def write_checkpoint(folder: Path, seed: int = 0) -> None:
    """Write config.json, one safetensors shard per layer and the index.

    Args:
        folder: target folder.
        seed: seed of the random weights.
    """
    generator = torch.Generator().manual_seed(seed)
    shards = (
        (f"model-{layer + 1:05d}-of-{LAYERS:05d}.safetensors", layer_tensors(layer, generator))
        for layer in range(LAYERS)
    )
    write_folder(folder, CONFIG, shards)
