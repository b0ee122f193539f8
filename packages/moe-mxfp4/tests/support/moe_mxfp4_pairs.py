"""Experts of e2m1 codes with e8m0 scales, written as each tool keeps them, one code after the other, and their values.

Nothing here is shared with what reads the files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from moe_core import QuantKey, kMxfp4Static
from moe_core.checkpoint import LayerSource
from moe_core.reference.quantization import dequantize_weight
from moe_core.testing.checkpoints import NAMES, PREFIX
from torch import Tensor

E, K, N = 3, 96, 64
SIZES: dict[str, Any] = {"hidden_size": K, "moe_intermediate_size": N}
GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss",
    "intermediate_size": N,
    "hidden_size": K,
    "moe_intermediate_size": None,
    "swiglu_limit": 7.0,
}
#: by the OCP specification: a sign bit, two of the exponent, one of the mantissa
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

Tensors = dict[str, Tensor]


@dataclass
class Pairs:
    """``q`` [rows, cols] codes 0 to 15, ``s`` uint8 [rows, groups], ``b`` bfloat16 [rows] or None."""

    q: Tensor
    s: Tensor
    b: Tensor | None

    def values(self) -> Tensor:
        """By the definition, in float64."""
        rows = [[(-1.0 if code & 8 else 1.0) * VALUES[code & 7] for code in row] for row in self.q.tolist()]
        groups = torch.arange(self.q.shape[1]) // 32
        return torch.tensor(rows, dtype=torch.float64) * torch.exp2(self.s.double() - 127)[:, groups]


class Experts:
    """Experts of random codes and scales."""

    def __init__(
        self, *, gated: bool = True, bias: bool = False, hidden: int = K, inter: int = N, low: int = 1
    ) -> None:
        self.names = ("gate", "up", "down") if gated else ("up", "down")
        self.sizes = {"gate": (inter, hidden), "up": (inter, hidden), "down": (hidden, inter)}
        self.bias = bias
        generator = torch.Generator().manual_seed(1)

        def matrix(rows: int, cols: int) -> Pairs:
            q = torch.randint(0, 16, (rows, cols), generator=generator)
            s = torch.randint(low, 255, (rows, -(-cols // 32)), generator=generator).to(torch.uint8)
            return Pairs(q, s, torch.randn(rows, generator=generator).bfloat16() if bias else None)

        self.matrices = [{n: matrix(*self.sizes[n]) for n in self.names} for _ in range(E)]

    def values(self) -> tuple[Tensor, Tensor]:
        """w13 and w2 in float64."""
        w13 = [torch.cat([one[n].values() for n in self.names[:-1]]) for one in self.matrices]
        return torch.stack(w13), torch.stack([one["down"].values() for one in self.matrices])

    def biases(self) -> tuple[Tensor, Tensor]:
        def stack(*names: str) -> Tensor:
            return torch.stack([torch.cat([b for n in names if (b := one[n].b) is not None]) for one in self.matrices])

        return stack(*self.names[:-1]), stack("down")

    def tensors(self, write: Callable[[Pairs], Tensors], extra: Tensors | None = None) -> Tensors:
        """One by one, as ``write`` keeps a matrix: tensors by suffix; ``extra``: more of them for each matrix."""
        return {
            f"{PREFIX}.{expert}.{NAMES[n]}.{suffix}": tensor.contiguous().clone()
            for expert, one in enumerate(self.matrices)
            for n, matrix in one.items()
            for suffix, tensor in {**write(matrix), **(extra or {})}.items()
        }

    def together(self, write: Callable[[Pairs], Tensors], extra: Tensors | None = None) -> Tensors:
        """The same with gate and up in one matrix, their rows in turns (Quark's gpt-oss)."""
        return {
            f"{PREFIX}.{expert}.{name}.{suffix}": tensor.contiguous().clone()
            for expert, one in enumerate(self.matrices)
            for name, matrix in (("gate_up_proj", in_turns(one["gate"], one["up"])), ("down_proj", one["down"]))
            for suffix, tensor in {**write(matrix), **(extra or {})}.items()
        }

    def gpt_oss(self) -> Tensors:
        """All experts in one tensor each."""
        found: dict[str, list[Tensor]] = {}
        for one in self.matrices:
            for name, matrix in (("gate_up_proj", in_turns(one["gate"], one["up"])), ("down_proj", one["down"])):
                for suffix, tensor in blocks(matrix).items():
                    found.setdefault(f"{PREFIX}.{name}_{suffix}", []).append(tensor)
        return {name: torch.stack(tensors) for name, tensors in found.items()}


def in_turns(gate: Pairs, up: Pairs) -> Pairs:
    """Row 2i is gate i, row 2i + 1 is up i."""

    def rows(first: Tensor, second: Tensor) -> Tensor:
        return torch.stack([row for pair in zip(first, second, strict=True) for row in pair])

    bias = None if gate.b is None or up.b is None else rows(gate.b, up.b)
    return Pairs(rows(gate.q, up.q), rows(gate.s, up.s), bias)


# ------------------------------------------------------------------ tools


def pairs(codes: Tensor) -> Tensor:
    """uint8 [rows, cols / 2]: two columns in a byte, the even one low."""
    rows = [[row[i] + 16 * row[i + 1] for i in range(0, len(row), 2)] for row in codes.tolist()]
    return torch.tensor(rows, dtype=torch.uint8)


def _with_bias(matrix: Pairs, tensors: Tensors) -> Tensors:
    return tensors if matrix.b is None else {**tensors, "bias": matrix.b}


def packed(matrix: Pairs) -> Tensors:
    """compressed-tensors, AutoRound."""
    return _with_bias(matrix, {"weight_packed": pairs(matrix.q), "weight_scale": matrix.s})


def plain(matrix: Pairs) -> Tensors:
    """Quark, ModelOpt."""
    return _with_bias(matrix, {"weight": pairs(matrix.q), "weight_scale": matrix.s})


def blocks(matrix: Pairs) -> Tensors:
    """gpt-oss: 16 bytes of a group are a dimension of their own."""
    rows, groups = matrix.s.shape
    return _with_bias(matrix, {"blocks": pairs(matrix.q).reshape(rows, groups, 16), "scales": matrix.s})


# ------------------------------------------------------------------ reading


def check(found: LayerSource, experts: Experts, activation: QuantKey | None = None) -> None:
    """The layer loads under these keys to exactly the experts' values."""
    assert (found.weight_key, found.activation_key) == (kMxfp4Static, activation)
    weights = found.weights()
    weights.validate(found.config, values=True)
    assert (weights.weight_key, weights.activation_key) == (kMxfp4Static, activation)
    chosen = list(found.experts)
    for name, wanted, parts in zip(("w13", "w2"), experts.values(), (len(experts.names) - 1, 1), strict=True):
        codes, scale = getattr(weights, name), getattr(weights, f"{name}_scale")
        assert codes.dtype is scale.dtype is torch.uint8
        values = dequantize_weight(codes, scale, kMxfp4Static, parts=parts, cols=wanted.shape[2], dtype=torch.float64)
        assert torch.equal(values, wanted[chosen]), name
    if not experts.bias:
        assert weights.w13_bias is weights.w2_bias is None
        return
    for found_bias, wanted in zip((weights.w13_bias, weights.w2_bias), experts.biases(), strict=True):
        assert found_bias is not None
        assert torch.equal(found_bias.bfloat16(), wanted[chosen])
