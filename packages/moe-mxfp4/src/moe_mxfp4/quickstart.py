"""Small random-weight checkpoint in the format of OpenAI's gpt-oss releases."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from moe_core import kMxfp4Static, quantize_weight
from moe_core.api.formats import write_folder
from torch import Tensor

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, LAYERS = 512, 256, 16, 4, 2

CONFIG = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "experts_per_token": TOP_K,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "model_type": "gpt_oss",
    "num_experts_per_tok": TOP_K,
    "num_hidden_layers": LAYERS,
    "num_local_experts": EXPERTS,
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
        "quant_method": "mxfp4",
    },
    "swiglu_limit": 7.0,
}


def layer_tensors(layer: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Generate one layer's MoE block: router, and all experts' blocks, scales and biases.

    Args:
        layer: index of the layer.
        generator: source of the random weights.

    Returns:
        Tensors by checkpoint name.
    """

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) / math.sqrt(shape[-1])

    prefix = f"model.layers.{layer}.mlp"
    tensors = {
        f"{prefix}.router.weight": normal(EXPERTS, HIDDEN).bfloat16(),
        f"{prefix}.router.bias": normal(EXPERTS).bfloat16(),
        f"model.layers.{layer}.post_attention_layernorm.weight": torch.ones(HIDDEN, dtype=torch.bfloat16),
    }
    for projection, rows, cols in (("gate_up_proj", 2 * INTERMEDIATE, HIDDEN), ("down_proj", HIDDEN, INTERMEDIATE)):
        name = f"{prefix}.experts.{projection}"
        # All rows have the same distribution, so any row order is equally valid.
        codes, scale, _ = quantize_weight(normal(EXPERTS, rows, cols), kMxfp4Static)
        tensors[f"{name}_blocks"] = codes.view(EXPERTS, rows, cols // 32, 16)
        tensors[f"{name}_scales"] = scale
        tensors[f"{name}_bias"] = normal(EXPERTS, rows).bfloat16()
    return tensors


def write_checkpoint(folder: Path, seed: int = 0) -> None:
    """Write config.json, one safetensors shard per layer and the index.

    Args:
        folder: target folder.
        seed: seed of the random weights.
    """
    generator = torch.Generator().manual_seed(seed)
    shards = (
        (f"model-{layer:05d}-of-{LAYERS - 1:05d}.safetensors", layer_tensors(layer, generator))
        for layer in range(LAYERS)
    )
    write_folder(folder, CONFIG, shards)
