"""Writer of small checkpoints with random weights, from what is special to a format."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from moe_core.checkpoint.written import write_folder


@dataclass(frozen=True)
class SmallModel:
    """A small MoE model in one checkpoint format.

    Attributes:
        config: Content of config.json.
        store: Quantizes a projection's weights ``[E, rows, columns]`` and returns the tensors of all experts by suffix
            (".weight").
        projections: (rows, columns) of each projection by name.
        router: Names of the router's tensors: the weight ``[E, K]`` and, if it has one, the bias ``[E]``.
        stacked: Whether a tensor has all experts. Otherwise each expert has separate tensors.
    """

    HIDDEN: ClassVar = 512
    INTERMEDIATE: ClassVar = 256
    EXPERTS: ClassVar = 16
    TOP_K: ClassVar = 4

    config: Mapping[str, Any]
    store: Callable[[Tensor], Mapping[str, Tensor]]
    projections: Mapping[str, tuple[int, int]]
    router: tuple[str, ...] = ("gate.weight",)
    stacked: bool = False

    def write(self, folder: Path, seed: int = 0) -> None:
        """Write config.json and one safetensors file per layer, with an index if there are several.

        Args:
            folder: Existing folder to write to.
            seed: Seed of the random weights.
        """
        count = self.config["num_hidden_layers"]
        generator = torch.Generator().manual_seed(seed)
        names = [f"model-{layer + 1:05d}-of-{count:05d}.safetensors" for layer in range(count)]
        names = names if count > 1 else ["model.safetensors"]
        write_folder(folder, self.config, ((name, self._layer(i, generator)) for i, name in enumerate(names)))

    def _layer(self, layer: int, generator: torch.Generator) -> dict[str, Tensor]:
        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu") / math.sqrt(shape[-1])

        start = f"model.layers.{layer}"
        norm = torch.ones(self.HIDDEN, dtype=torch.bfloat16, device="cpu")
        tensors = {f"{start}.post_attention_layernorm.weight": norm}
        for name, shape in zip(self.router, ((self.EXPERTS, self.HIDDEN), (self.EXPERTS,)), strict=False):
            tensors[f"{start}.mlp.{name}"] = normal(*shape).bfloat16()
        for projection, (rows, columns) in self.projections.items():
            for suffix, tensor in self.store(normal(self.EXPERTS, rows, columns)).items():
                if self.stacked:
                    tensors[f"{start}.mlp.experts.{projection}{suffix}"] = tensor
                    continue
                for expert in range(self.EXPERTS):
                    tensors[f"{start}.mlp.experts.{expert}.{projection}{suffix}"] = tensor[expert].contiguous()
        return tensors


def qwen3_moe(
    quantization_config: Mapping[str, Any], store: Callable[[Tensor], Mapping[str, Tensor]], layers: int = 1
) -> SmallModel:
    """Describe a small Qwen3-MoE model.

    Args:
        quantization_config: ``quantization_config`` of config.json.
        store: As in :class:`SmallModel`.
        layers: Number of layers.

    Returns:
        The model.
    """
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "decoder_sparse_step": 1,
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": SmallModel.HIDDEN,
        "intermediate_size": 4 * SmallModel.HIDDEN,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": SmallModel.INTERMEDIATE,
        "norm_topk_prob": True,
        "num_experts": SmallModel.EXPERTS,
        "num_experts_per_tok": SmallModel.TOP_K,
        "num_hidden_layers": layers,
        "quantization_config": quantization_config,
    }
    up, down = (SmallModel.INTERMEDIATE, SmallModel.HIDDEN), (SmallModel.HIDDEN, SmallModel.INTERMEDIATE)
    projections = {"gate_proj": up, "up_proj": up, "down_proj": down}
    return SmallModel(config, store, projections)
