"""The layer that ``moe bench`` and ``moe tune`` time: from a checkpoint, or synthetic."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from moe_core.cli import _arguments
from moe_core.cli._output import progress
from moe_core.cli.grammar import TIMED_SHAPE
from moe_core.cli.parser import shape
from moe_core.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from moe_core.checkpoint import Checkpoint
    from moe_core.selection.report import Selection
    from moe_core.spec.config import FusedMoEConfig
    from moe_core.spec.device import DeviceInfo
    from moe_core.spec.quant_key import QuantKey
    from moe_core.spec.weights import MoEWeights

#: input sets the benchmark rotates through (defeats the L2 cache)
INPUTS = 4


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer to measure; weights are made on demand.

    Attributes:
        scheme: Name of the scheme.
        what: Description for people.
        config: The layer.
        weight_key: Weight format.
        activation_key: Activation format.
        weights: Makes the canonical weights.
    """

    scheme: str
    what: str
    config: FusedMoEConfig
    weight_key: QuantKey | None
    activation_key: QuantKey | None
    weights: Callable[[], MoEWeights]

    def select(self, backend: str, device: torch.device | DeviceInfo, tuning: str | None) -> Selection:
        """Select a backend.

        Args:
            backend: Name of the backend, or "auto".
            device: The device.
            tuning: Tuning profile, as in :meth:`moe_core.Oracle.select`.

        Returns:
            The selection.
        """
        from moe_core.selection.registry import registry

        return (
            registry()
            .oracle(self.scheme)
            .select(
                self.config,
                weight_key=self.weight_key,
                activation_key=self.activation_key,
                moe_backend=backend,
                device=device,
                tuning=tuning,
            )
        )


def the_layer(args: argparse.Namespace, device: torch.device) -> Layer:
    """Return the layer that the arguments name: from a folder, or by --scheme and --shape."""
    if args.path is None:
        return _of_shape(args, device)
    from moe_core.checkpoint import Checkpoint

    return _of_checkpoint(args, Checkpoint.open(args.path), device, args.layer)


def kinds_of_layers(args: argparse.Namespace, device: torch.device) -> list[Layer]:
    """Return one layer of each kind in a checkpoint folder, or the one that the arguments name."""
    if args.path is None or args.layer is not None:
        return [the_layer(args, device)]
    from moe_core.checkpoint import Checkpoint

    checkpoint = Checkpoint.open(args.path)
    found: dict[object, Layer] = {}
    with progress(f"reading the names of {len(checkpoint.moe_layers)} layers"):
        # Without MoE layers, reading the default layer raises an error that lists what the checkpoint contains.
        for index in checkpoint.moe_layers or (None,):
            layer = _of_checkpoint(args, checkpoint, device, index)
            found.setdefault(
                (layer.scheme, replace(layer.config, routing=None), layer.weight_key, layer.activation_key), layer
            )
    return list(found.values())


def _of_checkpoint(args: argparse.Namespace, checkpoint: Checkpoint, device: torch.device, index: int | None) -> Layer:
    source = _arguments.source_of(args, checkpoint, index)
    return Layer(
        source.scheme,
        f"{args.path} layer {source.index}",
        source.config,
        source.weight_key,
        source.activation_key,
        lambda: source.weights(device=device),
    )


def _of_shape(args: argparse.Namespace, device: torch.device) -> Layer:
    from moe_core.selection.registry import registry

    args.shape = args.shape or shape(TIMED_SHAPE)
    if args.scheme is None and args.quantize is None:
        # With a single scheme installed there is no choice to make.
        names = [scheme.name for scheme in registry().schemes()]
        if len(names) != 1:
            raise ConfigError(f"give a checkpoint folder, or --scheme; installed: {', '.join(names) or 'none'}")
        args.scheme = names[0]
    config, weight_key, activation_key = _arguments.request_of(args)
    return Layer(
        args.scheme,
        f"E={config.num_experts} k={config.top_k} K={config.hidden_size} N={config.intermediate_size}",
        config,
        weight_key,
        activation_key,
        lambda: _random_weights(config, weight_key, activation_key, device),
    )


def _random_weights(
    config: FusedMoEConfig, weight_key: QuantKey | None, activation_key: QuantKey | None, device: torch.device
) -> MoEWeights:
    """Repeat a few random experts in separate memory, so that quantizing takes no time."""
    import torch

    from moe_core.reference.quantization import quantize_moe_weights, static_scales
    from moe_core.selection.memory import example_weights

    if weight_key is not None and (weight_key.permuted or weight_key.pre_scaled):
        raise ConfigError("activation order and pre-scales cannot be generated: pass a checkpoint folder")
    # Check the size before experts are made that can never fit.
    needed = sum(tensor.nbytes for _, tensor in example_weights(config, weight_key, activation_key, "meta").tensors())
    on_gpu = device.type == "cuda"
    memory = torch.cuda.get_device_properties(device).total_memory if on_gpu else _arguments.host_memory()
    if memory is not None and needed > memory:
        raise ConfigError(f"--shape: out of memory: the weights take {needed} bytes, {device} has {memory}")
    distinct = min(4, config.local_experts)
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) / math.sqrt(shape[-1])).to(config.dtype).to(device)

    static: dict[str, Any] = {}
    if activation_key is not None:
        # Inputs of GEMM1 and GEMM2 have a standard deviation of about 1 and rarely exceed 8 in magnitude.
        high = torch.full((distinct,), 8.0, device=device)
        scales = static_scales(-high, high, activation_key)
        static = {f"{name}_input_{role}": tensor for name in ("w13", "w2") for role, tensor in scales.items()}
    small = quantize_moe_weights(
        normal(distinct, config.w13_rows, config.hidden_size),
        normal(distinct, config.hidden_size, config.intermediate_size),
        gated=config.is_gated,
        weight_key=weight_key,
        activation_key=activation_key,
        w13_bias=normal(distinct, config.w13_rows) if config.has_bias else None,
        w2_bias=normal(distinct, config.hidden_size) if config.has_bias else None,
        **static,
    )
    which = torch.arange(config.local_experts, device=device) % distinct
    repeated: dict[str, Any] = {name: _repeated(tensor, which) for name, tensor in small.tensors()}
    return replace(small, **repeated)


def _repeated(tensor: Tensor, which: Tensor) -> Tensor:
    import torch

    # Some devices cannot index 8-bit floats, but all can index bytes.
    raw = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
    return raw[which].view(tensor.dtype)


def random_call(
    config: FusedMoEConfig, count: int, device: torch.device, seed: int, *, skew: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (hidden states, router weights, expert ids) of random tokens on ``device``.

    Routing is uniform, or skewed as in :func:`moe_core.reference.skewed_routing.skewed` if ``skew`` is nonzero.
    """
    import torch

    from moe_core.reference.skewed_routing import skewed

    _arguments.check_room(count, config.hidden_size)
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(count, config.hidden_size, generator=generator, device=device).to(config.dtype)
    scores = torch.rand(count, config.num_experts, generator=generator, device=device)
    ids = (skewed(scores, skew) if skew else scores).topk(config.top_k, dim=1).indices
    return x, scores.gather(1, ids), ids.int()
