"""Limits of launch configurations: what the kernels support, and what accuracy requires.

The heuristics stay within these limits. Configurations that were measured, or read from a file, are checked against
them.

Two choices change how numbers are rounded, so only the heuristics make them (`rounding`):

- Tiles of at most 32 rows sum, or scale, the partial sum of each step separately; larger ones lack the registers. With
  scales of groups, larger tiles multiply the weights by the scales instead, and e2m1 x e4m3 keeps a running sum in the
  tensor cores.
- If scales do not change along k, the warp-specialized kernel keeps running sums of e4m3 in the tensor cores, which
  hold fewer bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from functools import lru_cache
from typing import Any

from moe_core.kernels.gemm.heuristics import gemv_plan, launch_plan
from moe_core.kernels.gemm.heuristics.cost import BLOCK_N, MAX_PARTIALS, steps_of
from moe_core.kernels.gemm.heuristics.invariant import sums_alike
from moe_core.kernels.gemm.heuristics.problem import LayerProblem
from moe_core.kernels.gemm.heuristics.rules import with_registers
from moe_core.kernels.gemm.plan import GemvConfig, GemvPlan, TileConfig, TilePlan
from moe_core.kernels.gemm.workspaces import MAX_SPLIT_K, MIN_BLOCK_M

#: launch configurations of a layer, for either family of kernels
Plan = TilePlan | GemvPlan
#: largest number of activation rows for which a step's partial sum has separate registers
FEW = 32
#: (smallest, largest) value of each numeric field; all are powers of two except those in `_ANY`
NUMBERS = {
    "block_m": (MIN_BLOCK_M, 256),
    "block_n": (8, 256),
    "block_w": (32, 1024),
    "num_warps": (1, 16),
    "num_stages": (1, 8),
    "group_m": (1, 64),
    "split_k": (1, MAX_SPLIT_K),
}
#: largest number of columns of h per program of gemm1: rows of h are padded to multiples of it
WIDEST = 128
#: shared memory in bytes for the vectors of a program
_VECTORS = 128 << 10
#: fields that need not be powers of two, by `mma_sync`, which loads words in steps
_ANY = {False: ("num_stages",), True: ("num_stages", "block_w")}
#: further fields that may differ from the heuristics, subject to separate checks; all others keep the heuristics'
#: values
FREE = ("tma", "max_registers")
#: numbers of tokens at which the heuristics are sampled for a layer
ASKED = tuple(sorted({step * 2**power // 2 for power in range(1, 18) for step in (2, 3)}))


@lru_cache(maxsize=256)
def own_plans(problem: LayerProblem) -> tuple[TilePlan, ...]:
    """Return the heuristics' plans for all numbers of tokens.

    Args:
        problem: The layer.

    Returns:
        Distinct plans, from few to many tokens.
    """
    return tuple(dict.fromkeys(launch_plan(problem, tokens) for tokens in ASKED))


def rounding(problem: LayerProblem, config: TileConfig) -> tuple[bool, bool]:
    """Return the properties of a configuration that determine rounding.

    See the module docstring.

    Args:
        problem: The layer.
        config: Configuration of one GEMM.

    Returns:
        ``(separate, running)``: whether each step's partial sum is summed or scaled separately, and whether the tensor
        cores keep running sums.
    """
    plain = problem.family == "scaled_mm" and problem.element in ("e4m3", "int8")
    running = config.warp_specialized and problem.family == "scaled_mm" and not sums_alike(problem)
    return config.block_m <= FEW and not plain, running


def refusals(problem: LayerProblem, plan: Plan, first: int, last: int) -> list[str]:
    """Return the reasons why a plan is invalid.

    Args:
        problem: The layer.
        plan: The plan.
        first: Smallest number of tokens per call.
        last: Largest number of tokens per call.

    Returns:
        Reasons; empty for a valid plan.
    """
    found = list(_numbers(plan))
    if plan.pdl and not problem.capability >= 90:
        found.append("dependent launches (pdl) need sm90 or newer")
    if isinstance(plan, GemvPlan):
        return [*found, *_of_gemv(problem, plan, last)]
    # the heuristics may have other plans at numbers of tokens that are not sampled
    edges = tuple(launch_plan(problem, tokens) for tokens in (first, last))
    own = (*own_plans(problem), *edges)
    for name in ("gemm1", "gemm2"):
        of_gemm = [getattr(one, name) for one in own]
        found += [f"{name}: {reason}" for reason in _of_tiles(problem, name, getattr(plan, name), of_gemm, last)]
        config, allowed = getattr(plan, name), set()
        heights = {one.block_m for one in own if getattr(one, name).warp_specialized}
        if config.warp_specialized and plan.block_m not in heights:
            found.append(f"{name}: the warp-specialized kernel does not take tiles of {plan.block_m} rows")
        for one in edges:
            allowed.add(rounding(problem, getattr(one, name)))
        if rounding(problem, config) not in allowed:
            found.append(f"{name}: {config.block_m} rows of this kernel round differently from the built-in choice")
    return found


def _numbers(plan: Plan) -> Iterator[str]:
    for name in ("gemm1", "gemm2"):
        config: Any = getattr(plan, name)
        for field in fields(config):
            if field.name not in NUMBERS:
                continue
            value, (low, high) = getattr(config, field.name), NUMBERS[field.name]
            if not low <= value <= high:
                yield f"{name}: {field.name} is {value}, expected {low} to {high}"
            elif field.name not in _ANY[getattr(config, "mma_sync", False)] and value & (value - 1):
                yield f"{name}: {field.name} is {value}, expected a power of two"


def _of_gemv(problem: LayerProblem, plan: GemvPlan, last: int) -> Iterator[str]:
    own = gemv_plan(problem, last)
    if own is None:
        yield f"the kernel for unsorted pairs does not support {last} tokens of this layer"
        return
    pairs = problem.top_k if plan.fuse_finalize else 1
    scaled = problem.family == "scaled_mm"
    if pairs > 1 and not scaled:
        yield f"fuse_finalize needs 1 pair per token in the GEMV kernel, got {pairs}"
    if pairs & (pairs - 1) or pairs > plan.gemm2.num_warps:
        yield f"gemm2: pairs per token must be a power of two up to num_warps ({plan.gemm2.num_warps}), got {pairs}"
    numbers = pairs * problem.intermediate_size * (1 if problem.element == "int8" else 2)
    if plan.fuse_finalize and scaled and numbers > _VECTORS:
        yield (
            f"fuse_finalize: vectors of {pairs} pairs take {numbers} bytes of shared memory, expected at most "
            f"{_VECTORS}"
        )
    for name, config in (("gemm1", plan.gemm1), ("gemm2", plan.gemm2)):
        built_in: GemvConfig = getattr(own, name)
        most = 64 * pairs if name == "gemm2" else 64
        if config.block_n < 16 and not (plan.fuse_finalize and scaled and name == "gemm2"):
            yield f"{name}: block_n is {config.block_n}, expected at least 16 rows per program"
        if config.mma_sync != built_in.mma_sync:
            yield f"{name}: mma_sync is {config.mma_sync}, which no built-in choice for such a layer has"
        if config.block_n * config.block_w < 4 * 32 * config.num_warps:
            yield f"{name}: block_n x block_w leaves threads of {config.num_warps} warps without four words each"
        if config.mma_sync and (config.num_warps != 4 or config.block_n not in (16, 32, 64)):
            yield f"{name}: with mma_sync, block_n must be 16, 32 or 64 rows for four warps"
        if not scaled and name == "gemm1" and config.block_n > WIDEST * (2 if problem.gated else 1):
            yield f"gemm1: block_n is {config.block_n}, expected at most {WIDEST}, the padding of the rows of h"
        if scaled and config.block_w > 128:
            yield f"{name}: block_w is {config.block_w}, expected at most 128 packed words of a row per warp"
        if scaled and config.block_n > most:
            # rows of h are padded to multiples of 128 columns, and a program reads one row of weight scales
            yield f"{name}: block_n is {config.block_n}, expected at most {most} rows per program"
        if not scaled and config.num_stages != 1:
            yield f"{name}: num_stages is {config.num_stages}, which the GEMV kernel does not support"


def _of_tiles(
    problem: LayerProblem, name: str, config: TileConfig, own: Sequence[TileConfig], last: int
) -> Iterator[str]:
    first = name == "gemm1"
    columns, rows = problem.hidden_size, problem.intermediate_size * (2 if problem.gated else 1)
    if not first:
        columns, rows = problem.intermediate_size, problem.hidden_size
    if config.block_m < 16 and (problem.family, problem.capability) != ("mixed_input", 90):
        yield f"{config.block_m} rows require repacked weights on sm90"
    if config.tma and problem.capability < 90:
        yield "tensor maps (tma) need sm90 or newer"
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name not in (*NUMBERS, *FREE) and value not in {getattr(c, field.name) for c in own}:
            yield f"{field.name} is {value}, which no built-in choice for such a layer has"
    possible = {0, with_registers(problem, config).max_registers if problem.capability == 90 else 0}
    if config.max_registers not in possible:
        yield f"max_registers is {config.max_registers}, expected one of {sorted(possible)} for such a tile"
    if config.block_n not in widths(problem, name):
        yield f"block_n is {config.block_n}, expected one of {sorted(widths(problem, name))}"
    if config.warp_specialized and replace(config, group_m=1) not in {replace(c, group_m=1) for c in own}:
        yield "the warp-specialized kernel has fixed tiles: only group_m can change"
    if config.split_k > 1:
        step = BLOCK_N if problem.group_size == -1 else min(problem.group_size, BLOCK_N)
        # float32 operands have a single plan; 8-bit activations of a float32 layer are not float32 operands
        if not problem.may_split or (problem.dtype_bytes == 4 and problem.family != "scaled_mm"):
            yield "split_k: split-K is not supported by this layer"
        elif config.split_k > steps_of(columns, step):
            yield f"split_k is {config.split_k}, but the mainloop has {steps_of(columns, step)} steps"
        elif last * problem.top_k * config.split_k * rows > MAX_PARTIALS:
            yield f"split_k is {config.split_k}: partial sums of {last} tokens do not fit the workspace"


def widths(problem: LayerProblem, name: str) -> frozenset[int]:
    """Return the valid numbers of columns of a tile.

    These are the heuristics' values, and half tiles where possible. Half tiles are excluded where other code relies on
    whole ones: an epilogue that quantizes h pads it to whole tiles, and block scales belong to whole tiles.

    Args:
        problem: The layer.
        name: "gemm1" or "gemm2".

    Returns:
        Valid values of ``block_n``.
    """
    own = frozenset(getattr(plan, name).block_n for plan in own_plans(problem))
    if problem.dtype_bytes == 4 or (problem.family == "scaled_mm" and problem.group_size != -1):
        return own
    return own | {BLOCK_N // 2} if name == "gemm2" or problem.family == "mixed_input" else own
