"""A fused MoE layer with a worst-case bound for each output, apart from everything that the packages compute with.

It shares no code with :mod:`moe_core.reference.fused_moe`, :mod:`moe_core.reference.quantization` or
:mod:`moe_core.reference.tolerance`: codes are decoded bit by bit, pair by pair, in NumPy's float64.  A value is a
centre and a radius, and each step adds to the radius the most that a sound implementation may be off:

- a conversion to the layer's dtype: half a unit in the last place, of weights and of
  activations where they enter a product, of the product, the activated value, each expert's result and the output
- a sum of n float32 terms: n 2^-24 of the sum of their magnitudes
- a function: its Lipschitz constant times the radius, and 2^-20 of what it is evaluated from
- a quantizer: its rounding on both sides, and every scale that the radius allows

Worst cases add up where errors really cancel, so the bound is far looser than the conformance kit's; it assumes nothing
about their distribution.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from moe_core import FusedMoEConfig, MoEActivation, MoEWeights, QuantKey
from moe_core.spec.numerics import AMAX_FLOOR, NumberKind
from torch import Tensor

Array = np.ndarray

#: evaluating a function in float32, where terms cancel
FUNCTION = 2.0**-20


@dataclass(frozen=True)
class Conversion:
    """To a dtype: the largest error relative to a value, and of what is subnormal."""

    unit: float
    tiny: float

    @staticmethod
    def to(dtype: torch.dtype) -> Conversion:
        bits = torch.finfo(dtype)
        return Conversion(float(bits.eps) / 2, float(bits.smallest_normal * bits.eps) / 2)


@dataclass(frozen=True)
class Ball:
    """Values and the most that each may be off."""

    value: Array
    radius: Array

    @staticmethod
    def exact(value: Array) -> Ball:
        return Ball(value, np.zeros_like(value))

    @property
    def most(self) -> Array:
        return np.abs(self.value) + self.radius

    def stored(self, how: Conversion) -> Ball:
        """After a conversion."""
        return Ball(self.value, self.radius + how.unit * self.most + how.tiny)

    def times(self, other: Ball) -> Ball:
        a, b = self, other
        radius = np.abs(a.value) * b.radius + np.abs(b.value) * a.radius + a.radius * b.radius
        return Ball(a.value * b.value, radius)


def plain(tensor: Tensor) -> Array:
    return tensor.double().numpy()


# ------------------------------------------------------------------ weights


def e4m3(codes: Array) -> Array:
    sign = np.where(codes & 0x80, -1.0, 1.0)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    return sign * np.where(exponent == 0, mantissa * 2.0**-9, (8.0 + mantissa) * 2.0 ** (exponent - 10.0))


def e2m1(codes: Array) -> Array:
    exponent, mantissa = (codes >> 1) & 3, codes & 1
    size = np.where(exponent == 0, 0.5 * mantissa, (1 + 0.5 * mantissa) * 2.0 ** (exponent - 1.0))
    return np.where(codes & 8, -size, size)


def scales(tensor: Tensor) -> Array:
    if tensor.dtype in (torch.uint8, torch.float8_e8m0fnu):
        return np.exp2(tensor.view(torch.uint8).numpy().astype(np.float64) - 127)
    return plain(tensor)


def matrix(weights: MoEWeights, name: str, expert: int, parts: int, cols: int) -> Array:
    """One expert's w13 or w2 [rows, cols], element by element."""
    key: QuantKey | None = weights.weight_key
    stored: Tensor = getattr(weights, name)[expert]
    if key is None:
        return plain(stored)
    raw = stored.view(torch.uint8).numpy().astype(np.int64)
    if key.packing is not None:
        raw = np.stack((raw & 15, raw >> 4), axis=-1).reshape(len(raw), -1)[:, :cols]
    if key.dtype.kind is NumberKind.FLOAT:
        values = e4m3(raw) if key.dtype.bits == 8 else e2m1(raw)
    elif key.dtype.kind is NumberKind.INT:
        values = np.where(raw >= 128, raw - 256, raw).astype(np.float64)
    else:
        values = raw.astype(np.float64)
    scale = scales(getattr(weights, f"{name}_scale"))[expert]
    zero = getattr(weights, f"{name}_zero_point")
    rows, part = len(values), len(values) // parts
    row = np.arange(rows)
    if scale.ndim == 1:  # one for each part
        at_row, at_col = row // part, None
        spread = scale[at_row][:, None]
        subtract = None if zero is None else plain(zero)[expert][at_row][:, None]
    else:
        height = part if key.group_shape.row == -1 else key.group_shape.row
        per_part = -(-part // height)
        at_row = row // part * per_part + row % part // height
        g_idx = getattr(weights, f"{name}_g_idx")
        if g_idx is not None:
            at_col = g_idx[expert].numpy()
        else:
            at_col = np.arange(cols) // (cols if key.group_size == -1 else key.group_size)
        spread = scale[at_row][:, at_col]
        subtract = None if zero is None else plain(zero)[expert][at_row][:, at_col]
    if subtract is None:
        subtract = float(key.dtype.offset)
    return (values - subtract) * spread


# ------------------------------------------------------------------ quantized activations


def nearest(x: Array, key: QuantKey) -> Array:
    """The nearest number of the key's elements, ties to even."""
    dtype = key.dtype
    if dtype.kind is NumberKind.FLOAT:
        mantissa, lowest = (3, -6) if dtype.bits == 8 else (1, 0)
        exponent = np.floor(np.log2(np.maximum(np.abs(x), 2.0**lowest)))
        step = np.exp2(exponent - mantissa)
        return np.clip(np.rint(x / step) * step, dtype.min_value, dtype.max_value)
    return np.clip(np.rint(x), dtype.min_value, dtype.max_value)


def divided(x: Array, scale: Array) -> Array:
    """In float32, as quantizers do."""
    with np.errstate(over="ignore", under="ignore"):
        return (x.astype(np.float32) / scale.astype(np.float32)).astype(np.float64)


def power_of_two(amax: Array, key: QuantKey) -> Array:
    """The e8m0 scale of a largest value."""
    if key.scale.rounding == "up":
        quotient = divided(np.maximum(amax, AMAX_FLOOR), np.full_like(amax, key.dtype.max_value))
        return np.exp2(np.ceil(np.log2(quotient)))
    exponent = np.floor(np.log2(np.maximum(amax, AMAX_FLOOR)))
    if key.scale.rounding == "even":
        goes_up = 1.75 if key.dtype.bits == 4 else 1.9375
        exponent += amax / np.exp2(exponent) >= goes_up
    return np.exp2(exponent - math.floor(math.log2(key.dtype.max_value)))


def quantized(x: Ball, key: QuantKey | None, scale: float | None = None, zero: float | None = None) -> Ball:
    """Rows [R, K] after a quantizer that spans them as the key says."""
    if key is None or not x.value.size:
        return x
    if scale is not None:
        return _with_scales(x, key, [np.array(scale)], 0.0 if zero is None else zero)
    rows, cols = x.value.shape
    width = cols if key.group_shape.col == -1 else key.group_shape.col
    if key.group_shape.row == -1:  # all rows at once
        flat = quantized(Ball(x.value.reshape(1, -1), x.radius.reshape(1, -1)), key.with_group(1, -1))
        return Ball(flat.value.reshape(rows, cols), flat.radius.reshape(rows, cols))
    parts = [slice(start, min(start + width, cols)) for start in range(0, cols, width)]
    found = [_group(Ball(x.value[:, part], x.radius[:, part]), key) for part in parts]
    return Ball(np.concatenate([f.value for f in found], 1), np.concatenate([f.radius for f in found], 1))


def _group(x: Ball, key: QuantKey) -> Ball:
    """One group of columns of each row, with a dynamic scale."""
    spread = x.radius.max(axis=1, keepdims=True)
    if not key.symmetric:
        return _ranged(x, key, spread)
    amax = np.abs(x.value).max(axis=1, keepdims=True).astype(np.float32).astype(np.float64)
    if key.scale.dtype in (torch.uint8, torch.float8_e8m0fnu):
        low, high = power_of_two(np.maximum(amax - spread, 0), key), power_of_two(amax + spread, key)
        own = power_of_two(amax, key)
        between = [np.clip(own * 2.0**k, low, high) for k in range(-3, 4)]
        if np.any(high > own * 8) or np.any(low < own / 8):
            between += [np.clip(own * 2.0**k, low, high) for k in (*range(-40, -3), *range(4, 41))]
        return _with_scales(x, key, [own, *between], 0.0)
    own = divided(np.maximum(amax, AMAX_FLOOR), np.full_like(amax, key.dtype.max_value))
    value = nearest(divided(x.value, own), key) * own
    if not x.radius.any():
        return Ball.exact(value)
    largest = (np.maximum(amax, AMAX_FLOOR) + spread) / key.dtype.max_value * (1 + 2.0**-20)
    if key.dtype.kind is NumberKind.FLOAT:
        half = np.maximum(2.0**-4 * x.most, 2.0**-10 * largest)
    else:
        half = largest / 2
    return Ball(value, x.radius + half + np.abs(value - x.value) + 2.0**-20 * x.most)


def _ranged(x: Ball, key: QuantKey, spread: Array) -> Ball:
    """A dynamic scale and zero point: rounding both moves a value by a whole step."""
    low = np.minimum(x.value.min(axis=1, keepdims=True), 0.0)
    high = np.maximum(x.value.max(axis=1, keepdims=True), 0.0)
    steps = key.dtype.max_value - key.dtype.min_value
    own = divided(np.maximum((high - low).astype(np.float32), AMAX_FLOOR), np.full_like(low, steps))
    zero = np.clip(np.rint(key.dtype.min_value - divided(low, own)), key.dtype.min_value, key.dtype.max_value)
    codes = np.clip(np.rint(divided(x.value, own)) + zero, key.dtype.min_value, key.dtype.max_value)
    value = (codes - zero) * own
    if not x.radius.any():
        return Ball.exact(value)
    largest = (np.maximum(high - low, AMAX_FLOOR) + 2 * spread) / steps * (1 + 2.0**-20)
    return Ball(value, x.radius + largest + np.abs(value - x.value) + 2.0**-20 * x.most)


def _with_scales(x: Ball, key: QuantKey, candidates: list[Array], zero: float) -> Ball:
    """The first scale's values; the radius covers both ends of each value with every scale that may be taken."""

    def at(values: Array, scale: Array) -> Array:
        return (nearest_shifted(divided(values, scale), key, zero) - zero) * scale

    value = at(x.value, candidates[0])
    ends = [at(end, scale) for scale in candidates for end in (x.value - x.radius, x.value + x.radius)]
    radius = np.max([np.abs(end - value) for end in ends], axis=0)
    return Ball(value, radius * (1 + 2.0**-20))


def nearest_shifted(x: Array, key: QuantKey, zero: float) -> Array:
    if not zero:
        return nearest(x, key)
    return np.clip(np.rint(x) + zero, key.dtype.min_value, key.dtype.max_value)


# ------------------------------------------------------------------ the layer


def product(x: Ball, w: Array, bias: Array | None, how: Conversion) -> Ball:
    """x W^T + bias, both operands in the layer's dtype, summed in float32, and stored."""
    unit, tiny, size = how.unit, how.tiny, np.abs(w)
    terms = x.most @ size.T
    if bias is not None:
        terms = terms + np.abs(bias)
    radius = x.radius @ size.T * (1 + unit) ** 2
    radius = radius + terms * (2 * unit + unit**2 + (x.value.shape[1] + 4) * 2.0**-23)
    # what is subnormal in the dtype loses up to ``tiny`` on either side
    radius = radius + tiny * (size.sum(axis=1) + x.most.sum(axis=1, keepdims=True) + x.value.shape[1] * tiny)
    value = x.value @ w.T
    stored = Ball(value, radius).stored(how)
    return stored if bias is None else Ball(value + bias, stored.radius).stored(how)


def sigmoid(x: Array) -> Array:
    return np.where(x >= 0, 1 / (1 + np.exp(-np.abs(x))), np.exp(-np.abs(x)) / (1 + np.exp(-np.abs(x))))


def function(name: str, x: Ball) -> Ball:
    """The non-linear function itself."""
    v = x.value
    if name == "relu2":
        positive = np.maximum(v, 0.0)
        return Ball(positive**2, 2 * positive * x.radius + x.radius**2)
    if name == "silu":
        value, slope = v * sigmoid(v), 1.1
    elif name == "gelu":
        value, slope = 0.5 * v * (1 + np.vectorize(math.erf)(v / math.sqrt(2))), 1.13
    elif name == "gelu_tanh":
        value, slope = 0.5 * v * (1 + np.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))), 1.13
    else:
        raise NotImplementedError(name)
    return Ball(value, slope * x.radius + FUNCTION * x.most)


def clipped(x: Ball, low: float, high: float) -> Ball:
    return Ball(np.clip(x.value, low, high), x.radius)


def activated(z: Ball, config: FusedMoEConfig) -> Ball:
    """Activated values of the first product."""
    params, activation = config.params, config.activation
    limit = math.inf if params.limit is None else params.limit
    name = activation.value.removesuffix("_no_mul")
    if not activation.is_gated:
        return function(name, clipped(z, -math.inf, limit))
    count = z.value.shape[1] // 2
    gate, up = Ball(z.value[:, :count], z.radius[:, :count]), Ball(z.value[:, count:], z.radius[:, count:])
    if activation is MoEActivation.SWIGLUSTEP:
        first, second = clipped(function("silu", gate), -math.inf, limit), clipped(up, -limit, limit)
    elif activation is MoEActivation.SITU:
        beta = params.beta
        assert beta is not None
        value = beta * np.tanh(gate.value / beta) * sigmoid(gate.value)
        first = Ball(value, (1 + abs(beta) / 4) * gate.radius + FUNCTION * (gate.most + abs(beta)))
        soft = up.value if math.isinf(limit) else limit * np.tanh(up.value / limit)
        second = Ball(soft, up.radius + FUNCTION * up.most)
    elif activation is MoEActivation.SWIGLUOAI:
        assert params.alpha is not None
        assert params.beta is not None
        gate, up = clipped(gate, -math.inf, limit), clipped(up, -limit, limit)
        value = gate.value * sigmoid(params.alpha * gate.value)
        first = Ball(value, 1.1 * gate.radius + FUNCTION * gate.most)
        second = Ball(up.value + params.beta, up.radius + FUNCTION * (up.most + abs(params.beta)))
    else:
        first, second = function(name, clipped(gate, -math.inf, limit)), clipped(up, -limit, limit)
    result = first.times(second)
    return Ball(result.value, result.radius + FUNCTION * first.most * second.most)


def layer(
    x: Tensor,
    weights: MoEWeights,
    config: FusedMoEConfig,
    *,
    topk_weights: Tensor,
    topk_ids: Tensor,
    expert_map: Tensor | None,
) -> Ball:
    """Output [M, K] of a layer, and how far each element may be from it."""
    how = Conversion.to(config.dtype)
    key = weights.activation_key
    static = key is not None and key.is_static
    pairs = []
    for token, ids in enumerate(topk_ids.tolist()):
        for slot, expert in enumerate(ids):
            if not 0 <= expert < config.num_experts:
                continue
            local = expert if expert_map is None else int(expert_map[expert])
            if 0 <= local < config.local_experts:
                pairs.append((token, slot, local))
    output = Ball.exact(np.zeros((len(x), config.hidden_size)))
    if not pairs:
        return output
    tokens = np.array([pair[0] for pair in pairs])
    router = np.array([float(topk_weights[token, slot]) for token, slot, _ in pairs])[:, None]
    entering = Ball.exact(plain(x)[tokens])
    if config.apply_router_weight_on_input:
        entering = Ball(entering.value * router, np.zeros_like(entering.value)).stored(how)

    def of_expert(name: str, given: Ball) -> Ball:
        """What enters a product: factors of the inputs, then the quantizer."""
        factors = getattr(weights, f"{name}_pre_scale")
        if factors is not None:
            own = Ball.exact(np.stack([plain(factors[local]) for _, _, local in pairs]))
            given = given.times(own).stored(how)
        if not static:
            return quantized(given, key)
        scale, zero = getattr(weights, f"{name}_input_scale"), getattr(weights, f"{name}_input_zero_point")
        rows = [
            quantized(
                Ball(given.value[i : i + 1], given.radius[i : i + 1]),
                key,
                float(scale[local]),
                None if zero is None else float(zero[local]),
            )
            for i, (_, _, local) in enumerate(pairs)
        ]
        return Ball(np.concatenate([row.value for row in rows]), np.concatenate([row.radius for row in rows]))

    def products(name: str, given: Ball, parts: int, cols: int) -> Ball:
        bias = getattr(weights, f"{name}_bias")
        found = []
        for i, (_, _, local) in enumerate(pairs):
            w = matrix(weights, name, local, parts, cols)
            row = Ball(given.value[i : i + 1], given.radius[i : i + 1])
            found.append(product(row, w, None if bias is None else plain(bias[local]), how))
        return Ball(np.concatenate([f.value for f in found]), np.concatenate([f.radius for f in found]))

    z = products("w13", of_expert("w13", entering), 2 if config.is_gated else 1, config.hidden_size)
    h = activated(z, config).stored(how)
    y = products("w2", of_expert("w2", h), 1, config.intermediate_size)
    if not config.apply_router_weight_on_input:
        y = Ball(y.value * router, y.radius * np.abs(router)).stored(how)
    for i, token in enumerate(tokens):
        output.value[token] += y.value[i]
        # each addition may be stored in the layer's dtype
        output.radius[token] += y.radius[i] + how.unit * y.most[i] + how.tiny
    return output.stored(how)
