"""``moe`` on a GPU: the layer runs there by default, agrees with the reference, and is timed as CUDA graphs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from moe_core.checkpoint import Checkpoint, read_layer
from moe_core.cli.main import main
from moe_core.reference.tolerance import expected_output
from moe_fp8.quickstart import MODEL
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not torch.cuda.is_available():
        pytest.fail("these tests need a GPU")
    path = tmp_path_factory.mktemp("checkpoint")
    MODEL.write(path)
    return path


def test_quickstart(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quickstart", "--scheme", "fp8", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["selection"]["device"] != "cpu"
    assert data["passed"]


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("tokens", [1, 70])
def test_input_to_output(folder: Path, tmp_path: Path, backend: str, tokens: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, MODEL.HIDDEN, generator=generator).bfloat16()
    weights, ids = torch.rand(tokens, MODEL.EXPERTS, generator=generator).topk(MODEL.TOP_K, dim=1)
    save_file({"hidden_states": x, "topk_weights": weights, "topk_ids": ids}, tmp_path / "in.safetensors")
    files = ["--input", str(tmp_path / "in.safetensors"), "--output", str(tmp_path / "o.safetensors")]
    assert main(["run", str(folder), "--backend", backend, *files]) == 0
    source = read_layer(Checkpoint.open(folder))
    expected = expected_output(x, source.weights(), source.config, topk_weights=weights, topk_ids=ids)
    expected.compare(load_file(tmp_path / "o.safetensors")["output"], "moe run on the GPU")


def test_broken_values_are_found_on_the_gpu(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    shard = tmp_path / "model-00001-of-00002.safetensors"
    tensors = load_file(shard)
    name = "model.layers.0.mlp.experts.3.up_proj.weight"
    tensors[name].view(torch.uint8)[1, 2] = 0x7F
    save_file(tensors, shard)
    assert main(["run", str(tmp_path), "--device", "cuda"]) == 2
    assert f"{name} has 1 NaN value" in capsys.readouterr().err


def test_bench(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for layer in ([str(folder)], ["--scheme", "fp8", "--shape", "16,4,1024,512"]):
        assert main(["bench", *layer, "--tokens", "1,64", "--budget", "0.05", "--json"]) == 0
        data = json.loads(capsys.readouterr().out)
        assert data["bandwidth_bytes_per_second"] > 1e11
        assert data["operations_per_second"] > 1e13
        found = {(result["backend"], result["tokens"]): result for result in data["results"]}
        assert ("torch", 64) in found
        if ("triton", 1) in found:
            assert found["triton", 1]["cuda_graph"]
        # less than the floor would mean that something was not measured
        assert all(result["time_over_floor"] > 0.9 for result in data["results"])


def test_tune(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Configurations are compiled, checked and timed; a layer runs by what was found."""
    profile = tmp_path / "p.json"
    layer = ["--scheme", "fp8", "--shape", "16,4,1024,512"]
    arguments = [*layer, "--tokens", "1,64", "--budget", "4", "--backend", "triton", "--output", str(profile)]
    assert main(["tune", *arguments, "--json"]) == 0
    ranges = json.loads(capsys.readouterr().out)["layers"][0]["ranges"]
    assert [(one["first"], one["last"]) for one in ranges] == [(1, 1), (2, 64)]
    assert all(0 < one["best_us"] <= one["default_us"] < 10_000 for one in ranges)
    timed = ["--tokens", "1,64", "--budget", "0.05", "--backend", "triton", "--tuning", str(profile), "--json"]
    assert main(["bench", *layer, *timed]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["tuning"][0]["used"]
