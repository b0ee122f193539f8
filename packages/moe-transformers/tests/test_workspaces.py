"""Scratch memory that the layers of a model share."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import moe_transformers.experts
import pytest
import torch
from moe_transformers.experts import share_workspaces


def layer(device: str, workspace: object = None) -> Any:
    """As much of a layer as is looked at."""
    return SimpleNamespace(
        weights=SimpleNamespace(device=torch.device(device)), kernel=SimpleNamespace(workspace=workspace)
    )


def test_one_for_each_gpu_among_layers_that_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    shared: list[list[Any]] = []
    monkeypatch.setattr(moe_transformers.experts, "share_workspace", lambda layers, tokens: shared.append(layers))
    first, second, third = layer("cuda:0"), layer("cuda:1"), layer("cuda:0")
    # a captured graph may write into the one that it has
    share_workspaces([first, layer("cuda:0", "its own"), second, third, layer("cpu")])
    assert shared == [[first, third], [second]]
