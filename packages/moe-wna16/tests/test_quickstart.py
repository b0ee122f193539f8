"""The small checkpoint that ``moe quickstart`` runs where this scheme is the one installed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from moe_core import fused_moe_reference, load_layer, registry
from moe_core.checkpoint import Checkpoint, read_layer
from moe_wna16.quickstart import EXPERTS, HIDDEN, TOP_K


def test_it_is_read_and_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    write = registry().scheme("wna16").quickstart
    assert write is not None
    write(tmp_path)
    source = read_layer(Checkpoint.open(tmp_path), dtype=torch.float32)
    weights = source.weights()
    weights.validate(source.config, values=True)
    layer = load_layer(tmp_path, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, HIDDEN, generator=generator)
    router, ids = torch.rand(7, EXPERTS, generator=generator).topk(TOP_K)
    expected = fused_moe_reference(x, weights, source.config, topk_weights=router, topk_ids=ids)
    found = layer(x, topk_weights=router, topk_ids=ids).double()
    # a hidden value in some thousand rounds to the next code in float32
    assert float((found - expected).norm() / expected.norm()) < 2e-3
