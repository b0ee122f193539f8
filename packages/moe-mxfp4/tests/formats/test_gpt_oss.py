"""gpt-oss: rows in turns, biases, what config.json says of the activation, and what is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_core import ActivationParams, CheckpointWarning, MoEActivation
from moe_core.checkpoint import Checkpoint, LayerSource, read_layer
from moe_core.testing.checkpoints import CONFIG, PREFIX, reason_against, refused, source, write
from moe_mxfp4.formats.gpt_oss import GptOssMxfp4Format
from moe_mxfp4_pairs import GPT_OSS, SIZES, E, Experts, K, N, check, packed, plain
from torch import Tensor

QUANTIZATION = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.mlp.router", "lm_head"]}
Tensors = dict[str, Tensor]


def gpt_oss(folder: Path, tensors: Tensors, **changes: Any) -> LayerSource:
    return source(folder, tensors, QUANTIZATION, **{**GPT_OSS, **changes})


@pytest.mark.parametrize("shards", [0, 3])
def test_a_release(tmp_path: Path, shards: int) -> None:
    experts = Experts(bias=True)
    found = gpt_oss(tmp_path, experts.gpt_oss(), shards=shards)
    check(found, experts)
    assert found.config.has_bias
    assert found.config.activation is MoEActivation.SWIGLUOAI


def test_scales_of_the_dtype_of_exponents(tmp_path: Path) -> None:
    experts = Experts(bias=True)
    tensors = {n: t.view(torch.float8_e8m0fnu) if n.endswith("scales") else t for n, t in experts.gpt_oss().items()}
    check(gpt_oss(tmp_path, tensors), experts)


def test_blocks_that_are_flat(tmp_path: Path) -> None:
    experts = Experts(bias=True)
    tensors = {n: t.flatten(2) if n.endswith("blocks") else t for n, t in experts.gpt_oss().items()}
    check(gpt_oss(tmp_path, tensors), experts)


@pytest.mark.filterwarnings("ignore:.*routing is assumed:moe_core.errors.CheckpointWarning")
def test_a_relative_under_another_name(tmp_path: Path) -> None:
    """Blocks are gpt-oss's: their rows are in turns, whatever the model is called."""
    experts = Experts(bias=True)
    found = gpt_oss(tmp_path, experts.gpt_oss(), model_type="openai_privacy_filter")
    check(found, experts)


def test_blocks_of_another_family(tmp_path: Path) -> None:
    """Whether rows lie in turns there is not known: refused, not guessed."""
    tensors = Experts().gpt_oss()
    message = "model_type is 'qwen3_moe': it is unknown whether gate and up rows are interleaved, as in gpt-oss"
    refused(tmp_path, tensors, QUANTIZATION, message, **SIZES, model_type="qwen3_moe")


def test_experts_of_a_rank(tmp_path: Path) -> None:
    experts = Experts(bias=True)
    path = write(tmp_path, experts.gpt_oss(), {**CONFIG, **GPT_OSS, "quantization_config": QUANTIZATION})
    found = read_layer(Checkpoint.open(path), experts=[2, 0])
    assert found.config.local_experts == 2
    check(found, experts)


@pytest.mark.parametrize("low", [0, 254])
def test_the_smallest_and_the_largest_scale(tmp_path: Path, low: int) -> None:
    """2**-127, which float32 holds as a subnormal, and 2**127."""
    experts = Experts(bias=True, low=low)
    for one in experts.matrices:
        for matrix in one.values():
            matrix.s.fill_(low)
    check(gpt_oss(tmp_path, experts.gpt_oss()), experts)


@pytest.mark.parametrize(
    ("change", "params"),
    [
        ({}, ActivationParams(1.702, 1.0, 7.0)),
        ({"swiglu_limit": 5.5}, ActivationParams(1.702, 1.0, 5.5)),
        ({"swiglu_limit": None}, ActivationParams(1.702, 1.0, 7.0)),  # "None" removes the entry
        ({"swiglu_limit": 9, "swiglu_alpha": 1.5}, ActivationParams(1.5, 1.0, 9.0)),
    ],
)
def test_the_activation_is_config_jsons(tmp_path: Path, change: dict[str, Any], params: ActivationParams) -> None:
    found = gpt_oss(tmp_path, Experts(bias=True).gpt_oss(), **change)
    assert found.config.activation is MoEActivation.SWIGLUOAI
    assert found.config.params == params


@pytest.mark.parametrize("store", [plain, packed])
def test_experts_one_by_one(tmp_path: Path, store: Callable[..., Tensors]) -> None:
    """Under the same name, as other tools write them; also with gate and up in one matrix."""
    experts = Experts(bias=True)
    check(source(tmp_path / "a", experts.tensors(store), QUANTIZATION, **SIZES), experts)
    check(gpt_oss(tmp_path / "b", experts.tensors(store)), experts)
    check(gpt_oss(tmp_path / "c", experts.together(store)), experts)


# ------------------------------------------------------------------ what is refused

GATE_UP, DOWN = f"{PREFIX}.gate_up_proj", f"{PREFIX}.down_proj"


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {n: t for n, t in tensors.items() if n != name}


def changed(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {n: change(t.clone()) if n == name else t for n, t in tensors.items()}


def put(value: float, *at: int) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        tensor[at] = value
        return tensor

    return change


REFUSED: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "no blocks": (without(f"{DOWN}_blocks"), f"{DOWN}_blocks is missing in"),
    "no scales": (without(f"{GATE_UP}_scales"), f"{GATE_UP}_scales is missing in"),
    "no bias": (without(f"{GATE_UP}_bias"), f"{GATE_UP}_bias is missing in"),
    "an odd row": (
        changed(f"{GATE_UP}_blocks", lambda t: t[:, 1:]),
        f"{GATE_UP}_blocks has shape [127, 3, 16], expected [128, 3, 16]",
    ),
    "a row of scales": (
        changed(f"{GATE_UP}_scales", lambda t: t[:, 1:]),
        f"{GATE_UP}_scales has shape [127, 3], expected [128, 3] (one e8m0 scale per 32 columns",
    ),
    "groups": (
        changed(f"{DOWN}_scales", lambda t: t[:, :, 1:]),
        f"{DOWN}_scales has shape [96, 1], expected [96, 2] (one e8m0 scale per 32 columns",
    ),
    "columns": (
        changed(f"{DOWN}_blocks", lambda t: t[:, :, 1:]),
        f"{DOWN}_blocks has shape [96, 1, 16], expected [96, 2, 16]",
    ),
    "a block of 8": (
        changed(f"{DOWN}_blocks", lambda t: t[..., :8]),
        f"{DOWN}_blocks has shape [96, 2, 8], expected [96, 2, 16]",
    ),
    "dtype": (changed(f"{DOWN}_blocks", Tensor.int), f"{DOWN}_blocks has dtype int32, expected uint8"),
    "dtype of scales": (
        changed(f"{DOWN}_scales", Tensor.float),
        f"{DOWN}_scales has dtype float32, expected uint8 or float8_e8m0fnu",
    ),
    "dtype of a bias": (changed(f"{DOWN}_bias", Tensor.int), f"{DOWN}_bias has dtype int32, expected float32 or"),
    "rows of a bias": (changed(f"{DOWN}_bias", lambda t: t[:, 1:]), f"{DOWN}_bias has shape [95], expected [96]"),
    "NaN": (
        changed(f"{DOWN}_scales", put(255, 1, 4, 1)),
        f"{DOWN}_scales has 1 NaN (e8m0 code 255) value of 576, first at [1, 4, 1]",
    ),
    "NaN of a gate": (
        changed(f"{GATE_UP}_scales", put(255, 2, 5, 0)),
        f"{GATE_UP}_scales has 1 NaN (e8m0 code 255) value of 1152, first at [2, 5, 0]",
    ),
    "NaN in a bias": (
        changed(f"{GATE_UP}_bias", put(float("nan"), 0, 3)),
        f"{GATE_UP}_bias has 1 NaN or Inf value of 384, first at [0, 3]",
    ),
    "one expert less": (
        changed(f"{DOWN}_scales", lambda t: t[1:]),
        f"{DOWN}_scales is U8 [2, 96, 2], expected [E, ...] with the number of experts of {DOWN}_blocks",
    ),
    "in 16 bits": (
        lambda tensors: {
            **{n: t for n, t in tensors.items() if not n.startswith(f"{DOWN}_")},
            DOWN: torch.zeros(E, N, K).bfloat16(),
            f"{DOWN}_bias": tensors[f"{DOWN}_bias"],
        },
        f"{DOWN} has dtype bfloat16, expected uint8 as {GATE_UP}_blocks: all matrices of a layer's experts must",
    ),
    "another tensor": (
        lambda tensors: {**tensors, f"{DOWN}_weight_scale_2": torch.ones(E)},
        f"{DOWN}_weight_scale_2 is F32",
    ),
    "two names": (
        lambda tensors: {**tensors, f"{DOWN}_weight_scale": tensors[f"{DOWN}_scales"].clone()},
        f"{DOWN}_scales and {DOWN}_weight_scale are both present, expected one of them",
    ),
    "zero points": (
        lambda tensors: {**tensors, f"{DOWN}_weight_zero_point": torch.ones(E, K, 2, dtype=torch.uint8)},
        f"{DOWN}_weight_zero_point holds values other than 0",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(tmp_path: Path, name: str) -> None:
    change, message = REFUSED[name]
    tensors = {n: t.contiguous() for n, t in change(Experts(bias=True).gpt_oss()).items()}
    refused(tmp_path, tensors, QUANTIZATION, message, **GPT_OSS)


def test_columns_that_fill_no_block(tmp_path: Path) -> None:
    """Which the config claims, and blocks cannot hold."""
    tensors = Experts(bias=True).gpt_oss()
    message = f"{GATE_UP}_blocks has 80 columns, expected a multiple of 32"
    refused(tmp_path, tensors, QUANTIZATION, message, **{**GPT_OSS, "hidden_size": 80})


def test_the_smallest_fault_of_other_ranks_is_not_looked_for(tmp_path: Path) -> None:
    """Values are checked where they are loaded: a rank reads its own experts."""
    tensors = changed(f"{DOWN}_scales", put(255, 1, 4, 1))(Experts(bias=True).gpt_oss())
    path = write(tmp_path, tensors, {**CONFIG, **GPT_OSS, "quantization_config": QUANTIZATION})
    read_layer(Checkpoint.open(path), experts=[0, 2]).weights()


def test_scales_of_activations_are_not_used(tmp_path: Path) -> None:
    experts = Experts(bias=True)
    tensors = {**experts.gpt_oss(), f"{DOWN}_input_scale": torch.ones(E)}
    with pytest.warns(CheckpointWarning, match="down_proj_input_scale"):
        check(gpt_oss(tmp_path, tensors), experts)


def test_other_methods(tmp_path: Path) -> None:
    reason = reason_against(GptOssMxfp4Format(), tmp_path, Experts(bias=True).gpt_oss(), {"quant_method": "fp8"})
    assert reason == "quant_method is 'fp8', expected 'mxfp4'"


def test_experts_that_are_not_quantized(tmp_path: Path) -> None:
    """Whatever config.json says."""
    tensors = {GATE_UP: torch.zeros(E, K, 2 * N).bfloat16(), DOWN: torch.zeros(E, N, K).bfloat16()}
    tensors |= {f"{name}_bias": tensor[:, 0].clone() for name, tensor in tensors.items()}
    message = (
        f"{PREFIX} is not quantized: its weights are BF16 without scales, although config.json specifies quant_method"
    )
    refused(tmp_path, tensors, QUANTIZATION, message, **GPT_OSS)


def test_gate_rows_first_where_experts_are_apart(tmp_path: Path) -> None:
    """The order of rows matters to the values: in turns they are others."""
    experts = Experts(bias=True)
    weights = gpt_oss(tmp_path, experts.gpt_oss()).weights()
    assert torch.equal(weights.w13[:, :N], gpt_oss(tmp_path / "x", experts.tensors(plain)).weights().w13[:, :N])
    stored = experts.gpt_oss()[f"{GATE_UP}_blocks"].flatten(2)
    assert not torch.equal(weights.w13, stored)
    assert torch.equal(weights.w13[:, :N], stored[:, 0::2])
