"""``save_pretrained`` and ``load_state_dict`` of models with experts that moe-core runs.

Operations that would lose experts or leave stale ones are refused before anything is written.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from moe_core import ConfigError, FusedMoELayer
from moe_core.api.models import parse_name
from transformers import PreTrainedModel


def _refusing(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def save_pretrained(self: PreTrainedModel, *arguments: Any, **named: Any) -> None:
        # for a model with adapters, only the adapters are written
        if not getattr(self, "_hf_peft_config_loaded", False):
            for module in self.modules():
                if isinstance(module, FusedMoELayer) and not module.state_dict_without_experts:
                    raise ConfigError(
                        "a model with experts of moe-core cannot be saved: their backend's layout is not a checkpoint "
                        f"format. Keep the checkpoint that it came from, {self.config.name_or_path or 'unknown here'}; "
                        "within moe_core.experts_left_out(model), everything but the experts can be saved"
                    )
        original(self, *arguments, **named)

    return save_pretrained


def _placing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load_state_dict(self: PreTrainedModel, state_dict: Mapping[str, Any], *arguments: Any, **named: Any) -> Any:
        layers = [name for name, module in self.named_modules() if isinstance(module, FusedMoELayer)]
        if layers:
            places = tuple(f"{name.removesuffix('.layer')}." for name in layers)
            own = {name for name, _ in self.named_parameters()}
            stray = [name for name in state_dict if parse_name(name) is not None and name not in own]
            stray = [name for name in stray if not name.startswith(places)]
            if stray:
                raise ConfigError(
                    f"load_state_dict() has {len(stray)} expert tensors that match no module of this model, the first "
                    f"{stray[0]}; expected names below {places[0]}"
                )
        return original(self, state_dict, *arguments, **named)

    return load_state_dict


@functools.cache
def guard_saving() -> None:
    """Replace two methods of transformers' models to check for moe-core's experts.

    Whole models are not saved; their adapters are. State dicts with experts under names that no module has are refused,
    since ``strict=False`` would leave the old experts in place.
    """
    PreTrainedModel.save_pretrained = _refusing(PreTrainedModel.save_pretrained)
    PreTrainedModel.load_state_dict = _placing(PreTrainedModel.load_state_dict)
