"""Select how columns are sharded among ranks, by what the kernels of the device support."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import torch

from moe_core.errors import ConfigError
from moe_core.parallel.shard_plan import ColumnCut, by_coarseness
from moe_core.selection.oracle import Oracle, as_device_info
from moe_core.selection.report import Selection, SelectionError
from moe_core.spec.config import FusedMoEConfig
from moe_core.spec.device import DeviceInfo
from moe_core.spec.environment import Environment


def select_cut(
    oracle: Oracle,
    config: FusedMoEConfig,
    cuts: Sequence[ColumnCut],
    *,
    moe_backend: str = "auto",
    device: DeviceInfo | str | torch.device | None = None,
    environment: Environment | None = None,
) -> tuple[ColumnCut, Selection]:
    """Choose the first column split whose keys a kernel runs on every rank.

    All ranks arrive at the same choice on devices of the same kind. Without a fitting kernel (on a CPU, torch counts as
    one), the order is: splits that keep the layer's keys, then those with ever finer groups; the first that any backend
    accepts is chosen.

    Args:
        oracle: Oracle of the scheme.
        config: Config of this rank's shard.
        cuts: Splits, from :func:`moe_core.parallel.shard_plan.column_cuts`.
        moe_backend: Backend name, or "auto".
        device: Device to select for.
        environment: Installed packages. Default: those of this installation.

    Returns:
        The split, and the selection of this rank.

    Raises:
        SelectionError: No backend accepts any split. The error is that of the layer's keys or the coarsest groups.
    """
    info = as_device_info(device)
    rank = config.parallel.tp_rank

    def select(cut: ColumnCut, size: int) -> Selection:
        return oracle.select(
            replace(config, intermediate_size=size),
            weight_key=cut.weight_key,
            activation_key=cut.activation_key,
            moe_backend=moe_backend,
            device=info,
            environment=environment,
        )

    def select_all(cut: ColumnCut) -> dict[int, Selection]:
        """Select for the column count of every rank, so that all ranks make the same choice."""
        return {size: select(cut, size) for size in cut.sizes}

    def of_rank(cut: ColumnCut, found: dict[int, Selection]) -> tuple[ColumnCut, Selection]:
        begin, end = cut.ranges[rank]
        return cut, found[end - begin]

    if len(cuts) > 1:
        for cut in cuts:
            try:
                found = select_all(cut)
            except (SelectionError, ConfigError):  # the scheme may not support such groups at all
                continue
            if not info.is_gpu or all(_runs_kernel(selection) for selection in found.values()):
                return of_rank(cut, found)
    plain, *others = by_coarseness(cuts)
    try:
        return of_rank(plain, select_all(plain))
    except (SelectionError, ConfigError):
        for cut in others:
            with suppress(SelectionError, ConfigError):
                return of_rank(cut, select_all(cut))
        raise


def _runs_kernel(selection: Selection) -> bool:
    return selection.report.chosen is not None and selection.report.chosen.is_kernel
