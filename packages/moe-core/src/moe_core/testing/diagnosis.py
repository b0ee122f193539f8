"""Name the common mistake that explains a wrong output.

Every mistake of :mod:`moe_core.testing.mistakes` is computed for a few tokens. Those close to the output are compared
with the whole output, within the bounds of :mod:`moe_core.reference.tolerance`. So a mistake is named only if a backend
with that mistake and no other could have produced this output.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from moe_core.errors import MoEError
from moe_core.interface.claims import Claims
from moe_core.interface.experts import FusedMoEExperts
from moe_core.reference.fused_moe import fused_moe_reference
from moe_core.reference.tolerance import Expected
from moe_core.testing.data import has_extreme_scales, without_extreme_scales
from moe_core.testing.harness import Place, Problem, call, make_kernel, one_thread
from moe_core.testing.matrix_mistakes import MATRIX_MISTAKES, with_float_scales
from moe_core.testing.mistakes import CALL_MISTAKES, Mistake
from moe_core.testing.requantized import computed_with

MISTAKES: tuple[Mistake, ...] = (*CALL_MISTAKES, *MATRIX_MISTAKES)
#: number of tokens on which every mistake is computed
_TOKENS = 2
#: largest fraction of the error that a mistake may leave unexplained
_REST = 0.5
#: a further mistake is named too if its distance is within this factor of the smallest one
_ALIKE = 1.25
#: number of mistakes that are compared with the whole output, and number of equivalent ones that are named
_COMPARED, _NAMED = 12, 4


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
    problem = with_float_scales(problem)
    everything = slice(0, len(result))
    window = _telling(problem, result, expected)
    near: list[tuple[float, int, Problem]] = []
    with one_thread():
        for number, mistake in enumerate(MISTAKES):
            rows = everything if mistake.together else window
            few, wrong = problem.tokens(rows.start, rows.stop), result[rows].double()
            # If there are several ways to make the mistake, take the nearest.
            ways = [(_distance(changed, wrong), way) for way, changed in enumerate(_changed(mistake, few))]
            distance, way = min(ways, default=(math.inf, 0))
            if distance < _REST * float((wrong - expected.exact[rows]).norm()):
                near.append((distance, number, list(_changed(mistake, problem))[way]))
    limit = _REST * float((result.double() - expected.exact).norm())
    fitting: list[tuple[float, int]] = []
    for _, number, changed in sorted(near, key=lambda each: each[:2])[:_COMPARED]:
        try:
            other = changed.expected(place, claims)
        except MoEError:
            continue
        distance = float((result.double() - other.exact).norm())
        if distance < limit and _within(other, result, elements=elements):
            fitting.append((distance, number))
    alike = _ALIKE * min(fitting, default=(0.0, 0))[0]
    named = sorted(number for distance, number in fitting if distance <= alike)
    return [MISTAKES[number].text for number in named[:_NAMED]]


def _telling(problem: Problem, result: Tensor, expected: Expected) -> slice:
    """Select a few tokens around the one with the largest error, or all if they share a scale."""
    key = problem.weights.activation_key
    tokens = len(result)
    if tokens <= _TOKENS or (key is not None and not key.is_static and key.group_shape.is_per_tensor):
        return slice(0, tokens)
    error = (result.double() - expected.exact).norm(dim=1) / expected.bound.norm(dim=1).clamp_min(1e-300)
    first = min(max(int(error.nan_to_num(math.inf).argmax()) - 1, 0), tokens - _TOKENS)
    return slice(first, first + _TOKENS)


def _changed(mistake: Mistake, problem: Problem) -> Iterator[Problem]:
    """Yield the problems with the mistake; none if the mistake does not apply."""
    try:
        yield from mistake.change(problem)
    except MoEError:
        return


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
    except MoEError:
        return math.inf
    distance = float((exact.double() - result).norm())
    return math.inf if math.isnan(distance) else distance
