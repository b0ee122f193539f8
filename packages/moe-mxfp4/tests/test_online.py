"""MXFP4 made of 16-bit experts: from the command line, from tensors, of gpt-oss, again when they are reloaded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import moe_mxfp4
import pytest
import torch
from moe_core import ConfigError, FusedMoEConfig, FusedMoELayer, MoEWeights, TensorError, kMxfp4Static, load_layer
from moe_core.checkpoint import Checkpoint, read_layer
from moe_core.cli import main
from moe_core.quantization import dequantize_weight, quantize_moe_weights
from moe_core.testing.tolerance import expected_output
from moe_mxfp4.online import ONLINE
from moe_mxfp4.quickstart import CONFIG, EXPERTS, HIDDEN, INTERMEDIATE, TOP_K
from safetensors.torch import load_file, save_file
from torch import Tensor

BLOCK = "model.layers.0.mlp"
NAMES = [online.name for online in ONLINE]


def sixteen_bit(seed: int = 0) -> MoEWeights:
    """Canonical weights with biases."""
    generator = torch.Generator().manual_seed(seed)

    def make(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) * shape[-1] ** -0.5).bfloat16()

    return MoEWeights(
        weight_key=None,
        activation_key=None,
        w13=make(EXPERTS, 2 * INTERMEDIATE, HIDDEN),
        w2=make(EXPERTS, HIDDEN, INTERMEDIATE),
        w13_bias=make(EXPERTS, 2 * INTERMEDIATE).float(),
        w2_bias=make(EXPERTS, HIDDEN).float(),
    )


def in_turns(rows: Tensor) -> Tensor:
    gate, up = rows.chunk(2, dim=1)
    return torch.stack([gate, up], dim=2).reshape(rows.shape)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """gpt-oss in bfloat16, as transformers stores it: transposed, gate and up in turns."""
    path = tmp_path / "checkpoint"
    path.mkdir()
    config = {key: value for key, value in CONFIG.items() if key != "quantization_config"}
    (path / "config.json").write_text(json.dumps(config))
    made = sixteen_bit()
    assert made.w13_bias is not None
    assert made.w2_bias is not None
    tensors = {
        "experts.gate_up_proj": in_turns(made.w13).mT,
        "experts.gate_up_proj_bias": in_turns(made.w13_bias).bfloat16(),
        "experts.down_proj": made.w2.mT,
        "experts.down_proj_bias": made.w2_bias.bfloat16(),
        "router.weight": torch.randn(EXPERTS, HIDDEN).bfloat16(),
        "router.bias": torch.randn(EXPERTS).bfloat16(),
    }
    save_file({f"{BLOCK}.{n}": t.contiguous() for n, t in tensors.items()}, path / "model.safetensors")
    return path


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
    assert report["scheme"] == "mxfp4"
    assert name in report["format"]
    source = read_layer(Checkpoint.open(folder), quantize=name)
    weights = moe_mxfp4.quantize_moe_weights(sixteen_bit(), name)
    assert (source.weight_key, source.activation_key) == (weights.weight_key, weights.activation_key)
    expected = expected_output(x, weights, source.config, topk_weights=topk_weights, topk_ids=topk_ids)
    expected.compare(load_file(out)["output"], name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_the_quantised_weights(name: str, dtype: torch.dtype) -> None:
    """The rules of the reference, for both matrices, with biases and without a gate."""
    online = next(item for item in ONLINE if item.name == name)
    plain = replace(sixteen_bit(), w13=sixteen_bit().w13.to(dtype), w2=sixteen_bit().w2.to(dtype))
    ungated = replace(plain, w13=plain.w13[:, :INTERMEDIATE], w13_bias=None, w2_bias=None)
    for weights, gated in ((plain, True), (ungated, False)):
        found = moe_mxfp4.quantize_moe_weights(weights, name)
        want = quantize_moe_weights(
            weights.w13,
            weights.w2,
            gated=gated,
            weight_key=kMxfp4Static,
            activation_key=online.activation_key,
            w13_bias=weights.w13_bias,
            w2_bias=weights.w2_bias,
        )
        expected = dict(want.tensors())
        assert dict(found.tensors()).keys() == expected.keys()
        for label, tensor in found.tensors():
            assert torch.equal(tensor, expected[label]), label
        activation: Any = "swigluoai" if gated else "silu_no_mul"
        config = FusedMoEConfig(EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, activation=activation, has_bias=gated)
        found.validate(config, values=True)


def test_no_weight_saturates() -> None:
    """Each is within half a step of its code: a step is half the scale below 1, a quarter of the power of two above."""
    plain = sixteen_bit()
    found = moe_mxfp4.quantize_moe_weights(plain)
    assert found.w2_scale is not None
    values = dequantize_weight(found.w2, found.w2_scale, kMxfp4Static, dtype=torch.float64)
    scale = torch.exp2(found.w2_scale.double() - 127).repeat_interleave(32, dim=2)
    quotient = plain.w2.double().abs() / scale
    assert bool((quotient <= 6).all())
    step = torch.where(quotient < 2, 0.5, torch.where(quotient < 4, 1.0, 2.0)) * scale
    assert bool(((values - plain.w2.double()).abs() <= step / 2).all())
    # a scale twice as small would let the largest of a group saturate
    assert bool((quotient.unflatten(2, (-1, 32)).amax(dim=3) > 3).all())


def test_a_short_last_group() -> None:
    """80 columns: the last 16 are a group of their own."""
    generator = torch.Generator().manual_seed(3)
    plain = MoEWeights(
        weight_key=None,
        activation_key=None,
        w13=torch.randn(2, 96, 80, generator=generator).bfloat16(),
        w2=torch.randn(2, 80, 48, generator=generator).bfloat16(),
    )
    found = moe_mxfp4.quantize_moe_weights(plain)
    found.validate(FusedMoEConfig(2, 1, 80, 48), values=True)
    assert found.w13_scale is not None
    assert tuple(found.w13.shape) == (2, 96, 40)
    assert tuple(found.w13_scale.shape) == (2, 96, 3)


def test_rows_of_zeros() -> None:
    """They have a scale, codes 0 and a result: no 0/0."""
    plain = replace(sixteen_bit(), w13_bias=None, w2_bias=None)
    plain.w13[0] = 0.0
    plain.w13[1, 7] = 0.0
    plain.w2[3, 5] = 0.0
    found = moe_mxfp4.quantize_moe_weights(plain)
    assert found.w13_scale is not None
    values = dequantize_weight(found.w13, found.w13_scale, kMxfp4Static, parts=2)
    assert not bool(values[plain.w13.float() == 0].any())
    layer = FusedMoELayer.from_weights(
        "mxfp4", FusedMoEConfig(EXPERTS, 1, HIDDEN, INTERMEDIATE), plain, quantize="mxfp4"
    )
    ids = torch.tensor([[0], [1], [3]])
    y = layer(torch.ones(3, HIDDEN).bfloat16(), topk_weights=torch.ones(3, 1), topk_ids=ids)
    assert bool(y.isfinite().all())
    assert not bool(y[0].any())
    assert float(y[2, 5]) == 0.0


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_from_tensors(name: str) -> None:
    config = FusedMoEConfig(EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, has_bias=True)
    layer = FusedMoELayer.from_weights("mxfp4", config, sixteen_bit(), quantize=name, copy=True)
    quantised = moe_mxfp4.quantize_moe_weights(sixteen_bit(), name)
    want = FusedMoELayer.from_weights("mxfp4", config, quantised)
    x = torch.randn(5, HIDDEN).bfloat16()
    topk_weights, topk_ids = torch.rand(5, EXPERTS).topk(TOP_K)
    arguments = {"topk_weights": topk_weights, "topk_ids": topk_ids}
    assert torch.equal(layer(x, **arguments), want(x, **arguments))
    # reloaded with 16-bit weights, which are quantised the same way, in place
    pointers = [tensor.data_ptr() for _, tensor in layer.weights.tensors()]
    layer.reload(sixteen_bit(seed=1))
    assert [tensor.data_ptr() for _, tensor in layer.weights.tensors()] == pointers
    new = moe_mxfp4.quantize_moe_weights(sixteen_bit(seed=1), name)
    expected = FusedMoELayer.from_weights("mxfp4", config, new)(x, **arguments)
    assert torch.equal(layer(x, **arguments), expected)
    with pytest.raises(TensorError, match=f"{name} quantises 16-bit weights, these are"):
        moe_mxfp4.quantize_moe_weights(quantised, name)


def test_unknown_names() -> None:
    with pytest.raises(ConfigError, match=f"quantize='mxfp3' is unknown; installed: .*{NAMES[0]}"):
        moe_mxfp4.quantize_moe_weights(sixteen_bit(), "mxfp3")
    with pytest.raises(ConfigError, match="makes weights of the scheme mxfp4, not of fp8"):
        config = FusedMoEConfig(EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, has_bias=True)
        FusedMoELayer.from_weights("fp8", config, sixteen_bit(), quantize="mxfp4")


def test_some_experts_only(folder: Path) -> None:
    """Expert parallelism: codes and scales of the experts that are here."""
    layer = load_layer(folder, device="cpu", quantize="mxfp4", experts=[3, 1, 12])
    quant = layer.weights.quant_config
    assert quant.w1_scale is not None
    assert tuple(quant.w1_scale.shape) == (3, 2 * INTERMEDIATE, HIDDEN // 32)
    whole = moe_mxfp4.quantize_moe_weights(sixteen_bit())
    assert whole.w13_scale is not None
    assert torch.equal(quant.w1_scale, whole.w13_scale[[3, 1, 12]])
    assert torch.equal(layer.weights.w2, whole.w2[[3, 1, 12]])
