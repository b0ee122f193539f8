"""Backend selection for one layer with a command's arguments."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from moe_core.cli import _arguments
from moe_core.errors import ConfigError
from moe_core.selection.report import BackendRefusedError, NoBackendError, SelectionError

if TYPE_CHECKING:
    import torch

    from moe_core.cli._prepare_finalize import PrepareFinalizeSelection
    from moe_core.parallel.shard_plan import ShardPlan
    from moe_core.selection.memory import LayerMemory
    from moe_core.selection.report import SelectionReport
    from moe_core.spec.config import FusedMoEConfig
    from moe_core.spec.quant_key import QuantKey


def select(
    args: argparse.Namespace,
    scheme: str,
    config: FusedMoEConfig,
    weight_key: QuantKey | None,
    activation_key: QuantKey | None,
) -> tuple[SelectionReport, LayerMemory | None]:
    """Select a backend.

    Returns:
        (report, memory of the chosen backend); the memory is None if nothing fits.
    """
    from moe_core.selection.memory import layer_memory
    from moe_core.selection.registry import registry

    if args.activation_format == "batched":
        config = _arguments.batched(config, args.tokens)
    try:
        selection = (
            registry()
            .oracle(scheme)
            .select(
                config,
                weight_key=weight_key,
                activation_key=activation_key,
                moe_backend=args.backend,
                device=args.device,
                tuning=args.tuning,
            )
        )
    except (NoBackendError, BackendRefusedError) as error:
        # The reasons are the requested output, so this is not an error.
        return error.report, None
    return selection.report, layer_memory(selection, args.tokens)


def select_over_ranks(
    args: argparse.Namespace,
    scheme: str,
    config: FusedMoEConfig,
    plans: Sequence[ShardPlan],
    tokens: int,
    device: torch.device | str | None,
) -> tuple[PrepareFinalizeSelection, ShardPlan]:
    """Select prepare/finalize and the column split for a layer over several ranks.

    Args:
        args: Parsed arguments.
        scheme: Name of the scheme.
        config: Config of a rank, apart from its columns.
        plans: Possible column splits.
        tokens: Tokens per rank.
        device: Device of the rank; None for this machine's.

    Returns:
        (selection, column split).

    Raises:
        ConfigError: An activation format was requested.
    """
    from moe_core.cli._prepare_finalize import select_prepare_finalize
    from moe_core.parallel.distributed.cost import Machine
    from moe_core.parallel.shard_plan import default_plan
    from moe_core.selection.column_choice import select_plan
    from moe_core.selection.registry import registry

    if getattr(args, "activation_format", "standard") == "batched":
        raise ConfigError("--activation-format cannot be combined with --tp or --ep: prepare/finalize determines it")
    oracle = registry().oracle(scheme)
    backend = args.backend or "auto"
    try:
        # Token movement does not affect the column split.
        alone = replace(config, parallel=replace(config.parallel, dp_size=1, dp_rank=0))
        plan, _ = select_plan(oracle, alone, plans, moe_backend=backend, device=device)
    except SelectionError:
        plan = default_plan(tuple(plans))
    begin, end = plan.ranges[config.parallel.tp_rank]
    found = select_prepare_finalize(
        oracle,
        replace(config, intermediate_size=end - begin),
        weight_key=plan.weight_key,
        activation_key=plan.activation_key,
        tokens=tokens,
        all2all="auto" if args.all2all is None else args.all2all,
        moe_backend=backend,
        device=device,
        tuning=getattr(args, "tuning", None),
        machine=None if args.machine is None else Machine.load(args.machine),
    )
    return found, plan
