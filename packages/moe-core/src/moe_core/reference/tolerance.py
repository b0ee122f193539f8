"""How far a backend may be from the float64 reference: derived bounds, nothing tried out.

Two conditions on the output ``B``, with the exact reference ``R`` and the yardstick ``Y`` (the same layer with weights
and activations in the 16-bit dtype of the config, float32 sums; see :mod:`moe_core.reference.fused_moe`):

1. ``|B - R| <= max(1.5 |Y - R|, floor)`` in the Frobenius norm;
2. each element within its own bound.

Both the floor and the bounds follow from one model of what a sound implementation rounds, ``u`` the unit roundoff
of the dtype:

- weights and quantised activations: what the yardstick's rounding of them is, and for backends that say so, what
  rounding their scales first adds;
- the first product, the activated values, each expert's result, the output: an error uniform within half a unit in the
  last place (a whole one where conversions truncate);
- float32 sums of n terms, one after another: an error of up to 2^-24 of each partial sum.  Terms of one sign add up
  to S evenly, others to their norm T: a standard deviation of at most 2^-24 sqrt(n / 3 (T^2 + S^2 / 3));
- the activation function: a unit of float32 in the last place of its inputs' product, after their limit;
- the quantiser of the second product (and of the first, where x was weighted) sees values that are off by this much:
  values near a rounding boundary land on the other side, and a power-of-two scale may double.  The reference's own
  values say which and how far, so nothing is assumed about how often that happens;
- magnitudes below the smallest normal float32, which GPUs may take for zeros: of activated values and of results.

An element's bound is six standard deviations of the sum of all these (2e-9 of falling outside, for sums of independent
bounded terms), plus the output's rounding.  The floor is the expected norm plus four standard deviations of its square
and the largest single event: for many tokens it lies below condition 1's multiple, for one token it allows that chance
gave the yardstick a lucky draw.  Where nothing is added up (a token without a valid expert), the bound is exactly 0.

A token's expert ids are distinct, as every router makes them: errors of one expert met twice would add up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moe_core.reference.fused_moe import RoutedPairs, Steps, fused_moe_reference, route_pairs
from moe_core.reference.quantization import Quantized, dequantize_tensor, quantize_tensor
from moe_core.spec.activation import MoEActivation, apply_moe_activation
from moe_core.spec.config import FusedMoEConfig
from moe_core.spec.lora import LoRA
from moe_core.spec.quant_key import QuantKey
from moe_core.spec.weights import MoEWeights

#: how much worse than the yardstick a backend may be, in the Frobenius norm
FACTOR = 1.5
#: standard deviations that an element may be off, and that the squared norm may exceed its mean
ELEMENT_SIGMAS, NORM_SIGMAS = 6.0, 4.0
#: of float32; GPUs may take what is smaller for zero
_SMALLEST_NORMAL = torch.finfo(torch.float32).smallest_normal
#: means of eight equally likely parts of the normal distribution
_NORMAL_POINTS = (-1.647, -0.895, -0.492, -0.158, 0.158, 0.492, 0.895, 1.647)


@dataclass(frozen=True, eq=False)
class Expected:
    """What is expected of an output, and how far it may be from it.

    - ``exact`` [M, K] float64, and the ``bound`` of each element's error
    - norms of the error: the ``yardstick``'s, the one that the model finds ``typical``, and the ``floor`` of the limit
    """

    exact: Tensor
    bound: Tensor
    yardstick: float
    typical: float
    floor: float

    @property
    def limit(self) -> float:
        """The largest allowed Frobenius norm of the error."""
        return max(FACTOR * self.yardstick, self.floor)

    @staticmethod
    def sum_of(parts: Sequence[Expected], dtype: torch.dtype) -> Expected:
        """Of the sum of what several ranks compute, whose outputs are rounded to ``dtype`` and added up in it.

        The ranks' errors are independent.  Each addition rounds a sum of at most the parts' magnitudes.
        """
        if len(parts) == 1:
            return parts[0]
        magnitude = torch.stack([part.exact.abs() for part in parts]).sum(0)
        added = (len(parts) - 1) * Rounding(dtype).unit * magnitude
        return Expected(
            torch.stack([part.exact for part in parts]).sum(0),
            torch.stack([part.bound for part in parts]).sum(0) + added,
            math.hypot(*(part.yardstick for part in parts)),
            math.hypot(*(part.typical for part in parts)),
            # of squares: expectations add up, deviations and largest events no more than that
            math.hypot(*(part.floor for part in parts)) + float(added.norm()),
        )

    def compare(self, actual: Tensor, what: str, *, elements: bool = True) -> None:
        """Raise AssertionError, with all figures, unless ``actual`` [M, K] meets both conditions, or the first only.

        Without ``elements``: of millions some lie outside their bounds, since errors are no independent draws where
        an activation's limit gives many values the same rounding error.
        """
        if tuple(actual.shape) != tuple(self.exact.shape):
            raise AssertionError(f"{what}: output has shape {list(actual.shape)}, expected {list(self.exact.shape)}")
        if not actual.numel():
            return
        error = (actual.double() - self.exact).abs()
        # a NaN compares false with everything, so the question is what is inside
        outside = ~(error <= (self.bound if elements else math.inf))
        norm, scale = float(error.norm()), float(self.exact.norm())
        if norm <= self.limit and not bool(outside.any()):
            return
        excess = torch.where(error.isnan(), math.inf, error - self.bound)
        row, column = divmod(int(excess.argmax()), actual.shape[1])
        at = (row, column)
        raise AssertionError(
            f"{what}: the error's norm is {norm:.4g} ({norm / scale if scale else math.inf:.3g} of the reference's), "
            f"allowed {self.limit:.4g} ({FACTOR} x that of torch in this precision, {self.yardstick:.4g}; "
            f"floor {self.floor:.4g}); "
            f"{int(outside.sum())} of {actual.numel()} elements in {int(outside.any(dim=1).sum())} of "
            f"{actual.shape[0]} rows are outside their bounds, the worst at {list(at)}: "
            f"{float(actual[at]):.6g}, expected {float(self.exact[at]):.6g} ± {float(self.bound[at]):.3g}"
        )


@dataclass(frozen=True)
class Rounding:
    """Rounding to ``dtype``, to nearest or, where it ``truncates``, towards zero: errors of up to twice the size."""

    dtype: torch.dtype
    truncates: bool = False

    @property
    def unit(self) -> float:
        """The largest relative error."""
        return torch.finfo(self.dtype).eps * (1.0 if self.truncates else 0.5)

    @property
    def tiny(self) -> float:
        """The largest error of what is subnormal."""
        info = torch.finfo(self.dtype)
        return info.smallest_normal * info.eps * (1.0 if self.truncates else 0.5)

    def largest(self, x: Tensor) -> Tensor:
        """The largest rounding error of float64 ``x``: ``unit`` times the power of two below ``|x|``."""
        _, exponent = torch.frexp(x)
        power = torch.exp2(exponent.double() - 1)
        return torch.where(x == 0, 0.0, (self.unit * power).clamp_min(self.tiny))

    def variance(self, x: Tensor) -> Tensor:
        """Variance of the error of rounding ``x``, uniform within what is possible."""
        return self.largest(x).square() / 3

    def square(self, x: Tensor) -> Tensor:
        """Squared error of float64 ``x`` as the yardstick rounds it (0 for what the dtype holds exactly)."""
        return (x.to(self.dtype).double() - x).square() * (4.0 if self.truncates else 1.0)


def yardstick_dtype(dtype: torch.dtype, device: torch.device, activation_key: QuantKey | None) -> torch.dtype:
    """What the yardstick of a layer of ``dtype`` multiplies in: bfloat16 where a GPU quantises float32 activations.

    Tensor cores of 8-bit operands add up with fewer bits than float32 has (Hopper's e4m3: about 14), so float32
    products are nobody's measure there.
    """
    quantised = device.type != "cpu" and activation_key is not None
    return torch.bfloat16 if quantised and dtype is torch.float32 else dtype


def expected_output(
    x: Tensor,
    weights: MoEWeights,
    config: FusedMoEConfig,
    *,
    topk_weights: Tensor,
    topk_ids: Tensor,
    expert_map: Tensor | None = None,
    compute_dtype: torch.dtype | None = None,
    truncates: bool = False,
    rounds_products: bool = False,
    rounds_scales: bool = False,
    lora: LoRA | None = None,
) -> Expected:
    """The reference with the allowed deviations; arguments as for
    :func:`moe_core.reference.fused_moe.fused_moe_reference`.

    ``compute_dtype``: of the yardstick and the model, default the config's; ``truncates``: conversions to it truncate;
    ``rounds_products``: products are rounded before their biases are added, too, and with ``rounds_scales`` the scales
    of weights before they multiply (:class:`moe_core.interface.claims.Claims`).
    """
    compute_dtype = compute_dtype or config.dtype
    of_weights = _WeightErrors(weights, config, compute_dtype if rounds_scales else None)
    yardstick = fused_moe_reference(
        x,
        weights,
        config,
        topk_weights=topk_weights,
        topk_ids=topk_ids,
        expert_map=expert_map,
        compute_dtype=compute_dtype,
        lora=lora,
    )
    rounding = Rounding(compute_dtype, truncates)
    steps = Steps(weights, config, torch.float64, None, weights.activation_key)
    routed = route_pairs(config, topk_ids, expert_map)
    key = weights.activation_key
    static = key is not None and key.is_static
    on_input = config.apply_router_weight_on_input
    router = topk_weights.double()[routed.token, routed.slot, None]
    dynamic = None if static else key

    weighted = routed.only_used(x.double() * topk_weights.double() if on_input else x.double())
    # what is not quantised again is rounded as an operand of the product, which _operands counts
    before_quantiser = rounding.variance(weighted) * (on_input and key is not None)
    entering, before_quantiser, row = _pre_scaled(
        steps,
        "w13",
        weighted,
        # x with the router weight is rounded before it is multiplied once more
        rounding.variance(weighted) * on_input if weights.w13_pre_scale is not None else before_quantiser,
        routed.token,
        routed,
        rounding,
    )
    first = _spread(entering, before_quantiser, dynamic, None)
    pairs_total, experts = len(routed.token), routed.by_expert
    hidden = x.new_zeros(pairs_total, config.intermediate_size, dtype=torch.float64)
    hidden_variance = torch.zeros_like(hidden)
    for expert, pairs in experts:
        token = routed.token[pairs]
        value, variance = first.value[row[pairs]], first.element[row[pairs]]
        if static:
            again = _spread(value, variance, key, *_static(weights, "w13", expert))
            value, variance = again.value, again.element
        w = steps.weight("w13", expert)
        bias = _bias(weights, "w13", expert)
        z, z_variance = _product(value, variance, w, bias, rounding)
        z_variance += of_weights.square("w13", expert, w, value)
        z_variance += _before_bias(z, bias, rounding) * rounds_products
        added, added_variance = _addition(lora, "w13", expert, weighted[token], token, rounding)
        z, z_variance = z + added, z_variance + added_variance
        z_variance += rounding.variance(z)
        hidden[pairs], spread = _activated(z, z_variance.sqrt(), config)
        stored = key is not None or weights.w2_pre_scale is not None
        hidden_variance[pairs] = spread + rounding.variance(hidden[pairs]) if stored else spread

    own = torch.arange(pairs_total, device=x.device)
    entering, before_quantiser, _ = _pre_scaled(steps, "w2", hidden, hidden_variance, own, routed, rounding)
    second = _spread(entering, before_quantiser, dynamic, None)
    result = x.new_zeros(pairs_total, config.hidden_size, dtype=torch.float64)
    variance, flushed = torch.zeros_like(result), torch.zeros_like(result)
    mean = square = largest = 0.0
    for expert, pairs in experts:
        part = second.rows(pairs)
        if static:
            part = _spread(part.value, part.element, key, *_static(weights, "w2", expert))
        w = steps.weight("w2", expert)
        token = routed.token[pairs]
        bias = _bias(weights, "w2", expert)
        y, y_variance = _product(part.value, part.element, w, bias, rounding)
        early = _before_bias(y, bias, rounding) * rounds_products
        scaled = of_weights.square("w2", expert, w, part.value)
        y_variance += early + scaled
        added, added_variance = _addition(lora, "w2", expert, hidden[pairs], token, rounding, hidden_variance[pairs])
        result[pairs], variance[pairs] = y + added, y_variance + added_variance
        flushed[pairs] = _SMALLEST_NORMAL * (1 + w.abs().sum(dim=1))
        # in the norm over all output columns, an error of h_n counts |w_router W2[:, n]|^2
        weight = 1.0 if on_input else router[pairs].square()
        gain = w.square().sum(dim=0) * weight
        rounded = _operands(part.value, w, y if bias is None else y - bias.double(), rounding)
        rounded += added_variance + early + scaled
        mean += float((part.mean * gain).sum() + (rounded * weight).sum())
        # 2: a sum of many rounding errors is normal, its square has twice its variance squared
        square += float((part.mean * part.peak * gain.square()).sum() + 2 * (rounded * weight).square().sum())
        largest = max(largest, float((part.peak * gain).max()), float((part.jump_peak * gain).sum(dim=1).max()))
        if part.jumps:
            jumps = torch.stack([(jump * gain).sum(dim=1) for jump in part.jumps])
            mean += float(jumps.mean(dim=0).sum())
            square += float(jumps.square().mean(dim=0).sum())
    factor = torch.ones_like(router) if on_input else router
    contribution = result * factor
    variance = variance * factor.square() + rounding.variance(contribution)
    exact = x.new_zeros(x.shape[0], config.hidden_size, dtype=torch.float64).index_add_(0, routed.token, contribution)
    total = torch.zeros_like(exact).index_add_(0, routed.token, variance)
    used = torch.zeros_like(exact[:, :1]).index_add_(0, routed.token, torch.ones_like(router))
    zeros = torch.zeros_like(exact).index_add_(0, routed.token, flushed * factor.abs())
    zeros += (used > 0) * max(rounding.tiny, _SMALLEST_NORMAL)
    bound = rounding.unit * exact.abs() + ELEMENT_SIGMAS * total.sqrt() + zeros
    for last in (rounding.variance(contribution), rounding.variance(exact)):
        mean += float(last.sum())
        # 9/5: the fourth moment of a uniform variable in units of its variance squared
        square += 1.8 * float(last.square().sum())
    # a rounded result times a router weight near 1 is no chance product: its second rounding may err by half a unit
    twice = rounding.square(result.to(compute_dtype).double() * factor).sum() - rounding.variance(contribution).sum()
    mean += float(twice.clamp_min(0.0))
    # a single rare event, such as a scale that doubles, may be all that happens
    floor = math.sqrt(mean + NORM_SIGMAS * math.sqrt(square) + largest)
    return Expected(exact, bound, float((yardstick - exact).norm()), math.sqrt(mean), floor)


class _WeightErrors:
    """What scales of groups of columns lose where they are rounded to ``dtype`` first; None: nothing.

    All columns of a group are off by the same factor, so that the error is known and not drawn anew for each.
    """

    def __init__(self, weights: MoEWeights, config: FusedMoEConfig, dtype: torch.dtype | None) -> None:
        self.steps: Steps | None = None
        scales = {name: getattr(weights, name) for name in ("w13_scale", "w2_scale")}
        if dtype is None or any(
            scale is None or scale.dim() < 3 or scale.shape[2] == 1 or not scale.is_floating_point()
            for scale in scales.values()
        ):
            return
        rounded: dict[str, Any] = {}
        for name, scale in scales.items():
            # the mantissa alone: kernels hold separately what the dtype's exponent can't
            mantissa, exponent = torch.frexp(scale)
            rounded[name] = torch.ldexp(mantissa.to(dtype).to(scale.dtype), exponent)
        if any(not torch.equal(rounded[name], scale) for name, scale in scales.items()):
            self.steps = Steps(replace(weights, **rounded), config, torch.float64, None, weights.activation_key)

    def square(self, name: str, expert: int, w: Tensor, x: Tensor) -> Tensor:
        """The squared error of x W^T; ``w``: W as it is."""
        if self.steps is None:
            return x.new_zeros(())
        return (x @ (self.steps.weight(name, expert) - w).T).square()


def _product(x: Tensor, variance: Tensor, w: Tensor, bias: Tensor | None, rounding: Rounding) -> tuple[Tensor, Tensor]:
    """x W^T + bias, and the variance of its error: that of x, and what :func:`_operands` says."""
    z = x @ w.T
    z_variance = variance @ w.square().T + _operands(x, w, z, rounding)
    return (z if bias is None else z + bias.double()), z_variance


def _before_bias(z: Tensor, bias: Tensor | None, rounding: Rounding) -> Tensor:
    """Variance of rounding a product before its bias, which ``z`` has."""
    return torch.zeros_like(z) if bias is None else rounding.variance(z - bias.double())


def _pre_scaled(
    steps: Steps, name: str, x: Tensor, variance: Tensor, row: Tensor, routed: RoutedPairs, rounding: Rounding
) -> tuple[Tensor, Tensor, Tensor]:
    """:meth:`moe_core.reference.fused_moe.Steps.pre_scaled` of ``x`` and of the ``variance`` of its error.

    A product that is quantised again is rounded first; what enters a matrix product is counted there.
    """
    factors: Tensor | None = getattr(steps.weights, f"{name}_pre_scale")
    if factors is None:
        return x, variance, row
    spread, own = steps.pre_scaled(name, x, row, routed)
    moved = variance[row]
    for expert, pairs in routed.by_expert:
        moved[pairs] *= factors[expert].double().square()
    if steps.activation_key is not None:
        moved += rounding.variance(spread)
    return spread, moved, own


def _addition(
    lora: LoRA | None,
    name: str,
    expert: int,
    x: Tensor,
    token: Tensor,
    rounding: Rounding,
    variance: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """What adapters add to one expert's product of the rows ``x`` of the tokens ``token``, and its variance.

    The values between the two products are rounded, and so is the addition; ``variance``: that of the error of ``x``.
    """
    if lora is None:
        return x.new_zeros(()), x.new_zeros(())
    a: Tensor = getattr(lora.weights, f"{name}_a")
    b: Tensor = getattr(lora.weights, f"{name}_b")
    added = x.new_zeros(len(x), b.shape[2])
    spread = torch.zeros_like(added)
    for adapter in range(lora.weights.num_adapters):
        rows = lora.adapter_ids[token] == adapter
        if not bool(rows.any()):
            continue
        low_matrix, high = a[adapter, expert].double(), b[adapter, expert].double()
        parts = len(low_matrix) // high.shape[1]
        before = x.new_zeros(()) if variance is None else variance[rows] @ low_matrix.square().T
        low = x[rows] @ low_matrix.T
        low_variance = before + _operands(x[rows], low_matrix, low, rounding) + rounding.variance(low)
        for part, (at, noise, matrix) in enumerate(
            zip(low.chunk(parts, 1), low_variance.chunk(parts, 1), high.chunk(parts, 0), strict=True)
        ):
            columns = slice(part * len(matrix), (part + 1) * len(matrix))
            value = at @ matrix.T
            added[rows, columns] = value
            terms = at.square() @ matrix.square().T
            summing = _summing(len(matrix.T)) * (terms + value.square() / 3)
            spread[rows, columns] = noise @ matrix.square().T + summing + rounding.variance(value)
    return added, spread


def _summing(terms: int) -> float:
    """Variance of a float32 sum's error over T^2 + S^2 / 3, of so many terms."""
    return 2.0**-48 * terms / 3


def _operands(x: Tensor, w: Tensor, product: Tensor, rounding: Rounding) -> Tensor:
    """Variance of ``product``, x W^T, from rounding both operands and from summing in float32."""
    x2, w2 = x.square(), w.square()
    summing = _summing(x.shape[1])
    of_operands = x2 @ (rounding.square(w) + summing * w2).T + rounding.square(x) @ w2.T
    return of_operands + summing / 3 * product.square()


def _activated(z: Tensor, sigma: Tensor, config: FusedMoEConfig) -> tuple[Tensor, Tensor]:
    """The activated values of ``z``, and the variance that errors of standard deviation ``sigma`` cause in them.

    Differences instead of derivatives: they hold at the kinks (clamps, relu) too.
    """

    def activate(values: Tensor) -> Tensor:
        return apply_moe_activation(config.activation, values, config.activation_params)

    h = activate(z)
    halves = [slice(None)]
    if config.is_gated:
        halves = [slice(0, z.shape[1] // 2), slice(z.shape[1] // 2, None)]
    variance = torch.zeros_like(h)
    for half in halves:
        moved = torch.zeros_like(sigma)
        moved[:, half] = sigma[:, half]
        change = torch.maximum((activate(z + moved) - h).abs(), (activate(z - moved) - h).abs())
        variance += change.square()
    # evaluated in float32, where gelu's 1 + erf(x) cancels: an error relative to the clamped inputs, not to the result
    params = config.params
    limit = math.inf if params.limit is None else params.limit
    soft = abs(params.beta or 1.0) if config.activation is MoEActivation.SITU else limit
    gate = z[:, : h.shape[1]].abs().clamp_max(soft)
    up = z[:, h.shape[1] :].abs().clamp_max(limit) if config.is_gated else torch.ones_like(gate)
    if config.activation is MoEActivation.SWIGLUOAI:
        up = up + abs(params.beta or 0.0)
    return h, variance + (2.0**-23 * torch.maximum(gate * up, h.abs())).square()


@dataclass(frozen=True, eq=False)
class _Spread:
    """Values after the quantiser, and what errors before it do to them.

    ``element``: the square that bounds (quantised) or describes (not quantised) each error; ``mean`` and ``peak``:
    expected and largest square; ``jumps``: squares of what other scales would give, a sample of equally likely cases,
    and ``jump_peak`` the largest possible.
    """

    value: Tensor
    element: Tensor
    mean: Tensor
    peak: Tensor
    jump_peak: Tensor
    jumps: tuple[Tensor, ...] = ()

    def rows(self, index: Tensor) -> _Spread:
        return _Spread(
            self.value[index],
            self.element[index],
            self.mean[index],
            self.peak[index],
            self.jump_peak[index],
            tuple(jump[index] for jump in self.jumps),
        )


def _spread(
    x: Tensor, variance: Tensor, key: QuantKey | None, scale: Tensor | None, zero_point: Tensor | None = None
) -> _Spread:
    """Quantise ``x``, whose elements have errors of ``variance``; ``scale``, ``zero_point`` where they are static."""
    # 3: the fourth moment of a normal variable, so that mean x peak is the variance of its square or more
    if key is None or not x.numel():
        return _Spread(x, variance, variance, 3 * variance, torch.zeros_like(x))

    def quantized(values: Tensor, with_scale: Tensor | None, with_zero: Tensor | None = None) -> Quantized:
        return quantize_tensor(values, key, scale=with_scale, zero_point=with_zero)

    def value(codes: Quantized) -> Tensor:
        return dequantize_tensor(codes, key, cols=x.shape[1], dtype=torch.float64)

    sigma = variance.sqrt()
    outward = torch.where(x < 0, -sigma, sigma)
    own = quantized(x, scale, zero_point)
    base = value(own)
    if not bool(variance.any()):
        zero = torch.zeros_like(x)
        return _Spread(base, zero, zero, zero, zero)
    inward = x - torch.minimum(ELEMENT_SIGMAS * sigma, x.abs()) * outward.sign()
    scales = [own]
    if scale is None:
        scales += [quantized(inward, None), quantized(x + ELEMENT_SIGMAS * outward, None)]
    bound, jump_peak = torch.zeros_like(x), torch.zeros_like(x)
    for at in scales:
        jump_peak = torch.maximum(jump_peak, (value(quantized(x, at.scale, at.zero_point)) - base).square())
        for moved in (x - ELEMENT_SIGMAS * sigma, x, x + ELEMENT_SIGMAS * sigma):
            bound = torch.maximum(bound, (value(quantized(moved, at.scale, at.zero_point)) - base).square())
    mean = torch.zeros_like(x)
    jumps = []
    for point in _NORMAL_POINTS:
        flipped = value(quantized(x + point * sigma, own.scale, own.zero_point)) - base
        mean += flipped.square() / len(_NORMAL_POINTS)
        if scale is None:
            at = quantized(x + point * outward, None)
            jumps.append((value(quantized(x, at.scale, at.zero_point)) - base).square())
    return _Spread(base, bound, mean, bound, jump_peak, tuple(jumps))


def _static(weights: MoEWeights, name: str, expert: int) -> tuple[Tensor | None, Tensor | None]:
    """Scale and zero point of the expert's activations."""
    scale: Tensor | None = getattr(weights, f"{name}_input_scale")
    zero_point: Tensor | None = getattr(weights, f"{name}_input_zero_point")
    return None if scale is None else scale[expert], None if zero_point is None else zero_point[expert]


def _bias(weights: MoEWeights, name: str, expert: int) -> Tensor | None:
    bias: Tensor | None = getattr(weights, f"{name}_bias")
    return None if bias is None else bias[expert]
