"""What ranks of the tests of whole models do."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import moe_core as mc
import moe_transformers
import torch
from moe_transformers import MoeCoreExperts
from moe_transformers_checkpoints import logits, tokens
from transformers import AutoModelForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig


def models(rank: int, quantized: Path, device: str) -> dict[str, Any]:
    """Of each way of sharing a model: its logits, the layers' sizes, and how many values all else has here.

    ``device``: "cpu", or "cuda" for each rank's own.
    """
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    torch.manual_seed(0)
    found: dict[str, Any] = {}
    place = torch.device(device, rank) if device == "cuda" else torch.device(device)
    shared = {"distributed_config": DistributedConfig(tp_size=2)}
    for name, groups, arguments in (
        ("columns and all else", None, shared),
        ("expected the same number", mc.ParallelGroups.create(ep_size=2), shared),
        ("experts alone", mc.ParallelGroups.create(ep_size=2), {"device_map": place} if device == "cuda" else {}),
    ):
        with moe_transformers.loading(activation_key=None, groups=groups):
            model = AutoModelForCausalLM.from_pretrained(quantized, dtype=torch.float32, **arguments)
        layers = [m.layer for m in model.modules() if isinstance(m, MoeCoreExperts) and m.layer is not None]
        config = layers[0].config
        assert {layer.weights.device for layer in layers} == {place}
        held = sum(getattr(p, "to_local", lambda p=p: p)().numel() for p in model.parameters())
        sizes = (len(layers), config.local_experts, config.intermediate_size, held)
        found[name] = (logits(model, tokens(2, 7).to(place)).cpu(), sizes)
    return found
