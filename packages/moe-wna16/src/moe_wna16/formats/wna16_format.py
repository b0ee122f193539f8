"""The base of all WNA16 formats: a config says how the experts are quantised, the rest is the same for every tool."""

from __future__ import annotations

from moe_core.checkpoint.experts import LayerExperts
from moe_core.checkpoint.quantized import QuantizedFormat

from moe_wna16.formats.wna16_layout import WNA16Layout, WNA16Storage


class WNA16Format(QuantizedFormat[WNA16Storage]):
    """Base of the WNA16 formats: :meth:`storage` reads the config, the rest is the same for all."""

    scheme = "wna16"

    def layout(self, storage: WNA16Storage, layer: LayerExperts) -> WNA16Layout:
        return WNA16Layout.of(storage, layer)
