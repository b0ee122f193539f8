"""``--input`` and ``--output`` files of ``moe run``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from moe_core._support.atomic_write import write_whole
from moe_core.checkpoint.files.safetensors_file import SafetensorsFile
from moe_core.errors import TensorError, check_dtype, check_shape
from moe_core.spec.config import FusedMoEConfig

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_INTEGERS = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)


@dataclass(frozen=True, eq=False)
class LayerInput:
    """Input of a layer, on the CPU.

    Either ``topk_weights`` and ``topk_ids``, or ``router_logits``, are present.

    Attributes:
        hidden_states: ``[M, K]``.
        router_logits: ``[M, E]``.
        topk_weights: ``[M, k]``.
        topk_ids: ``[M, k]``.
        origin: Origin of the logits: "given" in the file, computed by the "checkpoint", or "random".
    """

    hidden_states: Tensor
    router_logits: Tensor | None = None
    topk_weights: Tensor | None = None
    topk_ids: Tensor | None = None
    origin: str = "given"


def read_input(path: Path, config: FusedMoEConfig, *, finite: bool = False) -> LayerInput:
    """Read and check an input file; top-k tensors take precedence over logits.

    Router weights must be finite. Logits must be numbers, or -inf to exclude an expert; routing would hide other
    values.

    Args:
        path: The safetensors file.
        config: The layer.
        finite: Whether hidden states must be finite too, because the output is compared.

    Raises:
        CheckpointError: The file cannot be read.
        TensorError: A tensor is missing or invalid.
    """
    file = SafetensorsFile(path)

    def tensor(name: str) -> Tensor:
        return file.tensor(name).clone()

    if "hidden_states" not in file.kinds:
        there = ", ".join(sorted(file.kinds)[:10]) or "nothing"
        raise TensorError(f"{path} has no hidden_states [M, {config.hidden_size}] ; it contains {there}")
    x = tensor("hidden_states")
    check_shape(f"{path}: hidden_states", x, ("M", config.hidden_size))
    check_dtype(f"{path}: hidden_states", x, _FLOATS)
    if finite:
        wanted = "a finite value, since --check compares the output with the reference's"
        _refuse(path, "hidden_states", x, ~torch.isfinite(x), wanted)
    pair = [name for name in ("topk_weights", "topk_ids") if name in file.kinds]
    if len(pair) == 1:
        missing = "topk_ids" if pair == ["topk_weights"] else "topk_weights"
        raise TensorError(f"{path}: {missing} [{x.shape[0]}, {config.top_k}] is missing, {pair[0]} is there")
    if pair:
        weights, ids = tensor("topk_weights"), tensor("topk_ids")
        for name, found, dtypes in (("topk_weights", weights, _FLOATS), ("topk_ids", ids, _INTEGERS)):
            check_shape(f"{path}: {name}", found, (x.shape[0], config.top_k))
            check_dtype(f"{path}: {name}", found, dtypes)
        ids, weights = ids.long(), weights.float()
        experts = config.num_experts
        _refuse(path, "topk_ids", ids, (ids < 0) | (ids >= experts), f"0..{experts - 1}")
        _refuse(path, "topk_weights", weights, ~torch.isfinite(weights), "a finite weight")
        return LayerInput(x, topk_weights=weights, topk_ids=ids)
    if "router_logits" not in file.kinds:
        raise TensorError(
            f"{path} has neither router_logits [{x.shape[0]}, {config.num_experts}] "
            f"nor topk_ids and topk_weights [{x.shape[0]}, {config.top_k}]"
        )
    logits = tensor("router_logits")
    check_shape(f"{path}: router_logits", logits, (x.shape[0], config.num_experts))
    check_dtype(f"{path}: router_logits", logits, _FLOATS)
    logits = logits.float()
    bad = logits.isnan() | (logits == float("inf"))
    _refuse(path, "router_logits", logits, bad, "a number, or -inf for an expert that the token shall not use")
    return LayerInput(x, router_logits=logits)


def write_output(path: Path, output: Tensor) -> None:
    """Write ``output`` ``[M, K]`` as float32, atomically."""
    from safetensors.torch import save

    write_whole(path, save({"output": output.float().contiguous().cpu()}))


def _refuse(path: Path, name: str, values: Tensor, bad: Tensor, expected: str) -> None:
    """Raise TensorError for the first of ``values`` ``[M, n]`` that is ``bad``, if any."""
    if bool(bad.any()):
        row, column = bad.nonzero()[0].tolist()
        raise TensorError(
            f"{path}: {name}[{row}, {column}] is {values[row, column].item()}, expected {expected} "
            f"({int(bad.sum())} of {bad.numel()} are not)"
        )
