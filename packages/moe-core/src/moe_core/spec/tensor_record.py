"""Dataclasses that hold tensors: what they print, and how they are pickled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_core.spec.quant_key import QuantKey, key_name

#: dtypes that torch's own pickling of a tensor cannot write
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
    """Base of such dataclasses (with ``repr=False``): prints shapes and dtypes, no values; pickles 8-bit floats too."""

    def __repr__(self) -> str:
        shown = {name: described(value) for name, value in self.__dict__.items() if value is not None and value != {}}
        return f"{type(self).__name__}({', '.join(f'{name}={text}' for name, text in shown.items())})"

    def __getstate__(self) -> dict[str, Any]:
        return {name: _packed(value) for name, value in self.__dict__.items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({name: _unpacked(value) for name, value in state.items()})


def described(value: Any) -> str:
    """``[8, 1024, 512] bfloat16`` for a tensor (and its device, unless that is the CPU), its name for a key."""
    if isinstance(value, Tensor):
        place = "" if value.device.type == "cpu" else f" on {value.device}"
        return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}{place}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {described(item)}" for name, item in value.items()) + "}"
    return key_name(value) if isinstance(value, QuantKey) else repr(value)


@dataclass(frozen=True)
class _Bytes:
    """A tensor's bytes, and the dtype that they are read as."""

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
