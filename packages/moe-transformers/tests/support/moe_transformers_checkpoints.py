"""Tiny models of transformers as checkpoints of the tools: experts and linear layers quantized, and their exact values.

A model is saved by transformers itself, in its own names; then each matrix takes the form in which a tool keeps it.
Beside the folder stands another one, with the values that the codes stand for, in float32.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import moe_core as mc
import torch
from moe_core_transformers import tiny_config
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

K, N, E, TOP_K, VOCABULARY = 64, 96, 6, 2, 64
#: experts, and what a tool quantizes beside them
LINEAR = re.compile(r"\.experts\.|self_attn\.[a-z_]+_proj|kv_b_proj|kv_a_proj|shared_expert|in_proj|out_proj")

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Format:
    """How a tool keeps one matrix [rows, cols].

    ``key`` of its values, ``config``: the entry of config.json, ``store``: (codes, scale, zero points), as
    :func:`moe_core.quantize_weight` makes them of the matrix -> tensors by suffix.
    """

    key: mc.QuantKey
    config: Mapping[str, Any]
    store: Callable[[Tensor, Tensor, Tensor | None], Tensors]
    files: Mapping[str, Any] = field(default_factory=dict)

    def quantize(self, matrix: Tensor) -> tuple[Tensors, Tensor]:
        """The stored tensors of ``matrix``, and the values that they stand for."""
        values, scale, zeros, _ = mc.quantize_weight(matrix.float()[None], self.key)
        exact = mc.dequantize_weight(values, scale, self.key, zero_point=zeros, cols=matrix.shape[1])
        return self.store(values[0], scale[0], None if zeros is None else zeros[0]), exact[0]


def _compressed(fmt: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"format": fmt, "targets": ["Linear"], "weights": {"symmetric": True, "dynamic": False, **weights}}
    group["input_activations"] = inputs and {"symmetric": True, "dynamic": True, **inputs}
    return {"quant_method": "compressed-tensors", "format": fmt, "config_groups": {"group_0": group}, "ignore": []}


def _packed_codes(values: Tensor, dtype: torch.dtype) -> Tensor:
    """4-bit codes in bytes, even columns low, as words of ``dtype``."""
    return values.contiguous().view(dtype)


def _gptq(values: Tensor, scale: Tensor, zeros: Tensor | None) -> Tensors:
    columns = values.shape[1] * 2
    groups = scale.shape[1]
    return {
        "qweight": _gptq_words(values),
        "qzeros": torch.full((groups, scale.shape[0] // 8), 0x77777777, dtype=torch.int32),
        "scales": scale.mT.contiguous(),
        "g_idx": torch.arange(columns, dtype=torch.int32) // (columns // groups),
    }


def _gptq_words(values: Tensor) -> Tensor:
    """[rows, cols / 2] bytes -> [cols / 8, rows] words, whose lowest bits are the first column's."""
    return _packed_codes(values, torch.int32).mT.contiguous()


#: which output each of eight codes in a word of AWQ is
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def _awq_words(codes: Tensor) -> Tensor:
    """[a, rows] codes -> [a, rows / 8] words."""
    parts = codes.int().unflatten(1, (-1, 8))[..., list(_AWQ_ORDER)]
    shifted = parts.long() << (4 * torch.arange(8))
    words = shifted.sum(dim=-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def _awq(values: Tensor, scale: Tensor, zeros: Tensor | None) -> Tensors:
    assert zeros is not None
    codes = torch.stack((values & 15, values >> 4), dim=-1).flatten(1)
    return {"qweight": _awq_words(codes.mT), "qzeros": _awq_words(zeros.mT), "scales": scale.mT.contiguous()}


_FP8_TOKEN = {"type": "float", "num_bits": 8, "strategy": "token"}
_INT8_TOKEN = {"type": "int", "num_bits": 8, "strategy": "token"}
_INT4_GROUP = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 32}
_MX_GROUP = {"type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
_INT4_32 = mc.kInt4Static.with_group(1, 32).with_scale_dtype(torch.float16)
_QUARK_WEIGHT = {"dtype": "fp8_e4m3", "qscheme": "per_channel", "ch_axis": 0, "is_dynamic": False, "symmetric": True}
_QUARK_INPUT = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": True, "symmetric": True}


FORMATS: dict[str, Format] = {
    "fp8 block": Format(
        mc.kFp8Static128BlockSym,
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        lambda v, s, z: {"weight": v, "weight_scale_inv": s},
    ),
    "compressed-tensors fp8": Format(
        mc.kFp8StaticChannelSym,
        _compressed("float-quantized", {"type": "float", "num_bits": 8, "strategy": "channel"}, _FP8_TOKEN),
        lambda v, s, z: {"weight": v, "weight_scale": s},
    ),
    "compressed-tensors int8": Format(
        mc.kInt8StaticChannelSym,
        _compressed("int-quantized", {"type": "int", "num_bits": 8, "strategy": "channel"}, _INT8_TOKEN),
        lambda v, s, z: {"weight": v, "weight_scale": s},
    ),
    "compressed-tensors w4a16": Format(
        _INT4_32.with_scale_dtype(torch.bfloat16),
        _compressed("pack-quantized", _INT4_GROUP),
        lambda v, s, z: {
            "weight_packed": _packed_codes(v, torch.int32),
            "weight_scale": s,
            "weight_shape": torch.tensor([v.shape[0], v.shape[1] * 2]),
        },
    ),
    "compressed-tensors w4a8": Format(
        mc.kInt4W4A8StaticGroup32Sym,
        _compressed(
            "int-quantized", {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 32}, _INT8_TOKEN
        ),
        lambda v, s, z: {"weight": v, "weight_scale": s},
    ),
    "compressed-tensors mxfp8": Format(
        mc.kMxfp8Static,
        _compressed(
            "mxfp8-quantized",
            {"num_bits": 8, **_MX_GROUP},
            {"num_bits": 8, **_MX_GROUP},
        ),
        lambda v, s, z: {"weight": v, "weight_scale": s},
    ),
    "compressed-tensors mxfp4": Format(
        mc.kMxfp4Static,
        _compressed(
            "mxfp4-pack-quantized",
            {"num_bits": 4, **_MX_GROUP},
        ),
        lambda v, s, z: {"weight_packed": v, "weight_scale": s},
    ),
    "modelopt fp8": Format(
        mc.kFp8StaticTensorSym,
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"], "producer": {"name": "modelopt"}},
        lambda v, s, z: {"weight": v, "weight_scale": s.reshape(()), "input_scale": torch.tensor(0.05)},
    ),
    "gptq": Format(
        _INT4_32, {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}, _gptq
    ),
    "awq": Format(
        mc.kInt4Static32Asym.with_scale_dtype(torch.float16),
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
        _awq,
    ),
    "auto-round": Format(
        _INT4_32,
        {
            "quant_method": "auto-round",
            "packing_format": "auto_round:auto_gptq",
            "bits": 4,
            "group_size": 32,
            "sym": True,
            "data_type": "int",
        },
        lambda v, s, z: {name: t for name, t in _gptq(v, s, z).items() if name != "g_idx"},
    ),
    "quark": Format(
        mc.kFp8StaticChannelSym,
        {
            "quant_method": "quark",
            "global_quant_config": {"weight": _QUARK_WEIGHT, "input_tensors": _QUARK_INPUT, "output_tensors": None},
            "layer_quant_config": {},
            "layer_type_quant_config": {},
            "exclude": [],
            "export": {"pack_method": "reorder", "weight_format": "real_quantized"},
        },
        lambda v, s, z: {"weight": v, "weight_scale": s.reshape(-1)},
    ),
    "mxfp4": Format(
        mc.kMxfp4Static,
        {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
        lambda v, s, z: {"_blocks": v.unflatten(1, (-1, 16)), "_scales": s},
    ),
}


def tiny_causal_model(model_type: str, seed: int = 0, **entries: Any) -> PreTrainedModel:
    """A model of two layers that generates, with random weights of such a size that no layer drowns another."""
    sizes = {"hidden_size": K, "vocab_size": VOCABULARY, **entries}
    config = tiny_config(model_type, **{**_sizes_of(model_type), **sizes})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if tensor.dim() > 1:
                tensor.normal_(0, tensor.shape[-1] ** -0.5)
            elif "norm" in name:
                tensor.uniform_(0.5, 1.5)
    return model.eval()


def _sizes_of(model_type: str) -> dict[str, Any]:
    own = set(tiny_config(model_type).to_dict())
    counts = ("num_experts", "num_local_experts", "n_routed_experts")
    wide = ("moe_intermediate_size", "intermediate_size", "moe_shared_expert_intermediate_size")
    heads = {"head_dim": 32, "q_lora_rank": 32, "kv_lora_rank": 32, "v_head_dim": 32, "qk_nope_head_dim": 32}
    # DeepSeek-V3 and GLM choose experts of the better groups
    heads |= {"n_group": 2, "topk_group": 1}
    # Nemotron-H's layers without experts
    heads |= {"ssm_state_size": 16, "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "chunk_size": 16}
    found = {**dict.fromkeys(counts, E), **dict.fromkeys(wide, N), **heads, "qk_rope_head_dim": 32}
    return {name: size for name, size in found.items() if name in own}


def write(folder: Path, model: PreTrainedModel, formats: Callable[[str], Format | None]) -> tuple[Path, Path]:
    """``model`` as a checkpoint, and one with the values of its codes; ``formats``: of a tensor, None to leave it.

    Its config.json has the entry of the first format that there is.
    """
    plain, quantized = folder / "plain", folder / "quantized"
    model.save_pretrained(plain)
    quantized.mkdir()
    tensors = load_file(plain / "model.safetensors")
    stored: Tensors = {}
    used: list[Format] = []
    for name, tensor in list(tensors.items()):
        form = formats(name)
        if form is None or tensor.dim() < 2:
            stored[name] = tensor
            continue
        used.append(form)
        if tensor.dim() == 3:  # stacked experts of gpt-oss: [E, cols, rows]
            parts, exact = zip(*(form.quantize(matrix.mT) for matrix in tensor), strict=True)
            stored.update({name + suffix: torch.stack([one[suffix] for one in parts]) for suffix in parts[0]})
            tensors[name] = torch.stack([matrix.mT for matrix in exact]).contiguous()
        else:
            parts, exact = form.quantize(tensor)
            base = name.removesuffix(".weight")
            stored.update({f"{base}.{suffix}": part for suffix, part in parts.items()})
            tensors[name] = exact
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, quantized / "model.safetensors")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, plain / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = dict(used[0].config)
    (quantized / "config.json").write_text(json.dumps(config))
    return quantized, plain


def checkpoint(folder: Path, model_type: str, form: str, **entries: Any) -> tuple[Path, Path]:
    """A tiny model with all its linear layers in the format ``form``: its folder, and that of the exact values."""

    def of(name: str) -> Format | None:
        return FORMATS[form] if LINEAR.search(name) and not name.endswith("bias") else None

    def experts_alone(name: str) -> Format | None:
        return of(name) if ".experts." in name else None

    return write(folder, tiny_causal_model(model_type, **entries), experts_alone if form == "mxfp4" else of)


def completed(case: Path, folder: Path) -> tuple[Path, PreTrainedModel]:
    """A copy of a case with random weights for what it leaves out, and the model that has these."""
    config = AutoConfig.from_pretrained(case)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, tensor in model.named_parameters():
        with torch.no_grad():
            tensor.normal_(0, tensor.shape[-1] ** -0.5 if tensor.dim() > 1 else 1.0)
            if "norm" in name:
                tensor.fill_(1.0)
    plain = folder / "plain"
    model.save_pretrained(plain)
    stored = load_file(case / "model.safetensors")
    # what stands for the rest of a model is zeros, to keep cases small
    router = {name: tensor for name, tensor in stored.items() if ".experts." not in name and bool(tensor.any())}
    whole = {name: tensor for name, tensor in load_file(plain / "model.safetensors").items() if ".experts." not in name}
    whole.update({name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in router.items()})
    experts = {name: tensor for name, tensor in stored.items() if ".experts." in name}
    quantized = folder / "quantized"
    shutil.copytree(case, quantized, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file({**whole, **experts}, quantized / "model.safetensors")
    # names of the checkpoint become those of the model as transformers does it
    left = {n: t for n, t in load_file(plain / "model.safetensors").items() if ".experts." in n}
    save_file({**whole, **left}, plain / "model.safetensors")
    return quantized, AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)


def logits(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """[batch, tokens, vocabulary] in float64."""
    with torch.no_grad():
        return model(tokens, use_cache=False).logits.double()


def tokens(batch: int = 2, count: int = 9) -> Tensor:
    return torch.randint(0, VOCABULARY, (batch, count), generator=torch.Generator().manual_seed(5))
