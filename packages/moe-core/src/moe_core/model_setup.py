"""What an engine does once, with all layers of a model: scratch memory that they share, kernels compiled in advance."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from moe_core.call_launches import launches_up_to, records_launches, routing_launches
from moe_core.config import whole_number
from moe_core.errors import ConfigError
from moe_core.jit.compile_ahead import Progress, compile_ahead, distinct
from moe_core.jit.launch import Launch
from moe_core.kernel import FusedMoEKernel
from moe_core.layer import FusedMoELayer
from moe_core.ops._backend import interpreting
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
def warm_up(layers: Layers, max_tokens: int, *, progress: Progress | None = None) -> int:
    """Compile every kernel that calls of ``layers`` with 1 to ``max_tokens`` tokens launch, several at a time.

    ``layers``: the model, or its layers or kernels; those that are alike share their kernels.  No later call compiles,
    in a CUDA graph's capture say, as long as its tensors start at multiples of 16 bytes and their rows follow each
    other.  Expert ids of 32 and 64 bits are provided for, calls with and without adapters where a layer has places for
    them, and the layer's routing, of logits in float32 or its own dtype.  Nothing runs, and no memory is taken but that
    of the kernels.

    Experts that call a kernel library are called instead, with 1, 2, 4 … ``max_tokens`` random tokens, since only a
    call makes the library compile or load what it needs.  Where tokens cross ranks, every rank warms up with the same
    number.  On a CPU there is nothing to do.

    ``progress`` is told how many kernels are ready, and of how many; it may be called by other threads.  Returns that
    number, without what libraries compile.  Raises ConfigError where there is no layer, and what Triton raises for a
    kernel that it cannot compile.
    """
    whole_number("max_tokens", max_tokens)
    launches: dict[torch.device, list[Launch]] = {}
    done = set()
    for kernel, layer in _kernels(layers):
        experts, weights = kernel.experts, kernel.weights
        tensors = tuple((name, tensor.shape, tensor.dtype) for name, tensor in weights.tensors())
        keys, expert_map = (experts.weight_key, experts.activation_key), None if layer is None else layer.expert_map
        lora, routing = kernel.lora is not None, None if layer is None else layer.routing
        movement, mapped = type(kernel.prepare_finalize), expert_map is not None
        kind = (type(experts), movement, kernel.config, keys, weights.device, tensors, mapped, lora, routing)
        if kind in done or not _compiles(kernel):
            continue
        done.add(kind)
        found = launches.setdefault(weights.device, [])
        if records_launches(kernel):
            found += launches_up_to(kernel, max_tokens, mapped=mapped)
        else:
            for count in sorted({*(1 << power for power in range(max_tokens.bit_length())), max_tokens}):
                _call(kernel, expert_map, count)
        if layer is not None and routing is not None and not kernel.is_monolithic:
            found += routing_launches(layer, max_tokens)
    total, ready = sum(len(distinct(found)) for found in launches.values()), 0

    def told(count: int, _: int) -> None:
        if progress is not None:
            progress(ready + count, total)

    for device, found in launches.items():
        if not found:
            continue
        with on_device(device):
            ready += compile_ahead(found, progress=told)
    return ready


def on_device(device: torch.device) -> torch.cuda.device:
    """Makes ``device`` the one that Triton compiles for."""
    return torch.cuda.device(device)


def _compiles(kernel: FusedMoEKernel) -> bool:
    """Whether calls compile anything: there is a GPU, and Triton does not interpret."""
    return kernel.weights.device.type == "cuda" and not interpreting()


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


def _kernels(layers: Layers) -> Iterator[tuple[FusedMoEKernel, FusedMoELayer | None]]:
    """(kernel, its layer if it has one) of each; ConfigError where there is none."""
    given = layers.modules() if isinstance(layers, nn.Module) else layers
    found = 0
    for item in (given,) if isinstance(given, FusedMoEKernel) else given:
        if isinstance(item, FusedMoELayer):
            yield item.kernel, item
        elif isinstance(item, FusedMoEKernel):
            yield item, None
        elif not isinstance(layers, nn.Module):
            raise ConfigError(f"layers holds a {type(item).__name__}, expected a FusedMoELayer or a FusedMoEKernel")
        else:
            continue
        found += 1
    if not found:
        raise ConfigError("there is no FusedMoELayer among the layers: give the model, its layers or their kernels")
