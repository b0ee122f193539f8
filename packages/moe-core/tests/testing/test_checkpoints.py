"""The kit's checks of formats fail where a format is wrong."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from moe_core import FusedMoEConfig, MoEWeights, kFp8StaticChannelSym, kFp8StaticTensorSym
from moe_core.selection.registry import registry
from moe_core.testing.checkpoints import PER_CHANNEL, E, Experts, K, N, check, reason_against, refused, source
from moe_core_checkpoints import CONFIG, PlainFormat, entry_points, layer_tensors
from moe_kit.fuzz import Folder, fuzz
from torch import Tensor

EXPERTS = Experts(PER_CHANNEL)
PLAIN = {"quant_method": "plain"}


def loaded(change: Any = lambda w13: None) -> Any:
    """A layer whose experts were loaded right, but for what ``change`` does to w13."""

    def stack(kind: list[dict[str, Tensor]], *names: str) -> Tensor:
        return torch.stack([torch.cat([one[n].view(torch.uint8) for n in names]) for one in kind])

    w13 = stack(EXPERTS.weights, "gate", "up").view(torch.float8_e4m3fn)
    change(w13.view(torch.uint8))
    weights = MoEWeights(
        weight_key=kFp8StaticChannelSym,
        activation_key=None,
        w13=w13,
        w2=stack(EXPERTS.weights, "down").view(torch.float8_e4m3fn),
        w13_scale=stack(EXPERTS.scales, "gate", "up").view(torch.float32),
        w2_scale=stack(EXPERTS.scales, "down").view(torch.float32),
    )
    config = FusedMoEConfig(E, 2, K, N)
    return SimpleNamespace(weight_key=kFp8StaticChannelSym, activation_key=None, config=config, weights=lambda: weights)


def test_check_takes_what_is_right_and_nothing_else() -> None:
    check(loaded(), EXPERTS, kFp8StaticChannelSym, None)
    with pytest.raises(AssertionError, match="layer"):
        check(loaded(), EXPERTS, kFp8StaticTensorSym, None)

    def flip(w13: Tensor) -> None:
        # the sign of one value that is not 0
        w13[1, 2, int(w13[1, 2].gt(0).nonzero()[0])] ^= 0x80

    with pytest.raises(AssertionError, match="w13"):
        check(loaded(flip), EXPERTS, kFp8StaticChannelSym, None)


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An installation that has the scheme ``plain`` alone."""
    monkeypatch.setattr("importlib.metadata.entry_points", entry_points)
    registry.cache_clear()
    yield
    registry.cache_clear()


@pytest.mark.usefixtures("plain")
def test_refusals_are_what_the_test_says(tmp_path: Path) -> None:
    tensors, sizes = layer_tensors(), {name: CONFIG[name] for name in ("hidden_size", "num_experts")}
    sizes["moe_intermediate_size"] = CONFIG["moe_intermediate_size"]
    assert source(tmp_path, tensors, PLAIN, **sizes).config.hidden_size == CONFIG["hidden_size"]
    refused(tmp_path, tensors, {"quant_method": "other"}, "quant_method 'other'", **sizes)
    with pytest.raises(AssertionError, match="error"):
        refused(tmp_path, tensors, {"quant_method": "other"}, "quant_method 'mine'", **sizes)
    with pytest.raises(AssertionError, match="layer"):
        refused(tmp_path, tensors, PLAIN, **sizes)
    assert reason_against(PlainFormat(), tmp_path, tensors, {"quant_method": "other"}) == (
        "quant_method is 'other', expected 'plain'"
    )
    with pytest.raises(AssertionError, match="plain 16-bit"):
        reason_against(PlainFormat(), tmp_path, tensors, PLAIN)


def test_a_format_that_raises_other_errors_fails_the_fuzzer() -> None:
    count = 0

    def read(folder: Path) -> Any:
        nonlocal count
        count += 1
        if count > 1:
            raise KeyError("config")
        return SimpleNamespace(facts={}, values={})

    with pytest.raises(AssertionError, match=r"seed 0: .*\n  KeyError"):
        fuzz("broken", Folder(layer_tensors, CONFIG), range(3), read=read)
