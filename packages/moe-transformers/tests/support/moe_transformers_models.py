"""Tiny whole models with random weights, and checkpoints of them as transformers' FP8 quantizer writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from moe_core import kFp8Static128BlockSym, kFp8StaticTensorSym, kMxfp8Static, quantize_weight
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS, FP8Experts
from transformers.integrations.moe import use_experts_implementation

VOCABULARY, E, TOP_K, K, N = 128, 4, 2, 256, 128


def qwen3(seed: int = 0, **entries: Any) -> PreTrainedModel:
    """A Qwen3-MoE of two layers in bfloat16."""
    sizes = {"hidden_size": K, "intermediate_size": N, "moe_intermediate_size": N, "head_dim": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    experts = {"num_experts": E, "num_experts_per_tok": TOP_K, "norm_topk_prob": True}
    rest = {"vocab_size": VOCABULARY, "num_hidden_layers": 2, "max_position_embeddings": 128}
    config = Qwen3MoeConfig(**{**sizes, **heads, **experts, **rest, "tie_word_embeddings": False, **entries})
    return randomized(Qwen3MoeForCausalLM(config), seed)


def randomized(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """``model`` in bfloat16, its matrices of a size that keeps that of hidden states."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.dim() > 1:
                tensor.normal_(0, tensor.shape[-1] ** -0.5, generator=generator)
    return model.bfloat16().eval()


#: (weight_block_size, scale_fmt, activation_scheme) of what "fp8" means in transformers
FP8_KINDS: dict[str, tuple[list[int] | None, str, str]] = {
    "block": ([128, 128], "float", "dynamic"),
    "block_e8m0": ([128, 128], "ue8m0", "dynamic"),
    "mxfp8": ([1, 32], "ue8m0", "dynamic"),
    "tensor": (None, "float", "dynamic"),
    "tensor_static": (None, "float", "static"),
}


def save_fp8(folder: Path, model: PreTrainedModel, kind: str = "block") -> Path:
    """``model`` with its experts in FP8, of one of :data:`FP8_KINDS`, a tensor for each projection of all experts."""
    block, scale_fmt, scheme = FP8_KINDS[kind]
    model.save_pretrained(folder)
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        tensors |= _fp8(name, tensor, kind) if ".experts." in name else {name: tensor}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": scheme,
        "weight_block_size": block,
        "scale_fmt": scale_fmt,
        # transformers runs such layers by a kernel that it downloads
        "modules_to_not_convert": [r".*\.self_attn", "lm_head", r".*\.mlp\.gate"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def fp8_experts(config: Any, *, has_gate: bool = True, **settings: Any) -> nn.Module:
    """The module that transformers puts in the place of a block's experts of an FP8 checkpoint, with random values."""
    kind = use_experts_implementation(
        # transformers wraps the class itself each time, which this process shares
        experts_class=type("FP8Experts", (FP8Experts,), {}),
        experts_interface=ALL_FP8_EXPERTS_FUNCTIONS,
        has_gate=has_gate,
    )
    module: nn.Module = kind(config, has_gate=has_gate, **settings)
    generator = torch.Generator().manual_seed(0)
    for tensor in module.parameters():
        tensor.data.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
    return module


def _fp8(name: str, weight: Tensor, kind: str) -> dict[str, Tensor]:
    """One matrix of one expert, and its scales."""
    block = FP8_KINDS[kind][0]
    key = kMxfp8Static if kind == "mxfp8" else kFp8StaticTensorSym if block is None else kFp8Static128BlockSym
    values, scale = (tensor[0] for tensor in quantize_weight(weight.float()[None], key)[:2])
    if block is None:
        scale = scale[:, None]
    elif kind == "mxfp8":
        scale = scale.view(torch.float8_e8m0fnu)
    elif kind == "block_e8m0":
        wide = torch.exp2(scale.log2().ceil())
        values = (weight.float() / wide.repeat_interleave(128, 0).repeat_interleave(128, 1)).to(torch.float8_e4m3fn)
        scale = wide.to(torch.float8_e8m0fnu)
    found = {name: values.contiguous(), f"{name}_scale_inv": scale.contiguous()}
    if kind == "tensor_static":
        # gate and up read the same activations
        expert = int(name.split(".")[-3])
        found[name.removesuffix("weight") + "activation_scale"] = torch.tensor(0.01 + 0.001 * expert)
    return found
