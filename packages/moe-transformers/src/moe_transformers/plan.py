"""Plan of the layers that moe-core runs, made before large tensors are read."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from moe_core import (
    Checkpoint,
    ConfigError,
    FusedMoELayer,
    MoEError,
    layer_memory,
    registry,
)
from moe_core.api.formats import LayerExperts
from moe_core.api.models import (
    PER_CALL,
    ChosenLayer,
    LayerRequest,
    LayerSource,
    ModelSettings,
    choose,
    describe,
    find_layer,
    load_layers,
    parse_name,
    unquantized_reason,
)
from torch import nn
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.integrations.accelerate import get_device
from transformers.utils import logging as transformers_logging

from moe_transformers.blocks import Block, blocks
from moe_transformers.dense import LazyTensor
from moe_transformers.experts import MoeCoreExperts, form_of, share_workspaces
from moe_transformers.filled import stated_top_k
from moe_transformers.options import Options
from moe_transformers.ranks import leave_to_moe_core
from moe_transformers.refusals import RefusedError
from moe_transformers.sixteen_bit import check_biases, missing_parameters

logger = logging.getLogger(__name__)

#: routing is done by the block
SETTINGS = ModelSettings(routing=PER_CALL)


@dataclass(eq=False)
class Layer:
    """One layer whose experts moe-core runs.

    Attributes:
        block: block that calls the experts.
        source: the experts' tensors in the checkpoint.
        request: how they are read.
        chosen: selected backend, once the device is known.
    """

    block: Block
    source: LayerSource
    request: LayerRequest
    chosen: ChosenLayer | None = None

    def choose(self, device: torch.device) -> ChosenLayer:
        """Select a backend for a device.

        Args:
            device: device of the layer.

        Returns:
            The selected backend with the layer's source.

        Raises:
            SelectionError: no backend runs the layer.
        """
        # the block routes: the layer would duplicate its router
        source = replace(self.source, router_weight=None, router_bias=None, correction_bias=None)
        return choose(source, replace(self.request, device=device))


@dataclass
class Plan:
    """Layers that moe-core runs in a model loaded from ``checkpoint``.

    Attributes:
        checkpoint: the checkpoint.
        options: options of the caller.
        dtype: dtype of the hidden states.
        layers: layers that moe-core runs.
        left_out: names of the experts' tensors, which transformers must not assign to modules.
        plain: blocks whose 16-bit experts stay with transformers, with their tensors in the checkpoint.
        devices: device of each layer, by name, once known.
    """

    checkpoint: Checkpoint
    options: Options
    dtype: torch.dtype
    layers: list[Layer]
    left_out: set[str]
    plain: list[tuple[Block, LayerExperts]] = field(default_factory=list)
    devices: dict[str, torch.device] = field(default_factory=dict)

    @staticmethod
    def of(model: nn.Module, folder: Path, options: Options, dtype: torch.dtype) -> Plan:
        """Read the headers of ``folder`` and plan the layers.

        Args:
            model: model that transformers built, without weights.
            folder: folder of the checkpoint.
            options: options of the caller.
            dtype: dtype of the hidden states.

        Returns:
            The plan; experts modules in ``model`` are replaced by empty ones.

        Raises:
            RefusedError: moe-core cannot run quantized experts.
        """
        checkpoint = Checkpoint.open(folder)
        found = Plan(checkpoint, options, dtype, [], set())
        places = list(blocks(model))
        with found.refusing(), checkpoint.reading():
            for block in places:
                found._add(block)
            if not places:
                found._refuse_without_blocks(model)
            found._refuse_to_quantize_again()
            found.left_out.update(*found._experts_left_out())
        for layer in found.layers:
            _put(model, layer.block.name)
        if options.groups is not None:
            leave_to_moe_core(model, [layer.block.name for layer in found.layers], [block.name for block in places])
        return found

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        """Convert errors to RefusedError, which states what transformers would do instead."""
        try:
            yield
        except MoEError as error:
            raise RefusedError.of(error, self.checkpoint.quantization) from error

    def _add(self, block: Block) -> None:
        """Add a block's experts to the plan, or to ``plain`` if they are and stay in 16 bits."""
        checkpoint, options = self.checkpoint, self.options
        first = block.name.partition(".")[0]
        stack = first if len(checkpoint.stacks) > 1 and first in checkpoint.stacks else None
        experts = find_layer(checkpoint, block.index, stack)
        plain = unquantized_reason(experts) is not None
        if plain and options.quantize is None:
            check_biases(block, experts)
            self.plain.append((block, experts))
            return
        request = LayerRequest(
            layer=block.index,
            backend=options.backend,
            dtype=self.dtype,
            online=registry().online(options.quantize) if plain and options.quantize is not None else None,
            activation_key=options.activation_key,
            stack=stack,
            settings=SETTINGS,
        )
        source = describe(checkpoint, request)
        block.check(source.config)
        if options.groups is not None:
            request = replace(request, groups=options.groups)
            source = describe(checkpoint, request)
        top_k = stated_top_k(block.module)
        if top_k is not None:  # from_pretrained(num_experts_per_tok=…) takes precedence over config.json
            source = replace(
                source, config=replace(source.config, top_k=top_k), whole=replace(source.whole, top_k=top_k)
            )
        self.layers.append(Layer(block, source, request))

    def _experts_left_out(self) -> Iterator[Iterable[str]]:
        """Yield names of expert tensors that transformers must not load.

        These are the tensors of layers that moe-core runs, and quantized ones of layers the model does not have.
        """
        checkpoint = self.checkpoint
        mine = {layer.source.prefix for layer in self.layers}
        for stack in checkpoint.stacks:
            for index, tensors in checkpoint.expert_tensors(stack).items():
                if tensors.prefix in mine or unquantized_reason(find_layer(checkpoint, index, stack)) is None:
                    yield tensors

    def _refuse_to_quantize_again(self) -> None:
        """Raise CheckpointError if ``quantize`` is given and no experts are in 16 bits."""
        quantize = self.options.quantize
        if quantize is not None and self.layers and not any(layer.request.online for layer in self.layers):
            request = replace(self.layers[0].request, online=registry().online(quantize), activation_key="checkpoint")
            describe(self.checkpoint, request)

    def _refuse_without_blocks(self, model: nn.Module) -> None:
        """Raise ConfigError for a model with quantized experts that its blocks call in another way."""
        checkpoint = self.checkpoint
        for index in checkpoint.moe_layers:
            if unquantized_reason(find_layer(checkpoint, index)) is None or self.options.quantize is not None:
                raise ConfigError(
                    f"{type(model).__name__} does not call its experts with topk_ids and topk_weights, as moe-core "
                    "requires (transformers' use_experts_implementation marks none of its classes)"
                )

    def reserve(self, model: nn.Module, device: torch.device) -> int:
        """Register meta tensors of the layers' sizes while transformers computes a device map.

        Args:
            model: model being loaded.
            device: device to estimate for.

        Returns:
            Additional bytes needed for loading: what the largest layer needs before it is converted.
        """
        beside = 0
        for layer in self.layers:
            memory = layer_memory(layer.choose(device).selection, 1)
            size = torch.empty(memory.weights, dtype=torch.uint8, device="meta")
            model.get_submodule(layer.block.name).register_parameter("weights", nn.Parameter(size, requires_grad=False))
            beside = max(beside, memory.load_peak - memory.weights)
        return beside

    def release(self, model: nn.Module) -> None:
        """Remove the tensors of :meth:`reserve`.

        Args:
            model: model being loaded.
        """
        for layer in self.layers:
            model.get_submodule(layer.block.name)._parameters.pop("weights", None)

    def place(self, device_map: Mapping[str, Any] | None) -> None:
        """Assign each layer's device and select its backend.

        Args:
            device_map: devices by module name.

        Raises:
            RefusedError: no backend runs a layer on its device.
            ConfigError: experts are not on the device of the hidden states.
        """
        for layer in self.layers:
            name = layer.block.name
            self.devices[name] = device_of(device_map, name)
        kinds = {device.type for device in self.devices.values()}
        if len(kinds) > 1 or "meta" in kinds:
            name, device = next((n, d) for n, d in self.devices.items() if d.type in ("cpu", "meta"))
            raise ConfigError(
                f"the device map puts {name} on {'disk' if device.type == 'meta' else device}, and other layers "
                "on a GPU, but experts run where they are stored: raise max_memory of the GPUs, or use more GPUs"
            )
        names: dict[str, None] = {}
        with self.refusing():
            for layer in self.layers:
                layer.chosen = layer.choose(self.devices[layer.block.name])
                names[f"{layer.source.scheme} by {layer.chosen.selection.backend}"] = None
        if names:
            logger.info("experts of %d layers are run by moe-core: %s", len(self.layers), ", ".join(names))

    def complete(self, model: Any, load_config: Any, info: Any, offloaded: Any) -> None:
        """Let transformers load 16-bit experts whose names or layout it did not recognize.

        Args:
            model: model being loaded.
            load_config: transformers' load configuration.
            info: report of its first load, which is updated.
            offloaded: transformers' index of parameters on disk.

        Raises:
            RefusedError: tensors do not fit the modules.
        """
        found: dict[str, LazyTensor] = {}
        layers: set[int] = set()
        for block, layer in self.plain:
            own = missing_parameters(block, layer, info.missing_and_mismatched())
            if own:
                found |= own
                layers.add(layer.index)
        if not found:
            return
        conversions = model._weight_conversions
        # names are already the model's: its conversions must not be applied twice
        plain = replace(load_config, weight_mapping=[])
        with self.refusing():
            again, _ = convert_and_load_state_dict_in_model(model, found, plain, offloaded)
        model._weight_conversions = conversions
        info.missing_keys &= again.missing_keys
        info.mismatched_keys = {one for one in info.mismatched_keys if one[0] not in found} | again.mismatched_keys
        parsed = {name: parse_name(name) for name in info.unexpected_keys}
        info.unexpected_keys = {name for name, own in parsed.items() if own is None or own.layer not in layers}

    def load(self, model: nn.Module) -> None:
        """Load the layers' experts one after the other and assign them to their modules.

        On GPUs they share workspaces, so only one call of the model may run at a time.

        Args:
            model: model being loaded.
        """
        chosen = [layer.chosen for layer in self.layers if layer.chosen is not None]
        layers: list[FusedMoELayer] = []
        with contextlib.closing(load_layers(chosen)) as loading:
            progress = transformers_logging.tqdm(loading, total=len(chosen), desc="Loading experts")
            for layer, loaded in zip(self.layers, progress, strict=True):
                model.get_submodule(layer.block.name).layer = loaded
                layers.append(loaded)
        share_workspaces(layers)


def _put(model: nn.Module, name: str) -> None:
    """Put an empty :class:`MoeCoreExperts` at ``name``, which transformers does not initialize."""
    experts = MoeCoreExperts(form=form_of(model.get_submodule(name)))
    model.set_submodule(name, experts)
    block = model.get_submodule(name.rpartition(".")[0])
    for module in (experts, block):
        # A block without tensors needs no initialization, and some blocks initialize their experts' tensors.
        if not [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            module._is_hf_initialized = True  # type: ignore[assignment]


def device_of(device_map: Mapping[str, Any] | None, name: str) -> torch.device:
    """Return the device that a device map assigns to a module.

    Args:
        device_map: devices by module name; None for the CPU.
        name: name of the module.

    Returns:
        The device; the meta device for "disk".
    """
    device = get_device(device_map or {"": "cpu"}, f"{name}.weights")
    if device == "disk":
        return torch.device("meta")
    if isinstance(device, int):
        return torch.device(accelerator().type, device)
    return torch.device(device)


def accelerator() -> torch.device:
    """Return the accelerator that torch has available, else the CPU."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
