"""Element types and second scales that a package defines outside of core, through every step that core does."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import moe_core as mc
import pytest
import torch
from moe_core.parallel.shard import shard_layer
from moe_core.reference.fused_moe import fused_moe_reference
from moe_core.reference.quantization import fake_quantize, quantize_moe_weights
from moe_core.reference.tolerance import expected_output
from moe_core.selection.memory import example_weights, layer_memory
from moe_core.spec import quant_key
from moe_core.testing import ConformanceTests, cases_for, run_case

INT6 = mc.QuantDtype("int6", mc.NumberKind.INT, 6, 31.0, -32.0, storage=torch.int8)
FP6 = mc.QuantDtype("e3m2", mc.NumberKind.FLOAT, 6, 28.0, -28.0, mantissa_bits=2)
PER_TENSOR = mc.ScaleDesc(torch.float32, True, mc.PER_TENSOR)
E4M3_GROUPS = mc.ScaleDesc(torch.float8_e4m3fn, True, mc.GroupShape(1, 16))
NVFP4 = mc.QuantKey(mc.FP4_E2M1, E4M3_GROUPS, PER_TENSOR)
WEIGHTS = {
    "kToyNvfp4": NVFP4,
    "kToyInt6": mc.QuantKey(INT6, E4M3_GROUPS, PER_TENSOR),
    "kToyInt6Rows": mc.QuantKey(
        INT6,
        mc.ScaleDesc(torch.bfloat16, True, mc.GroupShape(1, 32)),
        mc.ScaleDesc(torch.float32, True, mc.GroupShape(1, -1)),
    ),
    "kToyFp6": mc.QuantKey(FP6, mc.ScaleDesc(torch.uint8, True, mc.GroupShape(1, 32))),
}
ACTIVATIONS = {
    "kToyNvfp4Static": replace(NVFP4, scale=replace(E4M3_GROUPS, static=False)),
    "kToyNvfp4Dynamic": replace(
        NVFP4, scale=replace(E4M3_GROUPS, static=False), scale2=replace(PER_TENSOR, static=False)
    ),
}


@pytest.fixture(scope="module", autouse=True)
def names() -> Iterator[None]:
    """Names of the keys, as a package gives them when it is imported; other tests go through all names."""
    tables = quant_key._KEYS, quant_key.NAMES
    before = [dict(table) for table in tables]
    mc.name_quant_keys(WEIGHTS | ACTIVATIONS)
    yield
    for table, known in zip(tables, before, strict=True):
        table.clear()
        table.update(known)  # type: ignore[arg-type]
    quant_key._name_of.cache_clear()


CONFIG = mc.FusedMoEConfig(num_experts=4, top_k=2, hidden_size=64, intermediate_size=96, dtype=torch.float32)


class ToyTorchExperts(mc.TorchExperts):
    claims = mc.Claims(
        devices=(mc.any_device(),),
        keys=tuple(itertools.product(WEIGHTS.values(), (None, *ACTIVATIONS.values()))),
        activations=mc.GATED | mc.NON_GATED,
        dtypes=frozenset({torch.float32}),
        cuda_graph=False,
        verified_on=("cpu",),
    )
    interface_api = (1, 0)


ORACLE = mc.Oracle(
    mc.SchemeSpec(name="toy", interface_api=(1, 0), package="toy", backends=(mc.Backend("torch", (ToyTorchExperts,)),))
)


@dataclass(frozen=True)
class Layer:
    config: mc.FusedMoEConfig
    exact: tuple[torch.Tensor, torch.Tensor]
    weights: mc.MoEWeights


def layer(weight_key: mc.QuantKey, activation_key: mc.QuantKey | None = None, gated: bool = True) -> Layer:
    """Random weights whose gate and up, and experts, have different magnitudes."""
    config = CONFIG if gated else replace(CONFIG, activation="relu2_no_mul")
    generator = torch.Generator().manual_seed(0)
    w13 = torch.randn(4, config.w13_rows, 64, generator=generator) / 8
    w13[:, 96:] *= 3.0
    w2 = torch.randn(4, 64, 96, generator=generator) / 10 * torch.arange(1, 5)[:, None, None]
    static = {}
    if activation_key is not None and activation_key.is_static:
        static = {"w13_input_scale2": torch.full((4,), 4.0 / 2688), "w2_input_scale2": torch.arange(1, 5) / 900}
    weights = quantize_moe_weights(w13, w2, gated=gated, weight_key=weight_key, activation_key=activation_key, **static)
    return Layer(config, (w13, w2), weights)


def values(weights: mc.MoEWeights, name: str, gated: bool) -> torch.Tensor:
    tensors, key = weights.of(name), weights.weight_key
    assert key is not None
    return mc.dequantize_weight(
        tensors[""],
        tensors["scale"],
        key,
        parts=2 if gated and name == "w13" else 1,
        scale2=tensors.get("scale2"),
        dtype=torch.float64,
    )


@pytest.mark.parametrize("name", [*WEIGHTS, *ACTIVATIONS])
def test_names_lead_to_the_keys(name: str) -> None:
    key = (WEIGHTS | ACTIVATIONS)[name]
    assert mc.as_quant_key(name) == key
    assert mc.as_quant_key(f"{name}[1x8]") == key.with_group(1, 8)
    assert str(key).startswith(name)
    with pytest.raises(mc.ConfigError, match=name):
        mc.name_quant_keys({name: mc.kMxfp4Static})


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "not gated"])
@pytest.mark.parametrize("name", WEIGHTS)
def test_values_are_codes_times_both_scales_and_near_the_weights(name: str, gated: bool) -> None:
    made = layer(WEIGHTS[name], gated=gated)
    made.weights.validate(made.config, values=True)
    for matrix, exact in zip(("w13", "w2"), made.exact, strict=True):
        found = values(made.weights, matrix, gated)
        # Half the largest step between codes, relative to the largest code; and the rounding of a scale.
        step = {"kToyNvfp4": 1 / 6, "kToyFp6": 1 / 8}.get(name, 1 / 62)
        bound = exact.abs().unflatten(2, (-1, 32)).amax(3, keepdim=True) * (step + 1 / 15)
        assert bool(((found - exact).abs().unflatten(2, (-1, 32)) <= bound).all())


def test_nvfp4_as_its_definition_says() -> None:
    made = layer(NVFP4)
    w13, w2 = made.exact
    scale2, scale, codes = made.weights.w13_scale2, made.weights.w13_scale, made.weights.w13
    assert scale2 is not None
    assert scale is not None
    amax = w13.unflatten(1, (2, 96)).abs().amax((2, 3))
    assert torch.equal(scale2, amax / 2688)
    groups = w13.unflatten(2, (-1, 16))
    per_row = scale2.repeat_interleave(96, 1)[:, :, None]
    expected = (groups.abs().amax(3) / per_row / 6).to(torch.float8_e4m3fn)
    assert torch.equal(scale.float(), expected.float())
    table = torch.tensor(mc.E2M1_VALUES, dtype=torch.float64)
    value = table[torch.stack((codes & 15, codes >> 4), 3).flatten(2).long()].unflatten(2, (-1, 16))
    exact = (value * scale.double()[..., None] * per_row.double()[..., None]).flatten(2)
    assert torch.equal(values(made.weights, "w13", True), exact)
    assert made.weights.w2_scale2 is not None
    assert made.weights.w2_scale2.shape == (4, 1)


def test_second_scales_are_checked() -> None:
    weights = layer(NVFP4).weights
    assert weights.w2_scale2 is not None
    wrong = weights.w2_scale2.clone()
    wrong[2] = 0.0
    for changed in (None, weights.w2_scale2[:, 0], weights.w2_scale2.half()):
        with pytest.raises(mc.TensorError, match="w2_scale2"):
            replace(weights, w2_scale2=changed).validate(CONFIG)
    with pytest.raises(mc.TensorError, match="w2_scale2"):
        replace(weights, w2_scale2=wrong).validate(CONFIG, values=True)
    with pytest.raises(mc.TensorError, match="w13_input_scale2"):
        replace(weights, activation_key=ACTIVATIONS["kToyNvfp4Static"]).validate(CONFIG)
    fp8 = mc.kFp8StaticTensorSym
    with pytest.raises(mc.ConfigError, match="w1_scale2"):
        mc.make_quant_config(weight_key=fp8, activation_key=None, w1_scale=wrong, w2_scale=wrong, w1_scale2=wrong)
    with pytest.raises(mc.ConfigError, match="a1_scale2"):
        weights_of = {"w1_scale": wrong, "w2_scale": wrong}
        mc.make_quant_config(weight_key=fp8, activation_key="kToyNvfp4Static", **weights_of)


@pytest.mark.parametrize("name", WEIGHTS)
def test_shards_have_the_values_of_the_layer(name: str) -> None:
    made = layer(WEIGHTS[name])
    whole13, whole2 = values(made.weights, "w13", True), values(made.weights, "w2", True)
    begin = 0
    for rank in range(2):
        shard = shard_layer(made.config, made.weights, mc.FusedMoEParallelConfig(tp_size=2, tp_rank=rank))
        shard.weights.validate(shard.config, values=True)
        end = begin + shard.config.intermediate_size
        gate_and_up = torch.cat([part[:, begin:end] for part in whole13.chunk(2, 1)], 1)
        assert torch.equal(values(shard.weights, "w13", True), gate_and_up)
        assert torch.equal(values(shard.weights, "w2", True), whole2[:, :, begin:end])
        begin = end
    assert begin == 96
    shard = shard_layer(made.config, made.weights, mc.FusedMoEParallelConfig(ep_size=2, ep_rank=1))
    assert torch.equal(values(shard.weights, "w13", True), whole13[2:])


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize("name", WEIGHTS)
def test_torch_experts_match_the_reference(name: str, activation: str | None) -> None:
    made = layer(WEIGHTS[name], mc.as_quant_key(activation))
    selection = ORACLE.select(made.config, weight_key=name, activation_key=activation, device="cpu")
    converted = ORACLE.convert(selection, made.weights)
    assert converted.quant_config.w1_scale2 is made.weights.w13_scale2
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(1))
    ids = torch.stack([torch.randperm(4)[:2] for _ in range(9)])
    routed = {"topk_weights": torch.rand(9, 2) + 0.1, "topk_ids": ids}
    found = ORACLE.make_kernel(selection, converted).apply(x, **routed)
    expected_output(x, made.weights, made.config, **routed).compare(found, name)
    total = torch.zeros(9, 64, dtype=torch.float64)
    for rank in range(2):
        shard = shard_layer(made.config, made.weights, mc.FusedMoEParallelConfig(ep_size=2, ep_rank=rank))
        total += fused_moe_reference(x, shard.weights, shard.config, expert_map=shard.expert_map, **routed)
    if activation != "kToyNvfp4Dynamic":  # whose second scale covers the tokens of a rank
        assert torch.allclose(total, fused_moe_reference(x, made.weights, made.config, **routed), rtol=1e-12)


def test_memory_and_examples_include_second_scales() -> None:
    made = layer(NVFP4)
    zeros = example_weights(CONFIG, NVFP4, None)
    assert {name: (t.shape, t.dtype) for name, t in zeros.tensors()} == {
        name: (t.shape, t.dtype) for name, t in made.weights.tensors()
    }
    selection = ORACLE.select(CONFIG, weight_key=NVFP4, activation_key=None, device="cpu")
    assert layer_memory(selection, 8).weights == made.weights.nbytes


@pytest.mark.parametrize("name", WEIGHTS)
def test_online_quantization_is_that_of_the_reference(name: str) -> None:
    made = layer(WEIGHTS[name])
    plain = mc.MoEWeights(weight_key=None, activation_key=None, w13=made.exact[0], w2=made.exact[1])
    found = mc.OnlineQuantization("toy", "toy", WEIGHTS[name], None).quantize(plain)
    found.validate(CONFIG, values=True)
    for (field, tensor), (_, expected) in zip(found.tensors(), made.weights.tensors(), strict=True):
        assert torch.equal(tensor.view(torch.uint8), expected.view(torch.uint8)), field


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_of_two_levels(name: str) -> None:
    key = ACTIVATIONS[name]
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(2))
    scale2 = torch.tensor(4.0 / 2688)
    if key.is_static:
        with pytest.raises(mc.TensorError, match="scale2"):
            fake_quantize(x, key)
        found = fake_quantize(x, key, scale2=scale2)
    else:
        found = fake_quantize(x, key)
        x[1, 3] = torch.nan
        spoiled = fake_quantize(x, key)
        assert torch.equal(spoiled[[0, 2, 3, 4]], found[[0, 2, 3, 4]])
        assert bool(spoiled[1].isnan().any())
        return
    groups = x.view(5, 4, 16)
    scale = (groups.abs().amax(2) / scale2 / 6).to(torch.float8_e4m3fn).float()
    table = torch.tensor(mc.E2M1_VALUES)
    scaled = groups / scale2 / scale[..., None]
    expected = table[(scaled[..., None] - table).abs().argmin(-1)] * scale[..., None] * scale2
    assert torch.allclose(found, expected.view(5, 64))


class ForgetsSecondScales(ToyTorchExperts):
    def convert(self, weights: mc.MoEWeights) -> mc.KernelWeights:
        ones = None if weights.w13_scale2 is None else torch.ones_like(weights.w13_scale2)
        return replace(super().convert(weights), quant_config=weights.quant_config(w1_scale2=ones))


def test_the_kit_notices_a_forgotten_second_scale() -> None:
    case = next(c for c in cases_for(ForgetsSecondScales) if c.weight_key == NVFP4 and c.check == "values")
    run_case(ToyTorchExperts, case)
    with pytest.raises(AssertionError, match="scales of w13"):
        run_case(ForgetsSecondScales, case)


class TestToyExperts(ConformanceTests):
    experts = ToyTorchExperts
