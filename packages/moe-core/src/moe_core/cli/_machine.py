"""Measured limits of the machine: memory bandwidth, and operation rate of a dense product."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_core.cli._timing import measure
from moe_core.parallel.distributed.cost import products_of
from moe_core.spec.config import FusedMoEConfig
from moe_core.spec.quant_key import QuantKey


@dataclass(frozen=True)
class Limits:
    """Limits of a machine.

    Attributes:
        bandwidth: Bytes per second.
        rate: Operations per second (a multiply-add counts as two).
        product: Operand type of the products.
    """

    bandwidth: float
    rate: float
    product: str

    def floor(
        self, config: FusedMoEConfig, weight_bytes: float, active: float, tokens: int, every: int | None = None
    ) -> tuple[float, str]:
        """Return the minimum time of a call in seconds, and its bound: "memory" or "products".

        Args:
            config: Config of a rank.
            weight_bytes: Bytes of the rank's experts.
            active: Number of experts that have tokens.
            tokens: Tokens of the rank.
            every: Tokens of all ranks; None for ``tokens``.
        """
        states = 2 * tokens * config.hidden_size * config.dtype.itemsize
        moved = weight_bytes / config.local_experts * active + states
        operations = products_of(config, tokens if every is None else every)
        return max((moved / self.bandwidth, "memory"), (operations / self.rate, "products"), key=lambda one: one[0])


def measure_limits(device: torch.device, config: FusedMoEConfig, activation_key: QuantKey | None) -> Limits:
    """Measure the limits of ``device`` for the layer's kind of matrix product."""
    eight_bit = activation_key is not None and activation_key.dtype.bits == 8
    rate, product = _rate(device, config.dtype, eight_bit)
    return Limits(_bandwidth(device), rate, product)


def _bandwidth(device: torch.device) -> float:
    # much larger than any cache
    elements = (1 << 28) if device.type == "cuda" else (1 << 25)
    source, target = (torch.zeros(elements, dtype=torch.float32, device=device) for _ in range(2))
    copying = measure([lambda: target.copy_(source)], device, graph=False, budget=0.3)
    reading = measure([lambda: source.amax()], device, graph=False, budget=0.3)
    size = float(source.nbytes)
    return max(2 * size / copying.low, size / reading.low)


def _rate(device: torch.device, dtype: torch.dtype, eight_bit: bool) -> tuple[float, str]:
    size = 8192 if device.type == "cuda" else 1024
    if eight_bit and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9):
        one = torch.ones((), device=device)
        a = torch.randn(size, size, device=device).to(torch.float8_e4m3fn)

        def scaled() -> Tensor:
            product: Tensor = torch._scaled_mm(
                a, a.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
            )
            return product

        return _per_second(scaled, size, device), "fp8"
    # CPUs multiply in float32; 16-bit types are storage only.
    wide = torch.float32 if device.type == "cpu" else dtype
    b = torch.randn(size, size, device=device).to(wide)
    return _per_second(lambda: b @ b, size, device), str(wide).removeprefix("torch.")


def _per_second(product: Callable[[], object], size: int, device: torch.device) -> float:
    return 2.0 * size**3 / measure([product], device, graph=False, budget=0.5).low
