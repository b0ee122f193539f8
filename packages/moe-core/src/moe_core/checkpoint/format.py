"""Checkpoint formats: what an adapter implements, and how the right one is found.

An adapter knows one way of storing quantised experts and produces the scheme's canonical weights; it never meets a
backend.  It decides from the tensors as much as from config.json, since tools write configs that don't fit
their own files.
"""

from __future__ import annotations

import importlib.metadata
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from moe_core.checkpoint.experts import LayerExperts
from moe_core.checkpoint.reader import Checkpoint
from moe_core.config import FusedMoEConfig
from moe_core.errors import CheckpointError, SchemeNotInstalledError
from moe_core.quant_key import QuantKey
from moe_core.registry import KNOWN_QUANT_METHODS, KNOWN_SCHEMES, Registry, install_hint, registry
from moe_core.weights import MoEWeights

Keys = tuple[QuantKey | None, QuantKey | None]


class CheckpointFormat(ABC):
    """One checkpoint format of one scheme.

    ``name`` for people ("fp8 block"), ``scheme`` whose canonical weights it produces.
    """

    name: ClassVar[str]
    scheme: ClassVar[str]

    @abstractmethod
    def reason_against(self, quantization: Mapping[str, Any], layer: LayerExperts) -> str | None:
        """Why these tensors are not of this format, in one clause; None if they are.

        Looks at names, dtypes and ``quantization`` (what the folder's JSON files say), and reads no data.  Tensors
        that are of this format but broken belong to it: :meth:`load` says what is wrong with them.
        """

    def detect(self, quantization: Mapping[str, Any], layer: LayerExperts) -> bool:
        """Whether the layer is of this format."""
        return self.reason_against(quantization, layer) is None

    @abstractmethod
    def keys(self, quantization: Mapping[str, Any], layer: LayerExperts) -> Keys:
        """(weight key, activation key) of the layer."""

    @abstractmethod
    def load(
        self,
        layer: LayerExperts,
        config: FusedMoEConfig,
        *,
        experts: Sequence[int],
        device: torch.device | str = "cpu",
    ) -> MoEWeights:
        """Canonical weights of ``experts`` (global ids, in this order) on ``device``.

        Tensors are allocated once and filled expert by expert, so that no second copy of the layer exists.
        Raises CheckpointError with the name of the tensor for anything that doesn't fit ``config``.
        """


def check_expert_tensor(
    layer: LayerExperts,
    projection: str,
    suffix: str,
    shape: Sequence[int],
    dtypes: Sequence[torch.dtype],
    why: str = "",
) -> None:
    """CheckpointError unless the projection's tensors, of every expert, have this shape and one of these dtypes."""
    name = layer.name(0, projection, suffix)
    found = layer.shape(projection, suffix)
    reason = f" ({why})" if why else ""
    if found != tuple(shape):
        raise CheckpointError(f"{name} has shape {list(found)}, expected {list(shape)}{reason}")
    if layer.dtype(projection, suffix) not in dtypes:
        expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        stored = layer.dtype(projection, suffix)
        stated = layer.stored_dtype(projection, suffix) if stored is None else str(stored).removeprefix("torch.")
        raise CheckpointError(f"{name} has dtype {stated}, expected {expected}{reason}")


def load_stacked(
    layer: LayerExperts,
    projections: Sequence[str],
    suffix: str,
    *,
    experts: Sequence[int],
    device: torch.device | str,
    dtype: torch.dtype | None = None,
    arrange: Callable[[Tensor], Tensor] | None = None,
    check: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Tensors of ``projections``, one below the other, for each expert: ``[len(experts), rows, ...]`` on ``device``.

    - ``dtype``: converted to it; default: as stored
    - ``arrange``: one expert's stored tensor on the CPU -> what is kept of it
    - ``check``: what is kept, on ``device`` -> bool scalar there, True if it must be refused; all are looked at once,
      so a GPU is waited for once.  The error of a refused one is the caller's: CheckpointError with its name.
    """
    out: Tensor | None = None
    bad: list[Tensor] = []
    where: list[str] = []
    for slot, expert in enumerate(experts):
        parts = []
        for projection in projections:
            part = layer.tensor(expert, projection, suffix)
            parts.append(part if arrange is None else arrange(part))
        if out is None:
            rows = sum(part.shape[0] for part in parts)
            shape = (len(experts), rows, *parts[0].shape[1:])
            out = torch.empty(shape, dtype=dtype or parts[0].dtype, device=device)
        start = 0
        for projection, part in zip(projections, parts, strict=True):
            place = out[slot, start : start + part.shape[0]]
            place.copy_(part)
            start += part.shape[0]
            if check is not None:
                bad.append(check(place))
                where.append(layer.name(expert, projection, suffix) + _entry(layer, expert))
    if out is None:
        raise CheckpointError(f"{layer.prefix}: no expert was asked for")
    if bad:
        refused = torch.stack(bad).nonzero()
        if refused.numel():
            raise BadValuesError(where[int(refused[0])], len(refused), len(bad))
    return out


def _entry(layer: LayerExperts, expert: int) -> str:
    return f"[{expert}]" if layer.stacked_names else ""


class BadValuesError(CheckpointError):
    """Values that a check refused; ``tensor`` is the first one's name."""

    def __init__(self, tensor: str, count: int, total: int) -> None:
        super().__init__(f"{tensor} holds values that are refused ({count} of {total} tensors do)")
        self.tensor = tensor
        self.count = count


def detect_format(
    checkpoint: Checkpoint, layer: LayerExperts, plugins: Registry | None = None
) -> tuple[str, CheckpointFormat]:
    """(scheme, format) of ``layer`` among the installed schemes, most specific format first.

    Raises SchemeNotInstalledError where a scheme that could read it is missing, with the pip command;
    CheckpointError, with every installed format and its reason, where it is not known.
    """
    plugins = plugins or registry()
    quantization = checkpoint.quantization
    method = quantization.get("quant_method")
    reasons: list[str] = []
    for scheme in _in_order(plugins, method):
        for kind in plugins.formats(scheme):
            adapter = kind()
            reason = adapter.reason_against(quantization, layer)
            if reason is None:
                return scheme, adapter
            reasons.append(f"{adapter.name} ({scheme}): {reason}")
    what = f"quant_method {method!r}" if method is not None else f"no quant_method (weights are {_weight_dtype(layer)})"
    candidate = likely_scheme(quantization)
    if candidate is not None and candidate not in plugins.scheme_names():
        raise SchemeNotInstalledError(
            f"{checkpoint.path}: {what} is read by the scheme {candidate}, "
            f"which is not installed{_how_to_add(candidate)}"
        )
    known = "; ".join(reasons) if reasons else "none is installed; a scheme brings them, e.g. pip install moe-fp8"
    raise CheckpointError(f"{checkpoint.path}: {what} of {layer.prefix} is not read by any installed format: {known}")


def _how_to_add(scheme: str) -> str:
    package = KNOWN_SCHEMES.get(scheme)
    if package is None:
        return ""
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return f"; add it with: {install_hint(scheme)}"
    return f" ({package} {version} is, but brings no kernels yet); a newer one may: pip install --upgrade {package}"


def _in_order(plugins: Registry, method: object) -> list[str]:
    """Installed schemes, those that name the method first."""
    return sorted(plugins.scheme_names(), key=lambda name: method not in plugins.scheme(name).quant_methods)


def _weight_dtype(layer: LayerExperts) -> str:
    suffixes = layer.suffixes("down")
    return layer.stored_dtype("down", suffixes[0]) if suffixes else "missing"


def likely_scheme(quantization: Mapping[str, Any]) -> str | None:
    """The scheme whose package would read such a checkpoint, as far as its JSON files tell; for a hint only."""
    method = quantization.get("quant_method")
    if not isinstance(method, str):
        return None
    if method in KNOWN_QUANT_METHODS:
        return KNOWN_QUANT_METHODS[method]
    if method == "modelopt":
        return _modelopt_scheme(str(quantization.get("quant_algo", "")).upper())
    if method == "compressed-tensors":
        return _compressed_tensors_scheme(quantization)
    if method == "quark":
        text = str(quantization.get("global_quant_config", ""))
        return "mxfp4" if "fp4" in text else "fp8" if "fp8" in text else None
    return None


def _modelopt_scheme(algorithm: str) -> str | None:
    if "AWQ" in algorithm:
        return "wna16"
    if "MXFP4" in algorithm:
        return "mxfp4"
    if "W8A8" in algorithm:
        return "int8"
    return "fp8" if "FP8" in algorithm else None


def _compressed_tensors_scheme(quantization: Mapping[str, Any]) -> str | None:
    groups = quantization.get("config_groups")
    if not isinstance(groups, dict):
        return None
    for group in groups.values():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            continue
        kind, bits = weights.get("type"), weights.get("num_bits")
        if kind == "float":
            return {8: "fp8", 4: "mxfp4"}.get(bits) if isinstance(bits, int) else None
        if kind == "int":
            return "int8" if group.get("input_activations") else "wna16"
    return None
