"""Function that SGLang calls for a layer's experts: a moe-core kernel or SGLang's own."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from moe_core import (
    DeviceInfo,
    FusedMoEConfig,
    FusedMoEKernel,
    KernelWeights,
    MoEError,
    MoEWeights,
    Selection,
    oracle,
)
from moe_core.api.engines import log_once, require, select_kernel
from torch import Tensor

from moe_sglang.engine import ENGINE, LOGGER
from moe_sglang.kinds import FLAGS, Kind, kind_of
from moe_sglang.layer import layer_config
from moe_sglang.weights import canonical

#: SGLang's tensors of a layer's weights
TENSORS = ("w13_weight", "w2_weight", "w13_scale", "w2_scale", "w13_zp", "w2_zp", "b13", "b2", "a13_scale", "a2_scale")


@functools.cache
def names() -> types.SimpleNamespace:
    """Import the used names of SGLang, except the hook, and check the fields of its arguments.

    Returns:
        The names as attributes.

    Raises:
        ImportError: a name is missing.
        EngineChanged: an interface differs from the tested one.
    """
    from sglang.srt.batch_invariant_ops import is_batch_invariant_mode_enabled
    from sglang.srt.distributed.device_communicators.pynccl_allocator import is_symmetric_memory_enabled
    from sglang.srt.layers.moe.moe_runner.base import FusedOpPool, MoeRunnerConfig
    from sglang.srt.layers.moe.moe_runner.triton import TritonMoeQuantInfo
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput, StandardDispatchOutput
    from sglang.srt.layers.moe.topk import StandardTopKOutput
    from sglang.srt.runtime_context import get_exec

    require(FusedOpPool, "get_fused_func")
    require(FusedOpPool.get_fused_func, "dispatch_name", "runner_name")
    require(TritonMoeQuantInfo, *FLAGS, "per_channel_quant", "block_shape", "fuse_swiglu_interleaved", *TENSORS)
    require(
        MoeRunnerConfig,
        *("activation", "is_gated", "apply_router_weight_on_input", "no_combine", "routed_scaling_factor", "layer"),
        *("gemm1_alpha", "gemm1_clamp_limit", "swiglu_limit", "gate_up_interleaved"),
    )
    require(StandardDispatchOutput, "hidden_states", "topk_output")
    require(StandardTopKOutput, "topk_weights", "topk_ids")
    require(StandardCombineInput, "hidden_states")
    return types.SimpleNamespace(
        StandardCombineInput=StandardCombineInput,
        get_exec=get_exec,
        is_batch_invariant_mode_enabled=is_batch_invariant_mode_enabled,
        is_symmetric_memory_enabled=is_symmetric_memory_enabled,
    )


class FusedFunction:
    """Function that a layer's runner calls with dispatched tokens, tensors and configuration.

    The kernel is created in the first call outside of CUDA graph capture, which is SGLang's warm-up, and again if the
    layer's tensors are replaced. A layer that no kernel of ``schemes`` supports keeps ``original``.

    Args:
        original: SGLang's own function.
        schemes: names of the enabled schemes.
    """

    def __init__(self, original: Callable[..., Any], schemes: Sequence[str]) -> None:
        self.original = original
        self.schemes = tuple(schemes)
        self.kernel: FusedMoEKernel | None = None
        self._names = names()
        #: what the kernel, or the refusal, applies to: tensors, top-k, dtype
        self._tensors: tuple[Tensor | None, ...] = ()
        self._addresses: tuple[int, ...] = ()
        self._call: tuple[int, torch.dtype] | None = None

    def __call__(self, dispatch_output: Any, quant_info: Any, runner_config: Any) -> Any:
        x, topk = dispatch_output.hidden_states, dispatch_output.topk_output
        if not self._is_made(quant_info, topk.topk_ids.shape[1], x.dtype):
            if torch.compiler.is_compiling() or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
                return self.original(dispatch_output, quant_info, runner_config)
            self._make(quant_info, runner_config, topk.topk_ids.shape[1], x)
        if self.kernel is None:
            return self.original(dispatch_output, quant_info, runner_config)
        weights, factor = topk.topk_weights, runner_config.routed_scaling_factor
        if factor is not None and factor != 1.0:
            weights = weights * factor
        found = self.kernel.apply(x, topk_weights=weights, topk_ids=topk.topk_ids)
        return self._names.StandardCombineInput(hidden_states=found)

    def _is_made(self, info: Any, top_k: int, dtype: torch.dtype) -> bool:
        tensors = _tensors(info)
        if self._call != (top_k, dtype) or any(new is not old for new, old in zip(tensors, self._tensors, strict=True)):
            return False
        # the same parameters may have moved in memory; traced tensors have no address
        return torch.compiler.is_compiling() or self._addresses == _addresses(tensors)

    def _make(self, info: Any, runner: Any, top_k: int, x: Tensor) -> None:
        """Create the kernel, or log the reason against it once for all layers."""
        self._tensors, self._call, self.kernel = _tensors(info), (top_k, x.dtype), None
        self._addresses = _addresses(self._tensors)
        try:
            if self._names.is_symmetric_memory_enabled():
                raise MoEError("outputs in NCCL symmetric memory (--enable-symm-mem) are not supported")
            if info.fuse_swiglu_interleaved:
                raise MoEError("interleaved gate and up rows (fuse_swiglu_interleaved) are not supported")
            self._refuse_scaled_inputs(runner)
            kind = kind_of(info)
            if kind.scheme not in self.schemes:
                raise MoEError(f"{ENGINE.switch} leaves {kind.scheme} off, or its package is not installed")
            config = layer_config(
                runner,
                info,
                top_k=top_k,
                hidden_size=x.shape[1],
                dtype=x.dtype,
                batch_invariant=bool(self._names.is_batch_invariant_mode_enabled()),
            )
            weights = canonical(info, kind, 2 if config.is_gated else 1)
            weights.validate(config)
            selection = choose(kind, config, weights, DeviceInfo.current(weights.w13.device))
            of_scheme = oracle(kind.scheme)
            converted = of_scheme.convert(selection, weights)
            derived = _derived(converted, info)
            if derived and self._moves_experts():
                raise MoEError(f"{', '.join(derived)} have a separate layout, which EPLB does not update")
            self.kernel = of_scheme.make_kernel(selection, converted)
        except MoEError as error:
            log_once(LOGGER, f"experts by SGLang's own function: {error.message}")
            return
        log_once(LOGGER, f"experts by moe-core: {kind.scheme} {selection.backend} ({selection.experts.__name__})")
        self._tell_what_is_derived(runner, derived)

    def _moves_experts(self) -> bool:
        """Return whether SGLang copies experts between its own tensors (EPLB)."""
        try:
            return bool(self._names.get_exec().moe.enable_eplb)
        except ValueError:  # no server is running
            return False

    @staticmethod
    def _refuse_scaled_inputs(runner: Any) -> None:
        if runner.apply_router_weight_on_input and runner.routed_scaling_factor not in (None, 1.0):
            raise MoEError("routed_scaling_factor is not supported with apply_router_weight_on_input")

    @staticmethod
    def _tell_what_is_derived(runner: Any, derived: Sequence[str]) -> None:
        """Make SGLang refuse weight updates if the kernel holds tensors in another layout."""
        if derived and runner.layer is not None:
            runner.layer._derived_weight_cache_error = (
                f"Online weight updates are not supported while {ENGINE.package} runs the experts: it holds "
                f"{', '.join(derived)} in a layout of its own. Restart with {ENGINE.switch}=off to use them."
            )


def choose(kind: Kind, config: FusedMoEConfig, weights: MoEWeights, device: DeviceInfo) -> Selection:
    """Select the first kernel that reads SGLang's codes in place.

    When kernels are created, the GPU's memory is already allocated.

    Args:
        kind: scheme and keys of the experts.
        config: configuration of the layer.
        weights: canonical weights that share SGLang's memory.
        device: device of the layer.

    Returns:
        The selection; off GPUs the first one, whether or not it keeps the codes.

    Raises:
        MoEError: there is none; gives the reasons.
    """
    keys = kind.weight_key, kind.activation_key
    first = select_kernel(kind.scheme, config, *keys, device=device)
    if not device.is_gpu:
        return first
    others = []
    for candidate in first.report.candidates:
        if not (candidate.fits and candidate.is_kernel):
            continue
        selection = select_kernel(kind.scheme, config, *keys, device=device, backend=candidate.backend)
        if keeps_codes(selection, weights):
            return selection
        others.append(candidate.backend)
    raise MoEError(
        f"{kind.scheme}: {', '.join(others)} needs a second copy of the weights in its layout, but SGLang "
        f"has left no memory for it ({first.report.device})"
    )


def keeps_codes(selection: Selection, weights: MoEWeights) -> bool:
    """Return whether the selected kernel uses the given w13 and w2; tested with one expert.

    Args:
        selection: the selected kernel.
        weights: canonical weights.
    """
    config = selection.config
    one = replace(selection, report=replace(selection.report, config=replace(config, num_local_experts=1)))
    parts: dict[str, Any] = {name: tensor[:1] for name, tensor in weights.tensors()}
    converted: KernelWeights = oracle(selection.report.scheme).convert(one, replace(weights, **parts))
    return (_memory(converted.w13), _memory(converted.w2)) == (_memory(weights.w13), _memory(weights.w2))


def _derived(weights: KernelWeights, info: Any) -> list[str]:
    """Return the names of tensors that do not share SGLang's memory."""
    given = {_memory(tensor) for tensor in _tensors(info) if tensor is not None}
    return [name for name, tensor in weights.tensors() if _memory(tensor) not in given]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _addresses(tensors: Sequence[Tensor | None]) -> tuple[int, ...]:
    return tuple([0 if tensor is None else tensor.data_ptr() for tensor in tensors])


def _tensors(info: Any) -> tuple[Tensor | None, ...]:
    """Return all tensors of a layer's weights in SGLang's description."""
    return tuple([getattr(info, name) for name in TENSORS])
