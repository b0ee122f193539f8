"""LoRA adapters of the experts: low-rank additions to both matrices, chosen per token.

    z_s = xq W13[e]^T + b13[e] + (x A13[a, e]^T) B13[a, e]^T
    y_s = hq W2[e]^T  + b2[e]  + (h A2[a, e]^T) B2[a, e]^T

``a`` is the adapter of the token and ``e`` the expert of its slot s; a token whose adapter is negative or at least L
has no addition.  ``x`` and ``h`` are what the activation key quantises, before it does: adapters were trained beside
16-bit activations.  (Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021; the factor alpha / r is
part of B here.)
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from moe_core.errors import ConfigError, TensorError, check_dtype, check_instance, check_shape, check_tensor
from moe_core.spec.config import FusedMoEConfig
from moe_core.spec.device import as_torch_device
from moe_core.spec.tensor_record import TensorRecord


def lora_shapes(config: FusedMoEConfig) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor of `LoRAWeights` for ``config``."""
    check_instance("config", config, FusedMoEConfig)
    adapters, experts, rank = config.max_loras, config.local_experts, config.max_lora_rank
    hidden, size = config.hidden_size, config.intermediate_size
    parts = 2 if config.is_gated else 1
    return {
        "w13_a": (adapters, experts, parts * rank, hidden),
        "w13_b": (adapters, experts, parts * size, rank),
        "w2_a": (adapters, experts, rank, size),
        "w2_b": (adapters, experts, hidden, rank),
    }


def _physical_memory() -> float:
    """Bytes of this machine; infinity where the system does not tell."""
    try:
        return float(os.sysconf("SC_PHYS_PAGES")) * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return math.inf


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class LoRAWeights(TensorRecord):
    """Places for L adapters of one layer's local experts, each of rank R at most.

    - ``w13_a`` [L, E, 2R, K]: R rows for the gate, then R for the up half ([L, E, R, K] without a gate)
    - ``w13_b`` [L, E, 2N, R]: N rows for each half, which meet that half's rows of ``w13_a``
    - ``w2_a`` [L, E, R, N], ``w2_b`` [L, E, K, R]

    All in the layer's dtype and contiguous.  L is the config's ``max_loras``, R its ``max_lora_rank``; an adapter of
    a smaller rank has zeros in the rest.  An adapter changes in place (:meth:`load`, :meth:`clear`): pointers stay,
    so CUDA graphs go on working.
    """

    w13_a: Tensor
    w13_b: Tensor
    w2_a: Tensor
    w2_b: Tensor

    @staticmethod
    def zeros(config: FusedMoEConfig, device: torch.device | str) -> LoRAWeights:
        """Places for adapters that add nothing yet.  Raises ConfigError where ``device`` has no room for so many."""
        shapes, where = lora_shapes(config), as_torch_device(device)
        size = sum(math.prod(shape) for shape in shapes.values()) * config.dtype.itemsize
        try:
            # a system that overcommits grants any amount, and ends the process where it is written
            if where.type == "cpu" and size > _physical_memory():
                raise MemoryError
            return LoRAWeights(
                **{name: torch.zeros(shape, dtype=config.dtype, device=where) for name, shape in shapes.items()}
            )
        except (RuntimeError, MemoryError, OverflowError) as error:
            raise ConfigError(
                f"max_loras={config.max_loras} adapters of rank max_lora_rank={config.max_lora_rank} take "
                f"{size / 2**30:,.1f} GiB on {where}, which has no room for them"
            ) from error

    def to(self, device: torch.device | str) -> LoRAWeights:
        """The same adapters on another device."""
        where = as_torch_device(device)
        return LoRAWeights(**{name: tensor.to(where) for name, tensor in self.tensors()})

    @property
    def num_adapters(self) -> int:
        """L."""
        return self.w13_a.shape[0]

    @property
    def rank(self) -> int:
        """R."""
        return self.w2_a.shape[2]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Each tensor with its name."""
        for item in fields(self):
            yield item.name, getattr(self, item.name)

    def validate(self, config: FusedMoEConfig, device: torch.device) -> None:
        """Raise ConfigError where the config has no adapters, TensorError for a tensor that does not fit it."""
        check_instance("config", config, FusedMoEConfig)
        if not config.is_lora_enabled:
            raise ConfigError(
                "the layer's config says is_lora_enabled=False: no backend was chosen that applies adapters"
            )
        expected = lora_shapes(config)
        for name, tensor in self.tensors():
            check_shape(name, tensor, expected[name])
            check_dtype(name, tensor, (config.dtype,))
            if tensor.device != device:
                raise TensorError(f"{name} is on {tensor.device}, the layer's weights are on {device}")
            if not tensor.is_contiguous():
                raise TensorError(f"{name} has strides {tensor.stride()}, expected contiguous {list(tensor.shape)}")

    def load(
        self, adapter: int, *, w13_a: Tensor, w13_b: Tensor, w2_a: Tensor, w2_b: Tensor, scaling: float = 1.0
    ) -> None:
        """Write one adapter of rank r <= R over what its place held.

        ``w13_a`` [E, 2r, K] (without a gate [E, r, K]), ``w13_b`` [E, 2N, r], ``w2_a`` [E, r, N], ``w2_b`` [E, K, r];
        ``scaling`` (alpha / r) multiplies B.  Raises TensorError, before anything is written, for an adapter or a shape
        that does not fit.
        """
        self._check_adapter(adapter)
        if type(scaling) not in (int, float) or not math.isfinite(scaling):
            raise ConfigError(f"scaling is {scaling!r}, expected a number: alpha / r")
        check_tensor("w2_a", w2_a)
        rank = w2_a.shape[1] if w2_a.dim() == 3 else 0
        if not 1 <= rank <= self.rank:
            raise TensorError(
                f"w2_a has shape {list(w2_a.shape)}, expected [E, rank, N] with a rank of 1 to {self.rank}"
            )
        _, experts, stacked, hidden = self.w13_a.shape
        parts, rows = stacked // self.rank, self.w13_b.shape[2]
        check_shape("w13_a", w13_a, (experts, parts * rank, hidden))
        check_shape("w13_b", w13_b, (experts, rows, rank))
        check_shape("w2_a", w2_a, (experts, rank, self.w2_a.shape[3]))
        check_shape("w2_b", w2_b, (experts, hidden, rank))
        for name, tensor in (("w13_a", w13_a), ("w13_b", w13_b), ("w2_a", w2_a), ("w2_b", w2_b)):
            check_dtype(name, tensor, (torch.bfloat16, torch.float16, torch.float32))
            if tensor.is_meta:
                raise TensorError(f"{name} is on the meta device: it has no values to load")
        with torch.no_grad():
            # brought here before the first is written
            new_w13_a = w13_a.reshape(experts, parts, rank, hidden).to(self.w13_a)
            new_w13_b = (w13_b.float() * scaling).to(self.w13_b)
            new_w2_a, new_w2_b = w2_a.to(self.w2_a), (w2_b.float() * scaling).to(self.w2_b)
            self.clear(adapter)
            self.w13_a[adapter].view(experts, parts, self.rank, hidden)[:, :, :rank] = new_w13_a
            self.w13_b[adapter, :, :, :rank] = new_w13_b
            self.w2_a[adapter, :, :rank] = new_w2_a
            self.w2_b[adapter, :, :, :rank] = new_w2_b

    def clear(self, adapter: int) -> None:
        """Make one adapter add nothing."""
        self._check_adapter(adapter)
        for _, tensor in self.tensors():
            tensor[adapter].zero_()

    def _check_adapter(self, adapter: int) -> None:
        if type(adapter) is not int or not 0 <= adapter < self.num_adapters:
            raise TensorError(f"adapter {adapter!r} is out of range: there are places 0 to {self.num_adapters - 1}")


@dataclass(frozen=True, eq=False)
class LoRA:
    """What the experts get: the adapters, and which of them each row of the hidden states wants.

    ``adapter_ids`` [M] int32 (batched format: [E_local, T_max]); negative or at least L: none.
    """

    weights: LoRAWeights
    adapter_ids: Tensor


def lora_product(x: Tensor, a: Tensor, b: Tensor, round: Callable[[Tensor], Tensor] = lambda t: t) -> Tensor:
    """``(x A^T) B^T`` [m, rows] of rows ``x`` [m, cols]: ``a`` [parts * R, cols], ``b`` [rows, R], parts side by side.

    ``round`` is applied to the values between the products, and to the result.
    """
    parts, rank = a.shape[0] // b.shape[1], b.shape[1]
    low = round(x @ a.T).view(len(x), parts, rank)
    return round(torch.einsum("tpr,pnr->tpn", low, b.reshape(parts, -1, rank)).flatten(1))
