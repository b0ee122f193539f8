"""Launches of kernels outside the fused layer, in the sizes of real models, for :mod:`moe_kit.compile`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from moe_core.kernels.ops.activation import fused_activation
from moe_core.kernels.ops.align import align_pairs, align_workspaces, local_ids
from moe_core.kernels.ops.dispatch import count_destinations, held_experts, pack_all, pack_tokens, unpack
from moe_core.kernels.ops.exchange import (
    ExchangeBuffer,
    ExchangeShape,
    await_tokens,
    combine_results,
    push_results,
    push_tokens,
)
from moe_core.kernels.ops.permute import batch_tokens, gather_rows
from moe_core.kernels.ops.quantize import activate_and_quantize, quantize_activation, quantize_activation_asymmetric
from moe_core.kernels.ops.quantize_weights import quantize_weights
from moe_core.kernels.ops.reduce import reduce_pairs
from moe_core.kernels.ops.routing import fused_route
from moe_core.kernels.ops.token_layout import TokenCode, TokenLayout
from moe_core.parallel.placement.tables import ReplicaTables
from moe_core.spec.activation import ActivationParams, MoEActivation
from moe_core.spec.device import DeviceInfo
from moe_core.spec.numerics import FP8_E4M3
from moe_core.spec.quant_key import (
    QuantKey,
    kFp8Dynamic64Sym,
    kFp8Dynamic128Sym,
    kFp8DynamicTensorSym,
    kFp8DynamicTokenSym,
    kFp8Static128BlockE8M0Sym,
    kFp8Static128BlockSym,
    kFp8StaticChannelSym,
    kFp8StaticTensorSym,
    kInt8DynamicTokenAsym,
    kInt8DynamicTokenSym,
    kInt8StaticChannelSym,
    kInt8StaticTensorSym,
    kMxfp4Static,
    kMxfp8Dynamic,
    kMxfp8Static,
)
from moe_core.spec.routing import RoutingConfig, RoutingMethodType
from moe_core.testing.launches import Example
from torch import Tensor

#: tokens, top-k, experts and ranks of an exchange; too many tokens for launches whose programs each signal completion
TOKENS, TOP_K, EXPERTS, RANKS, MANY = 64, 8, 256, 8, 2048
ACTIVATION_KEYS = (
    *(kFp8DynamicTokenSym, kFp8Dynamic128Sym, kFp8Dynamic64Sym, kMxfp8Dynamic, kFp8DynamicTensorSym),
    *(kFp8StaticTensorSym, kInt8DynamicTokenSym),
)
WEIGHT_KEYS = (
    *(kInt8StaticChannelSym, kInt8StaticTensorSym, kFp8StaticTensorSym, kFp8StaticChannelSym, kFp8Static128BlockSym),
    *(kFp8Static128BlockE8M0Sym, kFp8Static128BlockSym.with_group(64, 64), kMxfp8Static, kMxfp4Static),
)
#: routing, experts and top-k: DeepSeek-V3, DeepSeek-V2, Qwen3, gpt-oss, DeepSeek-V4, and the largest sizes
ROUTINGS = (
    (RoutingConfig.from_method(RoutingMethodType.DeepSeekV3, num_expert_group=8, topk_group=4), 256, 8),
    (RoutingConfig(renormalize=False, num_expert_group=8, topk_group=3), 160, 6),
    (RoutingConfig.from_method(RoutingMethodType.RenormalizeNaive), 128, 8),
    (RoutingConfig.from_method(RoutingMethodType.Renormalize), 128, 4),
    (RoutingConfig.from_method(RoutingMethodType.DeepseekV4), 384, 6),
    (RoutingConfig.from_method(RoutingMethodType.MiniMax2), 1024, 32),
)


def floats(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return a meta tensor."""
    return torch.empty(shape, dtype=dtype, device="meta")


def ints(*shape: int) -> Tensor:
    """Return an int32 meta tensor."""
    return floats(*shape, dtype=torch.int32)


def op_examples(target: DeviceInfo) -> Iterator[Example]:
    """Yield the launches that a target supports.

    Args:
        target: Device to compile for.

    Yields:
        The examples.
    """
    e4m3 = target.kind == "hip" or target.capability >= 89

    def supported(keys: tuple[QuantKey, ...]) -> Iterator[QuantKey]:
        return (key for key in keys if e4m3 or key.dtype is not FP8_E4M3)

    for config, experts, top_k in ROUTINGS:
        bias = floats(experts, dtype=torch.float32) if config.has_correction_bias else None
        for tokens, dtype in ((64, torch.float32), (64, torch.bfloat16), (8192, torch.bfloat16)):
            logits, more = floats(tokens, experts, dtype=dtype), {"correction_bias": bias, "backend": "triton"}
            yield Example(f"route {experts} {tokens}", partial(fused_route, logits, top_k=top_k, config=config, **more))
    for activation in MoEActivation:
        columns = 4096 if activation.is_gated else 2048
        rows = {"bias": floats(8, columns), "row_experts": ints(4096), "row_counts": ints(1), "backend": "triton"}
        for limit in (None, 10.0):
            params = ActivationParams(limit=limit)
            call = partial(fused_activation, activation, floats(4096, columns), params=params, **rows)
            yield Example(f"activation {activation.value} {limit}", call)
    for key in supported(ACTIVATION_KEYS):
        static = {"static_scale": floats(1, dtype=torch.float32)} if key.is_static else {}
        is_int8 = key is kInt8DynamicTokenSym
        sizes = ((4096, 2048), (4096, 7168), (4096, 32768)) if is_int8 else ((16, 7168), (8192, 7168))
        for rows, columns in sizes:
            call = partial(quantize_activation, floats(rows, columns), key, backend="triton", **static)
            yield Example(f"quantize {key} {rows} {columns}", call)
        x, counts = (floats(4096, 4096), None) if is_int8 else (floats(8, 512, 4096), ints(8))
        call = partial(activate_and_quantize, MoEActivation.SILU, x, key, row_counts=counts, backend="triton", **static)
        yield Example(f"silu and {key}", call)
    for columns in (2048, 7168, 32768):
        x = floats(4096, columns)
        call = partial(quantize_activation_asymmetric, x, kInt8DynamicTokenAsym, backend="triton")
        yield Example(f"quantize asymmetric {columns}", call)
    for key in supported(WEIGHT_KEYS):
        for rows, cols in ((4096, 7168), (7168, 2048), (2 * 139, 173)):
            if key != kMxfp4Static or cols % 32 == 0:
                # sm120, Triton 3.6: blocks whose columns are loaded one by one spill 48 bytes
                call = partial(quantize_weights, floats(256, rows, cols), key, parts=2, backend="triton")
                yield Example(f"quantize weights {key} {rows}x{cols}", call, 64 if cols % 16 else 0)
    yield from rows_examples()
    yield from exchange_examples(
        [None, *supported((kInt8DynamicTokenSym, *ACTIVATION_KEYS[:2], kMxfp8Dynamic))], target
    )


def rows_examples() -> Iterator[Example]:
    """Yield launches that sort, move and sum rows.

    Yields:
        The examples.
    """
    moved = {"count": ints(1), "backend": "triton"}
    yield Example("gather rows", partial(gather_rows, floats(512, 7168), ints(4096), per_row=8, **moved))
    codes, scale = floats(512, 7168, dtype=torch.uint8), floats(512, 56, dtype=torch.float32)
    batch = partial(batch_tokens, codes, ints(512, 8), num_experts=32, max_tokens=512, scale=scale)
    yield Example("batch tokens", partial(batch, expert_map=ints(256), backend="triton"))
    for tokens in (8, 8192):
        ids = ints(tokens, 8)
        specs = align_workspaces(ids.numel(), 256, 128)
        workspace = {spec.name: floats(*spec.shape, dtype=spec.dtype) for spec in specs}
        yield Example(f"align pairs {tokens}", partial(align_pairs, ids, 256, 128, workspace=workspace))
    for dtype in (torch.int32, torch.int64):
        ids = floats(512, 8, dtype=dtype)
        mapped = partial(local_ids, ids, 32, ints(512, 8), none=32, expert_map=ints(256))
        yield Example(f"local ids {dtype}", mapped)
    weighted = {"topk_weights": floats(512, 8, dtype=torch.float32), "rows": ints(4096)}
    reduced = partial(reduce_pairs, floats(36864, 7168), ints(512, 8), 256, floats(512, 7168), **weighted)
    yield Example("reduce rows", reduced)


def exchange_examples(keys: list[QuantKey | None], target: DeviceInfo) -> Iterator[Example]:
    """Yield launches of dispatch and combine: all-to-all, all-gather and low latency.

    Args:
        keys: Quantization of tokens that are sent.
        target: Device to compile for; only NVIDIA GPUs wait for each other.

    Yields:
        The examples.
    """
    ids, weights = ints(TOKENS, TOP_K), floats(TOKENS, TOP_K, dtype=torch.float32)
    tables = ReplicaTables(ints(EXPERTS, RANKS), ints(EXPERTS), 32)
    yield Example("count destinations", partial(count_destinations, ids, tables, ranks=RANKS))
    yield Example("held experts", partial(held_experts, ids, tables, (32, 32)))
    for key in keys:
        for columns in (2880, 7168):
            if key is not None and columns % max(key.group_size, 1):
                continue
            code, x = TokenCode(columns, torch.bfloat16, key), floats(TOKENS, columns)
            sent, name = (x, ids, weights, tables, code), f"{key} {columns}"
            yield Example(f"pack {name}", partial(pack_tokens, *sent, ints(TOKENS, RANKS), ints(RANKS), rows=200))
            yield Example(f"pack all {name}", partial(pack_all, *sent, rows=200))
            rows = floats(200, TokenLayout.rows(code, TOP_K).nbytes, dtype=torch.uint8)
            yield Example(f"unpack {name}", partial(unpack, rows, code, TOP_K, held=(32, 32)))
            for capacity in (TOKENS, MANY) if target.kind == "cuda" else ():
                buffer = ExchangeBuffer.meta(ExchangeShape(RANKS, capacity, columns, TOP_K, torch.bfloat16))
                yield Example(f"push {capacity} tokens {name}", partial(push_tokens, buffer, *sent))
    if target.kind != "cuda":
        return
    for columns, dtype in ((2880, torch.bfloat16), (7168, torch.bfloat16), (7168, torch.float32)):
        for capacity in (TOKENS, MANY):
            shape = ExchangeShape(RANKS, capacity, columns, TOP_K, dtype)
            buffer, name = ExchangeBuffer.meta(shape), f"{capacity} results {columns} {dtype}"
            results, experts = floats(shape.rows, columns, dtype=dtype), ints(shape.rows, TOP_K)
            yield Example(f"push {name}", partial(push_results, buffer, results, experts))
            combined = partial(combine_results, buffer, ints(capacity, RANKS), floats(capacity, columns, dtype=dtype))
            yield Example(f"combine {name}", partial(combined, timeout=300))
    yield Example("await tokens", partial(await_tokens, buffer, timeout=300))
