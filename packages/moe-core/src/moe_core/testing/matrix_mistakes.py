"""Common mistakes with w13 and w2: their order, codes, scales, zero points and biases.

Each is made with one of the matrices, or with both; see :mod:`moe_core.testing.mistakes`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_core.reference.fused_moe import Steps
from moe_core.reference.quantization import Grid, scale_values
from moe_core.spec.config import FusedMoEConfig
from moe_core.spec.numerics import FP4_E2M1, FP8_E4M3, NumberKind
from moe_core.spec.quant_key import QuantKey
from moe_core.spec.weights import MoEWeights
from moe_core.testing.harness import Problem
from moe_core.testing.mistakes import Mistake, taken, with_weights


@dataclass(frozen=True, eq=False)
class Matrix:
    """w13 or w2 of a problem.

    Codes are ``[E, rows, cols]`` as stored. Scales are float32, and zero points are optional. Each of ``parts`` stacked
    matrices has separate rows of scales.

    Attributes:
        name: "w13" or "w2".
        weights: Weights of the problem.
        config: The layer.
    """

    name: str
    weights: MoEWeights
    config: FusedMoEConfig

    def part(self, suffix: str) -> Tensor | None:
        """Return one tensor of the matrix.

        Args:
            suffix: Suffix of the tensor's name, such as "bias" for ``w13_bias``; "" for the codes.

        Returns:
            The tensor, or None.
        """
        found: Tensor | None = getattr(self.weights, f"{self.name}_{suffix}" if suffix else self.name)
        return found

    @property
    def key(self) -> QuantKey | None:
        return self.weights.weight_key

    @property
    def codes(self) -> Tensor:
        found: Tensor = getattr(self.weights, self.name)
        return found

    @property
    def parts(self) -> int:
        return 2 if self.name == "w13" and self.config.is_gated else 1

    @property
    def cols(self) -> int:
        return self.config.hidden_size if self.name == "w13" else self.config.intermediate_size


#: maps the suffix of a tensor to what a backend with the mistake reads in its place; empty if it makes no difference
Change = Callable[[Matrix], Iterator[dict[str, Tensor]]]


def with_float_scales(problem: Problem) -> Problem:
    """Return the same problem with float32 scales, which can represent the effects of mistakes.

    Args:
        problem: The problem.

    Returns:
        The problem with float32 scales.
    """
    key, weights = problem.weights.weight_key, problem.weights
    if key is None or weights.w13_scale is None or weights.w2_scale is None:
        return problem
    return with_weights(
        problem,
        weight_key=key.with_scale_dtype(torch.float32),
        w13_scale=scale_values(weights.w13_scale),
        w2_scale=scale_values(weights.w2_scale),
    )


def _each(text: str, change: Change) -> Iterator[Mistake]:
    """Yield the mistake for each of the matrices and for both.

    ``text`` has a placeholder for their names.
    """
    for names in (("w13",), ("w2",), ("w13", "w2")):
        yield Mistake(text.format(" and ".join(names)), _with(change, names))


def _with(change: Change, names: tuple[str, ...]) -> Callable[[Problem], Iterator[Problem]]:
    def problems(problem: Problem) -> Iterator[Problem]:
        matrices = [Matrix(name, problem.weights, problem.case.config) for name in names]
        # If both matrices change, use the same variant for each.
        for variants in zip(*(change(matrix) for matrix in matrices), strict=False):
            changed: dict[str, Any] = {}
            for matrix, tensors in zip(matrices, variants, strict=True):
                changed |= {f"{matrix.name}_{name}" if name else matrix.name: t for name, t in tensors.items()}
            yield with_weights(problem, **changed)

    return problems


# ------------------------------------------------------------------ every tensor of a matrix alike


def _filled(suffix: str, value: float) -> Change:
    """Omit a tensor: biases become 0, scales and factors 1."""

    def change(matrix: Matrix) -> Iterator[dict[str, Tensor]]:
        given = matrix.part(suffix)
        if given is not None:
            yield {suffix: torch.full_like(given, value)}

    return change


def _mapped(suffix: str, function: Callable[[Tensor], Tensor]) -> Change:
    def change(matrix: Matrix) -> Iterator[dict[str, Tensor]]:
        given = matrix.part(suffix)
        if given is not None:
            yield {suffix: function(given)}

    return change


def _of_first_expert(suffix: str) -> Change:
    return _mapped(suffix, lambda given: given[:1].expand_as(given).contiguous())


def _largest(given: Tensor) -> Tensor:
    return given.amax().expand_as(given).contiguous()


def _rolled(suffix: str, dim: int) -> Change:
    """Use the tensor of the next row or group, or of the previous one."""

    def change(matrix: Matrix) -> Iterator[dict[str, Tensor]]:
        given = matrix.part(suffix)
        if given is not None and given.dim() > dim and given.shape[dim] > 1:
            for shift in (1, -1):
                yield {suffix: given.roll(shift, dims=dim)}

    return change


def _squared(given: Tensor) -> Tensor:
    return given.square().clamp(max=torch.finfo(given.dtype).max)


# ------------------------------------------------------------------ order of rows and of memory


def _halves(count: int) -> Tensor:
    return torch.arange(count).roll(count // 2)


def _into_turns(count: int) -> Tensor:
    """Interleaved order of gate and up rows, from consecutive order."""
    return torch.arange(count).view(2, -1).T.flatten()


def _out_of_turns(count: int) -> Tensor:
    return torch.arange(count).view(-1, 2).T.flatten()


def _rows_in_order(*orders: Callable[[int], Tensor], bias: bool) -> Callable[[Problem], Iterator[Problem]]:
    """Reorder whole rows of w13 with their scales, and their biases if ``bias``."""

    def problems(problem: Problem) -> Iterator[Problem]:
        matrix = Matrix("w13", problem.weights, problem.case.config)
        if matrix.parts != 2 or (not bias and matrix.part("bias") is None):
            return
        plain = dequantized(problem)
        if plain is None:
            return
        for order in orders:
            changed: dict[str, Any] = {}
            for name in ("w13", "w13_bias") if bias else ("w13",):
                given: Tensor | None = getattr(plain.weights, name)
                if given is not None:
                    changed[name] = taken(given, 1, order(given.shape[1]))
            yield with_weights(plain, **changed)

    return problems


def _part_in_order(suffix: str, *orders: Callable[[int], Tensor]) -> Callable[[Problem], Iterator[Problem]]:
    """Reorder a single tensor of w13."""

    def change(matrix: Matrix) -> Iterator[dict[str, Tensor]]:
        given = matrix.part(suffix)
        if matrix.parts == 2 and given is not None:
            for order in orders:
                yield {suffix: taken(given, 1, order(given.shape[1]))}

    return _with(change, ("w13",))


def _transposed(suffix: str) -> Change:
    """Read the memory of [rows, cols] as [cols, rows], or the reverse."""

    def change(matrix: Matrix) -> Iterator[dict[str, Tensor]]:
        given, key = matrix.part(suffix), matrix.key
        if given is None or given.dim() < 3 or 1 in given.shape[1:] or (not suffix and key and key.packing):
            return
        experts, rows, cols = given.shape
        yield {suffix: given.mT.reshape(experts, rows, cols)}
        yield {suffix: given.reshape(experts, cols, rows).mT.contiguous()}

    return change


# ------------------------------------------------------------------ groups


def dequantized(problem: Problem) -> Problem | None:
    """Return the same problem with unquantized weights (in float32).

    Args:
        problem: The problem.

    Returns:
        The problem; None if the weight key includes input factors (pre-scales).
    """
    weights, key = problem.weights, problem.weights.weight_key
    if key is None:
        return problem
    if key.pre_scaled:
        return None
    steps = Steps(weights, problem.case.config, torch.float64, None, None)
    dropped = {f"{n}_{s}": None for n in ("w13", "w2") for s in ("scale", "zero_point", "g_idx")}
    plain = {
        name: torch.stack([steps.weight(name, e) for e in range(problem.case.config.local_experts)]).float()
        for name in ("w13", "w2")
    }
    return with_weights(problem, weight_key=None, **dropped, **plain)


def _group_of_group(index: Callable[[Tensor, int], Tensor]) -> Change:
    """Use the scale and zero point of another group of the row.

    ``index`` takes the group numbers and the number of groups.
    """

    def change(matrix: Matrix) -> Iterator[dict[str, Tensor]]:
        scale, zero_point = matrix.part("scale"), matrix.part("zero_point")
        if scale is None or scale.dim() < 3 or scale.shape[2] < 2:
            return
        count = scale.shape[2]
        chosen = index(torch.arange(count), count).clamp(max=count - 1)
        changed = {"scale": taken(scale, 2, chosen)}
        yield changed
        if zero_point is not None:
            yield {**changed, "zero_point": taken(zero_point, 2, chosen)}

    return change


def _smaller_groups(problem: Problem) -> Iterator[Problem]:
    """Halve the group size: the second half of a row reads the groups of the following rows."""
    key = problem.weights.weight_key
    if key is None or key.permuted or key.group_size < 2 or key.group_size % 2:
        return
    row, col = key.group_shape.row, key.group_size // 2
    chosen: list[dict[str, Any]] = []
    for name in ("w13", "w2"):
        matrix = Matrix(name, problem.weights, problem.case.config)
        changed: dict[str, Any] = {}
        for suffix in ("scale", "zero_point"):
            given = matrix.part(suffix)
            if given is None:
                continue
            experts, rows, count = given.shape
            wanted = -(-matrix.cols // col)
            place = torch.arange(rows)[:, None] * count + torch.arange(wanted)
            flat = given.reshape(experts, -1)
            changed[f"{name}_{suffix}"] = taken(flat, 1, (place % flat.shape[1]).flatten()).view(experts, rows, wanted)
            # the same groups, each repeated twice
            changed[f"{name}_{suffix}_same"] = given.repeat_interleave(2, dim=2)[:, :, :wanted]
        chosen.append(changed)
    for wrong in ((True, True), (True, False), (False, True)):
        found: dict[str, Any] = {"weight_key": key.with_group(row, col)}
        for changed, is_wrong in zip(chosen, wrong, strict=True):
            for name, tensor in changed.items():
                if name.endswith("_same") != is_wrong:
                    found[name.removesuffix("_same")] = tensor
        yield with_weights(problem, **found)


def _zero_points_moved(text: str, by: int) -> Iterator[Mistake]:
    """Move zero points, possibly out of their valid range: every element moves by its scale."""

    def change(names: tuple[str, ...]) -> Callable[[Problem], Iterator[Problem]]:
        def problems(problem: Problem) -> Iterator[Problem]:
            key, plain = problem.weights.weight_key, dequantized(problem)
            if key is None or key.symmetric or plain is None:
                return
            changed: dict[str, Any] = {}
            for name in names:
                matrix = Matrix(name, problem.weights, problem.case.config)
                w: Tensor = getattr(plain.weights, name)
                scale = matrix.part("scale")
                if scale is None:
                    return
                experts, rows, cols = w.shape
                spread = Grid.of(key.scale, experts, rows, cols, matrix.parts).spread(scale, matrix.part("g_idx"))
                changed[name] = w - by * spread
            yield with_weights(plain, **changed)

        return problems

    for names in (("w13",), ("w2",), ("w13", "w2")):
        yield Mistake(text.format(" and ".join(names)), change(names))


def _blocks_of_one_matrix(problem: Problem) -> Iterator[Problem]:
    """Count blocks of rows over gate and up as if they were one matrix."""
    key, config = problem.weights.weight_key, problem.case.config
    scale = problem.weights.w13_scale
    if key is None or scale is None or not config.is_gated or key.group_shape.row <= 1 or key.permuted:
        return
    plain = dequantized(with_weights(problem, w13_scale=torch.ones_like(scale)))
    if plain is None or config.intermediate_size % key.group_shape.row == 0:
        return
    rows = torch.arange(config.w13_rows) // key.group_shape.row
    size = config.hidden_size if key.group_size < 0 else key.group_size
    spread = taken(taken(scale, 1, rows), 2, torch.arange(config.hidden_size) // size)
    w2 = dequantized(problem)
    if w2 is not None:
        yield with_weights(w2, w13=plain.weights.w13 * spread)


def _consecutive(matrix: Matrix) -> Iterator[dict[str, Tensor]]:
    g_idx, key, scale = matrix.part("g_idx"), matrix.key, matrix.part("scale")
    if g_idx is None or key is None or scale is None:
        return
    sizes = {key.group_size if key.group_size > 0 else g_idx.shape[1], -(-g_idx.shape[1] // scale.shape[2])}
    for size in sorted(sizes):
        groups = (torch.arange(g_idx.shape[1], device=g_idx.device) // size).clamp(max=scale.shape[2] - 1)
        yield {"g_idx": groups.to(g_idx.dtype).expand_as(g_idx).contiguous()}


def _filled_in_order(matrix: Matrix) -> Iterator[dict[str, Tensor]]:
    g_idx, key, scale = matrix.part("g_idx"), matrix.key, matrix.part("scale")
    if g_idx is None or key is None or scale is None or key.group_size < 1:
        return
    place = g_idx.argsort(dim=1, stable=True).argsort(dim=1)
    yield {"g_idx": (place // key.group_size).clamp(max=scale.shape[2] - 1).to(g_idx.dtype)}


def _one_for_both(suffix: str) -> Change:
    def change(matrix: Matrix) -> Iterator[dict[str, Tensor]]:
        scale = matrix.part(suffix)
        if matrix.parts == 2 and scale is not None:
            halves = scale.reshape(len(scale), 2, -1, *scale.shape[2:])
            for one in (halves.amax(dim=1, keepdim=True), halves[:, :1], halves[:, 1:]):
                yield {suffix: one.expand_as(halves).flatten(1, 2).contiguous()}

    return change


def _bias_times_scale(matrix: Matrix) -> Iterator[dict[str, Tensor]]:
    scale, bias = matrix.part("scale"), matrix.part("bias")
    if scale is None or bias is None or scale.shape[-1] != (matrix.parts if scale.dim() == 2 else 1):
        return
    rows = scale.flatten(1)
    if bias.shape[1] % rows.shape[1] == 0:
        yield {"bias": bias.float() * rows.repeat_interleave(bias.shape[1] // rows.shape[1], dim=1)}


# ------------------------------------------------------------------ codes and zero points


def _swapped_codes(matrix: Matrix) -> Iterator[dict[str, Tensor]]:
    key = matrix.key
    if key is not None and key.packing is not None and key.packing.storage is torch.uint8:
        yield {"": (matrix.codes >> 4) | (matrix.codes << 4)}


def _as_signed(matrix: Matrix) -> Iterator[dict[str, Tensor]]:
    key = matrix.key
    if key is not None and key.dtype.kind is NumberKind.UINT and matrix.codes.dtype is torch.uint8:
        yield {"": matrix.codes ^ (0x80 if key.packing is None else 0x88)}


def _no_subnormals(matrix: Matrix) -> Iterator[dict[str, Tensor]]:
    key, codes = matrix.key, matrix.codes
    if key is not None and key.dtype is FP8_E4M3:
        raw = codes.view(torch.uint8)
        yield {"": torch.where(raw & 0x78 != 0, raw, 0).to(torch.uint8).view(codes.dtype)}
    elif key is not None and key.dtype is FP4_E2M1 and codes.dtype is torch.uint8:
        low, high = codes & 0x0F, codes & 0xF0
        low, high = torch.where(low & 0x06 != 0, low, 0), torch.where(high & 0x60 != 0, high, 0)
        yield {"": (low | high).to(torch.uint8)}


def _zero_points(function: Callable[[Tensor, int], Tensor]) -> Change:
    """Apply ``function`` to the zero points and the number of bits of a code."""

    def change(matrix: Matrix) -> Iterator[dict[str, Tensor]]:
        given, key = matrix.part("zero_point"), matrix.key
        if given is not None and key is not None:
            yield {"zero_point": function(given.int(), key.dtype.bits)}

    return change


MATRIX_MISTAKES: tuple[Mistake, ...] = (
    Mistake("gate and up rows of w13 are swapped", _rows_in_order(_halves, bias=True)),
    Mistake("gate and up rows of w13 are swapped, but not their biases", _rows_in_order(_halves, bias=False)),
    Mistake("the biases of gate and up are swapped", _part_in_order("bias", _halves)),
    Mistake("the scales of gate and up are swapped", _part_in_order("scale", _halves)),
    Mistake("gate and up rows of w13 are taken to be in turns", _rows_in_order(_into_turns, _out_of_turns, bias=True)),
    Mistake(
        "gate and up rows of w13 are taken to be in turns, but not their biases",
        _rows_in_order(_into_turns, _out_of_turns, bias=False),
    ),
    Mistake("the biases of gate and up are taken to be in turns", _part_in_order("bias", _into_turns, _out_of_turns)),
    Mistake("the scales of gate and up are taken to be in turns", _part_in_order("scale", _into_turns, _out_of_turns)),
    Mistake("gate and up have one scale for both", _with(_one_for_both("scale"), ("w13",))),
    Mistake("gate and up have one second scale for both", _with(_one_for_both("scale2"), ("w13",))),
    *_each("the second scales of {} are left out", _filled("scale2", 1.0)),
    *_each("the second scales of {} are divided by and not multiplied by", _mapped("scale2", lambda s: 1 / s)),
    *_each("the second scales of {} are those of the first expert", _mapped("scale2", lambda s: s[:1].expand_as(s))),
    *_each("the second input scales of {} are left out", _filled("input_scale2", 1.0)),
    Mistake("blocks of rows are counted over gate and up as one matrix", _blocks_of_one_matrix),
    Mistake("the groups of the weights are half as large", _smaller_groups),
    *_each("the groups of {} are twice as large", _group_of_group(lambda group, count: group // 2)),
    *_each("the first group of a row of {} stands for the whole row", _group_of_group(lambda g, count: 0 * g)),
    *_each("the memory of {} is read as that of a transposed matrix", _transposed("")),
    *_each("the memory of the scales of {} is read as that of a transposed matrix", _transposed("scale")),
    *_each("the scales of {} are left out", _filled("scale", 1.0)),
    *_each("the scales of {} are applied twice", _mapped("scale", _squared)),
    *_each("the scales of {} are divided by and not multiplied by", _mapped("scale", lambda s: 1 / s)),
    *_each("the scales of {} lose their sign", _mapped("scale", torch.Tensor.abs)),
    *_each("the scales of {} are twice as large", _mapped("scale", lambda s: 2 * s)),
    *_each("the scales of {} are half as large", _mapped("scale", lambda s: s / 2)),
    *_each("the scales of {} are those of expert 0", _of_first_expert("scale")),
    *_each("the scales of {} are those of another row", _rolled("scale", 1)),
    *_each("the scales of {} are those of another group", _rolled("scale", 2)),
    *_each("the scales of {} are those of the first row", _mapped("scale", lambda s: s[:, :1].expand_as(s).clone())),
    *_each("the biases of {} are left out", _filled("bias", 0.0)),
    *_each("the biases of {} are applied twice", _mapped("bias", lambda b: 2 * b)),
    *_each("the biases of {} are those of expert 0", _of_first_expert("bias")),
    *_each("the biases of {} are multiplied by the scales", _bias_times_scale),
    *_each("the two codes of each byte of {} are swapped", _swapped_codes),
    *_each("the codes of {} are read as two's complement", _as_signed),
    *_each("subnormal codes of {} are read as zero", _no_subnormals),
    *_each("the zero points of {} are left out", _zero_points(lambda zero, bits: torch.zeros_like(zero))),
    *_each("the zero points of {} are the middle of the codes", _zero_points(lambda z, b: 0 * z + 2 ** (b - 1))),
    *_zero_points_moved("the zero points of {} are one too small", -1),
    *_zero_points_moved("the zero points of {} are one too large", 1),
    *_each("the zero points of {} are cut to a code's bits", _zero_points(lambda zero, bits: zero & (2**bits - 1))),
    *_each("the zero points of {} are those of expert 0", _of_first_expert("zero_point")),
    *_each("the zero points of {} are those of another row", _rolled("zero_point", 1)),
    *_each("the zero points of {} are those of another group", _rolled("zero_point", 2)),
    *_each("the columns' groups of {} are ignored", _consecutive),
    *_each("the sorted columns of {} are taken to fill their groups", _filled_in_order),
    *_each("the columns' groups of {} are those of expert 0", _of_first_expert("g_idx")),
    *_each("the factors of the inputs of {} are left out", _filled("pre_scale", 1.0)),
    *_each("the factors of the inputs of {} are those of expert 0", _of_first_expert("pre_scale")),
    *_each("the input scales of {} are left out", _filled("input_scale", 1.0)),
    *_each("the input scales of {} are those of expert 0", _of_first_expert("input_scale")),
    *_each("the input scales of {} are the largest of all experts", _mapped("input_scale", _largest)),
    *_each("the input zero points of {} are left out", _filled("input_zero_point", 0)),
)
