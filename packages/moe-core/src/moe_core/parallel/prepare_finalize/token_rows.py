"""A token with its metadata as one row of bytes, so that one collective moves everything.

The parts of a row are 16-byte aligned: hidden states (16 or 32 bits, or codes), scales of codes, router weights and
expert numbers of the k experts, and the number of the token's adapter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_core.kernels.ops.token_layout import TokenCode
from moe_core.spec.quant_key import QuantKey

#: Alignment that vector loads of hidden states require.
_ALIGNMENT = 16


@dataclass(frozen=True, eq=False)
class Tokens:
    """M tokens with their metadata.

    Attributes:
        hidden_states: Values or codes, ``[M, K]``.
        scale: Scales ``[M, groups]`` of codes, or None.
        weights: Router weights, float32 ``[M, k]``.
        experts: Expert numbers, int32 or int64 ``[M, k]``; their meaning depends on the user.
        adapter_ids: LoRA adapters, int32 ``[M]``, or None.
    """

    hidden_states: Tensor
    scale: Tensor | None
    weights: Tensor
    experts: Tensor
    adapter_ids: Tensor | None = None

    def quantized(self, key: QuantKey | None) -> Tokens:
        """Return tokens with codes and scales as hidden states.

        Args:
            key: Quantization; None returns the tokens as they are.

        Returns:
            The tokens.
        """
        from moe_core.kernels.ops.quantize import quantize_activation

        if key is None:
            return self
        codes, scale = quantize_activation(self.hidden_states, key)
        return replace(self, hidden_states=codes, scale=scale)

    def parts(self) -> list[Tensor]:
        """Return the tensors, [M, n] each, in the order of a row."""
        adapters = None if self.adapter_ids is None else self.adapter_ids[:, None]
        return [
            part for part in (self.hidden_states, self.scale, self.weights, self.experts, adapters) if part is not None
        ]

    def row_nbytes(self) -> int:
        """Return the size of a row in bytes."""
        return sum(map(_padded, self.parts()))

    def expert_bytes(self) -> slice:
        """Return the byte range of the expert numbers in a row."""
        before = [self.hidden_states, *(() if self.scale is None else (self.scale,)), self.weights]
        start = sum(map(_padded, before))
        return slice(start, start + self.experts.shape[1] * self.experts.element_size())

    def pack(self) -> Tensor:
        """Return the rows, uint8 [M, row_nbytes]."""
        rows = []
        for part in self.parts():
            if part.stride(1) != 1:  # a single column, whose stride is arbitrary
                part = part.clone(memory_format=torch.contiguous_format)
            row = part.view(torch.uint8)
            missing = _padded(part) - row.shape[1]
            rows.append(F.pad(row, (0, missing)) if missing else row)
        return torch.cat(rows, dim=1)

    def unpack(self, rows: Tensor) -> Tokens:
        """Unpack rows that have parts of the same widths and dtypes as these tokens.

        Args:
            rows: uint8 ``[R, row_nbytes]``.

        Returns:
            The tokens. Hidden states are a strided view of ``rows``; the other tensors are contiguous.
        """
        found, start = [], 0
        for part in self.parts():
            width = part.shape[1] * part.element_size()
            found.append(rows[:, start : start + width].view(part.dtype))
            start += _padded(part)
        hidden, rest = found[0], [part.contiguous() for part in found[1:]]
        scale = None if self.scale is None else rest.pop(0)
        weights, experts = rest[:2]
        adapters = None if self.adapter_ids is None else rest[2].flatten()
        return Tokens(hidden, scale, weights, experts, adapters)


def unpacked(rows: Tensor, code: TokenCode, top_k: int, *, adapters: bool) -> Tokens:
    """Unpack rows with one launch of :func:`moe_core.kernels.ops.dispatch.unpack`.

    Args:
        rows: Rows of tokens.
        code: Encoding of the tokens.
        top_k: Number of experts per token.
        adapters: Whether rows contain adapter numbers.

    Returns:
        The tokens.
    """
    from moe_core.kernels.ops.dispatch import unpack

    found = unpack(rows, code, top_k, adapters=adapters)
    return Tokens(found.hidden, found.scale, found.weights, found.experts, found.adapters)


def _padded(part: Tensor) -> int:
    """Bytes of one row of ``part``, padded to the alignment."""
    return -(-part.shape[1] * part.element_size() // _ALIGNMENT) * _ALIGNMENT
