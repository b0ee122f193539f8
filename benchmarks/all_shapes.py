"""Shapes for the fused-MoE benchmark: the layers of docs/performance.md, in every scheme."""

from __future__ import annotations

SCHEMES = ("fp8_block", "fp8_channel", "int8_channel", "int4_g128")
GPT_OSS = ("mxfp4",)
#: name, experts, experts per token, hidden size, intermediate size, activation, schemes
LAYERS = [
    ("mixtral-8x7b", 8, 2, 4096, 14336, "silu", SCHEMES),
    ("dsv3-tp8", 256, 8, 7168, 256, "silu", SCHEMES),
    ("dsv3-ep8", 32, 8, 7168, 2048, "silu", SCHEMES),
    ("qwen3-30b-a3b", 128, 8, 2048, 768, "silu", SCHEMES),
    ("gpt-oss-120b", 128, 4, 2880, 2880, "swigluoai", GPT_OSS),
    ("gpt-oss-20b", 32, 4, 2880, 2880, "swigluoai", GPT_OSS),
    ("glm-4.5-air", 128, 8, 4096, 1408, "silu", SCHEMES),
    ("qwen3-235b-tp2", 128, 8, 4096, 768, "silu", SCHEMES),
    ("llama-4-scout-tp2", 16, 1, 5120, 4096, "silu", SCHEMES),
    ("phi-3.5-moe", 16, 2, 4096, 6400, "silu", SCHEMES),
    ("kimi-k2-tp8", 384, 8, 7168, 256, "silu", SCHEMES),
]
SHAPES = [Shape(*layer) for layer in LAYERS]  # noqa: F821  (the benchmark predefines Shape)
