"""SGLang as the tests see it: its own Python files, or stand-ins with the same names, fields and signatures.

``nox -s sglang`` has the Python files of SGLang's wheel, and compares the two (``in_sglang/test_stand_ins.py``).
"""

from __future__ import annotations

import enum
import importlib
import importlib.machinery
import importlib.util
import pkgutil
import sys
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import moe_core_stand_ins
import torch

#: what SGLang asks for to find out whether it is there
OPTIONAL = ("aiter", "amdsmi", "deep_gemm", "flashinfer", "mooncake", "torch_npu", "vllm")
INSTALLED = importlib.util.find_spec("sglang") is not None


class HookType(enum.Enum):
    BEFORE = "before"
    AFTER = "after"
    AROUND = "around"
    REPLACE = "replace"


class HookRegistry:
    _hooks: dict[str, list[tuple[HookType, Callable[..., Any], None]]] = {}
    _patched: set[str] = set()

    @classmethod
    def register(
        cls, target: str, hook: Callable[..., Any], hook_type: HookType = HookType.AFTER, *, source: object = None
    ) -> None:
        cls._hooks.setdefault(target, []).append((hook_type, hook, None))

    @classmethod
    def apply_hooks(cls) -> None:
        for target, hooks in cls._hooks.items():
            if target in cls._patched:
                continue
            cls._patched.add(target)
            owner, _, name = target.rpartition(".")
            place = pkgutil.resolve_name(owner)
            function = place.__dict__[name].__func__
            for _, hook, _ in hooks:
                function = _around(hook, function)
            setattr(place, name, classmethod(function))


def _around(hook: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments, **named: hook(original, *arguments, **named)


class FusedOpPool:
    _fused_funcs: dict[tuple[str, str], Callable[..., Any]] = {}

    @classmethod
    def get_fused_func(cls, dispatch_name: str, runner_name: str) -> Callable[..., Any] | None:
        return cls._fused_funcs.get((dispatch_name, runner_name))


@dataclass
class MoeRunnerConfig:
    num_experts: int | None = None
    num_local_experts: int | None = None
    activation: str = "silu"
    is_gated: bool = True
    apply_router_weight_on_input: bool = False
    inplace: bool = True
    no_combine: bool = False
    routed_scaling_factor: float | None = None
    gemm1_alpha: float | None = None
    gemm1_clamp_limit: float | None = None
    swiglu_limit: float | None = None
    gate_up_interleaved: bool = True
    layer: torch.nn.Module | None = None


@dataclass
class TritonMoeQuantInfo:
    w13_weight: torch.Tensor
    w2_weight: torch.Tensor
    b13: torch.Tensor | None = None
    b2: torch.Tensor | None = None
    use_mxfp8: bool = False
    use_fp8_w8a8: bool = False
    use_int8_w8a8: bool = False
    use_int8_w8a16: bool = False
    use_int4_w4a16: bool = False
    per_channel_quant: bool = False
    w13_scale: torch.Tensor | None = None
    w2_scale: torch.Tensor | None = None
    w13_zp: torch.Tensor | None = None
    w2_zp: torch.Tensor | None = None
    a13_scale: torch.Tensor | None = None
    a2_scale: torch.Tensor | None = None
    block_shape: list[int] | None = None
    fuse_swiglu_interleaved: bool = False


class StandardTopKOutput(NamedTuple):
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    router_logits: torch.Tensor


class StandardDispatchOutput(NamedTuple):
    hidden_states: torch.Tensor
    hidden_states_scale: torch.Tensor | None
    topk_output: StandardTopKOutput
    hidden_states_pre_quant: tuple[Any, ...] | None = None


class StandardCombineInput(NamedTuple):
    hidden_states: torch.Tensor


def get_exec() -> Any:
    """SGLang's configuration, before a server has published one."""
    raise ValueError("not published")


def fused_experts_none_to_triton(dispatch_output: Any, quant_info: Any, runner_config: Any) -> StandardCombineInput:
    """SGLang's own function, which needs a GPU."""
    raise NotImplementedError


#: module of SGLang -> the names that the package and its tests use
NAMES: dict[str, dict[str, Any]] = {
    "sglang.srt.plugins.hook_registry": {"HookRegistry": HookRegistry, "HookType": HookType},
    "sglang.srt.layers.moe.moe_runner.base": {"FusedOpPool": FusedOpPool, "MoeRunnerConfig": MoeRunnerConfig},
    "sglang.srt.layers.moe.moe_runner.triton": {"TritonMoeQuantInfo": TritonMoeQuantInfo},
    "sglang.srt.layers.moe.topk": {"StandardTopKOutput": StandardTopKOutput},
    "sglang.srt.layers.moe.token_dispatcher.standard": {
        "StandardCombineInput": StandardCombineInput,
        "StandardDispatchOutput": StandardDispatchOutput,
    },
    "sglang.srt.batch_invariant_ops": {"is_batch_invariant_mode_enabled": lambda: False},
    "sglang.srt.runtime_context": {"get_exec": get_exec},
    "sglang.srt.distributed.device_communicators.pynccl_allocator": {"is_symmetric_memory_enabled": lambda: False},
}


def prepare() -> types.SimpleNamespace:
    """All of :data:`NAMES`; where SGLang is not installed, its modules are stand-ins from here on."""
    found: dict[str, Any] = {}
    if INSTALLED:
        moe_core_stand_ins.install("sglang", optional=OPTIONAL)
    else:
        FusedOpPool._fused_funcs["none", "triton"] = fused_experts_none_to_triton
        FusedOpPool._fused_funcs["none", "marlin"] = fused_experts_none_to_triton
        _put_in_place()
    with warnings.catch_warnings():
        # SGLang's modules warn that there is no GPU
        warnings.simplefilter("ignore")
        for module, names in NAMES.items():
            place = importlib.import_module(module)
            found |= {name: getattr(place, name) for name in names}
    return types.SimpleNamespace(**found)


def _put_in_place() -> None:
    for module, names in NAMES.items():
        parts = module.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            place = sys.modules.setdefault(name, types.ModuleType(name))
            place.__path__ = []
            place.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
            if end > 1:
                setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], place)
        vars(sys.modules[module]).update(names)
