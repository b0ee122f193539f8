"""Compile the kernels that calls of layers launch, without making the calls."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moe_core.interface.recordable import RecordableExperts
from moe_core.kernels.launch.compile_ahead import Progress, compile_ahead, distinct
from moe_core.kernels.launch.current_device import current
from moe_core.kernels.launch.launch import Launch
from moe_core.kernels.ops._backend import interpreting
from moe_core.parallel.shard import map_of
from moe_core.runtime.call_launches import Layer, launches_up_to, routing_launches
from moe_core.spec.config import whole_number

if TYPE_CHECKING:
    from moe_core.runtime.kernel import FusedMoEKernel


@torch.no_grad()
def compile_calls(
    layers: Iterable[tuple[FusedMoEKernel, Layer | None]], max_tokens: int, *, progress: Progress | None = None
) -> int:
    """Compile the kernels of layers; implements :func:`moe_core.warm_up`.

    Args:
        layers: Pairs of a kernel and its layer, or None without one.
        max_tokens: Largest number of tokens of a call.
        progress: Callback that gets the number of ready kernels and their total.

    Returns:
        Number of compiled kernels.
    """
    whole_number("max_tokens", max_tokens)
    launches: dict[torch.device, list[Launch]] = {}
    done = set()
    for kernel, layer in layers:
        experts, weights = kernel.experts, kernel.weights
        tensors = tuple((name, tensor.shape, tensor.dtype) for name, tensor in weights.tensors())
        keys, expert_map = (experts.weight_key, experts.activation_key), None if layer is None else layer.expert_map
        lora, routing = kernel.lora is not None, None if layer is None else layer.routing
        movement, mapped = type(kernel.prepare_finalize), expert_map is not None
        kind: tuple[object, ...] = (type(experts), movement, kernel.config, keys, weights.device, tensors, mapped)
        kind += (lora, routing, getattr(experts, "tuned", None))
        if kind in done or not _compiles(kernel):
            continue
        done.add(kind)
        found = launches.setdefault(weights.device, [])
        if isinstance(experts, RecordableExperts):
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
        with current(device):
            ready += compile_ahead(found, progress=told)
    return ready


def _compiles(kernel: FusedMoEKernel) -> bool:
    """Whether calls compile anything: requires a GPU, and Triton's interpreter to be off."""
    return kernel.weights.device.type == "cuda" and not interpreting()


def _call(kernel: FusedMoEKernel, expert_map: Tensor | None, count: int) -> None:
    """Call a kernel with ``count`` random tokens that reach all experts.

    If the kernel has LoRA slots, call it once more with adapters.
    """
    config, device = kernel.config, kernel.weights.device
    generator = torch.Generator().manual_seed(count)
    on_cpu: dict[str, Any] = {"generator": generator, "dtype": torch.float32, "device": "cpu"}
    x = torch.randn(count, config.hidden_size, **on_cpu).to(device, config.dtype)
    logits = torch.rand(count, config.num_experts, **on_cpu).to(device)
    if expert_map is None and config.local_experts < config.num_experts:
        expert_map = map_of(range(config.local_experts), config.num_experts, device)
    if kernel.is_monolithic:
        bias = torch.zeros(config.num_experts, dtype=torch.float32, device=device)
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
