"""Which vLLM is meant, how the user switches the package off, and where it logs."""

from __future__ import annotations

import logging

from moe_core.api.engines import Engine

ENGINE = Engine(
    package="moe-vllm",
    distribution="vllm",
    lowest="0.33",
    below="0.34",
    switch="MOE_VLLM",
    schemes=("fp8", "int8", "mxfp4", "wna16"),
)

#: below vLLM's own logger, so that its handlers and its level apply
LOGGER = logging.getLogger("vllm.moe_vllm")
