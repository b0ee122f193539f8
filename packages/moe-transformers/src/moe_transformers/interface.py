"""``experts_implementation="moe_core"``: experts loaded by transformers, run by moe-core.

Importing this module registers the name for ``from_pretrained(..., experts_implementation="moe_core")`` and
``model.set_experts_implementation("moe_core")``. A module's layer is created in its first call, or by
:func:`prepare_experts`. The module keeps its tensors; the layer shares their memory if its backend uses the same
layout. ``set_experts_implementation("eager")`` therefore switches back at any time.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from moe_core import ConfigError, FusedMoELayer, MoEWeights, TensorError, registry
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from moe_transformers.blocks import experts_modules
from moe_transformers.experts import MoeCoreExperts, run_experts, share_workspaces
from moe_transformers.filled import Filled, is_quantized, tensors_of, top_k_of

#: experts_implementation name of moe-core
IMPLEMENTATION = "moe_core"
#: version of tensors created in inference mode, for which torch counts no writes
_UNCOUNTED = -1
#: attribute of an experts module
_HELD = "_moe_core_held"


class ExpertsMemoryWarning(UserWarning):
    """Experts are in memory twice: in transformers' layout and in a backend's."""


@dataclass(frozen=True)
class _Held:
    """Layer of one module, and its source tensors with their addresses and versions."""

    layer: FusedMoELayer
    tensors: Mapping[str, nn.Parameter]
    places: tuple[int, ...]
    versions: tuple[int, ...]

    @staticmethod
    def of(layer: FusedMoELayer, module: nn.Module) -> _Held:
        tensors = tensors_of(module)
        places = tuple(tensor.data_ptr() for tensor in tensors.values())
        versions = tuple(_UNCOUNTED if tensor.is_inference() else tensor._version for tensor in tensors.values())
        return _Held(layer, tensors, places, versions)

    def is_of(self, module: nn.Module, top_k: int, dtype: torch.dtype) -> bool:
        """Return whether the module still holds these tensors, unmoved, and the layer fits."""
        own, config = module._parameters, self.layer.config
        if config.top_k != top_k or config.dtype is not dtype:
            return False
        # Every call runs this check, so no Python function is called per tensor.
        for (name, tensor), place in zip(self.tensors.items(), self.places, strict=True):
            if own.get(name) is not tensor or tensor.data_ptr() != place:
                return False
        return True

    def is_current(self) -> bool:
        """Return whether torch has counted no write to the tensors since."""
        for tensor, version in zip(self.tensors.values(), self.versions, strict=True):
            if (_UNCOUNTED if tensor.is_inference() else tensor._version) != version:
                return False
        return True

    def __reduce__(self) -> Any:
        # a copy of the module has separate tensors and creates a new layer
        return type(None), ()


def moe_core_experts_forward(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Run the experts of ``module``, with the signature that transformers calls.

    Args:
        module: experts module with weights from transformers.
        hidden_states: [T, K].
        top_k_index: [T, k], expert ids from the router; an invalid id selects no expert.
        top_k_weights: [T, k].

    Returns:
        Output [T, K].

    Raises:
        ConfigError: moe-core does not compute what the module does, or the experts are in 16 bits.
        TensorError: gradients are required.
    """
    if torch.is_grad_enabled() and (hidden_states.requires_grad or top_k_weights.requires_grad):
        raise TensorError(
            "hidden_states requires grad, which moe-core does not support: call the model under torch.no_grad() or "
            'torch.inference_mode(), or train with model.set_experts_implementation("eager")'
        )
    held: _Held | None = getattr(module, _HELD, None)
    # A compiler adds guards for what it traces, except memory and versions; prepare_experts renews the layer in that
    # case.
    if not torch.compiler.is_compiling():
        held = _current(module, top_k_index.shape[-1], hidden_states.dtype)
    elif held is None:
        held = _current_untraced(module, top_k_index.shape[-1], hidden_states.dtype)
    return run_experts(held.layer, hidden_states, top_k_index, top_k_weights)


def prepare_experts(model: nn.Module, *, backend: str = "auto") -> None:
    """Create the layers of all experts now, or update them from the modules' tensors.

    Ordinary calls do this automatically. Call it

    - before ``torch.compile(fullgraph=True)`` and before capturing a CUDA graph
    - after writes that torch does not count (``parameter.data.copy_(...)``), or to weights that a compiled model or a
      captured graph reads; layers are updated in place while the parameters keep their addresses
    - to choose a ``backend`` by name

    On GPUs the layers share workspaces, so only one call of the model may run at a time.

    Args:
        model: model of transformers.
        backend: name of the backend, or "auto".

    Raises:
        ConfigError: the model has no experts loaded by transformers, or its first call would fail. Nothing is created
            then.
    """
    found = list(experts_modules(model))
    if not found:
        kinds = sum(isinstance(module, MoeCoreExperts) for module in model.modules())
        why = "all of its experts are moe-core's already" if kinds else "no module of it dispatches experts"
        raise ConfigError(f"{type(model).__name__} has no experts loaded by transformers: {why}")
    dtype = hidden_dtype(model)
    filled = [_filled(module, name, top_k_of(module, name), dtype) for name, module in found]
    share_workspaces(_renew(experts, backend).layer for experts in filled)


def hidden_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype of hidden states: that of the embeddings or the first 16-bit parameter.

    Args:
        model: model of transformers.

    Raises:
        ConfigError: the model has no 16-bit parameter.
    """
    embeddings: nn.Module = model.get_input_embeddings() if isinstance(model, PreTrainedModel) else nn.Identity()
    for tensor in (*embeddings.parameters(), *model.parameters()):
        if tensor.is_floating_point() and tensor.element_size() > 1:
            return tensor.dtype
    raise ConfigError(f"{type(model).__name__} has no 16-bit parameter: the dtype of its hidden states is unknown")


def _filled(module: nn.Module, name: str, top_k: int, dtype: torch.dtype) -> Filled:
    """Return the module's contents if moe-core can run them unchanged."""
    filled = Filled.of(module, name, top_k=top_k, dtype=dtype)
    if not is_quantized(module):
        names = ", ".join(registry().online_names())
        held = str(filled.module.get_parameter("down_proj").dtype).removeprefix("torch.")
        raise ConfigError(
            f"{name} has experts in {held}, which moe-core quantizes only on request: "
            'moe_transformers.quantize_experts(model, "fp8_per_channel"), or load a quantized checkpoint within '
            "moe_transformers.loading(), also where transformers dequantized it",
            details=f"names: {names}",
        )
    return filled


def _current(module: nn.Module, top_k: int, dtype: torch.dtype) -> _Held:
    """Return the module's layer, renewed if its tensors were replaced or written since."""
    held: _Held | None = module.__dict__.get(_HELD)
    if held is not None and held.is_of(module, top_k, dtype) and held.is_current():
        return held
    return _renew(_filled(module, type(module).__name__, top_k, dtype), "auto")


_current_untraced = torch.compiler.disable(  # type: ignore[no-untyped-call]
    _current,
    reason="the layers of moe-core are not made yet: call moe_transformers.prepare_experts(model) before "
    "torch.compile(fullgraph=True), or the model once without it",
)


def _renew(filled: Filled, backend: str) -> _Held:
    module, config = filled.module, filled.config
    held: _Held | None = module.__dict__.get(_HELD)
    # tensors created in inference mode could not be written in place later
    with torch.inference_mode(False), torch.no_grad():
        weights = filled.weights()
        if held is not None and held.is_of(module, config.top_k, config.dtype) and _is_of(backend, held.layer):
            layer = held.layer
            layer.kernel.weights.copy_(layer.kernel.experts.convert(weights.row_major()))
        else:
            layer = FusedMoELayer.from_weights("fp8", config, weights, backend=backend)
            _tell_of_copies(filled, weights, layer)
    held = _Held.of(layer, module)
    setattr(module, _HELD, held)
    return held


def _is_of(backend: str, layer: FusedMoELayer) -> bool:
    return backend in ("auto", layer.selection.backend)


def _tell_of_copies(filled: Filled, weights: MoEWeights, layer: FusedMoELayer) -> None:
    """Warn if the layer stores the weights in separate memory."""
    if layer.weights.w13.data_ptr() != weights.w13.data_ptr():
        warnings.warn(
            f"the backend {layer.selection.backend} has a separate weight layout, so experts are in memory twice; "
            "moe_transformers.loading() holds them once, prepare_experts(model, backend=...) chooses another",
            ExpertsMemoryWarning,
            stacklevel=4,
        )


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, moe_core_experts_forward)
ALL_FP8_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, moe_core_experts_forward)
