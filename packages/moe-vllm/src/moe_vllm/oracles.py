"""Replacements for vLLM's backend selection that try moe-core's experts first.

For each scheme, the selection function is replaced wherever vLLM has imported it. The replacement submits a class of
this package to the same checks as vLLM's own classes, and calls the original if it is rejected. Along with the class it
returns one of vLLM's backends that keeps the checkpoint's weight layout; the class converts the weights.

Importing this module fails if a name of vLLM's is missing; nothing is replaced then.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from compressed_tensors.quantization import QuantizationArgs
from moe_core import ConfigError, MoEError, QuantKey
from moe_core.api.engines import log_once, require
from torch import Tensor
from vllm import envs
from vllm.model_executor.layers.fused_moe.all2all_utils import maybe_make_prepare_finalize
from vllm.model_executor.layers.fused_moe.oracle import fp8, int8, int_wna16, mxfp4, mxfp8
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig
from vllm.model_executor.layers.quantization.moe_wna16 import MoeWNA16Config
from vllm.model_executor.layers.quantization.utils.quant_utils import kMxfp4Static, kMxfp8Dynamic, kMxfp8Static

from moe_vllm import needs
from moe_vllm.engine import LOGGER
from moe_vllm.experts import MoeCoreExperts, log_choice
from moe_vllm.keys import integer_key, quant_key
from moe_vllm.weights import rows_in_order

#: layer whose quant method is being created
_layer: ContextVar[torch.nn.Module | None] = ContextVar("moe_vllm_layer", default=None)


@dataclass(frozen=True)
class Asked:
    """Layer that vLLM requests experts for.

    Attributes:
        weight_key: vLLM's key of the weights.
        activation_key: vLLM's key of the activations.
        keys: moe-core's keys of weights and activations.
    """

    weight_key: Any
    activation_key: Any
    keys: tuple[QuantKey | None, QuantKey | None]


@dataclass(frozen=True)
class Selector:
    """One of vLLM's selection functions.

    Attributes:
        scheme: scheme of moe-core.
        module: vLLM's module of the function.
        function: name of the function.
        slot: backend that is returned to vLLM.
        asked: function of the arguments by name; raises ConfigError for layers that are left to vLLM.
        reads: arguments that ``asked`` reads, in addition to ``config``.
        names: values of ``--moe-backend`` that allow moe-core's experts.
    """

    scheme: str
    module: Any
    function: str
    slot: Any
    asked: Callable[[dict[str, Any]], Asked]
    reads: tuple[str, ...] = ()
    names: tuple[str, ...] = ("auto", "triton")


# ---- arguments of the selection functions


def _with_keys(arguments: dict[str, Any]) -> Asked:
    weights, activations = arguments["weight_key"], arguments["activation_key"]
    return Asked(weights, activations, (quant_key(weights), quant_key(activations)))


def _fp8(arguments: dict[str, Any]) -> Asked:
    for library, variables in _ASKED_BY_ENVIRONMENT.items():
        if any(map(envs.is_set, variables)) and all(getattr(envs, name) for name in variables):
            raise ConfigError(f"{' and '.join(variables)} select {library}")
    return _with_keys(arguments)


def _mxfp8(arguments: dict[str, Any]) -> Asked:
    return _with_keys({"weight_key": kMxfp8Static, "activation_key": kMxfp8Dynamic})


def _mxfp4(arguments: dict[str, Any]) -> Asked:
    layer = _layer.get()
    config = getattr(layer, "quant_config", None)
    name = None if config is None else config.get_name()
    if layer is not None and name not in ("gpt_oss_mxfp4", "mxfp4"):
        raise ConfigError(f"MXFP4 weights of {name} checkpoints are not supported: vLLM converts them separately")
    return _with_keys(
        {
            "weight_key": kMxfp4Static,
            "activation_key": mxfp4._resolve_activation_key(arguments["activation_key"]),
        }
    )


def _wna16(arguments: dict[str, Any]) -> Asked:
    stored, zero_points = arguments["quant_config"], arguments["may_have_zp"]
    if isinstance(stored, AutoGPTQConfig):
        # (vLLM itself refuses activation order here)
        if zero_points:
            raise ConfigError("GPTQ weights with zero points are not supported")
    elif isinstance(stored, QuantizationArgs):
        if stored.actorder == "group":
            raise ConfigError("activation order is not supported: vLLM does not pass the column order (g_idx)")
        if stored.strategy != "group":
            raise ConfigError(f"strategy {stored.strategy} is not supported: vLLM lays out its weights for Marlin only")
    elif not isinstance(stored, MoeWNA16Config):
        raise ConfigError(f"{type(stored).__name__} is not supported: it stores weights in another order")
    weight_key = arguments["weight_key"]
    key = integer_key(
        weight_key,
        group_size=-1 if stored.group_size is None else stored.group_size,
        zero_points=zero_points,
        scale_dtype=arguments["config"].in_dtype,
    )
    return Asked(weight_key, None, (key, None))


#: libraries that vLLM selects for FP8 without further checks if any of the variables is set and all are enabled
_ASKED_BY_ENVIRONMENT = {
    "DeepGEMM": ("VLLM_USE_DEEP_GEMM", "VLLM_MOE_USE_DEEP_GEMM"),
    "AITER": ("VLLM_ROCM_USE_AITER", "VLLM_ROCM_USE_AITER_MOE"),
}

_KEYS = ("weight_key", "activation_key")
SELECTORS = (
    Selector("fp8", fp8, "select_fp8_moe_backend", fp8.Fp8MoeBackend.TRITON, _fp8, _KEYS),
    Selector("fp8", mxfp8, "select_mxfp8_moe_backend", fp8.Fp8MoeBackend.TRITON_MXFP8, _mxfp8),
    Selector("int8", int8, "select_int8_moe_backend", int8.Int8MoeBackend.TRITON, _with_keys, _KEYS),
    Selector(
        "wna16",
        int_wna16,
        "select_wna16_moe_backend",
        int_wna16.WNA16MoEBackend.TRITON,
        _wna16,
        ("weight_key", "quant_config", "may_have_zp"),
    ),
    # the only backend with 16-bit activations that rounds sizes up to no more than whole groups
    Selector("mxfp4", mxfp4, "select_mxfp4_moe_backend", mxfp4.Mxfp4MoeBackend.CPU, _mxfp4, ("activation_key",)),
)


# ---- replacements


def _selecting(selector: Selector, original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def select(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        ours = _offer(selector, call.arguments)
        return original(*args, **kwargs) if ours is None else (selector.slot, ours)

    return select


def _offer(selector: Selector, arguments: dict[str, Any]) -> type[MoeCoreExperts] | None:
    """Return the class that runs the layer, or None after logging the reason."""
    config = arguments["config"]
    reason: str | None
    if config.moe_backend not in selector.names:
        reason = f"--moe-backend {config.moe_backend} asks for vLLM's"
    else:
        try:
            asked = selector.asked(arguments)
            ours = MoeCoreExperts.of(
                selector.scheme, (asked.weight_key, asked.activation_key), asked.keys, _layer.get()
            )
            fits, reason = ours.is_supported_config(
                ours, config, asked.weight_key, asked.activation_key, _activation_format(config)
            )
            if fits:
                log_choice(ours.selection)
                return ours
        except MoEError as error:
            reason = error.message
    log_once(LOGGER, f"moe-vllm leaves {selector.scheme} experts to vLLM: {reason}")
    return None


def _activation_format(config: Any) -> Any:
    batched = config.moe_parallel_config.use_batched_activation_format
    return mk.FusedMoEActivationFormat.BatchedExperts if batched else mk.FusedMoEActivationFormat.Standard


def _noting_the_layer(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``RoutedExperts._get_quant_method``, within which a layer's experts are selected."""

    @functools.wraps(original)
    def get_quant_method(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        token = _layer.set(self)
        try:
            return original(self, *args, **kwargs)
        finally:
            _layer.reset(token)

    return get_quant_method


def _making_wna16(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``make_wna16_moe_kernel``, which only accepts vLLM's own classes."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        given = call.arguments
        if not issubclass(given["experts_cls"], MoeCoreExperts):
            return original(*args, **kwargs)
        movement = maybe_make_prepare_finalize(
            moe=given["moe_config"],
            quant_config=given["moe_quant_config"],
            routing_tables=given["routing_tables"],
            allow_new_interface=True,
            use_monolithic=False,
        )
        experts = given["experts_cls"](moe_config=given["moe_config"], quant_config=given["moe_quant_config"])
        return mk.FusedMoEKernel(movement, experts)

    return make


def _keeping_mxfp4(original: Callable[..., Any], *, alternate: bool) -> Callable[..., Any]:
    """Wrap a conversion of MXFP4 weights: for our experts, only put gate rows before up rows.

    ``alternate``: it converts gpt-oss weights, whose rows alternate if the activation is gpt-oss's.
    """
    signature = inspect.signature(original)

    @functools.wraps(original)
    def convert(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        given = call.arguments
        layer = given["layer"]
        if not _is_ours(layer):
            return original(*args, **kwargs)
        rows: Callable[[Tensor], Tensor] = (
            rows_in_order if alternate and layer.activation.value == "swigluoai" else lambda tensor: tensor
        )
        bias = given["w13_bias"]
        return (
            rows(given["w13_weight"].detach()),
            given["w2_weight"].detach(),
            rows(given["w13_weight_scale"].detach()),
            given["w2_weight_scale"].detach(),
            None if bias is None else rows(bias.detach()),
            given["w2_bias"],
        )

    return convert


def _is_ours(layer: Any) -> bool:
    method = layer.quant_method
    method = getattr(method, "old_quant_method", method)
    experts = getattr(method, "experts_cls", None)
    return isinstance(experts, type) and issubclass(experts, MoeCoreExperts)


# ---- installation


@dataclass(frozen=True)
class Change:
    """Replaced attribute of a vLLM module or class.

    Attributes:
        owner: the module or class.
        name: name of the attribute.
        original: value before the replacement.
        replacement: value after the replacement.
    """

    owner: Any
    name: str
    original: Any
    replacement: Any


def install(schemes: tuple[str, ...]) -> tuple[Change, ...]:
    """Replace the functions of some schemes.

    Args:
        schemes: names of the schemes.

    Returns:
        The changes, for :func:`undo`.

    Raises:
        EngineChanged: an interface differs from the tested one; nothing is replaced.
        AttributeError: a name is missing; nothing is replaced.
    """
    needs.check()
    changes = tuple(_changes(schemes))
    for change in changes:
        _put(change.owner, change.name, change.original, change.replacement)
    return changes


def undo(changes: tuple[Change, ...]) -> None:
    """Restore the original functions.

    Args:
        changes: result of :func:`install`.
    """
    for change in reversed(changes):
        _put(change.owner, change.name, change.replacement, change.original)


def _put(owner: Any, name: str, present: Any, other: Any) -> None:
    """Replace ``present`` by ``other``, also wherever vLLM's modules have imported it by name."""
    setattr(owner, name, other)
    if not inspect.ismodule(owner):
        return
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] == "vllm" and module is not None:
            for found, value in list(vars(module).items()):
                if value is present:
                    setattr(module, found, other)


def _changes(schemes: tuple[str, ...]) -> Iterator[Change]:
    name = "_get_quant_method"
    original = _taking(RoutedExperts, name)
    yield Change(RoutedExperts, name, original, _noting_the_layer(original))
    for selector in SELECTORS:
        if selector.scheme in schemes:
            original = _taking(selector.module, selector.function, "config", *selector.reads)
            yield Change(selector.module, selector.function, original, _selecting(selector, original))
    if "wna16" in schemes:
        name = "make_wna16_moe_kernel"
        original = _taking(int_wna16, name, "moe_quant_config", "moe_config", "experts_cls", "routing_tables")
        yield Change(int_wna16, name, original, _making_wna16(original))
    if "mxfp4" in schemes:
        _taking(mxfp4, "_resolve_activation_key")
        tensors = ("w13_weight", "w2_weight", "w13_weight_scale", "w2_weight_scale", "w13_bias", "w2_bias")
        for name, alternate in (
            ("convert_gpt_oss_weight_to_mxfp4_moe_kernel_format", True),
            ("convert_weight_to_mxfp4_moe_kernel_format", False),
        ):
            original = _taking(mxfp4, name, "layer", *tensors)
            yield Change(mxfp4, name, original, _keeping_mxfp4(original, alternate=alternate))


def _taking(owner: Any, name: str, *parameters: str) -> Any:
    """Return a function; raise EngineChanged or AttributeError unless it takes ``parameters``."""
    original = getattr(owner, name)
    require(original, *parameters)
    return original
