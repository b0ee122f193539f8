"""What a caller may hand over instead of a tensor that fits: by name, and how each is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)


def _apart(tensor: Tensor) -> Tensor:
    """The same values in rows that lie apart."""
    wide = torch.zeros(*tensor.shape[:-1], tensor.shape[-1] + 3, dtype=tensor.dtype)
    wide[..., :-3] = tensor
    return wide[..., :-3]


def _every_second(tensor: Tensor) -> Tensor:
    """The same values in columns that lie apart."""
    wide = torch.zeros(*tensor.shape, 2, dtype=tensor.dtype)
    wide[..., 0] = tensor
    return wide[..., 0]


def _negated_view(tensor: Tensor) -> Any:
    """The same values as a view whose memory holds their negatives."""
    if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
        return None
    return torch._neg_view(-tensor)


class Subclass(Tensor):
    """A tensor all the same."""


#: of a tensor that fits, with one that is not a tensor, or not the same, or the same in other memory
MISUSES: dict[str, Callable[[Tensor], Any]] = {
    "None": lambda t: None,
    "list": lambda t: t.tolist() if t.dtype is not torch.float8_e4m3fn else [0.0],
    "array": lambda t: np.zeros(tuple(t.shape), dtype=np.float32),
    "number": lambda t: 3,
    "text": lambda t: "tensor",
    "tuple": lambda t: (t,),
    "dict": lambda t: {"tensor": t},
    "scalar": lambda t: t.flatten()[0] if t.numel() else t.new_zeros(()),
    "no elements": lambda t: t.new_zeros(0),
    "one dimension more": lambda t: t[None],
    "one dimension more behind": lambda t: t[..., None],
    "flat": lambda t: t.flatten(),
    "transposed": lambda t: t.T if t.dim() == 2 else t.mT if t.dim() == 3 else t.flip(0),
    "transposed memory": lambda t: t.mT.contiguous().mT if t.dim() >= 2 else _every_second(t),
    "a row less": lambda t: t[:-1],
    "a row more": lambda t: torch.cat([t, t[:1]]),
    "no rows": lambda t: t[:0],
    "a column less": lambda t: t[..., :-1],
    "a column more": lambda t: torch.cat([t, t[..., :1]], dim=-1),
    "no columns": lambda t: t[..., :0],
    "half": lambda t: t.reshape(2 * t.shape[0], -1) if t.dim() == 2 and t.shape[1] % 2 == 0 else t[::2],
    "double": lambda t: torch.cat([t, t], dim=-1),
    "rows apart": _apart,
    "columns apart": _every_second,
    "expanded": lambda t: t[:1].expand(t.shape),
    "reversed twice": lambda t: t.flip(0).flip(0),
    "meta": lambda t: t.to("meta"),
    "sparse": lambda t: t.to_sparse() if t.dtype is not torch.float8_e4m3fn else None,
    "requires grad": lambda t: t.clone().requires_grad_() if t.is_floating_point() else None,
    "parameter": lambda t: torch.nn.Parameter(t.clone(), requires_grad=False),
    "subclass": lambda t: t.as_subclass(Subclass),
    "negated view": _negated_view,
    "same": lambda t: t,
    **{str(dtype): lambda t, dtype=dtype: t.to(dtype) for dtype in DTYPES},  # type: ignore[misc]
}

#: of ids and maps, further values
IDS: dict[str, Callable[[Tensor], Any]] = {
    "negative": lambda t: torch.full_like(t, -1),
    "one too large": lambda t: torch.full_like(t, 6),
    "largest": lambda t: torch.full_like(t, 2**31 - 1),
    "smallest": lambda t: torch.full_like(t, -(2**31)),
    "wider than 32 bits": lambda t: t.long() + 2**32,
    "all the same": lambda t: torch.full_like(t, 1),
    "some too large": lambda t: torch.where(torch.arange(t.numel()).view(t.shape) % 2 == 0, t, 99),
}
