"""Prepare/finalize classes by name, and which one a layer's config asks for."""

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

#: by which tokens cross ranks, by the names of ``FusedMoEParallelConfig.all2all_backend``; imported when they are asked
#: for, since they import torch.distributed
ALL2ALL_BACKENDS = {
    "allgather_reducescatter": "moe_core.parallel.prepare_finalize.all_gather:AllGatherPrepareAndFinalize",
    "alltoall": "moe_core.parallel.prepare_finalize.all_to_all:AllToAllPrepareAndFinalize",
    "low_latency": "moe_core.parallel.prepare_finalize.low_latency:LowLatencyPrepareAndFinalize",
    "deepep": "moe_core.parallel.prepare_finalize.deepep:DeepEPPrepareAndFinalize",
}

#: for ranks that have the same tokens
REDUCTIONS = {
    "all_reduce": "moe_core.parallel.prepare_finalize.ranks_sum:AllReducePrepareAndFinalize",
    "reduce_scatter": "moe_core.parallel.prepare_finalize.ranks_sum:ReduceScatterPrepareAndFinalize",
}


def load_prepare_finalize(name: str) -> type[FusedMoEPrepareAndFinalizeModular]:
    """The prepare/finalize class of that name.  Raises ConfigError for a name that no class has."""
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
    """The class that a layer over several ranks gets: by its ``all2all_backend``; where all ranks have the same tokens
    ``all_reduce``, unless that names ``reduce_scatter``; of one rank by its activation format.

    Raises ConfigError for a ``dp_size`` or a name that is none.
    """
    parallel = config.parallel
    sharing, name = parallel.token_sharing, parallel.all2all_backend
    if parallel.world_size == 1:
        return _within_a_rank(config)
    if sharing is TokenSharing.ALL and name in ALL2ALL_BACKENDS:
        name = "all_reduce"  # nothing crosses ranks before the experts
    return load_prepare_finalize(name)


def default_prepare_finalize(
    config: FusedMoEConfig,
    groups: ParallelGroups | None = None,
    *,
    placement: ExpertPlacement | None = None,
    device: DeviceInfo | None = None,
    experts: type[FusedMoEExperts] | None = None,
) -> FusedMoEPrepareAndFinalizeModular:
    """What brings tokens to the experts of a layer and results back.

    Without ``groups`` nothing travels: every rank has all tokens, and the outputs of ranks are parts of a sum, which
    the caller adds up.  With them the class is that of :func:`prepare_finalize_of`, for ``device`` (default: the
    current one) and ``experts`` (None: for any); where that can't be had (its ``unavailable``), and it names a
    ``fallback``, this one, with a FallbackWarning that has the reasons.
    Raises ConfigError with every reason why the class cannot serve the layer, and where tokens would have to cross
    ranks and there are no groups.
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
        raise ConfigError(f"the groups are those of {theirs}, the layer's config has {parallel}")
    cls = prepare_finalize_of(config)
    device = device or DeviceInfo.current()
    reasons = cls.unsupported_reasons(config, experts, device)
    if cls.fallback:
        # the ranks decide together: all of them take the same class
        reasons = cls.unavailable(groups, _torch_device(device), reasons)
        if reasons:
            warnings.warn(
                f"all2all_backend {cls.name!r} can't be had, {cls.fallback!r} takes its place: {'; '.join(reasons)}",
                FallbackWarning,
                stacklevel=2,
            )
            cls = load_prepare_finalize(cls.fallback)
            reasons = cls.unsupported_reasons(config, experts, device)
    if reasons:
        raise ConfigError(f"{cls.name} does not fit the layer: it {'; it '.join(reasons)}")
    return cls(config, groups, placement=placement)


def _torch_device(device: DeviceInfo) -> torch.device:
    """Where this rank's tokens are, if they are on such a device."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device(device.kind)


def _within_a_rank(config: FusedMoEConfig) -> type[FusedMoEPrepareAndFinalizeModular]:
    if config.activation_format is FusedMoEActivationFormat.BATCHED:
        return BatchedPrepareAndFinalize
    return PrepareAndFinalizeNoParallel
