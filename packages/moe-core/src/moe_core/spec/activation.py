"""Activations between the two matrix products of an expert, and their parameters.

A gated activation maps ``[..., 2N]`` to ``[..., N]``: the first half is the gate ``g``, the second half is up ``u``.
A ``*_NO_MUL`` activation maps ``[..., N]`` to ``[..., N]``. With sigma the logistic function and L the limit:

=============  ==========================================================================================
SILU           ``silu(g) * u``, silu(g) = g sigma(g) (SwiGLU, arXiv:2002.05202)
GELU           ``gelu(g) * u``, gelu(g) = g (1 + erf(g / sqrt 2)) / 2 (arXiv:1606.08415)
GELU_TANH      the tanh approximation of the same paper: gelu(g) = g sigma(2 sqrt(2/pi) (g + 0.044715 g^3))
RELU2          ``relu(g)^2 * u`` (squared ReLU: arXiv:2109.08668)
SWIGLUOAI      ``g sigma(alpha g) * (u + beta)`` (gpt-oss: alpha 1.702, beta 1, L 7)
SWIGLUSTEP     ``min(silu(g), L) * clamp(u, -L, L)`` (Step-3: L 7)
SITU           ``beta tanh(g / beta) sigma(g) * l(u)``, l(u) = L tanh(u / L), or u where there is no limit (Kimi K3)
=============  ==========================================================================================

If the formula does not contain L, a limit clamps the inputs first: ``g = min(g, L)``, ``u = clamp(u, -L, L)``
(DeepSeek-style ``swiglu_limit``; part of SWIGLUOAI's definition). The order is always gate, then up. Checkpoints that
interleave the two (gpt-oss) are reordered when they are read.

Every implementation computes in float32 and keeps the relative precision of a small gate or up. The exception is the
``1 + erf`` of GELU, which cancels in kernels: its error for negative gates is relative to ``g u``, not to the result.
The result is rounded to the layer's dtype: in float16, values above 65504 become Inf and values below 3e-8 become 0.
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
    """Parameters of an activation; None selects the activation's default.

    Attributes:
        alpha: Slope of the sigmoid (SWIGLUOAI).
        beta: Offset of up (SWIGLUOAI) or scale of the tanh (SITU).
        limit: Clamp limit L; ``math.inf`` means no limit where the default is a number.
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
    """Activation of a fused MoE layer; the module docstring has the formulas.

    Values are the lowercase names.
    """

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

    #: Engines distinguish interleaved from stacked gate and up; here they are always stacked.
    SWIGLUOAI_UNINTERLEAVE = "swigluoai"  # noqa: PIE796

    def __repr__(self) -> str:
        # The repr evaluates back, as the repr of a config requires.
        return str(self)

    @property
    def is_gated(self) -> bool:
        """Whether the input has gate and up (2N columns) instead of one value per output."""
        return not self.value.endswith("_no_mul")

    @property
    def parameters(self) -> frozenset[str]:
        """Names of the :class:`ActivationParams` that this activation uses."""
        own = {MoEActivation.SWIGLUOAI: {"alpha", "beta"}, MoEActivation.SITU: {"beta"}}
        return frozenset(own.get(self, set()) | {"limit"})

    @staticmethod
    def parse(name: str | MoEActivation) -> MoEActivation:
        """Look up an activation by name.

        Args:
            name: A member of this enum, a member's value, or an alias that model configs use.

        Returns:
            The activation.

        Raises:
            ConfigError: ``name`` is unknown or not a string.
        """
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
        """Return the parameters that the activation's source defines, None for those it lacks."""
        return _DEFAULTS.get(self, ActivationParams())

    def resolve_params(self, params: ActivationParams | None) -> ActivationParams:
        """Replace None in ``params`` with the activation's defaults.

        Resolving resolved parameters changes nothing.

        Args:
            params: The given parameters; None: all defaults.

        Returns:
            The resolved parameters.

        Raises:
            ConfigError: A parameter is set that the activation does not have, or SITU's beta is 0.
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
            # Where the default is a number, "no limit" stays math.inf: resolving again must not restore the number.
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
    """Apply an activation to a tensor.

    The computation is in float32 (float64 for float64), rounded once at the end. NaN inputs give NaN.

    Args:
        activation: The activation.
        x: ``[..., 2N]`` if the activation is gated, else ``[..., N]``; float64, float32, bfloat16 or float16.
        params: Activation parameters; None: the defaults.

    Returns:
        ``[..., N]`` in the dtype of ``x``.

    Raises:
        TensorError: ``x`` has an invalid dtype, or an odd number of columns with a gated activation.
        ConfigError: ``params`` does not fit the activation.
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
    """Apply the nonlinear function without limit and gate."""
    name = activation.value.removesuffix("_no_mul")
    if name == "silu":
        return torch.nn.functional.silu(x)
    # torch's own gelu computes 1 + erf, which cancels for negative x and loses precision.
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
