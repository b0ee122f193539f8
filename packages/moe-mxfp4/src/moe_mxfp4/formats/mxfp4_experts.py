"""The base of all MXFP4 formats: a config says how activations are quantised, the rest is the same for every tool."""

from __future__ import annotations

from moe_core.checkpoint.experts import LayerExperts
from moe_core.checkpoint.quantized import QuantizedFormat

from moe_mxfp4.formats.mxfp4_layout import Mxfp4Layout, Mxfp4Storage


class Mxfp4Format(QuantizedFormat[Mxfp4Storage]):
    """Base of the MXFP4 formats: :meth:`storage` reads the config, the rest is the same for all."""

    scheme = "mxfp4"
    interleaved = True

    def layout(self, storage: Mxfp4Storage, layer: LayerExperts) -> Mxfp4Layout:
        return Mxfp4Layout.of(storage, layer)
