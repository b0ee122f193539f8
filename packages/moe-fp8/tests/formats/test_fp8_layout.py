"""Scales of every grouping, shape and type that tools store load to exactly weight x scale."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_core import CheckpointError, CheckpointWarning, dequantize_weight
from moe_core.checkpoint import Checkpoint, ModelSettings, read_layer
from moe_core.spec.quant_key import (
    kFp8DynamicTensorSym,
    kFp8DynamicTokenSym,
    kFp8Static128BlockSym,
    kFp8StaticChannelSym,
    kFp8StaticTensorSym,
    kMxfp8Dynamic,
    kMxfp8Static,
)
from moe_core.testing.checkpoints import (
    CONFIG,
    MX,
    NAMES,
    PER_CHANNEL,
    PER_TENSOR,
    PREFIX,
    E,
    Experts,
    K,
    N,
    check,
    exponents,
    refused,
    source,
    write,
)
from torch import Tensor

TENSOR = {"quant_method": "fp8"}  # one scale per tensor, dynamic
STATIC = {"quant_method": "fp8", "activation_scheme": "static"}
CHANNEL = {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}
BLOCK = {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}
MXFP8 = {"quant_method": "mxfp8"}

FLOATS = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_per_tensor(tmp_path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    experts = Experts(PER_TENSOR)
    found = source(tmp_path, experts.tensors(lambda scale: scale.reshape(shape).to(dtype)), TENSOR)
    check(found, experts, kFp8StaticTensorSym, kFp8DynamicTensorSym)
    scale = found.weights().w13_scale
    assert scale is not None
    # gate and up keep their own
    assert scale.shape == (E, 2)
    assert not torch.equal(scale[:, 0], scale[:, 1])


def test_per_tensor_without_a_gate(tmp_path: Path) -> None:
    experts = Experts(PER_TENSOR, gated=False)
    tensors = experts.tensors(lambda scale: scale.reshape(()))
    check(source(tmp_path, tensors, TENSOR, hidden_act="relu2"), experts, kFp8StaticTensorSym, kFp8DynamicTensorSym)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("store", [lambda s: s, torch.Tensor.flatten], ids=["[N, 1]", "[N]"])
def test_per_channel(tmp_path: Path, store: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    experts = Experts(PER_CHANNEL)
    found = source(tmp_path, experts.tensors(lambda scale: store(scale).to(dtype)), CHANNEL)
    check(found, experts, kFp8StaticChannelSym, kFp8DynamicTokenSym)


@pytest.mark.parametrize("store", [lambda s: s, lambda s: s[:, None, :, None]], ids=["2-D", "4-D"])
def test_per_block(tmp_path: Path, store: Callable[[Tensor], Tensor]) -> None:
    experts = Experts((128, 128))
    check(source(tmp_path, experts.tensors(store), BLOCK), experts, kFp8Static128BlockSym, None)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu], ids=str)
@pytest.mark.parametrize("suffix", ["weight_scale", "weight_scale_inv"])
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "not gated"])
def test_mxfp8(tmp_path: Path, suffix: str, dtype: torch.dtype, gated: bool) -> None:
    experts = Experts(MX, gated=gated)
    tensors = experts.tensors(lambda scale: exponents(scale, dtype), suffix)
    found = source(tmp_path, tensors, MXFP8, hidden_act="silu" if gated else "relu2")
    check(found, experts, kMxfp8Static, kMxfp8Dynamic)
    scale = found.weights().w13_scale
    assert scale is not None
    assert scale.dtype is torch.uint8


# ------------------------------------------------------------------ stacked experts


@pytest.mark.parametrize("shape", [(E,), (E, 1), (E, 1, 1)], ids=str)
@pytest.mark.parametrize("suffix", ["_scale_inv", ".weight_scale_inv"])
def test_stacked_per_tensor(tmp_path: Path, suffix: str, shape: tuple[int, ...]) -> None:
    """Gate and up share the scale of their one tensor; transformers' dynamic activations are per token."""
    experts = Experts(PER_TENSOR)
    for scales in experts.scales:
        scales["up"] = scales["gate"]
    tensors = experts.stacked(lambda scale: scale.reshape(shape), suffix)
    check(source(tmp_path, tensors, TENSOR), experts, kFp8StaticTensorSym, kFp8DynamicTokenSym)


@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_one_scale_for_all_stacked_experts(tmp_path: Path, shape: tuple[int, ...]) -> None:
    experts = Experts(PER_TENSOR)
    for scales in experts.scales:
        scales |= {"gate": torch.full((1, 1), 0.5), "up": torch.full((1, 1), 0.5), "down": torch.full((1, 1), 2.0)}
    tensors = experts.stacked(lambda scale: scale[0, 0, 0].clone().reshape(shape), "_weight_scale", transposed=True)
    check(source(tmp_path, tensors, TENSOR), experts, kFp8StaticTensorSym, kFp8DynamicTensorSym)


@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("flat", [False, True], ids=["[E, 2N, 1]", "[E, 2N]"])
def test_stacked_per_channel(tmp_path: Path, transposed: bool, flat: bool) -> None:
    experts = Experts(PER_CHANNEL)
    tensors = experts.stacked(lambda s: s.reshape(E, -1) if flat else s, "_weight_scale", transposed=transposed)
    check(source(tmp_path, tensors, CHANNEL), experts, kFp8StaticChannelSym, kFp8DynamicTokenSym)


@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
def test_stacked_mxfp8(tmp_path: Path, transposed: bool) -> None:
    experts = Experts(MX)
    tensors = experts.stacked(exponents, "_scale", transposed=transposed)
    check(source(tmp_path, tensors, MXFP8), experts, kMxfp8Static, kMxfp8Dynamic)


@pytest.mark.parametrize("shape", [(), (1,), (E,), (E, 1, 1)], ids=str)
def test_stacked_activation_scales(tmp_path: Path, shape: tuple[int, ...]) -> None:
    experts = Experts(PER_TENSOR)
    tensors = experts.stacked(lambda scale: scale.reshape(E), "_scale_inv")
    given = torch.arange(1.0, 1 + math.prod(shape)).reshape(shape)
    tensors |= {f"{PREFIX}.gate_up_proj_activation_scale": given, f"{PREFIX}.down_proj_activation_scale": given * 2}
    weights = source(tmp_path, tensors, STATIC).weights()
    assert weights.activation_key == kFp8StaticTensorSym
    assert weights.w13_input_scale is not None
    assert weights.w2_input_scale is not None
    assert weights.w13_input_scale.tolist() == ([1.0, 2.0, 3.0] if len(shape) and shape[0] == E else [1.0] * E)
    assert torch.equal(weights.w2_input_scale, 2 * weights.w13_input_scale)


# ------------------------------------------------------------------ static activation scales, biases


def static_tensors(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    tensors = Experts(PER_TENSOR).tensors(lambda scale: scale.reshape(()))
    for expert in range(E):
        for n, value in (("gate", 0.5), ("up", 0.25 * (expert + 1)), ("down", 3.0 + expert)):
            tensors[f"{PREFIX}.{expert}.{NAMES[n]}.input_scale"] = torch.tensor([value], dtype=dtype)
    return tensors


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_gate_and_up_take_the_larger_activation_scale(tmp_path: Path, dtype: torch.dtype) -> None:
    """With the smaller one, activations that the tool's larger scale holds would be clipped."""
    weights = source(tmp_path, static_tensors(dtype), STATIC).weights()
    assert weights.w13_input_scale is not None
    assert weights.w2_input_scale is not None
    assert weights.w13_input_scale.dtype is torch.float32
    assert weights.w13_input_scale.tolist() == [0.5, 0.5, 0.75]
    assert weights.w2_input_scale.tolist() == [3.0, 4.0, 5.0]


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("projection", list(NAMES.values()))
def test_values_of_activation_scales(tmp_path: Path, projection: str, value: float) -> None:
    tensors = static_tensors()
    name = f"{PREFIX}.1.{projection}.input_scale"
    tensors[name] = torch.tensor([value])
    refused(tmp_path, tensors, STATIC, f"{name} has 1 zero, negative, NaN or Inf value of 1, first at [0]")


def test_activation_scale_that_is_missing(tmp_path: Path) -> None:
    tensors = {name: t for name, t in static_tensors().items() if "up_proj.input_scale" not in name}
    refused(tmp_path / "a", tensors, STATIC, f"{PREFIX}.0.up_proj.input_scale is missing", "activation_scheme")
    tensors = static_tensors()
    del tensors[f"{PREFIX}.2.down_proj.input_scale"]
    refused(tmp_path / "b", tensors, STATIC, f"{PREFIX}.2.down_proj.input_scale is missing")


def test_activation_scales_of_many_values(tmp_path: Path) -> None:
    tensors = {n: torch.ones(4) if n.endswith("input_scale") else t for n, t in static_tensors().items()}
    name = f"{PREFIX}.0.gate_proj.input_scale"
    refused(tmp_path, tensors, STATIC, f"{name} has shape [4], expected [] (one scale of all activations)")


def test_activation_scales_that_are_not_used(tmp_path: Path) -> None:
    """The config wins, and it is said."""
    found = source(tmp_path, static_tensors(), TENSOR)
    with pytest.warns(CheckpointWarning, match="input_scale .*kFp8DynamicTensorSym"):
        weights = found.weights()
    assert weights.w13_input_scale is None


def test_biases(tmp_path: Path) -> None:
    experts = Experts(PER_CHANNEL)
    tensors = experts.tensors()
    for expert in range(E):
        for n, name in NAMES.items():
            tensors[f"{PREFIX}.{expert}.{name}.bias"] = torch.full((experts.sizes[n][0],), float(expert)).bfloat16()
    weights = source(tmp_path / "a", tensors, CHANNEL).weights()
    assert weights.w13_bias is not None
    assert weights.w2_bias is not None
    assert (weights.w13_bias.shape, weights.w2_bias.shape) == ((E, 2 * N), (E, K))
    assert weights.w2_bias[:, 0].tolist() == [0.0, 1.0, 2.0]

    short = {name: t[:-1] if name.endswith("up_proj.bias") else t for name, t in tensors.items()}
    refused(tmp_path / "b", short, CHANNEL, f"{PREFIX}.0.up_proj.bias has shape [{N - 1}], expected [{N}]")
    some = {name: t for name, t in tensors.items() if not name.endswith("down_proj.bias")}
    refused(tmp_path / "c", some, CHANNEL, "down_proj.bias is missing")
    tensors[f"{PREFIX}.2.gate_proj.bias"][5] = math.nan
    refused(tmp_path / "d", tensors, CHANNEL, f"{PREFIX}.2.gate_proj.bias has 1 NaN or Inf value of {N}, first at [5]")


# ------------------------------------------------------------------ what is broken


def stored(group: tuple[int, int]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and config of each kind of scale."""
    if group == PER_TENSOR:
        return Experts(group).tensors(lambda s: s.reshape(())), TENSOR
    if group == PER_CHANNEL:
        return Experts(group).tensors(torch.Tensor.bfloat16), CHANNEL
    if group == MX:
        return Experts(group).tensors(exponents), MXFP8
    return Experts(group).tensors(), BLOCK


GROUPS = [PER_TENSOR, PER_CHANNEL, (128, 128), MX]


@pytest.mark.parametrize("group", GROUPS, ids=str)
@pytest.mark.parametrize("projection", list(NAMES.values()))
def test_grids_that_do_not_fit(tmp_path: Path, group: tuple[int, int], projection: str) -> None:
    tensors, quantization = stored(group)
    name = f"{PREFIX}.0.{projection}.weight_scale"
    shape = tuple(tensors[name].shape)
    for wrong in ((7, 9), (*shape, 1, 1, 1), (2,)):
        for expert in range(E):
            key = f"{PREFIX}.{expert}.{projection}.weight_scale"
            tensors[key] = torch.ones(wrong).to(tensors[key].dtype)
        refused(tmp_path, tensors, quantization, f"{name} has shape {list(wrong)}, expected [", "one ")


@pytest.mark.parametrize("group", [PER_CHANNEL, (128, 128), MX], ids=str)
def test_a_grid_of_another_expert(tmp_path: Path, group: tuple[int, int]) -> None:
    tensors, quantization = stored(group)
    name = f"{PREFIX}.1.up_proj.weight_scale"
    tensors[name] = tensors[name][:-1]
    refused(tmp_path, tensors, quantization, name, f"as {PREFIX}.0.up_proj.weight_scale")


@pytest.mark.parametrize("group", GROUPS, ids=str)
@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_nan_codes(tmp_path: Path, group: tuple[int, int], code: int) -> None:
    tensors, quantization = stored(group)
    name = f"{PREFIX}.2.down_proj.weight"
    tensors[name].view(torch.uint8)[3, 4] = code
    refused(tmp_path, tensors, quantization, f"{name} has 1 NaN value of {K * N}, first at [3, 4]")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu], ids=str)
def test_e8m0_255(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = Experts(MX).tensors(lambda scale: exponents(scale, dtype))
    name = f"{PREFIX}.1.gate_proj.weight_scale"
    tensors[name].view(torch.uint8)[5, 6] = 255
    refused(tmp_path, tensors, MXFP8, f"{name} has 1 NaN (e8m0 code 255) value of {N * K // 32}, first at [5, 6]")


@pytest.mark.parametrize("group", GROUPS[:3], ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_values_of_scales(tmp_path: Path, group: tuple[int, int], value: float) -> None:
    tensors, quantization = stored(group)
    name = f"{PREFIX}.1.up_proj.weight_scale"
    tensors[name].reshape(-1)[-1] = value
    refused(tmp_path, tensors, quantization, f"{name} has 1 ", "negative", "value of ")


def test_per_tensor_scale_of_zero(tmp_path: Path) -> None:
    tensors, quantization = stored(PER_TENSOR)
    name = f"{PREFIX}.1.up_proj.weight_scale"
    tensors[name] = torch.tensor(0.0)
    refused(tmp_path, tensors, quantization, f"{name} has 1 zero, negative, NaN or Inf value of 1, first at []")


@pytest.mark.parametrize("projection", list(NAMES.values()))
@pytest.mark.parametrize("group", [PER_CHANNEL, (128, 128)], ids=str)
def test_scale_of_zero(tmp_path: Path, group: tuple[int, int], projection: str) -> None:
    """A pruned channel or block is exact; a scale that underflowed has lost its weights."""
    tensors, quantization = stored(group)
    base = f"{PREFIX}.1.{projection}"
    tensors[f"{base}.weight_scale"][1, 0] = 0.0
    first, count = (1, 1) if group == PER_CHANNEL else (128, 64 if projection != "down_proj" else 128)
    refused(
        tmp_path / "a", tensors, quantization, f"{base}.weight_scale is 0 where {base}.weight is not", f"[{first}, "
    )
    cols = group[1] if group[1] > 0 else K
    # zeros of either sign
    tensors[f"{base}.weight"].view(torch.uint8)[first : first + count, :cols] = 0x80
    tensors[f"{base}.weight"].view(torch.uint8)[first, 0] = 0
    weights = source(tmp_path / "b", tensors, quantization).weights()
    assert bool((weights.w2_scale == 0).any() if projection == "down_proj" else (weights.w13_scale == 0).any())


def test_scale_of_zero_in_stacked_experts(tmp_path: Path) -> None:
    tensors = Experts(PER_CHANNEL).stacked(torch.Tensor.clone, "_weight_scale")
    tensors[f"{PREFIX}.gate_up_proj_weight_scale"][2, N + 5] = 0.0
    message = f"{PREFIX}.gate_up_proj_weight_scale is 0 of expert 2 where {PREFIX}.gate_up_proj is not"
    refused(tmp_path, tensors, CHANNEL, message, f"first at [{N + 5}, ")


@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_weights_of_another_type(tmp_path: Path, group: tuple[int, int]) -> None:
    tensors, quantization = stored(group)
    for dtype in (torch.int8, torch.float8_e5m2):
        changed = {n: t.float().to(dtype) if n.endswith(".weight") else t for n, t in tensors.items()}
        kind = str(dtype).removeprefix("torch.")
        refused(
            tmp_path, changed, quantization, f"{PREFIX}.0.gate_proj.weight has dtype {kind}, expected float8_e4m3fn"
        )


@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_scales_of_another_type(tmp_path: Path, group: tuple[int, int]) -> None:
    """Exponents where numbers are expected, and the reverse."""
    tensors, quantization = stored(group)
    dtype = torch.float32 if group == MX else torch.uint8
    changed = {n: torch.ones(t.shape).to(dtype) if n.endswith("weight_scale") else t for n, t in tensors.items()}
    kind = str(dtype).removeprefix("torch.")
    refused(tmp_path, changed, quantization, f"{PREFIX}.0.gate_proj.weight_scale has dtype {kind}, expected")


@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_experts_that_differ(tmp_path: Path, group: tuple[int, int]) -> None:
    tensors, quantization = stored(group)
    name = f"{PREFIX}.2.gate_proj.weight"
    changed = {**tensors, name: tensors[name].to(torch.bfloat16)}
    refused(tmp_path / "a", changed, quantization, f"{name} is BF16", f"expected F8_E4M3 [{N}, {K}] as {PREFIX}.0.")
    some = {n: t for n, t in tensors.items() if ".experts.1." not in n}
    refused(tmp_path / "b", some, quantization, "expert 1 is missing")
    fewer = {n: t for n, t in tensors.items() if ".experts.2." not in n}
    refused(tmp_path / "c", fewer, quantization, "num_experts is 3", "expert 2 is missing")
    del tensors[f"{PREFIX}.1.down_proj.weight_scale"]
    refused(tmp_path / "d", tensors, quantization, f"{PREFIX}.1.down_proj.weight_scale is missing")


@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_experts_that_are_not_quantized(tmp_path: Path, group: tuple[int, int]) -> None:
    tensors, quantization = stored(group)
    plain = {n: t.to(torch.bfloat16) for n, t in tensors.items() if n.endswith(".weight")}
    refused(tmp_path / "a", plain, quantization, f"{PREFIX} is not quantized: its weights are BF16 without scales")
    some = {n: t.to(torch.bfloat16) if "down_proj.weight" in n else t for n, t in tensors.items()}
    some = {n: t for n, t in some.items() if "down_proj.weight_scale" not in n}
    message = f"{PREFIX}.0.down_proj.weight has dtype bfloat16, expected float8_e4m3fn as {PREFIX}.0.gate_proj.weight"
    refused(tmp_path / "b", some, quantization, message, "quantized alike")


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"},
        {"quant_method": "compressed-tensors", "config_groups": {}},
    ],
    ids=lambda q: q["quant_method"],
)
def test_configs_that_quantize_nothing(tmp_path: Path, quantization: dict[str, Any]) -> None:
    plain = {n: t.to(torch.bfloat16) for n, t in Experts(PER_CHANNEL).tensors().items() if n.endswith(".weight")}
    refused(tmp_path, plain, quantization, f"{PREFIX} is not quantized: its weights are BF16 without scales")


def test_tensors_that_no_fp8_format_has(tmp_path: Path) -> None:
    """What would change the values is never left out."""
    tensors, quantization = stored(PER_TENSOR)
    for suffix in ("pre_quant_scale", "weight_scale_2", "weight_g_idx"):
        changed = {**tensors, **{f"{PREFIX}.{e}.up_proj.{suffix}": torch.ones(K) for e in range(E)}}
        refused(tmp_path, changed, quantization, f"{PREFIX}.0.up_proj.{suffix} is F32")


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_zero_points(tmp_path: Path, value: float) -> None:
    """Some tools write those of symmetric types too; another value than 0 is none of ours."""
    tensors, quantization = stored(PER_CHANNEL)
    extra = {
        f"{PREFIX}.{e}.{name}.weight_zero_point": torch.zeros(1).to(torch.float8_e4m3fn)
        for e in range(E)
        for name in NAMES.values()
    }
    last = f"{PREFIX}.{E - 1}.up_proj.weight_zero_point"
    extra[last] = torch.tensor([value]).to(torch.float8_e4m3fn)
    if value:
        refused(tmp_path, {**tensors, **extra}, quantization, f"{last} holds values other than 0")
    else:
        check(
            source(tmp_path, {**tensors, **extra}, quantization),
            Experts(PER_CHANNEL),
            kFp8StaticChannelSym,
            kFp8DynamicTokenSym,
        )


def test_two_scales(tmp_path: Path) -> None:
    tensors, quantization = stored(PER_TENSOR)
    tensors |= {f"{PREFIX}.{e}.up_proj.weight_scale_inv": torch.ones(()) for e in range(E)}
    refused(tmp_path, tensors, quantization, "weight_scale_inv and", "weight_scale are both present")


def test_only_the_asked_experts_are_read(tmp_path: Path) -> None:
    tensors, quantization = stored(PER_CHANNEL)
    tensors[f"{PREFIX}.1.up_proj.weight_scale"][0, 0] = 0.0
    write(tmp_path, {n: t.clone() for n, t in tensors.items()}, {**CONFIG, "quantization_config": quantization})
    found = read_layer(Checkpoint.open(tmp_path), experts=[2, 0])
    found.weights().validate(found.config, values=True)


ROUTER: dict[str, tuple[int, ...]] = {"weight": (K,), "bias": ()}
INTERLEAVED: dict[str, tuple[dict[str, Any], tuple[int, int]]] = {
    "tensor": ({"quant_method": "modelopt", "quant_algo": "FP8"}, (-1, -1)),
    "channel": (CHANNEL, (1, -1)),
    "block": (BLOCK, (128, 128)),
    "MXFP8": (MXFP8, (1, 32)),
}


@pytest.mark.parametrize("transposed", [True, False], ids=["transposed", "rows"])
@pytest.mark.parametrize("name", INTERLEAVED)
def test_gate_and_up_rows_in_turns(tmp_path: Path, name: str, transposed: bool) -> None:
    """gpt-oss, as ModelOpt writes it: all experts in one tensor, biases in turns, too."""
    quantization, (row, col) = INTERLEAVED[name]
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}
    for projection, rows, cols in (("gate_up_proj", 2 * N, K), ("down_proj", K, N)):
        base = f"{PREFIX}.{projection}"
        codes = torch.randn(E, rows, cols, generator=generator).to(torch.float8_e4m3fn)
        grid = (1, 1) if row == -1 else (-(-rows // row), 1 if col == -1 else -(-cols // col))
        # one for all experts, where it is one for all of a matrix
        scale = torch.randint(-3, 4, (1 if row == -1 else E, *grid), generator=generator).float().exp2()
        spread = scale.repeat_interleave(rows if row == -1 else row, 1)[:, :rows]
        spread = spread.repeat_interleave(cols if col == -1 else col, 2)[:, :, :cols]
        values[projection] = codes.double() * spread.double()
        bias = torch.randn(E, rows, generator=generator).bfloat16()
        values[f"{base}_bias"] = bias.float()
        stored = exponents(scale) if name == "MXFP8" else scale
        tensors[base] = (codes.view(torch.uint8).mT if transposed else codes.view(torch.uint8)).contiguous()
        tensors[base] = tensors[base].view(torch.float8_e4m3fn)
        tensors[f"{base}_weight_scale"] = (stored.mT if transposed else stored).contiguous()
        tensors[f"{base}_bias"] = bias
        if name == "tensor":
            tensors[f"{base}_weight_scale"] = scale.reshape(())
            tensors[f"{base}_input_scale"] = torch.tensor(0.5)
    config = {**CONFIG, "model_type": "gpt_oss", "quantization_config": quantization}
    router = {f"{PREFIX.removesuffix('experts')}router.{n}": torch.zeros(E, *s).bfloat16() for n, s in ROUTER.items()}
    write(tmp_path, {**tensors, **router}, config)
    found = read_layer(Checkpoint.open(tmp_path))
    weights = found.weights()
    weights.validate(found.config, values=True)
    rows, biases = values["gate_up_proj"], values[f"{PREFIX}.gate_up_proj_bias"]
    expected = torch.cat((rows[:, ::2], rows[:, 1::2]), dim=1)
    key = weights.weight_key
    assert key is not None
    for codes, scale, want, parts in (
        (weights.w13, weights.w13_scale, expected, 2),
        (weights.w2, weights.w2_scale, values["down_proj"], 1),
    ):
        assert scale is not None
        assert torch.equal(dequantize_weight(codes, scale, key, parts=parts).double(), want)
    assert weights.w13_bias is not None
    assert torch.equal(weights.w13_bias, torch.cat((biases[:, ::2], biases[:, 1::2]), dim=1))
    if found.layout.column_unit is not None:
        half = found.layout.load_columns(found.whole, N // 2, N, experts=range(E))
        assert half.w13_scale is not None
        part = torch.cat((expected[:, N // 2 : N], expected[:, N + N // 2 :]), dim=1)
        assert torch.equal(dequantize_weight(half.w13, half.w13_scale, key, parts=2).double(), part)


def test_a_lost_row_of_gate_and_up_in_turns_is_named_as_stored(tmp_path: Path) -> None:
    codes = torch.ones(E, 2 * N, K).to(torch.float8_e4m3fn)
    scale = torch.ones(E, 2 * N, 1)
    scale[1, 5] = 0
    tensors = {
        f"{PREFIX}.gate_up_proj": codes,
        f"{PREFIX}.gate_up_proj_weight_scale": scale,
        f"{PREFIX}.down_proj": torch.ones(E, K, N).to(torch.float8_e4m3fn),
        f"{PREFIX}.down_proj_weight_scale": torch.ones(E, K, 1),
        **{f"{PREFIX}.{name}_bias": torch.zeros(E, rows) for name, rows in (("gate_up_proj", 2 * N), ("down_proj", K))},
    }
    given = ModelSettings(routing="per_call")
    write(tmp_path, tensors, {**CONFIG, "model_type": "gpt_oss", "quantization_config": CHANNEL})
    with pytest.raises(CheckpointError, match=r"gate_up_proj_weight_scale .*\[5, 0\]"):
        read_layer(Checkpoint.open(tmp_path), settings=given).weights()
