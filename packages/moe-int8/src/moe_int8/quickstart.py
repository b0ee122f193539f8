"""Small random-weight checkpoint in llm-compressor's W8A8 format."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from moe_core import kInt8StaticChannelSym, quantize_weight
from moe_core.api.formats import write_folder
from torch import Tensor

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 512, 256, 16, 4

_INT8 = {"num_bits": 8, "type": "int", "symmetric": True}

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
}


def layer_tensors(generator: torch.Generator) -> dict[str, Tensor]:
    """Generate the layer's MoE block: router, and per expert int8 weights with channel scales.

    Args:
        generator: source of the random weights.

    Returns:
        Tensors by checkpoint name; scales are bfloat16.
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
    for projection, size in sizes.items():
        # quantize with the scale as stored
        key = kInt8StaticChannelSym.with_scale_dtype(torch.bfloat16)
        codes, scale, _ = quantize_weight(normal(EXPERTS, *size), key)
        for expert in range(EXPERTS):
            name = f"{prefix}.experts.{expert}.{projection}"
            tensors[f"{name}.weight"] = codes[expert].contiguous()
            tensors[f"{name}.weight_scale"] = scale[expert].contiguous()
    return tensors


def write_checkpoint(folder: Path, seed: int = 0) -> None:
    """Write config.json and one safetensors file.

    Args:
        folder: target folder.
        seed: seed of the random weights.
    """
    tensors = layer_tensors(torch.Generator().manual_seed(seed))
    write_folder(folder, CONFIG, [("model.safetensors", tensors)])
