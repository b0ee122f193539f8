"""Experts and torch's state dicts: who may ask for one without them, and which tensors replace them.

A layer's weights are in a backend's layout, so ``state_dict()`` leaves them out.  That suits who reads a part of it (an
adapter's tensors, names).  Functions that write or offload a whole model would lose the experts: they are refused.
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
#: (module, function) that needs all tensors of the state dict that it asks for, and what it would do without experts
_NEED_ALL = {
    ("transformers.modeling_utils", "save_pretrained"): _WRITES,
    ("transformers.trainer", "_save"): _WRITES,
    ("safetensors.torch", "save_model"): _WRITES,
    ("accelerate.accelerator", "save_model"): _WRITES,
    ("accelerate.accelerator", "get_state_dict"): _WRITES,
    ("accelerate.big_modeling", "cpu_offload"): _OFFLOADS,
    ("accelerate.big_modeling", "disk_offload"): _OFFLOADS,
}
#: key in the metadata of a state dict, of a layer that was left out
_LEFT_OUT = "experts_left_out"


def leave_out(destination: Any, prefix: str) -> None:
    """Note in ``destination``, a state dict, that the experts of ``prefix`` are not in it; warn once for each.

    Raises ConfigError where the function that asked for it writes, or offloads, a whole model.
    """
    name, why = _asked_by()
    if why is not None:
        raise ConfigError(f"{name}() of a model with the experts {prefix.rstrip('.') or 'of this layer'}: it {why}")
    metadata: dict[str, dict[str, Any]] = getattr(destination, "_metadata", {})
    if not any(entry.get(_LEFT_OUT) for entry in metadata.values()):
        warnings.warn(
            "state_dict() leaves out the experts that moe_core runs: they are in a backend's layout, which no "
            "checkpoint has. Keep the checkpoint that they came from; within moe_core.experts_left_out(model) there is "
            "no warning",
            ExpertsLeftOutWarning,
            stacklevel=3,
        )
    metadata.setdefault(prefix.removesuffix("."), {})[_LEFT_OUT] = True


def _asked_by() -> tuple[str, str | None]:
    """The function that called ``state_dict()``, and what it would do without experts; None where it needs none."""
    frame = sys._getframe(1)
    while frame is not None:
        module, function = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        # torch's own recursion, this package's, and overrides that call their base class
        if not module.startswith(("torch.", "moe_core.")) and function != "state_dict":
            return function, _NEED_ALL.get((module, function))
        frame = frame.f_back  # type: ignore[assignment]
    return "", None


@dataclass(frozen=True)
class ExpertsForm:
    """How a module that owned the experts held them: as the decorator of transformers' experts says.

    - ``transposed``: [E, K, 2N] and [E, N, K] instead of [E, 2N, K] and [E, K, N]
    - ``interleaved``: gate and up rows in turns
    """

    transposed: bool = False
    interleaved: bool = False


def experts_of(
    tensors: Mapping[str, Tensor],
    config: FusedMoEConfig,
    keys: tuple[QuantKey | None, QuantKey | None],
    form: ExpertsForm | None = None,
) -> MoEWeights:
    """Weights of one layer from entries of a state dict, named relative to the experts' module.

    Args:
        tensors: canonical ones by the fields of MoEWeights (``w13``, ``w2``, ``w13_scale`` …), 16-bit or of the
            layer's keys; or 16-bit experts, stacked (``gate_up_proj``, ``down_proj``, ``…_bias``) or one by one
            (``3.gate_proj.weight``).
        config: of the layer.
        keys: its weight key and activation key.
        form: how stacked tensors are laid out, default [E, 2N, K] with the gate first, where their shapes say so.

    Raises:
        ConfigError: for a name that is none of these, and where some are missing.
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
            raise ConfigError(f"{name} is not the name of 16-bit experts, nor of canonical weights")
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
        raise ConfigError("square matrices do not tell how stacked experts are laid out: give w13 and w2")
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
                raise ConfigError(f"{suffix} of {' and '.join(projections)} is missing: experts are replaced whole")
            if form.transposed and suffix == "weight":
                there = [part.mT for part in there]
            if form.interleaved and projections == ("gate_up",):
                there = [torch.cat((part[:, 0::2], part[:, 1::2]), dim=1) for part in there]
            made[name] = torch.cat(there, dim=1) if len(there) > 1 else there[0]
    if whole:
        projection, suffix = next(iter(whole))
        raise ConfigError(f"{suffix} of {projection} has no place in experts with {' and '.join(first)} and down")
    return _made(made, None, None)


def _made(tensors: dict[str, Any], weight_key: QuantKey | None, activation_key: QuantKey | None) -> MoEWeights:
    if "w2" not in tensors:
        raise ConfigError("w2 is missing: experts are replaced whole")
    return MoEWeights(weight_key=weight_key, activation_key=activation_key, **tensors)
