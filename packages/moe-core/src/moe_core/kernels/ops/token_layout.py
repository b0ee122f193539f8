"""Byte layout of tokens in a buffer: hidden states, scales, routing, LoRA adapter."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from moe_core.errors import ConfigError
from moe_core.spec.numerics import FP8_E4M3, INT8
from moe_core.spec.quant_key import QuantKey

#: alignment in bytes that vector loads and stores of hidden states require
ALIGNMENT = 16


@dataclass(frozen=True)
class TokenCode:
    """Storage format of hidden states in transit: unquantized, or as codes with scales.

    Attributes:
        columns: Values per token, K.
        dtype: Dtype of unquantized values.
        key: Quantization to e4m3 or int8, with dynamic scales per token or per 1 x G group; None sends values
            unquantized.

    Raises:
        ConfigError: If the key is not supported.
    """

    columns: int
    dtype: torch.dtype
    key: QuantKey | None = None

    def __post_init__(self) -> None:
        key = self.key
        if key is None:
            return
        shape = key.group_shape
        grouped = shape.row == 1 and shape.col > 0 and not shape.col & (shape.col - 1)
        if not (
            key.dtype in (FP8_E4M3, INT8)
            and (grouped or shape.is_per_row)
            and key.symmetric
            and not key.is_static
            and key.packing is None
            and key.scale2 is None
        ):
            raise ConfigError(
                f"key {key} is not supported for sending tokens; expected None, or e4m3 or int8 with scales per token"
            )

    def __hash__(self) -> int:
        # hashed several times per call, so the hash is cheap; few codes differ in their key only
        return hash((self.columns, self.dtype))

    @property
    def code_dtype(self) -> torch.dtype:
        """Dtype of the stored values."""
        if self.key is None:
            return self.dtype
        return torch.float8_e4m3fn if self.key.dtype == FP8_E4M3 else torch.int8

    @property
    def scale_dtype(self) -> torch.dtype:
        """Dtype of the scales."""
        return torch.float32 if self.key is None else self.key.scale.dtype

    @property
    def groups(self) -> int:
        """Number of scales per token."""
        if self.key is None:
            return 0
        return 1 if self.key.group_shape.is_per_row else -(-self.columns // self.key.group_size)

    @property
    def hidden_nbytes(self) -> int:
        """Bytes of the stored values of a token."""
        return self.columns * self.code_dtype.itemsize

    @property
    def scale_nbytes(self) -> int:
        """Bytes of the scales of a token."""
        return self.groups * self.scale_dtype.itemsize


@dataclass(frozen=True)
class TokenLayout:
    """Byte layout of the fields of a token; fields that are not sent have an arbitrary place.

    Experts and adapters are int32, router weights float32.

    Attributes:
        hidden: ``(offset, stride)`` in bytes of the hidden states, like the other pairs.
        scale: Offset and stride of the scales.
        weights: Offset and stride of the router weights.
        experts: Offset and stride of the expert numbers.
        adapters: Offset and stride of the adapters.
        nbytes: Size in bytes, of a row or of all tokens.
    """

    hidden: tuple[int, int]
    scale: tuple[int, int]
    weights: tuple[int, int]
    experts: tuple[int, int]
    adapters: tuple[int, int]
    nbytes: int

    @staticmethod
    def rows(code: TokenCode, top_k: int, *, adapters: bool = False) -> TokenLayout:
        """Lay out each token as one row of bytes, with fields aligned to 16 bytes.

        Args:
            code: Storage format of the hidden states.
            top_k: Slots per token.
            adapters: Whether the rows contain adapters.

        Returns:
            Layout whose ``nbytes`` is the size of a row.
        """
        return _rows(code, top_k, adapters)

    @staticmethod
    def parts(code: TokenCode, top_k: int, tokens: int, start: int = 0) -> TokenLayout:
        """Lay out each field of all tokens as one contiguous tensor.

        Args:
            code: Storage format of the hidden states.
            top_k: Slots per token.
            tokens: Number of tokens.
            start: Byte offset of the first field.

        Returns:
            Layout whose ``nbytes`` is the total size.
        """
        widths = [code.hidden_nbytes, code.scale_nbytes, 4 * top_k, 4 * top_k, 4]
        starts, nbytes = _starts([width * tokens for width in widths])
        hidden, scale, weights, experts, last = (
            (start + first, width) for first, width in zip(starts, widths, strict=True)
        )
        return TokenLayout(hidden, scale, weights, experts, last, nbytes)

    @property
    def numbers(self) -> tuple[int, ...]:
        """The offsets and strides as a kernel argument."""
        return (*self.hidden, *self.scale, *self.weights, *self.experts, *self.adapters)

    @property
    def is_aligned(self) -> bool:
        """Whether every row of hidden states starts at a multiple of 16 bytes."""
        return not (self.hidden[0] % ALIGNMENT or self.hidden[1] % ALIGNMENT)


@functools.lru_cache(maxsize=512)
def _rows(code: TokenCode, top_k: int, adapters: bool) -> TokenLayout:
    """Compute the layout of rows; cached because each call needs it several times."""
    widths = [code.hidden_nbytes, code.scale_nbytes, 4 * top_k, 4 * top_k, 4 if adapters else 0]
    starts, width = _starts(widths)
    hidden, scale, weights, experts, last = ((start, width) for start in starts)
    return TokenLayout(hidden, scale, weights, experts, last, width)


def _starts(widths: list[int]) -> tuple[list[int], int]:
    """Return the offset of each field, aligned to 16 bytes, and the end."""
    starts, end = [], 0
    for width in widths:
        starts.append(end)
        end += -(-width // ALIGNMENT) * ALIGNMENT
    return starts, end
