"""LoRA adapters as a grouped GEMM: each pair of adapter and expert is an expert of its own.

    adapter a, local expert e  ->  number a * E + e, weights of [L * E, rows, columns]

Operands are 16-bit or float32 numbers without scales.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_core.jit.casts import INTERPRET
from moe_core.ops._sort_kernels import local_expert


@triton.jit(do_not_specialize=["pairs"])
def adapted_pairs_kernel(
    group_ids,
    adapter_ids,
    ids,
    expert_map,
    counts,
    pairs,
    top_k,
    num_ids,
    num_experts,
    num_adapters,
    HAS_MAP: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """group_ids [pairs] int32 of adapter and expert, -1 where there is none.

    `ids` [pairs] select experts, or None for batched rows, of which `counts` [num_experts] are in use; then `top_k` is
    the capacity of an expert's buffer.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
    pair = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = pair < pairs
    if counts is None:
        expert = local_expert(ids, expert_map, pair, mask, num_ids, num_experts, HAS_MAP)
        row = pair // top_k
    else:
        expert = (pair // top_k).to(tl.int32)
        used = pair % top_k < tl.load(counts + expert, mask=mask, other=0)
        expert = tl.where(used, expert, -1)
        row = pair
    adapter = tl.load(adapter_ids + row, mask=mask, other=-1)
    known = (expert >= 0) & (adapter >= 0) & (adapter < num_adapters)
    tl.store(group_ids + pair, tl.where(known, adapter * num_experts + expert, -1), mask=mask)


@triton.jit
def multiply(acc, a, a_scale, b, b_scale, SWAP_AB: tl.constexpr):
    """acc + a @ b.T, in float32 where a is."""
    if INTERPRET:
        a = a.to(tl.float32)  # the interpreter multiplies the bits of bfloat16
    return acc + tl.dot(a, tl.trans(b.to(a.dtype)), out_dtype=tl.float32, input_precision="ieee")
