"""LoRA adapters as a grouped GEMM: each pair of adapter and expert is an expert of its own.

    adapter a, local expert e  ->  number a * E + e, weights of [L * E, rows, columns]

Operands are 16-bit or float32 numbers without scales.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_core.gemm.schedule import expert_of
from moe_core.jit.casts import INTERPRET
from moe_core.jit.pdl import begin_pdl


@triton.jit(do_not_specialize=["pairs"])
def adapted_pairs_kernel(
    group_ids,
    adapter_ids,
    row_args,
    pairs,
    num_experts,
    num_adapters,
    IN_USE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """group_ids [pairs] int32 of adapter and expert, -1 where there is none; row_args and IN_USE as of `expert_of`."""
    begin_pdl(PDL)
    pair = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = pair < pairs
    expert = expert_of(pair, mask, row_args, IN_USE)
    row = pair if IN_USE == "batched" else pair // row_args[2]
    adapter = tl.load(adapter_ids + row, mask=mask, other=-1)
    known = (expert >= 0) & (adapter >= 0) & (adapter < num_adapters)
    tl.store(group_ids + pair, tl.where(known, adapter * num_experts + expert, -1), mask=mask)


@triton.jit
def multiply(acc, a, a_scale, b, b_scale, SWAP_AB: tl.constexpr):
    """acc + a @ b.T, in float32 where a is."""
    if INTERPRET:
        a = a.to(tl.float32)  # the interpreter multiplies the bits of bfloat16
    return acc + tl.dot(a, tl.trans(b.to(a.dtype)), out_dtype=tl.float32, input_precision="ieee")
