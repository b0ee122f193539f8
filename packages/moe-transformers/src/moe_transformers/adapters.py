"""PEFT adapters: refused for experts that moe-core runs, allowed for all other modules."""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
from collections.abc import Iterator
from typing import Any

from moe_core import ConfigError, FusedMoELayer
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping

#: parameters of transformers' experts that an adapter may target
_PARAMETERS = ("gate_up_proj", "up_proj", "down_proj", "gate_up_proj_bias", "up_proj_bias", "down_proj_bias")
_WHY = (
    "moe-core runs these experts and applies no adapter to them. Leave them out of the adapter, or merge it into the "
    "16-bit model and quantize the result"
)


def wrapped_by(model: nn.Module, name: str) -> str | None:
    """Return the name of the PEFT layer that wraps, and so adapts or copies, a module.

    Args:
        model: model that may have adapters.
        name: name of the module.

    Returns:
        The name, or None if no PEFT layer wraps the module.
    """
    parts = name.split(".")
    for end in range(len(parts)):
        above = ".".join(parts[:end])
        module = model.get_submodule(above)
        # tuner layers and training copies (modules_to_save)
        if hasattr(module, "base_layer") or hasattr(module, "original_module"):
            return above
    return None


@functools.cache
def guard_adapters() -> None:
    """Make PEFT, if installed, refuse adapters of experts that moe-core runs.

    The check runs before PEFT adds any layer. Without it, PEFT warns about parameters it does not find and applies the
    rest of the adapter.
    """
    if importlib.util.find_spec("peft") is None:
        return
    tuner: Any = importlib.import_module("peft.tuners.tuners_utils").BaseTuner
    original = tuner.inject_adapter

    @functools.wraps(original)
    def inject_adapter(self: Any, model: nn.Module, adapter_name: str, *arguments: Any, **named: Any) -> Any:
        refuse_adapter(model, self.peft_config[adapter_name])
        return original(self, model, adapter_name, *arguments, **named)

    tuner.inject_adapter = inject_adapter


def refuse_adapter(model: nn.Module, config: Any) -> None:
    """Refuse a PEFT adapter that targets experts run by moe-core.

    Args:
        model: model with layers of moe-core.
        config: PEFT's configuration of the adapter.

    Raises:
        ConfigError: names the target.
    """
    places = list(_places(model))
    if not places:
        return
    for name in places:
        modules = getattr(config, "target_modules", None) or ()
        for target in () if isinstance(modules, str) else modules:
            # the experts module, or one below it ("experts.3.up_proj")
            if f".{name}".endswith(f".{target}") or f".{name.rpartition('.')[2]}." in f".{target}.":
                raise ConfigError(f"target_modules of the adapter contains {target}: {_WHY}")
    targets = set(getattr(_as_here(model, config), "target_parameters", None) or ())
    for name in places:
        for key in (f"{name}.{parameter}" for parameter in _PARAMETERS):
            if any(key == target or key.endswith(f".{target}") for target in targets):
                raise ConfigError(f"target_parameters of the adapter contains {key}: {_WHY}")


def _places(model: nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        if isinstance(module, FusedMoELayer):
            yield name.replace(".base_layer", "").removesuffix(".layer")


def _as_here(model: nn.Module, config: Any) -> Any:
    """Copy ``config`` with names of older transformers versions converted as PEFT converts them."""
    config = copy.deepcopy(config)
    if not hasattr(getattr(model, "config", None), "model_type"):
        return config
    try:
        conversion: Any = importlib.import_module("peft.utils.transformers_weight_conversion")
    except ImportError:  # versions without such conversions
        return config
    mapping = get_model_conversion_mapping(model)
    conversion.convert_peft_config_for_transformers(config, model=model, conversions=mapping)
    return config
