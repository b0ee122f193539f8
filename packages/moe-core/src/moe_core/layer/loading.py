"""Layers of checkpoints: which backend runs one, reading it, and several of them, one after the other."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from moe_core._support.autocast import without_autocast
from moe_core.errors import ConfigError
from moe_core.layer.layer import FusedMoELayer, LayerOrigin, opened, room_for_lora
from moe_core.parallel.checks import check_placed
from moe_core.parallel.shard import map_of
from moe_core.selection.column_choice import select_cut
from moe_core.selection.oracle import Oracle
from moe_core.selection.registry import registry
from moe_core.selection.report import Selection
from moe_core.spec.config import FusedMoEParallelConfig, whole_number
from moe_core.spec.device import as_torch_device
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
    """One MoE layer of a checkpoint folder: format, scheme, selection and conversion.

    ``layer``: index in the model, default the first MoE layer.  ``experts``: global ids to load
    (expert parallelism; ``placement.ranks[ep_rank]`` of a placement), default all; with some of them the layer gets the
    matching expert map.  ``parallel``: the rank whose experts (consecutive ones, unless ``experts`` names them) and
    whose columns of them (tensor parallelism) are read; the outputs of the ranks add up to the layer's, as long as no
    expert is on several ranks (with replicas give ``groups`` and ``placement``).  Equal shares
    of columns that part groups of scales are taken where a kernel takes finer groups
    (:mod:`moe_core.parallel.shard_plan`). ``groups`` of the ranks, which say ``parallel`` too, and the ``placement`` of
    experts on them: tokens and results cross ranks, and each call's output is whole
    (:class:`moe_core.parallel.distributed.ParallelGroups`). ``quantize``: what to make of 16-bit experts, by the name
    that a scheme gives it ("fp8_per_channel"); they are quantised expert by expert while they are read.
    ``activation_key``: what activations are quantised as, a key or its name, None for 16 bits; default what the
    checkpoint says.  ``max_loras`` > 0: a backend that applies LoRA adapters, and so many empty places of rank
    ``max_lora_rank`` in the layer's :attr:`~FusedMoELayer.lora`. ``max_num_tokens``: most tokens that a rank brings,
    which all2all backends with buffers of a fixed size need. ``stack``: of a model with several stacks of layers, the
    first part of the tensors' names ("talker").

    How experts are chosen and what they compute follows from config.json's ``model_type``; one that is not known is
    refused, unless both are given or ``assume`` accepts what is guessed, with a CheckpointWarning.  ``routing``: a
    config, its text (:meth:`~moe_core.spec.routing.RoutingConfig.parse`: "softmax,renormalize"), or "per_call" where
    each call is given topk_weights and topk_ids; ``activation`` with ``activation_params``.  They win over config.json.

    Raises CheckpointError, SchemeNotInstalledError, SelectionError, TensorError, ConfigError.
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
    # selection comes before the weights are read: an impossible request costs no gigabytes
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
    """The layers, in order; the next two are read while one is converted.

    At a time there are those that were returned, the tensors of a layer that is converted and those of two that are
    read; on the way to the last layer that is never more than all layers take and one of them again, beside some
    hundred MB on their way.  Closing the iterator ends the reading.
    """
    from moe_core.checkpoint.files.reading_threads import read_ahead

    return read_ahead(chosen, ChosenLayer.weights, ChosenLayer.layer, ChosenLayer.nbytes_ahead)


@dataclass(frozen=True, eq=False)
class ChosenLayer:
    """A layer of a checkpoint, and the backend that was selected for it on ``device``.

    ``online``: how its 16-bit weights are quantised; ``mapped``: whether it gets an expert map; ``groups`` and
    ``placement``: of a layer over several ranks, see :func:`load_layer`.
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
        """``source`` is what :func:`moe_core.checkpoint.read_layer` returned for the same arguments.

        Raises SelectionError.
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
        """Bytes to read; 0 where they are better read in turn: 16-bit weights take more than what becomes of them."""
        return self.source.layer.nbytes if self.online is None else 0

    def weights(self) -> MoEWeights:
        """Reads the canonical weights."""
        return self.source.weights(device=self.device)

    @without_autocast
    def layer(self, weights: MoEWeights) -> FusedMoELayer:
        """The layer of :meth:`weights`, which are converted."""
        source, device = self.source, self.device
        lora = room_for_lora(self.selection.config, device)
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
