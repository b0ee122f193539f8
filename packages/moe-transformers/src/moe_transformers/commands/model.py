"""Loading of a command's model, with the loading time and memory."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from moe_core import CheckpointError, ConfigError, MoEError
from moe_core.api.commands import activation_key_of, bytes_text, device_of, dtype_of, duration, seconds_since
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from moe_transformers.blocks import experts_modules
from moe_transformers.commands.memory import peak_memory, reset_peak_memory
from moe_transformers.experts import MoeCoreExperts
from moe_transformers.interface import IMPLEMENTATION
from moe_transformers.missing import refuse_missing_experts
from moe_transformers.model_loading import loading


@dataclass(frozen=True)
class Loaded:
    """A model that is ready to run.

    Attributes:
        model: the model.
        experts: number of layers by what runs them ("fp8 by triton").
        seconds: loading time.
    """

    model: Any
    experts: dict[str, int]
    seconds: float

    @property
    def device(self) -> torch.device:
        """Device of the input embeddings, where tokens are passed."""
        found: torch.device = self.model.get_input_embeddings().weight.device
        return found

    def synchronize(self) -> None:
        """Wait until the work on the model's GPUs is done."""
        for device in {tensor.device for tensor in self.model.parameters()}:
            if device.type != "cpu":
                torch.accelerator.synchronize(device)

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-serializable dict, with the peak memory so far."""
        return {
            "device": str(self.device),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "experts": self.experts,
            "seconds_load": self.seconds,
            "peak_memory": peak_memory(self.model),
        }


def summary(data: dict[str, Any]) -> str:
    """Summarize the result of :meth:`Loaded.as_dict` in one line.

    Args:
        data: dict that contains the entries of :meth:`Loaded.as_dict`.

    Returns:
        The line of text.
    """
    experts = ", ".join(f"{name} ({count} layers)" for name, count in data["experts"].items()) or "none"
    peak = "" if data["peak_memory"] is None else f"; at most {bytes_text(data['peak_memory'])} of memory"
    return f"experts: {experts}; {data['dtype']} on {data['device']}; loaded in {duration(data['seconds_load'])}{peak}"


def rate(tokens_per_second: float) -> str:
    """Format a speed with three digits, or as an integer from 100 on.

    Args:
        tokens_per_second: the speed.

    Returns:
        The text, with its unit.
    """
    digits = f"{tokens_per_second:,.0f}" if tokens_per_second >= 100 else f"{tokens_per_second:.3g}"
    return f"{digits} tokens/s"


def load(args: argparse.Namespace) -> Loaded:
    """Load the model of ``args.path``.

    Args:
        args: parsed arguments.

    Returns:
        The model, ready to run.

    Raises:
        MoEError: the model cannot be loaded; includes transformers' message if transformers refuses it.
    """
    device_map: Any = "auto" if args.device == "auto" else {"": device_of(args.device)}
    ours = args.experts == IMPLEMENTATION
    if not ours and (args.quantize is not None or args.backend != "auto" or args.activation_key is not None):
        raise ConfigError(
            f"--experts {args.experts} runs the experts in transformers: --backend, --quantize and "
            f"--activation-key require --experts {IMPLEMENTATION}"
        )
    options: dict[str, Any] = {} if ours else {"experts_implementation": args.experts}
    context = (
        loading(backend=args.backend, quantize=args.quantize, activation_key=activation_key_of(args))
        if ours
        else contextlib.nullcontext()
    )
    reset_peak_memory()
    with context, of_transformers(args), _bars():
        start = time.perf_counter()
        model, info = AutoModelForCausalLM.from_pretrained(
            args.path, dtype=dtype_of(args.dtype), device_map=device_map, output_loading_info=True, **options
        )
        refuse_missing_experts(model, info["missing_keys"])
        loaded = Loaded(model.eval(), _experts(model), 0.0)
        loaded.synchronize()
    return Loaded(loaded.model, loaded.experts, seconds_since(start))


def _experts(model: nn.Module) -> dict[str, int]:
    layers = (module.layer for module in model.modules() if isinstance(module, MoeCoreExperts))
    chosen = (layer.selection for layer in layers if layer is not None)
    found = Counter(f"{selection.report.scheme} by {selection.backend}" for selection in chosen)
    for _, module in experts_modules(model):
        name = module.config._experts_implementation  # type: ignore[union-attr]
        dtype = str(next(module.parameters()).dtype).removeprefix("torch.")
        found[f"{dtype} by transformers ({name})"] += 1
    return dict(found)


@contextlib.contextmanager
def of_transformers(args: argparse.Namespace, what: str = "load") -> Iterator[None]:
    """Convert transformers' exceptions for a folder to CheckpointError.

    A config.json may make any line of a model fail, so every exception is converted, except out-of-memory errors.

    Args:
        args: parsed arguments with the folder, ``path``.
        what: what transformers was asked to do with the folder.

    Raises:
        CheckpointError: includes transformers' message.
    """
    try:
        yield
    except (MoEError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        # transformers' name for tensors whose shapes differ from the modules'
        if "ignore_mismatched_sizes" in str(error):
            raise CheckpointError(
                f"transformers cannot load {args.path}: shapes of its tensors differ from config.json; the report "
                "above lists them (MISMATCH)"
            ) from error
        text = " ".join(str(error).split())
        raise CheckpointError(f"transformers cannot {what} {args.path}: {type(error).__name__}: {text}") from error


@contextlib.contextmanager
def _bars() -> Iterator[None]:
    """Show transformers' progress bars on a terminal only."""
    shown = transformers_logging.is_progress_bar_enabled()
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
