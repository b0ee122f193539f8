"""Layers over several GPUs give what they give on one, with every all2all backend, eagerly and in CUDA graphs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import moe_core_gpu_ranks
import pytest
import torch
from moe_core import (
    kFp8Dynamic128Sym,
    kFp8DynamicTokenSym,
    kFp8Static128BlockSym,
    kFp8StaticChannelSym,
    kInt8DynamicTokenSym,
    kInt8StaticChannelSym,
    kMxfp4Static,
    registry,
)
from moe_core_layers import Kind
from moe_kit.ranks import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="tokens cross GPUs: needs two of them"),
]

#: of those that there are GPUs for
RANKS = [ranks for ranks in (2, 4) if ranks <= max(2, torch.cuda.device_count())]
KINDS = [
    Kind("fp8", kFp8Static128BlockSym, kFp8Dynamic128Sym),
    Kind("fp8", kFp8StaticChannelSym, kFp8DynamicTokenSym),
    Kind("int8", kInt8StaticChannelSym, kInt8DynamicTokenSym),
    Kind("mxfp4", kMxfp4Static, None),
]


@pytest.mark.parametrize("placed", ["contiguous", "replicated"])
@pytest.mark.parametrize("all2all", ["allgather_reducescatter", "alltoall", "low_latency"])
@pytest.mark.parametrize("ranks", RANKS)
def test_layers_over_gpus(ranks: int, all2all: str, placed: str) -> None:
    found = run_ranks(moe_core_gpu_ranks.layers, KINDS, [all2all], placed, ranks=ranks, backend="nccl", seconds=300)
    wrong = [message for rank in found for message in rank]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("ranks", RANKS)
def test_a_batch_invariant_layer_gives_a_token_the_same_bits_alone(ranks: int) -> None:
    backends = ["all_reduce", "allgather_reducescatter", "alltoall", "low_latency"]
    found = run_ranks(moe_core_gpu_ranks.invariant, KINDS[0], backends, ranks=ranks, backend="nccl", seconds=240)
    assert found == [[]] * ranks


@pytest.mark.parametrize("spread", ["--tp", "--ep"])
@pytest.mark.parametrize("ranks", RANKS)
def test_a_command_on_several_gpus(tmp_path: Path, ranks: int, spread: str) -> None:
    registry().scheme("fp8").write_quickstart(tmp_path)
    torchrun = f"-m torch.distributed.run --standalone --local-addr=127.0.0.1 --nproc-per-node={ranks}"
    command = (sys.executable, *torchrun.split(), "-m", "moe_core", "run", str(tmp_path), spread, str(ranks))
    ended = subprocess.run([*command, "--check", "--json"], capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr
    data = json.loads(ended.stdout)
    assert data["check"]["passed"]
    assert data["selection"]["device"] != "cpu"


@pytest.mark.parametrize("all2all", ["alltoall", "low_latency"])
@pytest.mark.parametrize("ranks", RANKS)
def test_a_rank_that_is_gone_is_named(ranks: int, all2all: str) -> None:
    found = run_ranks(moe_core_gpu_ranks.silent, all2all, KINDS[0], ranks=ranks, backend="nccl", seconds=120)
    for rank, (nan, message, seconds) in enumerate(found):
        if rank == moe_core_gpu_ranks.GONE:
            continue
        assert nan
        assert f"ranks [{moe_core_gpu_ranks.GONE}] " in message
        # two waits of one call: who has waited in vain for tokens waits for no results
        assert 1.5 < seconds < 4
