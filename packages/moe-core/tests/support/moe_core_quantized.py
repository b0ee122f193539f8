"""Quantised experts with scales in any grouping, written as any tool names them, and their exact values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_core import CheckpointError, QuantKey
from moe_core.checkpoint import Checkpoint, CheckpointFormat, LayerSource, find_layer, read_layer
from moe_core.quantization import dequantize_weight
from moe_core_checkpoints import write
from torch import Tensor

E, K, N = 3, 320, 192  # partial blocks everywhere: 320 = 2.5 and 192 = 1.5 blocks of 128
PREFIX = "model.layers.0.mlp.experts"
CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_experts": E,
    "num_experts_per_tok": 2,
    "hidden_size": K,
    "moe_intermediate_size": N,
    "hidden_act": "silu",
    "norm_topk_prob": True,
}
NAMES = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
PER_TENSOR, PER_CHANNEL, MX = (-1, -1), (1, -1), (1, 32)

Group = tuple[int, int]
Tensors = dict[str, Tensor]


def codes(rows: int, cols: int, generator: torch.Generator) -> Tensor:
    """Random finite e4m3 values."""
    raw = torch.randint(0, 256, (rows, cols), generator=generator, dtype=torch.uint8)
    return torch.where((raw & 0x7F) == 0x7F, 0, raw).to(torch.uint8).view(torch.float8_e4m3fn)


def int8_codes(rows: int, cols: int, generator: torch.Generator) -> Tensor:
    """Random int8 values, -128 among them."""
    return torch.randint(-128, 128, (rows, cols), generator=generator, dtype=torch.int8)


def int4_codes(rows: int, cols: int, generator: torch.Generator) -> Tensor:
    """Random int4 values, one per byte."""
    return torch.randint(-8, 8, (rows, cols), generator=generator, dtype=torch.int8)


def grid(rows: int, cols: int, group: Group) -> tuple[int, int]:
    row, col = (rows if group[0] == -1 else group[0]), (cols if group[1] == -1 else group[1])
    return -(-rows // row), -(-cols // col)


def exponents(scale: Tensor, dtype: torch.dtype = torch.uint8) -> Tensor:
    """e8m0 codes of powers of two."""
    found = (scale.log2() + 127).to(torch.uint8)
    return found if dtype is torch.uint8 else found.view(torch.float8_e8m0fnu)


def plain(scale: Tensor) -> Tensor:
    return scale


class Experts:
    """Experts whose scales are powers of two, which every scale type holds exactly."""

    def __init__(
        self,
        group: Group,
        *,
        gated: bool = True,
        hidden: int = K,
        inter: int = N,
        make: Callable[[int, int, torch.Generator], Tensor] = codes,
    ) -> None:
        generator = torch.Generator().manual_seed(1)
        self.group = group
        self.names = ("gate", "up", "down") if gated else ("up", "down")
        self.sizes = {"gate": (inter, hidden), "up": (inter, hidden), "down": (hidden, inter)}
        self.weights = [{n: make(*self.sizes[n], generator) for n in self.names} for _ in range(E)]
        self.scales = [
            {
                n: torch.randint(-14, 15, grid(*self.sizes[n], group), generator=generator).float().exp2()
                for n in self.names
            }
            for _ in range(E)
        ]

    def values(self) -> tuple[Tensor, Tensor]:
        """w13 and w2 in float64, by the definition: weight [n, k] x scale [n // rows, k // cols]."""

        def one(expert: int, name: str) -> Tensor:
            weight, scale = self.weights[expert][name].double(), self.scales[expert][name].double()
            row = self.sizes[name][0] if self.group[0] == -1 else self.group[0]
            col = self.sizes[name][1] if self.group[1] == -1 else self.group[1]
            rows, cols = torch.arange(weight.shape[0]) // row, torch.arange(weight.shape[1]) // col
            return weight * scale[rows][:, cols]

        w13 = torch.stack([torch.cat([one(e, n) for n in self.names[:-1]]) for e in range(E)])
        return w13, torch.stack([one(e, "down") for e in range(E)])

    def tensors(
        self,
        store: Callable[[Tensor], Tensor] = plain,
        suffix: str = "weight_scale",
        names: dict[str, str] = NAMES,
        extra: dict[str, Tensor] | None = None,
    ) -> Tensors:
        """One by one; ``store``: a [rows, cols] scale grid as the tool keeps it; ``extra``: per projection."""
        found = {}
        for expert in range(E):
            for n in self.names:
                base = f"{PREFIX}.{expert}.{names[n]}"
                found[f"{base}.weight"] = self.weights[expert][n]
                found[f"{base}.{suffix}"] = store(self.scales[expert][n])
                for name, tensor in (extra or {}).items():
                    found[f"{base}.{name}"] = tensor.clone()
        return found

    def stacked(self, store: Callable[[Tensor], Tensor], suffix: str, *, transposed: bool = False) -> Tensors:
        """gate_up_proj and down_proj; ``store``: [E, rows, cols] grids as the tool keeps them.

        Per tensor, gate and up have one scale (the gate's).
        """

        def every(kind: list[dict[str, Tensor]], *names: str) -> Tensor:
            return torch.stack([torch.cat([one[n] for n in names]) for one in kind])

        def flip(tensor: Tensor) -> Tensor:
            return tensor.mT.contiguous() if transposed else tensor

        dtype = self.weights[0]["down"].dtype
        weights = [{n: t.view(torch.uint8) for n, t in one.items()} for one in self.weights]
        both = ("gate",) if self.group == PER_TENSOR else ("gate", "up")
        return {
            f"{PREFIX}.gate_up_proj": flip(every(weights, "gate", "up")).view(dtype),
            f"{PREFIX}.gate_up_proj{suffix}": store(flip(every(self.scales, *both))),
            f"{PREFIX}.down_proj": flip(every(weights, "down")).view(dtype),
            f"{PREFIX}.down_proj{suffix}": store(flip(every(self.scales, "down"))),
        }


def source(folder: Path, tensors: Tensors, quantization: dict[str, Any], **changes: Any) -> LayerSource:
    """The layer of a folder with these tensors."""
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    written = write(folder, tensors, {**CONFIG, "quantization_config": quantization}, **changes)
    return read_layer(Checkpoint.open(written))


def check(found: LayerSource, experts: Experts, weight_key: QuantKey, activation_key: QuantKey | None) -> None:
    """The layer loads under these keys to exactly the experts' values."""
    assert (found.weight_key, found.activation_key) == (weight_key, activation_key)
    weights = found.weights()
    weights.validate(found.config, values=True)
    assert (weights.weight_key, weights.activation_key) == (weight_key, activation_key)
    assert weights.w13_scale is not None
    assert weights.w2_scale is not None
    w13, w2 = experts.values()
    parts = 2 if found.config.is_gated else 1
    assert torch.equal(dequantize_weight(weights.w13, weights.w13_scale, weight_key, parts=parts).double(), w13)
    assert torch.equal(dequantize_weight(weights.w2, weights.w2_scale, weight_key).double(), w2)


def refused(folder: Path, tensors: Tensors, quantization: dict[str, Any], *parts: str, **changes: Any) -> None:
    """CheckpointError, when the layer is found or loaded, whose message has all ``parts``."""
    with pytest.raises(CheckpointError) as caught:
        source(folder, tensors, quantization, **changes).weights()
    for part in parts:
        assert part in str(caught.value)


def said_against(adapter: CheckpointFormat, folder: Path, tensors: Tensors, quantization: dict[str, Any]) -> str:
    """Why ``adapter`` doesn't read the layer: its reason, or the error of a config that is broken."""
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    checkpoint = Checkpoint.open(write(folder, tensors, {**CONFIG, "quantization_config": quantization}))
    try:
        reason = adapter.reason_against(checkpoint.quantization, find_layer(checkpoint))
    except CheckpointError as error:
        return str(error)
    assert reason is not None
    return reason
