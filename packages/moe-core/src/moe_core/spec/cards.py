"""GPU specifications: memory, memory bandwidth and dense matrix-product rates.

Rates are of dense products in TFLOP/s (a multiply-add is two operations), as the vendor's data sheet states them
without sparsity; for GeForce and Jetson with float32 accumulation. Sources, by card:

- V100, T4, A10, A10G, A30, A40, A100, A800, L4, L20, L40, L40S, H20, H100, H800, H200, B200, B300, GH200, GB200,
  GB300, RTX A6000, RTX 6000 Ada, RTX PRO 6000, Orin, Thor, GB10: NVIDIA's product data sheets
- RTX 2080 Ti, 3090, 4090, 5080, 5090: NVIDIA's architecture white papers (Turing, Ampere GA102, Ada, RTX Blackwell)
- MI100 … MI355X, RX 7900 XTX, RX 9070 XT: AMD's product data sheets; MI250: one of its two dies

Memory is the capacity that systems with the card report, which may be less than what is installed. Bandwidth is the
memory clock times the bus width, which the driver reports too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

#: Words in driver names that describe the form factor of a card.
_FORM = r"sxm\d?|pcie|nvl|hbm\de?|\d+gb|blackwell|server|workstation|edition|max|q|generation"


@dataclass(frozen=True)
class Card:
    """One GPU model.

    Attributes:
        name: Name as ``--device`` accepts it.
        arch: "sm90", "gfx942" …
        multiprocessors: Number of SMs or compute units; of one die if torch sees two devices.
        l2_mib: L2 cache in MiB.
        memory_gib: Memory in GiB.
        bandwidth: Memory bandwidth in GB/s.
        rates: TFLOP/s of dense products by operand type: "bf16" (or float16), "fp8", "int8", "fp4". Types that the
            card cannot multiply are missing.
    """

    name: str
    arch: str
    multiprocessors: int
    l2_mib: int
    memory_gib: int
    bandwidth: int
    rates: Mapping[str, float]

    def rate(self, operand: str) -> tuple[str, float] | None:
        """Get the rate of dense products for an operand type.

        Args:
            operand: "bf16", "fp8", "int8" or "fp4".

        Returns:
            The type that the card multiplies in, which is wider if it has no such product, and operations/s; None if
            no rate is known.
        """
        wider = {"fp4": ("fp4", "fp8", "bf16"), "fp8": ("fp8", "bf16"), "int8": ("int8", "bf16")}
        found = next((kind for kind in wider.get(operand, ("bf16",)) if kind in self.rates), None)
        return None if found is None else (found, self.rates[found] * 1e12)

    @property
    def rates_by_bits(self) -> dict[int, float]:
        """Operations/s by operand width in bits."""
        wide = {16: self.rates["bf16"], 8: max(self.rates.get("fp8", 0.0), self.rates.get("int8", 0.0))}
        wide |= {4: self.rates["fp4"]} if "fp4" in self.rates else {}
        return {bits: rate * 1e12 for bits, rate in wide.items() if rate}


def _card(
    name: str, arch: str, multiprocessors: int, l2_mib: int, memory_gib: int, bandwidth: int, *rates: float | None
) -> Card:
    kinds = zip(("bf16", "fp8", "int8", "fp4"), rates, strict=False)
    known = MappingProxyType({kind: rate for kind, rate in kinds if rate is not None})
    return Card(name, arch, multiprocessors, l2_mib, memory_gib, bandwidth, known)


#: By name: architecture, multiprocessors, MiB of L2 cache, GiB of memory, GB/s; TFLOP/s of bf16, fp8, int8, fp4.
CARDS: Mapping[str, Card] = MappingProxyType(
    {
        row[0]: _card(*row)
        for row in (
            ("v100", "sm70", 80, 6, 32, 900, 125),
            ("t4", "sm75", 40, 4, 16, 320, 65, None, 130),
            ("rtx2080ti", "sm75", 68, 5, 11, 616, 53.8, None, 215),
            ("a30", "sm80", 56, 24, 24, 933, 165, None, 330),
            ("a100", "sm80", 108, 40, 80, 2039, 312, None, 624),
            ("a100-40gb", "sm80", 108, 40, 40, 1555, 312, None, 624),
            ("a800", "sm80", 108, 40, 80, 2039, 312, None, 624),
            ("a10", "sm86", 72, 6, 24, 600, 125, None, 250),
            ("a10g", "sm86", 80, 6, 24, 600, 70, None, 140),
            ("a40", "sm86", 84, 6, 48, 696, 150, None, 299),
            ("a6000", "sm86", 84, 6, 48, 768, 155, None, 310),
            ("rtxa6000", "sm86", 84, 6, 48, 768, 155, None, 310),
            ("rtx3090", "sm86", 82, 6, 24, 936, 71, None, 284),
            ("orin", "sm87", 16, 4, 64, 205, 42.5, None, 85),
            ("l4", "sm89", 58, 48, 24, 300, 121, 242, 242),
            ("l20", "sm89", 92, 96, 48, 864, 119.5, 239, 239),
            ("l40", "sm89", 142, 96, 48, 864, 181, 362, 362),
            ("l40s", "sm89", 142, 96, 48, 864, 362, 733, 733),
            ("rtx4090", "sm89", 128, 72, 24, 1008, 165.2, 330.3, 660.6),
            ("rtx6000ada", "sm89", 142, 96, 48, 960, 364.2, 728.5, 728.5),
            ("h20", "sm90", 78, 60, 96, 4022, 148, 296, 296),
            ("h100", "sm90", 132, 50, 80, 3352, 989, 1979, 1979),
            ("h100-pcie", "sm90", 114, 50, 80, 2039, 756, 1513, 1513),
            ("h100-nvl", "sm90", 132, 50, 94, 3938, 835, 1671, 1671),
            ("h800", "sm90", 132, 50, 80, 3352, 989, 1979, 1979),
            ("h200", "sm90", 132, 50, 141, 4916, 989, 1979, 1979),
            ("gh200", "sm90", 132, 50, 96, 4022, 989, 1979, 1979),
            ("b200", "sm100", 148, 126, 180, 8000, 2250, 4500, 4500, 9000),
            ("gb200", "sm100", 148, 126, 186, 8000, 2500, 5000, 5000, 10000),
            ("b300", "sm103", 148, 126, 270, 8000, 2250, 4500, 166, 13500),
            ("gb300", "sm103", 148, 126, 279, 8000, 2500, 5000, 166, 15000),
            ("thor", "sm110", 20, 32, 128, 273, 259, 517, 517, 1035),
            ("rtx5080", "sm120", 84, 64, 16, 960, 112.6, 225.1, 450.2, 900.4),
            ("rtx5090", "sm120", 170, 96, 32, 1792, 209.5, 419, 838, 1676),
            ("rtxpro6000", "sm120", 188, 128, 96, 1792, 503.8, 1007.6, 1007.6, 2015.2),
            ("gb10", "sm121", 48, 24, 128, 273, 125, 250, 250, 500),
            ("dgxspark", "sm121", 48, 24, 128, 273, 125, 250, 250, 500),
            ("mi100", "gfx908", 120, 8, 32, 1229, 92.3, None, 184.6),
            ("mi210", "gfx90a", 104, 8, 64, 1638, 181, None, 181),
            ("mi250", "gfx90a", 104, 8, 64, 1638, 181, None, 181),
            ("mi250x", "gfx90a", 110, 8, 64, 1638, 191.5, None, 191.5),
            ("mi300a", "gfx942", 228, 4, 128, 5300, 980.6, 1961.2, 1961.2),
            ("mi300x", "gfx942", 304, 4, 192, 5300, 1307.4, 2614.9, 2614.9),
            ("mi308x", "gfx942", 80, 4, 192, 5300),
            ("mi325x", "gfx942", 304, 4, 256, 6000, 1307.4, 2614.9, 2614.9),
            ("mi350x", "gfx950", 256, 4, 288, 8000, 2309.6, 4614, 4614, 9227),
            ("mi355x", "gfx950", 256, 4, 288, 8000, 2516.6, 5033.2, 5033.2, 10066),
            ("rx7900xtx", "gfx1100", 96, 6, 24, 960, 122.8, None, 122.8),
            ("rx9070xt", "gfx1201", 64, 8, 16, 640, 195, 389, 389),
        )
    }
)


def plain_name(text: str) -> str:
    """Strip vendor and form factor from a card's name ("NVIDIA H100 NVL": "h100").

    Args:
        text: Name as users or drivers write it.

    Returns:
        The plain name in lower case.
    """
    return _without_vendor("".join(word for word in _words(text) if not re.fullmatch(_FORM, word)))


def card_of(text: str) -> Card | None:
    """Look up a card by name.

    Args:
        text: Name as users or drivers write it: "h200", "NVIDIA A100-SXM4-80GB", "AMD Instinct MI300X".

    Returns:
        The card, in the named form factor if that has an entry ("h100-pcie", "a100-40gb"); None for an unknown name.
    """
    name = plain_name(text)
    forms = (f"{name}-{word}" for word in _words(text))
    return next((CARDS[form] for form in forms if form in CARDS), CARDS.get(name))


def _words(text: str) -> list[str]:
    return re.split(r"[\s_-]+", text.lower())


def _without_vendor(name: str) -> str:
    return re.sub(r"nvidia|geforce|tesla|amd|instinct|radeon", "", name)
