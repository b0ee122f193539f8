"""Common mistakes of experts, expressed as other arguments of the reference.

A backend that omits a bias computes exactly what the reference computes without it. So each mistake maps a problem to
the problems that such a backend would solve. :mod:`moe_core.testing.diagnosis` compares a wrong output with all of
them. Mistakes with the two matrices are in :mod:`moe_core.testing.matrix_mistakes`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moe_core.errors import MoEError
from moe_core.spec.activation import ActivationParams, MoEActivation
from moe_core.spec.numerics import is_e8m0
from moe_core.spec.quant_key import (
    NAMES,
    QuantKey,
    kFp8Dynamic128Sym,
    kFp8DynamicTokenSym,
    kInt8DynamicTokenSym,
    kMxfp8Dynamic,
)
from moe_core.spec.routing import RoutingConfig, RoutingMethodType, route
from moe_core.testing.harness import Problem

#: problems that a backend with the mistake may be solving; none if the mistake makes no difference
Change = Callable[[Problem], Iterator[Problem]]


@dataclass(frozen=True)
class Mistake:
    """One mistake.

    Attributes:
        text: Description that completes "the output equals what results when".
        change: Yields the problems that a backend with the mistake may be solving.
        together: Whether a result depends on all tokens.
    """

    text: str
    change: Change
    together: bool = False


def with_inputs(problem: Problem, **changed: Tensor | None) -> Problem:
    """Return the problem with other arguments of the call.

    Args:
        problem: The problem.
        **changed: Fields of the inputs to replace.

    Returns:
        The changed problem.
    """
    return replace(problem, inputs=replace(problem.inputs, **changed))  # type: ignore[arg-type]


def with_weights(problem: Problem, **changed: Tensor | QuantKey | None) -> Problem:
    """Return the problem with other weights or keys.

    Args:
        problem: The problem.
        **changed: Fields of the weights to replace.

    Returns:
        The changed problem.
    """
    return replace(problem, weights=replace(problem.weights, **changed))  # type: ignore[arg-type]


def with_config(problem: Problem, **changed: object) -> Problem:
    """Return the problem of another layer with the same tensors.

    Args:
        problem: The problem.
        **changed: Fields of the layer's config to replace.

    Returns:
        The changed problem.
    """
    case = problem.case
    return replace(problem, case=replace(case, config=replace(case.config, **changed)))  # type: ignore[arg-type]


# ------------------------------------------------------------------ router weights


def _no_router_weight(problem: Problem) -> Iterator[Problem]:
    yield with_inputs(problem, topk_weights=torch.ones_like(problem.inputs.topk_weights))


def _router_weight_twice(problem: Problem) -> Iterator[Problem]:
    given = problem.inputs
    yield with_inputs(problem, topk_weights=given.topk_weights.square())
    if problem.case.config.apply_router_weight_on_input:
        # once on the input and once on the result
        weighted = with_inputs(problem, x=given.x.double() * given.topk_weights.double())
        yield with_config(weighted, apply_router_weight_on_input=False)


def _router_weight_elsewhere(problem: Problem) -> Iterator[Problem]:
    if problem.case.config.top_k == 1:
        yield with_config(problem, apply_router_weight_on_input=not problem.case.config.apply_router_weight_on_input)


def _router_weight_order(problem: Problem) -> Iterator[Problem]:
    if problem.case.config.top_k > 1:
        for shift in (1, -1):
            yield with_inputs(problem, topk_weights=problem.inputs.topk_weights.roll(shift, dims=1))
        yield with_inputs(problem, topk_weights=problem.inputs.topk_weights.flip(1))


# ------------------------------------------------------------------ experts


def _other_expert(shift: int) -> Change:
    def change(problem: Problem) -> Iterator[Problem]:
        config, ids = problem.case.config, problem.inputs.topk_ids
        if config.local_experts < 2:
            return
        valid = (ids >= 0) & (ids < config.num_experts)
        yield with_inputs(problem, topk_ids=torch.where(valid, (ids + shift) % config.num_experts, ids))
        # Shift the experts of this rank by their local ids.
        order = torch.arange(config.local_experts, device=ids.device).roll(-shift)
        yield _experts_in_order(problem, order)

    return change


def _first_expert(problem: Problem) -> Iterator[Problem]:
    if problem.case.config.local_experts > 1:
        yield _experts_in_order(
            problem, torch.zeros(problem.case.config.local_experts, dtype=torch.long, device=problem.weights.w2.device)
        )


def _reversed_experts(problem: Problem) -> Iterator[Problem]:
    order = torch.arange(problem.case.config.local_experts).flip(0)
    if len(order) > 1:
        yield _experts_in_order(problem, order)


def _experts_in_order(problem: Problem, order: Tensor) -> Problem:
    """Give expert e the weights of expert ``order[e]``."""
    return with_weights(problem, **{name: taken(tensor, 0, order) for name, tensor in problem.weights.tensors()})


def taken(tensor: Tensor, dim: int, index: Tensor) -> Tensor:
    """Apply ``index_select`` to a tensor of any dtype.

    Args:
        tensor: The tensor.
        dim: Dimension to select from.
        index: Indices to select.

    Returns:
        The selected entries.
    """
    raw = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
    return raw.index_select(dim, index.to(tensor.device)).view(tensor.dtype)


def _ignored_map(problem: Problem) -> Iterator[Problem]:
    config = problem.case.config
    if problem.inputs.expert_map is None:
        return
    identity = torch.arange(config.num_experts, dtype=torch.int32, device=problem.inputs.expert_map.device)
    yield with_inputs(problem, expert_map=identity)
    yield with_inputs(problem, expert_map=identity % config.local_experts)
    yield with_inputs(problem, expert_map=identity.clamp(max=config.local_experts - 1))


def _inverse_map(problem: Problem) -> Iterator[Problem]:
    config, given = problem.case.config, problem.inputs.expert_map
    if given is None:
        return
    found = torch.full_like(given, -1)
    here = ((given >= 0) & (given < config.local_experts)).nonzero().flatten()
    found[given[here].long()] = here.to(given.dtype)
    yield with_inputs(problem, expert_map=found)
    yield with_inputs(problem, expert_map=found.clamp(max=config.local_experts - 1))


def _shifted_map(problem: Problem) -> Iterator[Problem]:
    config, given = problem.case.config, problem.inputs.expert_map
    if given is None:
        return
    for shift in (1, -1):
        yield with_inputs(problem, expert_map=given.roll(shift))
        moved = torch.where((given >= 0) & (given < config.local_experts), given + shift, given)
        yield with_inputs(problem, expert_map=moved)


def _negative_local_ids(problem: Problem) -> Iterator[Problem]:
    config, given = problem.case.config, problem.inputs.expert_map
    if given is not None:
        for first in (-1, -2):
            yield with_inputs(
                problem, expert_map=torch.where(given <= first, given % config.local_experts, given).to(given.dtype)
            )


def _large_local_ids(problem: Problem) -> Iterator[Problem]:
    config, given = problem.case.config, problem.inputs.expert_map
    if given is not None:
        yield with_inputs(problem, expert_map=given.clamp(max=config.local_experts - 1))
        yield with_inputs(problem, expert_map=torch.where(given >= 0, given % config.local_experts, given))


def _negative_ids(problem: Problem) -> Iterator[Problem]:
    ids, count = problem.inputs.topk_ids, problem.case.config.num_experts
    yield with_inputs(problem, topk_ids=torch.where(ids == -1, count - 1, ids))
    yield with_inputs(problem, topk_ids=torch.where(ids < 0, ids % count, ids))
    yield with_inputs(problem, topk_ids=ids.clamp(min=0))


def _large_ids(problem: Problem) -> Iterator[Problem]:
    ids, count = problem.inputs.topk_ids, problem.case.config.num_experts
    yield with_inputs(problem, topk_ids=torch.where(ids >= 0, ids % count, ids))
    yield with_inputs(problem, topk_ids=ids.clamp(max=count - 1))


def _cut_ids(problem: Problem) -> Iterator[Problem]:
    if problem.inputs.topk_ids.dtype is torch.int64:
        yield with_inputs(problem, topk_ids=problem.inputs.topk_ids.int())


def _no_adapters(problem: Problem) -> Iterator[Problem]:
    if problem.lora is not None:
        yield replace(problem, lora=None)


# ------------------------------------------------------------------ activation


def _activation(activation: MoEActivation) -> Change:
    def change(problem: Problem) -> Iterator[Problem]:
        config = problem.case.config
        if activation is not config.activation and activation.is_gated == config.is_gated:
            limit = config.params.limit
            for params in (None, ActivationParams(limit=math.inf if limit is None else limit)):
                yield with_config(problem, activation=activation, activation_params=params)

    return change


def _no_limit(problem: Problem) -> Iterator[Problem]:
    given = problem.case.config.params
    if given.limit is not None and given.limit != math.inf:
        yield with_config(problem, activation_params=replace(given, limit=math.inf))


def _fixed_parameters(problem: Problem) -> Iterator[Problem]:
    config = problem.case.config
    yield with_config(problem, activation_params=None)
    # the limit of gpt-oss and of Step-3
    yield with_config(problem, activation_params=replace(config.params, limit=7.0))


# ------------------------------------------------------------------ quantized activations

_DYNAMIC = (kFp8DynamicTokenSym, kFp8Dynamic128Sym, kInt8DynamicTokenSym, kMxfp8Dynamic)
_NO_INPUT_SCALES = {f"{name}_input_{suffix}": None for name in ("w13", "w2") for suffix in ("scale", "zero_point")}


def _unquantized(problem: Problem) -> Iterator[Problem]:
    if problem.weights.activation_key is not None:
        yield with_weights(problem, activation_key=None, **_NO_INPUT_SCALES)


def _quantized_as(key: QuantKey) -> Change:
    def change(problem: Problem) -> Iterator[Problem]:
        if problem.weights.activation_key != key:
            yield with_weights(problem, activation_key=key, **_NO_INPUT_SCALES)

    return change


def _scale_spans(row: int, col: int) -> Change:
    def change(problem: Problem) -> Iterator[Problem]:
        key = problem.weights.activation_key
        if key is not None and not key.is_static and (key.group_shape.row, key.group_shape.col) != (row, col):
            yield with_weights(problem, activation_key=key.with_group(row, col))

    return change


def _rounding(rounding: str) -> Change:
    def change(problem: Problem) -> Iterator[Problem]:
        key = problem.weights.activation_key
        if key is not None and is_e8m0(key.scale.dtype) and key.scale.rounding != rounding:
            yield with_weights(problem, activation_key=key.with_rounding(rounding))

    return change


# ------------------------------------------------------------------ routing inside the experts


def _routed_by(name: str, change: Callable[[RoutingConfig], RoutingConfig | None]) -> Mistake:
    def problems(problem: Problem) -> Iterator[Problem]:
        config, logits = problem.case.config, problem.router_logits
        if config.routing is None or logits is None:
            return
        other = change(config.routing)
        if other is None or other == config.routing:
            return
        bias = problem.correction_bias if other.has_correction_bias else None
        topk_weights, topk_ids = route(logits, top_k=config.top_k, config=other, correction_bias=bias)
        yield with_inputs(problem, topk_weights=topk_weights, topk_ids=topk_ids)

    return Mistake(name, problems)


def _method(method: RoutingMethodType) -> Callable[[RoutingConfig], RoutingConfig | None]:
    def change(given: RoutingConfig) -> RoutingConfig | None:
        try:
            return RoutingConfig.from_method(
                method,
                num_expert_group=given.num_expert_group,
                topk_group=given.topk_group,
                routed_scaling_factor=given.routed_scaling_factor,
            )
        except MoEError:
            return None

    return change


_COMPUTED = [
    method
    for method in RoutingMethodType
    if method not in (RoutingMethodType.Unspecified, RoutingMethodType.Simulated, RoutingMethodType.Custom)
]

CALL_MISTAKES: tuple[Mistake, ...] = (
    Mistake("the router weight is left out", _no_router_weight),
    Mistake("the router weight is applied twice", _router_weight_twice),
    Mistake("the router weight is on the wrong side: input for result, or result for input", _router_weight_elsewhere),
    Mistake("the router weights of a token's experts are in another order", _router_weight_order),
    Mistake("the expert map is ignored", _ignored_map),
    Mistake("the expert map is read the other way round, from local to global", _inverse_map),
    Mistake("the expert map is off by one", _shifted_map),
    Mistake("negative local ids count from the last expert", _negative_local_ids),
    Mistake("local ids beyond the last expert select an expert", _large_local_ids),
    Mistake("negative ids select an expert", _negative_ids),
    Mistake("ids beyond the last expert select an expert", _large_ids),
    Mistake("ids are cut to 32 bits", _cut_ids),
    Mistake("each expert's weights are those of the next expert", _other_expert(1)),
    Mistake("each expert's weights are those of the expert before", _other_expert(-1)),
    Mistake("every expert's weights are those of expert 0", _first_expert),
    Mistake("the experts are in reverse order", _reversed_experts),
    Mistake("adapters are left out", _no_adapters),
    Mistake("the clamp limit of the activation is ignored", _no_limit),
    *(Mistake(f"the activation is {other.value}", _activation(other)) for other in MoEActivation),
    Mistake("the activation's parameters are ignored", _fixed_parameters),
    Mistake("the activations are not quantized", _unquantized),
    Mistake("the activations' scales span the whole row", _scale_spans(1, -1)),
    Mistake("the activations' scales span the whole tensor", _scale_spans(-1, -1), together=True),
    Mistake("the activations' scales span groups of 128", _scale_spans(1, 128)),
    *(Mistake(f"the activations' scales are rounded {way!r}", _rounding(way)) for way in ("up", "even", "down")),
    *(Mistake(f"the activations are quantized as {NAMES[key]}", _quantized_as(key)) for key in _DYNAMIC),
    *(_routed_by(f"the routing method is {method.name}", _method(method)) for method in _COMPUTED),
    _routed_by("the routing's scaling factor is left out", lambda given: replace(given, routed_scaling_factor=1.0)),
    _routed_by("the routing's correction bias is left out", lambda given: replace(given, has_correction_bias=False)),
    _routed_by("the router weights are normalized, or are not", lambda g: replace(g, renormalize=not g.renormalize)),
)
