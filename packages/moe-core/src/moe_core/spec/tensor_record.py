"""Printing and pickling of dataclasses that hold tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_core.spec.quant_key import QuantKey, key_name

#: Dtypes that torch cannot pickle directly.
_BY_BYTES = frozenset(
    {
        torch.float8_e4m3fn,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2,
        torch.float8_e5m2fnuz,
        torch.float8_e8m0fnu,
    }
)


class TensorRecord:
    """Base class of dataclasses that hold tensors (declared with ``repr=False``).

    The repr shows shapes and dtypes but no values. Pickling supports 8-bit floats too.
    """

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the tensors that are set, as ``(name, tensor)``."""
        for name, value in self.__dict__.items():
            if isinstance(value, Tensor):
                yield name, value

    @property
    def nbytes(self) -> int:
        """Total size of the tensors in bytes."""
        return sum(tensor.nbytes for _, tensor in self.tensors())

    def __repr__(self) -> str:
        shown = {name: described(value) for name, value in self.__dict__.items() if value is not None and value != {}}
        return f"{type(self).__name__}({', '.join(f'{name}={text}' for name, text in shown.items())})"

    def __getstate__(self) -> dict[str, Any]:
        return {name: _packed(value) for name, value in self.__dict__.items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({name: _unpacked(value) for name, value in state.items()})


def described(value: Any) -> str:
    """Describe a field value in the repr of a record.

    Args:
        value: A tensor, a quantization key, a mapping of these, or anything else.

    Returns:
        ``[8, 1024, 512] bfloat16`` for a tensor, plus its device unless that is the CPU; the name of a key; the repr
        of other values.
    """
    if isinstance(value, Tensor):
        place = "" if value.device.type == "cpu" else f" on {value.device}"
        return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}{place}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {described(item)}" for name, item in value.items()) + "}"
    return key_name(value) if isinstance(value, QuantKey) else repr(value)


@dataclass(frozen=True)
class _Bytes:
    """A tensor's bytes, and the dtype to view them as."""

    tensor: Tensor
    dtype: torch.dtype


def _packed(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dtype in _BY_BYTES:
        return _Bytes(value.view(torch.uint8), value.dtype)
    if isinstance(value, Mapping):
        return {name: _packed(item) for name, item in value.items()}
    return value


def _unpacked(value: Any) -> Any:
    if isinstance(value, _Bytes):
        return value.tensor.view(value.dtype)
    if isinstance(value, Mapping):
        return {name: _unpacked(item) for name, item in value.items()}
    return value
