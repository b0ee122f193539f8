"""LoRA deltas of a fused layer: two additional grouped GEMMs for each of its GEMMs.

    group_ids  of adapter and expert, for every pair                  (one launch)
    sort       pairs by them                                          (one, two for many pairs)
    low        [pairs, parts * R] = x A^T
    added      [pairs, columns]   = low B^T                           (one launch for each part)

Here each pair of adapter and expert acts as a separate expert. Adapter a and local expert e have index a * E + e in the
weights [L * E, rows, columns], which are 16-bit or float32 values without scales.

The tile kernel adds `LoRADelta` in its epilogue, before bias, activation and router weight.
"""

from __future__ import annotations

from collections.abc import Mapping

import triton
import triton.language as tl
from torch import Tensor

from moe_core.kernels.device.casts import INTERPRET
from moe_core.kernels.device.pdl import begin_pdl
from moe_core.kernels.gemm.plan import TileConfig
from moe_core.kernels.gemm.tiles.launch import (
    Gemm,
    GemmWeight,
    LoRADelta,
    OperandA,
    Result,
    Routing,
    TileFunctions,
    grouped_gemm,
)
from moe_core.kernels.gemm.tiles.operands import load_plain, open_plain
from moe_core.kernels.gemm.tiles.scaled_mm import load_weights, open_weights
from moe_core.kernels.gemm.tiles.schedule import expert_of
from moe_core.kernels.gemm.workspaces import LORA
from moe_core.kernels.launch.launch import launch
from moe_core.kernels.ops.batch import Batch
from moe_core.kernels.ops.sort import sort_pairs
from moe_core.spec.lora import LoRA


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
    """Write the index of adapter and expert to group_ids [pairs] int32, -1 where there is none.

    row_args and IN_USE as in `expert_of`.
    """
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
    """acc + a @ b.T, in float32 if a is float32."""
    if INTERPRET:
        a = a.to(tl.float32)  # the interpreter multiplies the raw bits of bfloat16
    return acc + tl.dot(a, tl.trans(b.to(a.dtype)), out_dtype=tl.float32, input_precision="ieee")


_FUNCTIONS = TileFunctions(open_plain, load_plain, open_weights, load_weights, multiply)
#: Pairs per adapter and expert from which taller tiles pay.
_MANY = 32


class Adapters:
    """Adapters of one call, with its pairs grouped by adapter and expert.

    See the module docstring.
    """

    def __init__(
        self, lora: LoRA, routing: Routing | Batch, workspace: Mapping[str, Tensor], *, uniform: bool = False
    ) -> None:
        """Group the pairs of a call by adapter and expert.

        Args:
            lora: Adapter weights, and the adapter of each token (batched: row).
            routing: Routing, or the batch.
            workspace: Tensors of `lora_workspaces`, by name.
            uniform: Whether tiles have the same height for any number of tokens.
        """
        self.lora = lora
        self.workspace = workspace
        pairs, experts = routing.num_pairs, routing.num_experts
        total = lora.weights.num_adapters * experts
        group_ids = workspace["lora_group_ids"][:pairs]
        in_use, row_args = routing.in_use
        launch(
            adapted_pairs_kernel,
            (triton.cdiv(pairs, 256),),
            group_ids,
            lora.adapter_ids,
            row_args,
            pairs,
            experts,
            lora.weights.num_adapters,
            IN_USE=in_use,
            BLOCK=256,
            num_warps=4,
        )
        self.routing = Routing(group_ids.view(-1, routing.top_k), None, total)
        # Other tile heights use other instructions.
        self.block_m = 64 if pairs > _MANY * total and not uniform else 16
        scratch = {name.removeprefix(LORA): t for name, t in workspace.items() if name.startswith(LORA)}
        self.order = sort_pairs(self.routing.ids, total, self.block_m, workspace=scratch)

    def delta(self, name: str, x: Tensor, by_pair: bool) -> LoRADelta:
        """Compute the delta of one GEMM.

        Args:
            name: "w13" or "w2".
            x: Input of the GEMM, one row per token or pair.
            by_pair: Whether rows of ``x`` are pairs.

        Returns:
            The delta, in workspace tensors.
        """
        a: Tensor = getattr(self.lora.weights, f"{name}_a").flatten(0, 1)
        b: Tensor = getattr(self.lora.weights, f"{name}_b").flatten(0, 1)
        pairs, rank = self.routing.num_pairs, b.shape[2]
        parts = a.shape[1] // rank
        low = self.workspace["lora_low"][:pairs, : a.shape[1]]
        added = self.workspace[f"lora_{name}"][:pairs]
        self._product(x, a, low, by_pair)
        each = b.shape[1] // parts
        for part in range(parts):
            rows = slice(part * each, (part + 1) * each)
            self._product(low[:, part * rank : (part + 1) * rank], b[:, rows], added[:, rows], True)
        return LoRADelta(added, added.stride(0), self.routing.ids)

    def _product(self, x: Tensor, weights: Tensor, out: Tensor, by_pair: bool) -> None:
        rows, columns = weights.shape[1:]
        block_n = min(max(triton.next_power_of_2(rows), 16), 64)
        block_k = min(max(triton.next_power_of_2(columns), 16), 64)
        arguments = (weights, None, weights.stride(0), weights.stride(1), block_k, 0, 0, 0)
        weight = GemmWeight(arguments, rows, columns, lambda config: _FUNCTIONS, block_k)
        a = OperandA((x, x.stride(0), columns), "pair" if by_pair else "token")
        config = TileConfig(self.block_m, block_n, 4, 3)
        grouped_gemm(Gemm(config, weight, a, Result.of(out), self.order, self.routing))
