"""``moe`` on block FP8 checkpoints: the outputs of the tools' own files, and every kind of bad input."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_core import fused_moe_reference
from moe_core.checkpoint import Checkpoint, read_layer
from moe_core.cli import main
from moe_core.registry import registry
from moe_core.testing.tolerance import expected_output
from moe_fp8.quickstart import CONFIG, EXPERTS, HIDDEN, INTERMEDIATE, TOP_K, write_checkpoint
from safetensors.torch import load_file, save_file
from torch import Tensor

PREFIX = "model.layers.0.mlp.experts"
INDEX = "model.safetensors.index.json"
SHARD = "model-00001-of-00002.safetensors"


pytestmark = pytest.mark.usefixtures("no_gpu")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original")
    write_checkpoint(folder)
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Iterator[Path]:
    """A checkpoint of its own; files are links until a test replaces one."""
    copy = tmp_path / "checkpoint"
    copy.mkdir()
    for file in original.iterdir():
        os.link(file, copy / file.name)
    yield copy
    assert not (tmp_path / "out.safetensors").exists()


def refuses(capsys: pytest.CaptureFixture[str], folder: Path, *parts: str, arguments: tuple[str, ...] = ()) -> None:
    """``moe run`` ends with 2, one paragraph with all ``parts``, and nothing written."""
    before = sorted(folder.parent.rglob("*"))
    capsys.readouterr()
    code = main(["run", str(folder), "--output", str(folder.parent / "out.safetensors"), *arguments])
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.startswith("moe run: ")
    assert "Traceback" not in err
    for part in parts:
        assert part in err
    assert sorted(folder.parent.rglob("*")) == before


def rewrite(folder: Path, name: str, tensor: Tensor | None) -> None:
    """Replace a tensor of the first layer, or remove it (from the index too)."""
    tensors = load_file(folder / SHARD)
    index = json.loads((folder / INDEX).read_text())
    assert name in tensors
    if tensor is None:
        del tensors[name], index["weight_map"][name]
    else:
        tensors[name] = tensor
    for file in (SHARD, INDEX):
        (folder / file).unlink()
    save_file(tensors, folder / SHARD)
    (folder / INDEX).write_text(json.dumps(index))


def reconfigure(folder: Path, **changes: Any) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))


# ------------------------------------------------------------------ outputs


def relative(found: Tensor, reference: Tensor) -> float:
    return float((found.double() - reference.double()).norm() / reference.double().norm())


@pytest.mark.parametrize("layer", [0, 1])
def test_input_to_output(original: Path, tmp_path: Path, layer: int) -> None:
    generator = torch.Generator().manual_seed(layer)
    x = torch.randn(7, HIDDEN, generator=generator).bfloat16().float()
    weights, ids = torch.rand(7, EXPERTS, generator=generator).topk(TOP_K, dim=1)
    save_file({"hidden_states": x, "topk_weights": weights, "topk_ids": ids}, tmp_path / "in.safetensors")
    files = ["--input", str(tmp_path / "in.safetensors"), "--output", str(tmp_path / "o.safetensors")]
    source = read_layer(Checkpoint.open(original), layer)
    canonical = source.weights()
    assert canonical.w13.shape == (EXPERTS, 2 * INTERMEDIATE, HIDDEN)

    assert main(["run", str(original), "--layer", str(layer), "--dtype", "fp32", *files]) == 0
    exact = fused_moe_reference(x, canonical, source.config, topk_weights=weights, topk_ids=ids)
    # its quantiser sees float64 sums, the layer's float32 ones: a code in a few thousand differs by one step
    assert relative(load_file(tmp_path / "o.safetensors")["output"], exact) < 2e-3

    assert main(["run", str(original), "--layer", str(layer), *files]) == 0
    expected = expected_output(x.bfloat16(), canonical, source.config, topk_weights=weights, topk_ids=ids)
    expected.compare(load_file(tmp_path / "o.safetensors")["output"], "moe run")


def test_quickstart(capsys: pytest.CaptureFixture[str]) -> None:
    start = time.perf_counter()
    assert main(["quickstart", "--scheme", "fp8"]) == 0
    assert time.perf_counter() - start < 20
    out = capsys.readouterr().out
    assert "within the tolerance" in out
    assert "on cpu: torch" in out


def test_explain_for_a_gpu_that_is_not_here(original: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(original), "--device", "sm90", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["chosen"], data["weight_key"]) == ("triton", "kFp8Static128BlockSym")
    assert main(["explain", "--scheme", "fp8", "--shape", "256,8,7168,2048", "--device", "sm90", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["weight_key"] == "kFp8Static128BlockSym"


def test_looking_imports_no_kernels() -> None:
    program = (
        "import sys, moe_core.cli as cli\n"
        "for arguments in (['backends'], ['doctor']):\n"
        "    cli.main(arguments)\n"
        "print('triton' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_bench(original: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from moe_core.cli import _machine

    monkeypatch.setattr(_machine, "measure_limits", lambda *_: _machine.Limits(1e10, 1e10, "float32"))
    shape = ["--scheme", "fp8", "--shape", "8,2,256,128"]
    for layer in (shape, [str(original)]):
        assert main(["bench", *layer, "--tokens", "1,3", "--budget", "0.01", "--json"]) == 0
        data = json.loads(capsys.readouterr().out)
        assert [(r["backend"], r["tokens"]) for r in data["results"]] == [("torch", 1), ("torch", 3)]


# ------------------------------------------------------------------ bad input


def test_missing_shard(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / SHARD).unlink()
    refuses(capsys, folder, INDEX, f"names the shard {SHARD}", "missing")


def test_truncated_shard(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = (folder / SHARD).read_bytes()
    (folder / SHARD).unlink()
    for size in (0, 4, 1000, len(content) - 1):
        (folder / SHARD).write_bytes(content[:size])
        refuses(capsys, folder, f"{SHARD} is truncated")


def test_header_of_absurd_size(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = (folder / SHARD).read_bytes()
    (folder / SHARD).unlink()
    (folder / SHARD).write_bytes((1 << 62).to_bytes(8, "little") + content[8:])
    refuses(capsys, folder, SHARD, f"its header claims {1 << 62} bytes")


def test_index_entry_outside_the_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.link(folder / SHARD, folder.parent / "secret.safetensors")
    index = json.loads((folder / INDEX).read_text())
    name = f"{PREFIX}.0.gate_proj.weight"
    index["weight_map"][name] = "../secret.safetensors"
    (folder / INDEX).unlink()
    (folder / INDEX).write_text(json.dumps(index))
    refuses(capsys, folder, name, "'../secret.safetensors'", "outside the folder")


def test_pickles(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file in [*folder.glob("*.safetensors"), folder / INDEX]:
        file.unlink()
    torch.save({}, folder / "pytorch_model.bin")
    refuses(capsys, folder, "pytorch_model.bin", "never read", "safe_serialization=True")


def test_no_checkpoint(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "config.json").unlink()
    refuses(capsys, folder, "is no checkpoint", "no config.json")
    refuses(capsys, folder / "nowhere", "does not exist")
    refuses(capsys, folder / SHARD, "is a file")


def test_scale_of_the_wrong_shape(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for expert in range(EXPERTS):
        rewrite(folder, f"{PREFIX}.{expert}.down_proj.weight_scale_inv", torch.ones(2, 4))
    name = f"{PREFIX}.0.down_proj.weight_scale_inv"
    refuses(capsys, folder, f"{name} has shape [2, 4], expected [4, 2]")


def test_one_scale_of_the_wrong_shape(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = f"{PREFIX}.7.down_proj.weight_scale_inv"
    rewrite(folder, name, torch.ones(4, 3))
    refuses(capsys, folder, f"{name} is F32 [4, 3], expected F32 [4, 2]")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -2.0])
def test_scale_values(folder: Path, capsys: pytest.CaptureFixture[str], value: float) -> None:
    name = f"{PREFIX}.3.up_proj.weight_scale_inv"
    scale = load_file(folder / SHARD)[name]
    scale[1, 2] = value
    rewrite(folder, name, scale)
    refuses(capsys, folder, f"{name} has 1 NaN, Inf or negative value of 8, first at [1, 2]")


def test_missing_tensor(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = f"{PREFIX}.5.gate_proj.weight"
    rewrite(folder, name, None)
    refuses(capsys, folder, f"{name} is missing")


def test_index_names_what_the_shard_has_not(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = f"{PREFIX}.5.gate_proj.weight"
    tensors = load_file(folder / SHARD)
    del tensors[name]
    (folder / SHARD).unlink()
    save_file(tensors, folder / SHARD)
    refuses(capsys, folder, f"says that {SHARD} holds '{name}', but it does not")


def test_unknown_quant_method(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reconfigure(folder, quantization_config={"quant_method": "fancy"})
    refuses(capsys, folder, "quant_method 'fancy'", PREFIX, "is not read by any installed format: expected one of")


@pytest.fixture
def fp8_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installation that has no other scheme."""
    points = [point for point in importlib.metadata.entry_points(group="moe_core.schemes") if point.name == "fp8"]
    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda *, group: points if group == "moe_core.schemes" else []
    )
    registry.cache_clear()
    yield
    registry.cache_clear()


@pytest.mark.usefixtures("fp8_alone")
def test_scheme_that_is_not_installed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reconfigure(folder, quantization_config={"quant_method": "mxfp4"})
    refuses(capsys, folder, "quant_method 'mxfp4' is read by the scheme mxfp4", "pip install", "moe-mxfp4")


def test_backend_that_cannot_run_here(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--backend", "triton", "--device", "cpu")
    refuses(capsys, folder, "'triton' does not fit, and is never replaced", "device is cpu", arguments=arguments)


def test_every_reason_against_a_backend(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reconfigure(folder, quantization_config={**CONFIG["quantization_config"], "weight_block_size": [128, 256]})
    for expert in range(EXPERTS):
        for name, shape in (("gate_proj", (2, 2)), ("up_proj", (2, 2)), ("down_proj", (4, 1))):
            rewrite(folder, f"{PREFIX}.{expert}.{name}.weight_scale_inv", torch.ones(shape))
    refuses(
        capsys,
        folder,
        "no backend fits on cpu: torch does not read weights quantised as kFp8Static128BlockSym[128x256]",
    )
    every = ("no triton", "no torch", "device is cpu; does not read weights")
    refuses(capsys, folder, *every, arguments=("-v",))


@pytest.mark.parametrize("value", [-1, EXPERTS, 2**40])
def test_ids_out_of_range(folder: Path, capsys: pytest.CaptureFixture[str], value: int) -> None:
    ids = torch.zeros(3, TOP_K, dtype=torch.int64)
    ids[1, 2] = value
    given = {"hidden_states": torch.zeros(3, HIDDEN), "topk_weights": torch.ones(3, TOP_K), "topk_ids": ids}
    file = folder.parent / "in.safetensors"
    save_file(given, file)
    refuses(capsys, folder, f"topk_ids[1, 2] is {value}, expected 0..15", arguments=("--input", str(file)))


def test_hidden_states_of_another_size(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = folder.parent / "in.safetensors"
    save_file({"hidden_states": torch.zeros(3, HIDDEN + 1), "router_logits": torch.zeros(3, EXPERTS)}, file)
    refuses(capsys, folder, "hidden_states has shape [3, 513], expected [M, 512]", arguments=("--input", str(file)))


def test_more_experts_per_token_than_experts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reconfigure(folder, num_experts_per_tok=EXPERTS + 1)
    refuses(capsys, folder, "config.json: num_experts_per_tok is 17, more than the 16 experts of num_experts")


def test_hidden_size_that_does_not_match(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reconfigure(folder, hidden_size=HIDDEN * 2)
    refuses(capsys, folder, "expected [16, 1024]", "config.json")
    rewrite(folder, "model.layers.0.mlp.gate.weight", None)
    refuses(capsys, folder, f"{PREFIX}.0.gate_proj.weight has shape [256, 512], expected [256, 1024]", "config.json")


def test_layers_that_have_no_moe(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refuses(capsys, folder, "layer 9 has no MoE; layers that have: 0-1", arguments=("--layer", "9"))
    for file in (SHARD, INDEX, "model-00002-of-00002.safetensors"):
        (folder / file).unlink()
    save_file({"model.layers.0.mlp.gate_proj.weight": torch.zeros(2, 2)}, folder / "model.safetensors")
    refuses(capsys, folder, "no layer has MoE experts")


def test_expert_that_is_missing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reconfigure(folder, num_experts=EXPERTS + 1)
    refuses(capsys, folder, f"num_experts is 17, but {PREFIX} holds 16 experts: expert 16 is missing")
