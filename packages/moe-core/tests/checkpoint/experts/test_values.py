from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from moe_core import CheckpointError
from moe_core.checkpoint import Checkpoint, find_layer
from moe_core.checkpoint.config.quant_args import QuantEntries, short
from moe_core.checkpoint.experts.matrices import ExpertMatrices, is_transposed, module_name, unquantized_reason
from moe_core.checkpoint.experts.values import Values, bad_values, has_bad_values, load_checked, refuse_lost_weights
from moe_core.checkpoint.model import read_model
from moe_core.spec.quant_key import kInt8StaticChannelSym
from moe_core_checkpoints import E, K, N, expert_tensors, layer_tensors, write
from torch import Tensor

PREFIX = "model.layers.0.mlp.experts"
E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu


def codes(*values: int, dtype: torch.dtype) -> Tensor:
    return torch.tensor(values, dtype=torch.uint8).view(dtype)


@pytest.mark.parametrize(
    ("tensor", "values", "expected", "what"),
    [
        (codes(0x7E, 0x7F, 0xFF, 0, dtype=E4M3), Values.FINITE, [0, 1, 1, 0], "NaN"),
        (codes(0x7B, 0x7C, 0xFD, 0, dtype=E5M2), Values.FINITE, [0, 1, 1, 0], "NaN or Inf"),
        (codes(0, 254, 255, dtype=E8M0), Values.SCALE, [0, 0, 1], "NaN (e8m0 code 255)"),
        (codes(0, 254, 255, dtype=torch.uint8), Values.SCALE, [0, 0, 1], "NaN (e8m0 code 255)"),
        (codes(0, 254, 255, dtype=torch.uint8), Values.FINITE, [0, 0, 0], "refused"),
        (torch.tensor([1, -1], dtype=torch.int8), Values.FINITE, [0, 0], "refused"),
        (torch.tensor([-9, -8, 7, 8], dtype=torch.int8), Values.INT4, [1, 0, 0, 1], "out-of-range (expected -8 to 7)"),
        (torch.tensor([1.0, math.nan, -math.inf, -1.0, 0.0]), Values.FINITE, [0, 1, 1, 0, 0], "NaN or Inf"),
        (torch.tensor([1.0, math.nan, math.inf, -1.0, 0.0]), Values.SCALE, [0, 1, 1, 1, 0], "NaN, Inf or negative"),
        (
            torch.tensor([1.0, math.nan, math.inf, -1.0, 0.0]).bfloat16(),
            Values.POSITIVE,
            [0, 1, 1, 1, 1],
            "zero, negative, NaN or Inf",
        ),
    ],
)
def test_bad_values(tensor: Tensor, values: Values, expected: list[int], what: str) -> None:
    bad, text = bad_values(tensor, values)
    assert (bad.int().tolist(), text) == (expected, what)
    # each element alone, and all together
    for one, refused in zip(tensor, expected, strict=True):
        assert bool(has_bad_values(one, values)) is bool(refused)
    assert bool(has_bad_values(tensor, values)) is any(expected)


@pytest.mark.parametrize("values", [values for values in Values if values is not Values.INT4])
@pytest.mark.parametrize("dtype", [E4M3, E5M2, E8M0, torch.uint8, torch.float32, torch.bfloat16, torch.float16])
def test_every_way_to_look_agrees(dtype: torch.dtype, values: Values) -> None:
    """All codes of the one-byte types; samples of the others."""
    everything = torch.arange(256, dtype=torch.uint8)
    tensor = everything.view(dtype) if dtype.itemsize == 1 else codes(*range(256), dtype=E4M3).to(dtype)
    for one in tensor:
        assert bool(has_bad_values(one, values)) is bool(bad_values(one, values)[0])
    assert not bool(has_bad_values(tensor[:0], values))


def test_refused_by_name_and_place(tmp_path: Path) -> None:
    tensors = expert_tensors()
    name = f"{PREFIX}.2.up_proj.weight"
    tensors[name][3, 5] = math.nan
    tensors[name][4, 1] = math.inf
    layer = find_layer(Checkpoint.open(write(tmp_path, tensors)))
    message = rf"{re.escape(name)} .*\[3, 5\]"
    with pytest.raises(CheckpointError, match=message):
        load_checked(layer, ("gate", "up"), "weight", Values.FINITE, experts=range(E), device="cpu")
    # the place is the file's, whatever is kept of the tensor
    with pytest.raises(CheckpointError, match=message):
        load_checked(
            layer, ("gate", "up"), "weight", Values.FINITE, experts=[2], device="cpu", arrange=lambda t: t.mT.flip(1)
        )
    sound = load_checked(layer, ("up",), "weight", Values.FINITE, experts=[1], device="cpu")
    assert torch.equal(sound[0], tensors[f"{PREFIX}.1.up_proj.weight"])


def test_refused_in_a_stacked_tensor(tmp_path: Path) -> None:
    """Counted in all of it, which is never read as a whole."""
    weights = {f"{PREFIX}.gate_up_proj": torch.zeros(E, 2 * N, K), f"{PREFIX}.down_proj": torch.zeros(E, K, N)}
    weights[f"{PREFIX}.gate_up_proj"][1:3, 4, 5] = math.nan
    checkpoint = Checkpoint.open(write(tmp_path, weights))
    checkpoint.tensor = None  # type: ignore[method-assign,assignment]
    message = r"gate_up_proj .*\[1, 4, 5\]"
    with pytest.raises(CheckpointError, match=message):
        load_checked(find_layer(checkpoint), ("gate_up",), "weight", Values.FINITE, experts=range(E), device="cpu")


def test_values_that_are_not_kept_are_not_looked_at(tmp_path: Path) -> None:
    tensors = expert_tensors()
    tensors[f"{PREFIX}.2.up_proj.weight"][3, 5] = math.nan
    layer = find_layer(Checkpoint.open(write(tmp_path, tensors)))
    load_checked(layer, ("up",), "weight", Values.FINITE, experts=[2], device="cpu", arrange=lambda t: t[:, :3])


def test_lost_weights_of_any_type(tmp_path: Path) -> None:
    """Integer codes too: a scale of 0 over anything but zeros."""
    layer = find_layer(Checkpoint.open(write(tmp_path, expert_tensors())))
    weight = torch.ones(2, 2 * N, K, dtype=torch.int8)
    scale = torch.ones(2, 2 * N, 1)

    def look() -> None:
        refuse_lost_weights(
            layer,
            ("gate", "up"),
            ("weight", "weight"),
            {"weight": weight, "scale": scale},
            kInt8StaticChannelSym,
            experts=[3, 1],
            cols=K,
        )

    look()
    scale[1, N + 2] = 0
    message = r"experts\.1\.up_proj\.weight .*\[2, 0\]"
    with pytest.raises(CheckpointError, match=message):
        look()
    weight[1, N + 2] = 0
    look()


# ------------------------------------------------------------------ matrices


def test_matrices(tmp_path: Path) -> None:
    layer = find_layer(Checkpoint.open(write(tmp_path, layer_tensors())))
    matrices = ExpertMatrices.of(layer, read_model(layer).config)
    assert matrices.first == ("gate", "up")
    assert matrices.sizes == {"gate": (N, K), "up": (N, K), "down": (K, N)}
    assert matrices.stacks == (("w13", ("gate", "up")), ("w2", ("down",)))
    assert not is_transposed(layer)
    assert module_name(layer, "gate", 2) == f"{PREFIX}.2.gate_proj"
    assert unquantized_reason(layer) == "its weights are BF16 without scales"


@pytest.mark.parametrize("transposed", [False, True])
def test_stacked_matrices(tmp_path: Path, transposed: bool) -> None:
    shapes = ((E, K, 2 * N), (E, N, K)) if transposed else ((E, 2 * N, K), (E, K, N))
    tensors = {
        f"{PREFIX}.{name}": torch.zeros(s) for name, s in zip(("gate_up_proj", "down_proj"), shapes, strict=True)
    }
    layer = find_layer(Checkpoint.open(write(tmp_path, tensors)))
    assert is_transposed(layer) is transposed
    assert module_name(layer, "gate_up") == f"{PREFIX}.gate_up_proj"
    assert unquantized_reason(layer) == "its weights are F32 without scales"


@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3], ids=str)
def test_a_scale_or_another_type_is_quantized(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {name: t.to(dtype) for name, t in expert_tensors().items()}
    if dtype is torch.bfloat16:
        tensors |= {name.replace("weight", "weight_scale"): torch.ones(()) for name in tensors}
    assert unquantized_reason(find_layer(Checkpoint.open(write(tmp_path, tensors)))) is None


# ------------------------------------------------------------------ typed reads


def test_typed_reads() -> None:
    entries = QuantEntries({"a": 3, "b": "text", "c": None, "d": True, "e": [2, 4], "f": {"g": 1}}, "file")
    assert (entries.integer("a"), entries.integer("c", 7), entries.text("b"), entries.boolean("d")) == (
        3,
        7,
        "text",
        True,
    )
    assert entries.block("e") == (2, 4)
    assert entries.part("c") is None
    inner = entries.part("f")
    assert inner is not None
    assert (inner.where, inner.integer("g")) == ("file.f", 1)
    for read in (entries.integer, entries.block, entries.part):
        with pytest.raises(CheckpointError, match=r"\bd .*True"):
            read("d")
    with pytest.raises(CheckpointError, match=r"\ba .*3"):
        entries.integer("a", least=4)
    assert len(short("x" * 1000)) < 100
