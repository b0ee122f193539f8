"""Interpretation of arguments that several commands share."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from moe_core.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from moe_core.checkpoint import Checkpoint, LayerSource
    from moe_core.layer.request import LayerRequest
    from moe_core.parallel.shard_plan import ShardPlan
    from moe_core.selection.oracle import Oracle
    from moe_core.spec.config import FusedMoEConfig, FusedMoEParallelConfig
    from moe_core.spec.quant_key import QuantKey


def parallel_of(args: argparse.Namespace, world_size: int = 1, rank: int = 0) -> FusedMoEParallelConfig | None:
    """Return the parallel configuration that --tp, --ep and --dp specify for a rank.

    Args:
        args: Parsed arguments.
        world_size: Number of processes. The experts are spread over ``world_size // tp`` of them if --ep is not given.
        rank: Rank of this process.

    Returns:
        The configuration; None for a single rank. Without --dp, each expert-parallel rank has a separate batch.

    Raises:
        ConfigError: The numbers are invalid.
    """
    from moe_core.spec.config import FusedMoEParallelConfig, whole_number

    tp, ep, dp = (getattr(args, name, None) for name in ("tp", "ep", "dp"))
    if tp is ep is dp is None and world_size == 1:
        return None
    for name, value in (("--tp", tp), ("--ep", ep), ("--dp", dp)):
        if value is not None:
            whole_number(name, value)
    tp = tp or 1
    ep = ep or max(world_size // tp, 1)
    parallel = FusedMoEParallelConfig.of_rank(rank, tp_size=tp, ep_size=ep, dp_size=ep if dp is None else dp)
    _ = parallel.token_sharing
    return parallel


def plans_of(
    config: FusedMoEConfig, keys: tuple[QuantKey | None, QuantKey | None], parallel: FusedMoEParallelConfig
) -> tuple[FusedMoEConfig, tuple[ShardPlan, ...]]:
    """Return a rank's config of a synthetic layer and the possible column splits.

    The config still has all columns.
    """
    from moe_core.parallel.shard import local_expert_range
    from moe_core.parallel.shard_plan import shard_plans

    local = len(local_expert_range(config.num_experts, parallel))
    plans = shard_plans(config.intermediate_size, *keys, parallel.tp_size)
    return replace(config, parallel=parallel, num_local_experts=local), plans


def layer_request_of(
    args: argparse.Namespace,
    layer: int | None = None,
    *,
    device: torch.device | None = None,
    experts: Sequence[int] | None = None,
    parallel: FusedMoEParallelConfig | None = None,
) -> LayerRequest:
    """Return the request for a layer of a checkpoint that the arguments specify.

    Args:
        args: Parsed arguments.
        layer: Index of the layer; None for the one that the arguments name.
        device: Device to load to.
        experts: Global ids of the experts to read; None for all.
        parallel: Rank whose shard is read; None for the whole layer.

    Returns:
        The request.
    """
    from moe_core.checkpoint import ModelSettings
    from moe_core.layer.request import LayerRequest
    from moe_core.selection.registry import registry

    return LayerRequest(
        layer=args.layer if layer is None else layer,
        device=device,
        backend=getattr(args, "backend", "auto"),
        dtype=dtype_of(args.dtype),
        experts=experts,
        parallel=parallel,
        online=None if args.quantize is None else registry().online(args.quantize),
        activation_key=activation_key_of(args),
        stack=args.stack,
        settings=ModelSettings(args.routing, args.activation, assume=args.assume, top_k=args.top_k),
    )


def source_of(
    args: argparse.Namespace,
    checkpoint: Checkpoint,
    layer: int | None = None,
    *,
    experts: Sequence[int] | None = None,
    parallel: FusedMoEParallelConfig | None = None,
) -> LayerSource:
    """Describe a layer of a checkpoint as the arguments of :func:`layer_request_of` specify."""
    from moe_core.layer.request import describe

    return describe(checkpoint, layer_request_of(args, layer, experts=experts, parallel=parallel))


def opened(args: argparse.Namespace) -> tuple[Checkpoint, list[str]]:
    """Open the checkpoint folder of the arguments.

    If the folder holds no weights, the checkpoint is planned from config.json.

    Returns:
        (checkpoint, notes about it).
    """
    from moe_core.checkpoint import Checkpoint
    from moe_core.checkpoint.planned import has_no_weights, plan

    if not has_no_weights(args.path):
        return Checkpoint.open(args.path), []

    def read(checkpoint: Checkpoint) -> LayerSource:
        return source_of(args, checkpoint, checkpoint.moe_layers[0])

    return plan(args.path, read), ["estimated from config.json: the folder holds no weights"]


def activation_key_of(args: argparse.Namespace) -> QuantKey | str | None:
    """Return the activation key for :func:`moe_core.checkpoint.read_layer`."""
    return "checkpoint" if args.activation_key is None else _key(args.activation_key)


def batched(config: FusedMoEConfig, num_tokens: int) -> FusedMoEConfig:
    """Return the layer in the batched activation format, for at most ``num_tokens`` tokens."""
    from moe_core.spec.config import FusedMoEActivationFormat

    return replace(config, activation_format=FusedMoEActivationFormat.BATCHED, max_num_tokens=num_tokens)


def check_room(count: int, width: int) -> None:
    """Raise ConfigError if ``count`` tokens of ``width`` float32 values exceed host memory.

    This is checked before allocating. An operating system may promise memory that it does not have and kill the process
    later.
    """
    memory, needed = host_memory(), 4 * count * width
    if memory is not None and needed > memory:
        raise ConfigError(f"--tokens {count}: out of memory: they take {needed} bytes, this machine has {memory}")


def host_memory() -> int | None:
    """Bytes of the machine's physical memory; None if the system does not report it."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def dtype_of(name: str) -> torch.dtype:
    """Return the torch dtype of that name."""
    import torch

    found: torch.dtype = getattr(torch, name)
    return found


def device_of(name: str | None) -> torch.device:
    """Return a device of this machine to run on.

    Args:
        name: Name of the device; None for the GPU if there is one, else the CPU.

    Returns:
        The device.

    Raises:
        ConfigError: The name is unknown, or there is no such device.
    """
    import torch

    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(
            f"--device {name}: expected a device of this machine (cpu, cuda, cuda:1 …); moe explain takes others"
        ) from None
    if device.type not in ("cpu", "cuda", "xpu"):
        raise ConfigError(f"--device {name}: expected cpu, cuda or xpu")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise ConfigError(
                f"--device {name}: torch {torch.__version__} sees {count or 'no'} GPU{'s' * (count > 1)} here"
            )
    if device.type == "xpu" and not torch.xpu.is_available():
        raise ConfigError(f"--device {name}: torch {torch.__version__} sees no such device here")
    return device


def request_of(args: argparse.Namespace) -> tuple[FusedMoEConfig, QuantKey | None, QuantKey | None]:
    """Return (config, weight key, activation key) of a layer described by --scheme and --shape."""
    from moe_core.selection.registry import registry
    from moe_core.spec.activation import MoEActivation
    from moe_core.spec.config import FusedMoEConfig

    online = None if args.quantize is None else registry().online(args.quantize)
    if online is not None:
        if args.weight_key is not None or args.activation_key is not None or args.scheme not in (None, online.scheme):
            raise ConfigError(
                f"--quantize {online.name} implies the scheme ({online.scheme}) and the keys; leave them out"
            )
        args.scheme = online.scheme
    experts, top_k, hidden, inter = args.shape
    config = FusedMoEConfig(
        num_experts=experts,
        top_k=top_k,
        hidden_size=hidden,
        intermediate_size=inter,
        activation=MoEActivation.parse(args.activation or "silu"),
        dtype=dtype_of(args.dtype),
        has_bias=args.bias,
    )
    if online is not None:
        return config, online.weight_key, online.activation_key
    oracle = registry().oracle(args.scheme)
    claimed = _claimed(oracle)
    # the default request of inference engines
    usual = oracle.spec.kinds[0].weight_key if oracle.spec.kinds else claimed[0][0]
    wanted = [
        (weight, activation)
        for weight, activation in claimed
        if (args.weight_key is None or weight == _key(args.weight_key))
        and (args.activation_key is None or activation == _key(args.activation_key))
    ]
    # Next, prefer activations typical of the scheme, unless none of those goes with the weights.
    chosen = min(wanted or claimed, key=lambda pair: (pair[0] != usual, (pair[1] is None) != oracle.spec.weight_only))
    weight = chosen[0] if args.weight_key is None else _key(args.weight_key)
    activation = chosen[1] if args.activation_key is None else _key(args.activation_key)
    return config, weight, activation


def _key(name: str) -> QuantKey | None:
    from moe_core.spec.quant_key import as_quant_key

    return as_quant_key(name)


def _claimed(oracle: Oracle) -> list[tuple[QuantKey | None, QuantKey | None]]:
    """Return every pair of keys that the scheme's backends claim, in their order."""
    from moe_core.interface.claims import expand_key

    claims = [pair for backend in oracle.table() for experts in backend.load() for pair in experts.claims.keys]
    if not claims:
        raise ConfigError("the scheme has no backends: give --weight-key and --activation-key")
    return [(w, a) for weight, activation in claims for w in expand_key(weight) for a in expand_key(activation)]
