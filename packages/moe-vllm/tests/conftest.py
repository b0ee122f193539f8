"""Tests of moe-vllm: those in `in_vllm` only where vLLM's files are on the path, and on a CPU."""

from __future__ import annotations

import importlib.util

import torch

# vLLM has one platform in a process; `test_gpu.py` has it on a GPU
collect_ignore_glob = [] if importlib.util.find_spec("vllm") and not torch.cuda.is_available() else ["in_vllm"]
