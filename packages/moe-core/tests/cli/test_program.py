"""The program around the commands: signals, streams that are closed, full or in ASCII, unknown arguments."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from moe_core.cli.grammar import COMMANDS
from moe_core.cli.main import main
from moe_core.cli.terminal import console, signals

# a signal comes when `module` is imported
SIGNAL_AT_IMPORT = """
import os, sys
from moe_core.cli.main import main

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            os.kill(os.getpid(), {number})

sys.meta_path.insert(0, Interrupt())
sys.exit(main(["backends"]))
"""


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}
    )


@pytest.mark.parametrize(("number", "text"), [(2, "interrupted"), (15, "terminated"), (1, "the terminal has gone")])
def test_signals_during_imports(number: int, text: str) -> None:
    done = python(SIGNAL_AT_IMPORT.format(number=number))
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, "", f"moe: {text}\n")


@pytest.mark.parametrize(("number", "text"), [(2, "interrupted"), (15, "terminated")])
def test_a_signal_while_a_file_is_written(
    moe: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, text: str
) -> None:
    out = tmp_path / "o.safetensors"
    out.write_text("old")
    monkeypatch.setattr(os, "fsync", lambda _: os.kill(os.getpid(), number))
    before = signal.getsignal(number)
    result = moe("run", folder, "--output", out)
    assert (result.code, result.out, result.err) == (128 + number, "", f"moe: {text}\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "o.safetensors"]
    assert out.read_text() == "old"
    assert signal.getsignal(number) is before


def test_a_signal_that_some_code_swallows(moe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plug-in's import may take Ctrl-C for a fault of the plug-in."""
    from moe_core.cli.commands import doctor

    def swallow(_: object) -> int:
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            return 0
        return 0

    monkeypatch.setattr(doctor, "run", swallow)
    assert moe("doctor").code == 130


def test_ignored_signals_stay_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as under nohup
    try:
        with signals.ending_quietly():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--help"],
        ["--version"],
        ["run", "--help"],
        ["rnu"],
        ["run", "--tokens", "x"],
        ["run", "/nonexistent"],
        ["run", "/nonexistent", "--tokens", "-1"],
        ["run", "/", "--seed", "9" * 20],
        ["run", "/", "--input", "/nonexistent"],
        ["explain"],
        ["explain", "/nonexistent"],
        ["explain", "owner/name"],
        ["explain", "--scheme", "fp8", "--shape", "1,2"],
        ["explain", "--scheme", "fp8", "--shape", "8,2,64,32", "--layer", "1"],
        ["explain", "/", "--all-layers", "--layer", "1"],
        ["explain", "/", "--device", "h100,h100"],
        ["explain", "/", "--machine", "h100"],
        ["bench", "--tokens", "0"],
        ["bench", "--rate", "0"],
        ["bench", "/nonexistent"],
        ["tune", "--budget", "-1"],
        ["tune", "/nonexistent"],
        ["quickstart", "--tokens", "0"],
    ],
)
def test_arguments_import_nothing_heavy(arguments: list[str]) -> None:
    code = "import sys\nfrom moe_core.cli.main import main\n"
    code += f"try:\n    main({arguments})\nfinally:\n    print(*sys.modules)"
    loaded = python(code).stdout.splitlines()[-1].split()
    assert not {"torch", "numpy"} & set(loaded)


@pytest.mark.parametrize("terminal", [True, False])
def test_a_line_while_torch_loads(terminal: bool) -> None:
    """On a terminal, and gone when torch is there."""
    code = "import sys\nfrom moe_core.cli.main import main\n"
    code += f"sys.stderr.isatty = lambda: {terminal}\nmain(['backends', '--json'])"
    done = python(code, PYTHONIOENCODING="utf-8", RANK="0")
    assert done.returncode == 0
    assert done.stderr.startswith("loading torch …\n\x1b[2K") if terminal else done.stderr == ""


# ------------------------------------------------------------------ streams


def shell(command: str) -> subprocess.CompletedProcess[str]:
    program = f'moe() {{ "{sys.executable}" -m moe_core "$@"; }}; {command}'
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(["bash", "-c", program], capture_output=True, text=True, env=environment)


def test_stdout_that_cannot_be_written() -> None:
    closed, full = shell("moe backends --json >&-"), shell("moe backends --json >/dev/full")
    assert (closed.returncode, closed.stderr) == (2, "moe backends: stdout: closed\n")
    assert (full.returncode, full.stderr) == (2, "moe backends: stdout: No space left on device\n")


def test_ascii_output() -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    before, sys.stdout = sys.stdout, file
    try:
        console.prepare()
        console.say("12 µs × 3 … ± 4 → \udcff é")
    finally:
        sys.stdout = before
    assert file.buffer.getvalue() == b"12 us x 3 ... +- 4 -> \\udcff \\xe9\n"


def test_long_lines_are_cut(capsys: pytest.CaptureFixture[str]) -> None:
    console.complain("short\n" + "x" * 10**6)
    lines = capsys.readouterr().err.split("\n")
    assert lines[0] == "short"
    assert len(lines[1]) < 1100
    assert "(999000 more characters)" in lines[1]


# ------------------------------------------------------------------ arguments

REFUSED = [
    (["rnu"], "moe: unknown command 'rnu'; did you mean 'run'? (moe --help)"),
    (["qwertz"], "moe: unknown command 'qwertz' (moe --help)"),
    (["--json"], "moe: the following arguments are required: COMMAND (moe --help)"),
    (["run"], "moe run: the following arguments are required: DIR (moe run --help)"),
    (["run", "d", "--tokns", "3"], "moe run: unknown option '--tokns'; did you mean '--tokens'? (moe run --help)"),
    (["doctor", "x"], "moe doctor: unexpected argument 'x' (moe doctor --help)"),
    (
        ["run", "d", "--tokens", "9" * 5000],
        f"moe run: argument --tokens: expected an integer, got '{'9' * 60}…' (moe run --help)",
    ),
    (["run", ""], "moe run: argument DIR: expected a path, got '' (moe run --help)"),
    (["run", "d", "--input", ""], "moe run: argument --input: expected a path, got '' (moe run --help)"),
    (["run", "d", "--output="], "moe run: argument --output: expected a path, got '' (moe run --help)"),
    (["bench", "--budget", "soon"], "moe bench: argument --budget: expected a number, got 'soon' (moe bench --help)"),
    (
        ["explain", "--dtype", "bfloat"],
        (
            "moe explain: argument --dtype: expected bf16, fp16, fp32, bfloat16, float16 or float32, got 'bfloat'; "
            "did you mean 'bfloat16'? (moe explain --help)"
        ),
    ),
]


@pytest.mark.parametrize(("arguments", "line"), REFUSED)
def test_refused_arguments_are_one_line(arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert capsys.readouterr() == ("", f"{line}\n")


@pytest.mark.parametrize("width", [80, 120])
def test_help_fits_the_terminal(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    for arguments in (["--help"], *([command, "--help"] for command in COMMANDS)):
        with pytest.raises(SystemExit):
            main(arguments)
        out = capsys.readouterr().out
        assert max(map(len, out.splitlines())) <= width
        # no heading without a body
        assert all(not block.endswith(":") for block in out.strip().split("\n\n"))
        assert "positional arguments:\n  COMMAND" not in out
