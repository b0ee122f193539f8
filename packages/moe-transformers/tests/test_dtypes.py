"""``dtype``: what moe-core computes in, and nothing else instead of what was asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import moe_core as mc
import moe_transformers
import pytest
import torch
from moe_core_transformers import tiny_model
from moe_transformers import MoeCoreExperts
from moe_transformers_checkpoints import tiny_causal_model


@pytest.mark.parametrize("quantize", [None, "int8_per_channel_w8a16"])
@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        "float64",
        "double",
        torch.float8_e4m3fn,
        torch.int8,
        "uint8",
        torch.complex64,
        {"": "float64"},
        {"": torch.bfloat16, "text_config": torch.float64},
    ],
    ids=str,
)
@pytest.mark.parametrize("argument", ["dtype", "torch_dtype"])
def test_dtypes_that_moe_core_does_not_compute_in(
    tmp_path: Path, dtype: Any, argument: str, quantize: str | None
) -> None:
    model = tiny_model("qwen3_moe")
    model.save_pretrained(tmp_path)
    with pytest.raises(mc.ConfigError, match="dtype"), moe_transformers.loading(quantize=quantize):
        type(model).from_pretrained(tmp_path, **{argument: dtype})


@pytest.mark.parametrize("stated", ["float64", "bfloat16", "float8_e4m3fn"])
def test_what_a_checkpoint_says_of_its_dtype(tmp_path: Path, stated: str) -> None:
    """ "auto" takes it, and storage for bfloat16."""
    model = tiny_model("qwen3_moe")
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": stated}))
    with moe_transformers.loading(quantize="int8_per_channel_w8a16"):
        if stated == "float64":
            with pytest.raises(mc.ConfigError, match="dtype"):
                type(model).from_pretrained(tmp_path, dtype="auto")
        else:
            assert type(model).from_pretrained(tmp_path, dtype="auto").dtype is torch.bfloat16


@pytest.mark.parametrize(("dtype", "expected"), [("half", torch.float16), ({"": "float32"}, torch.float32)], ids=str)
def test_dtypes_by_other_names(tmp_path: Path, dtype: Any, expected: torch.dtype) -> None:
    model = tiny_model("qwen3_moe")
    model.save_pretrained(tmp_path)
    with moe_transformers.loading(quantize="int8_per_channel_w8a16"):
        assert type(model).from_pretrained(tmp_path, dtype=dtype).dtype is expected


def test_models_in_float64_are_not_quantized() -> None:
    model = tiny_causal_model("qwen3_moe").double()
    with pytest.raises(mc.ConfigError, match="float64"):
        moe_transformers.quantize_experts(model, "int8_per_channel_w8a16")
    assert not [module for module in model.modules() if isinstance(module, MoeCoreExperts)]
