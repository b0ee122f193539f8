"""What selection says of one layer, for the command's arguments."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from moe_core.cli import _arguments
from moe_core.selection import BackendRefusedError, NoBackendError

if TYPE_CHECKING:
    from moe_core.config import FusedMoEConfig
    from moe_core.memory import LayerMemory
    from moe_core.quant_key import QuantKey
    from moe_core.selection import SelectionReport


def select(
    args: argparse.Namespace,
    scheme: str,
    config: FusedMoEConfig,
    weight_key: QuantKey | None,
    activation_key: QuantKey | None,
) -> tuple[SelectionReport, LayerMemory | None]:
    """What selection says, and the memory of what it chose; None where nothing fits."""
    from moe_core.memory import layer_memory
    from moe_core.registry import registry

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
        # the reasons are what was asked for
        return error.report, None
    return selection.report, layer_memory(selection, args.tokens)
