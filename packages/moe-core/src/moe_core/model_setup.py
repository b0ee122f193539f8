"""What an engine does once, with all layers of a model: scratch memory that they share, kernels compiled in advance."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from moe_core.config import whole_number
from moe_core.errors import ConfigError
from moe_core.kernel import FusedMoEKernel
from moe_core.layer import FusedMoELayer
from moe_core.shard import map_of
from moe_core.workspace import Workspace

#: a model that holds layers, or layers and kernels one by one
Layers = nn.Module | FusedMoEKernel | Iterable["FusedMoELayer | FusedMoEKernel"]


def share_workspace(layers: Layers, max_tokens: int) -> Workspace:
    """One workspace for all ``layers`` of a model, large enough for calls with at most ``max_tokens`` tokens.

    ``layers``: the model, or its layers or kernels.  They must run one after another on one stream.  Nothing is
    allocated for scratch memory after that, so what the model takes is known, and captured CUDA graphs share it.
    Returns the workspace: its ``nbytes`` are part of the model's memory.  Raises ConfigError where there is no layer,
    or layers are on several devices: share one for each.
    """
    kernels = [kernel for kernel, _ in _kernels(layers)]
    whole_number("max_tokens", max_tokens)
    devices = {kernel.weights.device for kernel in kernels}
    if len(devices) > 1:
        found = ", ".join(sorted(map(str, devices)))
        raise ConfigError(f"the layers are on {found}: share a workspace for each device")
    workspace = Workspace(devices.pop())
    workspace.reserve(max(kernel.workspace_nbytes(max_tokens) for kernel in kernels))
    for kernel in kernels:
        kernel.workspace = workspace
    return workspace


@torch.no_grad()
def warm_up(layers: Layers, num_tokens: Iterable[int]) -> None:
    """Call ``layers`` with each number of tokens, so that no kernel is compiled later, in a CUDA graph's capture say.

    ``layers``: the model, or its layers or kernels; those that are alike share their kernels, so one of them is called.
    Where tokens cross ranks, every rank warms up with the same numbers.  Adapters of LoRA take part where a layer has
    places for them.  Raises ConfigError where there is no layer.
    """
    counts = [whole_number("num_tokens", count) for count in num_tokens]
    done = set()
    for kernel, expert_map in _kernels(layers):
        experts, weights = kernel.experts, kernel.weights
        tensors = tuple((name, tensor.shape, tensor.dtype) for name, tensor in weights.tensors())
        keys = experts.weight_key, experts.activation_key
        kind = (type(experts), type(kernel.prepare_finalize), kernel.config, keys, weights.device, tensors)
        if kind in done:
            continue
        done.add(kind)
        for count in counts:
            _call(kernel, expert_map, count)


def _call(kernel: FusedMoEKernel, expert_map: Tensor | None, count: int) -> None:
    """One call with ``count`` random tokens, which meet all experts; one more with adapters where there are places."""
    config, device = kernel.config, kernel.weights.device
    generator = torch.Generator().manual_seed(count)
    x = torch.randn(count, config.hidden_size, generator=generator).to(device, config.dtype)
    logits = torch.rand(count, config.num_experts, generator=generator).to(device)
    if expert_map is None and config.local_experts < config.num_experts:
        expert_map = map_of(range(config.local_experts), config.num_experts, device)
    if kernel.is_monolithic:
        bias = torch.zeros(config.num_experts, device=device)
        corrects = config.routing is not None and config.routing.has_correction_bias
        kernel.apply_monolithic(
            x, router_logits=logits, correction_bias=bias if corrects else None, expert_map=expert_map
        )
        return
    weights, ids = logits.topk(config.top_k)
    kernel.apply(x, topk_weights=weights, topk_ids=ids.int(), expert_map=expert_map)
    if kernel.lora is not None:
        adapters = torch.zeros(count, dtype=torch.int32, device=device)
        kernel.apply(x, topk_weights=weights, topk_ids=ids.int(), expert_map=expert_map, adapter_ids=adapters)


def _kernels(layers: Layers) -> Iterator[tuple[FusedMoEKernel, Tensor | None]]:
    """(kernel, expert map) of each layer; ConfigError where there is none."""
    given = layers.modules() if isinstance(layers, nn.Module) else layers
    found = 0
    for item in (given,) if isinstance(given, FusedMoEKernel) else given:
        if isinstance(item, FusedMoELayer):
            yield item.kernel, item.expert_map
        elif isinstance(item, FusedMoEKernel):
            yield item, None
        elif not isinstance(layers, nn.Module):
            raise ConfigError(f"layers holds a {type(item).__name__}, expected a FusedMoELayer or a FusedMoEKernel")
        else:
            continue
        found += 1
    if not found:
        raise ConfigError("there is no FusedMoELayer among the layers: give the model, its layers or their kernels")
