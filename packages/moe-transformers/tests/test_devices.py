"""Models on the device of the machine: a GPU where there is one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import moe_transformers
import pytest
import torch
from moe_transformers import MoeCoreExperts
from moe_transformers.blocks import experts_modules
from moe_transformers_checkpoints import E, checkpoint, logits, tokens
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

#: hidden and intermediate size that kernels take
SIZES = {"hidden_size": 256, "moe_intermediate_size": 256, "intermediate_size": 256}
#: each of some forty tensors on the way is rounded to the 8 bits of bfloat16, by at most 2^-9 of itself
BOUND = 40 * 2.0**-9


@contextlib.contextmanager
def decided(model: nn.Module, step: int) -> Iterator[None]:
    """Experts that roundings do not choose: token t of a call in layer l has those from l + t * ``step`` on.

    Where two experts are nearly as good, as for one token of twenty here, a router in 16 bits takes either; the token's
    logits are then off by a quarter, in transformers' own experts just so.
    """
    modules = [m for m in model.modules() if isinstance(m, MoeCoreExperts)] or [m for _, m in experts_modules(model)]

    def hook(layer: int) -> Any:
        def choose(module: nn.Module, arguments: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
            x, ids, weights = arguments
            count, top_k = ids.shape
            token = torch.arange(count, device=ids.device)[:, None]
            return x, (layer + token * step + torch.arange(top_k, device=ids.device)) % E, weights

        return choose

    handles = [module.register_forward_pre_hook(hook(layer)) for layer, module in enumerate(modules)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# torch's inductor captures a graph of nothing to have a memory pool
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
@pytest.mark.parametrize(
    ("family", "form"), [("qwen3_moe", "fp8 block"), ("mixtral", "gptq"), ("gpt_oss", "mxfp4")], ids=lambda name: name
)
def test_16_bit_activations(tmp_path: Path, device: torch.device, family: str, form: str) -> None:
    sizes = {name: size for name, size in SIZES.items() if family == "qwen3_moe" or name != "moe_intermediate_size"}
    quantized, plain = checkpoint(tmp_path, family, form, **sizes)
    with moe_transformers.loading(activation_key=None):
        model = AutoModelForCausalLM.from_pretrained(quantized, dtype="bfloat16", device_map=device.type)
    layers = [module.layer for module in model.modules() if isinstance(module, MoeCoreExperts)]
    assert {layer.weights.device.type for layer in layers if layer is not None} == {device.type}
    exact = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).to(device)
    ids = tokens(2, 33).to(device)
    with decided(model, 1), decided(exact, 1):
        expected = logits(exact, ids)
        assert (logits(model, ids) - expected).norm() < BOUND * expected.norm()
    # a static cache, which transformers compiles for on GPUs
    prompt = ids[:, :5]
    with decided(model, 0):
        found = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=4,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            cache_implementation="static",
            output_logits=True,
            return_dict_in_generate=True,
        )
        whole = logits(model, found.sequences[:, :-1])[:, 4:]
    assert (torch.stack(found.logits, dim=1).double() - whole).norm() < BOUND * whole.norm()
