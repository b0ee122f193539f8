"""Select a kernel for an engine that keeps its own kernels where no kernel of a scheme fits."""

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
    """Select the first kernel of a scheme that fits, ignoring kernel libraries.

    Libraries count as not installed: the engine calls them itself where it prefers them. On a GPU a host-driven loop
    does not count as a kernel.

    Args:
        scheme: Name of the scheme.
        config: Config of the layer.
        weight_key: Quantization of weights; None for 16 bits.
        activation_key: Quantization of activations; None for 16 bits.
        device: Device to select for.
        backend: Name of the only backend to consider, or "auto".

    Returns:
        The selection.

    Raises:
        SelectionError: No kernel fits; the message has the reasons against the scheme's own kernels.
        ConfigError: The request is invalid.
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
    """Whether the class requires no library other than Triton."""
    return set(experts.claims.requires) <= {TRITON}


@functools.cache
def _without_libraries() -> Environment:
    """This installation without kernel libraries."""
    version = Environment.current().version(TRITON)
    return Environment({} if version is None else {TRITON.distribution: version})
