"""INT4 and INT8 in groups made of 16-bit experts: from the command line, from tensors, again when they are reloaded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import moe_wna16
import pytest
import torch
from moe_core import ConfigError, FusedMoEConfig, FusedMoELayer, MoEWeights, TensorError, load_layer
from moe_core.checkpoint import Checkpoint, read_layer
from moe_core.cli import main
from moe_core.quantization import dequantize_weight, quantize_moe_weights
from moe_core.testing.tolerance import expected_output
from moe_wna16.online import ONLINE
from moe_wna16.quickstart import CONFIG, EXPERTS, HIDDEN, INTERMEDIATE, TOP_K
from safetensors.torch import load_file, save_file
from torch import Tensor

BLOCK = "model.layers.0.mlp"
NAMES = [online.name for online in ONLINE]


def tensors(dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> dict[str, Tensor]:
    """The experts of a layer, stacked as transformers stores them, and its router."""
    generator = torch.Generator().manual_seed(seed)

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


def sixteen_bit(seed: int = 0) -> MoEWeights:
    made = tensors(seed=seed)
    return MoEWeights(
        weight_key=None,
        activation_key=None,
        w13=made[f"{BLOCK}.experts.gate_up_proj"],
        w2=made[f"{BLOCK}.experts.down_proj"],
    )


def biased(weights: MoEWeights) -> MoEWeights:
    generator = torch.Generator().manual_seed(5)
    return replace(
        weights,
        w13_bias=torch.randn(EXPERTS, 2 * INTERMEDIATE, generator=generator),
        w2_bias=torch.randn(EXPERTS, HIDDEN, generator=generator),
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
    assert report["scheme"] == "wna16"
    assert name in report["format"]
    source = read_layer(Checkpoint.open(folder), quantize=name)
    weights = moe_wna16.quantize_moe_weights(sixteen_bit(), name)
    assert (source.weight_key, source.activation_key) == (weights.weight_key, weights.activation_key)
    expected = expected_output(x, weights, source.config, topk_weights=topk_weights, topk_ids=topk_ids)
    expected.compare(load_file(out)["output"], name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_the_quantised_weights(name: str, dtype: torch.dtype) -> None:
    """The rules of the reference, for both matrices, with biases and without a gate."""
    online = next(item for item in ONLINE if item.name == name)
    plain = replace(sixteen_bit(), w13=sixteen_bit().w13.to(dtype), w2=sixteen_bit().w2.to(dtype))
    ungated = replace(plain, w13=plain.w13[:, :INTERMEDIATE])
    for weights, gated in ((biased(plain), True), (ungated, False)):
        found = moe_wna16.quantize_moe_weights(weights, name)
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
            assert torch.equal(tensor, expected[label]), label
        error, scale = rounding(weights, found)
        assert bool((error <= scale / 2).all())
        activation: Any = "silu" if gated else "silu_no_mul"
        config = FusedMoEConfig(EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, activation=activation, has_bias=gated)
        found.validate(config, values=True)


def rounding(weights: MoEWeights, found: MoEWeights) -> tuple[Tensor, Tensor]:
    """How far each weight of w2 is from the nearest code's value, and the scale of its group, in float64."""
    assert found.weight_key is not None
    assert found.w2_scale is not None
    assert found.w2_scale.dtype is torch.bfloat16
    cols = weights.w2.shape[2]
    values = dequantize_weight(
        found.w2, found.w2_scale, found.weight_key, zero_point=found.w2_zero_point, cols=cols, dtype=torch.float64
    )
    group = cols if found.weight_key.group_size == -1 else found.weight_key.group_size
    scale = found.w2_scale.double().repeat_interleave(group, dim=2)[:, :, :cols]
    # a bfloat16 scale may be smaller than the largest weight / the largest code, by half a step of 2**-8: that weight
    # saturates, and is off by as much of itself
    slack = scale * (found.weight_key.dtype.max_value + 1) * 2.0**-8
    return (values - weights.w2.double()).abs() - slack, scale


def test_a_short_last_group() -> None:
    """96 columns in groups of 64: the rest is a group of its own."""
    generator = torch.Generator().manual_seed(3)
    plain = MoEWeights(
        weight_key=None,
        activation_key=None,
        w13=torch.randn(2, 80, 96, generator=generator).bfloat16(),
        w2=torch.randn(2, 96, 40, generator=generator).bfloat16(),
    )
    for name in ("int4_g64", "int4_g64_asym", "int8_g64"):
        found = moe_wna16.quantize_moe_weights(plain, name)
        found.validate(FusedMoEConfig(2, 1, 96, 40), values=True)
        assert found.w13_scale is not None
        assert tuple(found.w13_scale.shape) == (2, 80, 2)
        error, scale = rounding(plain, found)
        assert bool((error <= scale / 2).all())


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_zeros(name: str) -> None:
    """They have a scale, codes 0 and a result: no 0/0."""
    plain = sixteen_bit()
    plain.w13[0] = 0.0
    plain.w13[1, 7] = 0.0
    plain.w2[3, 5] = 0.0
    found = moe_wna16.quantize_moe_weights(plain, name)
    for label, parts in (("w13", 2), ("w2", 1)):
        assert found.weight_key is not None
        codes, stored, scale = getattr(found, label), getattr(plain, label).float(), getattr(found, f"{label}_scale")
        assert bool((scale > 0).all())
        zero = getattr(found, f"{label}_zero_point")
        values = dequantize_weight(codes, scale, found.weight_key, parts=parts, zero_point=zero)
        assert bool(values.isfinite().all())
        assert not bool(values[stored == 0].any())
    layer = FusedMoELayer.from_weights("wna16", FusedMoEConfig(EXPERTS, 1, HIDDEN, INTERMEDIATE), plain, quantize=name)
    ids = torch.tensor([[0], [1], [3]])
    y = layer(torch.ones(3, HIDDEN).bfloat16(), topk_weights=torch.ones(3, 1), topk_ids=ids)
    assert bool(y.isfinite().all())
    assert not bool(y[0].any())
    assert float(y[2, 5]) == 0.0


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_from_tensors(name: str) -> None:
    config = FusedMoEConfig(EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, has_bias=True)
    layer = FusedMoELayer.from_weights("wna16", config, biased(sixteen_bit()), quantize=name, copy=True)
    quantised = moe_wna16.quantize_moe_weights(biased(sixteen_bit()), name)
    want = FusedMoELayer.from_weights("wna16", config, quantised)
    x = torch.randn(5, HIDDEN).bfloat16()
    topk_weights, topk_ids = torch.rand(5, EXPERTS).topk(TOP_K)
    arguments = {"topk_weights": topk_weights, "topk_ids": topk_ids}
    assert torch.equal(layer(x, **arguments), want(x, **arguments))
    # reloaded with 16-bit weights, which are quantised the same way, in place
    pointers = [tensor.data_ptr() for _, tensor in layer.weights.tensors()]
    layer.reload(biased(sixteen_bit(seed=1)))
    assert [tensor.data_ptr() for _, tensor in layer.weights.tensors()] == pointers
    new = moe_wna16.quantize_moe_weights(biased(sixteen_bit(seed=1)), name)
    expected = FusedMoELayer.from_weights("wna16", config, new)(x, **arguments)
    assert torch.equal(layer(x, **arguments), expected)
    with pytest.raises(TensorError, match=f"{name} quantises 16-bit weights, these are"):
        moe_wna16.quantize_moe_weights(quantised, name)


def test_unknown_names() -> None:
    with pytest.raises(ConfigError, match=f"quantize='int3' is unknown; installed: .*{NAMES[0]}"):
        moe_wna16.quantize_moe_weights(sixteen_bit(), "int3")
    with pytest.raises(ConfigError, match="makes weights of the scheme wna16, not of fp8"):
        config = FusedMoEConfig(EXPERTS, TOP_K, HIDDEN, INTERMEDIATE)
        FusedMoELayer.from_weights("fp8", config, sixteen_bit(), quantize="int4_g128")


def test_some_experts_only(folder: Path) -> None:
    """Expert parallelism: scales of the experts that are here."""
    # in float16 the torch experts keep the canonical layout
    layer = load_layer(folder, device="cpu", quantize="int4_g128", experts=[3, 1, 12], dtype=torch.float16)
    quant = layer.weights.quant_config
    assert quant.w1_scale is not None
    assert tuple(quant.w1_scale.shape) == (3, 2 * INTERMEDIATE, HIDDEN // 128)
    whole = moe_wna16.quantize_moe_weights(sixteen_bit())
    assert whole.w13_scale is not None
    assert torch.equal(quant.w1_scale, whole.w13_scale[[3, 1, 12]])
    assert torch.equal(layer.weights.w2, whole.w2[[3, 1, 12]])
