"""What an engine does once, with all layers of a model: scratch memory that they share, kernels compiled in advance."""

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


def warm_up(layers: Layers, max_tokens: int, *, progress: Progress | None = None) -> int:
    """Compile every kernel that calls of ``layers`` with 1 to ``max_tokens`` tokens launch, several at a time.

    ``layers``: the model, or its layers or kernels; those that are alike share their kernels.  No later call compiles,
    in a CUDA graph's capture say, as long as its tensors start at multiples of 16 bytes, their rows follow each other,
    and no caller says that it has chosen them (``tokens_per_rank`` of a layer whose tokens cross no ranks).  Expert ids
    of 32 and 64 bits are provided for, calls with and without adapters where a layer has places for them, and the
    layer's routing, of logits in float32 or its own dtype.  Nothing runs, and no memory is taken but that of the
    kernels.

    Experts that call a kernel library are called instead, with 1, 2, 4 … ``max_tokens`` random tokens, since only a
    call makes the library compile or load what it needs.  Where tokens cross ranks, every rank warms up with the same
    number.  On a CPU there is nothing to do.

    ``progress`` is told how many kernels are ready, and of how many; it may be called by other threads.  Returns that
    number, without what libraries compile.  Raises ConfigError where there is no layer, and what Triton raises for a
    kernel that it cannot compile.
    """
    return compile_calls(_kernels(layers), max_tokens, progress=progress)


def _kernels(layers: Layers) -> Iterator[tuple[FusedMoEKernel, FusedMoELayer | None]]:
    """(kernel, its layer if it has one) of each; ConfigError where there is none."""
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
        raise ConfigError("there is no FusedMoELayer among the layers: give the model, its layers or their kernels")
