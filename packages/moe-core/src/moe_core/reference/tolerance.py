"""Tolerance of a backend's error against the float64 reference, from derived bounds.

None of the bounds is tuned empirically. The output ``B`` must meet two conditions. ``R`` is the exact reference.
``Y`` is the yardstick: the same layer with weights and activations in the 16-bit dtype of the config and float32 sums
(see :mod:`moe_core.reference.fused_moe`).

1. ``|B - R| <= max(1.5 |Y - R|, floor)`` in the Frobenius norm;
2. each element is within its own bound.

Both the floor and the bounds follow from one model of the rounding in a correct implementation. ``u`` is the unit
roundoff of the dtype:

- Weights and quantized activations: the rounding error of the yardstick. For backends that declare it, also the error
  of rounding their scales first.
- First product, activated values, each expert's result, output: an error uniform within half a unit in the last place
  (a whole unit if conversions truncate).
- Sequential float32 sums of n terms: an error of up to 2^-24 of each partial sum. Terms of one sign add up to S
  evenly, others to their norm T. The standard deviation is at most 2^-24 sqrt(n / 3 (T^2 + S^2 / 3)).
- Activation function: one float32 unit in the last place of the product of its inputs, after their limit.
- Quantizer of the second product (and of the first, if x was weighted): its inputs have these errors. Values near a
  rounding boundary end up on the other side, and a power-of-two scale may double. The reference's own values
  determine which and how far, so nothing is assumed about how often that happens.
- Magnitudes below the smallest normal float32, which GPUs may flush to zero: in activated values and in results.

The bound of an element is six standard deviations of the sum of all these (probability 2e-9 of falling outside, for
sums of independent bounded terms), plus the rounding of the output. The floor is the expected norm plus four standard
deviations of its square and the largest single event. For many tokens it is below the multiple in condition 1. For
one token it covers the case that the yardstick is accurate by chance. Where nothing is added up (a token without a
valid expert), the bound is exactly 0.

The expert ids of a token must be distinct, as every router makes them: the errors of an expert that occurs twice
would add up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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

#: Allowed ratio of a backend's error to the yardstick's, in the Frobenius norm.
FACTOR = 1.5
#: Allowed standard deviations of an element's error, and of the squared norm above its mean.
ELEMENT_SIGMAS, NORM_SIGMAS = 6.0, 4.0
#: Smallest normal float32; GPUs may flush smaller values to zero.
_SMALLEST_NORMAL = torch.finfo(torch.float32).smallest_normal
#: Means of eight equally likely parts of the normal distribution.
_NORMAL_POINTS = (-1.647, -0.895, -0.492, -0.158, 0.158, 0.492, 0.895, 1.647)


@dataclass(frozen=True, eq=False)
class Expected:
    """Expected output and allowed error.

    Attributes:
        exact: [M, K] float64.
        bound: [M, K], bound of each element's error.
        yardstick: Norm of the yardstick's error.
        typical: Norm of the error that the model predicts.
        floor: Lower limit of the allowed norm.
    """

    exact: Tensor
    bound: Tensor
    yardstick: float
    typical: float
    floor: float

    @property
    def limit(self) -> float:
        """Maximum Frobenius norm of the error."""
        return max(FACTOR * self.yardstick, self.floor)

    @staticmethod
    def sum_of(parts: Sequence[Expected], dtype: torch.dtype) -> Expected:
        """Combine the expectations of several ranks whose outputs are added up.

        The ranks' errors are independent. Each addition rounds a sum of at most the parts' magnitudes.

        Args:
            parts: Expectation of each rank.
            dtype: Dtype of the outputs and of the addition.

        Returns:
            The expectation of the sum.
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
            # These are squares: expectations add up; deviations and largest events add up to no more than that.
            math.hypot(*(part.floor for part in parts)) + float(added.norm()),
        )

    def compare(self, actual: Tensor, what: str, *, elements: bool = True) -> None:
        """Assert that an output meets the tolerance.

        Args:
            actual: [M, K].
            what: Description of the output, for the message.
            elements: Also check each element. Turn this off for millions of elements: some are outside their bounds,
                since errors are not independent if an activation's limit gives many values the same rounding error.

        Raises:
            AssertionError: A condition is violated; the message has all figures.
        """
        if tuple(actual.shape) != tuple(self.exact.shape):
            raise AssertionError(f"{what}: output has shape {list(actual.shape)}, expected {list(self.exact.shape)}")
        if not actual.numel():
            return
        error = (actual.double() - self.exact).abs()
        # NaN compares false with everything, so the test is for elements inside the bound.
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
    """Rounding to ``dtype``.

    Attributes:
        dtype: The dtype.
        truncates: Round towards zero instead of to nearest, which doubles the largest error.
    """

    dtype: torch.dtype
    truncates: bool = False

    @property
    def unit(self) -> float:
        """Largest relative error."""
        return torch.finfo(self.dtype).eps * (1.0 if self.truncates else 0.5)

    @property
    def tiny(self) -> float:
        """Largest error of a subnormal number."""
        info = torch.finfo(self.dtype)
        return info.smallest_normal * info.eps * (1.0 if self.truncates else 0.5)

    def largest(self, x: Tensor) -> Tensor:
        """Compute the largest rounding error: ``unit`` times the power of two below ``|x|``.

        Args:
            x: float64 values.

        Returns:
            Tensor of the same shape.
        """
        _, exponent = torch.frexp(x)
        power = torch.exp2(exponent.double() - 1)
        return torch.where(x == 0, 0.0, (self.unit * power).clamp_min(self.tiny))

    def variance(self, x: Tensor) -> Tensor:
        """Compute the variance of the rounding error, assumed uniform within its limits.

        Args:
            x: float64 values.

        Returns:
            Tensor of the same shape.
        """
        return self.largest(x).square() / 3

    def square(self, x: Tensor) -> Tensor:
        """Compute the squared error of the yardstick's rounding (0 for values the dtype represents).

        Args:
            x: float64 values.

        Returns:
            Tensor of the same shape.
        """
        return (x.to(self.dtype).double() - x).square() * (4.0 if self.truncates else 1.0)


def yardstick_dtype(dtype: torch.dtype, device: torch.device, activation_key: QuantKey | None) -> torch.dtype:
    """Select the dtype in which the yardstick multiplies.

    It is bfloat16 if a GPU quantizes float32 activations. Tensor cores accumulate products of 8-bit operands with
    fewer bits than float32 has (Hopper's e4m3: about 14), so float32 products would be too strict a yardstick.

    Args:
        dtype: Dtype of the layer.
        device: Device of the layer.
        activation_key: Quantization key of the activations.

    Returns:
        The dtype.
    """
    quantized = device.type != "cpu" and activation_key is not None
    return torch.bfloat16 if quantized and dtype is torch.float32 else dtype


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
    """Compute the reference output with its allowed deviations.

    Args:
        x: [M, K].
        weights: Canonical weights of the local experts.
        config: Configuration of the layer.
        topk_weights: [M, k] float.
        topk_ids: [M, k], global expert ids.
        expert_map: [E], as for :func:`moe_core.reference.fused_moe.fused_moe_reference`.
        compute_dtype: Dtype of the yardstick and the model; default: that of the config.
        truncates: Conversions to that dtype truncate.
        rounds_products: Products are also rounded before their biases are added
            (:class:`moe_core.interface.claims.Claims`).
        rounds_scales: Weight scales are rounded before they multiply (:class:`moe_core.interface.claims.Claims`).
        lora: Adapters, and the adapter id of each token.

    Returns:
        The expected output and its bounds.
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
    # Values that are not quantized again are rounded as an operand of the product, which _operands counts.
    before_quantizer = rounding.variance(weighted) * (on_input and key is not None)
    entering, before_quantizer, row = _pre_scaled(
        steps,
        "w13",
        weighted,
        # x with the router weight is rounded before it is multiplied once more.
        rounding.variance(weighted) * on_input if weights.w13_pre_scale is not None else before_quantizer,
        routed.token,
        routed,
        rounding,
    )
    first = _spread(entering, before_quantizer, dynamic)
    pairs_total, experts = len(routed.token), routed.by_expert
    hidden = x.new_zeros(pairs_total, config.intermediate_size, dtype=torch.float64)
    hidden_variance = torch.zeros_like(hidden)
    for expert, pairs in experts:
        token = routed.token[pairs]
        value, variance = first.value[row[pairs]], first.element[row[pairs]]
        if static:
            again = _spread(value, variance, key, steps.input_tensors("w13", expert))
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
    entering, before_quantizer, _ = _pre_scaled(steps, "w2", hidden, hidden_variance, own, routed, rounding)
    second = _spread(entering, before_quantizer, dynamic)
    result = x.new_zeros(pairs_total, config.hidden_size, dtype=torch.float64)
    variance, flushed = torch.zeros_like(result), torch.zeros_like(result)
    mean = square = largest = 0.0
    for expert, pairs in experts:
        part = second.rows(pairs)
        if static:
            part = _spread(part.value, part.element, key, steps.input_tensors("w2", expert))
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
        # In the norm over all output columns, an error of h_n counts |w_router W2[:, n]|^2.
        weight = 1.0 if on_input else router[pairs].square()
        gain = w.square().sum(dim=0) * weight
        rounded = _operands(part.value, w, y if bias is None else y - bias.double(), rounding)
        rounded += added_variance + early + scaled
        mean += float((part.mean * gain).sum() + (rounded * weight).sum())
        # Factor 2: a sum of many rounding errors is normal, and its square has twice its variance squared.
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
        # Factor 9/5: the fourth moment of a uniform variable in units of its variance squared.
        square += 1.8 * float(last.square().sum())
    # A rounded result times a router weight near 1 is not a random product: its second rounding may err by half a
    # unit.
    twice = rounding.square(result.to(compute_dtype).double() * factor).sum() - rounding.variance(contribution).sum()
    mean += float(twice.clamp_min(0.0))
    # A single rare event, such as a scale that doubles, may be all that happens.
    floor = math.sqrt(mean + NORM_SIGMAS * math.sqrt(square) + largest)
    return Expected(exact, bound, float((yardstick - exact).norm()), math.sqrt(mean), floor)


class _WeightErrors:
    """Error of group scales that are rounded to ``dtype`` before use; None: no error.

    All columns of a group are off by the same factor, so the error is computed, not modeled as random.
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
            # Only the mantissa is rounded: kernels store separately what the dtype's exponent cannot hold.
            mantissa, exponent = torch.frexp(scale)
            rounded[name] = torch.ldexp(mantissa.to(dtype).to(scale.dtype), exponent)
        if any(not torch.equal(rounded[name], scale) for name, scale in scales.items()):
            self.steps = Steps(replace(weights, **rounded), config, torch.float64, None, weights.activation_key)

    def square(self, name: str, expert: int, w: Tensor, x: Tensor) -> Tensor:
        """Compute the squared error of x W^T.

        Args:
            name: "w13" or "w2".
            expert: Local expert.
            w: W without the error.
            x: Rows that enter the product.

        Returns:
            Squared error of each element.
        """
        if self.steps is None:
            return x.new_zeros(())
        return (x @ (self.steps.weight(name, expert) - w).T).square()


def _product(x: Tensor, variance: Tensor, w: Tensor, bias: Tensor | None, rounding: Rounding) -> tuple[Tensor, Tensor]:
    """x W^T + bias and the variance of its error: that of x, plus :func:`_operands`."""
    z = x @ w.T
    z_variance = variance @ w.square().T + _operands(x, w, z, rounding)
    return (z if bias is None else z + bias.double()), z_variance


def _before_bias(z: Tensor, bias: Tensor | None, rounding: Rounding) -> Tensor:
    """Variance of rounding a product before its bias is added; ``z`` includes the bias."""
    return torch.zeros_like(z) if bias is None else rounding.variance(z - bias.double())


def _pre_scaled(
    steps: Steps, name: str, x: Tensor, variance: Tensor, row: Tensor, routed: RoutedPairs, rounding: Rounding
) -> tuple[Tensor, Tensor, Tensor]:
    """Apply the column factors of pre-scaled weights to ``x`` and its error variance.

    See :meth:`moe_core.reference.fused_moe.Steps.pre_scaled`. A product that is quantized again is rounded first. The
    rounding of operands of a matrix product is counted there.
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
    """What adapters add to one expert's product, and the variance of its error.

    ``x`` are the rows of the tokens ``token``, and ``variance`` is that of the error of ``x``. The values between the
    two products are rounded, and so is the addition.
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
    """Error variance of a float32 sum per T^2 + S^2 / 3, for a number of terms."""
    return 2.0**-48 * terms / 3


def _operands(x: Tensor, w: Tensor, product: Tensor, rounding: Rounding) -> Tensor:
    """Variance of ``product``, x W^T, from rounding both operands and from summing in float32."""
    x2, w2 = x.square(), w.square()
    summing = _summing(x.shape[1])
    of_operands = x2 @ (rounding.square(w) + summing * w2).T + rounding.square(x) @ w2.T
    return of_operands + summing / 3 * product.square()


def _activated(z: Tensor, sigma: Tensor, config: FusedMoEConfig) -> tuple[Tensor, Tensor]:
    """Activated values of ``z``, and the variance caused by errors of deviation ``sigma``.

    Uses differences instead of derivatives: they hold at kinks (clamps, relu) too.
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
    # Activations are evaluated in float32, where gelu's 1 + erf(x) cancels: the error is relative to the clamped
    # inputs, not to the result.
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
    """Values after the quantizer, and the effect of errors before it.

    Attributes:
        value: The values.
        element: Squared error of each element: a bound if quantized, else the variance.
        mean: Expected squared error.
        peak: Largest squared error.
        jump_peak: Largest possible squared error from other scales.
        jumps: Squared errors from other scales, for a sample of equally likely cases.
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


def _spread(x: Tensor, variance: Tensor, key: QuantKey | None, static: Mapping[str, Tensor] | None = None) -> _Spread:
    """Quantize ``x``, whose elements have errors of ``variance``; ``static`` are scales and zero point by name."""
    # Factor 3: the fourth moment of a normal variable, so that mean x peak is at least the variance of its square.
    if key is None or not x.numel():
        return _Spread(x, variance, variance, 3 * variance, torch.zeros_like(x))

    def quantized(values: Tensor, like: Quantized | None = None) -> Quantized:
        """Codes of ``values``, with the scales of other codes if given."""
        if like is None:
            return quantize_tensor(values, key, **(static or {}))
        return quantize_tensor(values, key, scale=like.scale, zero_point=like.zero_point, scale2=like.scale2)

    def value(codes: Quantized) -> Tensor:
        return dequantize_tensor(codes, key, cols=x.shape[1], dtype=torch.float64)

    sigma = variance.sqrt()
    outward = torch.where(x < 0, -sigma, sigma)
    own = quantized(x)
    base = value(own)
    if not bool(variance.any()):
        zero = torch.zeros_like(x)
        return _Spread(base, zero, zero, zero, zero)
    inward = x - torch.minimum(ELEMENT_SIGMAS * sigma, x.abs()) * outward.sign()
    scales = [own]
    computed = not key.scale.static
    if computed:
        scales += [quantized(inward), quantized(x + ELEMENT_SIGMAS * outward)]
    bound, jump_peak = torch.zeros_like(x), torch.zeros_like(x)
    for at in scales:
        jump_peak = torch.maximum(jump_peak, (value(quantized(x, at)) - base).square())
        for moved in (x - ELEMENT_SIGMAS * sigma, x, x + ELEMENT_SIGMAS * sigma):
            bound = torch.maximum(bound, (value(quantized(moved, at)) - base).square())
    mean = torch.zeros_like(x)
    jumps = []
    for point in _NORMAL_POINTS:
        flipped = value(quantized(x + point * sigma, own)) - base
        mean += flipped.square() / len(_NORMAL_POINTS)
        if computed:
            jumps.append((value(quantized(x, quantized(x + point * outward))) - base).square())
    return _Spread(base, bound, mean, bound, jump_peak, tuple(jumps))


def _bias(weights: MoEWeights, name: str, expert: int) -> Tensor | None:
    bias: Tensor | None = getattr(weights, f"{name}_bias")
    return None if bias is None else bias[expert]
