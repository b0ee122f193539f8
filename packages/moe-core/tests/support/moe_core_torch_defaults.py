"""Layers that are loaded and called while torch has another default dtype or device, as engines set them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from moe_core import FusedMoEConfig, MoEError, MoEWeights, load_layer, registry
from moe_core_layers import Kind
from torch import Tensor


@contextmanager
def defaults(dtype: torch.dtype, device: str) -> Iterator[None]:
    """These, and torch's own again."""
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def called(kind: Kind, config: FusedMoEConfig, weights: MoEWeights, x: Tensor, scores: Tensor) -> Tensor:
    """A layer of ``weights`` in torch."""
    oracle = registry().oracle(kind.scheme)
    cpu = torch.device("cpu")
    keys = {"weight_key": kind.weight_key, "activation_key": kind.activation_key}
    selection = oracle.select(config, device=cpu, **keys)  # type: ignore[arg-type]
    kernel = oracle.make_kernel(selection, oracle.convert(selection, weights))
    routed, ids = scores.topk(config.top_k)
    return kernel.apply(x, topk_weights=routed, topk_ids=ids)


def loaded(folder: Path, x: Tensor) -> Tensor:
    """The first layer of a checkpoint, called."""
    layer = load_layer(folder, device="cpu")
    return layer(x.repeat(1, layer.config.hidden_size // x.shape[1]))


def differing(
    dtype: torch.dtype,
    device: str,
    layers: list[tuple[Kind, FusedMoEConfig, MoEWeights]],
    folders: list[Path],
    x: Tensor,
    scores: Tensor,
) -> list[str]:
    """What does not give with these defaults, at first, what it gives without."""
    calls: list[tuple[str, Callable[[], Tensor]]] = [
        (str(kind), lambda kind=kind, config=config, weights=weights: called(kind, config, weights, x, scores))
        for kind, config, weights in layers
    ]
    calls += [(folder.name, lambda folder=folder: loaded(folder, x)) for folder in folders]
    wrong = []
    for name, call in calls:
        try:
            with defaults(dtype, device):
                first = call()
            second = call()
        except (MoEError, RuntimeError, NotImplementedError, TypeError) as error:
            wrong.append(f"{name}: {type(error).__name__}: {error}")
            continue
        if first.device != second.device or not torch.equal(first, second):
            wrong.append(f"{name}: other results")
    return wrong
