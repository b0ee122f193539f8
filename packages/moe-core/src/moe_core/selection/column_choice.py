"""Which way of sharing columns among ranks a device's kernels take."""

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
    """The first of ``cuts`` with whose keys, for the columns of every rank, a kernel runs; and this rank's selection.

    ``cuts``: of :func:`moe_core.parallel.shard_plan.column_cuts`.  All ranks come to the same, on devices of the same
    kind. Where no kernel takes any (on a CPU torch is one), it is the first that a backend takes of those that keep the
    layer's keys, then of those with ever finer groups.  Raises SelectionError, that of the layer's keys or the coarsest
    groups, where there is none.
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
        """Of every rank's number of columns, so that all ranks come to the same."""
        return {size: select(cut, size) for size in cut.sizes}

    def of_rank(cut: ColumnCut, found: dict[int, Selection]) -> tuple[ColumnCut, Selection]:
        begin, end = cut.ranges[rank]
        return cut, found[end - begin]

    if len(cuts) > 1:
        for cut in cuts:
            try:
                found = select_all(cut)
            except (SelectionError, ConfigError):  # the scheme may not know such groups at all
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
