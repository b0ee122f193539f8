"""Example launches of the shared kernels, for the compile check of every target."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from moe_core.kernels.launch.example import Specimen
from moe_core.kernels.ops.activation import fused_activation
from moe_core.kernels.ops.align import align_pairs, align_workspaces, local_ids
from moe_core.kernels.ops.permute import batch_tokens, gather_rows
from moe_core.kernels.ops.quantize import activate_and_quantize, quantize_activation, quantize_activation_asymmetric
from moe_core.kernels.ops.reduce import reduce_pairs
from moe_core.kernels.ops.routing import fused_route
from moe_core.spec.activation import ActivationParams, MoEActivation
from moe_core.spec.device import DeviceInfo
from moe_core.spec.quant_key import (
    kFp8Dynamic64Sym,
    kFp8Dynamic128Sym,
    kFp8DynamicTensorSym,
    kFp8DynamicTokenSym,
    kFp8StaticTensorSym,
    kInt8DynamicTokenAsym,
    kInt8DynamicTokenSym,
    kMxfp8Dynamic,
)
from moe_core.spec.routing import RoutingConfig, RoutingMethodType


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def specimens(target: DeviceInfo) -> Iterator[Specimen]:
    """Yield launches of routing, activation, quantization and permutation.

    The shapes are those of real models.

    Args:
        target: The device to compile for.

    Returns:
        The launches that the target supports.
    """
    yield from _routing()
    yield from _activation()
    if target.kind == "hip" or target.capability >= 89:  # e4m3 conversions
        yield from _e4m3()
    yield from _int8()
    yield from _permute()


def _routing() -> Iterator[Specimen]:
    methods = RoutingMethodType
    cases = {
        "deepseek-v3": (RoutingConfig.from_method(methods.DeepSeekV3, num_expert_group=8, topk_group=4), 256, 8),
        "deepseek-v2": (RoutingConfig(renormalize=False, num_expert_group=8, topk_group=3), 160, 6),
        "qwen3": (RoutingConfig.from_method(methods.RenormalizeNaive), 128, 8),
        "gpt-oss": (RoutingConfig.from_method(methods.Renormalize), 128, 4),
        "deepseek-v4": (RoutingConfig.from_method(methods.DeepseekV4), 384, 6),
        "largest": (RoutingConfig.from_method(methods.MiniMax2), 1024, 32),
    }
    for name, (config, experts, top_k) in cases.items():
        bias = _meta(experts, dtype=torch.float32) if config.has_correction_bias else None
        for tokens, dtype in ((64, torch.float32), (64, torch.bfloat16), (8192, torch.bfloat16)):
            yield Specimen(
                f"route {name} {tokens} {str(dtype).removeprefix('torch.')}",
                partial(
                    fused_route,
                    _meta(tokens, experts, dtype=dtype),
                    top_k=top_k,
                    config=config,
                    correction_bias=bias,
                    backend="triton",
                ),
            )


def _activation() -> Iterator[Specimen]:
    for activation in MoEActivation:
        columns = 4096 if activation.is_gated else 2048
        for limit in (None, 10.0):
            yield Specimen(
                f"activation {activation.value}{' limit' if limit else ''}",
                partial(
                    fused_activation,
                    activation,
                    _meta(4096, columns),
                    params=ActivationParams(limit=limit),
                    bias=_meta(8, columns),
                    row_experts=_meta(4096, dtype=torch.int32),
                    row_counts=_meta(1, dtype=torch.int32),
                    backend="triton",
                ),
            )


def _e4m3() -> Iterator[Specimen]:
    keys = {
        "token": kFp8DynamicTokenSym,
        "1x128": kFp8Dynamic128Sym,
        "1x64": kFp8Dynamic64Sym,
        "mxfp8": kMxfp8Dynamic,
        "tensor": kFp8DynamicTensorSym,
        "static": kFp8StaticTensorSym,
    }
    for name, key in keys.items():
        static = _meta(1, dtype=torch.float32) if key.is_static else None
        for rows in (16, 8192):
            yield Specimen(
                f"quantize e4m3 {name} {rows}",
                partial(quantize_activation, _meta(rows, 7168), key, static_scale=static, backend="triton"),
            )
        yield Specimen(
            f"silu and e4m3 {name}",
            partial(
                activate_and_quantize,
                MoEActivation.SILU,
                _meta(8, 512, 4096),
                key,
                row_counts=_meta(8, dtype=torch.int32),
                static_scale=static,
                backend="triton",
            ),
        )


def _int8() -> Iterator[Specimen]:
    for columns in (2048, 7168, 32768):
        yield Specimen(
            f"quantize int8 token {columns}",
            partial(quantize_activation, _meta(4096, columns), kInt8DynamicTokenSym, backend="triton"),
        )
        yield Specimen(
            f"quantize int8 asymmetric {columns}",
            partial(quantize_activation_asymmetric, _meta(4096, columns), kInt8DynamicTokenAsym, backend="triton"),
        )
    yield Specimen(
        "silu and int8 token",
        partial(activate_and_quantize, MoEActivation.SILU, _meta(4096, 4096), kInt8DynamicTokenSym, backend="triton"),
    )


def _permute() -> Iterator[Specimen]:
    codes = _meta(512, 7168, dtype=torch.uint8)
    scale = _meta(512, 56, dtype=torch.float32)
    yield Specimen(
        "gather rows",
        partial(
            gather_rows,
            _meta(512, 7168),
            _meta(4096, dtype=torch.int32),
            per_row=8,
            count=_meta(1, dtype=torch.int32),
            backend="triton",
        ),
    )
    yield Specimen(
        "batch tokens",
        partial(
            batch_tokens,
            codes,
            _meta(512, 8, dtype=torch.int32),
            num_experts=32,
            max_tokens=512,
            scale=scale,
            expert_map=_meta(256, dtype=torch.int32),
            backend="triton",
        ),
    )
    for tokens in (8, 8192):
        ids = _meta(tokens, 8, dtype=torch.int32)
        specs = align_workspaces(ids.numel(), 256, 128)
        workspace = {spec.name: _meta(*spec.shape, dtype=spec.dtype) for spec in specs}
        yield Specimen(f"align pairs {tokens}", partial(align_pairs, ids, 256, 128, workspace=workspace))
    for ids_dtype in (torch.int32, torch.int64):
        ids, out = _meta(512, 8, dtype=ids_dtype), _meta(512, 8, dtype=torch.int32)
        mapped = partial(local_ids, ids, 32, out, none=32, expert_map=_meta(256, dtype=torch.int32))
        yield Specimen(f"local ids {ids_dtype}", mapped)
    yield Specimen(
        "reduce rows",
        partial(
            reduce_pairs,
            _meta(36864, 7168),
            _meta(512, 8, dtype=torch.int32),
            256,
            _meta(512, 7168),
            topk_weights=_meta(512, 8, dtype=torch.float32),
            rows=_meta(4096, dtype=torch.int32),
        ),
    )
