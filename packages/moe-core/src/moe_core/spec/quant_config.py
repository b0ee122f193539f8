"""Scales, zero points and biases of quantized weights and activations.

All functions take keyword arguments only, so that a bias cannot be passed as a scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moe_core.errors import ConfigError, TensorError, check_dtype, check_shape
from moe_core.spec.numerics import FP8_E4M3, UINT4, UINT4B8, UINT8, UINT8B128
from moe_core.spec.quant_key import (
    GroupShape,
    QuantKey,
    ScaleDesc,
    as_quant_key,
    kFp8Dynamic128Sym,
    kFp8DynamicTensorSym,
    kFp8DynamicTokenSym,
    kFp8StaticChannelSym,
    kFp8StaticTensorSym,
    kInt8DynamicTokenSym,
    kInt8StaticChannelSym,
    kInt8StaticTensorAsym,
    kInt8StaticTensorSym,
    kMxfp4Static,
    kMxfp8Dynamic,
    kMxfp8Static,
)
from moe_core.spec.roles import BIAS, ROLES, Role
from moe_core.spec.tensor_record import TensorRecord


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class FusedMoEQuantDesc(TensorRecord):
    """Quantization of one operand of one of the two matrix products.

    Shapes follow from the key.

    Attributes:
        key: Quantization key; None: not quantized.
        scale: E.g. ``[E, 2*ceil(N/bn), ceil(K/bk)]`` for a block-quantized w13.
        scale2: Second level of scales, e.g. ``[E, 2]`` for w13; ``[E]`` for activations.
        zero_point: Zero points in the shape of ``scale``.
        bias: ``[E, rows]``.
        g_idx: ``[E, K]``, the group of each column.
        pre_scale: ``[E, K]``, factors of the activations that enter the product.
    """

    key: QuantKey | None = None
    scale: Tensor | None = None
    scale2: Tensor | None = None
    zero_point: Tensor | None = None
    bias: Tensor | None = None
    g_idx: Tensor | None = None
    pre_scale: Tensor | None = None


class _OfOperand:
    """Attribute of :class:`FusedMoEQuantConfig`: a tensor of one of its operands."""

    def __init__(self, operand: str, field: str) -> None:
        self.operand, self.field = operand, field

    def __get__(self, config: FusedMoEQuantConfig, owner: type | None = None) -> Tensor | None:
        tensor: Tensor | None = getattr(getattr(config, self.operand), self.field)
        return tensor


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class FusedMoEQuantConfig(TensorRecord):
    """Quantization of both matrix products of a fused MoE layer.

    Attributes:
        a1: Activations that enter the first product.
        a2: Activations that enter the second product.
        w1: The weights w13.
        w2: The weights w2.
    """

    a1: FusedMoEQuantDesc = FusedMoEQuantDesc()
    a2: FusedMoEQuantDesc = FusedMoEQuantDesc()
    w1: FusedMoEQuantDesc = FusedMoEQuantDesc()
    w2: FusedMoEQuantDesc = FusedMoEQuantDesc()

    w1_scale = _OfOperand("w1", "scale")
    w2_scale = _OfOperand("w2", "scale")
    w1_scale2 = _OfOperand("w1", "scale2")
    w2_scale2 = _OfOperand("w2", "scale2")
    w1_zp = _OfOperand("w1", "zero_point")
    w2_zp = _OfOperand("w2", "zero_point")
    w1_bias = _OfOperand("w1", "bias")
    w2_bias = _OfOperand("w2", "bias")
    w1_g_idx = _OfOperand("w1", "g_idx")
    w2_g_idx = _OfOperand("w2", "g_idx")
    w1_pre_scale = _OfOperand("w1", "pre_scale")
    w2_pre_scale = _OfOperand("w2", "pre_scale")
    a1_scale = _OfOperand("a1", "scale")
    a2_scale = _OfOperand("a2", "scale")
    a1_scale2 = _OfOperand("a1", "scale2")
    a2_scale2 = _OfOperand("a2", "scale2")
    a1_zp = _OfOperand("a1", "zero_point")
    a2_zp = _OfOperand("a2", "zero_point")

    @property
    def weight_key(self) -> QuantKey | None:
        """Quantization key of the weights."""
        return self.w1.key

    @property
    def activation_key(self) -> QuantKey | None:
        """Quantization key of the activations."""
        return self.a1.key

    @property
    def weight_scales(self) -> tuple[Tensor, Tensor]:
        """``(w1_scale, w2_scale)``.

        Raises:
            TensorError: One of the two is missing.
        """
        if self.w1.scale is None or self.w2.scale is None:
            raise TensorError(f"w1_scale and w2_scale are missing: the weights are {self.weight_key}")
        return self.w1.scale, self.w2.scale

    @property
    def has_bias(self) -> bool:
        """Whether a product has a bias."""
        return self.w1.bias is not None or self.w2.bias is not None

    @property
    def block_shape(self) -> tuple[int, int] | None:
        """Rows and columns of a weight block; None if the scales are not per block."""
        shape = self.w1.key.group_shape if self.w1.key is not None else None
        return (shape.row, shape.col) if shape is not None and shape.row > 0 and shape.col > 0 else None

    def map(self, change: Callable[[Tensor], Tensor]) -> FusedMoEQuantConfig:
        """Apply a function to every tensor.

        Args:
            change: Maps a tensor to its replacement.

        Returns:
            The config with the new tensors.
        """

        def desc(operand: FusedMoEQuantDesc) -> FusedMoEQuantDesc:
            changed: dict[str, Any] = {name: change(tensor) for name, tensor in operand.tensors()}
            return replace(operand, **changed)

        return FusedMoEQuantConfig(a1=desc(self.a1), a2=desc(self.a2), w1=desc(self.w1), w2=desc(self.w2))

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over all tensors as ``(name, tensor)``, e.g. ``("w1_scale", ...)``."""
        for operand in ("a1", "a2", "w1", "w2"):
            for name, tensor in getattr(self, operand).tensors():
                yield f"{operand}_{name}", tensor


#: Config of 16-bit weights and activations.
FUSED_MOE_UNQUANTIZED_CONFIG = FusedMoEQuantConfig()


def make_quant_config(
    *,
    weight_key: QuantKey | str | None,
    activation_key: QuantKey | str | None,
    w1_scale: Tensor | None = None,
    w2_scale: Tensor | None = None,
    w1_scale2: Tensor | None = None,
    w2_scale2: Tensor | None = None,
    w1_zp: Tensor | None = None,
    w2_zp: Tensor | None = None,
    w1_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    w1_g_idx: Tensor | None = None,
    w2_g_idx: Tensor | None = None,
    w1_pre_scale: Tensor | None = None,
    w2_pre_scale: Tensor | None = None,
    a1_scale: Tensor | None = None,
    a2_scale: Tensor | None = None,
    a1_scale2: Tensor | None = None,
    a2_scale2: Tensor | None = None,
    a1_zp: Tensor | None = None,
    a2_zp: Tensor | None = None,
    canonical: bool = False,
) -> FusedMoEQuantConfig:
    """Make a quant config from its keys and tensors.

    The builders with specific names are special cases of this one.

    Args:
        weight_key: Quantization key of the weights, or its name; None: 16 bits.
        activation_key: Quantization key of the activations, or its name; None: 16 bits.
        w1_scale: Scale of w13.
        w2_scale: Scale of w2.
        w1_scale2: Second level of scales of w13.
        w2_scale2: Second level of scales of w2.
        w1_zp: Zero points of w13.
        w2_zp: Zero points of w2.
        w1_bias: Bias of the first product.
        w2_bias: Bias of the second product.
        w1_g_idx: Group of each column of w13.
        w2_g_idx: Group of each column of w2.
        w1_pre_scale: Factors of the inputs of the first product.
        w2_pre_scale: Factors of the inputs of the second product.
        a1_scale: Static scale of the activations of the first product.
        a2_scale: Static scale of the activations of the second product.
        a1_scale2: Static second scale of the activations of the first product.
        a2_scale2: Static second scale of the activations of the second product.
        a1_zp: Zero points of ``a1_scale``.
        a2_zp: Zero points of ``a2_scale``.
        canonical: The tensors of the weights are laid out as in :class:`moe_core.spec.weights.MoEWeights`. Otherwise
            they are in a backend's layout: scales may have another dtype, and second scales, zero points, activation
            order and input factors may be stored elsewhere.

    Returns:
        The config.

    Raises:
        ConfigError: A tensor that a key requires is missing, or a tensor is given that it does not have.
        TensorError: A canonical tensor has the wrong shape or dtype.
    """
    given = dict(locals())
    keys = {"w": as_quant_key(weight_key, "weight_key"), "a": as_quant_key(activation_key, "activation_key")}
    descs: dict[str, FusedMoEQuantDesc] = {}
    for number in (1, 2):
        tensors: dict[str, dict[str, Tensor | None]] = {operand: {} for operand in keys}
        for role in ROLES[1:]:
            name = role.argument(number)
            operand, tensor = name[0], given[name]
            _check(name, role, keys[operand], tensor, given[f"w{number}_scale"], canonical)
            tensors[operand][role.field] = tensor
        descs |= {f"{o}{number}": FusedMoEQuantDesc(key=key, **tensors[o]) for o, key in keys.items()}
    return FusedMoEQuantConfig(**descs)


def _check(
    name: str, role: Role, key: QuantKey | None, tensor: Tensor | None, scale: Tensor | None, canonical: bool
) -> None:
    """Check that a tensor is present if and only if its key requires it, and its layout if it is canonical."""
    needed = role.needed(key) if role is not BIAS else tensor is not None
    if (tensor is not None) != needed and (tensor is not None or role.required or canonical):
        kind, state = "activation" if role.of_activations else "weight", "missing" if tensor is None else "given"
        raise ConfigError(f"{name} is {state}, but the {kind} key is {key or '16-bit'}")
    if not canonical or tensor is None or scale is None:
        return
    check_dtype(name, tensor, role.dtypes(key))
    if role.name == "zero_point":
        check_shape(name, tensor, tuple(scale.shape))
    elif role.extents(key) == (None, 1):
        check_shape(name, tensor, (scale.shape[0], "K"))


def tensor_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """Select the arguments of :func:`make_quant_config` that are tensors.

    Args:
        given: Arguments by name, e.g. ``locals()`` at the start of a function that has further ones.

    Returns:
        The tensors by name, without those that are None.
    """
    names = {role.argument(number) for role in ROLES for number in (1, 2)}
    return {name: value for name, value in given.items() if name in names and value is not None}


def biased_moe_quant_config(*, w1_bias: Tensor | None, w2_bias: Tensor | None) -> FusedMoEQuantConfig:
    """Make the config of unquantized weights with biases.

    Args:
        w1_bias: ``[E, 2N]``.
        w2_bias: ``[E, K]``.

    Returns:
        The config.
    """
    return make_quant_config(weight_key=None, activation_key=None, **locals())


def fp8_w8a8_moe_quant_config(
    *,
    w1_scale: Tensor,
    w2_scale: Tensor,
    a1_scale: Tensor | None = None,
    a2_scale: Tensor | None = None,
    w1_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    per_act_token_quant: bool = False,
    per_out_ch_quant: bool = False,
    block_shape: tuple[int, int] | None = None,
) -> FusedMoEQuantConfig:
    """Make the config of e4m3 weights and activations.

    With ``block_shape``, weights are quantized per block and activations dynamically in groups of ``1 x columns``;
    uint8 scales with block (1, 32) are MXFP8. Otherwise weights are quantized per tensor or per output channel.
    Activations are then static, dynamic per tensor, or dynamic per token.

    Args:
        w1_scale: Per tensor ``[E, 2]`` (gate and up), per output channel ``[E, rows, 1]``, or per block.
        w2_scale: Per tensor ``[E, 1]``, per output channel ``[E, rows, 1]``, or per block.
        a1_scale: ``[E]``, static activation scales of each expert.
        a2_scale: ``[E]``, static activation scales of each expert.
        w1_bias: ``[E, 2N]``.
        w2_bias: ``[E, K]``.
        per_act_token_quant: Quantize activations dynamically per token.
        per_out_ch_quant: Weights have one scale per output channel.
        block_shape: Rows and columns of a weight block.

    Returns:
        The config.

    Raises:
        ConfigError: The arguments contradict each other.
    """
    tensors = tensor_arguments(locals())
    weight_key, activation_key = _fp8_keys(
        w1_scale, w2_scale, block_shape, per_act_token_quant, per_out_ch_quant, a1_scale
    )
    return make_quant_config(weight_key=weight_key, activation_key=activation_key, **tensors)


def _fp8_keys(
    w1_scale: Tensor,
    w2_scale: Tensor,
    block_shape: tuple[int, int] | None,
    per_act_token: bool,
    per_out_ch: bool,
    a1_scale: Tensor | None,
) -> tuple[QuantKey, QuantKey]:
    for name, scale in (("w1_scale", w1_scale), ("w2_scale", w2_scale)):
        if scale.dtype not in (torch.float32, torch.uint8) or scale.dtype is not w1_scale.dtype:
            raise ConfigError(
                f"{name} has dtype {scale.dtype}, expected float32, or uint8 for e8m0, and the same for both"
            )
    if block_shape is not None and (per_out_ch or per_act_token):
        kind = "per_out_ch_quant" if per_out_ch else "per_act_token_quant"
        raise ConfigError(f"block_shape {tuple(block_shape)} and {kind} contradict each other")
    if a1_scale is not None and per_act_token:
        raise ConfigError("a1_scale is static, per_act_token_quant asks for dynamic scales per token")
    is_e8m0 = w1_scale.dtype is torch.uint8
    if block_shape is None and is_e8m0:
        raise ConfigError("block_shape is missing, but uint8 e8m0 scales need one: (1, 32) for MXFP8")
    if block_shape is not None:
        if tuple(block_shape) == (1, 32):
            if not is_e8m0:
                raise ConfigError(f"block (1, 32) is MXFP8 and needs uint8 e8m0 scales, got {w1_scale.dtype}")
            return kMxfp8Static, kMxfp8Dynamic
        stored = torch.uint8 if is_e8m0 else torch.float32
        weight = QuantKey(FP8_E4M3, ScaleDesc(stored, True, GroupShape(*block_shape)))
        return weight, kFp8Dynamic128Sym.with_group(1, block_shape[1])
    weight = kFp8StaticChannelSym if per_out_ch else kFp8StaticTensorSym
    if a1_scale is not None:
        return weight, kFp8StaticTensorSym
    return weight, kFp8DynamicTokenSym if per_act_token else kFp8DynamicTensorSym


def fp8_w8a16_moe_quant_config(
    *,
    w1_scale: Tensor,
    w2_scale: Tensor,
    w1_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    block_shape: tuple[int, int] | None = None,
    per_out_ch_quant: bool = False,
) -> FusedMoEQuantConfig:
    """Make the config of e4m3 weights and 16-bit activations.

    Args:
        w1_scale: Scale per tensor, output channel or block (uint8 with block (1, 32): MXFP8).
        w2_scale: Same for w2.
        w1_bias: ``[E, 2N]``.
        w2_bias: ``[E, K]``.
        block_shape: Rows and columns of a weight block.
        per_out_ch_quant: Weights have one scale per output channel.

    Returns:
        The config.

    Raises:
        ConfigError: The arguments contradict each other.
    """
    tensors = tensor_arguments(locals())
    weight_key, _ = _fp8_keys(w1_scale, w2_scale, block_shape, False, per_out_ch_quant, None)
    return make_quant_config(weight_key=weight_key, activation_key=None, **tensors)


def mxfp8_moe_quant_config(
    *, w1_scale: Tensor, w2_scale: Tensor, w1_bias: Tensor | None = None, w2_bias: Tensor | None = None
) -> FusedMoEQuantConfig:
    """Make the config of MXFP8 weights and activations (groups of 1x32).

    Args:
        w1_scale: uint8 e8m0 ``[E, rows, cols/32]``.
        w2_scale: uint8 e8m0 ``[E, rows, cols/32]``.
        w1_bias: ``[E, 2N]``.
        w2_bias: ``[E, K]``.

    Returns:
        The config.
    """
    return fp8_w8a8_moe_quant_config(block_shape=(1, 32), **locals())


def int8_w8a8_moe_quant_config(
    *,
    w1_scale: Tensor,
    w2_scale: Tensor,
    a1_scale: Tensor | None = None,
    a2_scale: Tensor | None = None,
    w1_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    a1_zp: Tensor | None = None,
    a2_zp: Tensor | None = None,
    per_act_token_quant: bool = True,
) -> FusedMoEQuantConfig:
    """Make the config of int8 weights (per output channel) and int8 activations.

    Activations are dynamic per token, or static per tensor.

    Args:
        w1_scale: Scale of w13 per output channel.
        w2_scale: Scale of w2 per output channel.
        a1_scale: ``[E]``, static activation scales.
        a2_scale: ``[E]``, static activation scales.
        w1_bias: ``[E, 2N]``.
        w2_bias: ``[E, K]``.
        a1_zp: ``[E]``, zero points of ``a1_scale``.
        a2_zp: ``[E]``, zero points of ``a2_scale``.
        per_act_token_quant: Quantize activations dynamically per token if there are no static scales.

    Returns:
        The config.

    Raises:
        ConfigError: The arguments contradict each other.
    """
    tensors = tensor_arguments(locals())
    if not per_act_token_quant and a1_scale is None:
        raise ConfigError("int8 activations must be dynamic per token, or static with both a1_scale and a2_scale")
    static = kInt8StaticTensorSym if a1_zp is None else kInt8StaticTensorAsym
    activation_key = kInt8DynamicTokenSym if a1_scale is None else static
    return make_quant_config(weight_key=kInt8StaticChannelSym, activation_key=activation_key, **tensors)


def int8_w8a16_moe_quant_config(
    *, w1_scale: Tensor, w2_scale: Tensor, w1_bias: Tensor | None = None, w2_bias: Tensor | None = None
) -> FusedMoEQuantConfig:
    """Make the config of int8 weights (per output channel) and 16-bit activations.

    Args:
        w1_scale: Scale of w13 per output channel.
        w2_scale: Scale of w2 per output channel.
        w1_bias: ``[E, 2N]``.
        w2_bias: ``[E, K]``.

    Returns:
        The config.
    """
    return make_quant_config(weight_key=kInt8StaticChannelSym, activation_key=None, **locals())


def mxfp4_w4a16_moe_quant_config(
    *, w1_scale: Tensor, w2_scale: Tensor, w1_bias: Tensor | None = None, w2_bias: Tensor | None = None
) -> FusedMoEQuantConfig:
    """Make the config of MXFP4 weights (packed e2m1 pairs) and 16-bit activations.

    Args:
        w1_scale: uint8 e8m0 scale of w13.
        w2_scale: uint8 e8m0 scale of w2.
        w1_bias: ``[E, 2N]``.
        w2_bias: ``[E, K]``.

    Returns:
        The config.
    """
    return make_quant_config(weight_key=kMxfp4Static, activation_key=None, **locals())


def wna16_moe_quant_config(
    *,
    num_bits: int,
    group_size: int,
    w1_scale: Tensor,
    w2_scale: Tensor,
    w1_zp: Tensor | None = None,
    w2_zp: Tensor | None = None,
    w1_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    w1_g_idx: Tensor | None = None,
    w2_g_idx: Tensor | None = None,
    w1_pre_scale: Tensor | None = None,
    w2_pre_scale: Tensor | None = None,
) -> FusedMoEQuantConfig:
    """Make the config of 4- or 8-bit group-quantized weights and 16-bit activations.

    The given tensors determine the rest of the key: scale dtype, zero points, activation order and scaled inputs.

    Args:
        num_bits: 4 or 8.
        group_size: Number of columns that share a scale; -1: the whole channel.
        w1_scale: Scale of w13.
        w2_scale: Scale of w2.
        w1_zp: Zero points of w13.
        w2_zp: Zero points of w2.
        w1_bias: ``[E, 2N]``.
        w2_bias: ``[E, K]``.
        w1_g_idx: ``[E, K]`` int32, group of each column of w13.
        w2_g_idx: ``[E, N]`` int32, group of each column of w2.
        w1_pre_scale: ``[E, K]`` float32, factors of the inputs of the first product.
        w2_pre_scale: ``[E, N]`` float32, factors of the inputs of the second product.

    Returns:
        The config.

    Raises:
        ConfigError: ``num_bits`` or ``group_size`` is invalid, or the tensors contradict each other.
        TensorError: A tensor does not fit.
    """
    tensors = tensor_arguments(locals())
    if num_bits not in (4, 8):
        raise ConfigError(f"num_bits must be 4 or 8, got {num_bits}")
    if group_size != -1 and group_size < 1:
        raise ConfigError(f"group_size must be positive or -1, got {group_size}")
    symmetric = w1_zp is None
    dtype = {(4, True): UINT4B8, (4, False): UINT4, (8, True): UINT8B128, (8, False): UINT8}[num_bits, symmetric]
    key = QuantKey(
        dtype,
        ScaleDesc(w1_scale.dtype, True, GroupShape(1, group_size)),
        symmetric=symmetric,
        permuted=w1_g_idx is not None,
        pre_scaled=w1_pre_scale is not None,
    )
    return make_quant_config(weight_key=key, activation_key=None, canonical=True, **tensors)
