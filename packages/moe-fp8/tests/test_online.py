"""FP8 and MXFP8 made of 16-bit experts: from the command line, from tensors, and on a GPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import moe_fp8
import pytest
import torch
from moe_core import ConfigError, FusedMoEConfig, FusedMoELayer, MoEWeights, TensorError, load_layer
from moe_core.checkpoint import Checkpoint, read_layer
from moe_core.cli import main
from moe_core.quantization import dequantize_weight, quantize_moe_weights
from moe_core.testing.tolerance import expected_output
from moe_fp8.online import ONLINE
from moe_fp8.quickstart import CONFIG, EXPERTS, HIDDEN, INTERMEDIATE, TOP_K
from safetensors.torch import load_file, save_file
from torch import Tensor

BLOCK = "model.layers.0.mlp"
NAMES = [online.name for online in ONLINE]


def tensors(dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """The experts of a layer, stacked as transformers stores them, and its router."""
    generator = torch.Generator().manual_seed(0)

    def make(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) * shape[-1] ** -0.5).to(dtype)

    return {
        f"{BLOCK}.experts.gate_up_proj": make(EXPERTS, 2 * INTERMEDIATE, HIDDEN),
        f"{BLOCK}.experts.down_proj": make(EXPERTS, HIDDEN, INTERMEDIATE),
        f"{BLOCK}.gate.weight": make(EXPERTS, HIDDEN),
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint"
    path.mkdir()
    config = {key: value for key, value in CONFIG.items() if key != "quantization_config"}
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors(), path / "model.safetensors")
    return path


def sixteen_bit() -> MoEWeights:
    made = tensors()
    return MoEWeights(
        weight_key=None,
        activation_key=None,
        w13=made[f"{BLOCK}.experts.gate_up_proj"],
        w2=made[f"{BLOCK}.experts.down_proj"],
    )


@pytest.mark.parametrize("name", NAMES)
def test_moe_run_quantises_what_it_loads(name: str, folder: Path, tmp_path: Path, capsys: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(9, HIDDEN, generator=generator).bfloat16()
    topk_weights, topk_ids = torch.rand(9, EXPERTS, generator=generator).topk(TOP_K)
    inputs = {"hidden_states": x, "topk_weights": topk_weights, "topk_ids": topk_ids}
    save_file(inputs, tmp_path / "in.safetensors")
    out = tmp_path / "out.safetensors"
    arguments = ["--quantize", name, "--device", "cpu", "--input", str(tmp_path / "in.safetensors")]
    assert main(["run", str(folder), *arguments, "--output", str(out), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["scheme"] == "fp8"
    assert name in report["format"]
    source = read_layer(Checkpoint.open(folder), quantize=name)
    weights = moe_fp8.quantize_moe_weights(sixteen_bit(), name)
    assert (source.weight_key, source.activation_key) == (weights.weight_key, weights.activation_key)
    expected = expected_output(x, weights, source.config, topk_weights=topk_weights, topk_ids=topk_ids)
    expected.compare(load_file(out)["output"], name)


@pytest.mark.parametrize("name", NAMES)
def test_the_quantised_weights(name: str) -> None:
    """The rules of the reference, for both matrices, with biases and without a gate."""
    online = next(item for item in ONLINE if item.name == name)
    plain = sixteen_bit()
    biased = replace(plain, w13_bias=torch.randn(EXPERTS, 2 * INTERMEDIATE), w2_bias=torch.randn(EXPERTS, HIDDEN))
    ungated = replace(plain, w13=plain.w13[:, :INTERMEDIATE])
    for weights, gated in ((biased, True), (ungated, False)):
        found = moe_fp8.quantize_moe_weights(weights, name)
        want = quantize_moe_weights(
            weights.w13,
            weights.w2,
            gated=gated,
            weight_key=online.weight_key,
            activation_key=online.activation_key,
            w13_bias=weights.w13_bias,
            w2_bias=weights.w2_bias,
        )
        expected = dict(want.tensors())
        assert dict(found.tensors()).keys() == expected.keys()
        for label, tensor in found.tensors():
            assert torch.equal(tensor.view(torch.uint8), expected[label].view(torch.uint8)), label
        config = FusedMoEConfig(
            EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, activation="silu" if gated else "silu_no_mul", has_bias=gated
        )  # type: ignore[arg-type]
        found.validate(config, values=True)


@pytest.mark.parametrize("name", NAMES)
def test_groups_of_zeros(name: str) -> None:
    plain = sixteen_bit()
    plain.w13[0] = 0.0
    plain.w13[1, :INTERMEDIATE] = 0.0
    plain.w2[2, :, :32] = 0.0
    plain.w2[3, 5] = 0.0
    found = moe_fp8.quantize_moe_weights(plain, name)
    for label, parts in (("w13", 2), ("w2", 1)):
        assert found.weight_key is not None
        codes, stored = getattr(found, label), getattr(plain, label).float()
        values = dequantize_weight(codes, getattr(found, f"{label}_scale"), found.weight_key, parts=parts)
        assert bool(values.isfinite().all())
        assert not bool(values[stored == 0].any())


def test_a_layer_from_tensors() -> None:
    config = FusedMoEConfig(EXPERTS, TOP_K, HIDDEN, INTERMEDIATE)
    layer = FusedMoELayer.from_weights("fp8", config, sixteen_bit(), quantize="mxfp8")
    want = FusedMoELayer.from_weights("fp8", config, moe_fp8.quantize_moe_weights(sixteen_bit(), "mxfp8"))
    x = torch.randn(5, HIDDEN).bfloat16()
    topk_weights, topk_ids = torch.rand(5, EXPERTS).topk(TOP_K)
    arguments = {"topk_weights": topk_weights, "topk_ids": topk_ids}
    assert torch.equal(layer(x, **arguments), want(x, **arguments))
    with pytest.raises(TensorError, match="mxfp8 quantises 16-bit weights, these are kFp8Static"):
        moe_fp8.quantize_moe_weights(moe_fp8.quantize_moe_weights(sixteen_bit(), "fp8_per_tensor"), "mxfp8")
    with pytest.raises(ConfigError, match=f"quantize='fp4' is unknown; installed: .*{NAMES[0]}"):
        moe_fp8.quantize_moe_weights(sixteen_bit(), "fp4")


def test_the_other_commands(folder: Path, capsys: Any) -> None:
    assert main(["explain", str(folder), "--quantize", "fp8_per_block", "--device", "sm90", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert "kFp8Static128BlockSym" in str(report)
    shape = ["--shape", "8,2,128,64"]
    assert main(["explain", *shape, "--quantize", "mxfp8_w8a16", "--device", "cpu"]) == 0
    assert "weights: kMxfp8Static" in capsys.readouterr().out
    bench = ["bench", str(folder), "--quantize", "mxfp8", "--device", "cpu", "--tokens", "1", "--budget", "0.01"]
    assert main([*bench, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["scheme"] == "fp8"
    for arguments, message in (
        (["run", str(folder)], "they can be quantised at load: quantize (--quantize) is one of"),
        (["run", str(folder), "--quantize", "fp9"], "quantize='fp9' is unknown; installed: "),
        (
            ["explain", *shape, "--quantize", "mxfp8", "--weight-key", "kMxfp8Static"],
            "says the scheme (fp8) and",
        ),
        (["explain", *shape, "--quantize", "mxfp8", "--scheme", "int8"], "says the scheme (fp8) and"),
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
def test_loading_onto_a_gpu(name: str, folder: Path) -> None:
    """The bits that the CPU gives."""
    there = load_layer(folder, quantize=name, device="cuda", backend="torch").weights
    here = load_layer(folder, quantize=name, device="cpu", backend="torch").weights
    found, want = dict(there.tensors()), dict(here.tensors())
    assert found.keys() == want.keys()
    for label, tensor in want.items():
        assert torch.equal(found[label].cpu().view(torch.uint8), tensor.view(torch.uint8)), label
