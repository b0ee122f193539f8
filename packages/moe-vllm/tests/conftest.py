"""Tests of moe-vllm: those in `in_vllm` only where vLLM's files are on the path."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["in_vllm"]
