"""The base of all FP8 formats: a config says how the experts are quantised, the rest is the same for every tool."""

from __future__ import annotations

from moe_core.checkpoint.experts import LayerExperts
from moe_core.checkpoint.quantized import QuantizedFormat

from moe_fp8.formats.fp8_layout import Fp8Layout, Fp8Storage


class Fp8Format(QuantizedFormat[Fp8Storage]):
    """Base of the FP8 formats: :meth:`storage` reads the config, the rest is the same for all."""

    scheme = "fp8"

    def layout(self, storage: Fp8Storage, layer: LayerExperts) -> Fp8Layout:
        return Fp8Layout.of(storage, layer)
