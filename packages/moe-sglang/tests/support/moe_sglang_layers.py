"""Layers as SGLang holds them, made of canonical weights."""

from __future__ import annotations

import types
from dataclasses import replace
from typing import Any

import torch
from moe_core import FusedMoEConfig, FusedMoELayer, MoEWeights
from moe_core.testing.data import make_weights
from moe_sglang.kinds import KINDS, Kind
from torch import Tensor

E, TOP_K, HIDDEN, SIZE = 4, 2, 256, 128
#: rows of the table, with and without scales of activations
ROWS = [(row, static) for row, kind in KINDS.items() for static in ((False, True) if kind.static else (False,))]


def row_name(row: tuple[tuple[str, str], bool]) -> str:
    (flag, granularity), static = row
    return f"{flag} {granularity}{' static' if static else ''}"


def config(**changes: Any) -> FusedMoEConfig:
    sizes = {"num_experts": E, "top_k": TOP_K, "hidden_size": HIDDEN, "intermediate_size": SIZE}
    return FusedMoEConfig(**sizes | changes)


def weights_of(row: tuple[str, str], static: bool, layer: FusedMoEConfig, seed: int = 0) -> MoEWeights:
    """Canonical weights of a row of the table, with what SGLang can say of them."""
    kind: Kind = KINDS[row]
    activation = kind.static if static else kind.activation_key
    weights = make_weights(layer, kind.weight_key, activation, seed=seed)
    if kind.weight_key.group_shape.is_per_tensor and weights.w13_scale is not None:
        # one scale for gate and up
        weights = replace(weights, w13_scale=weights.w13_scale[:, :1].expand_as(weights.w13_scale).contiguous())
    if weights.w13_input_scale is not None and weights.w2_input_scale is not None:
        # one scale for all experts
        one = {
            name: getattr(weights, name)[:1].expand(E).contiguous() for name in ("w13_input_scale", "w2_input_scale")
        }
        weights = replace(weights, **one)
    if not kind.weight_key.symmetric and kind.weight_key.packing is not None:
        # 4-bit zero points in 4 bits
        held = {name: getattr(weights, name).clamp(max=15) for name in ("w13_zero_point", "w2_zero_point")}
        weights = replace(weights, **held)
    return replace(weights, shared=True)


def info_of(sglang: types.SimpleNamespace, row: tuple[str, str], weights: MoEWeights) -> Any:
    """What SGLang's quantization method says of such weights."""
    flag, granularity = row
    key = weights.weight_key
    assert key is not None
    named: dict[str, Any] = {flag: True}
    scales = {"w13_scale": weights.w13_scale, "w2_scale": weights.w2_scale}
    if granularity == "tensor":
        scales = {name: scale[:, 0].contiguous() for name, scale in scales.items() if scale is not None}
    named |= scales
    if granularity == "channel":
        named["per_channel_quant"] = flag != "use_int8_w8a16"
    elif granularity == "block":
        named["block_shape"] = [key.group_shape.row, key.group_shape.col]
    elif granularity.startswith("group"):
        named["block_shape"] = [0, key.group_size]
    if weights.w13_zero_point is not None and weights.w2_zero_point is not None:
        pack = _two_rows_in_a_byte if key.packing is not None else (lambda zeros: zeros)
        named |= {"w13_zp": pack(weights.w13_zero_point), "w2_zp": pack(weights.w2_zero_point)}
    if weights.w13_input_scale is not None and weights.w2_input_scale is not None:
        named |= {"a13_scale": weights.w13_input_scale[0], "a2_scale": weights.w2_input_scale[:1]}
    named |= {"b13": weights.w13_bias, "b2": weights.w2_bias}
    return sglang.TritonMoeQuantInfo(weights.w13, weights.w2, **named)


def _two_rows_in_a_byte(zeros: Tensor) -> Tensor:
    return zeros[:, ::2] | zeros[:, 1::2] << 4


def dispatched(sglang: types.SimpleNamespace, tokens: int = 5, *, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Tokens as SGLang's standard dispatcher hands them on."""
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, HIDDEN, generator=generator).to(dtype)
    logits = torch.rand(tokens, E, generator=generator)
    weights, ids = logits.topk(TOP_K)
    return sglang.StandardDispatchOutput(x, None, sglang.StandardTopKOutput(weights, ids.int(), logits))


def runner(sglang: types.SimpleNamespace, **changes: Any) -> Any:
    return sglang.MoeRunnerConfig(**{"num_experts": E, "num_local_experts": E} | changes)


def expected(scheme: str, layer: FusedMoEConfig, weights: MoEWeights, tokens: Any) -> Tensor:
    """What moe-core's own layer makes of the same tokens."""
    topk = tokens.topk_output
    own = FusedMoELayer.from_weights(scheme, layer, weights)
    return own(tokens.hidden_states, topk_weights=topk.topk_weights, topk_ids=topk.topk_ids)
