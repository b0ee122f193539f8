"""Experts as the real tools wrote them, in whole models whose other weights are random.

The other model's experts module is filled with the values of the codes, and computes by transformers.
"""

from __future__ import annotations

from pathlib import Path

import moe_core as mc
import moe_transformers
import pytest
import torch
from moe_core.api.models import PER_CALL, ModelSettings, read_layer
from moe_transformers import MoeCoreExperts
from moe_transformers.blocks import blocks
from moe_transformers_checkpoints import completed, logits, tokens
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

PACKAGES = Path(__file__).parents[2]
CASES = [path.parent for path in sorted(PACKAGES.glob("moe-*/tests/data/*/manifest.json"))]
#: int4 weights of the scheme int8 are multiplied with int8 activations alone
INT8 = ("qwen3_ct_w4a8_int",)
#: roundings of float32 in sums of at most 256 products, in some fifteen such sums one after the other
BOUND = 256 * 15 * 2.0**-24
#: half a step of int8 activations, whose largest is at most sqrt(K) times their mean square, in two matrices
BOUND_INT8 = 2 * 256**0.5 / (2 * 127)


def fill(module: nn.Module, layer: mc.MoEWeights, config: mc.FusedMoEConfig) -> None:
    """The values of canonical weights, as a module of transformers keeps them."""

    def values(name: str, parts: int, cols: int) -> Tensor:
        names = ("scale", "zero_point", "g_idx")
        scale, zeros, g_idx = (getattr(layer, f"{name}_{n}") for n in names)
        key = layer.weight_key
        assert key is not None
        return mc.dequantize_weight(
            getattr(layer, name), scale, key, parts=parts, zero_point=zeros, g_idx=g_idx, cols=cols
        )

    def turn(rows: Tensor) -> Tensor:
        """Gate and up in turns, where the module keeps them so."""
        if module.is_concatenated or not module.has_gate:
            return rows
        gate, up = rows.chunk(2, dim=1)
        return torch.stack((gate, up), dim=2).flatten(1, 2)

    first = turn(values("w13", 2 if config.is_gated else 1, config.hidden_size))
    down = values("w2", 1, config.intermediate_size)
    name = "gate_up_proj" if module.has_gate else "up_proj"
    found = {name: first.mT if module.is_transposed else first, "down_proj": down.mT if module.is_transposed else down}
    if layer.w13_bias is not None and layer.w2_bias is not None:
        found |= {f"{name}_bias": turn(layer.w13_bias), "down_proj_bias": layer.w2_bias}
    with torch.no_grad():
        for key, tensor in found.items():
            module.get_parameter(key).copy_(tensor)


@pytest.mark.filterwarnings("ignore::moe_core.CheckpointWarning")
@pytest.mark.parametrize("case", CASES, ids=lambda path: path.name)
def test_logits_are_those_of_the_codes_values(tmp_path: Path, case: Path) -> None:
    folder, reference = completed(case, tmp_path)
    int8 = case.name in INT8
    with moe_transformers.loading(activation_key="checkpoint" if int8 else None):
        model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    assert sum(isinstance(module, MoeCoreExperts) for module in model.modules()) == 1
    (block,) = blocks(reference)
    source = read_layer(mc.Checkpoint.open(folder), dtype=torch.float32, settings=ModelSettings(routing=PER_CALL))
    block.check(source.config)
    fill(block.module, source.weights(), source.config)
    expected = logits(reference, tokens())
    error = (logits(model, tokens()) - expected).norm() / expected.norm()
    assert error < (BOUND_INT8 if int8 else BOUND)
