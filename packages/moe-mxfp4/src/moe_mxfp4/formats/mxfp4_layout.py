"""Storage of e2m1 experts and e8m0 scales: validation and conversion to canonical form.

Every tool stores two codes per byte, the even column low, and one scale per 32 columns, so bytes are moved but never
changed. The differences are:

===================  ===================  =====================  ==========================
weight               scale                shape of the weight    tools
===================  ===================  =====================  ==========================
``blocks``           ``scales``           [rows, cols/32, 16]    gpt-oss (all experts at once)
``weight_packed``    ``weight_scale``     [rows, cols/2]         compressed-tensors, AutoRound
``weight``           ``weight_scale``     [rows, cols/2]         Quark, ModelOpt, MiMo
``weight``, int8     ``scale``            [rows, cols/2]         DeepSeek-V4
===================  ===================  =====================  ==========================

gpt-oss interleaves gate and up rows in every tool that stores both in one tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from moe_core import QuantKey, kMxfp4Static
from moe_core.api.formats import (
    ExpertStorage,
    LayerExperts,
    Matrix,
    QuantizedLayout,
    TensorRule,
    Values,
    is_interleaved,
)
from torch import Tensor

from moe_mxfp4.groups import GROUP

#: bytes of a group's codes
GROUP_BYTES = 16
#: suffixes of the codes and of their scales
WEIGHTS = ("weight", "weight_packed")
SCALES = ("weight_scale", "weight_scale_inv", "scales", "scale")

_EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)
_CODES = (torch.uint8, torch.int8)


def _bytes(stored: Tensor, matrix: Matrix) -> Tensor:
    """Return stored codes or exponents [n, rows, ...] as bytes [n, rows, bytes]."""
    return stored.view(torch.uint8).flatten(2)


def _first(suffix: str, suffixes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys((suffix, *suffixes)))


@dataclass(frozen=True)
class Mxfp4Storage(ExpertStorage):
    """Quantization of one layer's e2m1 experts; see the base class.

    Attributes:
        activation: quantization of the activations; None for 16-bit activations.
        why: origin of the quantization config, for messages.
        weight: usual suffix of the codes, for messages.
        scale: usual suffix of the scales, for messages.
    """

    supports_interleaved = True

    activation: QuantKey | None
    why: str
    weight: str = "weight"
    scale: str = "weight_scale"

    def layout(self, layer: LayerExperts) -> QuantizedLayout:
        rules = (
            # every code is a valid number, so no values are checked
            TensorRule(
                "blocks",
                lambda m: [(m.rows, m.cols // GROUP, GROUP_BYTES), (m.rows, m.cols // 2)],
                _CODES,
                "weight",
                values=None,
                arrange=_bytes,
                multiple=(1, GROUP),
            ),
            TensorRule(
                _first(self.weight, WEIGHTS) if self.weight != "blocks" else WEIGHTS,
                lambda m: [(m.rows, m.cols // 2)],
                _CODES,
                "weight",
                values=None,
                arrange=_bytes,
                multiple=(1, 2),
            ),
            TensorRule(
                _first(self.scale, SCALES),
                lambda m: [(m.rows, -(-m.cols // GROUP))],
                _EXPONENTS,
                "scale",
                why=f"one e8m0 scale per {GROUP} columns",
                values=Values.SCALE,
                arrange=_bytes,
            ),
        )
        rules = rules if self.weight == "blocks" else (rules[1], rules[0], rules[2])
        return QuantizedLayout(layer, kMxfp4Static, self.activation, self, rules, is_interleaved(layer))
