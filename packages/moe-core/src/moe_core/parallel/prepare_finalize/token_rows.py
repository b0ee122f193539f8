"""A token and what belongs to it as one row of bytes, so that one call moves them all.

The parts of a row start at multiples of 16 bytes: hidden states (in 16 or 32 bits, or as codes), their scales where
they are codes, router weights and expert numbers of the k slots, and the number of the token's adapter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_core.kernels.ops.token_layout import TokenCode
from moe_core.spec.quant_key import QuantKey

#: what vector loads of hidden states ask for
_ALIGNMENT = 16


@dataclass(frozen=True, eq=False)
class Tokens:
    """M tokens with what travels along.

    - ``hidden_states`` [M, K], and ``scale`` [M, groups] where they are codes
    - ``weights`` [M, k] float32 and ``experts`` [M, k] int32 or int64 (what numbers these are: see the user)
    - ``adapter_ids`` [M] int32 or None
    """

    hidden_states: Tensor
    scale: Tensor | None
    weights: Tensor
    experts: Tensor
    adapter_ids: Tensor | None = None

    def quantized(self, key: QuantKey | None) -> Tokens:
        """With codes and scales for the hidden states; None: as they are."""
        from moe_core.kernels.ops.quantize import quantize_activation

        if key is None:
            return self
        codes, scale = quantize_activation(self.hidden_states, key)
        return replace(self, hidden_states=codes, scale=scale)

    def parts(self) -> list[Tensor]:
        """The tensors, [M, n] each, in the order of a row."""
        adapters = None if self.adapter_ids is None else self.adapter_ids[:, None]
        return [
            part for part in (self.hidden_states, self.scale, self.weights, self.experts, adapters) if part is not None
        ]

    def row_nbytes(self) -> int:
        """Bytes of a row."""
        return sum(map(_padded, self.parts()))

    def expert_bytes(self) -> slice:
        """Where the expert numbers stand in a row."""
        before = [self.hidden_states, *(() if self.scale is None else (self.scale,)), self.weights]
        start = sum(map(_padded, before))
        return slice(start, start + self.experts.shape[1] * self.experts.element_size())

    def pack(self) -> Tensor:
        """[M, row_nbytes] uint8."""
        rows = []
        for part in self.parts():
            if part.stride(1) != 1:  # of one column, whose stride says nothing
                part = part.clone(memory_format=torch.contiguous_format)
            row = part.view(torch.uint8)
            missing = _padded(part) - row.shape[1]
            rows.append(F.pad(row, (0, missing)) if missing else row)
        return torch.cat(rows, dim=1)

    def unpack(self, rows: Tensor) -> Tokens:
        """The tokens of ``rows`` [R, row_nbytes], with parts of the same widths and dtypes as here.

        Rows of the hidden states lie apart, in the memory of ``rows``; the other tensors are contiguous.
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
    """The tokens of ``rows``, by one launch: :func:`moe_core.kernels.ops.dispatch.unpack`."""
    from moe_core.kernels.ops.dispatch import unpack

    found = unpack(rows, code, top_k, adapters=adapters)
    return Tokens(found.hidden, found.scale, found.weights, found.experts, found.adapters)


def _padded(part: Tensor) -> int:
    """Bytes that a row of ``part`` takes."""
    return -(-part.shape[1] * part.element_size() // _ALIGNMENT) * _ALIGNMENT
