from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from moe_core import CheckpointError
from moe_core._support.open_file import OpenFile
from moe_core.checkpoint.files import safetensors_header
from moe_core.checkpoint.files.safetensors_header import Header, read_header
from moe_kit.changes import raw_file
from safetensors.torch import save

TENSORS = {
    "a.0.weight": torch.zeros(4, 6, dtype=torch.int32),
    "a.1.weight": torch.zeros(4, 6, dtype=torch.int32),
    "a.0.scale": torch.zeros(3, dtype=torch.bfloat16),
    "ünnamed": torch.tensor(1.0),
    "empty": torch.zeros(0, 5),
}


def parts(metadata: dict[str, str] | None = None) -> tuple[bytes, bytes]:
    """Header and data of a file as the library writes it."""
    content = save(TENSORS, metadata=metadata)
    end = 8 + int.from_bytes(content[:8], "little")
    return content[8:end], content[end:]


def both(text: bytes, data_bytes: int) -> tuple[Header | None, Header | None]:
    """What the quick way and the thorough one make of a header; None: left to the other, refused."""
    try:
        found = safetensors_header._entry_by_entry(text, data_bytes, Path("file"))
    except CheckpointError:
        found = None
    return safetensors_header._as_written(text, data_bytes), found


@pytest.mark.parametrize("metadata", [None, {"format": "pt", 'a "': '{"b":{"dtype":"I8","shape":[],'}])
def test_what_the_library_writes_is_not_parsed_entry_by_entry(metadata: dict[str, str] | None) -> None:
    text, data = parts(metadata)
    quick, thorough = both(text, len(data))
    assert quick is not None
    assert quick == thorough
    kinds = quick[0]
    assert kinds["a.0.weight"] is kinds["a.1.weight"]
    assert kinds["ünnamed"] == ("F32", ())


def test_offsets_are_those_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(save(TENSORS))
    _, begins = read_header(OpenFile(path))
    text, data = parts()
    assert begins == {name: 8 + len(text) + entry["data_offsets"][0] for name, entry in json.loads(text).items()}
    assert max(begins.values()) <= 8 + len(text) + len(data)


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}], ids=["bare", "with metadata"])
def test_the_quick_way_takes_nothing_else(metadata: dict[str, str] | None) -> None:
    """Whatever was changed in a header: it says what the thorough way says, or leaves it to that."""
    text, data = parts(metadata)
    pieces = [
        b"",
        b" ",
        b",",
        b'"',
        b"0",
        b"1",
        b"-",
        b"\\",
        b"{",
        b"}",
        b"[",
        b"]",
        b":",
        b"\n",
        b"\xff",
        b".0",
        b"e1",
    ]
    random_ = random.Random(0)
    taken = 0
    for _ in range(3000):
        changed = bytearray(text)
        for _ in range(random_.randint(1, 2)):
            at, count = random_.randrange(len(changed)), random_.randint(0, 2)
            if random_.random() < 0.3:
                other = random_.randrange(len(text))
                changed[at : at + count] = text[other : other + random_.randint(1, 40)]
            else:
                changed[at : at + count] = random_.choice(pieces)
        quick, thorough = both(bytes(changed), len(data))
        assert quick is None or quick == thorough, bytes(changed)
        taken += quick is not None
    assert taken


@pytest.mark.parametrize(
    "text",
    [
        b'{"a":{"dtype":"I8","shape":[4],"data_offsets":[0,4]},"a":{"dtype":"I8","shape":[4],"data_offsets":[4,8]}}',
        b'{"a":{"dtype":"I8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"I8","shape":[4],"data_offsets":[5,9]}}',
        b'{"a":{"dtype":"I8","shape":[5],"data_offsets":[0,4]},"b":{"dtype":"I8","shape":[4],"data_offsets":[4,8]}}',
        b'{"a":{"dtype":"XX","shape":[4],"data_offsets":[0,9]},"b":{"dtype":"XX","shape":[4],"data_offsets":[9,8]}}',
        b'{"a":{"dtype":"I8","shape":[08],"data_offsets":[0,8]}}',
        b'{"a":{"dtype":"I8","shape":[8,],"data_offsets":[0,8]}}',
        b'{"a":{"dtype":"I8","shape":[8],"data_offsets":[00,8]}}',
        b'{"a":{"dtype":"I8","shape":[8],"data_offsets":[0,8]},}',
        b'{"a":{"dtype":"I8","shape":[8],"data_offsets":[0,8]}}}',
        b'{"__metadata__":{"x":"1","x":"2"},"a":{"dtype":"I8","shape":[8],"data_offsets":[0,8]}}',
        b'{"__metadata__":{"a":{"dtype":"I8","shape":[8],"data_offsets":[0,8]}}',
        b'{"a":{"dtype":"I8","shape":[8],"data_offsets":[0,9]}}',
        b'{"a":{"dtype":"I8","shape":[9223372036854775808,0],"data_offsets":[0,0]}}',
    ],
)
def test_faults_are_left_to_the_way_that_names_them(text: bytes, tmp_path: Path) -> None:
    data = bytes(8 * (b"[0,0]" not in text))
    quick, thorough = both(text, len(data))
    assert quick is None
    assert thorough is None
    (tmp_path / "file").write_bytes(raw_file(text, data))
    with pytest.raises(CheckpointError, match="file"):
        read_header(OpenFile(tmp_path / "file"))
