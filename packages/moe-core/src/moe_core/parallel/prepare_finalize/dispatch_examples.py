"""Example launches of dispatch and combine, which the compile session builds."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from moe_core.kernels.launch.example import Specimen
from moe_core.kernels.ops.dispatch import count_destinations, held_experts, pack_all, pack_tokens, unpack
from moe_core.kernels.ops.exchange import (
    ExchangeBuffer,
    ExchangeShape,
    await_tokens,
    combine_results,
    push_results,
    push_tokens,
)
from moe_core.kernels.ops.token_layout import TokenCode, TokenLayout
from moe_core.parallel.placement.tables import ReplicaTables
from moe_core.spec.device import DeviceInfo
from moe_core.spec.quant_key import kFp8Dynamic128Sym, kFp8DynamicTokenSym, kInt8DynamicTokenSym, kMxfp8Dynamic

_TOKENS, _TOP_K, _EXPERTS, _RANKS = 64, 8, 256, 8
#: Too many tokens for launches whose programs each signal completion (``MOST_COUNTED``).
_MANY = 2048


def specimens(target: DeviceInfo) -> Iterator[Specimen]:
    """Yield example launches of every token encoding, in the sizes of real models.

    They cover all-to-all, all-gather and low latency.

    Args:
        target: Device to compile for.

    Returns:
        Iterator over the examples.
    """
    codes = {"bfloat16": None, "int8 token": kInt8DynamicTokenSym}
    if target.kind == "hip" or target.capability >= 89:  # e4m3 conversions
        codes |= {"e4m3 token": kFp8DynamicTokenSym, "e4m3 1x128": kFp8Dynamic128Sym, "mxfp8": kMxfp8Dynamic}
    meta = partial(torch.empty, device="meta")
    tables = ReplicaTables(meta((_EXPERTS, _RANKS), dtype=torch.int32), meta((_EXPERTS,), dtype=torch.int32), 32)
    ids = meta((_TOKENS, _TOP_K), dtype=torch.int32)
    weights = meta((_TOKENS, _TOP_K), dtype=torch.float32)
    counted = partial(count_destinations, ids, tables, ranks=_RANKS)
    yield Specimen("count destinations", counted)
    yield Specimen("held experts", partial(held_experts, ids, tables, (32, 32)))
    for name, key in codes.items():
        for columns in (2880, 7168):
            if key is not None and columns % max(key.group_size, 1):
                continue
            code = TokenCode(columns, torch.bfloat16, key)
            x = meta((_TOKENS, columns), dtype=torch.bfloat16)
            positions = meta((_TOKENS, _RANKS), dtype=torch.int32)
            counts = meta((_RANKS,), dtype=torch.int32)
            packed = partial(pack_tokens, x, ids, weights, tables, code, positions, counts, rows=200)
            yield Specimen(f"pack tokens {name} {columns}", packed)
            yield Specimen(f"pack all {name} {columns}", partial(pack_all, x, ids, weights, tables, code, rows=200))
            rows = meta((200, TokenLayout.rows(code, _TOP_K).nbytes), dtype=torch.uint8)
            yield Specimen(f"unpack {name} {columns}", partial(unpack, rows, code, _TOP_K, held=(32, 32)))
            if target.kind == "cuda":  # only there GPUs wait for each other
                for capacity in (_TOKENS, _MANY):
                    buffer = ExchangeBuffer.meta(ExchangeShape(_RANKS, capacity, columns, _TOP_K, torch.bfloat16))
                    yield Specimen(
                        f"push {capacity} tokens {name} {columns}",
                        partial(push_tokens, buffer, x, ids, weights, tables, code),
                    )
    if target.kind != "cuda":
        return
    for columns, dtype in ((2880, torch.bfloat16), (7168, torch.bfloat16), (7168, torch.float32)):
        for capacity in (_TOKENS, _MANY):
            shape = ExchangeShape(_RANKS, capacity, columns, _TOP_K, dtype)
            buffer = ExchangeBuffer.meta(shape)
            results = meta((shape.rows, columns), dtype=dtype)
            experts = meta((shape.rows, _TOP_K), dtype=torch.int32)
            places = meta((capacity, _RANKS), dtype=torch.int32)
            output = meta((capacity, columns), dtype=dtype)
            named = f"{capacity} results {columns} {dtype}"
            yield Specimen(f"push {named}", partial(push_results, buffer, results, experts))
            yield Specimen(f"combine {named}", partial(combine_results, buffer, places, output, timeout=300))
    yield Specimen("await tokens", partial(await_tokens, buffer, timeout=300))
