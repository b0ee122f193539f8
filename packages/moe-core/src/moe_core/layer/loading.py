"""Load layers of checkpoints in four steps: :func:`describe`, :func:`choose`, :func:`read` and :func:`build`."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from moe_core._support.autocast import without_autocast
from moe_core.layer.layer import FusedMoELayer
from moe_core.layer.request import LayerRequest, describe, opened
from moe_core.parallel.shard import map_of
from moe_core.selection.column_choice import select_plan
from moe_core.selection.oracle import Oracle
from moe_core.selection.registry import registry
from moe_core.selection.report import Selection
from moe_core.spec.config import FusedMoEParallelConfig, whole_number
from moe_core.spec.device import as_torch_device
from moe_core.spec.lora import LoRAWeights
from moe_core.spec.routing import RoutingConfig
from moe_core.spec.weights import MoEWeights

if TYPE_CHECKING:
    from moe_core.checkpoint import Checkpoint, LayerSource
    from moe_core.kernels.ops.online import OnlineQuantization
    from moe_core.parallel.distributed.groups import ParallelGroups
    from moe_core.parallel.placement.placement import ExpertPlacement
    from moe_core.spec.activation import ActivationParams, MoEActivation
    from moe_core.spec.quant_key import QuantKey


@without_autocast
def load_layer(
    path: str | os.PathLike[str] | Checkpoint,
    *,
    layer: int | None = None,
    device: torch.device | str | None = None,
    backend: str = "auto",
    dtype: torch.dtype = torch.bfloat16,
    experts: Sequence[int] | None = None,
    parallel: FusedMoEParallelConfig | None = None,
    groups: ParallelGroups | None = None,
    placement: ExpertPlacement | None = None,
    quantize: str | OnlineQuantization | None = None,
    activation_key: QuantKey | str | None = "checkpoint",
    max_loras: int = 0,
    max_lora_rank: int = 16,
    max_num_tokens: int | None = None,
    stack: str | None = None,
    routing: RoutingConfig | str | None = None,
    activation: MoEActivation | str | None = None,
    activation_params: ActivationParams | None = None,
    assume: bool = False,
    top_k: int | None = None,
) -> FusedMoELayer:
    """Load one MoE layer of a checkpoint: detect its format, select a backend and convert.

    The routing and activation follow from config.json's ``model_type``. An unknown model type is rejected, unless both
    are given or ``assume`` accepts the guess, with a CheckpointWarning. ``routing``, ``activation`` and
    ``activation_params`` take precedence over config.json.

    Args:
        path: Checkpoint folder, or an open checkpoint.
        layer: Index in the model. Default: the first MoE layer.
        device: Device to load to. Default: the GPU if there is one, otherwise the CPU.
        backend: Backend name, or "auto".
        dtype: Dtype of hidden states.
        experts: Global ids of the experts to load (expert parallelism; ``placement.ranks[ep_rank]`` of a placement).
            Default: all. With a subset, the layer gets the matching expert map.
        parallel: Rank whose experts are read (consecutive ones, unless ``experts`` names them), and whose column shard
            of them (tensor parallelism). The outputs of the ranks add up to the layer's, provided that no expert is on
            several ranks; with replicas, pass ``groups`` and ``placement``. Equal column shards that split scale groups
            are accepted if a kernel supports finer groups (:mod:`moe_core.parallel.shard_plan`).
        groups: Process groups of the ranks, which also define ``parallel``. Tokens and results then cross ranks, and
            the output of each call is complete (:class:`moe_core.parallel.distributed.ParallelGroups`).
        placement: Placement of experts on the ranks of ``groups``.
        quantize: Online quantization of 16-bit experts, by the name that a scheme gives it ("fp8_per_channel"). They
            are quantized expert by expert while they are read.
        activation_key: Quantization of activations: a key, its name, or None for 16 bits. Default: what the checkpoint
            specifies.
        max_loras: If positive, select a backend that applies LoRA adapters, and allocate this number of empty slots in
            the layer's :attr:`~FusedMoELayer.lora`.
        max_lora_rank: Rank of the LoRA slots.
        max_num_tokens: Largest number of tokens that a rank brings; all2all backends with fixed-size buffers need it.
        stack: For a model with several stacks of layers, the first part of the tensor names ("talker").
        routing: A config, its text form (:meth:`~moe_core.spec.routing.RoutingConfig.parse`: "softmax,renormalize"), or
            "per_call" if each call gets topk_weights and topk_ids.
        activation: Activation function.
        activation_params: Parameters of ``activation``.
        assume: Whether to accept guesses for an unknown model type.
        top_k: Number of experts per token, in place of config.json's.

    Returns:
        The layer.

    Raises:
        CheckpointError: The checkpoint cannot be read.
        SchemeNotInstalledError: No installed package provides the scheme.
        SelectionError: No backend can run the layer.
        TensorError: Tensors do not fit.
        ConfigError: Invalid or inconsistent arguments.
    """
    from moe_core.checkpoint import ModelSettings

    request = LayerRequest(
        layer=layer,
        device=as_torch_device(device),
        backend=backend,
        dtype=dtype,
        experts=experts,
        parallel=parallel,
        groups=groups,
        placement=placement,
        online=None if quantize is None else registry().online(quantize),
        activation_key=activation_key,
        max_loras=max_loras,
        max_lora_rank=max_lora_rank,
        max_num_tokens=max_num_tokens,
        stack=stack,
        settings=ModelSettings(routing, activation, activation_params, assume, top_k),
    )
    return load_requested(opened(path), request)


def load_requested(checkpoint: Checkpoint, request: LayerRequest) -> FusedMoELayer:
    """Load a layer as :func:`load_layer` does.

    Args:
        checkpoint: The open checkpoint.
        request: What to load.

    Returns:
        The layer.
    """
    chosen = choose(describe(checkpoint, request), request)
    return build(chosen, read(chosen))


@dataclass(frozen=True, eq=False)
class ChosenLayer:
    """A layer of a checkpoint, and the backend that was selected for it.

    Attributes:
        source: The layer in the checkpoint; its weights have not been read.
        selection: Selected backend.
        oracle: Oracle of the layer's scheme.
        request: What to load.
        device: Device to load to.
    """

    source: LayerSource
    selection: Selection
    oracle: Oracle
    request: LayerRequest
    device: torch.device


def choose(source: LayerSource, request: LayerRequest) -> ChosenLayer:
    """Select the backend of a layer.

    An impossible request fails here, before gigabytes of weights are read.

    Args:
        source: Result of :func:`describe` for the same request.
        request: What to load.

    Returns:
        The layer with its selection.

    Raises:
        SelectionError: No backend can run the layer.
    """
    oracle, device = registry().oracle(source.scheme), as_torch_device(request.device)
    config = replace(source.config, max_num_tokens=request.max_num_tokens)
    if whole_number("max_loras", request.max_loras, 0):
        config = replace(config, is_lora_enabled=True, max_loras=request.max_loras, max_lora_rank=request.max_lora_rank)
    plan, selection = select_plan(oracle, config, source.plans, moe_backend=request.backend, device=device)
    return ChosenLayer(source.with_plan(plan), selection, oracle, request, device)


def read(chosen: ChosenLayer) -> MoEWeights:
    """Read the canonical weights of a layer.

    Args:
        chosen: The layer.

    Returns:
        The weights of this rank.

    Raises:
        CheckpointError: A tensor is missing or invalid.
    """
    return chosen.source.weights(device=chosen.device)


@without_autocast
def build(chosen: ChosenLayer, weights: MoEWeights) -> FusedMoELayer:
    """Convert weights to the backend's layout and build the layer.

    Args:
        chosen: The layer.
        weights: Result of :func:`read`.

    Returns:
        The layer, which owns its weights.
    """
    source, request, device = chosen.source, chosen.request, chosen.device
    config = chosen.selection.config
    lora = LoRAWeights.zeros(config, device) if config.is_lora_enabled else None
    converted = chosen.oracle.convert(chosen.selection, weights)
    kernel = chosen.oracle.make_kernel(
        chosen.selection, converted, groups=request.groups, placement=request.placement, layer=source.prefix
    )
    kernel.lora = lora
    router = (source.router_weight, source.router_bias, source.correction_bias)
    weight, bias, correction = (None if tensor is None else tensor.to(device) for tensor in router)
    experts = source.config.num_experts
    mapped = request.experts is not None or len(source.experts) < experts
    return FusedMoELayer(
        kernel,
        chosen.selection,
        router_weight=weight,
        router_bias=bias,
        correction_bias=correction,
        expert_map=map_of(source.experts, experts, device) if mapped else None,
        owns_weights=True,
        request=replace(request, layer=source.index, experts=None, groups=None, placement=None),
        routing_reason=source.routing_reason,
    )


def load_layers(chosen: Iterable[ChosenLayer]) -> Generator[FusedMoELayer, None, None]:
    """Load layers in order; the next two are read while one is converted.

    At any time memory holds the returned layers, the tensors of the layer being converted and those of the two being
    read. Until the last layer, the peak is at most the size of all layers plus one of them, in addition to some hundred
    MB in flight. Closing the iterator ends the reading.

    Args:
        chosen: Layers to load, with their selected backends.

    Returns:
        Generator of the layers.
    """
    from moe_core.checkpoint.files.reading_threads import read_ahead

    return read_ahead(chosen, read, build, _nbytes_ahead)


def _nbytes_ahead(chosen: ChosenLayer) -> int:
    """Number of bytes to read ahead; 0 if the layer is better read in turn.

    This is the case for online quantization: the 16-bit weights take more memory than the quantized ones.
    """
    return chosen.source.layer.nbytes if chosen.request.online is None else 0
