"""Scales, zero points and biases of quantized weights and activations.

All functions take keyword arguments only, so that a bias cannot be passed as a scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from moe_core.errors import ConfigError, TensorError, check_dtype, check_shape
from moe_core.spec.numerics import FP8_E4M3, UINT4, UINT4B8, UINT8, UINT8B128
from moe_core.spec.quant_key import (
    PACKED_4BIT,
    GroupShape,
    QuantKey,
    ScaleDesc,
    as_quant_key,
    check_one_level,
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
from moe_core.spec.tensor_record import TensorRecord


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class FusedMoEQuantDesc(TensorRecord):
    """Quantization of one operand of one of the two matrix products.

    Shapes follow from the key.

    Attributes:
        key: Quantization key; None: not quantized.
        scale: E.g. ``[E, 2*ceil(N/bn), ceil(K/bk)]`` for a block-quantized w13.
        zero_point: Zero points in the shape of ``scale``.
        global_scale: ``[E]`` or scalar.
        bias: ``[E, rows]``.
        g_idx: ``[E, K]``, the group of each column.
        pre_scale: ``[E, K]``, factors of the activations that enter the product.
    """

    key: QuantKey | None = None
    scale: Tensor | None = None
    zero_point: Tensor | None = None
    global_scale: Tensor | None = None
    bias: Tensor | None = None
    g_idx: Tensor | None = None
    pre_scale: Tensor | None = None

    def __post_init__(self) -> None:
        check_one_level(self.key, "key")

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the tensors that are set, as ``(name, tensor)``."""
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, Tensor):
                yield item.name, value


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

    @property
    def weight_key(self) -> QuantKey | None:
        """Quantization key of the weights."""
        return self.w1.key

    @property
    def activation_key(self) -> QuantKey | None:
        """Quantization key of the activations."""
        return self.a1.key

    @property
    def w1_scale(self) -> Tensor | None:
        return self.w1.scale

    @property
    def w2_scale(self) -> Tensor | None:
        return self.w2.scale

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
    def w1_bias(self) -> Tensor | None:
        return self.w1.bias

    @property
    def w2_bias(self) -> Tensor | None:
        return self.w2.bias

    @property
    def w1_zp(self) -> Tensor | None:
        return self.w1.zero_point

    @property
    def w2_zp(self) -> Tensor | None:
        return self.w2.zero_point

    @property
    def w1_g_idx(self) -> Tensor | None:
        return self.w1.g_idx

    @property
    def w2_g_idx(self) -> Tensor | None:
        return self.w2.g_idx

    @property
    def w1_pre_scale(self) -> Tensor | None:
        return self.w1.pre_scale

    @property
    def w2_pre_scale(self) -> Tensor | None:
        return self.w2.pre_scale

    @property
    def a1_scale(self) -> Tensor | None:
        return self.a1.scale

    @property
    def a2_scale(self) -> Tensor | None:
        return self.a2.scale

    @property
    def a1_zp(self) -> Tensor | None:
        return self.a1.zero_point

    @property
    def a2_zp(self) -> Tensor | None:
        return self.a2.zero_point

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
    w1_zp: Tensor | None = None,
    w2_zp: Tensor | None = None,
    w1_global_scale: Tensor | None = None,
    w2_global_scale: Tensor | None = None,
    w1_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    w1_g_idx: Tensor | None = None,
    w2_g_idx: Tensor | None = None,
    w1_pre_scale: Tensor | None = None,
    w2_pre_scale: Tensor | None = None,
    a1_scale: Tensor | None = None,
    a2_scale: Tensor | None = None,
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
        w1_zp: Zero points of w13.
        w2_zp: Zero points of w2.
        w1_global_scale: Global scale of w13.
        w2_global_scale: Global scale of w2.
        w1_bias: Bias of the first product.
        w2_bias: Bias of the second product.
        w1_g_idx: Group of each column of w13.
        w2_g_idx: Group of each column of w2.
        w1_pre_scale: Factors of the inputs of the first product.
        w2_pre_scale: Factors of the inputs of the second product.
        a1_scale: Static scale of the activations of the first product.
        a2_scale: Static scale of the activations of the second product.
        a1_zp: Zero points of ``a1_scale``.
        a2_zp: Zero points of ``a2_scale``.
        canonical: The tensors of the weights are laid out as in :class:`moe_core.spec.weights.MoEWeights`. Otherwise
            they are in a backend's layout: scales may have another dtype, and zero points, activation order and input
            factors may be stored elsewhere.

    Returns:
        The config.

    Raises:
        ConfigError: A tensor that a key requires is missing, a tensor is given that it does not have, or the dtype of
            a scale is wrong.
        TensorError: Another tensor does not fit.
    """
    weight_key = as_quant_key(weight_key, "weight_key")
    activation_key = as_quant_key(activation_key, "activation_key")
    _check_weight("w1", weight_key, w1_scale, w1_zp, w1_g_idx, w1_pre_scale, canonical)
    _check_weight("w2", weight_key, w2_scale, w2_zp, w2_g_idx, w2_pre_scale, canonical)
    static_activations = activation_key is not None and activation_key.is_static
    for name, scale in (("a1", a1_scale), ("a2", a2_scale)):
        if static_activations and scale is None:
            raise ConfigError(f"{name}_scale is missing, but the activation key {activation_key} is static")
        if not static_activations and scale is not None:
            raise ConfigError(f"{name}_scale is given, but the activation key {activation_key} has no static scale")
    static_zero_points = static_activations and activation_key is not None and not activation_key.symmetric
    for name, zero_point in (("a1", a1_zp), ("a2", a2_zp)):
        if static_zero_points and zero_point is None:
            raise ConfigError(f"{name}_zp is missing, but the activation key {activation_key} has static zero points")
        if not static_zero_points and zero_point is not None:
            raise ConfigError(f"{name}_zp is given, but the activation key {activation_key} has no static zero points")
    return FusedMoEQuantConfig(
        a1=FusedMoEQuantDesc(key=activation_key, scale=a1_scale, zero_point=a1_zp),
        a2=FusedMoEQuantDesc(key=activation_key, scale=a2_scale, zero_point=a2_zp),
        w1=FusedMoEQuantDesc(
            key=weight_key,
            scale=w1_scale,
            zero_point=w1_zp,
            global_scale=w1_global_scale,
            bias=w1_bias,
            g_idx=w1_g_idx,
            pre_scale=w1_pre_scale,
        ),
        w2=FusedMoEQuantDesc(
            key=weight_key,
            scale=w2_scale,
            zero_point=w2_zp,
            global_scale=w2_global_scale,
            bias=w2_bias,
            g_idx=w2_g_idx,
            pre_scale=w2_pre_scale,
        ),
    )


def _check_weight(
    name: str,
    key: QuantKey | None,
    scale: Tensor | None,
    zero_point: Tensor | None,
    g_idx: Tensor | None,
    pre_scale: Tensor | None,
    canonical: bool,
) -> None:
    """Check that the tensors of one weight are present if and only if the key requires them."""
    if (key is None) != (scale is None):
        raise ConfigError(
            f"{name}_scale is {'missing' if scale is None else 'given'}, but the weight key is {key or 'None'}"
        )
    if key is None or scale is None:
        return
    if canonical and scale.dtype is not key.scale.dtype:
        raise ConfigError(f"{name}_scale has dtype {scale.dtype}, expected {key.scale.dtype} for {key}")
    for suffix, tensor, needed, without, having in (
        ("zp", zero_point, not key.symmetric, "is symmetric", "has zero points"),
        ("g_idx", g_idx, key.permuted, "has no activation order", "has an activation order"),
        ("pre_scale", pre_scale, key.pre_scaled, "leaves inputs as they are", "scales its inputs"),
    ):
        if tensor is not None and not needed:
            raise ConfigError(f"{name}_{suffix} is given, but the weight key {key} {without}")
        if tensor is None and needed and canonical:
            raise ConfigError(f"{name}_{suffix} is missing, but the weight key {key} {having}")
    if not canonical:
        return
    if zero_point is not None:
        check_shape(f"{name}_zp", zero_point, tuple(scale.shape))
        check_dtype(f"{name}_zp", zero_point, (torch.uint8, torch.int32))
    for suffix, tensor, dtype in (("g_idx", g_idx, torch.int32), ("pre_scale", pre_scale, torch.float32)):
        if tensor is not None:
            check_shape(f"{name}_{suffix}", tensor, (scale.shape[0], "K"))
            check_dtype(f"{name}_{suffix}", tensor, (dtype,))


def biased_moe_quant_config(*, w1_bias: Tensor | None, w2_bias: Tensor | None) -> FusedMoEQuantConfig:
    """Make the config of unquantized weights with biases.

    Args:
        w1_bias: ``[E, 2N]``.
        w2_bias: ``[E, K]``.

    Returns:
        The config.
    """
    return make_quant_config(weight_key=None, activation_key=None, w1_bias=w1_bias, w2_bias=w2_bias)


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
    weight_key, activation_key = _fp8_keys(
        w1_scale, w2_scale, block_shape, per_act_token_quant, per_out_ch_quant, a1_scale
    )
    return make_quant_config(
        weight_key=weight_key,
        activation_key=activation_key,
        w1_scale=w1_scale,
        w2_scale=w2_scale,
        a1_scale=a1_scale,
        a2_scale=a2_scale,
        w1_bias=w1_bias,
        w2_bias=w2_bias,
    )


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
        raise ConfigError("uint8 e8m0 scales are those of blocks ((1, 32) is MXFP8): block_shape is missing")
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
    weight_key, _ = _fp8_keys(w1_scale, w2_scale, block_shape, False, per_out_ch_quant, None)
    return make_quant_config(
        weight_key=weight_key,
        activation_key=None,
        w1_scale=w1_scale,
        w2_scale=w2_scale,
        w1_bias=w1_bias,
        w2_bias=w2_bias,
    )


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
    return fp8_w8a8_moe_quant_config(
        w1_scale=w1_scale, w2_scale=w2_scale, w1_bias=w1_bias, w2_bias=w2_bias, block_shape=(1, 32)
    )


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
    if not per_act_token_quant and a1_scale is None:
        raise ConfigError("int8 activations are dynamic per token, or static with a1_scale and a2_scale")
    static = kInt8StaticTensorSym if a1_zp is None else kInt8StaticTensorAsym
    return make_quant_config(
        weight_key=kInt8StaticChannelSym,
        activation_key=static if a1_scale is not None else kInt8DynamicTokenSym,
        w1_scale=w1_scale,
        w2_scale=w2_scale,
        a1_scale=a1_scale,
        a2_scale=a2_scale,
        a1_zp=a1_zp,
        a2_zp=a2_zp,
        w1_bias=w1_bias,
        w2_bias=w2_bias,
    )


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
    return make_quant_config(
        weight_key=kInt8StaticChannelSym,
        activation_key=None,
        w1_scale=w1_scale,
        w2_scale=w2_scale,
        w1_bias=w1_bias,
        w2_bias=w2_bias,
    )


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
    return make_quant_config(
        weight_key=kMxfp4Static,
        activation_key=None,
        w1_scale=w1_scale,
        w2_scale=w2_scale,
        w1_bias=w1_bias,
        w2_bias=w2_bias,
    )


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
        packing=PACKED_4BIT if num_bits == 4 else None,
        permuted=w1_g_idx is not None,
        pre_scaled=w1_pre_scale is not None,
    )
    return make_quant_config(
        weight_key=key,
        activation_key=None,
        w1_scale=w1_scale,
        w2_scale=w2_scale,
        w1_zp=w1_zp,
        w2_zp=w2_zp,
        w1_bias=w1_bias,
        w2_bias=w2_bias,
        w1_g_idx=w1_g_idx,
        w2_g_idx=w2_g_idx,
        w1_pre_scale=w1_pre_scale,
        w2_pre_scale=w2_pre_scale,
        canonical=True,
    )
