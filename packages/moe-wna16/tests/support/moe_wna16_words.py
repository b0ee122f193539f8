"""Experts of integer codes in groups, written as each tool packs them, one field after the other, and their values.

Every packer is a loop over fields that follows the tool's documented bit layout; nothing here is shared with what reads
the files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from moe_core import QuantKey
from moe_core.checkpoint import LayerSource
from moe_core.reference.quantization import dequantize_weight
from moe_core.testing.checkpoints import NAMES, PREFIX
from torch import Tensor

E, K, N = 3, 96, 48
SIZES: dict[str, Any] = {"hidden_size": K, "moe_intermediate_size": N}

Tensors = dict[str, Tensor]
Rows = list[list[int]]


@dataclass
class Matrix:
    """``q`` [rows, cols] codes, ``z`` and ``s`` [rows, groups], ``g_idx`` [cols]."""

    q: Tensor
    z: Tensor
    s: Tensor
    g_idx: Tensor

    def values(self) -> Tensor:
        """By the definition, in float64: ``(q - z) * s`` of the column's group."""
        of = self.g_idx.long()
        return (self.q.double() - self.z.double()[:, of]) * self.s.double()[:, of]


class Codes:
    """Experts of random codes.

    ``group`` -1: scales by channel; ``order``: groups of columns out of order, of different sizes where ``ragged``;
    ``signed``: scales of either sign.
    """

    def __init__(
        self,
        bits: int = 4,
        group: int = 32,
        *,
        symmetric: bool = True,
        gated: bool = True,
        order: bool = False,
        ragged: bool = False,
        signed: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        hidden: int = K,
        inter: int = N,
        low: int = 0,
        experts: int = E,
        seed: int = 1,
    ) -> None:
        self.bits, self.group, self.symmetric, self.dtype = bits, group, symmetric, dtype
        self.names = ("gate", "up", "down") if gated else ("up", "down")
        self.sizes = {"gate": (inter, hidden), "up": (inter, hidden), "down": (hidden, inter)}
        self.count = experts
        generator = torch.Generator().manual_seed(seed)

        def matrix(rows: int, cols: int, g_idx: Tensor) -> Matrix:
            groups = 1 if group == -1 else -(-cols // group)
            q = torch.randint(0, 2**bits, (rows, cols), generator=generator)
            z = torch.randint(low, 2**bits, (rows, groups), generator=generator)
            s = (torch.rand(rows, groups, generator=generator) / 8 + 0.01).to(dtype)
            if signed:
                s *= 1 - 2 * torch.randint(0, 2, s.shape, generator=generator)
            return Matrix(q, torch.full_like(z, 2 ** (bits - 1)) if symmetric else z, s, g_idx)

        def columns(cols: int) -> Tensor:
            found = torch.arange(cols, dtype=torch.int32) // (group if group > 0 else cols)
            if ragged:
                # group 0 gives a column to the last one
                found[0] = found[-1]
            return found[torch.randperm(cols, generator=generator)] if order else found

        self.matrices: list[dict[str, Matrix]] = []
        for _ in range(experts):
            shared = {hidden: columns(hidden), inter: columns(inter)}
            self.matrices.append({n: matrix(*self.sizes[n], shared[self.sizes[n][1]]) for n in self.names})

    def values(self) -> tuple[Tensor, Tensor]:
        """w13 and w2 in float64."""
        w13 = [torch.cat([one[n].values() for n in self.names[:-1]]) for one in self.matrices]
        return torch.stack(w13), torch.stack([one["down"].values() for one in self.matrices])

    def tensors(self, write: Callable[[Matrix, int], Tensors], names: dict[str, str] = NAMES) -> Tensors:
        """One by one, as ``write`` (matrix, bits) keeps a matrix: tensors by suffix."""
        return {
            f"{PREFIX}.{expert}.{names[n]}.{suffix}": tensor.contiguous().clone()
            for expert, one in enumerate(self.matrices)
            for n, matrix in one.items()
            for suffix, tensor in write(matrix, self.bits).items()
        }

    def fused(self, write: Callable[[Matrix, int], Tensors]) -> Tensors:
        """Stacked, gate and up rows in one matrix: entries of several rows are counted over both."""
        found: dict[str, list[Tensor]] = {}
        for one in self.matrices:
            gate, up = one["gate"], one["up"]
            q, z, s = (torch.cat((getattr(gate, name), getattr(up, name))) for name in ("q", "z", "s"))
            both = Matrix(q, z, s, gate.g_idx)
            for projection, matrix in (("gate_up_proj", both), ("down_proj", one["down"])):
                for suffix, tensor in write(matrix, self.bits).items():
                    found.setdefault(f"{PREFIX}.{projection}.{suffix}", []).append(tensor)
        return {name: torch.stack(tensors).contiguous() for name, tensors in found.items()}

    def in_turns(self, write: Callable[[Matrix, int], Tensors]) -> Tensors:
        """As GPTQModel keeps gpt-oss: ``gate_up.<e>`` with row 2i of gate and 2i + 1 of up, ``down.<e>``, biases."""
        found: Tensors = {}
        for expert, one in enumerate(self.matrices):
            gate, up, down = one["gate"], one["up"], one["down"]
            q, z, s = (
                torch.stack((getattr(gate, name), getattr(up, name)), dim=1).flatten(0, 1) for name in ("q", "z", "s")
            )
            for projection, matrix in (("gate_up", Matrix(q, z, s, gate.g_idx)), ("down", down)):
                rows = torch.arange(len(matrix.q), dtype=torch.float16)
                for suffix, tensor in {**write(matrix, self.bits), "bias": rows + expert}.items():
                    found[f"{PREFIX}.{projection}.{expert}.{suffix}"] = tensor.contiguous().clone()
        return found


# ------------------------------------------------------------------ words


def word(codes: Sequence[int], bits: int) -> int:
    """An int32 of fields, the first in the lowest bits."""
    value = 0
    for at, code in enumerate(codes):
        assert 0 <= code < 2**bits
        value |= code << (bits * at)
    return value - 2**32 if value >= 2**31 else value


def packed_row(codes: Sequence[int], bits: int, order: Sequence[int] | None = None) -> list[int]:
    """Words of consecutive codes, the last one filled up with zeros; ``order``: the code that each field holds."""
    count = 32 // bits
    words = []
    for start in range(0, len(codes), count):
        part = list(codes[start : start + count])
        part += [0] * (count - len(part))
        words.append(word([part[i] for i in (order or range(count))], bits))
    return words


def packed_rows(rows: Tensor, bits: int, order: Sequence[int] | None = None) -> Tensor:
    """int32 [R, ceil(C * bits / 32)] of codes [R, C]: words along the row."""
    return torch.tensor([packed_row(row, bits, order) for row in rows.tolist()], dtype=torch.int32)


# ------------------------------------------------------------------ tools

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def gptq(matrix: Matrix, bits: int, *, stored: int = -1, g_idx: bool = True) -> Tensors:
    """``stored``: what is added to a zero point before it is stored (version 1: -1, version 2: 0)."""
    tensors = {
        "qweight": packed_rows(matrix.q, bits).mT,
        "qzeros": packed_rows(matrix.z.mT + stored, bits),
        "scales": matrix.s.mT,
    }
    return tensors | ({"g_idx": matrix.g_idx} if g_idx else {})


def gptq_2(matrix: Matrix, bits: int) -> Tensors:
    return gptq(matrix, bits, stored=0)


def auto_round(matrix: Matrix, bits: int) -> Tensors:
    return gptq(matrix, bits, g_idx=False)


def awq(matrix: Matrix, bits: int) -> Tensors:
    return {
        "qweight": packed_rows(matrix.q.mT, 4, AWQ_ORDER),
        "qzeros": packed_rows(matrix.z.mT, 4, AWQ_ORDER),
        "scales": matrix.s.mT,
    }


def words(matrix: Matrix, bits: int) -> Tensors:
    """compressed-tensors' pack-quantized, symmetric."""
    return {
        "weight_packed": packed_rows(matrix.q, bits),
        "weight_scale": matrix.s,
        "weight_shape": torch.tensor(matrix.q.shape),
    }


def words_and_zeros(matrix: Matrix, bits: int) -> Tensors:
    """compressed-tensors' pack-quantized with zero points, which are packed along the rows."""
    return {**words(matrix, bits), "weight_zero_point": packed_rows(matrix.z.mT, bits).mT}


def words_and_order(matrix: Matrix, bits: int) -> Tensors:
    return {**words(matrix, bits), "weight_g_idx": matrix.g_idx}


def signed_bytes(matrix: Matrix, bits: int) -> Tensors:
    """compressed-tensors' int-quantized, symmetric."""
    return {"weight": (matrix.q - 2 ** (bits - 1)).to(torch.int8), "weight_scale": matrix.s}


def signed_bytes_and_zeros(matrix: Matrix, bits: int) -> Tensors:
    return {**signed_bytes(matrix, bits), "weight_zero_point": (matrix.z - 2 ** (bits - 1)).to(torch.int8)}


def signed_pairs(matrix: Matrix, bits: int) -> Tensors:
    """compressed-tensors' int4-quantized: two columns in an int8, two's complement."""
    rows: Rows = []
    for row in matrix.q.tolist():
        codes = [(code - 8) % 16 for code in row]
        found = [codes[i] + 16 * codes[i + 1] for i in range(0, len(codes), 2)]
        rows.append([byte - 256 if byte > 127 else byte for byte in found])
    return {"weight_packed": torch.tensor(rows, dtype=torch.int8), "weight_scale": matrix.s}


def row_pairs(matrix: Matrix, bits: int) -> Tensors:
    """ModelOpt's W4A16_AWQ: two rows in a byte, two's complement, float32 scales."""
    codes = ((matrix.q - 8) % 16).tolist()
    rows = [
        [low + 16 * high for low, high in zip(codes[i], codes[i + 1], strict=True)] for i in range(0, len(codes), 2)
    ]
    return {"weight": torch.tensor(rows, dtype=torch.uint8), "weight_scale": matrix.s.float()}


# ------------------------------------------------------------------ reading


def check(found: LayerSource, experts: Codes, key: QuantKey, activation: QuantKey | None = None) -> None:
    """The layer loads under these keys to exactly the experts' values."""
    assert (found.weight_key, found.activation_key) == (key, activation)
    weights = found.weights()
    weights.validate(found.config, values=True)
    assert (weights.weight_key, weights.activation_key) == (key, activation)
    for name, wanted, parts in zip(("w13", "w2"), experts.values(), (len(experts.names) - 1, 1), strict=True):
        values = dequantize_weight(
            getattr(weights, name),
            getattr(weights, f"{name}_scale"),
            key,
            parts=parts,
            zero_point=getattr(weights, f"{name}_zero_point"),
            g_idx=getattr(weights, f"{name}_g_idx"),
            cols=wanted.shape[2],
            dtype=torch.float64,
        )
        assert torch.equal(values, wanted[list(found.experts)]), name
