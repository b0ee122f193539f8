"""Which way of sharing columns among ranks a device's kernels take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from moe_core.column_cut import ColumnCut, plain_cut
from moe_core.config import FusedMoEConfig
from moe_core.device import DeviceInfo
from moe_core.environment import Environment
from moe_core.errors import ConfigError
from moe_core.oracle import Oracle, as_device_info
from moe_core.selection import Selection, SelectionError


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

    ``cuts``: of :func:`moe_core.column_cut.column_cuts`.  All ranks come to the same, on devices of the same kind.
    Where no kernel takes any (on a CPU torch is one), it is the one that keeps the layer's keys.
    Raises SelectionError where that has no backend either.
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

    if len(cuts) > 1:
        for cut in cuts:
            try:
                found = {size: select(cut, size) for size in cut.sizes}
            except (SelectionError, ConfigError):  # the scheme may not know such groups at all
                continue
            if not info.is_gpu or all(_runs_kernel(selection) for selection in found.values()):
                begin, end = cut.ranges[rank]
                return cut, found[end - begin]
    cut = plain_cut(tuple(cuts))
    begin, end = cut.ranges[rank]
    return cut, select(cut, end - begin)


def _runs_kernel(selection: Selection) -> bool:
    return selection.report.chosen is not None and selection.report.chosen.is_kernel
