"""The small checkpoint that ``moe quickstart`` runs where this scheme is the one installed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from moe_core import MoEActivation, fused_moe_reference, load_layer, registry
from moe_core.checkpoint import Checkpoint, read_layer
from moe_mxfp4.quickstart import EXPERTS, HIDDEN, LAYERS, TOP_K


@pytest.mark.parametrize("layer", range(LAYERS))
def test_it_is_read_and_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layer: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    write = registry().scheme("mxfp4").quickstart
    assert write is not None
    write(tmp_path)
    source = read_layer(Checkpoint.open(tmp_path), layer, dtype=torch.float32)
    assert source.config.activation is MoEActivation.SWIGLUOAI
    assert source.router_bias is not None
    weights = source.weights()
    weights.validate(source.config, values=True)
    loaded = load_layer(tmp_path, layer=layer, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, HIDDEN, generator=generator)
    router, ids = torch.rand(7, EXPERTS, generator=generator).topk(TOP_K)
    expected = fused_moe_reference(x, weights, source.config, topk_weights=router, topk_ids=ids)
    found = loaded(x, topk_weights=router, topk_ids=ids).double()
    assert float((found - expected).norm() / expected.norm()) < 2e-6
