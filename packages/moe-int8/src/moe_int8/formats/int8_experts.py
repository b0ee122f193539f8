"""The base of all INT8 formats: a config says how the experts are quantised, the rest is the same for every tool."""

from __future__ import annotations

from moe_core.checkpoint.experts import LayerExperts
from moe_core.checkpoint.quantized import QuantizedFormat

from moe_int8.formats.int8_layout import Int8Layout, Int8Storage


class Int8Format(QuantizedFormat[Int8Storage]):
    """Base of the INT8 formats: :meth:`storage` reads the config, the rest is the same for all."""

    scheme = "int8"

    def layout(self, storage: Int8Storage, layer: LayerExperts) -> Int8Layout:
        return Int8Layout.of(storage, layer)
