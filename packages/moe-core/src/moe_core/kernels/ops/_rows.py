"""Validated input rows of an activation or quantizer, and their kernel arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_core.errors import ConfigError, TensorError, check_dtype, check_shape
from moe_core.spec.activation import ActivationParams, MoEActivation, apply_moe_activation

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, eq=False)
class Rows:
    """Input rows with the bias and activation that produce ``columns`` values each.

    ``x`` is [M, C] or [B, T, C]. See :func:`moe_core.kernels.ops.activation.fused_activation` for the fields.
    """

    x: Tensor
    activation: MoEActivation | None = None
    params: ActivationParams | None = None
    bias: Tensor | None = None
    row_experts: Tensor | None = None
    row_counts: Tensor | None = None

    def __post_init__(self) -> None:
        x = self.x
        check_dtype("x", x, FLOATS)
        if x.dim() not in (2, 3):
            raise TensorError(f"x has shape {list(x.shape)}, expected [M, columns] or [B, T, columns]")
        if self.activation is not None:
            object.__setattr__(self, "params", self.activation.resolve_params(self.params))
            if self.activation.is_gated and x.shape[-1] % 2:
                raise TensorError(f"x has {x.shape[-1]} columns, expected an even number: gate and up")
        elif self.params is not None:
            raise ConfigError("activation_params is given without an activation")
        if self.bias is not None:
            check_dtype("bias", self.bias, FLOATS)
            check_shape("bias", self.bias, (x.shape[-1],) if self.bias.dim() == 1 else ("experts", x.shape[-1]))
        if self.row_experts is not None:
            check_shape("row_experts", self.row_experts, (self.rows,))
            check_dtype("row_experts", self.row_experts, (torch.int32, torch.int64))
        if self.row_counts is not None:
            check_shape("row_counts", self.row_counts, (self.batches,))
            check_dtype("row_counts", self.row_counts, (torch.int32, torch.int64))
        if self.bias is not None and self.bias.dim() == 2 and self.row_experts is None and x.dim() == 2:
            raise TensorError("a bias per expert [E, columns] for x [M, columns] needs row_experts [M]")

    @property
    def batches(self) -> int:
        """Number of batches; 1 for [M, C]."""
        return self.x.shape[0] if self.x.dim() == 3 else 1

    @property
    def tokens(self) -> int:
        """Rows per batch."""
        return self.x.shape[-2]

    @property
    def rows(self) -> int:
        """Number of rows in all batches."""
        return self.batches * self.tokens

    @property
    def columns(self) -> int:
        """Number of columns of the result."""
        gated = self.activation is not None and self.activation.is_gated
        return self.x.shape[-1] // 2 if gated else self.x.shape[-1]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the result."""
        return (*self.x.shape[:-1], self.columns)

    def values(self) -> Tensor:
        """Compute the result in float32 with PyTorch, as the kernels do while loading."""
        wide = self.x.float()
        if self.bias is not None:
            wide = wide + self._bias_rows().float()
        return wide if self.activation is None else apply_moe_activation(self.activation, wide, self.params)

    def in_use(self) -> Tensor | None:
        """Return whether each row is valid, as bool [..., 1]; None if all are.

        The result broadcasts to the shape of the values.
        """
        if self.row_counts is None:
            return None
        counts = self.row_counts.view(-1, 1) if self.x.dim() == 3 else self.row_counts
        used = torch.arange(self.tokens, device=self.x.device) < counts
        return used[..., None]

    def _bias_rows(self) -> Tensor:
        bias = self.bias
        if bias is None or bias.dim() == 1:
            return torch.zeros((), dtype=torch.float32, device=self.x.device) if bias is None else bias
        experts = self.row_experts
        if experts is None:
            experts = torch.arange(self.batches, device=bias.device).repeat_interleave(self.tokens)
        known = (experts >= 0) & (experts < bias.shape[0])
        rows = (
            bias[torch.where(known, experts, 0).long()] if bias.shape[0] else bias.new_zeros(self.rows, bias.shape[1])
        )
        return torch.where(known[:, None], rows, 0.0).view(self.x.shape)

    def kernel_arguments(self, out: Tensor, scale: Tensor | None) -> tuple[Any, ...]:
        """Return (x, bias, S, P) as the kernels of `_quantize_kernels` take them."""
        bias, experts = self.bias, self.row_experts
        if bias is not None:
            bias = bias.contiguous().view(1, -1) if bias.dim() == 1 else bias.contiguous()
            if self.bias is not None and self.bias.dim() == 1:
                experts = None
        shared = self.bias is not None and self.bias.dim() == 1
        params = self.params or ActivationParams()
        limit = params.limit
        places = (
            self.tokens,
            *_row_strides(self.x),
            *_row_strides(out),
            *(_row_strides(scale) if scale is not None else (0, 0)),
            0 if bias is None or shared else bias.stride(0),
            experts,
            # a shared bias has stride 0, so that every batch number is valid
            self.batches if shared else (0 if bias is None else bias.shape[0]),
            self.row_counts,
        )
        parameters = (
            self.columns,
            self.x.stride(-1),
            float(params.alpha if params.alpha is not None else 1.0),
            float(params.beta if params.beta is not None else 0.0),
            float(limit if limit is not None else 0.0),
        )
        return self.x, bias, places, parameters

    def constants(self) -> dict[str, Any]:
        """Return the constexpr arguments that accompany :meth:`kernel_arguments`."""
        activation = self.activation
        return {
            "ACTIVATION": activation.value.removesuffix("_no_mul") if activation is not None else "",
            "GATED": activation is not None and activation.is_gated,
            "HAS_LIMIT": self.params is not None and self.params.limit is not None,
            "HAS_COUNTS": self.row_counts is not None,
        }


def _row_strides(x: Tensor) -> tuple[int, int]:
    """Return the strides per batch and per row of [M, C] or [B, T, C]."""
    return (x.stride(0), x.stride(1)) if x.dim() == 3 else (0, x.stride(0))


def check_output(name: str, out: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], like: Tensor) -> None:
    """Raise :class:`TensorError` unless ``out`` is writable as [..., C] with contiguous columns."""
    check_shape(name, out, shape)
    check_dtype(name, out, dtypes)
    if out.device != like.device:
        raise TensorError(f"{name} is on {out.device}, x on {like.device}")
    if out.shape[-1] > 1 and out.stride(-1) != 1:
        raise TensorError(f"{name} has column stride {out.stride(-1)}, expected contiguous columns")
