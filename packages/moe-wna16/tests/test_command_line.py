"""``moe`` on a GPTQ checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from moe_kit.scheme_commands import CommandLineTests, Original, rewrite
from moe_wna16.quickstart import GROUP, MODEL
from torch import Tensor


class TestCommandLine(CommandLineTests):
    scheme = "wna16"

    def test_groups_that_no_backend_reads(self, original: Original, folder: Path, refuses: Callable[..., None]) -> None:
        changes: dict[str, Tensor | None] = {}
        for name, tensor in original.tensors.items():
            if ".experts." in name and name.endswith(("qzeros", "scales")):
                changes[name] = tensor[::2]
            elif name.endswith("g_idx"):
                changes[name] = tensor // 2
        rewrite(folder, original, changes)
        quantization = {**MODEL.config["quantization_config"], "group_size": 2 * GROUP}
        (folder / "config.json").unlink()
        (folder / "config.json").write_text(json.dumps({**MODEL.config, "quantization_config": quantization}))
        refuses(
            "no backend takes kInt4Static[1x256,float16] weights with 16-bit activations",
            "does not read weights quantized as",
            "1x256",
        )
        refuses("no torch", "no marlin", arguments=("-v",))

    def test_an_empty_group(self, original: Original, folder: Path, refuses: Callable[..., None]) -> None:
        name = "model.layers.0.mlp.experts.5.down_proj.g_idx"
        rewrite(folder, original, {name: torch.zeros(256, dtype=torch.int32)})
        refuses(f"{name} puts no column into group 1, expected columns in all 2 groups")
