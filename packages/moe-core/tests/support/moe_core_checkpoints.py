"""Checkpoint folders for tests, and a scheme ``plain`` that reads 16-bit experts from them."""

from __future__ import annotations

import importlib.metadata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_core import FusedMoEConfig, MoEWeights
from moe_core.checkpoint import CheckpointFormat, ExpertLayout, LayerExperts, check_expert_tensor, load_stacked
from moe_core.checkpoint.files.safetensors_file import Part, SafetensorsFile
from moe_core.testing import checkpoints
from moe_core_toys import TOY
from torch import Tensor

E, TOP_K, K, N = 4, 2, 32, 16

CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_experts": E,
    "num_experts_per_tok": TOP_K,
    "hidden_size": K,
    "intermediate_size": 999,
    "moe_intermediate_size": N,
    "hidden_act": "silu",
    "norm_topk_prob": True,
    "quantization_config": {"quant_method": "plain"},
}


def count_reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each tensor is read from files from now on, by name; of stacked ones, each expert's part ("a[3]")."""
    found: Counter[str] = Counter()
    original = SafetensorsFile.read_all

    def read_all(self: SafetensorsFile, parts: Iterable[Part]) -> None:
        listed = list(parts)
        found.update(name if index is None else f"{name}[{index}]" for name, index, _ in listed)
        original(self, listed)

    monkeypatch.setattr(SafetensorsFile, "read_all", read_all)
    return found


def expert_tensors(
    block: str = "model.layers.0.mlp",
    names: Sequence[str] = ("gate_proj", "up_proj", "down_proj"),
    *,
    experts: int = E,
    hidden: int = K,
    inter: int = N,
    seed: int = 0,
) -> dict[str, Tensor]:
    """bf16 experts one by one; ``names`` of gate, up and down, or of up and down."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for expert in range(experts):
        for name in names:
            shape = (hidden, inter) if name == names[-1] else (inter, hidden)
            tensors[f"{block}.experts.{expert}.{name}.weight"] = torch.randn(shape, generator=generator).bfloat16()
    return tensors


def layer_tensors(index: int = 0, *, seed: int | None = None, **sizes: int) -> dict[str, Tensor]:
    """The experts of a layer and its router; the same for the same ``seed``, by default the ``index``."""
    seed = index if seed is None else seed
    block = f"model.layers.{index}.mlp"
    experts, hidden = sizes.get("experts", E), sizes.get("hidden", K)
    gate = torch.randn(experts, hidden, generator=torch.Generator().manual_seed(seed)).bfloat16()
    return {**expert_tensors(block, seed=seed, **sizes), f"{block}.gate.weight": gate}


def write(
    folder: Path,
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any] | None = None,
    *,
    shards: int = 0,
    **changes: Any,
) -> Path:
    """A folder whose config.json is the one of this module by default; the rest as in the kit."""
    return checkpoints.write(folder, tensors, CONFIG if config is None else config, shards=shards, **changes)


class PlainFormat(CheckpointFormat):
    """16-bit experts one by one, or stacked."""

    name = "plain 16-bit"

    def resolve(self, quantization: Mapping[str, Any], layer: LayerExperts) -> ExpertLayout | str:
        if quantization.get("quant_method") != "plain":
            return f"quant_method is {quantization.get('quant_method')!r}, expected 'plain'"
        return PlainLayout(layer, None, None)


class PlainLayout(ExpertLayout):
    def load(self, config: FusedMoEConfig, *, experts: Sequence[int], device: torch.device | str = "cpu") -> MoEWeights:
        layer = self.layer
        first = [name for name in ("gate_up", "gate", "up") if name in layer.projections]
        rows = config.w13_rows // len(first)
        for name in first:
            check_expert_tensor(layer, name, "weight", (rows, config.hidden_size), (torch.bfloat16,))
        check_expert_tensor(layer, "down", "weight", (config.hidden_size, config.intermediate_size), (torch.bfloat16,))
        return MoEWeights(
            weight_key=None,
            activation_key=None,
            w13=load_stacked(layer, first, "weight", experts=experts, device=device),
            w2=load_stacked(layer, ("down",), "weight", experts=experts, device=device),
        )


def write_quickstart(folder: Path) -> None:
    write(folder, layer_tensors(), shards=2)


SCHEME = replace(
    TOY,
    name="plain",
    formats=(PlainFormat,),
    quant_methods=("plain",),
    quickstart=write_quickstart,
)


def entry_points(*, group: str) -> tuple[importlib.metadata.EntryPoint, ...]:
    """The entry points of an installation that has the scheme ``plain`` and no other."""
    if group != "moe_core.schemes":
        return ()
    return (importlib.metadata.EntryPoint("plain", "moe_core_checkpoints:SCHEME", group),)
