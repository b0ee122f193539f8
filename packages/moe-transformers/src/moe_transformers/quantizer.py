"""transformers quantizer through which moe-core takes part in loading a model."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from moe_core import ConfigError
from torch import nn
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from moe_transformers.dense import LazyTensor, dense_tensors
from moe_transformers.options import Options
from moe_transformers.plan import Plan, accelerator, device_of

#: dtypes of hidden states
_COMPUTED = (torch.bfloat16, torch.float16, torch.float32)


def check_dtype(dtype: Any) -> None:
    """Raise ConfigError for a ``dtype`` of ``from_pretrained`` that hidden states cannot have.

    Args:
        dtype: As transformers takes it: a dtype or its name, or either for each part of the model. None and "auto"
            leave
            it to the checkpoint.
    """
    if dtype is None or dtype == "auto":
        return
    for one in dtype.values() if isinstance(dtype, Mapping) else (dtype,):
        if (getattr(torch, one, one) if isinstance(one, str) else one) not in _COMPUTED:
            raise ConfigError(
                f"dtype is {dtype!r}, expected bfloat16, float16 or float32: load the model in one of them, or "
                'outside moe_transformers.loading() with experts_implementation="eager"'
            )


class CheckpointQuantization(QuantizationConfigMixin):
    """The checkpoint's ``quantization_config``, kept unchanged in the model's config."""

    # not a quant_method of transformers: its handling of those does not apply to modules loaded here
    quant_method = "moe_core"

    def __init__(self, entries: Mapping[str, Any]) -> None:
        self.entries = entries

    def to_dict(self) -> dict[str, Any]:
        return copy.deepcopy(dict(self.entries))


class MoeCoreQuantizer(HfQuantizer):
    """Replaces quantized experts by layers of moe-core and loads all other tensors as 16-bit.

    A model whose experts are in 16 bits and stay so is left as transformers builds it.

    Args:
        options: options of the caller.
        entries: the checkpoint's quantization settings.
    """

    requires_calibration = False

    def __init__(self, options: Options, entries: Mapping[str, Any]) -> None:
        super().__init__(CheckpointQuantization(entries), pre_quantized=True)
        self.options = options
        self._plan: Plan | None = None
        self._beside = 0

    @property
    def plan(self) -> Plan:
        """Plan of the model while it is being loaded."""
        if self._plan is None:
            raise ConfigError("no model is being loaded")
        return self._plan

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        # "auto" may yield a storage dtype: that of the checkpoint's first tensor
        if dtype.itemsize == 1 or not dtype.is_floating_point:
            return torch.bfloat16
        check_dtype(dtype)
        return dtype

    def update_weight_conversions(self, weight_conversions: list[Any], model: nn.Module | None = None) -> list[Any]:
        # the model's own conversions: tensors have the form of a 16-bit checkpoint
        return weight_conversions

    def _process_model_before_weight_loading(
        self,
        model: Any,
        checkpoint_files: Sequence[str] | None = None,
        device_map: Any = None,
        **arguments: Any,
    ) -> None:
        if not checkpoint_files:
            raise ConfigError(
                "state_dict is not supported: experts are read from the checkpoint's files; pass its folder"
            )
        folder = Path(checkpoint_files[0]).parent
        # transformers builds models on the meta device, where a checkpoint's small tensors would have no values
        with torch.device("cpu"):
            self._plan = Plan.of(model, folder, self.options, model.dtype)
            if isinstance(device_map, str):
                self._beside = self._plan.reserve(model, accelerator())

    def adjust_max_memory(self, max_memory: dict[Any, Any]) -> dict[Any, Any]:
        return {
            place: max(room - self._beside, 0) if isinstance(room, int) and place not in ("cpu", "disk") else room
            for place, room in max_memory.items()
        }

    def tensors(self, model: nn.Module, device_map: Mapping[str, Any] | None) -> Mapping[str, LazyTensor]:
        """Return the tensors that transformers should load, once all devices are known.

        Args:
            model: model being loaded.
            device_map: devices by module name.
        """
        plan = self.plan
        plan.release(model)
        plan.place(device_map)
        places = {device_of({"": place}, "") for place in (device_map or {"": "cpu"}).values()}
        device = next((place for place in sorted(places, key=str) if place.type not in ("cpu", "meta")), "cpu")
        # For a model on a single device, read tensors directly to it, without going through pageable memory.
        target = device if len(places) == 1 else "cpu"
        return dense_tensors(plan.checkpoint, plan.left_out, plan.dtype, device, target)

    def _process_model_after_weight_loading(self, model: Any, **arguments: Any) -> Any:
        plan = self.plan
        plan.load(model)
        if not plan.checkpoint.quantization and not plan.layers:
            self.remove_quantization_config(model)
        # The model keeps this object: drop the plan, which holds closed files and their tensor index.
        self._plan = None
        return model

    def is_serializable(self, *arguments: Any, **keywords: Any) -> bool:
        # As far as this object knows: adapters can be written, and save_pretrained refuses whole models (see saving).
        return True

    @property
    def is_trainable(self) -> bool:
        return False

    @property
    def is_compileable(self) -> bool:
        return True
