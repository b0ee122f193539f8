"""Select how columns are sharded among ranks, by what the kernels of the device support."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import torch

from moe_core.errors import ConfigError
from moe_core.parallel.shard_plan import ShardPlan, by_coarseness
from moe_core.selection.oracle import Oracle, as_device_info
from moe_core.selection.report import Selection, SelectionError
from moe_core.spec.config import FusedMoEConfig
from moe_core.spec.device import DeviceInfo
from moe_core.spec.environment import Environment


def select_plan(
    oracle: Oracle,
    config: FusedMoEConfig,
    plans: Sequence[ShardPlan],
    *,
    moe_backend: str = "auto",
    device: DeviceInfo | str | torch.device | None = None,
    environment: Environment | None = None,
) -> tuple[ShardPlan, Selection]:
    """Choose the first column split whose keys a kernel runs on every rank.

    All ranks arrive at the same choice on devices of the same kind. Without a fitting kernel (on a CPU, torch counts as
    one), the order is: splits that keep the layer's keys, then those with ever finer groups; the first that any backend
    accepts is chosen.

    Args:
        oracle: Oracle of the scheme.
        config: Config of this rank's shard.
        plans: Splits, from :func:`moe_core.parallel.shard_plan.shard_plans`.
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

    def select(plan: ShardPlan, size: int) -> Selection:
        return oracle.select(
            replace(config, intermediate_size=size),
            weight_key=plan.weight_key,
            activation_key=plan.activation_key,
            moe_backend=moe_backend,
            device=info,
            environment=environment,
        )

    def select_all(plan: ShardPlan) -> dict[int, Selection]:
        """Select for the column count of every rank, so that all ranks make the same choice."""
        return {size: select(plan, size) for size in plan.sizes}

    def of_rank(plan: ShardPlan, found: dict[int, Selection]) -> tuple[ShardPlan, Selection]:
        begin, end = plan.ranges[rank]
        return plan, found[end - begin]

    if len(plans) > 1:
        for plan in plans:
            try:
                found = select_all(plan)
            except (SelectionError, ConfigError):  # the scheme may not support such groups at all
                continue
            if not info.is_gpu or all(_runs_kernel(selection) for selection in found.values()):
                return of_rank(plan, found)
    plain, *others = by_coarseness(plans)
    try:
        return of_rank(plain, select_all(plain))
    except (SelectionError, ConfigError):
        for plan in others:
            with suppress(SelectionError, ConfigError):
                return of_rank(plan, select_all(plan))
        raise


def _runs_kernel(selection: Selection) -> bool:
    return selection.report.chosen is not None and selection.report.chosen.is_kernel
