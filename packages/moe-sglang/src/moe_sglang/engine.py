"""Supported SGLang versions, the environment switch, and the logger."""

from __future__ import annotations

import logging

from moe_core.api.engines import Engine

ENGINE = Engine(
    package="moe-sglang",
    distribution="sglang",
    lowest="0.5.23",
    below="0.5.24",
    switch="MOE_SGLANG",
    schemes=("fp8", "int8", "wna16"),
)

#: child of SGLang's logger, so that its handlers and level apply
LOGGER = logging.getLogger("sglang.moe_sglang")
