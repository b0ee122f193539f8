"""Products with grouped unsigned codes, dequantized by blocks of rows, in plain torch.

A block fits a CPU's cache, so that its float32 values are never written to memory. The two codes of each byte are
unpacked into separate halves of a block, even columns and odd columns. The activations' columns are permuted to match,
which is cheaper than permuting codes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from moe_core import QuantKey
from torch import Tensor

#: float32 values of a block on a CPU: 2 MB
_BLOCK = 2**19


@dataclass(frozen=True, eq=False)
class GroupedCodes:
    """One matrix of quantized weights.

    Attributes:
        key: quantization of the weights.
        codes: canonical codes [rows, K] (int4: [rows, ceil(K/2)]).
        scale: [rows, G].
        zero_point: [rows, G], if the key has zero points.
        g_idx: [K], the group of each column, if the key is permuted.
    """

    key: QuantKey
    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None = None
    g_idx: Tensor | None = None

    def product(self, x: Tensor) -> Tensor:
        """Multiply float32 activations by the matrix, transposed.

        Args:
            x: float32 [R, K].

        Returns:
            float32 [R, rows].
        """
        rows = len(self.codes)
        x, g_idx = self._column_order(x), self._group_order()
        size = rows if x.device.type != "cpu" else min(max(_BLOCK // max(x.shape[1], 1), 1), rows)
        y = x.new_empty(len(x), rows)
        buffer = x.new_empty(size, x.shape[1])
        for first in range(0, rows, max(size, 1)):
            block = slice(first, min(first + size, rows))
            w = buffer[: block.stop - first]
            self._dequantize(block, w, g_idx)
            torch.mm(x, w.T, out=y[:, block])
        return y

    @property
    def _halves(self) -> int:
        """1, or 2 if each byte holds two codes."""
        return 1 if self.key.packing is None else 2

    def _column_order(self, x: Tensor) -> Tensor:
        """Permute the columns of ``x`` like a block's: even, then odd, zero-padded if needed."""
        if self._halves == 1:
            return x
        missing = x.new_zeros(len(x), x.shape[1] % 2)
        return torch.cat((x[:, 0::2], x[:, 1::2], missing), dim=1)

    def _group_order(self) -> Tensor | None:
        """Permute :attr:`g_idx` in the same way."""
        if self.g_idx is None or self._halves == 1:
            return self.g_idx
        missing = self.g_idx.new_zeros(len(self.g_idx) % 2)
        return torch.cat((self.g_idx[0::2], self.g_idx[1::2], missing))

    def _dequantize(self, block: slice, out: Tensor, g_idx: Tensor | None) -> None:
        """Dequantize some rows to ``out``, float32 [rows, columns]."""
        codes = self.codes[block]
        zero_point = None if self.zero_point is None else self.zero_point[block]
        if self._halves == 2:
            low, high = out.chunk(2, dim=1)
            low.copy_(self._signed(codes & 15))
            high.copy_(self._signed(codes >> 4))
        else:
            out.copy_(self._signed(codes))
        scale = self.scale[block].float()
        if zero_point is not None:
            self._spread(torch.Tensor.sub_, out, zero_point.float(), g_idx)
        self._spread(torch.Tensor.mul_, out, scale, g_idx)

    def _signed(self, codes: Tensor) -> Tensor:
        """Subtract the offset of symmetric types, while codes are still bytes."""
        offset = self.key.dtype.offset if self.zero_point is None else 0
        return codes.sub(offset).view(torch.int8) if offset else codes

    def _spread(
        self, change: Callable[[Tensor, Tensor], Tensor], out: Tensor, own: Tensor, g_idx: Tensor | None
    ) -> None:
        """Apply ``change`` to ``out`` with each group's value of ``own`` [rows, G]."""
        if g_idx is not None:
            change(out, own.index_select(1, g_idx))
            return
        size = self.key.group_size
        if size < 0:
            change(out, own)
            return
        size //= self._halves
        halves = out.view(len(out), self._halves, -1)
        whole = halves.shape[2] // size
        in_groups = halves[:, :, : whole * size].view(len(out), self._halves, whole, size)
        change(in_groups, own[:, None, :whole, None])
        if whole * size < halves.shape[2]:
            change(halves[:, :, whole * size :], own[:, None, whole:])
