"""Load layers of checkpoints: select a backend, read one layer or several in sequence."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from moe_core._support.autocast import without_autocast
from moe_core.errors import ConfigError
from moe_core.layer.layer import FusedMoELayer
from moe_core.layer.origin import LayerOrigin, opened
from moe_core.parallel.checks import check_placed
from moe_core.parallel.shard import map_of
from moe_core.selection.column_choice import select_cut
from moe_core.selection.oracle import Oracle
from moe_core.selection.registry import registry
from moe_core.selection.report import Selection
from moe_core.spec.config import FusedMoEParallelConfig, whole_number
from moe_core.spec.device import as_torch_device
from moe_core.spec.lora import LoRAWeights
from moe_core.spec.routing import RoutingConfig
from moe_core.spec.weights import MoEWeights

if TYPE_CHECKING:
    from moe_core.checkpoint import Checkpoint, Given, LayerSource
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
    from moe_core.checkpoint import Given, read_layer

    target = as_torch_device(device)
    checkpoint = opened(path)
    online = None if quantize is None else registry().online(quantize)
    given = Given(routing, activation, activation_params, assume, top_k)
    if parallel is not None and not isinstance(parallel, FusedMoEParallelConfig):
        raise ConfigError(f"parallel is {parallel!r}, expected a FusedMoEParallelConfig")
    check_placed(groups, placement)
    if groups is not None:
        parallel = parallel or groups.parallel
        if placement is not None and experts is None:
            if placement.ep_size != parallel.ep_size:
                raise ConfigError(f"the placement is on {placement.ep_size} ranks, ep_size is {parallel.ep_size}")
            experts = placement.ranks[parallel.ep_rank]
    source = read_layer(
        checkpoint,
        layer,
        dtype=dtype,
        experts=experts,
        quantize=online,
        activation_key=activation_key,
        stack=stack,
        given=given,
        parallel=parallel,
    )
    # Select before reading the weights: an impossible request then reads no gigabytes.
    chosen = ChosenLayer.of(
        source,
        device=target,
        backend=backend,
        online=online,
        activation_key=activation_key,
        stack=stack,
        given=given,
        max_loras=max_loras,
        max_lora_rank=max_lora_rank,
        max_num_tokens=max_num_tokens,
        groups=groups,
        placement=placement,
    )
    return replace(chosen, mapped=chosen.mapped or experts is not None).layer(chosen.weights())


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

    return read_ahead(chosen, ChosenLayer.weights, ChosenLayer.layer, ChosenLayer.nbytes_ahead)


@dataclass(frozen=True, eq=False)
class ChosenLayer:
    """A layer of a checkpoint, and the backend that was selected for it on ``device``.

    Attributes:
        source: The layer in the checkpoint; its weights have not been read.
        selection: Selected backend.
        oracle: Oracle of the layer's scheme.
        device: Device to load to.
        online: How the layer's 16-bit weights are quantized.
        origin: Where the layer comes from, for reloads.
        mapped: Whether the layer gets an expert map.
        groups: Process groups of a layer over several ranks; see :func:`load_layer`.
        placement: Placement of experts on these ranks; see :func:`load_layer`.
    """

    source: LayerSource
    selection: Selection
    oracle: Oracle
    device: torch.device
    online: OnlineQuantization | None
    origin: LayerOrigin
    mapped: bool = False
    groups: ParallelGroups | None = None
    placement: ExpertPlacement | None = None

    @staticmethod
    def of(
        source: LayerSource,
        *,
        device: torch.device,
        backend: str = "auto",
        online: OnlineQuantization | None = None,
        activation_key: QuantKey | str | None = "checkpoint",
        stack: str | None = None,
        given: Given | None = None,
        max_loras: int = 0,
        max_lora_rank: int = 16,
        max_num_tokens: int | None = None,
        groups: ParallelGroups | None = None,
        placement: ExpertPlacement | None = None,
    ) -> ChosenLayer:
        """Select the backend of a layer.

        Args:
            source: Result of :func:`moe_core.checkpoint.read_layer` for the same arguments.
            device: Device to load to.
            backend: As in :func:`load_layer`.
            online: Online quantization of 16-bit weights.
            activation_key: As in :func:`load_layer`.
            stack: As in :func:`load_layer`.
            given: Settings that take precedence over config.json.
            max_loras: As in :func:`load_layer`.
            max_lora_rank: As in :func:`load_layer`.
            max_num_tokens: As in :func:`load_layer`.
            groups: As in :func:`load_layer`.
            placement: As in :func:`load_layer`.

        Returns:
            The layer with its selection.

        Raises:
            SelectionError: No backend can run the layer.
        """
        oracle = registry().oracle(source.scheme)
        config = replace(source.config, max_num_tokens=max_num_tokens)
        if whole_number("max_loras", max_loras, 0):
            config = replace(config, is_lora_enabled=True, max_loras=max_loras, max_lora_rank=max_lora_rank)
        cut, selection = select_cut(oracle, config, source.cuts, moe_backend=backend, device=device)
        origin = LayerOrigin(source.index, activation_key, stack, given, source.routing_reason)
        mapped = len(source.experts) < source.config.num_experts
        return ChosenLayer(source.with_cut(cut), selection, oracle, device, online, origin, mapped, groups, placement)

    def nbytes_ahead(self) -> int:
        """Number of bytes to read ahead; 0 if the layer is better read in turn.

        This is the case for online quantization: the 16-bit weights take more memory than the quantized ones.
        """
        return self.source.layer.nbytes if self.online is None else 0

    def weights(self) -> MoEWeights:
        """Read the canonical weights."""
        return self.source.weights(device=self.device)

    @without_autocast
    def layer(self, weights: MoEWeights) -> FusedMoELayer:
        """Convert weights and build the layer.

        Args:
            weights: Result of :meth:`weights`.

        Returns:
            The layer, which owns its weights.
        """
        source, device = self.source, self.device
        config = self.selection.config
        lora = LoRAWeights.zeros(config, device) if config.is_lora_enabled else None
        converted = self.oracle.convert(self.selection, weights)
        kernel = self.oracle.make_kernel(
            self.selection, converted, groups=self.groups, placement=self.placement, layer=source.prefix
        )
        kernel.lora = lora
        router = (source.router_weight, source.router_bias, source.correction_bias)
        weight, bias, correction = (None if tensor is None else tensor.to(device) for tensor in router)
        return FusedMoELayer(
            kernel,
            self.selection,
            router_weight=weight,
            router_bias=bias,
            correction_bias=correction,
            expert_map=map_of(source.experts, source.config.num_experts, device) if self.mapped else None,
            owns_weights=True,
            online=self.online,
            origin=self.origin,
        )
