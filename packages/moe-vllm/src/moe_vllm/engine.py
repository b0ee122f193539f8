"""Supported vLLM versions, the environment switch, and the logger."""

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

#: child of vLLM's logger, so that its handlers and level apply
LOGGER = logging.getLogger("vllm.moe_vllm")
