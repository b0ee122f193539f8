"""Quantize expert weights at memory bandwidth on a GPU.

The rules and the resulting bits are those of :mod:`moe_core.reference.quantization`. Triton kernels cover e4m3 and int8
codes with scales per tensor, per output channel, in blocks or in groups along K, and MXFP4 of whole groups. They read
every value once (twice for one scale per tensor) and write codes and scales. Every other key, and every other device,
takes the PyTorch implementation.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from moe_core.errors import ConfigError, TensorError, check_dtype, check_shape
from moe_core.kernels.ops._backend import use_triton
from moe_core.kernels.ops._rows import FLOATS
from moe_core.kernels.ops._sizes import power_of_two
from moe_core.kernels.ops.quantize import quantize_activation, without_e4m3
from moe_core.reference.quantization import Quantized, quantize_weight
from moe_core.spec.numerics import FP8_E4M3, INT8, is_e8m0
from moe_core.spec.quant_key import QuantKey, kMxfp4Static
from moe_core.spec.roles import scale_shape, storage_dtypes

#: number of values the PyTorch implementation converts to float32 at a time; at least one expert
_TORCH_CHUNK = 1 << 24
#: largest number of values of a block, and of a row, that a program holds
_MAX_TILE = 1 << 15
_MAX_RUN = 1 << 14


def quantize_weights(
    w: Tensor,
    key: QuantKey,
    *,
    parts: int = 1,
    out: Tensor | None = None,
    scale_out: Tensor | None = None,
    backend: str = "auto",
) -> Quantized:
    """Quantize expert weights to canonical codes and scales.

    A group of zeros gets the scale of the smallest amax, ``AMAX_FLOOR / max_value``.

    Args:
        w: Weights [E, rows, K], bfloat16, float16 or float32.
        key: Quantization of the weights.
        parts: Number of stacked matrices (gate and up: 2) with separate scales.
        out: Contiguous codes [E, rows, K] to write to (packed: K divided by the values per word); allocated by default.
        scale_out: Contiguous scales of :func:`moe_core.spec.roles.scale_shape` to write to; allocated by default.
        backend: ``"auto"``, ``"triton"`` or ``"torch"``.

    Returns:
        Codes, scales and, if the key has them, zero points.

    Raises:
        TensorError: If a tensor does not fit the key or the other tensors.
        ConfigError: If the key or the backend is not supported.
    """
    check_shape("w", w, ("E", "rows", "K"))
    check_dtype("w", w, FLOATS)
    if key.permuted:
        raise ConfigError(f"key {key} is not supported: weights with permuted columns cannot be quantized")
    experts, rows, cols = w.shape
    if parts < 1 or rows % parts:
        raise TensorError(f"w has {rows} rows, expected a multiple of parts = {parts}")
    out = _output("out", out, _storage_shape(key, experts, rows, cols), storage_dtypes(key)[0], w)
    shape = scale_shape(key, experts, rows, cols, parts)
    scale = _output("scale_out", scale_out, shape, key.scale.dtype, w)
    unsupported = _unsupported(key, w)
    if not w.numel() or not use_triton(w, backend, unsupported=unsupported):
        return _quantize_torch(w, key, parts, out, scale)
    # the kernels read the rows of all experts as one contiguous matrix
    _launch(w.contiguous(), key, parts, out, scale)
    return Quantized(out, scale)


def _launch(w: Tensor, key: QuantKey, parts: int, out: Tensor, scale: Tensor) -> None:
    from moe_core.kernels.ops._weight_launch import launch_blocks, launch_matrices, launch_pairs, launch_runs

    experts, rows, cols = w.shape
    group, code = key.group_shape, key.dtype.name
    size = cols if group.is_per_row else group.col
    if key == kMxfp4Static:
        launch_pairs(w, out, scale, size=size)
    elif group.is_per_tensor:
        launch_matrices(w, out, scale, parts=parts, code=code)
    elif group.row > 1:
        launch_blocks(w, out, scale, parts=parts, row=group.row, col=group.col, code=code)
    elif cols % size == 0 and size <= _MAX_RUN:
        launch_runs(w, out, scale, size=size, code=code)
    else:
        # a short last group, or rows longer than a program holds: the kernels for activations support both
        quantize_activation(
            w.view(experts * rows, cols),
            replace(key, scale=replace(key.scale, static=False)),
            out=out.view(experts * rows, cols),
            scale_out=scale.view(experts * rows, -1),
            backend="triton",
        )


def _unsupported(key: QuantKey, w: Tensor) -> str | None:
    """Explain why the kernels do not support the request; None if they do."""
    group = key.group_shape
    if key == kMxfp4Static:
        return (
            None if w.shape[2] % group.col == 0 else f"groups are whole, w has {w.shape[2]} columns; the key is {key}"
        )
    if key.dtype not in (FP8_E4M3, INT8) or key.packing is not None or not key.symmetric or key.scale2 is not None:
        return f"codes must be MXFP4, or symmetric e4m3 or int8 with one level of scales; got key {key}"
    if key.scale.rounding != "up":
        return f"scales must be rounded up; got key {key}"
    in_groups = group.row == 1 and group.col > 0
    if key.scale.dtype is not torch.float32 and not (is_e8m0(key.scale.dtype) and group.col > 0):
        return f"scales must be float32, or e8m0 for blocks and groups; got key {key}"
    if in_groups and (group.col & (group.col - 1) or group.col > 1024):
        return f"groups along K must have a power of two up to 1024 columns; got key {key}"
    in_blocks = group.row > 1 and group.col > 0
    if in_blocks and power_of_two(group.row) * power_of_two(group.col) > _MAX_TILE:
        return f"blocks must have at most {_MAX_TILE} values; got key {key}"
    if in_blocks and power_of_two(group.row) * w.shape[2] >= 1 << 31:
        return f"the rows of a block must span less than 2**31 values; w has {w.shape[2]} columns and the key is {key}"
    if not (group.is_per_tensor or group.is_per_row or in_groups or in_blocks):
        return f"scales must be per tensor, per row, per group along K or per block; got key {key}"
    return without_e4m3(w) if key.dtype == FP8_E4M3 and w.device.type == "cuda" else None


def _quantize_torch(w: Tensor, key: QuantKey, parts: int, out: Tensor, scale: Tensor) -> Quantized:
    step = max(1, _TORCH_CHUNK // max(1, w.shape[1] * w.shape[2]))
    found = []
    for start in range(0, max(w.shape[0], 1), step):
        chunk = slice(start, start + step)
        found.append(quantize_weight(w[chunk], key, parts=parts))
        out[chunk].copy_(found[-1].values)
        scale[chunk].copy_(found[-1].scale)
    zero_point = [one.zero_point for one in found if one.zero_point is not None]
    scale2 = [one.scale2 for one in found if one.scale2 is not None]
    return Quantized(out, scale, torch.cat(zero_point) if zero_point else None, torch.cat(scale2) if scale2 else None)


def _storage_shape(key: QuantKey, experts: int, rows: int, cols: int) -> tuple[int, int, int]:
    if key.packing is None:
        return experts, rows, cols
    count = key.packing.values_per_word
    return (experts, -(-rows // count), cols) if key.packing.axis == "n" else (experts, rows, -(-cols // count))


def _output(name: str, given: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, like: Tensor) -> Tensor:
    if given is None:
        return torch.empty(shape, dtype=dtype, device=like.device)
    check_shape(name, given, shape)
    check_dtype(name, given, (dtype,))
    if given.device != like.device or not given.is_contiguous():
        raise TensorError(
            f"{name} is on {given.device} with strides {given.stride()}, expected contiguous on {like.device}"
        )
    return given
