"""Parse the header of a safetensors file.

The header is a JSON object with the dtype, shape and data offsets of each tensor. It is checked before anything is
allocated. A model has 100,000 tensors, and tools format headers as the safetensors library does, so such a header is
parsed with one regular expression. Any other header, including an invalid one, is parsed as JSON, entry by entry.
"""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeGuard

import torch

from moe_core._support.open_file import OpenFile
from moe_core._support.strict_json import MAX_VALUES, parse_object
from moe_core.errors import CheckpointError

#: Limit of the safetensors library.
MAX_HEADER_BYTES = 100_000_000

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
}

#: (dtype as a header spells it, shape); tensors of a file with the same kind share one object.
Kind = tuple[str, tuple[int, ...]]
#: (kind of each tensor by name, offset of its first byte by name). Offsets count from the start of the data while
#: parsing, and from the start of the file in the result of :func:`read_header`.
Header = tuple[dict[str, Kind], dict[str, int]]

_INTEGERS = {int}
_SIZE = "(0|[1-9][0-9]{0,17})"
#: An entry as the library writes it: name, dtype, shape, begin and end of the data.
_ENTRY = re.compile(
    r'"([^"\\\x00-\x1f]+)":\{"dtype":"([A-Z0-9_]{1,20})","shape":\[([0-9,]*)\],'
    rf'"data_offsets":\[{_SIZE},{_SIZE}\]\}}'
)
_GROUPS = _ENTRY.groups + 1
_METADATA = "__metadata__"
_BEFORE = f'{{"{_METADATA}":'


def read_header(file: OpenFile) -> Header:
    """Read and check the header of a safetensors file.

    Args:
        file: The open file.

    Returns:
        The kind of each tensor and the offset of its data in the file, both by name.

    Raises:
        CheckpointError: The file is truncated or its header is invalid.
    """
    path, size = file.path, file.state.size
    if size < 8:
        raise CheckpointError(
            f"{path} is truncated: it has {size} bytes, expected at least the 8 bytes of the header size"
        )
    length = int.from_bytes(file.read(0, 8), "little")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{path} is not a safetensors file: its header size is {length} bytes, expected at most {MAX_HEADER_BYTES}"
        )
    if length > size - 8:
        raise CheckpointError(f"{path} is truncated: its header size is {length} bytes, but only {size - 8} follow")
    text, data_bytes = file.read(8, length), size - 8 - length
    kinds, begins = _as_written(text, data_bytes) or _entry_by_entry(text, data_bytes, path)
    return kinds, dict(zip(begins, map((8 + length).__add__, begins.values()), strict=True))


def _as_written(text: bytes, data_bytes: int) -> Header | None:
    """Parse a valid header in the library's formatting; return None for any other."""
    if text.count(b",") > MAX_VALUES // 2:
        return None
    try:
        parts = _ENTRY.split(text.decode())
    except UnicodeDecodeError:
        return None
    # The text between the entries; if it is as expected, every match of the expression was a whole entry.
    before, between, after = parts[0], parts[_GROUPS:-1:_GROUPS], parts[-1].rstrip(" ")
    if len(parts) == 1 or after != "}" or between.count(",") < len(between) or not _is_start(before):
        return None
    names = parts[1::_GROUPS]
    stated = list(zip(parts[2::_GROUPS], parts[3::_GROUPS], strict=True))
    begins, ends = list(map(int, parts[4::_GROUPS])), list(map(int, parts[5::_GROUPS]))
    if begins[0] != 0 or begins[1:] != ends[:-1] or ends[-1] != data_bytes:
        return None
    found: dict[tuple[str, str], Kind] = {}
    for kind, count in {*zip(stated, map(operator.sub, ends, begins), strict=True)}:
        try:
            shape = json.loads(f"[{kind[1]}]")
        except ValueError:
            return None
        found[kind] = kind[0], tuple(shape)
        if count < 0 or not _are_sizes(shape) or _nbytes(found[kind]) not in (None, count):
            return None
    kinds = dict(zip(names, map(found.__getitem__, stated), strict=True))
    if len(kinds) < len(names) or _METADATA in kinds:
        return None
    return kinds, dict(zip(names, begins, strict=True))


def _is_start(text: str) -> bool:
    """Return whether ``text`` is valid before the first entry: a brace, and optional metadata."""
    if text == "{":
        return True
    if not (text.startswith(_BEFORE) and text.endswith(",")):
        return False
    try:
        parse_object(text[len(_BEFORE) : -1].encode(), _METADATA)
    except CheckpointError:
        return False
    return True


def _entry_by_entry(text: bytes, data_bytes: int, path: Path) -> Header:
    """Parse any header; raise CheckpointError for an invalid one."""
    header = parse_object(text, f"the header of {path}")
    header.pop(_METADATA, None)
    # A model has 100,000 tensors of a dozen kinds, so tensors of one kind share an object.
    kinds: dict[str, Kind] = {}
    known: dict[Kind, Kind] = {}
    extents: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        kind, begin, end = _parse(name, entry, path)
        kinds[name] = known.setdefault(kind, kind)
        extents.append((begin, end, name))
    extents.sort()
    _check_extents(extents, kinds, path, data_bytes)
    return kinds, {name: begin for begin, _, name in extents}


def _parse(name: str, entry: object, path: Path) -> tuple[Kind, int, int]:
    """Return the kind, begin and end of the tensor ``name``."""
    where = "the header's entry of"
    if not isinstance(entry, dict):
        raise CheckpointError(f"{path}: {where} {name[:200]!r} is a {type(entry).__name__}, expected an object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str):
        raise CheckpointError(f"{path}: {where} {name[:200]!r} has dtype {_short(dtype)}, expected a name")
    if not _are_sizes(shape):
        raise CheckpointError(f"{path}: {where} {name[:200]!r} has shape {_short(shape)}, expected a list of sizes")
    if not (_are_sizes(offsets) and len(offsets) == 2):
        raise CheckpointError(
            f"{path}: {where} {name[:200]!r} has data_offsets {_short(offsets)}, expected [begin, end]"
        )
    return (dtype, tuple(shape)), offsets[0], offsets[1]


def _check_extents(
    extents: Iterable[tuple[int, int, str]], kinds: Mapping[str, Kind], path: Path, data_bytes: int
) -> None:
    """Check that tensors have the size of their kind and fill the data without gaps."""
    end = 0
    sizes: dict[Kind, int | None] = {}
    for begin, stop, name in extents:
        kind = kinds[name]
        if begin != end or stop < begin:
            raise CheckpointError(
                f"{path}: {name!r} is stored at bytes {begin} to {stop} of the data, expected to start at {end}"
            )
        end = stop
        if kind not in sizes:
            sizes[kind] = _nbytes(kind)
        needed = sizes[kind]
        if needed is not None and needed != stop - begin:
            raise CheckpointError(
                f"{path}: {name!r} is {kind[0]} {list(kind[1])}, which is {needed} bytes; "
                f"the header gives it {stop - begin}"
            )
        if end > data_bytes:
            raise CheckpointError(
                f"{path} is truncated: {name!r} ends at byte {end} of the data, the file holds {data_bytes}"
            )
    if end != data_bytes:
        raise CheckpointError(f"{path} has {data_bytes} bytes of data, but its header describes {end}")


def _nbytes(kind: Kind) -> int | None:
    """Return the size of a tensor in bytes; None if torch does not have its dtype."""
    dtype = DTYPES.get(kind[0])
    return None if dtype is None else math.prod(kind[1]) * dtype.itemsize


def _are_sizes(values: Any) -> TypeGuard[list[int]]:
    """Return whether ``values`` is a list of integers from 0 to 2**63 - 1; bools are refused."""
    if not isinstance(values, list) or not {*map(type, values)} <= _INTEGERS:
        return False
    return not values or (min(values) >= 0 and max(values) < 1 << 63)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:100] + "…"
