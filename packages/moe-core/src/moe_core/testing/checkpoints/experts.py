"""Quantised experts with scales in any grouping, written as any tool names them, and their exact values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

#: experts, hidden and intermediate size: partial blocks everywhere, 320 = 2.5 and 192 = 1.5 blocks of 128
E, K, N = 3, 320, 192
PREFIX = "model.layers.0.mlp.experts"
#: config.json of these experts, but for its ``quantization_config``
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
#: shapes of the groups that share a scale: (rows, columns), -1 for all of them
PER_TENSOR, PER_CHANNEL, MX = (-1, -1), (1, -1), (1, 32)

Group = tuple[int, int]
Tensors = dict[str, Tensor]


def float8_codes(rows: int, cols: int, generator: torch.Generator) -> Tensor:
    """Random finite e4m3 values."""
    raw = torch.randint(0, 256, (rows, cols), generator=generator, dtype=torch.uint8)
    return torch.where((raw & 0x7F) == 0x7F, 0, raw).to(torch.uint8).view(torch.float8_e4m3fn)


def int8_codes(rows: int, cols: int, generator: torch.Generator) -> Tensor:
    """Random int8 values, -128 among them."""
    return torch.randint(-128, 128, (rows, cols), generator=generator, dtype=torch.int8)


def int4_codes(rows: int, cols: int, generator: torch.Generator) -> Tensor:
    """Random int4 values, one per byte."""
    return torch.randint(-8, 8, (rows, cols), generator=generator, dtype=torch.int8)


def _grid(rows: int, cols: int, group: Group) -> tuple[int, int]:
    row, col = (rows if group[0] == -1 else group[0]), (cols if group[1] == -1 else group[1])
    return -(-rows // row), -(-cols // col)


def exponents(scale: Tensor, dtype: torch.dtype = torch.uint8) -> Tensor:
    """e8m0 codes of powers of two."""
    found = (scale.log2() + 127).to(torch.uint8)
    return found if dtype is torch.uint8 else found.view(torch.float8_e8m0fnu)


def unchanged(scale: Tensor) -> Tensor:
    """Scales as they are: float32 [rows, cols] of the grid of groups."""
    return scale


class Experts:
    """Three experts whose scales are powers of two, which every scale type holds exactly.

    ``group``: (rows, columns) that share a scale; ``make``: a matrix's codes, [rows, columns].
    """

    def __init__(
        self,
        group: Group,
        *,
        gated: bool = True,
        hidden: int = K,
        inter: int = N,
        make: Callable[[int, int, torch.Generator], Tensor] = float8_codes,
    ) -> None:
        generator = torch.Generator().manual_seed(1)
        self.group = group
        self.names = ("gate", "up", "down") if gated else ("up", "down")
        self.sizes = {"gate": (inter, hidden), "up": (inter, hidden), "down": (hidden, inter)}
        self.weights = [{n: make(*self.sizes[n], generator) for n in self.names} for _ in range(E)]
        self.scales = [
            {
                n: torch.randint(-14, 15, _grid(*self.sizes[n], group), generator=generator).float().exp2()
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
        store: Callable[[Tensor], Tensor] = unchanged,
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
