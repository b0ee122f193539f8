"""``with loading():`` loads a checkpoint's quantized experts as layers of moe-core.

transformers has no extension point for arbitrary checkpoints in ``from_pretrained``: quantizers are registered by
``quant_method``, require the tools' packages, and some ignore experts. Therefore four of its functions are replaced
while any thread is within :func:`loading`: those that choose the quantizer and the dtype, find the files, and read
them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any

from moe_core import CheckpointError, ConfigError, ParallelGroups, QuantKey, registry
from moe_core.api.models import names_experts
from transformers import PreTrainedModel, modeling_utils

from moe_transformers.missing import refuse_missing_experts
from moe_transformers.options import Options
from moe_transformers.quantizer import MoeCoreQuantizer, check_dtype
from moe_transformers.ranks import groups_of
from moe_transformers.refusals import RefusedError
from moe_transformers.settings import fetch_settings

_OPTIONS: ContextVar[Options | None] = ContextVar("moe_transformers_options", default=None)


@contextlib.contextmanager
def loading(
    *,
    backend: str = "auto",
    quantize: str | None = None,
    activation_key: QuantKey | str | None = "checkpoint",
    groups: ParallelGroups | None = None,
) -> Iterator[None]:
    """Make ``from_pretrained`` load quantized experts as layers of moe-core.

    transformers provides everything else: model classes, routing, tensor names, ``device_map``. Other linear layers
    that the checkpoint has quantized become weights in the model's ``dtype``, without the quantization tool's package.
    16-bit experts stay with transformers unless ``quantize`` is given. Peak memory is that of the model plus one layer.

    On several ranks, one process each, ``groups`` specifies how the ranks share the experts. All other modules are
    replicated, or sharded according to ``distributed_config=DistributedConfig(tp_size=…)``. Without ``groups``, that
    config also shards the columns of experts. All ranks must make the same calls of the model.

    The context applies to the thread that entered it. Other threads load as usual, even at the same time. When the last
    thread leaves it, transformers is restored, even after an exception.

    Within the context, ``from_pretrained`` raises

    - RefusedError before it reads weights, if moe-core cannot run the experts, or ``quantize`` is given and no experts
      are
      in 16 bits
    - RefusedError after it read weights, if experts would keep random values because the checkpoint has none for them
    - ConfigError for arguments that are incompatible, such as a ``dtype`` other than bfloat16, float16 or float32

    Args:
        backend: name of the backend, as in :func:`moe_core.load_layer`.
        quantize: online quantization of 16-bit experts ("fp8_per_channel"), as in :func:`moe_core.load_layer`.
        activation_key: quantization of the activations, as in :func:`moe_core.load_layer`.
        groups: how ranks share the experts (:class:`moe_core.ParallelGroups`).

    Raises:
        RegistryError: ``quantize`` is unknown.
    """
    if quantize is not None:
        registry().online(quantize)
    with _HOOKS:
        token = _OPTIONS.set(Options(backend, quantize, activation_key, groups))
        try:
            yield
        finally:
            _OPTIONS.reset(token)


def _get_hf_quantizer(
    original: Callable[..., Any], config: Any, quantization_config: Any, device_map: Any, *rest: Any, **named: Any
) -> Any:
    """Replace transformers' ``get_hf_quantizer``; returns (quantizer, config, device_map)."""
    options = _OPTIONS.get()
    entries = _quantization_of(config)
    if options is None or named.get("gguf_file") is not None or not names_experts(config.to_dict()):
        return original(config, quantization_config, device_map, *rest, **named)
    options = replace(options, groups=groups_of(getattr(config, "distributed_config", None), options.groups))
    if quantization_config is not None:
        raise ConfigError(
            "quantization_config cannot be passed within moe_transformers.loading(), which uses the "
            "checkpoint's own: leave it out, or quantize 16-bit experts with loading(quantize=…)"
        )
    _check_method(entries)
    return MoeCoreQuantizer(options, entries), config, device_map


def _quantization_of(config: Any) -> Mapping[str, Any]:
    """Return the ``quantization_config`` of a model's config, {} if it has none."""
    found = getattr(config, "quantization_config", None)
    if found is None:
        found = getattr(config.get_text_config(decoder=True), "quantization_config", None)
    if found is None:
        return {}
    return found if isinstance(found, Mapping) else found.to_dict()


def _check_method(entries: Mapping[str, Any]) -> None:
    """Raise RefusedError for a ``quant_method`` that no installed scheme reads."""
    method = entries.get("quant_method")
    known = {name for scheme in registry().schemes() for name in scheme.quant_methods}
    if method is not None and str(method).removesuffix("_mixed") not in known:
        error = ConfigError(f"quant_method {method!r} is not one that moe-core reads ({', '.join(sorted(known))})")
        raise RefusedError.of(error, entries)


def _get_dtype(original: Callable[..., Any], dtype: Any, *rest: Any, **named: Any) -> Any:
    """Replace transformers' function of this name; returns (config, dtype)."""
    if any(isinstance(one, MoeCoreQuantizer) for one in (*rest, *named.values())):
        check_dtype(dtype)
    return original(dtype, *rest, **named)


def _get_resolved_checkpoint_files(original: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Replace transformers' function of this name; returns (files, metadata)."""
    files, metadata = original(*arguments, **named)
    if _OPTIONS.get() is not None and files:
        fetch_settings(Path(files[0]), str(named["pretrained_model_name_or_path"]), named["download_kwargs"] or {})
    return files, metadata


def _load_pretrained_model(
    original: Callable[..., Any], model: Any, state_dict: Any, files: Any, load_config: Any, *rest: Any, **named: Any
) -> Any:
    """Replace ``PreTrainedModel._load_pretrained_model``, which reads the files into the model."""
    quantizer = load_config.hf_quantizer
    with contextlib.ExitStack() as reading:
        if isinstance(quantizer, MoeCoreQuantizer):
            reading.enter_context(quantizer.plan.checkpoint.reading())
            state_dict = quantizer.tensors(model, load_config.device_map)
            load_config = dataclasses.replace(load_config, hf_quantizer=None)
        info, offloaded = original(model, state_dict, files, load_config, *rest, **named)
        if isinstance(quantizer, MoeCoreQuantizer):
            quantizer.plan.complete(model, load_config, info, offloaded)
    # Expected keys are passed for an adapter, whose files contain nothing of the already loaded model.
    if _OPTIONS.get() is not None and not (rest or named):
        try:
            refuse_missing_experts(model, info.missing_and_mismatched())
        except CheckpointError as error:
            raise RefusedError.of(error, _quantization_of(model.config)) from error
    return info, offloaded


class _Hooks:
    """Replaces transformers' functions while any thread is within the context."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._replaced: list[tuple[Any, str, Any, Any]] = []

    def __enter__(self) -> None:
        with self._lock:
            if self._users == 0:
                self._replace(modeling_utils, "get_hf_quantizer", _get_hf_quantizer)
                self._replace(modeling_utils, "_get_resolved_checkpoint_files", _get_resolved_checkpoint_files)
                self._replace(modeling_utils, "_get_dtype", _get_dtype)
                self._replace(PreTrainedModel, "_load_pretrained_model", _load_pretrained_model)
            self._users += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                while self._replaced:
                    owner, name, before, mine = self._replaced.pop()
                    # a replacement that another package made meanwhile calls ours, which then has no effect
                    if vars(owner)[name] is mine:
                        setattr(owner, name, before)

    def _replace(self, owner: Any, name: str, hook: Callable[..., Any]) -> None:
        before = vars(owner)[name]
        mine: Any = functools.partial(hook, getattr(owner, name))
        if isinstance(before, staticmethod):
            mine = staticmethod(mine)
        self._replaced.append((owner, name, before, mine))
        setattr(owner, name, mine)


_HOOKS = _Hooks()
