"""run, bench and explain of a layer over several ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_core_rank_commands import run_commands
from moe_kit.ranks import run_ranks
from safetensors.torch import load_file

SHAPE = ("--scheme", "plain", "--shape", "8,2,64,256")
#: of a bench that shall not take long
LIMITS = ("--budget", "0.01", "--bandwidth", "1", "--rate", "1")


def test_explain_prepare_finalize(moe: Any) -> None:
    result = moe("explain", *SHAPE, "--device", "h200", "--tp", 2, "--ep", 4, "--tokens", 128)
    assert result.code == 0
    assert "8 ranks (tp 2, ep 4, dp 4), 128 tokens each: " in result.out
    assert "(local 2) k=2 K=64 N=128" in result.out
    data = moe("explain", *SHAPE, "--device", "h200", "--ep", 4, "--all2all", "alltoall", "--json").data
    found = {one["name"]: one for one in data["parallel"]["prepare_finalize"]}
    assert data["parallel"]["chosen"] == "alltoall"
    assert found["alltoall"]["backend"] == data["chosen"] == "gpu"
    assert found["allgather_reducescatter"]["cost"]["seconds"] > 0
    assert data["parallel"]["fastest"]


def test_explain_says_whether_times_are_known(moe: Any) -> None:
    """A device without figures of its links leaves columns empty; the report says what fills them."""
    text = moe("explain", *SHAPE, "--device", "h200", "--ep", 4).out
    assert "dispatch  combine  experts  latency  transfer  total  overlapped" in " ".join(text.split()).replace(
        " ", "  "
    )
    assert "figures of the machine" not in text
    without = moe("explain", *SHAPE, "--device", "sm100", "--ep", 4).out
    assert "times        none without figures of the machine: --machine a100, " in without


def test_explain_why_pairs_do_not_fit(moe: Any) -> None:
    everything = moe("explain", *SHAPE, "--device", "cpu", "--ep", 4, "-v")
    assert everything.code == 0
    for name in ("allgather_reducescatter", "alltoall"):
        pairs = everything.out.partition(f"\n  ok {name}\n")[2].split("\n")
        assert pairs[0] == "     no gpu [GpuToyExperts]: needs sm90 or newer, device is cpu"
        assert pairs[1] == "     ok plain [ToyExperts]"
    result = moe("explain", *SHAPE, "--device", "cpu", "--ep", 4, "--backend", "gpu")
    assert result.code == 2
    assert "4 ranks (tp 1, ep 4, dp 4), 4096 tokens each: no prepare/finalize fits" in result.out
    assert "no alltoall with gpu: needs sm90 or newer, device is cpu" in result.out
    assert result.err == "moe explain: no prepare/finalize fits; the report lists the reasons\n"


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("--tp", "0"), ("--tp must be a positive integer, got 0",)),
        (("--ep", "4", "--dp", "3"), ("dp_size is 3, expected 1 or 4",)),
        (("--ep", "4", "--all2all", "pigeon"), ("all2all_backend 'pigeon' is unknown",)),
        (("--all2all", "alltoall"), ("are for several ranks", "--ep")),
        (("--ep", "4", "--machine", "h2"), ("machine 'h2' is unknown", "h200")),
        (("--ep", "16"), ("8 experts are too few for ep_size 16",)),
        (("--ep", "4", "--activation-format", "batched"), ("--activation-format cannot",)),
    ],
)
def test_explain_refuses_ranks(moe: Any, arguments: tuple[str, ...], parts: tuple[str, ...]) -> None:
    moe.refuses("explain", *SHAPE, "--device", "h200", *arguments, parts=parts)


def test_as_many_processes_as_ranks(moe: Any, folder: Path) -> None:
    parts = ("--tp 2 and --ep 1 need 2 processes, got 1", "torchrun --nproc-per-node 2 -m moe_core run")
    moe.refuses("run", folder, "--tp", "2", parts=parts)


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_of_a_host_with_too_few_gpus_refuses(
    moe: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    for name, value in {"WORLD_SIZE": 2, "RANK": rank, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: pytest.fail("a GPU is taken"))
    parts = ("2 ranks on this host need a GPU each, found 1", "--device cpu", "--nproc-per-node 1")
    moe.refuses("run", folder, "--tp", "2", parts=parts)


def test_processes_that_cannot_meet_refuse(moe: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    parts = ("WORLD_SIZE 2, but no MASTER_ADDR, MASTER_PORT", "torchrun --nproc-per-node 2 -m")
    moe.refuses("run", folder, "--tp", "2", "--device", "cpu", parts=parts)
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "abc"}.items():
        monkeypatch.setenv(name, value)
    parts = ("MASTER_PORT is 'abc', expected an integer",)
    moe.refuses("run", folder, "--tp", "2", "--device", "cpu", parts=parts)


def test_run_and_bench_on_two_ranks(moe: Any, folder: Path, tmp_path: Path) -> None:
    outputs = {name: tmp_path / f"{name}.safetensors" for name in ("alone", "tp", "ep", "shared")}
    run = ("run", str(folder), "--tokens", "5", "--dtype", "fp32", "--json", "--output")
    alone = moe(*run, outputs["alone"]).data
    commands = [
        [*run, str(outputs["tp"]), "--tp", "2", "--check"],
        [*run, str(outputs["ep"]), "--ep", "2", "--all2all", "alltoall", "--check"],
        [
            "bench",
            *SHAPE,
            "--ep",
            "2",
            "--tokens",
            "1,3",
            *["--budget", "0.01", "--bandwidth", "1", "--rate", "1", "--json"],
        ],
        [*run, str(outputs["shared"]), "--ep", "2", "--dp", "1", "--all2all", "reduce_scatter", "--check"],
        ["run", str(folder), "--tp", "4"],
        ["run", str(folder), "--ep", "2", "--all2all", ""],
    ]
    first, second = run_ranks(run_commands, 2, commands, ranks=2)
    for code, out, err in second[:4]:
        assert (code, out, err) == (0, "", "")
    tensor, expert, bench, shared, refused, unnamed = first
    data = json.loads(tensor[1])
    assert data["check"]["passed"]
    assert (data["tokens"], data["shape"]) == (alone["tokens"], alone["shape"])
    assert data["parallel"]["chosen"] == "all_reduce"
    assert data["weight_bytes"] == alone["weight_bytes"] // 2
    data = json.loads(expert[1])
    assert data["check"]["passed"]
    assert data["parallel"]["chosen"] == "alltoall"
    data = json.loads(shared[1])
    assert data["check"]["passed"]
    assert (data["parallel"]["chosen"], data["shape"]) == ("reduce_scatter", alone["shape"])
    expected = load_file(outputs["alone"])["output"]
    for name in ("tp", "ep", "shared"):
        # float32 sums of fewer than 256 terms in all, in another order: sqrt(256) roundings of 2^-24
        assert float((load_file(outputs[name])["output"] - expected).norm() / expected.norm()) < 2**-20
    measured = json.loads(bench[1])
    assert measured["ranks"] == {"tp_size": 1, "ep_size": 2, "dp_size": 2}
    assert [(r["prepare_finalize"], r["tokens"]) for r in measured["results"]] == [
        (name, tokens) for name in ("allgather_reducescatter", "alltoall") for tokens in (1, 3)
    ]
    assert all(r["seconds"] > 0 for r in measured["results"])
    assert refused[0] == 2
    assert "--tp 4 and --ep 1 need 4 processes, got 2" in refused[2]
    assert unnamed[0] == 2
    assert "all2all_backend '' is unknown for tokens that cross ranks" in unnamed[2]
