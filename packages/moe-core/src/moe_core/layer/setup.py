"""One-time setup of a model's layers: a shared workspace, and kernels compiled in advance."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from moe_core.errors import ConfigError, check_instance
from moe_core.kernels.launch.compile_ahead import Progress
from moe_core.layer.layer import FusedMoELayer
from moe_core.runtime.compile_calls import compile_calls
from moe_core.runtime.kernel import FusedMoEKernel
from moe_core.spec.config import whole_number
from moe_core.spec.workspace import Workspace

#: A model that contains layers, or individual layers and kernels.
Layers = nn.Module | FusedMoEKernel | Iterable["FusedMoELayer | FusedMoEKernel"]


def share_workspace(layers: Layers, max_tokens: int) -> Workspace:
    """Allocate one workspace for all layers of a model.

    The layers must run one after another on one stream. No scratch memory is allocated afterwards, so the memory use of
    the model is known, and captured CUDA graphs share it.

    Args:
        layers: The model, or its layers or kernels.
        max_tokens: Largest number of tokens of a call.

    Returns:
        The workspace; its ``nbytes`` count towards the memory of the model.

    Raises:
        ConfigError: There are no layers, or they are on several devices. In that case share one workspace per device.
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


def warm_up(layers: Layers, max_tokens: int, *, progress: Progress | None = None) -> int:
    """Compile every kernel that calls with 1 to ``max_tokens`` tokens launch, in parallel.

    Layers that are alike share their kernels. Nothing runs, and no memory is used except for the kernels. No later call
    compiles, for example during CUDA graph capture, provided that its tensors are 16-byte aligned, their rows are
    contiguous, and no caller passes ``tokens_per_rank`` to a layer whose tokens do not cross ranks. Covered are 32- and
    64-bit expert ids, calls with and without adapters for a layer with LoRA slots, and the layer's routing of logits in
    float32 or its own dtype.

    Experts that call a kernel library are run instead, with 1, 2, 4 … ``max_tokens`` random tokens: only a call makes
    the library compile or load what it needs. If tokens cross ranks, every rank must warm up with the same number. On a
    CPU there is nothing to do.

    Args:
        layers: The model, or its layers or kernels.
        max_tokens: Largest number of tokens of a call.
        progress: Callback that gets the number of ready kernels and their total; other threads may call it.

    Returns:
        Number of compiled kernels, without those that libraries compile.

    Raises:
        ConfigError: There are no layers.
        Exception: Whatever Triton raises for a kernel that it cannot compile.
    """
    return compile_calls(_kernels(layers), max_tokens, progress=progress)


def _kernels(layers: Layers) -> Iterator[tuple[FusedMoEKernel, FusedMoELayer | None]]:
    """Yield (kernel, its layer or None); raise ConfigError if there are none."""
    check_instance("layers", layers, nn.Module, FusedMoEKernel, Iterable)
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
        raise ConfigError("layers contains no FusedMoELayer: pass the model, its layers or their kernels")
