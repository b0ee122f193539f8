"""Checkpoint formats as vLLM loads them: its config, the parameters' tensors, and the same weights for moe-core."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import moe_core as mc
import torch
from moe_core.api.engines import select_kernel
from torch import Tensor
from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.model_executor.layers.quantization.moe_wna16 import MoeWNA16Config
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config
from vllm_layers import SMALL, E, K, N, Sizes

GROUP = 64


def quantize_fp8(x: Tensor, scale: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """vLLM's compiled operator: codes of ``x`` by a given scale."""
    return (x.float() / scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn), scale


@dataclass(frozen=True)
class Loaded:
    """``tensors`` by the names of vLLM's parameters; ``weights``: the same, canonical."""

    tensors: Mapping[str, Tensor]
    weights: mc.MoEWeights


@dataclass(frozen=True)
class Random:
    """Random weights of a layer, on a device."""

    sizes: Sizes = SMALL
    device: str = "cpu"
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "generator", torch.Generator(self.device).manual_seed(0))

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, device=self.device)

    def quantized(self, weight_key: mc.QuantKey, activation_key: mc.QuantKey | None) -> mc.MoEWeights:
        """By moe-core."""
        count, inter, hidden = self.sizes.experts, self.sizes.intermediate, self.sizes.hidden
        w13 = self.normal(count, 2 * inter, hidden) / hidden**0.5
        w2 = self.normal(count, hidden, inter) / inter**0.5
        weights = mc.quantize_moe_weights(w13, w2, gated=True, weight_key=weight_key)
        return replace(weights, activation_key=activation_key)


@dataclass(frozen=True)
class Format:
    """A format: vLLM's config, what is loaded, and what else the layer is (arguments of its config)."""

    scheme: str
    config: Callable[[], Any]
    make: Callable[[Random], Loaded]
    layer: Mapping[str, Any] = field(default_factory=dict)

    def load(self, sizes: Sizes = SMALL, device: str = "cpu") -> Loaded:
        """Random weights, the same ones in each call."""
        return self.make(Random(sizes, device))


def fp8_block(random: Random) -> Loaded:
    weights = random.quantized(mc.kFp8Static128BlockSym, mc.kFp8Dynamic128Sym)
    return Loaded(
        {
            "w13_weight": weights.w13,
            "w2_weight": weights.w2,
            "w13_weight_scale_inv": weights.w13_scale,
            "w2_weight_scale_inv": weights.w2_scale,
        },
        weights,
    )


def fp8_tensor(random: Random, static: bool) -> Loaded:
    """Gate and up have scales of their own, of which vLLM keeps the larger."""
    weights = random.quantized(mc.kFp8StaticTensorSym, mc.kFp8StaticTensorSym if static else mc.kFp8DynamicTensorSym)
    tensors = {
        "w13_weight": weights.w13.clone(),
        "w2_weight": weights.w2,
        "w13_weight_scale": weights.w13_scale,
        "w2_weight_scale": weights.w2_scale.reshape(E),
    }
    largest = weights.w13_scale.amax(dim=1, keepdim=True).expand(E, 2).contiguous()
    halves = weights.w13.view(E, 2, N, K).half() * weights.w13_scale.half()[:, :, None, None]
    w13, _ = quantize_fp8(halves, largest[:, :, None, None])
    inputs = {}
    if static:
        inputs = {"w13_input_scale": torch.full((E,), 0.01), "w2_input_scale": torch.full((E,), 0.02)}
    return Loaded(
        tensors | inputs,
        mc.MoEWeights(
            weight_key=weights.weight_key,
            activation_key=weights.activation_key,
            w13=w13.reshape(E, 2 * N, K),
            w2=weights.w2,
            w13_scale=largest,
            w2_scale=weights.w2_scale,
            **inputs,
        ),
    )


def named(weights: mc.MoEWeights, suffix: str) -> Loaded:
    """Weights and scales as they are."""
    tensors = {}
    for name in ("w13", "w2"):
        tensors[f"{name}_weight{suffix}"] = getattr(weights, name)
        tensors[f"{name}_weight_scale"] = getattr(weights, f"{name}_scale")
    return Loaded(tensors, weights)


def packed(weights: mc.MoEWeights) -> Loaded:
    """compressed-tensors' integers: eight (four) to a word along K; zero points to a word along N."""
    tensors = {}
    for name in ("w13", "w2"):
        tensors[f"{name}_weight_packed"] = getattr(weights, name).contiguous().view(torch.int32)
        tensors[f"{name}_weight_scale"] = getattr(weights, f"{name}_scale")
        zero_point = getattr(weights, f"{name}_zero_point")
        if zero_point is not None:
            tensors[f"{name}_weight_zero_point"] = packed_rows(zero_point, 4)
    return Loaded(tensors, weights)


def packed_rows(codes: Tensor, bits: int) -> Tensor:
    """[E, rows, groups] -> int32 [E, rows * bits / 32, groups], the first row lowest."""
    per_word = 32 // bits
    experts, rows, groups = codes.shape
    words = codes.to(torch.int64).reshape(experts, rows // per_word, per_word, groups)
    shifts = (torch.arange(per_word) * bits)[None, None, :, None]
    total = (words << shifts).sum(dim=2)
    return torch.where(total >= 2**31, total - 2**32, total).to(torch.int32)


def gptq(weights: mc.MoEWeights) -> Loaded:
    """GPTQ's: words along K first, and rows last."""
    tensors = {}
    for name in ("w13", "w2"):
        tensors[f"{name}_qweight"] = getattr(weights, name).contiguous().view(torch.int32).transpose(1, 2).contiguous()
        tensors[f"{name}_scales"] = getattr(weights, f"{name}_scale").transpose(1, 2).contiguous()
    return Loaded(tensors, weights)


def bytes_of(weights: mc.MoEWeights) -> Loaded:
    """MoeWNA16's, which is canonical but for the zero points."""
    tensors = {}
    for name in ("w13", "w2"):
        tensors[f"{name}_qweight"] = getattr(weights, name)
        tensors[f"{name}_scales"] = getattr(weights, f"{name}_scale")
        zero_point = getattr(weights, f"{name}_zero_point")
        if zero_point is not None:
            pairs = zero_point.reshape(E, -1, 2, zero_point.shape[-1])
            tensors[f"{name}_qzeros"] = (pairs[:, :, 0] | pairs[:, :, 1] << 4).to(torch.uint8)
    return Loaded(tensors, weights)


def gpt_oss(random: Random) -> Loaded:
    """Gate and up rows alternate; biases."""
    count, inter, hidden = random.sizes.experts, random.sizes.intermediate, random.sizes.hidden
    biases = {
        "w13_bias": random.normal(count, 2 * inter).bfloat16(),
        "w2_bias": random.normal(count, hidden).bfloat16(),
    }
    weights = replace(random.quantized(mc.kMxfp4Static, None), **biases)

    def alternate(tensor: Tensor) -> Tensor:
        return tensor.reshape(count, 2, inter, *tensor.shape[2:]).transpose(1, 2).reshape(tensor.shape).contiguous()

    return Loaded(
        {
            "w13_weight": alternate(weights.w13),
            "w13_weight_scale": alternate(weights.w13_scale),
            "w13_bias": alternate(biases["w13_bias"]),
            "w2_weight": weights.w2,
            "w2_weight_scale": weights.w2_scale,
            "w2_bias": biases["w2_bias"],
        },
        weights,
    )


def compressed(weights: dict[str, Any], activations: dict[str, Any] | None, form: str) -> CompressedTensorsConfig:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "format": form}
    return CompressedTensorsConfig.from_config(
        {"format": form, "config_groups": {"group_0": group}, "ignore": [], "quant_method": "compressed-tensors"}
    )


def integers(bits: int, *, symmetric: bool = True, group: int = GROUP) -> mc.QuantKey:
    keys = {
        (4, True): mc.kInt4Static,
        (4, False): mc.kInt4StaticAsym,
        (8, True): mc.kInt8Static,
    }
    return keys[bits, symmetric].with_group(1, group)


def int_args(bits: int, **others: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP, **others}


def int4_in_groups(group: int) -> Format:
    """compressed-tensors' symmetric integers."""
    return Format(
        "wna16",
        lambda: compressed(int_args(4, group_size=group), None, "pack-quantized"),
        lambda random: packed(random.quantized(integers(4, group=group), None)),
    )


MXFP8 = {
    "num_bits": 8,
    "type": "float",
    "symmetric": True,
    "strategy": "group",
    "group_size": 32,
    "scale_dtype": "torch.uint8",
}
GPTQ = {"bits": 4, "group_size": GROUP, "desc_act": False, "sym": True, "quant_method": "gptq"}

FORMATS: dict[str, Format] = {
    "fp8_block": Format(
        "fp8", lambda: Fp8Config(True, activation_scheme="dynamic", weight_block_size=[128, 128]), fp8_block
    ),
    "fp8_tensor_static": Format(
        "fp8", lambda: Fp8Config(True, activation_scheme="static"), lambda random: fp8_tensor(random, True)
    ),
    "fp8_tensor_dynamic": Format(
        "fp8", lambda: Fp8Config(True, activation_scheme="dynamic"), lambda random: fp8_tensor(random, False)
    ),
    "fp8_channel": Format(
        "fp8",
        lambda: compressed(
            {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"},
            {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True},
            "float-quantized",
        ),
        lambda random: named(random.quantized(mc.kFp8StaticChannelSym, mc.kFp8DynamicTokenSym), ""),
    ),
    "mxfp8": Format(
        "fp8",
        lambda: compressed(MXFP8 | {"dynamic": False}, MXFP8 | {"dynamic": True}, "mxfp8-quantized"),
        lambda random: named(random.quantized(mc.kMxfp8Static, mc.kMxfp8Dynamic), ""),
    ),
    "int8_channel": Format(
        "int8",
        lambda: compressed(
            {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
            {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True},
            "int-quantized",
        ),
        lambda random: named(random.quantized(mc.kInt8StaticChannelSym, mc.kInt8DynamicTokenSym), ""),
    ),
    "int4_compressed": int4_in_groups(GROUP),
    "int4_compressed_zero_points": Format(
        "wna16",
        lambda: compressed(int_args(4, symmetric=False), None, "pack-quantized"),
        lambda random: packed(random.quantized(integers(4, symmetric=False), None)),
    ),
    "int8_compressed": Format(
        "wna16",
        lambda: compressed(int_args(8), None, "pack-quantized"),
        lambda random: packed(random.quantized(integers(8), None)),
    ),
    "int4_gptq": Format(
        "wna16", lambda: AutoGPTQConfig.from_config(GPTQ), lambda random: gptq(random.quantized(integers(4), None))
    ),
    "int4_moe_wna16": Format(
        "wna16",
        lambda: MoeWNA16Config("gptq", 4, GROUP, False, False, None, GPTQ),
        lambda random: bytes_of(random.quantized(integers(4), None)),
    ),
    "int4_moe_wna16_zero_points": Format(
        "wna16",
        lambda: MoeWNA16Config("gptq", 4, GROUP, True, False, None, GPTQ),
        lambda random: bytes_of(random.quantized(integers(4, symmetric=False), None)),
    ),
    "mxfp4_gpt_oss": Format(
        "mxfp4", lambda: GptOssMxfp4Config(), gpt_oss, {"activation": "swigluoai", "has_bias": True}
    ),
}


def own_layer(form: Format, loaded: Loaded, device: str, sizes: Sizes = SMALL, **others: Any) -> mc.FusedMoEKernel:
    """The same weights in moe-core, without vLLM."""
    described: dict[str, Any] = {
        "num_experts": sizes.experts,
        "top_k": sizes.top_k,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate,
        "activation": "silu",
    }
    config = mc.FusedMoEConfig(**{**described, **form.layer, **others})
    weights = loaded.weights
    oracle = mc.oracle(form.scheme)
    selection = select_kernel(form.scheme, config, weights.weight_key, weights.activation_key, device=device)
    return oracle.make_kernel(selection, oracle.convert(selection, weights))
