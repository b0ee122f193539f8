"""Prepare/finalize classes by name, and the default class for a layer's config."""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING

import torch

from moe_core.errors import ConfigError, FallbackWarning, did_you_mean
from moe_core.interface.experts import FusedMoEExperts
from moe_core.interface.prepare_finalize import FusedMoEPrepareAndFinalizeModular
from moe_core.parallel.prepare_finalize.batched import BatchedPrepareAndFinalize
from moe_core.parallel.prepare_finalize.no_parallel import PrepareAndFinalizeNoParallel
from moe_core.spec.config import FusedMoEActivationFormat, FusedMoEConfig, TokenSharing
from moe_core.spec.device import DeviceInfo

if TYPE_CHECKING:
    from moe_core.parallel.distributed.groups import ParallelGroups
    from moe_core.parallel.placement.placement import ExpertPlacement

#: Classes for tokens that cross ranks, by the names of ``FusedMoEParallelConfig.all2all_backend``. They are imported on
#: demand because they import torch.distributed.
ALL2ALL_BACKENDS = {
    "allgather_reducescatter": "moe_core.parallel.prepare_finalize.all_gather:AllGatherPrepareAndFinalize",
    "alltoall": "moe_core.parallel.prepare_finalize.all_to_all:AllToAllPrepareAndFinalize",
    "low_latency": "moe_core.parallel.prepare_finalize.low_latency:LowLatencyPrepareAndFinalize",
    "deepep": "moe_core.parallel.prepare_finalize.deepep:DeepEPPrepareAndFinalize",
}

#: Classes for ranks that have the same tokens.
REDUCTIONS = {
    "all_reduce": "moe_core.parallel.prepare_finalize.ranks_sum:AllReducePrepareAndFinalize",
    "reduce_scatter": "moe_core.parallel.prepare_finalize.ranks_sum:ReduceScatterPrepareAndFinalize",
}


def load_prepare_finalize(name: str) -> type[FusedMoEPrepareAndFinalizeModular]:
    """Return the prepare/finalize class of a name.

    Args:
        name: Name of the class.

    Returns:
        The class.

    Raises:
        ConfigError: The name is unknown.
    """
    known = {**ALL2ALL_BACKENDS, **REDUCTIONS}
    if name not in known:
        raise ConfigError(
            f"all2all_backend is {name!r}{did_you_mean(name, known)}, expected {' or '.join(ALL2ALL_BACKENDS)}; "
            f"{' or '.join(REDUCTIONS)} for ranks that have the same tokens"
        )
    module, _, attribute = known[name].partition(":")
    found: type[FusedMoEPrepareAndFinalizeModular] = getattr(importlib.import_module(module), attribute)
    return found


def prepare_finalize_of(config: FusedMoEConfig) -> type[FusedMoEPrepareAndFinalizeModular]:
    """Return the class for a layer's config.

    Over several ranks it is given by ``all2all_backend``. If all ranks have the same tokens it is ``all_reduce``,
    unless that names ``reduce_scatter``. On one rank it depends on the activation format.

    Args:
        config: Config of the layer.

    Returns:
        The class.

    Raises:
        ConfigError: ``dp_size`` is invalid, or the name is unknown.
    """
    parallel = config.parallel
    sharing, name = parallel.token_sharing, parallel.all2all_backend
    if parallel.world_size == 1:
        return _within_a_rank(config)
    if sharing is TokenSharing.ALL and name in ALL2ALL_BACKENDS:
        name = "all_reduce"  # no dispatch before the experts
    return load_prepare_finalize(name)


def default_prepare_finalize(
    config: FusedMoEConfig,
    groups: ParallelGroups | None = None,
    *,
    placement: ExpertPlacement | None = None,
    device: DeviceInfo | None = None,
    experts: type[FusedMoEExperts] | None = None,
) -> FusedMoEPrepareAndFinalizeModular:
    """Build the prepare/finalize of a layer.

    Without ``groups`` there is no communication: every rank has all tokens, and the outputs of ranks are partial sums
    that the caller adds up. With groups the class is that of :func:`prepare_finalize_of`. If it is not available (its
    ``unavailable``) and names a ``fallback``, that class is used, with a FallbackWarning that states the reasons.

    Args:
        config: Config of the layer.
        groups: Process groups of the layer's ranks.
        placement: Placement of experts on these ranks.
        device: Device of the tokens. Default: the current one.
        experts: Experts class to check against; None for any.

    Returns:
        The prepare/finalize.

    Raises:
        ConfigError: The class cannot serve the layer (the message has every reason), or tokens cross ranks and there
            are no groups.
    """
    parallel = config.parallel
    if groups is None:
        if parallel.use_all2all_kernels:
            raise ConfigError(
                f"tokens cross ranks (dp {parallel.dp_size}, ep {parallel.ep_size}, tp {parallel.tp_size}): pass "
                "groups= or prepare_finalize="
            )
        return _within_a_rank(config)(config)
    theirs = groups.parallel
    if (theirs.world_size, theirs.rank, theirs.tp_size, theirs.dp_size) != (
        parallel.world_size,
        parallel.rank,
        parallel.tp_size,
        parallel.dp_size,
    ):
        raise ConfigError(f"groups has {theirs}, but the layer's config has {parallel}")
    cls = prepare_finalize_of(config)
    device = device or DeviceInfo.current()
    reasons = cls.unsupported_reasons(config, experts, device)
    if cls.fallback:
        # The ranks decide together, so that all use the same class.
        reasons = cls.unavailable(groups, _torch_device(device), reasons)
        if reasons:
            warnings.warn(
                f"all2all_backend {cls.name!r} is not available; falling back to {cls.fallback!r}: "
                f"{'; '.join(reasons)}",
                FallbackWarning,
                stacklevel=2,
            )
            cls = load_prepare_finalize(cls.fallback)
            reasons = cls.unsupported_reasons(config, experts, device)
    if reasons:
        raise ConfigError(f"{cls.name} does not fit the layer: it {'; it '.join(reasons)}")
    return cls(config, groups, placement=placement)


def _torch_device(device: DeviceInfo) -> torch.device:
    """The device of this rank's tokens, if they are on such a device."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device(device.kind)


def _within_a_rank(config: FusedMoEConfig) -> type[FusedMoEPrepareAndFinalizeModular]:
    if config.activation_format is FusedMoEActivationFormat.BATCHED:
        return BatchedPrepareAndFinalize
    return PrepareAndFinalizeNoParallel
