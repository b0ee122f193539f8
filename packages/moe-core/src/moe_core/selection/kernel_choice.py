"""A kernel for an engine that has kernels of its own, and stays with them where none of a scheme's fits better."""

from __future__ import annotations

import functools

import torch

from moe_core.interface.experts import FusedMoEExperts
from moe_core.selection.registry import registry
from moe_core.selection.report import NoBackendError, Selection
from moe_core.spec.config import FusedMoEConfig
from moe_core.spec.device import DeviceInfo
from moe_core.spec.environment import TRITON, Environment
from moe_core.spec.quant_key import QuantKey


def select_kernel(
    scheme: str,
    config: FusedMoEConfig,
    weight_key: QuantKey | None,
    activation_key: QuantKey | None,
    *,
    device: DeviceInfo | torch.device | str | None = None,
    backend: str = "auto",
) -> Selection:
    """The scheme's first kernel that fits; ``backend``: the one of that name.

    Libraries count as not installed: the engine calls those by itself, where it prefers them.  On a GPU a loop that the
    host drives is no kernel.  Raises SelectionError with the reasons against the scheme's own, ConfigError.
    """
    selection = (
        registry()
        .oracle(scheme)
        .select(
            config,
            weight_key=weight_key,
            activation_key=activation_key,
            moe_backend=backend,
            device=device,
            environment=_without_libraries(),
        )
    )
    report = selection.report
    if not report.device.is_gpu or (report.chosen is not None and report.chosen.is_kernel):
        return selection
    reasons = "; ".join(
        f"{candidate.backend} {', '.join(candidate.reasons)}"
        for candidate in report.candidates
        if candidate.takes_keys and candidate.reasons and (candidate.fault is not None or _is_own(candidate.experts))
    )
    what = f"{scheme}: no kernel fits on {report.device}"
    raise NoBackendError(f"{what}: {reasons}" if reasons else what, report)


def _is_own(experts: type[FusedMoEExperts]) -> bool:
    """Whether it needs no library."""
    return set(experts.claims.requires) <= {TRITON}


@functools.cache
def _without_libraries() -> Environment:
    """The installation without kernel libraries."""
    version = Environment.current().version(TRITON)
    return Environment({} if version is None else {TRITON.distribution: version})
