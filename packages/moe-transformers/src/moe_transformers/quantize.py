"""Quantising the 16-bit experts of a model that transformers loaded."""

from __future__ import annotations

from typing import Any

from moe_core import ConfigError, FusedMoELayer, OnlineQuantization, registry
from torch import Tensor, nn

from moe_transformers.adapters import wrapped_by
from moe_transformers.blocks import experts_modules
from moe_transformers.experts import MoeCoreExperts, form_of, share_workspaces
from moe_transformers.filled import Filled, is_quantized, top_k_of
from moe_transformers.interface import IMPLEMENTATION, hidden_dtype


class QuantizedExperts(MoeCoreExperts):
    """Experts whose 16-bit tensors :func:`quantize_experts` has taken the place of."""

    layer: FusedMoELayer

    def __init__(self, layer: FusedMoELayer, module: nn.Module) -> None:
        super().__init__(layer, form_of(module))
        self.config: Any = module.config

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """As the base class; ConfigError where the model was told to compute with the tensors that are gone."""
        wanted = self.config._experts_implementation
        if wanted != IMPLEMENTATION:
            raise ConfigError(
                f"experts_implementation is {wanted!r}, but the 16-bit experts were quantised and freed: "
                f'model.set_experts_implementation("{IMPLEMENTATION}"), or load the model again'
            )
        return super().forward(hidden_states, top_k_index, top_k_weights)


def quantize_experts(
    model: nn.Module, quantize: str | OnlineQuantization, *, backend: str = "auto", top_k: int | None = None
) -> None:
    """Quantise the 16-bit experts of ``model`` where they are; moe-core runs them from then on.

    ``quantize``: what to make of them, by the name that a scheme gives it ("fp8_per_channel", "int4_g128").
    ``backend``: by name, default the best that fits.  ``top_k``: experts of each token, default what the model's
    configuration says.

    One block after the other gets a :class:`~moe_transformers.MoeCoreExperts`, and its 16-bit tensors are freed before
    the next is quantised.  There is no way back: load the model again.  Interrupted, it leaves blocks of both kinds;
    called again, it goes on with those that are left.

    Raises ConfigError for a model without 16-bit experts, an unknown name, PEFT's adapters of the experts, or a layer
    that moe-core does not compute, and SelectionError where no backend fits: before anything is quantised.
    """
    online = registry().online(quantize)
    names = [name for name, module in experts_modules(model) if not is_quantized(module)]
    if not names:
        raise ConfigError(f"{type(model).__name__} has no experts in 16 bits: {_what_there_is(model)}")
    for name in names:
        wrapper = wrapped_by(model, name)
        if wrapper is not None:
            raise ConfigError(
                f"{wrapper} ({type(model.get_submodule(wrapper)).__name__}) adapts the experts {name}, whose 16-bit "
                "tensors it needs: merge the adapter (model.merge_and_unload()), or quantize a model without it"
            )
        _select(_filled(model, name, top_k), online, backend)
    for name in names:
        # nothing here may outlive its turn: what names a module keeps its tensors
        _replace(model, name, top_k, online, backend)
    share_workspaces(module.layer for module in model.modules() if isinstance(module, QuantizedExperts))
    setter = getattr(model, "set_experts_implementation", None)
    if setter is not None:
        setter(IMPLEMENTATION)


def _filled(model: nn.Module, name: str, top_k: int | None) -> Filled:
    module = model.get_submodule(name)
    return Filled.of(module, name, top_k=top_k_of(module, name) if top_k is None else top_k, dtype=hidden_dtype(model))


def _select(filled: Filled, online: OnlineQuantization, backend: str) -> None:
    """Raise SelectionError where no backend, or not the named one, runs the layer."""
    registry().oracle(online.scheme).select(
        filled.config,
        weight_key=online.weight_key,
        activation_key=online.activation_key,
        moe_backend=backend,
        device=filled.module.get_parameter("down_proj").device,
    )


def _replace(model: nn.Module, name: str, top_k: int | None, online: OnlineQuantization, backend: str) -> None:
    filled = _filled(model, name, top_k)
    # copy: biases are not quantised, and shall not hold on to the module's memory
    layer = FusedMoELayer.from_weights(
        online.scheme, filled.config, filled.weights(), backend=backend, quantize=online, copy=True
    )
    model.set_submodule(name, QuantizedExperts(layer, filled.module))


def _what_there_is(model: nn.Module) -> str:
    if any(True for _ in experts_modules(model)):
        return f'transformers holds them in 8 bits: model.set_experts_implementation("{IMPLEMENTATION}") runs them'
    if any(isinstance(module, MoeCoreExperts) for module in model.modules()):
        return "all of its experts are moe-core's already"
    return "none of its modules holds the experts of a block in 3-D parameters"
