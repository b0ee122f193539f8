"""moe run --check: the output beside the float64 reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from moe_core.cli.commands import run as command
from moe_core.interface.experts import FusedMoEExperts
from moe_core_checkpoints import TOP_K, E, K
from moe_core_toys import ToyExperts
from safetensors.torch import save_file
from torch import Tensor


@pytest.fixture
def one_percent_off(monkeypatch: pytest.MonkeyPatch) -> None:
    original = command._apply

    def off(*args: Any) -> tuple[Tensor, float]:
        output, seconds = original(*args)
        return output * 1.01, seconds

    monkeypatch.setattr(command, "_apply", off)


def given(tmp_path: Path, ids: Tensor) -> tuple[str, Path]:
    generator = torch.Generator().manual_seed(0)
    pair = {"topk_ids": ids, "topk_weights": torch.rand(ids.shape, generator=generator)}
    save_file({"hidden_states": torch.randn(len(ids), K, generator=generator), **pair}, tmp_path / "in.safetensors")
    return "--input", tmp_path / "in.safetensors"


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_within(moe: Any, folder: Path, dtype: str) -> None:
    result = moe("run", folder, "--check", "--layer", 2, "--dtype", dtype)
    assert (result.code, result.err) == (0, "")
    assert "compared with the float64 reference: relative error" in result.out
    assert "within the tolerance" in result.out
    check = moe("run", folder, "--check", "--dtype", dtype, "--json").data["check"]
    assert check["passed"]
    assert 0 < check["error"] <= check["tolerance"] < 0.01
    assert check["fault"] is None


def test_outside(moe: Any, folder: Path, one_percent_off: None) -> None:
    result = moe("run", folder, "--check")
    assert result.code == 1
    assert "OUTSIDE the tolerance" in result.out
    assert "FAILED: plain: the error's norm is" in result.out
    check = moe("run", folder, "--check", "--json").data["check"]
    assert not check["passed"]
    assert check["error"] == pytest.approx(0.01, rel=0.2)
    assert moe("run", folder).code == 0


def test_not_asked_for(moe: Any, folder: Path) -> None:
    assert moe("run", folder, "--json").data["check"] is None


def test_one_expert(moe: Any, folder: Path, tmp_path: Path) -> None:
    """Only the experts that have tokens are read for the reference."""
    ids = torch.tensor([[3, 1]] * 5)
    assert ids.shape[1] == TOP_K
    assert moe("run", folder, "--check", *given(tmp_path, ids)).code == 0


def test_no_tokens(moe: Any, folder: Path) -> None:
    check = moe("run", folder, "--check", "--tokens", 0, "--json").data["check"]
    assert check == {"error": 0.0, "tolerance": 0.0, "passed": True, "fault": None}


def test_a_backend_that_requantizes(moe: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own weights are the measure, and they may depend on every expert's."""
    seen = []

    def requantized(self: FusedMoEExperts, weights: Any) -> Any:
        seen.append(weights.w13.shape[0])
        return weights

    monkeypatch.setattr(ToyExperts, "requantized", requantized, raising=False)
    assert moe("run", folder, "--check", *given(tmp_path, torch.tensor([[2, 0]]))).code == 0
    assert seen == [E]
