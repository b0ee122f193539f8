"""Files are written through one function, which replaces regular files only."""

from __future__ import annotations

import ast
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from moe_core import ConfigError, registry
from moe_core._support.atomic_write import write_whole
from moe_core.cli._output import locked
from moe_core.cli._tensors import write_output
from moe_core.parallel.placement.placement import ExpertPlacement, save_placements

PACKAGES = Path(__file__).parents[1] / "packages"
#: methods and functions that write a file, by the last part of their names
WRITERS = {"write_text", "write_bytes", "save_file", "replace", "rename", "copyfile", "copy2", "mkfifo"}
#: writes files for all; makes a file of its own in memory
ALLOWED = {"atomic_write.py", "host_numbers.py"}


def writing_calls(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        last = name.rpartition(".")[2]
        opens = last == "open" and any(
            isinstance(given, ast.Constant) and isinstance(given.value, str) and set(given.value) & set("wax+")
            for given in [*node.args[name == "open" :], *(keyword.value for keyword in node.keywords)]
        )
        # texts have methods of these names
        writes = last in WRITERS and (last not in ("replace", "rename") or name.startswith("os."))
        if opens or writes or name == "torch.save":
            yield f"{node.lineno}: {name}"


def test_nothing_writes_a_file_by_itself() -> None:
    found = {
        str(path): calls
        for path in PACKAGES.glob("*/src/**/*.py")
        if path.name not in ALLOWED and "testing" not in path.parts and (calls := [*writing_calls(path.read_text())])
    }
    assert not found
    assert [*writing_calls("p.write_text('')\nopen('a', 'w')\np.open(mode='ab')\nos.replace(a, b)\nopen('w')")] == [
        "1: p.write_text",
        "2: open",
        "3: p.open",
        "4: os.replace",
    ]


def lock(path: Path) -> None:
    with locked(path.with_name(path.name.removeprefix(".").removesuffix(".lock"))):
        pass


FILES = ["config.json", "model.safetensors.index.json", "model.safetensors"]
QUICK = {"fp8": FILES[:2], "mxfp4": FILES[:2], "int8": [FILES[0], FILES[2]], "wna16": [FILES[0], FILES[2]]}
WRITE: list[tuple[str, Callable[[Path], None]]] = [
    ("o.json", lambda path: write_whole(path, b"content")),
    ("p.json", lambda path: save_placements(path, {0: ExpertPlacement.contiguous(4, 2)})),
    ("o.safetensors", lambda path: write_output(path, torch.zeros(2, 2))),
    (".p.json.lock", lock),
    *(
        (file, lambda path, scheme=scheme: registry().scheme(scheme).write_quickstart(path.parent))  # type: ignore[misc]
        for scheme, files in QUICK.items()
        for file in files
    ),
]


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize(("name", "write"), WRITE)
def test_pipes_and_folders_stay_what_they_are(
    name: str, write: Callable[[Path], None], linked: bool, tmp_path: Path
) -> None:
    for make, still in ((os.mkfifo, stat.S_ISFIFO), (os.mkdir, stat.S_ISDIR)):
        folder, there = tmp_path / make.__name__, tmp_path / f"{make.__name__}-target"
        folder.mkdir()
        path = folder / name
        make(there if linked else path)
        if linked:
            path.symlink_to(there)
        with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
            write(path)
        assert still(path.stat().st_mode)
        assert not [file for file in folder.iterdir() if file.name.endswith(".tmp")]
