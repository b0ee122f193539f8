"""ModelOpt's algorithms with int8 weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from moe_core import CheckpointWarning
from moe_core.spec.quant_key import kInt8StaticChannelSym, kInt8StaticTensorSym
from moe_core.testing.checkpoints import (
    PER_CHANNEL,
    PREFIX,
    Experts,
    check,
    int8_codes,
    reason_against,
    refused,
    source,
)
from moe_int8.formats.modelopt import ModelOptInt8Format
from torch import Tensor


def config(algorithm: str) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algorithm}


def experts() -> Experts:
    return Experts(PER_CHANNEL, make=int8_codes)


def smooth(store: Any = Tensor.flatten, scale: Tensor | None = None) -> dict[str, Tensor]:
    """As ModelOpt writes W8A8_SQ_PER_CHANNEL: scales [N] and one of all activations []."""
    return experts().tensors(store, extra={"input_scale": torch.tensor(0.25) if scale is None else scale})


@pytest.mark.parametrize("algorithm", ["W8A8_SQ_PER_CHANNEL", "w8a8_sq_per_channel"])
@pytest.mark.parametrize("store", [Tensor.flatten, Tensor.clone], ids=["[N]", "[N, 1]"])
def test_static_activations(tmp_path: Path, algorithm: str, store: Any) -> None:
    found = source(tmp_path, smooth(store), config(algorithm))
    check(found, experts(), kInt8StaticChannelSym, kInt8StaticTensorSym)
    weights = found.weights()
    assert weights.w13_input_scale is not None
    assert weights.w13_input_scale.tolist() == [0.25] * 3


def test_gate_and_up_share_the_larger_scale(tmp_path: Path) -> None:
    tensors = smooth()
    tensors[f"{PREFIX}.1.up_proj.input_scale"] = torch.tensor(0.5)
    tensors[f"{PREFIX}.2.down_proj.input_scale"] = torch.tensor(2.0)
    weights = source(tmp_path, tensors, config("W8A8_SQ_PER_CHANNEL")).weights()
    assert weights.w13_input_scale is not None
    assert weights.w2_input_scale is not None
    assert weights.w13_input_scale.tolist() == [0.25, 0.5, 0.25]
    assert weights.w2_input_scale.tolist() == [0.25, 0.25, 2.0]


def test_weight_only(tmp_path: Path) -> None:
    check(source(tmp_path, experts().tensors(Tensor.flatten), config("W8A16")), experts(), kInt8StaticChannelSym, None)


def test_a_scale_that_is_not_used_is_told(tmp_path: Path) -> None:
    with pytest.warns(CheckpointWarning, match="input_scale"):
        source(tmp_path, smooth(), config("W8A16")).weights()


def test_what_is_refused(tmp_path: Path) -> None:
    wanted = "expected W8A8_SQ_PER_CHANNEL or W8A16"
    tensors = smooth()
    assert wanted in reason_against(ModelOptInt8Format(), tmp_path / "a", tensors, config("FP8"))
    assert "expected 'modelopt'" in reason_against(
        ModelOptInt8Format(), tmp_path / "b", tensors, {"quant_method": "quark"}
    )
    algorithm = config("W8A8_SQ_PER_CHANNEL")
    plain = experts().tensors(Tensor.flatten)
    refused(tmp_path / "c", plain, algorithm, f"{PREFIX}.0.gate_proj.input_scale is missing in", "W8A8_SQ_PER_CHANNEL")
    for number, bad in enumerate((0.0, -1.0, float("nan"))):
        message = "input_scale has 1 zero, negative, NaN or Inf value of 1"
        refused(tmp_path / f"d{number}", smooth(scale=torch.tensor(bad)), algorithm, f"{PREFIX}.0.gate_proj.{message}")
    message = "input_scale has shape [320], expected [] (one scale of all activations)"
    refused(tmp_path / "e", smooth(scale=torch.ones(320)), algorithm, message)
    smoothed = experts().tensors(
        Tensor.flatten, extra={"input_scale": torch.tensor(0.25), "pre_quant_scale": torch.ones(320)}
    )
    refused(tmp_path / "f", smoothed, algorithm, "pre_quant_scale scales the activations of each column", "SmoothQuant")
