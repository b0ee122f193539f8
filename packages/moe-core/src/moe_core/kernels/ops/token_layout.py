"""Where the parts of a token lie in a buffer of tokens: hidden states, scales, routing, the number of an adapter."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from moe_core.errors import ConfigError
from moe_core.spec.numerics import FP8_E4M3, INT8
from moe_core.spec.quant_key import QuantKey, check_one_level

#: what vector loads and stores of hidden states ask for
ALIGNMENT = 16


@dataclass(frozen=True)
class TokenCode:
    """How hidden states of ``columns`` K values in ``dtype`` travel: as they are, or as codes with scales.

    ``key``: e4m3 or int8 with scales of each token's own, per token or per 1 x G group.  Raises ConfigError for others.
    """

    columns: int
    dtype: torch.dtype
    key: QuantKey | None = None

    def __post_init__(self) -> None:
        key = self.key
        if key is None:
            return
        check_one_level(key, "key")
        shape = key.group_shape
        grouped = shape.row == 1 and shape.col > 0 and not shape.col & (shape.col - 1)
        if not (
            key.dtype in (FP8_E4M3, INT8)
            and (grouped or shape.is_per_row)
            and key.symmetric
            and not key.is_static
            and key.packing is None
        ):
            raise ConfigError(
                f"tokens are sent as they are, or as e4m3 or int8 with scales of each token's own, the key is {key}"
            )

    def __hash__(self) -> int:
        # calls look several things up by it; codes that differ by their keys alone are few
        return hash((self.columns, self.dtype))

    @property
    def code_dtype(self) -> torch.dtype:
        """Of what is stored for a value."""
        if self.key is None:
            return self.dtype
        return torch.float8_e4m3fn if self.key.dtype == FP8_E4M3 else torch.int8

    @property
    def scale_dtype(self) -> torch.dtype:
        return torch.float32 if self.key is None else self.key.scale.dtype

    @property
    def groups(self) -> int:
        """Scales of a token."""
        if self.key is None:
            return 0
        return 1 if self.key.group_shape.is_per_row else -(-self.columns // self.key.group_size)

    @property
    def hidden_nbytes(self) -> int:
        return self.columns * self.code_dtype.itemsize

    @property
    def scale_nbytes(self) -> int:
        return self.groups * self.scale_dtype.itemsize


@dataclass(frozen=True)
class TokenLayout:
    """(first byte, bytes from row to row) of each part; parts that do not travel have any place.

    Experts and adapters are int32, router weights float32.
    """

    hidden: tuple[int, int]
    scale: tuple[int, int]
    weights: tuple[int, int]
    experts: tuple[int, int]
    adapters: tuple[int, int]
    nbytes: int

    @staticmethod
    def rows(code: TokenCode, top_k: int, *, adapters: bool = False) -> TokenLayout:
        """A token is one row of bytes, whose parts start at multiples of 16; ``nbytes`` are those of a row."""
        return _rows(code, top_k, adapters)

    @staticmethod
    def parts(code: TokenCode, top_k: int, tokens: int, start: int = 0) -> TokenLayout:
        """A contiguous tensor for each part of ``tokens`` tokens, from byte ``start`` on, ``nbytes`` in all."""
        widths = [code.hidden_nbytes, code.scale_nbytes, 4 * top_k, 4 * top_k, 4]
        starts, nbytes = _starts([width * tokens for width in widths])
        hidden, scale, weights, experts, last = (
            (start + first, width) for first, width in zip(starts, widths, strict=True)
        )
        return TokenLayout(hidden, scale, weights, experts, last, nbytes)

    @property
    def numbers(self) -> tuple[int, ...]:
        """As the kernels take it."""
        return (*self.hidden, *self.scale, *self.weights, *self.experts, *self.adapters)

    @property
    def is_aligned(self) -> bool:
        """Whether every row of hidden states starts at a multiple of 16 bytes."""
        return not (self.hidden[0] % ALIGNMENT or self.hidden[1] % ALIGNMENT)


@functools.lru_cache(maxsize=512)
def _rows(code: TokenCode, top_k: int, adapters: bool) -> TokenLayout:
    """Asked several times in each call."""
    widths = [code.hidden_nbytes, code.scale_nbytes, 4 * top_k, 4 * top_k, 4 if adapters else 0]
    starts, width = _starts(widths)
    hidden, scale, weights, experts, last = ((start, width) for start in starts)
    return TokenLayout(hidden, scale, weights, experts, last, width)


def _starts(widths: list[int]) -> tuple[list[int], int]:
    """(first byte of each, end) of parts of so many bytes, each at a multiple of 16."""
    starts, end = [], 0
    for width in widths:
        starts.append(end)
        end += -(-width // ALIGNMENT) * ALIGNMENT
    return starts, end
