"""Conversion of experts loaded by transformers to canonical weights of moe-core.

transformers stores the experts of a block in 3-D parameters of one module. Two kinds are supported: 16-bit tensors,
described by the flags of the decorator ``use_experts_implementation``, and the e4m3 tensors of ``FP8Experts``. Tensors
that are already canonical share the module's memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from moe_core import (
    ConfigError,
    FusedMoEConfig,
    GroupShape,
    MoEWeights,
    QuantKey,
    TensorError,
    e8m0_to_float32,
    is_e8m0,
    kFp8Dynamic128Sym,
    kFp8DynamicTokenSym,
    kFp8Static128BlockSym,
    kFp8StaticTensorSym,
    kMxfp8Dynamic,
    kMxfp8Static,
)
from torch import Tensor, nn

from moe_transformers.activation import activation_of
from moe_transformers.blocks import refuse_parts

#: flags of the decorator and their defaults for versions that do not set them
_FLAGS = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True}
#: static activation scales of FP8Experts, which uses the gated names for ungated experts too
_STATIC = ("gate_up_proj_activation_scale", "down_proj_activation_scale")
#: configuration entries with the number of experts per token
_TOP_K = ("num_experts_per_tok", "moe_topk", "top_k_experts")
_SIXTEEN_BITS = (torch.bfloat16, torch.float16, torch.float32)


def tensors_of(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of an experts module by name, in the module's order.

    Args:
        module: experts module of transformers.
    """
    return {name: tensor for name, tensor in module._parameters.items() if tensor is not None}


def is_quantized(module: nn.Module) -> bool:
    """Return whether the experts are 8-bit values with scales.

    Args:
        module: experts module of transformers.
    """
    return module.down_proj.element_size() == 1  # type: ignore[operator]


def top_k_of(module: nn.Module, name: str) -> int:
    """Return the experts per token from the module's configuration.

    Args:
        module: experts module of transformers.
        name: name of the module, for errors.

    Raises:
        ConfigError: the configuration does not specify it.
    """
    found = stated_top_k(module)
    if found is not None:
        return found
    raise ConfigError(f"the configuration of {name} does not state the number of experts per token: pass top_k=")


def stated_top_k(module: nn.Module) -> int | None:
    """Return the experts per token from the module's configuration, None if not specified.

    Args:
        module: experts module of transformers.
    """
    config = getattr(module, "config", None)
    found = (getattr(config, key, None) for key in _TOP_K)
    return next((count for count in found if isinstance(count, int)), None)


@dataclass(frozen=True)
class Filled:
    """Experts module filled by transformers.

    Attributes:
        module: the experts module.
        name: name of the module, for errors.
        config: configuration of the equivalent layer of moe-core.
    """

    module: nn.Module
    name: str
    config: FusedMoEConfig

    @staticmethod
    def of(module: nn.Module, name: str, *, top_k: int, dtype: torch.dtype) -> Filled:
        """Describe an experts module without converting anything.

        Args:
            module: experts module of transformers.
            name: name of the module, for errors.
            top_k: experts per token.
            dtype: dtype of the hidden states.

        Returns:
            The description with the layer's configuration.

        Raises:
            ConfigError: names what moe-core does not compute, or a tensor that is offloaded or not loaded.
        """
        refuse_parts(module, name)
        _refuse_unknown(module, name)
        down = module.get_parameter("down_proj")
        flags = {flag: bool(getattr(module, flag, default)) for flag, default in _FLAGS.items()}
        hidden, inter = down.shape[:0:-1] if flags["is_transposed"] else down.shape[1:]
        activation, params = activation_of(module, name)
        config = FusedMoEConfig(
            num_experts=down.shape[0],
            top_k=top_k,
            hidden_size=hidden,
            intermediate_size=inter,
            activation=activation,
            activation_params=params,
            dtype=dtype,
            has_bias=flags["has_bias"],
        )
        return Filled(module, name, config)

    def weights(self) -> MoEWeights:
        """Return canonical weights.

        e4m3 values, and scales that are already canonical, share the module's memory.
        """
        tensors = {name: tensor.detach() for name, tensor in tensors_of(self.module).items()}
        return self._fp8(tensors) if is_quantized(self.module) else self._sixteen_bit(tensors)

    @property
    def _first(self) -> str:
        return "gate_up_proj" if self.config.is_gated else "up_proj"

    def _sixteen_bit(self, tensors: Mapping[str, Tensor]) -> MoEWeights:
        module = self.module
        w13, w2 = tensors[self._first], tensors["down_proj"]
        if getattr(module, "is_transposed", False):
            w13, w2 = w13.mT, w2.mT
        bias = tensors.get(f"{self._first}_bias")
        if not getattr(module, "is_concatenated", True):
            w13 = _gate_rows_first(w13)
            bias = None if bias is None else _gate_rows_first(bias)
        return MoEWeights(
            weight_key=None,
            activation_key=None,
            w13=w13,
            w2=w2,
            w13_bias=bias,
            w2_bias=tensors.get("down_proj_bias"),
        )

    def _fp8(self, tensors: Mapping[str, Tensor]) -> MoEWeights:
        module = self.module
        block: tuple[int, int] | None = getattr(module, "block_size", None)
        static = getattr(module, "activation_scheme", "dynamic") == "static"
        w13_scale, w2_scale = tensors[f"{self._first}_scale_inv"], tensors["down_proj_scale_inv"]
        weight_key, activation_key = _fp8_keys(block, w2_scale.dtype, static)
        if weight_key == kMxfp8Static:
            w13_scale, w2_scale = w13_scale.view(torch.uint8), w2_scale.view(torch.uint8)
        elif block is None:
            w13_scale, w2_scale = w13_scale.flatten(1), w2_scale.flatten(1)
        if weight_key != kMxfp8Static:
            w13_scale, w2_scale = _float32(w13_scale), _float32(w2_scale)
        if static:
            self._check_static(tensors)
        if self.config.is_gated and block is not None:
            weight_key, w13_scale, w2_scale = self._with_own_rows(weight_key, w13_scale, w2_scale)
        return MoEWeights(
            weight_key=weight_key,
            activation_key=activation_key,
            w13=tensors[self._first],
            w2=tensors["down_proj"],
            w13_scale=w13_scale,
            w2_scale=w2_scale,
            w13_input_scale=tensors[_STATIC[0]] if static else None,
            w2_input_scale=tensors[_STATIC[1]] if static else None,
            shared=True,
        )

    def _check_static(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise TensorError for invalid scales: transformers does not load all checkpoints' scales."""
        for name in _STATIC:
            scale = tensors[name]
            if not bool((torch.isfinite(scale) & (scale > 0)).all()):
                raise TensorError(
                    f"{name} of {self.name} contains invalid scales: check transformers' load report for MISSING, or "
                    "load the checkpoint within moe_transformers.loading()"
                )

    def _with_own_rows(self, key: QuantKey, w13_scale: Tensor, w2_scale: Tensor) -> tuple[QuantKey, Tensor, Tensor]:
        """Give gate and up separate scale rows, repeating shared blocks' scales for smaller blocks."""
        inter, rows = self.config.intermediate_size, key.group_shape.row
        stacked = -(-2 * inter // rows)
        if w13_scale.shape[1] != stacked or stacked == 2 * -(-inter // rows):
            return key, w13_scale, w2_scale
        small = math.gcd(inter, rows)
        w13_scale = w13_scale.repeat_interleave(rows // small, dim=1)[:, : 2 * inter // small].contiguous()
        hidden = self.config.hidden_size
        w2_scale = w2_scale.repeat_interleave(rows // small, dim=1)[:, : -(-hidden // small)].contiguous()
        return key.with_group(small, key.group_shape.col), w13_scale, w2_scale


def _refuse_unknown(module: nn.Module, name: str) -> None:
    """Raise ConfigError for parameters that moe-core would ignore or that have no values here."""
    known = {f"{part}{end}" for part in ("gate_up_proj", "up_proj", "down_proj") for end in _ENDS}
    for own, tensor in (*module.named_parameters(), *module.named_buffers()):
        if own not in known:
            raise ConfigError(f"{name} has the tensor {own}, which is not supported: moe-core would ignore it")
        if tensor.is_meta or getattr(getattr(module, "_hf_hook", None), "offload", False):
            raise ConfigError(
                f"{own} of {name} is on the meta device (offloaded or not loaded), expected the device that "
                "the experts run on"
            )
        if type(tensor) not in (Tensor, nn.Parameter):
            raise TensorError(f"{own} of {name} is a {type(tensor).__name__}, expected a plain tensor")
    down = module.get_parameter("down_proj")
    if down.dtype is torch.int8:
        raise ConfigError(f"{name} has packed FP4 experts (two per byte), which moe-core does not support here")
    if down.dtype not in (*_SIXTEEN_BITS, torch.float8_e4m3fn):
        raise ConfigError(f"{name} has dtype {down.dtype}, expected 16-bit weights or float8_e4m3fn")


_ENDS = ("", "_bias", "_scale_inv", "_activation_scale")


def _fp8_keys(block: tuple[int, int] | None, scale: torch.dtype, static: bool) -> tuple[QuantKey, QuantKey]:
    """Return (weight key, activation key) of ``FP8Experts``, as for such checkpoints."""
    if block is None:
        return kFp8StaticTensorSym, kFp8StaticTensorSym if static else kFp8DynamicTokenSym
    rows, cols = block
    if GroupShape(rows, cols) == kMxfp8Static.group_shape and is_e8m0(scale) and not static:
        return kMxfp8Static, kMxfp8Dynamic
    dynamic = kFp8Dynamic128Sym.with_group(1, cols)
    return kFp8Static128BlockSym.with_group(rows, cols), kFp8StaticTensorSym if static else dynamic


def _float32(scale: Tensor) -> Tensor:
    return e8m0_to_float32(scale) if is_e8m0(scale.dtype) else scale.float()


def as_module_holds(module: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """Convert a canonical tensor to the layout of a module's 16-bit parameters.

    The inverse of :meth:`Filled.weights`.

    Args:
        module: experts module of transformers.
        name: name of the canonical tensor ("w13", "w2_bias").
        tensor: the canonical tensor.

    Returns:
        A contiguous tensor in the module's layout.
    """
    if name.startswith("w13") and not getattr(module, "is_concatenated", True):
        tensor = torch.stack(tensor.chunk(2, dim=1), dim=2).flatten(1, 2)
    if getattr(module, "is_transposed", False) and not name.endswith("_bias"):
        tensor = tensor.mT
    return tensor.contiguous()


def _gate_rows_first(rows: Tensor) -> Tensor:
    """Copy interleaved gate and up rows [E, 2N, ...] to gate rows, then up rows."""
    return torch.cat((rows[:, 0::2], rows[:, 1::2]), dim=1)
