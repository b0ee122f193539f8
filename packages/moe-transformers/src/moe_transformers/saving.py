"""``save_pretrained`` of models with experts that moe-core runs: refused before anything is written."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from moe_core import ConfigError, FusedMoELayer
from transformers import PreTrainedModel


def _refusing(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def save_pretrained(self: PreTrainedModel, *arguments: Any, **named: Any) -> None:
        # of a model with adapters these alone are written
        if not getattr(self, "_hf_peft_config_loaded", False):
            for module in self.modules():
                if isinstance(module, FusedMoELayer) and not module.state_dict_without_experts:
                    raise ConfigError(
                        "a model whose experts are moe-core's is not written: they are in the layout of a backend, "
                        "which no checkpoint has. Keep the checkpoint that it came from, "
                        f"{self.config.name_or_path or 'unknown here'}; within moe_core.experts_left_out(model) what "
                        "it has beside its experts is written"
                    )
        original(self, *arguments, **named)

    return save_pretrained


@functools.cache
def guard_saving() -> None:
    """Have transformers refuse to save models whose experts moe-core runs; adapters of them are saved."""
    PreTrainedModel.save_pretrained = _refusing(PreTrainedModel.save_pretrained)
