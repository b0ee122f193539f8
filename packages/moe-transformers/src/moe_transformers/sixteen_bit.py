"""16-bit experts that stay with transformers but have tensor names it does not recognize.

Tools that quantize experts one by one write all layers in that form, including layers they leave in 16 bits.
transformers merges such tensors into its modules' 3-D parameters for some families and names. It initializes the
parameters of the others at random.
"""

from __future__ import annotations

import functools
from collections.abc import Container, Mapping

from moe_core import ConfigError, FusedMoEConfig
from moe_core.api.formats import LayerExperts
from moe_core.api.models import unquantized_tensor
from torch import Tensor, nn

from moe_transformers.blocks import Block
from moe_transformers.dense import LazyTensor
from moe_transformers.filled import as_module_holds

#: parameters of a module, and the canonical tensors that they hold
_CANONICAL = {
    "gate_up_proj": "w13",
    "gate_up_proj_bias": "w13_bias",
    "up_proj": "w13",
    "up_proj_bias": "w13_bias",
    "down_proj": "w2",
    "down_proj_bias": "w2_bias",
}


def check_biases(block: Block, layer: LayerExperts) -> None:
    """Raise ConfigError if the checkpoint has expert biases but the module does not.

    Args:
        block: block of the experts.
        layer: the experts in the checkpoint.
    """
    if layer.has_bias and not any(name.endswith("_bias") for name, _ in block.module.named_parameters()):
        raise ConfigError(
            f"{block.name} ({type(block.module).__name__}) has no biases, but the checkpoint has some under "
            f"{layer.prefix}: load the model with the checkpoint's own config"
        )


def missing_parameters(block: Block, layer: LayerExperts, missing: Container[str]) -> Mapping[str, LazyTensor]:
    """Return a block's missing parameters that the checkpoint has, in the module's layout.

    Args:
        block: block of the experts.
        layer: the experts in the checkpoint.
        missing: names of parameters without values.

    Returns:
        Lazy tensors by name. Indexing one raises CheckpointError if ``layer`` does not fit the module.
    """
    found: dict[str, LazyTensor] = {}
    for name, parameter in block.module.named_parameters():
        canonical = _CANONICAL.get(name)
        if canonical is None or f"{block.name}.{name}" not in missing:
            continue
        if layer.has_bias or not name.endswith("_bias"):
            read = functools.partial(_read, block.module, layer, canonical)
            found[f"{block.name}.{name}"] = LazyTensor(read, parameter.shape)
    return found


def _read(module: nn.Module, layer: LayerExperts, canonical: str) -> Tensor:
    down = module.get_parameter("down_proj")
    hidden, inter = down.shape[:0:-1] if getattr(module, "is_transposed", False) else down.shape[1:]
    config = FusedMoEConfig(num_experts=down.shape[0], top_k=1, hidden_size=hidden, intermediate_size=inter)
    return as_module_holds(module, canonical, unquantized_tensor(layer, canonical, config))
