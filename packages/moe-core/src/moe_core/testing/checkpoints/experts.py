"""Quantized experts with any scale grouping, any tool's tensor names, and exact values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

#: experts, hidden and intermediate size: partial blocks everywhere, since 320 and 192 are 2.5 and 1.5 blocks of 128
E, K, N = 3, 320, 192
PREFIX = "model.layers.0.mlp.experts"
#: config.json of these experts, without its ``quantization_config``
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
    """Return random finite e4m3 values.

    Args:
        rows: Number of rows.
        cols: Number of columns.
        generator: Random generator.

    Returns:
        ``[rows, cols]`` float8_e4m3fn.
    """
    raw = torch.randint(0, 256, (rows, cols), generator=generator, dtype=torch.uint8)
    return torch.where((raw & 0x7F) == 0x7F, 0, raw).to(torch.uint8).view(torch.float8_e4m3fn)


def int8_codes(rows: int, cols: int, generator: torch.Generator) -> Tensor:
    """Return random int8 values, including -128.

    Args:
        rows: Number of rows.
        cols: Number of columns.
        generator: Random generator.

    Returns:
        ``[rows, cols]`` int8.
    """
    return torch.randint(-128, 128, (rows, cols), generator=generator, dtype=torch.int8)


def int4_codes(rows: int, cols: int, generator: torch.Generator) -> Tensor:
    """Return random int4 values, one per byte.

    Args:
        rows: Number of rows.
        cols: Number of columns.
        generator: Random generator.

    Returns:
        ``[rows, cols]`` int8.
    """
    return torch.randint(-8, 8, (rows, cols), generator=generator, dtype=torch.int8)


def _grid(rows: int, cols: int, group: Group) -> tuple[int, int]:
    row, col = (rows if group[0] == -1 else group[0]), (cols if group[1] == -1 else group[1])
    return -(-rows // row), -(-cols // col)


def exponents(scale: Tensor, dtype: torch.dtype = torch.uint8) -> Tensor:
    """Return the e8m0 codes of powers of two.

    Args:
        scale: Powers of two.
        dtype: torch.uint8, or anything else for torch.float8_e8m0fnu.

    Returns:
        The codes, in the shape of ``scale``.
    """
    found = (scale.log2() + 127).to(torch.uint8)
    return found if dtype is torch.uint8 else found.view(torch.float8_e8m0fnu)


def unchanged(scale: Tensor) -> Tensor:
    """Return scales unchanged.

    Args:
        scale: float32 ``[rows, cols]`` of the grid of groups.

    Returns:
        The same tensor.
    """
    return scale


class Experts:
    """Three experts whose scales are powers of two, which every scale dtype represents exactly.

    Args:
        group: (rows, columns) that share a scale; -1 for all of them.
        gated: Whether there is a gate projection.
        hidden: Hidden size.
        inter: Intermediate size.
        make: Returns the codes ``[rows, columns]`` of a matrix.
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
        """Exact w13 and w2 in float64: weight [n, k] x scale [n // rows, k // cols]."""

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
        """Return separate tensors per expert and projection.

        Args:
            store: Converts a ``[rows, cols]`` scale grid to the tool's form.
            suffix: Name of the scale tensors.
            names: The tool's names of gate, up and down.
            extra: Additional tensors of every projection.

        Returns:
            Tensors by name.
        """
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
        """Return stacked tensors: gate_up_proj and down_proj.

        With per-tensor scales, gate and up share the gate's scale.

        Args:
            store: Converts ``[E, rows, cols]`` scale grids to the tool's form.
            suffix: Suffix of the scale tensors' names.
            transposed: Whether matrices and scales are stored transposed.

        Returns:
            Tensors by name.
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
