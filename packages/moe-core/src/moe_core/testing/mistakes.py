"""Name the common mistake that explains a wrong output.

A backend that omits a bias computes exactly what the reference computes without it. So a mistake is a small change of
the problem: :data:`MISTAKES` maps its description to the problems that such a backend would solve. Every mistake is
computed for a few tokens. Those close to the output are compared with the whole output, within the bounds of
:mod:`moe_core.reference.tolerance`. So a mistake is named only if a backend with that mistake and no other could have
produced this output.

A change that raises or changes nothing does not apply to the problem: without a bias, none can be left out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moe_core.errors import MoEError
from moe_core.interface.claims import Claims
from moe_core.interface.experts import FusedMoEExperts
from moe_core.reference.fused_moe import Steps, fused_moe_reference
from moe_core.reference.quantization import Grid, scale_values
from moe_core.reference.tolerance import Expected
from moe_core.spec.activation import ActivationParams, MoEActivation
from moe_core.spec.numerics import FP4_E2M1, FP8_E4M3, NumberKind
from moe_core.spec.quant_key import (
    NAMES,
    QuantKey,
    kFp8Dynamic128Sym,
    kFp8DynamicTokenSym,
    kInt8DynamicTokenSym,
    kMxfp8Dynamic,
)
from moe_core.spec.routing import RoutingConfig, RoutingMethodType, route
from moe_core.testing.data import has_extreme_scales, without_extreme_scales
from moe_core.testing.harness import Place, Problem, call, make_kernel, one_thread
from moe_core.testing.requantized import computed_with

#: problems that a backend with the mistake may be solving
Change = Callable[[Problem], Iterable[Problem]]
#: number of tokens on which every mistake is computed
_TOKENS = 2
#: largest fraction of the error that a mistake may leave unexplained
_REST = 0.5
#: a further mistake is named too if its distance is within this factor of the smallest one
_ALIKE = 1.25
#: number of mistakes that are compared with the whole output, and number of equivalent ones that are named
_COMPARED, _NAMED = 12, 4


def _inputs(problem: Problem, **changed: Any) -> Problem:
    return replace(problem, inputs=replace(problem.inputs, **changed))


def _weights(problem: Problem, **changed: Any) -> Problem:
    return replace(problem, weights=replace(problem.weights, **changed))


def _config(problem: Problem, **changed: Any) -> Problem:
    return replace(problem, case=replace(problem.case, config=replace(problem.case.config, **changed)))


# ------------------------------------------------------------------ arguments of the call and the layer


def _input(name: str, *functions: Callable[[Tensor, Any], Tensor]) -> Change:
    """Replace an argument of the call by functions of it and of the layer's config."""
    return lambda p: (_inputs(p, **{name: function(getattr(p.inputs, name), p.case.config)}) for function in functions)


def _fields(**changed: Any) -> Change:
    """Replace fields of the weights."""
    return lambda problem: [_weights(problem, **changed)]


def _router_weight_twice(problem: Problem) -> Iterator[Problem]:
    given = problem.inputs
    yield _inputs(problem, topk_weights=given.topk_weights.square())
    if problem.case.config.apply_router_weight_on_input:
        weighted = _inputs(problem, x=given.x.double() * given.topk_weights.double())
        yield _config(weighted, apply_router_weight_on_input=False)


def _router_weight_elsewhere(problem: Problem) -> list[Problem]:
    return [_config(problem, apply_router_weight_on_input=not problem.case.config.apply_router_weight_on_input)]


def _inverse_map(given: Tensor, config: Any) -> Tensor:
    found = torch.full_like(given, -1)
    here = ((given >= 0) & (given < config.local_experts)).nonzero().flatten()
    found[given[here].long()] = here.to(given.dtype)
    return found


def _experts(order: Callable[[Tensor], Tensor]) -> Change:
    """Give each expert of this rank the weights of another one."""

    def change(problem: Problem) -> list[Problem]:
        index = order(torch.arange(problem.case.config.local_experts))
        return [_weights(problem, **{name: _taken(tensor, 0, index) for name, tensor in problem.weights.tensors()})]

    return change


def _shifted_experts(shift: int) -> Change:
    def ids(given: Tensor, config: Any) -> Tensor:
        valid = (given >= 0) & (given < config.num_experts)
        return torch.where(valid, (given + shift) % config.num_experts, given)

    by_id, by_local_id = _input("topk_ids", ids), _experts(lambda order: order.roll(-shift))
    return lambda problem: itertools.chain(by_id(problem), by_local_id(problem))


def _taken(tensor: Tensor, dim: int, index: Tensor) -> Tensor:
    """``index_select`` of a tensor of any dtype."""
    raw = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
    return raw.index_select(dim, index.to(tensor.device)).view(tensor.dtype)


def _activation(activation: MoEActivation) -> Change:
    def change(problem: Problem) -> list[Problem]:
        config = problem.case.config
        if activation is config.activation:
            return []
        limit = config.params.limit
        some = (None, ActivationParams(limit=math.inf if limit is None else limit))
        return [_config(problem, activation=activation, activation_params=params) for params in some]

    return change


def _parameters(**changed: Any) -> Change:
    return lambda p: [_config(p, activation_params=replace(p.case.config.params, **changed))]


def _fixed_parameters(problem: Problem) -> list[Problem]:
    # the limit of gpt-oss and of Step-3
    return [_config(problem, activation_params=None), *_parameters(limit=7.0)(problem)]


_NO_INPUT_SCALES = {
    f"{name}_input_{suffix}": None for name in ("w13", "w2") for suffix in ("scale", "scale2", "zero_point")
}


def _activation_key(function: Callable[[Any], QuantKey]) -> Change:
    """Quantize activations as ``function`` of a dynamic key."""

    def change(problem: Problem) -> list[Problem]:
        key = problem.weights.activation_key
        return [] if key is None or key.is_static else [_weights(problem, activation_key=function(key))]

    return change


def _routed(function: Callable[[Any], RoutingConfig]) -> Change:
    """Route by ``function`` of the routing, in experts that route internally."""

    def change(problem: Problem) -> list[Problem]:
        other, logits = function(problem.case.config.routing), problem.router_logits
        if logits is None:
            return []
        bias = problem.correction_bias if other.has_correction_bias else None
        topk_weights, topk_ids = route(logits, top_k=problem.case.config.top_k, config=other, correction_bias=bias)
        return [_inputs(problem, topk_weights=topk_weights, topk_ids=topk_ids)]

    return change


def _method(method: RoutingMethodType) -> Change:
    def function(given: RoutingConfig) -> RoutingConfig:
        kept = ("num_expert_group", "topk_group", "routed_scaling_factor")
        return RoutingConfig.from_method(method, **{name: getattr(given, name) for name in kept})

    return _routed(function)


_COMPUTED = [
    method
    for method in RoutingMethodType
    if method not in (RoutingMethodType.Unspecified, RoutingMethodType.Simulated, RoutingMethodType.Custom)
]

CALL_MISTAKES: dict[str, Change] = {
    "the router weight is left out": _input("topk_weights", lambda w, _: torch.ones_like(w)),
    "the router weight is applied twice": _router_weight_twice,
    "the router weight is on the wrong side: input for result, or result for input": _router_weight_elsewhere,
    "the router weights of a token's experts are in another order": _input(
        "topk_weights", lambda w, _: w.roll(1, 1), lambda w, _: w.roll(-1, 1), lambda w, _: w.flip(1)
    ),
    "the expert map is ignored": _input(
        "expert_map",
        lambda m, _: torch.arange(len(m), dtype=m.dtype, device=m.device),
        lambda m, c: torch.arange(len(m), dtype=m.dtype, device=m.device) % c.local_experts,
        lambda m, c: torch.arange(len(m), dtype=m.dtype, device=m.device).clamp(max=c.local_experts - 1),
    ),
    "the expert map is read the other way round, from local to global": _input(
        "expert_map", _inverse_map, lambda m, c: _inverse_map(m, c).clamp(max=c.local_experts - 1)
    ),
    "the expert map is off by one": _input(
        "expert_map",
        lambda m, _: m.roll(1),
        lambda m, _: m.roll(-1),
        lambda m, c: torch.where((m >= 0) & (m < c.local_experts), m + 1, m),
        lambda m, c: torch.where((m >= 0) & (m < c.local_experts), m - 1, m),
    ),
    "negative local ids count from the last expert": _input(
        "expert_map",
        lambda m, c: torch.where(m <= -1, m % c.local_experts, m),
        lambda m, c: torch.where(m <= -2, m % c.local_experts, m),
    ),
    "local ids beyond the last expert select an expert": _input(
        "expert_map",
        lambda m, c: m.clamp(max=c.local_experts - 1),
        lambda m, c: torch.where(m >= 0, m % c.local_experts, m),
    ),
    "negative ids select an expert": _input(
        "topk_ids",
        lambda i, c: torch.where(i == -1, c.num_experts - 1, i),
        lambda i, c: torch.where(i < 0, i % c.num_experts, i),
        lambda i, _: i.clamp(min=0),
    ),
    "ids beyond the last expert select an expert": _input(
        "topk_ids",
        lambda i, c: torch.where(i >= 0, i % c.num_experts, i),
        lambda i, c: i.clamp(max=c.num_experts - 1),
    ),
    "ids are cut to 32 bits": _input("topk_ids", lambda i, _: i.int()),
    "each expert's weights are those of the next expert": _shifted_experts(1),
    "each expert's weights are those of the expert before": _shifted_experts(-1),
    "every expert's weights are those of expert 0": _experts(torch.zeros_like),
    "the experts are in reverse order": _experts(lambda order: order.flip(0)),
    "adapters are left out": lambda problem: [replace(problem, lora=None)],
    "the clamp limit of the activation is ignored": _parameters(limit=math.inf),
    **{f"the activation is {other.value}": _activation(other) for other in MoEActivation},
    "the activation's parameters are ignored": _fixed_parameters,
    "the activations are not quantized": _fields(activation_key=None, **_NO_INPUT_SCALES),
    "the activations' scales span the whole row": _activation_key(lambda key: key.with_group(1, -1)),
    "the activations' scales span the whole tensor": _activation_key(lambda key: key.with_group(-1, -1)),
    "the activations' scales span groups of 128": _activation_key(lambda key: key.with_group(1, 128)),
    "the activations' scales are rounded 'up'": _activation_key(lambda key: key.with_rounding("up")),
    "the activations' scales are rounded 'even'": _activation_key(lambda key: key.with_rounding("even")),
    "the activations' scales are rounded 'down'": _activation_key(lambda key: key.with_rounding("down")),
    **{
        f"the activations are quantized as {NAMES[key]}": _fields(activation_key=key, **_NO_INPUT_SCALES)
        for key in (kFp8DynamicTokenSym, kFp8Dynamic128Sym, kInt8DynamicTokenSym, kMxfp8Dynamic)
    },
    **{f"the routing method is {method.name}": _method(method) for method in _COMPUTED},
    "the routing's scaling factor is left out": _routed(lambda given: replace(given, routed_scaling_factor=1.0)),
    "the routing's correction bias is left out": _routed(lambda given: replace(given, has_correction_bias=False)),
    "the router weights are normalized, or are not": _routed(lambda g: replace(g, renormalize=not g.renormalize)),
}
#: mistakes whose results depend on all tokens
_TOGETHER = ("the activations' scales span the whole tensor",)


# ------------------------------------------------------------------ w13 and w2


@dataclass(frozen=True, eq=False)
class Matrix:
    """w13 or w2 of a problem.

    Attributes:
        name: "w13" or "w2".
        problem: The problem.
    """

    name: str
    problem: Problem

    def part(self, suffix: str) -> Any:
        """Return one tensor of the matrix, such as the bias ``w13_bias``; None if there is none.

        Args:
            suffix: Suffix of the tensor's name; "" for the codes ``[E, rows, cols]`` as stored.

        Returns:
            The tensor.
        """
        return getattr(self.problem.weights, f"{self.name}_{suffix}" if suffix else self.name)

    @property
    def key(self) -> Any:
        """The weight key; None for 16-bit weights."""
        return self.problem.weights.weight_key

    @property
    def parts(self) -> int:
        """Number of stacked matrices, each with separate rows of scales: 2 for gate and up."""
        return 2 if self.name == "w13" and self.problem.case.config.is_gated else 1

    @property
    def cols(self) -> int:
        """Number of columns."""
        config = self.problem.case.config
        return config.hidden_size if self.name == "w13" else config.intermediate_size


#: maps suffixes of tensors to what a backend with the mistake reads in their place
MatrixChange = Callable[[Matrix], Iterable[dict[str, Tensor]]]


def _each(text: str, change: MatrixChange) -> dict[str, Change]:
    """Return the mistake with each of the matrices and with both; ``text`` has a placeholder for their names."""
    return _named(text, lambda *names: _with(change, *names))


def _named(text: str, change: Callable[..., Change]) -> dict[str, Change]:
    return {text.format(" and ".join(names)): change(*names) for names in (("w13",), ("w2",), ("w13", "w2"))}


def _with(change: MatrixChange, *names: str) -> Change:
    def changed(problem: Problem) -> Iterator[Problem]:
        # If both matrices change, use the same variant for each.
        for variants in zip(*(change(Matrix(name, problem)) for name in names), strict=True):
            tensors = {
                f"{name}_{suffix}" if suffix else name: tensor
                for name, variant in zip(names, variants, strict=True)
                for suffix, tensor in variant.items()
            }
            yield _weights(problem, **tensors)

    return changed


def _part(suffix: str, *functions: Callable[[Tensor], Tensor]) -> MatrixChange:
    """Read functions of one tensor in its place."""
    return lambda matrix: [{suffix: function(matrix.part(suffix))} for function in functions]


def _of_first_expert(given: Tensor) -> Tensor:
    return given[:1].expand_as(given).contiguous()


def _rolled(suffix: str, dim: int) -> MatrixChange:
    """Use the tensor of the next row or group, or of the previous one."""
    return _part(suffix, lambda given: given.roll(1, dim), lambda given: given.roll(-1, dim))


def _transposed(suffix: str) -> MatrixChange:
    """Read the memory of [rows, cols] as [cols, rows], or the reverse."""
    return _part(
        suffix,
        lambda given: given.mT.reshape(given.shape),
        lambda given: given.reshape(given.mT.shape).mT.contiguous(),
    )


def _halves(count: int) -> Tensor:
    return torch.arange(count).roll(count // 2)


def _interleaved(count: int) -> Tensor:
    """Order that interleaves gate and up rows."""
    return torch.arange(count).view(2, -1).T.flatten()


def _separated(count: int) -> Tensor:
    return torch.arange(count).view(-1, 2).T.flatten()


def _rows(*suffixes: str, orders: tuple[Callable[[int], Tensor], ...]) -> Change:
    """Reorder tensors of w13, of which "" is that of whole rows with their scales."""

    def change(problem: Problem) -> Iterator[Problem]:
        given = dequantized(problem) if "" in suffixes else problem
        for order in orders if Matrix("w13", given).parts == 2 else ():
            tensors = {name: getattr(given.weights, name) for name in (f"w13{suffix}" for suffix in suffixes)}
            changed = {name: _taken(t, 1, order(t.shape[1])) for name, t in tensors.items() if t is not None}
            yield _weights(given, **changed)

    return change


def dequantized(problem: Problem) -> Problem:
    """Return the same problem with unquantized weights (in float32).

    Args:
        problem: The problem.

    Returns:
        The problem.

    Raises:
        ValueError: The weight key includes input factors (pre-scales), so there are no such weights.
    """
    weights, config = problem.weights, problem.case.config
    if weights.weight_key is None:
        return problem
    if weights.weight_key.pre_scaled:
        raise ValueError("pre-scaled weights have factors of the inputs")
    steps = Steps(weights, config, torch.float64, None, None)
    changed: dict[str, Any] = {
        f"{n}_{s}": None for n in ("w13", "w2") for s in ("scale", "scale2", "zero_point", "g_idx")
    }
    for name in ("w13", "w2"):
        changed[name] = torch.stack([steps.weight(name, expert) for expert in range(config.local_experts)]).float()
    return _weights(problem, weight_key=None, **changed)


def _other_group(index: Callable[[Tensor], Tensor]) -> MatrixChange:
    """Use the scale, and maybe the zero point, of another group of the row."""

    def change(matrix: Matrix) -> Iterator[dict[str, Tensor]]:
        scale, zero_point = matrix.part("scale"), matrix.part("zero_point")
        chosen = index(torch.arange(scale.shape[2]))
        changed = {"scale": _taken(scale, 2, chosen)}
        yield changed
        if zero_point is not None:
            yield {**changed, "zero_point": _taken(zero_point, 2, chosen)}

    return change


def _half_groups(problem: Problem) -> Iterator[Problem]:
    """Halve the group size: the second half of a row reads the groups of the following rows."""
    key: Any = problem.weights.weight_key
    if key.permuted or key.group_size < 2 or key.group_size % 2:
        return
    col = key.group_size // 2
    for wrong in (("w13", "w2"), ("w13",), ("w2",)):
        changed: dict[str, Any] = {"weight_key": key.with_group(key.group_shape.row, col)}
        for name, suffix in itertools.product(("w13", "w2"), ("scale", "zero_point")):
            matrix = Matrix(name, problem)
            given, wanted = matrix.part(suffix), -(-matrix.cols // col)
            if given is None:
                continue
            experts, rows, count = given.shape
            place = (torch.arange(rows)[:, None] * count + torch.arange(wanted)) % (rows * count)
            misread = _taken(given.reshape(experts, -1), 1, place.flatten()).view(experts, rows, wanted)
            right = given.repeat_interleave(2, dim=2)[:, :, :wanted]
            changed[f"{name}_{suffix}"] = misread if name in wrong else right
        yield _weights(problem, **changed)


def _blocks_of_one_matrix(problem: Problem) -> Iterator[Problem]:
    """Count blocks of rows over gate and up as if they were one matrix."""
    key, config, scale = problem.weights.weight_key, problem.case.config, problem.weights.w13_scale
    if key is not None and scale is not None and config.is_gated and key.group_shape.row > 1:
        codes = dequantized(_weights(problem, w13_scale=torch.ones_like(scale))).weights.w13
        rows = torch.arange(config.w13_rows) // key.group_shape.row
        columns = torch.arange(config.hidden_size) // (config.hidden_size if key.group_size < 0 else key.group_size)
        yield _weights(dequantized(problem), w13=codes * _taken(_taken(scale, 1, rows), 2, columns))


def _zero_points_moved(by: int) -> Callable[..., Change]:
    """Move zero points, possibly out of their valid range: every element moves by its scale."""

    def with_names(*names: str) -> Change:
        def change(problem: Problem) -> Iterator[Problem]:
            plain, changed = dequantized(problem), {}
            for matrix in (Matrix(name, problem) for name in names):
                if matrix.part("zero_point") is not None:
                    w = getattr(plain.weights, matrix.name)
                    experts, rows, cols = w.shape
                    grid = Grid.of(matrix.key.scale, experts, rows, cols, matrix.parts)
                    changed[matrix.name] = w - by * grid.spread(matrix.part("scale"), matrix.part("g_idx"))
            yield _weights(plain, **changed)

        return change

    return with_names


def _zero_points(function: Callable[[Tensor, int], Tensor]) -> MatrixChange:
    """Apply ``function`` to the zero points and the number of bits of a code."""
    return lambda matrix: [{"zero_point": function(matrix.part("zero_point").int(), matrix.key.dtype.bits)}]


def _consecutive_groups(matrix: Matrix) -> Iterator[dict[str, Tensor]]:
    g_idx, count = matrix.part("g_idx"), matrix.part("scale").shape[2]
    columns = g_idx.shape[1]
    for size in {matrix.key.group_size if matrix.key.group_size > 0 else columns, -(-columns // count)}:
        groups = (torch.arange(columns, device=g_idx.device) // size).clamp(max=count - 1)
        yield {"g_idx": groups.to(g_idx.dtype).expand_as(g_idx).contiguous()}


def _filled_groups(matrix: Matrix) -> Iterator[dict[str, Tensor]]:
    g_idx, count = matrix.part("g_idx"), matrix.part("scale").shape[2]
    if matrix.key.group_size > 0:
        place = g_idx.argsort(dim=1, stable=True).argsort(dim=1)
        yield {"g_idx": (place // matrix.key.group_size).clamp(max=count - 1).to(g_idx.dtype)}


def _one_for_both(suffix: str) -> MatrixChange:
    def change(matrix: Matrix) -> Iterator[dict[str, Tensor]]:
        scale = matrix.part(suffix)
        halves = scale.reshape(len(scale), 2, -1, *scale.shape[2:])
        for one in (halves.amax(dim=1, keepdim=True), halves[:, :1], halves[:, 1:]) if matrix.parts == 2 else ():
            yield {suffix: one.expand_as(halves).flatten(1, 2).contiguous()}

    return change


def _bias_times_scale(matrix: Matrix) -> Iterator[dict[str, Tensor]]:
    scale, bias = matrix.part("scale"), matrix.part("bias")
    if scale.shape[-1] == (matrix.parts if scale.dim() == 2 else 1):
        rows = scale.flatten(1)
        yield {"bias": bias.float() * rows.repeat_interleave(bias.shape[1] // rows.shape[1], dim=1)}


def _swapped_codes(matrix: Matrix) -> Iterator[dict[str, Tensor]]:
    if matrix.key.packing.storage is torch.uint8:
        yield {"": (matrix.part("") >> 4) | (matrix.part("") << 4)}


def _as_signed(matrix: Matrix) -> Iterator[dict[str, Tensor]]:
    if matrix.key.dtype.kind is NumberKind.UINT and matrix.part("").dtype is torch.uint8:
        yield {"": matrix.part("") ^ (0x80 if matrix.key.packing is None else 0x88)}


def _no_subnormals(matrix: Matrix) -> Iterator[dict[str, Tensor]]:
    codes = matrix.part("")
    raw = codes.view(torch.uint8)
    if matrix.key.dtype is FP8_E4M3:
        yield {"": torch.where(raw & 0x78 != 0, raw, 0).to(torch.uint8).view(codes.dtype)}
    elif matrix.key.dtype is FP4_E2M1:
        low, high = torch.where(raw & 0x06 != 0, raw & 0x0F, 0), torch.where(raw & 0x60 != 0, raw & 0xF0, 0)
        yield {"": (low | high).to(torch.uint8)}


_TURNS = (_interleaved, _separated)

MATRIX_MISTAKES: dict[str, Change] = {
    "gate and up rows of w13 are swapped": _rows("", "_bias", orders=(_halves,)),
    "gate and up rows of w13 are swapped, but not their biases": _rows("", orders=(_halves,)),
    "the biases of gate and up are swapped": _rows("_bias", orders=(_halves,)),
    "the scales of gate and up are swapped": _rows("_scale", orders=(_halves,)),
    "gate and up rows of w13 are read as interleaved": _rows("", "_bias", orders=_TURNS),
    "gate and up rows of w13 are read as interleaved, but not their biases": _rows("", orders=_TURNS),
    "the biases of gate and up are read as interleaved": _rows("_bias", orders=_TURNS),
    "the scales of gate and up are read as interleaved": _rows("_scale", orders=_TURNS),
    "gate and up have one scale for both": _with(_one_for_both("scale"), "w13"),
    "gate and up have one second scale for both": _with(_one_for_both("scale2"), "w13"),
    **_each("the second scales of {} are left out", _part("scale2", torch.ones_like)),
    **_each("the second scales of {} are divided by and not multiplied by", _part("scale2", torch.Tensor.reciprocal)),
    **_each("the second scales of {} are those of the first expert", _part("scale2", _of_first_expert)),
    **_each("the second input scales of {} are left out", _part("input_scale2", torch.ones_like)),
    "blocks of rows are counted over gate and up as one matrix": _blocks_of_one_matrix,
    "the groups of the weights are half as large": _half_groups,
    **_each("the groups of {} are twice as large", _other_group(lambda group: group // 2)),
    **_each("the first group of a row of {} stands for the whole row", _other_group(torch.zeros_like)),
    **_each("the memory of {} is read as that of a transposed matrix", _transposed("")),
    **_each("the memory of the scales of {} is read as that of a transposed matrix", _transposed("scale")),
    **_each("the scales of {} are left out", _part("scale", torch.ones_like)),
    **_each("the scales of {} are applied twice", _part("scale", lambda s: s.square().clamp(max=3e38))),
    **_each("the scales of {} are divided by and not multiplied by", _part("scale", torch.Tensor.reciprocal)),
    **_each("the scales of {} lose their sign", _part("scale", torch.Tensor.abs)),
    **_each("the scales of {} are twice as large", _part("scale", lambda s: 2 * s)),
    **_each("the scales of {} are half as large", _part("scale", lambda s: s / 2)),
    **_each("the scales of {} are those of expert 0", _part("scale", _of_first_expert)),
    **_each("the scales of {} are those of another row", _rolled("scale", 1)),
    **_each("the scales of {} are those of another group", _rolled("scale", 2)),
    **_each("the scales of {} are those of the first row", _part("scale", lambda s: s[:, :1].expand_as(s).clone())),
    **_each("the biases of {} are left out", _part("bias", torch.zeros_like)),
    **_each("the biases of {} are applied twice", _part("bias", lambda b: 2 * b)),
    **_each("the biases of {} are those of expert 0", _part("bias", _of_first_expert)),
    **_each("the biases of {} are multiplied by the scales", _bias_times_scale),
    **_each("the two codes of each byte of {} are swapped", _swapped_codes),
    **_each("the codes of {} are read as two's complement", _as_signed),
    **_each("subnormal codes of {} are read as zero", _no_subnormals),
    **_each("the zero points of {} are left out", _part("zero_point", torch.zeros_like)),
    **_each("the zero points of {} are the middle of the codes", _zero_points(lambda z, bits: 0 * z + 2 ** (bits - 1))),
    **_named("the zero points of {} are one too small", _zero_points_moved(-1)),
    **_named("the zero points of {} are one too large", _zero_points_moved(1)),
    **_each("the zero points of {} are cut to a code's bits", _zero_points(lambda zero, bits: zero & (2**bits - 1))),
    **_each("the zero points of {} are those of expert 0", _part("zero_point", _of_first_expert)),
    **_each("the zero points of {} are those of another row", _rolled("zero_point", 1)),
    **_each("the zero points of {} are those of another group", _rolled("zero_point", 2)),
    **_each("the columns' groups of {} are ignored", _consecutive_groups),
    **_each("the sorted columns of {} are taken to fill their groups", _filled_groups),
    **_each("the columns' groups of {} are those of expert 0", _part("g_idx", _of_first_expert)),
    **_each("the factors of the inputs of {} are left out", _part("pre_scale", torch.ones_like)),
    **_each("the factors of the inputs of {} are those of expert 0", _part("pre_scale", _of_first_expert)),
    **_each("the input scales of {} are left out", _part("input_scale", torch.ones_like)),
    **_each("the input scales of {} are those of expert 0", _part("input_scale", _of_first_expert)),
    **_each(
        "the input scales of {} are the largest of all experts",
        _part("input_scale", lambda scale: scale.amax().expand_as(scale).contiguous()),
    ),
    **_each("the input zero points of {} are left out", _part("input_zero_point", torch.zeros_like)),
}
#: problems that a backend with a common mistake may be solving, by its description, which completes "the output equals
#: what results when"
MISTAKES: dict[str, Change] = {**CALL_MISTAKES, **MATRIX_MISTAKES}


# ------------------------------------------------------------------ comparison


def compare(
    experts: type[FusedMoEExperts], problem: Problem, result: Tensor, place: Place, *, elements: bool = True
) -> None:
    """Raise AssertionError unless a result is right, naming the mistake that explains it.

    Args:
        experts: Experts class under test.
        problem: The case's tensors.
        result: Output ``[M, K]`` of the experts.
        place: Where the case ran.
        elements: Whether to bound single elements too, as for :meth:`Expected.compare`.

    Raises:
        AssertionError: The result is wrong. The message has the figures and the mistakes that explain it.
    """
    computed = computed_with(experts, problem, place)
    expected = computed.expected(place, experts.claims)
    try:
        expected.compare(result, "result", elements=elements)
    except AssertionError as error:
        try:
            found = _causes(experts, problem, result, place, elements=elements)
        except Exception as failed:
            # The original failure must be reported, whatever a backend does on a second call.
            cause = f"looking for the cause failed: {type(failed).__name__}: {failed}"
            raise AssertionError(f"{error}; {cause}") from failed
        if not found:
            raise
        raise AssertionError(f"{error}; the output equals what results when {', or when '.join(found)}") from None


def _causes(
    experts: type[FusedMoEExperts], problem: Problem, result: Tensor, place: Place, *, elements: bool
) -> list[str]:
    """Return :func:`explanations` of a wrong result.

    Inf and NaN from extreme e8m0 scales would hide other mistakes, so those scales are replaced first.
    """
    milder = not bool(result.isfinite().all()) and has_extreme_scales(problem.weights)
    if milder:
        problem = replace(problem, weights=without_extreme_scales(problem.weights))
        result = call(make_kernel(experts, problem, place), problem)
    computed = computed_with(experts, problem, place)
    expected = computed.expected(place, experts.claims)
    if milder and _within(expected, result, elements=elements):
        return ["the e8m0 scales 2**-127 or 2**127 of groups of zeros are misread"]
    return explanations(computed, result, expected, place, experts.claims, elements=elements)


def _within(expected: Expected, result: Tensor, *, elements: bool) -> bool:
    """Whether a result is within its bounds."""
    try:
        expected.compare(result, "", elements=elements)
    except AssertionError:
        return False
    return True


def explanations(
    problem: Problem,
    result: Tensor,
    expected: Expected,
    place: Place,
    claims: Claims | None = None,
    *,
    elements: bool = True,
) -> list[str]:
    """Return the descriptions of the mistakes that give a result.

    Args:
        problem: The case's tensors.
        result: Wrong output ``[M, K]``.
        expected: Output of a correct backend with these ``claims``.
        place: Where the case ran.
        claims: Claims of the experts class; None for a backend that rounds no more than it must.
        elements: Whether to bound single elements too.

    Returns:
        Equivalent mistakes, a few at most; empty if none gives the result.
    """
    if result.shape != expected.exact.shape or not result.numel():
        return []
    problem = _with_float_scales(problem)
    window = _telling(problem, result, expected)
    near: list[tuple[float, str, Problem]] = []
    with one_thread():
        for text, change in MISTAKES.items():
            rows = slice(0, len(result)) if text in _TOGETHER else window
            few, wrong = problem.only(rows), result[rows].double()
            # If there are several ways to make the mistake, take the nearest.
            ways = [(_distance(changed, wrong), way) for way, changed in enumerate(_changed(change, few))]
            distance, way = min(ways, default=(math.inf, 0))
            if distance < _REST * float((wrong - expected.exact[rows]).norm()):
                near.append((distance, text, _changed(change, problem)[way]))
    limit = _REST * float((result.double() - expected.exact).norm())
    fitting: dict[str, float] = {}
    for _, text, changed in sorted(near, key=lambda each: each[0])[:_COMPARED]:
        try:
            other = changed.expected(place, claims)
        except MoEError:
            continue
        distance = float((result.double() - other.exact).norm())
        if distance < limit and _within(other, result, elements=elements):
            fitting[text] = distance
    alike = _ALIKE * min(fitting.values(), default=0.0)
    return [text for text in MISTAKES if fitting.get(text, math.inf) <= alike][:_NAMED]


def _with_float_scales(problem: Problem) -> Problem:
    """The same problem with float32 scales, which can represent the effects of mistakes."""
    key, weights = problem.weights.weight_key, problem.weights
    if key is None or weights.w13_scale is None or weights.w2_scale is None:
        return problem
    scales = {"w13_scale": scale_values(weights.w13_scale), "w2_scale": scale_values(weights.w2_scale)}
    return _weights(problem, weight_key=key.with_scale_dtype(torch.float32), **scales)


def _telling(problem: Problem, result: Tensor, expected: Expected) -> slice:
    """Select a few tokens around the one with the largest error, or all if they share a scale."""
    key = problem.weights.activation_key
    tokens = len(result)
    if tokens <= _TOKENS or (key is not None and key.spans_tokens):
        return slice(0, tokens)
    error = (result.double() - expected.exact).norm(dim=1) / expected.bound.norm(dim=1).clamp_min(1e-300)
    first = min(max(int(error.nan_to_num(math.inf).argmax()) - 1, 0), tokens - _TOKENS)
    return slice(first, first + _TOKENS)


def _changed(change: Change, problem: Problem) -> list[Problem]:
    """Return the problems with the mistake; none if it does not apply."""
    found: list[Problem] = []
    try:
        for changed in change(problem):
            found.append(changed)
    except Exception:
        # The problem lacks what the mistake changes.
        pass
    return found


def _distance(problem: Problem, result: Tensor) -> float:
    """Norm of the difference between the changed problem's reference and a float64 result."""
    inputs = problem.inputs
    try:
        exact = fused_moe_reference(
            inputs.x,
            problem.weights,
            problem.case.config,
            topk_weights=inputs.topk_weights,
            topk_ids=inputs.topk_ids,
            expert_map=inputs.expert_map,
            lora=problem.applied,
        )
    except Exception:
        # A change that does not apply need not be a valid layer.
        return math.inf
    distance = float((exact.double() - result).norm())
    return math.inf if math.isnan(distance) else distance
