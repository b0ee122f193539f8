"""GPTQ v1 and v2: words, zero points minus one, activation order, settings of some modules, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_core import (
    CheckpointError,
    CheckpointWarning,
    QuantKey,
    kInt4Static,
    kInt4StaticAsym,
    kInt8Static,
    kInt8StaticAsym,
)
from moe_core._support import open_file
from moe_core.checkpoint import Checkpoint, read_layer
from moe_core.testing.checkpoints import CONFIG, PREFIX, reason_against, refused, source, write
from moe_core_checkpoints import count_reads
from moe_wna16.formats.gptq import GptqFormat
from moe_wna16_words import SIZES, Codes, K, N, check, gptq, gptq_2, word
from torch import Tensor

KEYS = {(4, True): kInt4Static, (4, False): kInt4StaticAsym, (8, True): kInt8Static, (8, False): kInt8StaticAsym}
GPTQMODEL = {"quantizer": ["gptqmodel:7.7.0"]}


def config(experts: Codes, **changes: Any) -> dict[str, Any]:
    return {
        "quant_method": "gptq",
        "bits": experts.bits,
        "group_size": experts.group,
        "sym": experts.symmetric,
        "desc_act": False,
        **changes,
    }


def key_of(experts: Codes, *, permuted: bool = False) -> QuantKey:
    key = KEYS[experts.bits, experts.symmetric].with_group(1, experts.group).with_scale_dtype(experts.dtype)
    return replace(key, permuted=permuted)


@pytest.mark.parametrize("order", [False, True], ids=["in order", "permuted"])
def test_groups_of_columns_are_read_once(tmp_path: Path, order: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And config.json is understood once, however many things are asked of the layer."""
    experts = Codes(4, 32, order=order)
    tensors = experts.tensors(gptq)
    parsed: list[object] = []
    storage = GptqFormat.storage

    def counted(self: GptqFormat, *given: Any) -> object:
        parsed.append(given)
        return storage(self, *given)

    monkeypatch.setattr(GptqFormat, "storage", counted)
    read = count_reads(monkeypatch)
    found = source(tmp_path, tensors, config(experts), **SIZES)
    check(found, experts, key_of(experts, permuted=order))
    names = {name for name in tensors if name.endswith("g_idx")}
    assert {name: read[name] for name in names} == dict.fromkeys(names, 1)
    assert len(parsed) == 1


def test_zero_points_of_a_symmetric_type_are_read_with_their_neighbors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A matrix's lie before the next one's groups of columns: a call of the system reads both."""
    experts = Codes(4, 32)
    tensors = experts.tensors(gptq)
    buffers: list[int] = []
    original = open_file._fill

    def fill(descriptor: int, run: list[memoryview], offset: int, wanted: int) -> int:
        buffers.append(len(run))
        return original(descriptor, run, offset, wanted)

    read = count_reads(monkeypatch)
    monkeypatch.setattr(open_file, "_GAP", memoryview(b""))
    monkeypatch.setattr(open_file, "_fill", fill)
    found = source(tmp_path, tensors, config(experts), **SIZES)
    matrices = [name for name in tensors if name.endswith("qzeros") and not name.startswith(f"{PREFIX}.0.")]
    assert buffers.count(2) == len(matrices) - 1 > 0
    check(found, experts, key_of(experts))
    zeros = {name for name in tensors if name.endswith("qzeros")}
    assert {name: read[name] for name in zeros} == dict.fromkeys(zeros, 1)


@pytest.mark.parametrize("group", [32, 64, 128, -1])
@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("version", ["", "gptq", "gptq_v2"])
def test_versions(tmp_path: Path, version: str, bits: int, symmetric: bool, group: int) -> None:
    """Of 96 columns in groups of 64 and 48 in groups of 32, the last group is short."""
    experts = Codes(bits, group, symmetric=symmetric, low=0 if version == "gptq_v2" else 1, dtype=torch.float16)
    tensors = experts.tensors(gptq_2 if version == "gptq_v2" else gptq)
    stated = {"checkpoint_format": version} if version else {}
    found = source(tmp_path, tensors, config(experts, **stated), **SIZES)
    assert found.format.name == "GPTQ"
    check(found, experts, key_of(experts))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_scales_keep_their_type(tmp_path: Path, dtype: torch.dtype) -> None:
    experts = Codes(dtype=dtype)
    check(source(tmp_path, experts.tensors(gptq), config(experts), **SIZES), experts, key_of(experts))


def test_scales_of_several_types_become_float32(tmp_path: Path) -> None:
    experts = Codes(dtype=torch.bfloat16)
    tensors = {n: t.float() if n.endswith("down_proj.scales") else t for n, t in experts.tensors(gptq).items()}
    key = key_of(experts).with_scale_dtype(torch.float32)
    check(source(tmp_path, tensors, config(experts), **SIZES), experts, key)


def test_experts_without_a_gate_and_with_biases(tmp_path: Path) -> None:
    experts = Codes(gated=False)
    tensors = experts.tensors(gptq)
    for name in [name for name in tensors if name.endswith("qweight")]:
        bias = torch.arange(tensors[name].shape[1]).half()
        tensors[name.replace("qweight", "bias")] = bias
    found = source(tmp_path, tensors, config(experts), **SIZES, hidden_act="relu2")
    check(found, experts, key_of(experts))
    assert found.config.has_bias
    bias = found.weights().w13_bias
    assert bias is not None
    assert torch.equal(bias[2], torch.arange(N).float())


def test_some_experts_in_an_order_of_their_own(tmp_path: Path) -> None:
    """Global ids, as a rank of expert parallelism asks for them."""
    experts = Codes(symmetric=False, low=1, order=True)
    folder = write(tmp_path, experts.tensors(gptq), {**CONFIG, **SIZES, "quantization_config": config(experts)})
    whole = read_layer(Checkpoint.open(folder)).weights()
    found = read_layer(Checkpoint.open(folder), experts=[2, 0])
    check(found, experts, key_of(experts, permuted=True))
    for name, tensor in found.weights().tensors():
        assert torch.equal(tensor, getattr(whole, name)[[2, 0]]), name


def stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """One tensor for all experts, gate and up side by side: rows are the last dimension."""

    def every(projection: str, suffix: str) -> Tensor:
        return torch.stack([tensors[f"{PREFIX}.{e}.{projection}.{suffix}"] for e in range(3)])

    found = {}
    for suffix in ("qweight", "qzeros", "scales"):
        both = torch.cat([every("gate_proj", suffix), every("up_proj", suffix)], dim=2)
        found[f"{PREFIX}.gate_up_proj.{suffix}"] = both.contiguous()
        found[f"{PREFIX}.down_proj.{suffix}"] = every("down_proj", suffix)
    return found


def test_stacked_experts(tmp_path: Path) -> None:
    experts = Codes(symmetric=False, low=1)
    found = source(tmp_path, stacked(experts.tensors(gptq)), config(experts), **SIZES)
    check(found, experts, key_of(experts))


# ------------------------------------------------------------------ zero points


@pytest.mark.parametrize("bits", [4, 8])
def test_a_stored_zero_point_of_all_ones_stays_in_its_field(tmp_path: Path, bits: int) -> None:
    """15 stands for 16, and the field above it keeps its value."""
    experts = Codes(bits, symmetric=False, low=1)
    for one in experts.matrices:
        for matrix in one.values():
            matrix.z[::3] = 2**bits
    found = source(tmp_path, experts.tensors(gptq), config(experts), **SIZES)
    check(found, experts, key_of(experts))
    zero = found.weights().w13_zero_point
    assert zero is not None
    assert int(zero.max()) == 2**bits


@pytest.mark.parametrize("bits", [4, 8])
def test_gptqmodel_subtracts_from_words(tmp_path: Path, bits: int) -> None:
    """Its zero points of 0 borrow from the field above, and its reader adds the same number to the word."""
    experts = Codes(bits, symmetric=False)
    for one in experts.matrices:
        for matrix in one.values():
            matrix.z[1::8] = 0
    ones = word([1] * (32 // bits), bits)
    tensors = {
        name: (tensor.long() - ones).to(torch.int32) if name.endswith("qzeros") else tensor
        for name, tensor in experts.tensors(gptq_2).items()
    }
    found = source(tmp_path, tensors, config(experts, checkpoint_format="gptq", meta=GPTQMODEL), **SIZES)
    check(found, experts, key_of(experts))


def test_nothing_said_of_symmetry(tmp_path: Path) -> None:
    """The zero points are taken as they are; without any, weights are symmetric."""
    experts = Codes()
    quantization = config(experts)
    del quantization["sym"]
    asymmetric = kInt4StaticAsym.with_group(1, 32)
    check(source(tmp_path / "a", experts.tensors(gptq), quantization, **SIZES), experts, asymmetric)
    without = {n: t for n, t in experts.tensors(gptq).items() if not n.endswith("qzeros")}
    check(source(tmp_path / "b", without, quantization, **SIZES), experts, key_of(experts))
    check(source(tmp_path / "c", without, config(experts), **SIZES), experts, key_of(experts))


@pytest.mark.parametrize(("version", "writer"), [("gptq", gptq_2), ("gptq_v2", gptq)], ids=["v1", "v2"])
def test_symmetric_zero_points_of_the_other_version(tmp_path: Path, version: str, writer: Any) -> None:
    """Config and tensors contradict each other, and ``sym`` says which is right; never silently."""
    experts = Codes()
    found = source(tmp_path, experts.tensors(writer), config(experts, checkpoint_format=version), **SIZES)
    with pytest.warns(CheckpointWarning, match="qzeros"):
        weights = found.weights()
    assert weights.weight_key == key_of(experts)


def test_zero_points_that_contradict_symmetry(tmp_path: Path) -> None:
    experts = Codes(symmetric=False, low=1)
    message = "expected 8 everywhere: weights are symmetric (4 bits in groups of 32"
    refused(
        tmp_path, experts.tensors(gptq), config(experts, sym=True), f"{PREFIX}.0.gate_proj.qzeros", message, **SIZES
    )


# ------------------------------------------------------------------ activation order


@pytest.mark.parametrize("ragged", [False, True], ids=["even", "ragged"])
@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("bits", [4, 8])
def test_activation_order(tmp_path: Path, bits: int, symmetric: bool, ragged: bool) -> None:
    experts = Codes(bits, symmetric=symmetric, low=1, order=True, ragged=ragged)
    found = source(tmp_path, experts.tensors(gptq), config(experts, desc_act=True), **SIZES)
    check(found, experts, key_of(experts, permuted=True))
    weights = found.weights()
    assert weights.w13_g_idx is not None
    assert weights.w2_g_idx is not None
    assert weights.w13_g_idx.dtype is torch.int32
    assert torch.equal(weights.w13_g_idx[1], experts.matrices[1]["up"].g_idx)
    assert torch.equal(weights.w2_g_idx[1], experts.matrices[1]["down"].g_idx)


def test_columns_that_lie_in_order_are_not_permuted(tmp_path: Path) -> None:
    experts = Codes()
    check(source(tmp_path, experts.tensors(gptq), config(experts, desc_act=True), **SIZES), experts, key_of(experts))


def test_one_expert_out_of_order(tmp_path: Path) -> None:
    """All of the layer's experts say their groups then."""
    experts, other = Codes(), Codes(order=True)
    experts.matrices[2]["down"].g_idx = other.matrices[2]["down"].g_idx
    found = source(tmp_path, experts.tensors(gptq), config(experts, desc_act=True), **SIZES)
    check(found, experts, key_of(experts, permuted=True))


def test_order_of_one_group_is_none(tmp_path: Path) -> None:
    experts = Codes(group=-1, order=True)
    without = {n: t for n, t in experts.tensors(gptq).items() if not n.endswith("g_idx")}
    for folder, tensors in (("a", experts.tensors(gptq)), ("b", without)):
        found = source(tmp_path / folder, tensors, config(experts, desc_act=True), **SIZES)
        check(found, experts, key_of(experts))


def of_all(tensors: dict[str, Tensor], suffix: str, change: Any) -> dict[str, Tensor]:
    return {n: change(t.clone()) if n.endswith(suffix) else t for n, t in tensors.items()}


def put(at: int, value: int) -> Any:
    def change(tensor: Tensor) -> Tensor:
        tensor[at] = value
        return tensor

    return change


GATE = f"{PREFIX}.0.gate_proj"
G_IDX: dict[str, tuple[Any, str]] = {
    "too large": (put(5, 3), f"{GATE}.g_idx is 3 at [5], expected 0 to 2: {GATE}.scales has 3 groups"),
    "negative": (put(95, -1), f"{GATE}.g_idx is -1 at [95], expected 0 to 2"),
    "nothing but -1": (lambda t: torch.full_like(t, -1), f"{GATE}.g_idx is -1 at [0], expected 0 to 2"),
    "an empty group": (
        lambda t: t.clamp_max(1),
        f"{GATE}.g_idx puts no column into group 2, expected columns in all 3",
    ),
    "short": (lambda t: t[:-1].contiguous(), f"{GATE}.g_idx has shape [95], expected [96]"),
    "type": (Tensor.float, f"{GATE}.g_idx has dtype float32, expected int32 or int64"),
}


@pytest.mark.parametrize("name", G_IDX)
def test_groups_of_columns_that_do_not_fit(tmp_path: Path, name: str) -> None:
    change, message = G_IDX[name]
    experts = Codes(order=True)
    tensors = of_all(experts.tensors(gptq), "gate_proj.g_idx", change)
    refused(tmp_path, tensors, config(experts, desc_act=True), message, **SIZES)


def test_gate_and_up_that_group_columns_differently(tmp_path: Path) -> None:
    experts, other = Codes(order=True), Codes(order=True, seed=2)
    experts.matrices[1]["up"].g_idx = other.matrices[1]["up"].g_idx
    parts = (f"{PREFIX}.1.up_proj.g_idx is", f"as {PREFIX}.1.gate_proj.g_idx", "must group their columns alike")
    refused(tmp_path, experts.tensors(gptq), config(experts, desc_act=True), *parts, **SIZES)


def test_order_without_its_tensor(tmp_path: Path) -> None:
    experts = Codes(order=True)
    without = {n: t for n, t in experts.tensors(gptq).items() if not n.endswith("g_idx")}
    refused(tmp_path, without, config(experts, desc_act=True), "gate_proj.g_idx is missing in", **SIZES)


# ------------------------------------------------------------------ settings of some modules


def test_settings_of_some_modules(tmp_path: Path) -> None:
    """GPTQModel's ``dynamic``: patterns from a module's start, the first one counts, "-:" are modules in 16 bits."""
    experts = Codes(8, 64)
    dynamic = {
        "-:.*mlp.gate.*": {},
        r"+:.*\.experts\..*": {"bits": 8, "group_size": 64},
        r".*down_proj": {"bits": 4},
    }
    quantization = config(experts, bits=4, group_size=128, dynamic=dynamic)
    check(source(tmp_path, experts.tensors(gptq), quantization, **SIZES), experts, key_of(experts))


@pytest.mark.parametrize(
    ("dynamic", "message"),
    [
        ({r".*\.down_proj": {"group_size": 64}}, "group_size is 64 for"),
        ({r".*experts\.1\..*": {"bits": 8}}, f"bits is 4 for {PREFIX}.0.down_proj and 8 for {PREFIX}.1.down_proj"),
        ({"+:(": {"bits": 8}}, "the key '(' is not a valid regular expression"),
        ({".*": 4}, "dynamic: .* is 4, expected an object"),
    ],
    ids=["projections", "experts", "pattern", "type"],
)
def test_settings_that_differ_within_a_layer(tmp_path: Path, dynamic: Any, message: str) -> None:
    experts = Codes()
    refused(tmp_path, experts.tensors(gptq), config(experts, dynamic=dynamic), message, **SIZES)


# ------------------------------------------------------------------ refused


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    **{f"{bits} bits": ({"bits": bits}, f"bits is {bits}, expected 4 or 8") for bits in (2, 3, 5, 6, 7, 16)},
    "no bits": ({"bits": None}, "bits is None, expected 4 or 8"),
    "marlin": ({"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin', expected 'gptq' or 'gptq_v2'"),
    "old marlin": ({"is_marlin_format": True}, "checkpoint_format is 'marlin', expected"),
    "bitblas": ({"format": "bitblas"}, "checkpoint_format is 'bitblas', expected"),
    "short words": ({"pack_dtype": "int16"}, "pack_dtype is 'int16', expected 'int32'"),
    "no group": ({"group_size": None}, "group_size is None, expected the columns of a group, or -1 for all"),
    "group of none": ({"group_size": 0}, "group_size is 0, expected the columns of a group"),
    "group of a name": ({"group_size": "128"}, "group_size is '128', expected an integer"),
    "sym": ({"sym": 1}, "sym is 1, expected true or false"),
    "another tool": ({"quant_method": "awq"}, "quant_method is 'awq', expected 'gptq'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(tmp_path: Path, name: str) -> None:
    changes, message = REFUSED[name]
    experts = Codes()
    assert message in reason_against(GptqFormat(), tmp_path, experts.tensors(gptq), config(experts, **changes))


def test_bits_are_refused_by_name(tmp_path: Path) -> None:
    experts = Codes()
    refused(
        tmp_path, experts.tensors(gptq), config(experts, bits=3), "GPTQ (wna16): bits is 3, expected 4 or 8", **SIZES
    )


UP = f"{PREFIX}.0.up_proj"
BROKEN: dict[str, tuple[str, Any, str]] = {
    "groups of scales": (
        "up_proj.scales",
        lambda t: t[:2].contiguous(),
        f"{UP}.scales has shape [2, 48], expected [3, 48] (4 bits in groups of 32: ",
    ),
    "groups of zero points": (
        "up_proj.qzeros",
        lambda t: t[:2].contiguous(),
        f"{UP}.qzeros has shape [2, 6], expected [3, 6] (4 bits in groups of 32: ",
    ),
    "orientation": ("up_proj.scales", lambda t: t.mT.contiguous(), f"{UP}.scales has shape [48, 3], expected [3, 48]"),
    "words": ("up_proj.qweight", lambda t: t[1:].contiguous(), f"{UP}.qweight has shape [11, 48], expected [12, 48]"),
    "words of 8 bits": (
        "up_proj.qweight",
        lambda t: torch.cat([t, t]),
        f"{UP}.qweight has shape [24, 48], expected [12,",
    ),
    "type of words": ("up_proj.qweight", Tensor.long, f"{UP}.qweight has dtype int64, expected int32"),
    "type of scales": ("up_proj.scales", Tensor.int, f"{UP}.scales has dtype int32, expected float32 or bfloat16"),
    "NaN": (
        "up_proj.scales",
        lambda t: t * float("nan"),
        f"{UP}.scales has 144 NaN or Inf values of 144, first at [0, 0]",
    ),
    "zero": ("up_proj.scales", torch.zeros_like, f"{UP}.scales is 0 where {UP}.qweight is not"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_tensors_that_do_not_fit(tmp_path: Path, name: str) -> None:
    suffix, change, message = BROKEN[name]
    experts = Codes(symmetric=False, low=1)
    refused(tmp_path, of_all(experts.tensors(gptq), suffix, change), config(experts), message, **SIZES)


def test_a_tensor_that_does_not_fit_says_where_the_settings_are(tmp_path: Path) -> None:
    experts = Codes()
    tensors = of_all(experts.tensors(gptq), "up_proj.scales", lambda t: t[:2].contiguous())
    where = f"(4 bits in groups of 32: {tmp_path / 'config.json'}: quantization_config"
    refused(tmp_path, tensors, config(experts), where, **SIZES)


def test_tensors_that_are_missing_or_too_many(tmp_path: Path) -> None:
    experts = Codes(symmetric=False, low=1)
    base = experts.tensors(gptq)
    cases: dict[str, tuple[dict[str, Tensor], str]] = {
        "no scales": ({n: t for n, t in base.items() if "up_proj.scales" not in n}, f"{UP}.scales is missing in"),
        "no zeros": ({n: t for n, t in base.items() if "up_proj.qzeros" not in n}, f"{UP}.qzeros is missing in"),
        "no codes": ({n: t for n, t in base.items() if "up_proj.qweight" not in n}, f"{UP}.qweight is missing in"),
        "one expert's": (
            {n: t for n, t in base.items() if n != f"{PREFIX}.1.up_proj.qzeros"},
            f"{PREFIX}.1.up_proj.qzeros is missing in",
        ),
        "an expert": ({n: t for n, t in base.items() if f"{PREFIX}.1." not in n}, "expert 1 is missing"),
        "the last expert": ({n: t for n, t in base.items() if f"{PREFIX}.2." not in n}, "expert 2 is missing"),
        "an adapter": (
            {**base, **{f"{PREFIX}.{e}.up_proj.lora_A": torch.ones(2, K) for e in range(3)}},
            "no such tensor",
        ),
        "16 bits": (
            {n: t for n, t in base.items() if "up_proj" not in n}
            | {f"{PREFIX}.{e}.up_proj.weight": torch.ones(N, K).bfloat16() for e in range(3)},
            f"{UP}.weight has dtype bfloat16, expected int32 as {PREFIX}.0.down_proj.qweight: all matrices",
        ),
    }
    for name, (tensors, message) in cases.items():
        refused(tmp_path / name, tensors, config(experts), message, **SIZES)


@pytest.mark.parametrize(
    ("bits", "sizes", "message"),
    [
        (4, {"hidden_size": 100}, "gate_proj.qweight has 100 columns, expected a multiple of 8"),
        (4, {"moe_intermediate_size": 44}, "gate_proj.qweight has 44 rows, expected a multiple of 8"),
        (8, {"moe_intermediate_size": 46}, "gate_proj.qweight has 46 rows, expected a multiple of 4"),
    ],
)
def test_sizes_that_do_not_fill_words(tmp_path: Path, bits: int, sizes: dict[str, int], message: str) -> None:
    experts = Codes(bits)
    refused(tmp_path, experts.tensors(gptq), config(experts), message, **{**SIZES, **sizes})


def test_a_scale_of_zero_over_zeros_is_exact(tmp_path: Path) -> None:
    experts = Codes(symmetric=False, low=1, order=True)
    for one in experts.matrices:
        matrix = one["up"]
        group = matrix.g_idx == 1
        matrix.q[5, group] = matrix.z[5, 1]
        matrix.s[5, 1] = 0
    found = source(tmp_path, experts.tensors(gptq), config(experts, desc_act=True), **SIZES)
    check(found, experts, key_of(experts, permuted=True))


def test_a_truncated_file(tmp_path: Path) -> None:
    experts = Codes()
    found = source(tmp_path, experts.tensors(gptq), config(experts), **SIZES)
    file = found.layer.checkpoint.path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="model.safetensors"):
        read_layer(Checkpoint.open(tmp_path))
