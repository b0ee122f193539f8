"""Identification of a transformers module's activation by its results, not its names.

Experts of transformers hold an activation function, some with a separate limit, and a dozen families implement the gate
in their own code. Therefore each candidate of moe-core, with the numbers that the module holds, is evaluated on values
that exceed the limits. The candidate whose results match the module's is the activation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from moe_core import ActivationParams, ConfigError, MoEActivation, apply_moe_activation
from torch import Tensor, nn

#: float32 functions that differ only in the order of operations agree to a few units in the last place
_RELATIVE = 1e-5


def activation_of(module: nn.Module, name: str) -> tuple[MoEActivation, ActivationParams | None]:
    """Identify the activation between the two GEMMs of an experts module.

    Args:
        module: experts module with weights from transformers.
        name: name of the module, for errors.

    Returns:
        The activation and its parameters.

    Raises:
        ConfigError: names the function; no activation of moe-core computes the same.
    """
    gate, up = _arguments([20.0, *_numbers(module, "limit")])
    with torch.no_grad():
        found = _computed(module, name, gate, up)
        for activation, params in _candidates(module):
            inputs = torch.cat((gate, up), dim=-1) if activation.is_gated else gate
            if _same(apply_moe_activation(activation, inputs, params), found):
                return activation, params
    known = ", ".join(kind.value for kind in MoEActivation if kind.is_gated is _is_gated(module))
    raise ConfigError(
        f"{name} has the activation {_described(module)}, which moe-core does not support; expected one of {known}"
    )


def computes(module: nn.Module, name: str, activation: MoEActivation, params: ActivationParams | None) -> bool:
    """Return whether a module computes this activation with these parameters.

    Args:
        module: experts module of transformers.
        name: name of the module, for errors.
        activation: activation to compare with.
        params: parameters of the activation.

    Raises:
        ConfigError: the module's function cannot be called.
    """
    gate, up = _arguments([20.0, *_numbers(module, "limit"), params.limit if params and params.limit else 0.0])
    inputs = torch.cat((gate, up), dim=-1) if activation.is_gated else gate
    with torch.no_grad():
        found = _computed(module, name, gate, up)
        return activation.is_gated is _is_gated(module) and _same(
            apply_moe_activation(activation, inputs, params), found
        )


def _arguments(limits: list[float]) -> tuple[Tensor, Tensor]:
    """Return gate and up [1, P]: every pair of test values, beyond the largest of ``limits``."""
    values = _values(max(limit for limit in limits if math.isfinite(limit)))
    gate, up = torch.meshgrid(values, values, indexing="ij")
    return gate.reshape(1, -1), up.reshape(1, -1)


def _is_gated(module: nn.Module) -> bool:
    return bool(getattr(module, "has_gate", True))


def _values(largest: float) -> Tensor:
    """Return test values from small ones to well beyond ``largest``, of both signs."""
    # transformers changes torch's default dtype and device while it builds a model
    bounds = (0.05, 4.0, 12), (0.2, 3.0, 8)
    small, large = (torch.linspace(*one, dtype=torch.float32, device="cpu") for one in bounds)
    sizes = torch.cat((small, large * largest))
    return torch.cat((-sizes, torch.zeros_like(sizes[:1]), sizes))


def _computed(module: nn.Module, name: str, gate: Tensor, up: Tensor) -> Tensor:
    """Evaluate the module's activation on ``gate`` and ``up`` [1, P], in its GEMM's layout."""
    try:
        if not _is_gated(module):
            result = module.act_fn(gate)  # type: ignore[operator]
        elif getattr(module, "is_concatenated", True):
            result = module._apply_gate(torch.cat((gate, up), dim=-1))  # type: ignore[operator]
        else:
            result = module._apply_gate(torch.stack((gate, up), dim=-1).flatten(-2))  # type: ignore[operator]
    except Exception as error:  # unknown model code may raise anything
        raise ConfigError(f"calling the activation function of {name} failed: {error}") from error
    if not isinstance(result, Tensor) or result.shape != gate.shape:
        raise ConfigError(f"{name} has the activation {_described(module)}, which does not return one value per gate")
    return result


def _candidates(module: nn.Module) -> Iterator[tuple[MoEActivation, ActivationParams | None]]:
    """Yield candidate activations: first with defaults, then with each number the module has."""
    kinds = [kind for kind in MoEActivation if kind.is_gated is _is_gated(module)]
    for kind in kinds:
        yield kind, None
    alphas, betas, limits = (_numbers(module, word) for word in ("alpha", "beta", "limit"))
    for kind in kinds:
        for alpha in alphas if "alpha" in kind.parameters else [None]:
            for beta in [None, *betas] if "beta" in kind.parameters else [None]:
                for limit in [None, *limits]:
                    yield kind, ActivationParams(alpha=alpha, beta=beta, limit=limit)


def _numbers(module: nn.Module, word: str) -> list[float]:
    """Return the module's and its activation function's positive numbers named like ``word``."""
    holders = (vars(module), vars(getattr(module, "act_fn", None) or nn.Identity()))
    found = [value for holder in holders for key, value in holder.items() if word in key]
    return [float(v) for v in dict.fromkeys(v for v in found if isinstance(v, int | float)) if v > 0]


def _same(ours: Tensor, theirs: Tensor) -> bool:
    return bool(torch.allclose(ours, theirs.float(), rtol=_RELATIVE, atol=_RELATIVE))


def _described(module: nn.Module) -> str:
    """Describe the activation as the module's source names it."""
    function = getattr(module, "act_fn", None)
    text = "" if function is None else getattr(function, "__name__", type(function).__name__)
    own = type(module).__dict__.get("_apply_gate")
    if own is not None and own.__module__ != "transformers.integrations.moe":
        return f"{type(module).__name__}._apply_gate{f' with {text}' if text else ''}"
    return text or "an unnamed function"
