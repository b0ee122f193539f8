"""What a checkpoint calls things reaches a terminal as text, never as a command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from moe_core.cli import _machine
from moe_core_checkpoints import layer_tensors, write
from moe_kit.changes import write_index

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\n\r"
SHOWN = r"\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\n\r"


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A layer that runs, in a folder and under a prefix of such names."""
    # names with line ends are no experts' names
    evil = EVIL.replace("\n", "")
    tensors = {name.replace("model.", f"model{evil}."): tensor for name, tensor in layer_tensors().items()}
    return write(tmp_path / f"checkpoint{evil}", tensors)


def check(result: Any, code: int) -> None:
    assert result.code == code
    for text in (result.out, result.err):
        assert all(c.isprintable() or c == "\n" for c in text), ascii(text)
        assert "\n\n\n" not in text


BENCH = ("bench", "--tokens", "1", "--budget", "0.01", "--backend", "plain")


COMMANDS = [
    ("run", "--tokens", "2"),
    ("run", "--tokens", "2", "--check", "-v"),
    ("explain",),
    ("explain", "-v"),
    ("explain", "--all-layers"),
    BENCH,
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_commands_that_succeed(
    moe: Any, hostile: Path, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_machine, "measure_limits", lambda *_: _machine.Limits(1e9, 1e9, "float32"))
    result = moe(command[0], hostile, *command[1:])
    check(result, 0)
    assert SHOWN.replace(r"\n", "") in result.out
    result = moe(command[0], hostile, *command[1:], "--json")
    check(result, 0)
    assert str(hostile) in str(result.data.get("checkpoint", result.data.get("layer")))


BROKEN: dict[str, dict[str, Any]] = {
    "activation": {"hidden_act": EVIL},
    "quant_method": {"quantization_config": {"quant_method": EVIL}},
    "number": {"num_experts": EVIL},
    "dtype": {"num_experts_per_tok": [EVIL]},
}


@pytest.mark.parametrize("command", ["run", "explain", "bench"])
@pytest.mark.parametrize("broken", [*BROKEN, "tensor", "shard", "layer"])
def test_commands_that_fail(moe: Any, tmp_path: Path, command: str, broken: str) -> None:
    folder = write(tmp_path / EVIL, layer_tensors(), **BROKEN.get(broken, {}))
    if broken == "tensor":
        tensors = {f"{name}{EVIL}": tensor for name, tensor in layer_tensors().items()}
        write(folder, tensors)
    if broken == "shard":
        write_index(folder, {EVIL: f"{EVIL}.safetensors"})
    if broken == "layer":
        write(folder, {EVIL: layer_tensors()["model.layers.0.mlp.gate.weight"]})
    for option in ((), ("--json",)):
        result = moe(command, folder, *option)
        check(result, 2)
        assert result.out == ""
        assert SHOWN in result.err


def test_a_folder_that_is_kept(moe: Any, tmp_path: Path) -> None:
    folder = tmp_path / EVIL.replace("\n", "")
    result = moe("quickstart", "--keep", folder)
    check(result, 0)
    assert SHOWN.replace(r"\n", "") in result.out
    result = moe("quickstart", "--keep", folder)
    check(result, 2)
    assert SHOWN.replace(r"\n", "") in result.err
