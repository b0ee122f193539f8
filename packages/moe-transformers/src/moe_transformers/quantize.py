"""Online quantization of 16-bit experts in a model that transformers loaded."""

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
    """Experts whose 16-bit tensors were replaced by :func:`quantize_experts`."""

    layer: FusedMoELayer

    def __init__(self, layer: FusedMoELayer, module: nn.Module) -> None:
        super().__init__(layer, form_of(module))
        self.config: Any = module.config

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Run the experts as in the base class.

        Args:
            hidden_states: [..., K].
            top_k_index: int64 [..., k].
            top_k_weights: [..., k].

        Returns:
            Output of the shape of ``hidden_states``.

        Raises:
            ConfigError: the model was set to an experts implementation that needs the freed 16-bit tensors.
        """
        wanted = self.config._experts_implementation
        if wanted != IMPLEMENTATION:
            raise ConfigError(
                f"experts_implementation is {wanted!r}, but the 16-bit experts were quantized and freed: "
                f'model.set_experts_implementation("{IMPLEMENTATION}"), or load the model again'
            )
        return super().forward(hidden_states, top_k_index, top_k_weights)


def quantize_experts(
    model: nn.Module, quantize: str | OnlineQuantization, *, backend: str = "auto", top_k: int | None = None
) -> None:
    """Quantize the 16-bit experts of ``model`` in place; moe-core runs them from then on.

    Blocks are processed one after the other: each gets a :class:`~moe_transformers.MoeCoreExperts`, and its 16-bit
    tensors are freed before the next block is quantized. This cannot be undone: load the model again. If interrupted,
    some blocks are quantized and others not; call it again to process the remaining ones.

    Args:
        model: model of transformers.
        quantize: name of an online quantization ("fp8_per_channel", "int4_g128"), or the quantization itself.
        backend: name of the backend; by default the best that fits.
        top_k: experts per token; by default from the model's configuration.

    Raises:
        ConfigError: the model has no 16-bit experts, the name is unknown, PEFT adapters target the experts, or moe-core
            does
            not compute a layer. Nothing is quantized then.
        SelectionError: no backend fits. Nothing is quantized then.
    """
    online = registry().online(quantize)
    names = [name for name, module in experts_modules(model) if not is_quantized(module)]
    if not names:
        raise ConfigError(f"{type(model).__name__} has no 16-bit experts: {_what_there_is(model)}")
    for name in names:
        wrapper = wrapped_by(model, name)
        if wrapper is not None:
            raise ConfigError(
                f"{wrapper} ({type(model.get_submodule(wrapper)).__name__}) adapts the experts {name}, whose 16-bit "
                "tensors it needs: merge the adapter (model.merge_and_unload()), or quantize a model without it"
            )
        _select(_filled(model, name, top_k), online, backend)
    for name in names:
        # Release all references after each block: a reference to a module keeps its tensors alive.
        _replace(model, name, top_k, online, backend)
    share_workspaces(module.layer for module in model.modules() if isinstance(module, QuantizedExperts))
    setter = getattr(model, "set_experts_implementation", None)
    if setter is not None:
        setter(IMPLEMENTATION)


def _filled(model: nn.Module, name: str, top_k: int | None) -> Filled:
    module = model.get_submodule(name)
    return Filled.of(module, name, top_k=top_k_of(module, name) if top_k is None else top_k, dtype=hidden_dtype(model))


def _select(filled: Filled, online: OnlineQuantization, backend: str) -> None:
    """Check that a backend, or the named one, supports the layer."""
    registry().oracle(online.scheme).select(
        filled.config,
        weight_key=online.weight_key,
        activation_key=online.activation_key,
        moe_backend=backend,
        device=filled.module.get_parameter("down_proj").device,
    )


def _replace(model: nn.Module, name: str, top_k: int | None, online: OnlineQuantization, backend: str) -> None:
    filled = _filled(model, name, top_k)
    # copy: biases are not quantized and must not keep the module's memory alive
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
