"""LoRA adapters of the experts: low-rank additions to both matrices, selected per token.

    z_s = xq W13[e]^T + b13[e] + (x A13[a, e]^T) B13[a, e]^T
    y_s = hq W2[e]^T  + b2[e]  + (h A2[a, e]^T) B2[a, e]^T

``a`` is the adapter of the token and ``e`` the expert of its slot s. A token whose adapter index is negative or at
least L gets no addition. ``x`` and ``h`` are the activations before the activation key quantizes them, because
adapters are trained with 16-bit activations. (Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021;
the factor alpha / r is part of B here.)
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_core.errors import ConfigError, TensorError, check_dtype, check_instance, check_shape, check_tensor
from moe_core.spec.config import FusedMoEConfig
from moe_core.spec.device import as_torch_device
from moe_core.spec.tensor_record import TensorRecord


def lora_shapes(config: FusedMoEConfig) -> dict[str, tuple[int, ...]]:
    """Compute the shape of each tensor of `LoRAWeights`.

    Args:
        config: Configuration of the layer.

    Returns:
        Shapes by tensor name.
    """
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
    """Physical memory of the host in bytes; infinity if the operating system does not report it."""
    try:
        return float(os.sysconf("SC_PHYS_PAGES")) * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return math.inf


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class LoRAWeights(TensorRecord):
    """Storage for L adapters of one layer's local experts, each of rank R at most.

    L is the config's ``max_loras`` and R its ``max_lora_rank``. All tensors are contiguous and have the layer's
    dtype. An adapter of a smaller rank is padded with zeros. Adapters change in place (:meth:`load`, :meth:`clear`),
    so pointers stay valid and CUDA graphs keep working.

    Attributes:
        w13_a: [L, E, 2R, K]: R rows for the gate, then R for the up half; [L, E, R, K] without a gate.
        w13_b: [L, E, 2N, R]: N rows for each half, which are multiplied with that half's rows of ``w13_a``.
        w2_a: [L, E, R, N].
        w2_b: [L, E, K, R].
    """

    w13_a: Tensor
    w13_b: Tensor
    w2_a: Tensor
    w2_b: Tensor

    @staticmethod
    def zeros(config: FusedMoEConfig, device: torch.device | str) -> LoRAWeights:
        """Allocate storage for adapters that add nothing yet.

        Args:
            config: Configuration of the layer.
            device: Device of the tensors.

        Returns:
            Zero-initialized adapters.

        Raises:
            ConfigError: ``device`` does not have enough memory.
        """
        shapes, where = lora_shapes(config), as_torch_device(device)
        size = sum(math.prod(shape) for shape in shapes.values()) * config.dtype.itemsize
        try:
            # An overcommitting system grants any amount and kills the process on the first write.
            if where.type == "cpu" and size > _physical_memory():
                raise MemoryError
            return LoRAWeights(
                **{name: torch.zeros(shape, dtype=config.dtype, device=where) for name, shape in shapes.items()}
            )
        except (RuntimeError, MemoryError, OverflowError) as error:
            raise ConfigError(
                f"max_loras={config.max_loras} adapters of rank max_lora_rank={config.max_lora_rank} take "
                f"{size / 2**30:,.1f} GiB on {where}, which does not have that much free memory"
            ) from error

    def to(self, device: torch.device | str) -> LoRAWeights:
        """Copy the adapters to another device.

        Args:
            device: The target device.

        Returns:
            The adapters on ``device``.
        """
        where = as_torch_device(device)
        return LoRAWeights(**{name: tensor.to(where) for name, tensor in self.tensors()})

    @property
    def num_adapters(self) -> int:
        """Number of adapters L."""
        return self.w13_a.shape[0]

    @property
    def rank(self) -> int:
        """Maximum rank R."""
        return self.w2_a.shape[2]

    def validate(self, config: FusedMoEConfig, device: torch.device) -> None:
        """Check that the layer has adapters and that every tensor fits it.

        Args:
            config: Configuration of the layer.
            device: Device of the layer's weights.

        Raises:
            ConfigError: ``config.is_lora_enabled`` is False.
            TensorError: A tensor does not fit the config, is on another device or is not contiguous.
        """
        check_instance("config", config, FusedMoEConfig)
        if not config.is_lora_enabled:
            raise ConfigError("the layer's config has is_lora_enabled=False: its backend does not apply adapters")
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
        """Write one adapter of rank r <= R, replacing the previous one at that index.

        Args:
            adapter: Index of the adapter, 0 to L - 1.
            w13_a: [E, 2r, K]; [E, r, K] without a gate.
            w13_b: [E, 2N, r].
            w2_a: [E, r, N].
            w2_b: [E, K, r].
            scaling: Factor alpha / r that multiplies B.

        Raises:
            TensorError: The index, a shape or a dtype is invalid. Nothing is written then.
            ConfigError: ``scaling`` is not a finite number.
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
            # All transfers to the device are done before the first write.
            new_w13_a = w13_a.reshape(experts, parts, rank, hidden).to(self.w13_a)
            new_w13_b = (w13_b.float() * scaling).to(self.w13_b)
            new_w2_a, new_w2_b = w2_a.to(self.w2_a), (w2_b.float() * scaling).to(self.w2_b)
            self.clear(adapter)
            self.w13_a[adapter].view(experts, parts, self.rank, hidden)[:, :, :rank] = new_w13_a
            self.w13_b[adapter, :, :, :rank] = new_w13_b
            self.w2_a[adapter, :, :rank] = new_w2_a
            self.w2_b[adapter, :, :, :rank] = new_w2_b

    def clear(self, adapter: int) -> None:
        """Zero one adapter, so that it adds nothing.

        Args:
            adapter: Index of the adapter, 0 to L - 1.

        Raises:
            TensorError: The index is out of range.
        """
        self._check_adapter(adapter)
        for _, tensor in self.tensors():
            tensor[adapter].zero_()

    def _check_adapter(self, adapter: int) -> None:
        if type(adapter) is not int or not 0 <= adapter < self.num_adapters:
            raise TensorError(f"adapter {adapter!r} is out of range, expected 0 to {self.num_adapters - 1}")


@dataclass(frozen=True, eq=False)
class LoRA:
    """Adapters, and the adapter that each row of the hidden states selects.

    Attributes:
        weights: The adapters.
        adapter_ids: [M] int32 (batched format: [E_local, T_max]); negative or at least L selects none.
    """

    weights: LoRAWeights
    adapter_ids: Tensor


def lora_product(x: Tensor, a: Tensor, b: Tensor, round: Callable[[Tensor], Tensor] = lambda t: t) -> Tensor:
    """Compute ``(x A^T) B^T`` for ``parts`` stacked adapters.

    Args:
        x: [m, cols].
        a: [parts * R, cols].
        b: [rows, R], with the rows of the parts stacked.
        round: Applied to the intermediate values between the products, and to the result.

    Returns:
        [m, rows], with the parts side by side.
    """
    parts, rank = a.shape[0] // b.shape[1], b.shape[1]
    low = round(x @ a.T).view(len(x), parts, rank)
    return round(torch.einsum("tpr,pnr->tpn", low, b.reshape(parts, -1, rank)).flatten(1))
