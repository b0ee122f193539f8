"""``moe run --check`` over several ranks: the reference is of what the ranks compute, not of the layer on one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from moe_core_rank_commands import run_installed
from moe_kit.commands import Moe
from moe_kit.ranks import run_ranks

#: a token's h has other scales where a rank has some of its columns (INT8), or blocks of 64 instead of 128 (FP8)
RANKS = {"int8": ("--tp", "2", "--ep", "2"), "fp8": ("--tp", "4", "--ep", "1")}


def test_what_ranks_quantize_otherwise_is_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commands = []
    for scheme, ranks in RANKS.items():
        folder = tmp_path / scheme
        assert Moe(capsys)("quickstart", "--scheme", scheme, "--device", "cpu", "--keep", folder).code == 0
        options = ("--tokens", "5", "--dtype", "fp32", "--device", "cpu", "--check", "--json")
        commands.append(["run", str(folder), *options, *ranks])
    first = run_ranks(run_installed, 4, commands, seconds=90)[0]
    for code, out, err in first:
        assert (code, err) == (0, "")
        # float32 sums of 512 terms and fewer; one value that is quantized to the next number changes 2^-9 of the output
        assert json.loads(out)["check"]["error"] < 2**-10
