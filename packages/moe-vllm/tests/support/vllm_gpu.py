"""vLLM's platform for CUDA where its compiled parts may not be there; on a machine without a GPU, as if it had an H200.

Nothing that computes is replaced: what is not there fails when it is called.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

COMPILED = ("_C_stable_libtorch", "_moe_C_stable_libtorch")
H200 = SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=143771 << 20,
    shared_memory_per_block_optin=232448,
    L2_cache_size=60 << 20,
    memory_clock_rate=3201000,
    memory_bus_width=6144,
    warp_size=32,
)


def bring(*, pretend: bool = False) -> bool:
    """Once per process, before vLLM is imported and after the stand-ins for what it imports.

    Returns whether vLLM's compiled operators are there.
    """
    if pretend:
        _pretend_h200()
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent
    lacking = [name for name in COMPILED if pretend or not any(folder.glob(f"{name}.*so"))]
    for name in lacking:
        sys.modules[f"vllm.{name}"] = ModuleType(f"vllm.{name}")
    if lacking:
        _answer_without_operators()
    import vllm.platforms as platforms

    # also where NVML cannot be asked
    platforms.builtin_platform_plugins["cuda"] = lambda: "vllm.platforms.cuda.CudaPlatform"
    return not lacking


def get_ready() -> None:
    """What vLLM's runner does before the first call: scratch memory, the context of a forward pass, a stream."""
    from vllm import forward_context
    from vllm.utils.torch_utils import current_stream
    from vllm.v1.worker import workspace

    if not workspace.is_workspace_manager_initialized():
        workspace.init_workspace_manager(torch.device("cuda", 0))
    # Humming's experts ask whether there are several ranks
    forward_context._forward_context = SimpleNamespace(dp_metadata=None, attn_metadata=None)
    # of vLLM's own from now on
    current_stream()
    torch.cuda.synchronize()


def _pretend_h200() -> None:
    answers: dict[str, Any] = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_capability": (H200.major, H200.minor),
        "get_device_name": H200.name,
        "get_device_properties": H200,
        "is_current_stream_capturing": False,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *args, answer=answer, **kwargs: answer)


def _answer_without_operators() -> None:
    """vLLM asks its compiled operators what this GPU supports: nothing by them."""
    namespace = torch._ops._OpNamespace
    known = namespace.__getattr__

    def operator(self: Any, name: str) -> Any:
        try:
            return known(self, name)
        except AttributeError:
            if self.name != "_C" or "support" not in name:
                raise
            return lambda *args, **kwargs: False

    namespace.__getattr__ = operator
