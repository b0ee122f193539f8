"""Activation functions on tiles in registers, in float32.

The formulas are those of `moe_core.spec.activation`; KIND is the value of a `MoEActivation`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_core.kernels.device.casts import NAN, at_most, clamp


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _tanh(x):
    # an odd polynomial near 0, where the difference would cancel: the minimax fit of degree 9 (relative error 4e-8)
    square = x * x
    terms = -0.33332947 + square * (0.13320725 + square * (-0.052671812 + square * 0.016437581))
    return tl.where(tl.abs(x) < 0.55, x + x * square * terms, 2.0 * _sigmoid(2.0 * x) - 1.0)


@triton.jit
def _plain(x, KIND: tl.constexpr):
    if KIND == "silu":
        return x * _sigmoid(x)
    elif KIND == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        return x * _sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        tl.static_assert(KIND == "relu2", "unknown activation")
        x = tl.maximum(x, 0.0, propagate_nan=NAN)
        return x * x


@triton.jit
def activate_gated(gate, up, alpha, beta, limit, KIND: tl.constexpr, HAS_LIMIT: tl.constexpr):
    """Apply a gated activation to gate and up."""
    if KIND == "swiglustep":
        value = _plain(gate, "silu")
        if HAS_LIMIT:
            value = at_most(value, limit)
            up = clamp(up, limit)
        return value * up
    elif KIND == "situ":
        if HAS_LIMIT:
            up = limit * _tanh(up / limit)
        return beta * _tanh(gate / beta) * _sigmoid(gate) * up
    else:
        if HAS_LIMIT:
            gate = at_most(gate, limit)
            up = clamp(up, limit)
        if KIND == "swigluoai":
            return gate * _sigmoid(alpha * gate) * (up + beta)
        else:
            return _plain(gate, KIND) * up


@triton.jit
def activate_plain(x, limit, KIND: tl.constexpr, HAS_LIMIT: tl.constexpr):
    """Apply an activation without a gate; KIND omits the suffix `_no_mul`."""
    if HAS_LIMIT:
        x = at_most(x, limit)
    return _plain(x, KIND)


@triton.jit
def activate(x, up, epilogue):
    """Apply the activation of an `Epilogue` to `x`, and to `up` if it is gated.

    This is `activate_gated` with gate `x`, or `activate_plain`.
    """
    HAS_LIMIT: tl.constexpr = epilogue.limit is not None
    limit = epilogue.limit if HAS_LIMIT else 0.0
    if epilogue.gated:
        return activate_gated(x, up, epilogue.alpha, epilogue.beta, limit, epilogue.activation, HAS_LIMIT)
    else:
        return activate_plain(x, limit, epilogue.activation, HAS_LIMIT)
