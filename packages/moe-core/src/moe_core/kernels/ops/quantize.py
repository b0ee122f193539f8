"""Dynamic and static quantization of activations, optionally after an activation function.

``scale = max(amax, 1e-10) / max_value`` per group and ``code = round(x / scale)``, ties to even, saturating. All
arithmetic is float32 and correctly rounded. The kernel, the Triton interpreter and the reference implementation
:func:`moe_core.reference.quantization.quantize_tensor` therefore give the same bits. (After an activation function the
values themselves may differ in the last bit, as exp does.)

- A group of zeros gets the scale 1e-10 / max_value and codes 0. A short last group is a separate group.
- e8m0 (MXFP8) and ``power_of_two`` scales are rounded *up* to a power of two, ``2**ceil(log2(amax / 448))``, so that no
  value saturates. (The example rule of the OCP specification rounds down, ``2**(floor(log2(amax)) - 8)``, and clips
  values above 448/512 of the power of two.)
- A NaN makes the scale of its group NaN (e8m0: 255). An infinity makes the scale infinite (power of two: NaN), so the
  group's products are NaN.
- A scale per tensor covers the finite values only; non-finite values get the code of NaN. With a static scale an
  infinity saturates.
- NaN has a code in e4m3. int8 has none: NaN becomes 0, and the consumer of the codes restores NaN from the scales
  (`moe_core.reference.quantization.integer_row_scales`, `moe_core.kernels.gemm.tiles.scaled_mm.scale_or_nan`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_core.errors import ConfigError, TensorError, check_dtype
from moe_core.kernels.ops._backend import use_triton
from moe_core.kernels.ops._rows import Rows, check_output
from moe_core.reference.quantization import Quantized, quantize_tensor
from moe_core.spec.activation import ActivationParams, MoEActivation
from moe_core.spec.numerics import FP8_E4M3, INT8, e8m0_to_float32, is_e8m0
from moe_core.spec.quant_key import QuantKey

_CODES = {FP8_E4M3: ("e4m3", torch.float8_e4m3fn), INT8: ("int8", torch.int8)}


def quantize_activation(
    x: Tensor,
    key: QuantKey,
    *,
    static_scale: Tensor | None = None,
    power_of_two: bool = False,
    row_counts: Tensor | None = None,
    out: Tensor | None = None,
    scale_out: Tensor | None = None,
    pdl: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Quantize activations symmetrically to e4m3 or int8.

    Args:
        x: Activations [M, K], or batched [B, T, K]; bfloat16, float16 or float32, any strides.
        key: Quantization: e4m3 or int8, symmetric; one scale per tensor (static or dynamic), per token, or per 1 x G
            group (G a power of two; scales float32, or e8m0 stored as uint8).
        static_scale: Scale of one element, float32. Required by static keys, refused by others.
        power_of_two: Round float32 group scales up to a power of two.
        row_counts: Number of valid rows, integer [B] (or [1]). Later rows are neither read nor written.
        out: Codes [M, K] to write to, contiguous columns; allocated by default.
        scale_out: Scales to write to, any strides; allocated by default.
        pdl: Use programmatic dependent launch.
        backend: ``"auto"``, ``"triton"`` or ``"torch"``.

    Returns:
        ``(codes, scale)``: codes of the shape of ``x``; scales [M, groups per row] ([B, T, groups]), [M, 1] per token,
        [1] per tensor.
    """
    quantized = _quantize(
        Rows(x, row_counts=row_counts), key, static_scale, power_of_two, out, scale_out, None, pdl, backend
    )
    return quantized.values, quantized.scale


def quantize_activation_asymmetric(
    x: Tensor, key: QuantKey, *, row_counts: Tensor | None = None, pdl: bool = False, backend: str = "auto"
) -> Quantized:
    """Quantize activations to int8 with one scale and one zero point per token.

    The range of a row always includes 0: ``scale = (max - min) / 255``, ``zero_point = round(-128 - min / scale)``,
    ``code = round(x / scale) + zero_point``.

    Args:
        x: Activations [M, K], or batched [B, T, K]; bfloat16, float16 or float32.
        key: Asymmetric quantization to int8, per token.
        row_counts: As in :func:`quantize_activation`.
        pdl: Use programmatic dependent launch.
        backend: ``"auto"``, ``"triton"`` or ``"torch"``.

    Returns:
        Codes of the shape of ``x``, scales [M, 1] and zero points [M, 1] int32.
    """
    if key.symmetric:
        raise ConfigError(f"quantize_activation_asymmetric needs a key with zero points; got {key}")
    rows = Rows(x, row_counts=row_counts)
    zero_point = torch.zeros((*x.shape[:-1], 1), dtype=torch.int32, device=x.device)
    return _quantize(rows, key, None, False, None, None, zero_point, pdl, backend)


def activate_and_quantize(
    activation: MoEActivation,
    x: Tensor,
    key: QuantKey,
    *,
    params: ActivationParams | None = None,
    bias: Tensor | None = None,
    row_experts: Tensor | None = None,
    row_counts: Tensor | None = None,
    static_scale: Tensor | None = None,
    power_of_two: bool = False,
    out: Tensor | None = None,
    scale_out: Tensor | None = None,
    pdl: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Apply the activation function and quantize its result in one launch.

    The result of ``activation(x + bias)`` stays in float32 until it is quantized.

    Args:
        activation: Activation function.
        x: Input [P, 2N] ([P, N] if the activation is not gated), or batched [B, T, 2N].
        key: Quantization, as in :func:`quantize_activation`.
        params: Parameters of the activation.
        bias: Bias [2N] or [E, 2N], as in :func:`moe_core.kernels.ops.activation.fused_activation`.
        row_experts: Expert of each row, for a bias per expert.
        row_counts: Number of valid rows, integer [B] (or [1]).
        static_scale: Scale of one element, float32; required by static keys, as in :func:`quantize_activation`.
        power_of_two: Round float32 group scales up to a power of two.
        out: Codes [P, N] to write to.
        scale_out: Scales to write to.
        pdl: Use programmatic dependent launch.
        backend: ``"auto"``, ``"triton"`` or ``"torch"``.

    Returns:
        ``(codes, scale)``: codes [P, N] or [B, T, N], and scales as in :func:`quantize_activation`.
    """
    rows = Rows(x, activation, params, bias, row_experts, row_counts)
    quantized = _quantize(rows, key, static_scale, power_of_two, out, scale_out, None, pdl, backend)
    return quantized.values, quantized.scale


def _quantize(
    rows: Rows,
    key: QuantKey,
    static_scale: Tensor | None,
    power_of_two: bool,
    out: Tensor | None,
    scale_out: Tensor | None,
    zero_point: Tensor | None,
    pdl: bool,
    backend: str,
) -> Quantized:
    code, dtype = _check_key(key, static_scale, power_of_two, asymmetric=zero_point is not None)
    x = rows.x
    out = torch.empty(rows.shape, dtype=dtype, device=x.device) if out is None else out
    check_output("out", out, rows.shape, (dtype,), x)
    shape = _scale_shape(rows, key)
    if static_scale is not None:
        if static_scale.numel() != 1 or static_scale.device != x.device:
            raise TensorError(
                f"static_scale has shape {list(static_scale.shape)} on {static_scale.device}, "
                f"expected one element on {x.device}"
            )
        check_dtype("static_scale", static_scale, (torch.float32,))
        scale = static_scale.reshape(1)
    else:
        scale = torch.empty(shape, dtype=key.scale.dtype, device=x.device) if scale_out is None else scale_out
        if tuple(scale.shape) != shape or scale.dtype != key.scale.dtype or scale.device != x.device:
            raise TensorError(
                f"scale_out is {scale.dtype} {list(scale.shape)} on {scale.device}, "
                f"expected {key.scale.dtype} {list(shape)} on {x.device}"
            )
    if out.numel() == 0:
        return Quantized(out, scale if key.is_static else scale.zero_(), zero_point)
    unsupported = None if code != "e4m3" or x.device.type != "cuda" else without_e4m3(x)
    if key.scale.rounding != "up":
        unsupported = f"scales must be rounded up; got key {key}"
    if not use_triton(x, backend, unsupported=unsupported):
        return _quantize_torch(rows, key, static_scale, power_of_two, out, scale, zero_point)
    from moe_core.kernels.ops._quantize_launch import launch_groups, launch_rows, launch_tensor

    if static_scale is not None:
        launch_groups(rows, out, code=code, scale_kind="fixed", fixed=scale, pdl=pdl)
    elif key.group_shape.is_per_tensor:
        launch_tensor(rows, out, code=code, scale=scale, pdl=pdl)
    elif key.group_shape.is_per_row:
        launch_rows(rows, out, code=code, scale=scale, zero_point=zero_point, pdl=pdl)
    else:
        kind = "e8m0" if is_e8m0(key.scale.dtype) else "pow2" if power_of_two else "float32"
        stored = scale.view(torch.uint8) if kind == "e8m0" else scale
        launch_groups(rows, out, code=code, scale_kind=kind, group=key.group_size, scale=stored, pdl=pdl)
    return Quantized(out, scale, zero_point)


def _check_key(
    key: QuantKey, static_scale: Tensor | None, power_of_two: bool, *, asymmetric: bool
) -> tuple[str, torch.dtype]:
    """Check a key for activations; return the name of the code and its torch dtype."""
    shape = key.group_shape
    plain = key.packing is None and key.scale2 is None and not key.permuted and not key.pre_scaled
    if key.dtype not in _CODES or not plain:
        raise ConfigError(
            f"key {key} is not supported for activations; expected e4m3 or int8 codes with one level of scales, "
            "neither packed nor permuted"
        )
    if key.symmetric is asymmetric:
        name = "quantize_activation" if asymmetric else "quantize_activation_asymmetric"
        raise ConfigError(f"key is {key}: use {name}() for it")
    if asymmetric and not (shape.is_per_row and key.dtype == INT8):
        raise ConfigError(f"zero points require int8 per token, but the key is {key}")
    grouped = shape.row == 1 and shape.col > 0
    if grouped and (shape.col & (shape.col - 1) or shape.col > 1024):
        raise ConfigError(f"the group size of activations must be a power of two up to 1024; got key {key}")
    if not (grouped or shape.is_per_row or shape.is_per_tensor):
        raise ConfigError(f"activation scales must be per tensor, per token or per 1 x G group; got key {key}")
    if key.scale.dtype is not torch.float32 and not (is_e8m0(key.scale.dtype) and grouped):
        raise ConfigError(f"activation scales must be float32, or e8m0 per group; got key {key}")
    if power_of_two and not (grouped and key.scale.dtype is torch.float32):
        raise ConfigError(f"power_of_two requires float32 scales per group, but the key is {key}")
    if key.is_static != (static_scale is not None):
        raise TensorError(f"static_scale is {'missing' if static_scale is None else 'given'}, but the key is {key}")
    if key.is_static and not shape.is_per_tensor:
        raise ConfigError(f"static activation scales must be per tensor; got key {key}")
    return _CODES[key.dtype]


def _scale_shape(rows: Rows, key: QuantKey) -> tuple[int, ...]:
    if key.group_shape.is_per_tensor:
        return (1,)
    groups = 1 if key.group_shape.is_per_row else -(-rows.columns // key.group_size)
    return (*rows.shape[:-1], groups)


def without_e4m3(x: Tensor) -> str | None:
    """Explain why the GPU of ``x`` cannot convert to e4m3.

    Args:
        x: A tensor on the GPU.

    Returns:
        The reason, or None if the GPU has the conversion.
    """
    if torch.version.hip is None and torch.cuda.get_device_capability(x.device) < (8, 9):
        return "the GPU has no e4m3 conversion (sm_89 and later do)"
    return None


def _quantize_torch(
    rows: Rows,
    key: QuantKey,
    static_scale: Tensor | None,
    power_of_two: bool,
    out: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
) -> Quantized:
    """Compute the result in PyTorch: values in float32, then the reference quantizer."""
    values = rows.values()
    used = rows.in_use()
    if used is not None:
        values = torch.where(used, values, 0.0)
    flat = values.reshape(rows.rows, rows.columns)
    if power_of_two:
        found = quantize_tensor(flat, key.with_scale_dtype(torch.uint8))
        found = found._replace(scale=e8m0_to_float32(found.scale))
    else:
        found = quantize_tensor(flat, key, scale=static_scale)

    def keep(target: Tensor, source: Tensor) -> None:
        """Write the valid rows; as bytes where torch has no selection for the dtype."""
        source = source.reshape(target.shape)
        if used is not None and target.dim() == values.dim():
            raw = target.view(torch.uint8) if target.element_size() == 1 else target
            new = source.view(torch.uint8) if source.element_size() == 1 else source
            raw.copy_(torch.where(used, new, raw))
        else:
            target.copy_(source)

    keep(out, found.values)
    if static_scale is None:
        keep(scale, found.scale)
    if zero_point is not None and found.zero_point is not None:
        keep(zero_point, found.zero_point)
    return Quantized(out, scale, zero_point)
