"""Experts in torch state dicts: who may omit them, and which tensors replace them.

A layer's weights are in a backend's layout, so ``state_dict()`` omits them. This is fine for code that reads a part of
it (adapter tensors, names). Functions that write or offload a whole model would lose the experts, so they raise an
error.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_core.checkpoint.files.tensor_names import parse_name
from moe_core.errors import ConfigError, ExpertsLeftOutWarning
from moe_core.spec.config import FusedMoEConfig
from moe_core.spec.quant_key import QuantKey
from moe_core.spec.weights import MoEWeights

_WRITES = (
    "would write the model without its experts, which are in a backend's layout that no checkpoint has: keep the "
    "checkpoint that they came from. moe_core.experts_left_out(model) writes what the model has beside them, "
    "torch.save(model) everything"
)
_OFFLOADS = (
    "offloads a model's tensors, and experts cannot be offloaded: they run where they are kept. Use "
    "accelerate.dispatch_model, or a device_map that keeps the experts on their devices"
)
#: (module, function) that needs every tensor of the state dict it requests -> what it would do without the experts.
_NEED_ALL = {
    ("transformers.modeling_utils", "save_pretrained"): _WRITES,
    ("transformers.trainer", "_save"): _WRITES,
    ("safetensors.torch", "save_model"): _WRITES,
    ("accelerate.accelerator", "save_model"): _WRITES,
    ("accelerate.accelerator", "get_state_dict"): _WRITES,
    ("accelerate.big_modeling", "cpu_offload"): _OFFLOADS,
    ("accelerate.big_modeling", "disk_offload"): _OFFLOADS,
}
#: Key in the metadata of a state dict that marks a layer as omitted.
_LEFT_OUT = "experts_left_out"


def leave_out(destination: Any, prefix: str) -> None:
    """Record in a state dict that experts are omitted; warn once per state dict.

    Args:
        destination: State dict.
        prefix: Prefix of the names of the omitted layer.

    Raises:
        ConfigError: The function that requested the state dict writes or offloads a whole model.
    """
    name, why = _asked_by()
    if why is not None:
        raise ConfigError(f"{name}() of a model with the experts {prefix.rstrip('.') or 'of this layer'}: it {why}")
    metadata: dict[str, dict[str, Any]] = getattr(destination, "_metadata", {})
    if not any(entry.get(_LEFT_OUT) for entry in metadata.values()):
        warnings.warn(
            "state_dict() leaves out the experts that moe_core runs: their backend's layout is not a "
            "checkpoint format. Keep their checkpoint; moe_core.experts_left_out(model) disables this warning",
            ExpertsLeftOutWarning,
            stacklevel=3,
        )
    metadata.setdefault(prefix.removesuffix("."), {})[_LEFT_OUT] = True


def _asked_by() -> tuple[str, str | None]:
    """Name the caller of ``state_dict()``, and what it would do without experts, or None."""
    frame = sys._getframe(1)
    while frame is not None:
        module, function = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        # Skip torch's own recursion, this package, and overrides that call their base class.
        if not module.startswith(("torch.", "moe_core.")) and function != "state_dict":
            return function, _NEED_ALL.get((module, function))
        frame = frame.f_back  # type: ignore[assignment]
    return "", None


@dataclass(frozen=True)
class ExpertsForm:
    """Layout of stacked experts in the module that owned them.

    The fields match the decorator of transformers' experts.

    Attributes:
        transposed: Whether shapes are ``[E, K, 2N]`` and ``[E, N, K]`` instead of ``[E, 2N, K]`` and ``[E, K, N]``.
        interleaved: Whether gate and up rows alternate.
    """

    transposed: bool = False
    interleaved: bool = False


def experts_of(
    tensors: Mapping[str, Tensor],
    config: FusedMoEConfig,
    keys: tuple[QuantKey | None, QuantKey | None],
    form: ExpertsForm | None = None,
) -> MoEWeights:
    """Build the weights of one layer from entries of a state dict.

    Args:
        tensors: Entries, named relative to the experts' module. Either canonical tensors by the fields of MoEWeights
            (``w13``, ``w2``, ``w13_scale`` …), 16-bit or quantized with the layer's keys; or 16-bit experts, stacked
            (``gate_up_proj``, ``down_proj``, ``…_bias``) or one by one (``3.gate_proj.weight``).
        config: Config of the layer.
        keys: Weight key and activation key of the layer.
        form: Layout of stacked tensors. Default: ``[E, 2N, K]`` with the gate first, if the shapes are unambiguous.

    Returns:
        The weights.

    Raises:
        ConfigError: A name is none of these, or tensors are missing.
    """
    if any("lora_" in name for name in tensors):
        raise ConfigError("adapters of experts are not supported: use an adapter of the other modules alone")
    fields = {name for name in MoEWeights.__dataclass_fields__ if name.startswith(("w13", "w2"))}
    if "w13" in tensors and set(tensors) <= fields:
        plain = "w13_scale" not in tensors
        weight_key, activation_key = (None, None) if plain else keys
        return _made(dict(tensors), weight_key, activation_key)
    found: dict[tuple[str, str], Tensor | list[Tensor | None]] = {}
    for name, tensor in tensors.items():
        parsed = parse_name(f"layers.0.experts.{name}")
        if parsed is None or parsed.suffix not in ("weight", "bias") or not tensor.dtype.is_floating_point:
            raise ConfigError(f"{name} is neither a tensor of 16-bit experts nor of canonical weights")
        if tensor.element_size() == 1:
            raise ConfigError(f"{name} is {tensor.dtype}, expected experts in 16 bits")
        key = parsed.projection, parsed.suffix
        if parsed.expert is None:
            found[key] = tensor
            continue
        several = found.setdefault(key, [None] * config.local_experts)
        if not isinstance(several, list) or parsed.expert >= len(several):
            raise ConfigError(f"{name}: expected one tensor for each of {config.local_experts} experts")
        several[parsed.expert] = tensor
    stacked = any(isinstance(tensor, Tensor) for tensor in found.values())
    if stacked and form is None and config.w13_rows == config.intermediate_size == config.hidden_size:
        raise ConfigError("the layout of stacked experts is ambiguous for square matrices: pass w13 and w2")
    whole: dict[tuple[str, str], Tensor] = {}
    for key, held in found.items():
        if isinstance(held, Tensor):
            whole[key] = held
        else:
            there = [one for one in held if one is not None]
            if len(there) < len(held):
                raise ConfigError(f"{'.'.join(key)} is missing of expert {held.index(None)}")
            whole[key] = torch.stack(there)
    return _stacked(whole, config, form if stacked and form is not None else ExpertsForm())


def _stacked(whole: dict[tuple[str, str], Tensor], config: FusedMoEConfig, form: ExpertsForm) -> MoEWeights:
    made: dict[str, Tensor] = {}
    first = ("gate", "up") if ("gate", "weight") in whole else ("gate_up",) if config.is_gated else ("up",)
    for field, projections in (("w13", first), ("w2", ("down",))):
        for suffix, name in (("weight", field), ("bias", f"{field}_bias")):
            parts = [whole.pop((projection, suffix), None) for projection in projections]
            there = [part for part in parts if part is not None]
            if len(there) != len(parts):
                if suffix == "bias" and not there:
                    continue
                raise ConfigError(
                    f"{suffix} of {' and '.join(projections)} is missing: pass all tensors of the experts"
                )
            if form.transposed and suffix == "weight":
                there = [part.mT for part in there]
            if form.interleaved and projections == ("gate_up",):
                there = [torch.cat((part[:, 0::2], part[:, 1::2]), dim=1) for part in there]
            made[name] = torch.cat(there, dim=1) if len(there) > 1 else there[0]
    if whole:
        projection, suffix = next(iter(whole))
        raise ConfigError(f"{suffix} of {projection} does not belong to experts with {' and '.join(first)} and down")
    return _made(made, None, None)


def _made(tensors: dict[str, Any], weight_key: QuantKey | None, activation_key: QuantKey | None) -> MoEWeights:
    if "w2" not in tensors:
        raise ConfigError("w2 is missing: pass all tensors of the experts")
    return MoEWeights(weight_key=weight_key, activation_key=activation_key, **tensors)
