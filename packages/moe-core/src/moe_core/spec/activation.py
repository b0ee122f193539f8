"""Activations between the two matrix products of an expert, and their parameters.

A gated activation takes ``[..., 2N]``, gate ``g`` in the first half and up ``u`` in the second, and gives
``[..., N]``; a ``*_NO_MUL`` one takes and gives ``[..., N]``.  With sigma the logistic function and L the limit:

=============  ==========================================================================================
SILU           ``silu(g) * u``, silu(g) = g sigma(g) (SwiGLU, arXiv:2002.05202)
GELU           ``gelu(g) * u``, gelu(g) = g (1 + erf(g / sqrt 2)) / 2 (arXiv:1606.08415)
GELU_TANH      the tanh approximation of the same paper: gelu(g) = g sigma(2 sqrt(2/pi) (g + 0.044715 g^3))
RELU2          ``relu(g)^2 * u`` (squared ReLU: arXiv:2109.08668)
SWIGLUOAI      ``g sigma(alpha g) * (u + beta)`` (gpt-oss: alpha 1.702, beta 1, L 7)
SWIGLUSTEP     ``min(silu(g), L) * clamp(u, -L, L)`` (Step-3: L 7)
SITU           ``beta tanh(g / beta) sigma(g) * l(u)``, l(u) = L tanh(u / L), or u where there is no limit (Kimi K3)
=============  ==========================================================================================

Wherever the table does not use L itself, a limit clamps the inputs first: ``g = min(g, L)``, ``u = clamp(u, -L, L)``
(DeepSeek-style ``swiglu_limit``; part of SWIGLUOAI's definition).  The order is always gate, then up; checkpoints
that interleave the two (gpt-oss) are put in order when they are read.

Every implementation computes in float32 and keeps the relative precision of a small gate or up.  One formula cancels in
kernels: the ``1 + erf`` of GELU, whose error for negative gates is relative to ``g u``, not to the result.  The result
is rounded to the layer's dtype: float16 makes what exceeds 65504 infinite and what is below 3e-8 zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from moe_core.errors import ConfigError, TensorError, check_instance, check_tensor, did_you_mean


@dataclass(frozen=True)
class ActivationParams:
    """Parameters of an activation; None stands for the activation's default.

    ``limit`` may be ``math.inf`` to say "none" where the default is a number.
    """

    alpha: float | None = None
    beta: float | None = None
    limit: float | None = None

    def __post_init__(self) -> None:
        for name in ("alpha", "beta", "limit"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, (int, float)) or math.isnan(value)):
                raise ConfigError(f"activation parameter {name} must be a number, got {value!r}")
            if value is not None and math.isinf(value) and name != "limit":
                raise ConfigError(f"activation parameter {name} must be finite, got {value!r}")
        if self.limit is not None and self.limit <= 0:
            raise ConfigError(f"activation limit must be positive, got {self.limit}")


class MoEActivation(Enum):
    """The activation of a fused MoE layer; formulas in the module docstring.  Values are the field's names."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    RELU2 = "relu2"
    SWIGLUOAI = "swigluoai"
    SWIGLUSTEP = "swiglustep"
    SITU = "situ"
    SILU_NO_MUL = "silu_no_mul"
    GELU_NO_MUL = "gelu_no_mul"
    GELU_TANH_NO_MUL = "gelu_tanh_no_mul"
    RELU2_NO_MUL = "relu2_no_mul"

    #: Engines distinguish gate and up interleaved from one after the other; here it is always the latter.
    SWIGLUOAI_UNINTERLEAVE = "swigluoai"  # noqa: PIE796

    def __repr__(self) -> str:
        # evaluates back, so that the repr of a config does
        return str(self)

    @property
    def is_gated(self) -> bool:
        """Whether the input holds gate and up (2N columns) or one value per output."""
        return not self.value.endswith("_no_mul")

    @property
    def parameters(self) -> frozenset[str]:
        """Names of the :class:`ActivationParams` that this activation uses."""
        own = {MoEActivation.SWIGLUOAI: {"alpha", "beta"}, MoEActivation.SITU: {"beta"}}
        return frozenset(own.get(self, set()) | {"limit"})

    @staticmethod
    def parse(name: str | MoEActivation) -> MoEActivation:
        """The activation of that name: a value of this enum, a member's name, or an alias that configs use."""
        if isinstance(name, MoEActivation):
            return name
        if not isinstance(name, str):
            raise ConfigError(f"an activation is a name or a MoEActivation, got {name!r}")
        key = _ALIASES.get(name.strip().lower(), name.strip().lower())
        try:
            return MoEActivation(key)
        except ValueError:
            known = [a.value for a in MoEActivation] + sorted(_ALIASES)
            meant = did_you_mean(name, known)
            raise ConfigError(f"unknown activation {name!r}{meant}", details=f"known: {', '.join(known)}") from None

    def default_params(self) -> ActivationParams:
        """The parameters that the activation's source defines; None where it has no such parameter."""
        return _DEFAULTS.get(self, ActivationParams())

    def resolve_params(self, params: ActivationParams | None) -> ActivationParams:
        """``params`` with defaults in place of None; :class:`ConfigError` for one that the activation has not.

        Resolving what is resolved changes nothing.
        """
        check_instance("params", params, ActivationParams, type(None))
        default = self.default_params()
        if params is None:
            return default
        for name in ("alpha", "beta"):
            value = getattr(params, name)
            if value is not None and name not in self.parameters:
                raise ConfigError(f"activation {self.value} has no parameter {name}, got {name}={value}")
        if self is MoEActivation.SITU and params.beta == 0:
            raise ConfigError("activation situ divides by beta, got beta=0")
        limit = default.limit if params.limit is None else params.limit
        return ActivationParams(
            alpha=default.alpha if params.alpha is None else params.alpha,
            beta=default.beta if params.beta is None else params.beta,
            # where the default is a number, "none" stays math.inf: resolving once more must not bring the number back
            limit=None if limit == math.inf and default.limit is None else limit,
        )


_ALIASES = {
    "swish": "silu",
    "swiglu": "silu",
    "geglu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "swigluoai_uninterleave": "swigluoai",
    "gelu_pytorch_tanh_no_mul": "gelu_tanh_no_mul",
}

_DEFAULTS = {
    MoEActivation.SWIGLUOAI: ActivationParams(alpha=1.702, beta=1.0, limit=7.0),
    MoEActivation.SWIGLUSTEP: ActivationParams(limit=7.0),
    MoEActivation.SITU: ActivationParams(beta=1.0),
}


def apply_moe_activation(activation: MoEActivation, x: Tensor, params: ActivationParams | None = None) -> Tensor:
    """``activation`` of ``x [..., 2N]`` (gated) or ``[..., N]`` -> ``[..., N]``, in ``x``'s dtype.

    Computed in float32 (float64 for float64) and rounded once at the end.  A NaN input gives NaN.
    """
    check_instance("activation", activation, MoEActivation)
    check_tensor("x", x)
    if not x.is_floating_point() or x.element_size() < 2:
        raise TensorError(f"x has dtype {x.dtype}, expected float64, float32, bfloat16 or float16")
    params = activation.resolve_params(params)
    wide = x if x.dtype is torch.float64 else x.float()
    if not activation.is_gated:
        return _plain(activation, _at_most(wide, params.limit)).to(x.dtype)
    columns = x.shape[-1]
    if columns % 2:
        raise TensorError(f"x has {columns} columns, expected an even number: {activation.value} takes gate and up")
    gate, up = wide[..., : columns // 2], wide[..., columns // 2 :]
    return _gated(activation, gate, up, params).to(x.dtype)


def _at_most(x: Tensor, limit: float | None) -> Tensor:
    return x if limit is None else x.clamp(max=limit)


def _within(x: Tensor, limit: float | None) -> Tensor:
    return x if limit is None else x.clamp(min=-limit, max=limit)


def _plain(activation: MoEActivation, x: Tensor) -> Tensor:
    """The non-linear function itself, without limit and gate."""
    name = activation.value.removesuffix("_no_mul")
    if name == "silu":
        return torch.nn.functional.silu(x)
    # torch's own gelu adds 1 to a number near -1 where x is negative, and so loses what is left of it
    if name == "gelu":
        return 0.5 * x * torch.erfc(-math.sqrt(0.5) * x)
    if name == "gelu_tanh":
        return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    return torch.relu(x).square()


def _gated(activation: MoEActivation, gate: Tensor, up: Tensor, params: ActivationParams) -> Tensor:
    limit = params.limit
    if activation is MoEActivation.SWIGLUSTEP:
        return _at_most(torch.nn.functional.silu(gate), limit) * _within(up, limit)
    if activation is MoEActivation.SITU:
        beta = params.beta if params.beta is not None else 1.0
        soft = up if limit is None else limit * torch.tanh(up / limit)
        return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * soft
    gate, up = _at_most(gate, limit), _within(up, limit)
    if activation is MoEActivation.SWIGLUOAI:
        alpha = params.alpha if params.alpha is not None else 1.702
        beta = params.beta if params.beta is not None else 1.0
        return gate * torch.sigmoid(alpha * gate) * (up + beta)
    return _plain(activation, gate) * up
