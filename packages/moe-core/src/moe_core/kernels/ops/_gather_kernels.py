"""All-gather kernels of `moe_core.kernels.ops.dispatch`: pack and unpack all tokens."""

from __future__ import annotations

import triton
import triton.language as tl

from moe_core.kernels.ops._dispatch_kernels import part, replica, token_codes
from moe_core.kernels.ops._quantize_kernels import store_scale


@triton.jit(do_not_specialize=["tokens", "offset"])
def gather_kernel(
    x,
    ids,
    weights,
    adapters,
    tables,
    out,
    layout,
    tokens,
    columns,
    stride_x,
    offset,
    CODE: tl.constexpr,
    SCALE: tl.constexpr,
    dtype: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    ALIGNED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Quantize GROUPS groups of GROUP columns of token t (program (t, c)) into row t of `out`.

    Expert numbers are those of replicas, rank * stride + local index. Rows after the last token are zero and have no
    experts. See `dispatch_kernel` for layout.
    """
    token = tl.program_id(0)
    chunk = tl.program_id(1)
    hidden_at, hidden_row, scale_at, scale_row, weight_at, weight_row, id_at, id_row, adapter_at, adapter_row = layout
    codes, scale, group, column, _ = token_codes(
        x, token, chunk, tokens, columns, stride_x, CODE, SCALE, dtype, GROUPS, GROUP
    )
    base = out.to(tl.int64)
    row = token.to(tl.int64)
    tl.store(part(base, hidden_at, row, hidden_row, dtype, ALIGNED) + column, codes, mask=column < columns)
    if CODE != "":
        scales = part(base, scale_at, row, scale_row, tl.uint8 if SCALE == "e8m0" else tl.float32, False)
        store_scale(scales + group, scale, group * GROUP < columns, SCALE)
    if chunk == 0:
        slot_index = tl.arange(0, BLOCK_K)
        # one comparison: Triton 3.9's interpreter cannot combine the mask of a scalar with that of a block
        inside = tl.where(token < tokens, slot_index, TOP_K) < TOP_K
        pair = row * TOP_K + slot_index
        slot = replica(ids, token, pair, inside, tables, offset)
        router = tl.load(weights + pair, mask=inside, other=0.0)
        tl.store(part(base, id_at, row, id_row, tl.int32, False) + slot_index, slot, mask=slot_index < TOP_K)
        tl.store(
            part(base, weight_at, row, weight_row, tl.float32, False) + slot_index, router, mask=slot_index < TOP_K
        )
        if adapters is not None:
            adapter = tl.load(adapters + token, mask=token < tokens, other=-1)
            tl.store(part(base, adapter_at, row, adapter_row, tl.int32, False), adapter)


@triton.jit(do_not_specialize=["rows", "first"])
def arrive_kernel(
    packed,
    scales,
    weights,
    experts,
    adapters,
    layout,
    rows,
    groups,
    first,
    held,
    dtype: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Unpack everything but the hidden states of BLOCK packed rows per program.

    Copies scales, router weights, experts and adapters. Expert numbers first .. first + held - 1 become 0 .. held - 1,
    others -1; they are unchanged if `held` is None.
    """
    row = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))[:, None].to(tl.int64)
    _, _, scale_at, scale_row, weight_at, weight_row, id_at, id_row, adapter_at, adapter_row = layout
    base = packed.to(tl.int64)
    if scales is not None:
        for start in range(0, groups, BLOCK_G):
            group = start + tl.arange(0, BLOCK_G)[None, :]
            mask = (row < rows) & (group < groups)
            scale = tl.load(part(base, scale_at, row, scale_row, dtype, False) + group, mask=mask)
            tl.store(scales + row * groups + group, scale, mask=mask)
    slot = tl.arange(0, BLOCK_K)[None, :]
    mask = (row < rows) & (slot < TOP_K)
    router = tl.load(part(base, weight_at, row, weight_row, tl.float32, False) + slot, mask=mask)
    tl.store(weights + row * TOP_K + slot, router, mask=mask)
    expert = tl.load(part(base, id_at, row, id_row, tl.int32, False) + slot, mask=mask, other=-1)
    if held is not None:
        expert = tl.where((expert >= first) & (expert < first + held), expert - first, -1)
    tl.store(experts + row * TOP_K + slot, expert, mask=mask)
    if adapters is not None:
        adapter = tl.load(part(base, adapter_at, row, adapter_row, tl.int32, False), mask=row < rows)
        tl.store(adapters + row, adapter, mask=row < rows)


@triton.jit(do_not_specialize=["pairs", "first", "offset"])
def held_kernel(
    ids, tables, experts, pairs, first, held, offset, TOP_K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Store the local index of each pair's expert.

    It is -1 unless the pair's replica is in first .. first + held - 1.
    """
    pair = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    slot = replica(ids, pair // TOP_K, pair, pair < pairs, tables, offset)
    here = (slot >= first) & (slot < first + held)
    tl.store(experts + pair, tl.where(here, slot - first, -1), mask=pair < pairs)
