"""Checks of the arguments of a fused MoE call: shapes, dtypes, devices, no gradients.

Every call runs them, so a valid argument costs only a few attribute reads.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moe_core.errors import ConfigError, TensorError, check_dtype, check_shape, check_sign, check_tensor
from moe_core.spec.config import FusedMoEConfig
from moe_core.spec.environment import CHECK
from moe_core.spec.lora import LoRAWeights
from moe_core.spec.routing import LOGIT_DTYPES

ID_DTYPES = (torch.int32, torch.int64)
#: Dtypes of router weights; 16-bit ones are converted to float32, which is exact.
ROUTER_WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def refuse_gradients(**tensors: Tensor | None) -> None:
    """Reject tensors that require grad, because the experts compute no gradients.

    Call this in grad mode only.

    Args:
        **tensors: Tensors by argument name.

    Raises:
        TensorError: A tensor requires grad.
    """
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            raise TensorError(
                f"{name} requires grad, but the experts are for inference only; call them under torch.no_grad(), "
                f"or pass {name}.detach()"
            )


def check_width(hidden_states: Tensor, config: FusedMoEConfig, leading: str = "M") -> None:
    """Check that ``hidden_states`` is [M, K].

    Args:
        hidden_states: The tensor.
        config: Configuration of the layer.
        leading: "M"; "..." allows any number of leading dimensions.

    Raises:
        TensorError: The shape is wrong.
    """
    check_tensor("hidden_states", hidden_states)
    shape = hidden_states.shape
    if not (shape and shape[-1] == config.hidden_size and (leading == "..." or len(shape) == 2)):
        raise TensorError(
            f"hidden_states has shape {list(shape)}, expected [{leading}, {config.hidden_size}]: "
            f"K = {config.hidden_size} is the layer's hidden size"
        )


def check_argument(
    name: str, tensor: Any, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], device: torch.device
) -> None:
    """Check a tensor of a call: dense, of one shape, dtype and device, and with its negative bit clear.

    Args:
        name: Name of the argument, for the message.
        tensor: The tensor.
        shape: Expected shape.
        dtypes: Accepted dtypes.
        device: Device of the layer's weights.

    Raises:
        TensorError: A property is wrong.
    """
    if (
        isinstance(tensor, Tensor)
        and tensor.shape == shape
        and tensor.dtype in dtypes
        and tensor.device == device
        and tensor.layout is torch.strided
        and not tensor.is_neg()
    ):
        return
    check_shape(name, tensor, shape)
    check_dtype(name, tensor, dtypes)
    check_sign(name, tensor)
    raise TensorError(f"{name} is on {tensor.device}, the layer's weights are on {device}")


def check_hidden_states(hidden_states: Any, config: FusedMoEConfig, device: torch.device) -> None:
    """Check shape, dtype, device and strides of the hidden states.

    Args:
        hidden_states: [M, K] in the layer's dtype, with contiguous columns and any row stride.
        config: Configuration of the layer.
        device: Device of the layer's weights.

    Raises:
        TensorError: A property is wrong.
    """
    if not (isinstance(hidden_states, Tensor) and hidden_states.shape[1:] == (config.hidden_size,)):
        check_width(hidden_states, config)
    check_argument("hidden_states", hidden_states, hidden_states.shape, (config.dtype,), device)
    # Without tokens, strides are meaningless: numpy uses (0, 0).
    if hidden_states.stride(1) != 1 and hidden_states.shape[1] > 1 and hidden_states.shape[0]:
        raise TensorError(
            f"hidden_states has strides {hidden_states.stride()}, expected contiguous columns (any row stride)"
        )


def check_output(output: Tensor, hidden_states: Tensor, config: FusedMoEConfig, rows: int | None = None) -> None:
    """Check the output tensor against hidden states that are already checked.

    Args:
        output: [``rows``, K], contiguous, not overlapping the hidden states.
        hidden_states: [M, K].
        config: Configuration of the layer.
        rows: Number of rows; default: M.

    Raises:
        TensorError: A property is wrong.
    """
    shape = (hidden_states.shape[0] if rows is None else rows, config.hidden_size)
    check_argument("output", output, shape, (config.dtype,), hidden_states.device)
    if not output.is_contiguous():
        raise TensorError(f"output has strides {output.stride()}, expected contiguous [M, {config.hidden_size}]")
    if output.numel() and _overlap(output, hidden_states):
        raise TensorError("output shares memory with hidden_states, which are read after its first rows are written")


def _overlap(output: Tensor, x: Tensor) -> bool:
    """Whether ``output`` overlaps the memory range of ``x``.

    ``output`` [M, K] is contiguous; the range of ``x`` spans from its first to its last element.
    """
    a, b = output.data_ptr(), x.data_ptr()
    b_end = b + ((x.shape[0] - 1) * x.stride(0) + x.shape[1]) * x.element_size()
    return a < b_end and b < a + output.nbytes


def check_beside(hidden_states: Tensor, name: str, tensor: Tensor) -> None:
    """Check that a tensor is on the device of the hidden states, with its negative bit clear.

    Args:
        hidden_states: The hidden states.
        name: Name of the tensor, for the message.
        tensor: The tensor to check.

    Raises:
        TensorError: A property is wrong.
    """
    check_sign(name, tensor)
    if tensor.device != hidden_states.device:
        raise TensorError(f"{name} is on {tensor.device}, hidden_states on {hidden_states.device}")


def check_call(
    hidden_states: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    expert_map: Tensor | None,
    adapter_ids: Tensor | None,
    *,
    config: FusedMoEConfig,
    device: torch.device,
    mapped: bool,
    lora: LoRAWeights | None,
) -> None:
    """Check the tensors of a call of modular experts.

    Args:
        hidden_states: [M, K] in the layer's dtype, with contiguous columns and any row stride.
        topk_weights: [M, k].
        topk_ids: [M, k].
        expert_map: [E] int32, or None.
        adapter_ids: [M] int32, or None.
        config: Configuration of the layer.
        device: Device of the layer's weights.
        mapped: No map is needed, because the prepare/finalize class knows where experts are.
        lora: Adapters of the layer, or None.

    Raises:
        ConfigError: There are adapter ids but no adapters.
        TensorError: A tensor does not fit or the map is missing.
    """
    check_hidden_states(hidden_states, config, device)
    shape = (hidden_states.shape[0], config.top_k)
    # Both are [M, k], so only the dtypes reveal swapped arguments.
    check_argument("topk_weights", topk_weights, shape, ROUTER_WEIGHT_DTYPES, device)
    check_argument("topk_ids", topk_ids, shape, ID_DTYPES, device)
    if expert_map is not None or not mapped:
        check_map(expert_map, config, device)
    if adapter_ids is not None:
        if lora is None:
            raise ConfigError("adapter_ids is given, but the layer has no adapters: set lora of its kernel")
        check_argument("adapter_ids", adapter_ids, shape[:1], (torch.int32,), device)


def check_routing_values(topk_weights: Tensor, topk_ids: Tensor, config: FusedMoEConfig) -> None:
    """Check the values of expert ids and router weights; waits for the device.

    Args:
        topk_weights: [M, k], not NaN where there is an expert.
        topk_ids: [M, k], from -1 (no expert) to E - 1.
        config: Configuration of the layer.

    Raises:
        TensorError: Values are invalid; the message has their number and the first one.
    """
    last = config.num_experts - 1
    refuse_values(
        "topk_ids", topk_ids, (topk_ids < -1) | (topk_ids > last), f"expert ids from -1 (no expert) to {last}"
    )
    refuse_values("topk_weights", topk_weights, topk_weights.isnan() & (topk_ids != -1), "numbers")


def refuse_values(name: str, tensor: Tensor, wrong: Tensor, expected: str) -> None:
    """Raise TensorError if an element of ``tensor`` is wrong.

    Skipped under CUDA-graph capture and for meta tensors, where values are not available.

    Args:
        name: Name of the tensor, for the message.
        tensor: The tensor.
        wrong: Bool mask of the invalid elements.
        expected: Description of valid values, for the message.

    Raises:
        TensorError: An element is wrong.
    """
    if tensor.is_meta or (tensor.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return
    found = wrong.nonzero().tolist()
    if found:
        first = tuple(found[0])
        raise TensorError(
            f"{name} has {len(found)} of {tensor.numel()} values out of range, the first {tensor[first].item()} at "
            f"{list(first)}, expected {expected} (found because {CHECK}=1)"
        )


def check_logits(
    hidden_states: Tensor,
    router_logits: Tensor,
    correction_bias: Tensor | None,
    expert_map: Tensor | None,
    config: FusedMoEConfig,
) -> None:
    """Check router logits, correction bias and expert map against checked hidden states.

    Args:
        hidden_states: [M, K].
        router_logits: [M, E].
        correction_bias: [E], or None.
        expert_map: [E] int32, or None.
        config: Configuration of the layer.

    Raises:
        TensorError: A tensor does not fit or the map is missing.
    """
    shape, device = (hidden_states.shape[0], config.num_experts), hidden_states.device
    check_argument("router_logits", router_logits, shape, LOGIT_DTYPES, device)
    if correction_bias is not None:
        check_argument("correction_bias", correction_bias, (config.num_experts,), LOGIT_DTYPES, device)
    check_map(expert_map, config, device)


def check_map(expert_map: Tensor | None, config: FusedMoEConfig, device: torch.device) -> None:
    """Check the expert map, which is required if this rank holds only some experts.

    Args:
        expert_map: [E] int32, or None.
        config: Configuration of the layer.
        device: Device of the layer's weights.

    Raises:
        TensorError: The map does not fit or is missing.
    """
    if expert_map is not None:
        check_argument("expert_map", expert_map, (config.num_experts,), (torch.int32,), device)
    elif config.local_experts < config.num_experts:
        raise TensorError(
            f"expert_map [{config.num_experts}] is missing: this rank holds "
            f"{config.local_experts} of {config.num_experts} experts"
        )


def check_counts(tokens_per_rank: Sequence[int]) -> None:
    """Check that the token counts per rank are integers of 0 or more.

    Args:
        tokens_per_rank: Number of tokens of each rank.

    Raises:
        TensorError: They are not.
    """
    try:
        fewest = min(map(operator.index, tokens_per_rank), default=-1)
    except TypeError:
        fewest = -1
    if fewest < 0:
        raise TensorError(
            f"tokens_per_rank is {tokens_per_rank!r}, expected a number of tokens (0 or more) for each rank"
        )
