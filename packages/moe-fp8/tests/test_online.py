"""FP8 and MXFP8 made of 16-bit experts, at load, and on a GPU."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import moe_fp8
import pytest
import torch
from moe_core import FusedMoEConfig, MoEWeights, load_layer
from moe_core.cli import _machine
from moe_core.cli.main import main
from moe_fp8.online import ONLINE
from moe_kit.online import OnlineTests

NAMES = [online.name for online in ONLINE]


class TestFp8(OnlineTests):
    scheme = "fp8"


def test_the_other_commands(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_machine, "measure_limits", lambda *_: _machine.Limits(1e10, 1e10, "float32"))
    folder = TestFp8.checkpoint(tmp_path)
    assert main(["explain", str(folder), "--quantize", "fp8_per_block", "--device", "sm90", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert "kFp8Static128BlockSym" in str(report)
    shape = ["--shape", "8,2,128,64"]
    assert main(["explain", *shape, "--quantize", "mxfp8_w8a16", "--device", "cpu"]) == 0
    assert re.search(r"weights +kMxfp8Static \(", capsys.readouterr().out)
    bench = ["bench", str(folder), "--quantize", "mxfp8", "--device", "cpu", "--tokens", "1", "--budget", "0.01"]
    assert main([*bench, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["scheme"] == "fp8"
    for arguments, message in (
        (["run", str(folder)], "they can be quantized at load: quantize (--quantize) is one of"),
        (["run", str(folder), "--quantize", "fp9"], "quantize='fp9' is unknown; installed: "),
        (
            ["explain", *shape, "--quantize", "mxfp8", "--weight-key", "kMxfp8Static"],
            "implies the scheme (fp8) and",
        ),
        (["explain", *shape, "--quantize", "mxfp8", "--scheme", "int8"], "implies the scheme (fp8) and"),
    ):
        assert main(arguments) == 2
        assert message in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES[:4])
def test_on_a_gpu_the_result_alone_takes_memory(name: str) -> None:
    config = FusedMoEConfig(num_experts=16, top_k=2, hidden_size=2048, intermediate_size=1024)
    w13 = torch.randn(16, 2048, 2048, device="cuda").bfloat16()
    w2 = torch.randn(16, 2048, 1024, device="cuda").bfloat16()
    weights = MoEWeights(weight_key=None, activation_key=None, w13=w13, w2=w2)
    moe_fp8.quantize_moe_weights(weights, name)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = moe_fp8.quantize_moe_weights(weights, name)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 1.01 * found.nbytes
    found.validate(config, values=True)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_loading_onto_a_gpu(name: str, tmp_path: Path) -> None:
    """The bits that the CPU gives."""
    folder = TestFp8.checkpoint(tmp_path)
    there = load_layer(folder, quantize=name, device="cuda", backend="torch").weights
    here = load_layer(folder, quantize=name, device="cpu", backend="torch").weights
    found, want = dict(there.tensors()), dict(here.tensors())
    assert found.keys() == want.keys()
    for label, tensor in want.items():
        assert torch.equal(found[label].cpu().view(torch.uint8), tensor.view(torch.uint8)), label
