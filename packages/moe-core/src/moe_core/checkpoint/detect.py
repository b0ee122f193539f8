"""Detect the installed scheme and format that read a layer, or what to install if none does."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

from moe_core.checkpoint.config.statements import names_method
from moe_core.checkpoint.experts.layer_experts import LayerExperts
from moe_core.checkpoint.experts.matrices import unquantized_reason
from moe_core.checkpoint.files.unsupported import INSTEAD, unsupported_quantization
from moe_core.checkpoint.reader import Checkpoint
from moe_core.checkpoint.tools.modelopt import is_modelopt
from moe_core.errors import CheckpointError, MoEError, SchemeNotInstalledError, did_you_mean, with_widths_of
from moe_core.interface.checkpoint_format import CheckpointFormat, ExpertLayout
from moe_core.plugins.faults import PluginFault, Raised, attempt
from moe_core.selection.registry import KNOWN_QUANT_METHODS, KNOWN_SCHEMES, Registry, how_to_add, install_hint, registry

#: (substring of a Quark config, scheme that reads it).
_QUARK_SCHEMES = (("fp4", "mxfp4"), ("fp8", "fp8"), ("int8", "int8"))


class Detected(NamedTuple):
    """The scheme and the format that read a layer.

    Attributes:
        scheme: Name of the scheme.
        format: The format.
        layout: The format's description of the layer's tensors.
    """

    scheme: str
    format: CheckpointFormat
    layout: ExpertLayout


def detect_format(checkpoint: Checkpoint, layer: LayerExperts, plugins: Registry | None = None) -> Detected:
    """Find the installed scheme and format that read a layer, most specific format first.

    Args:
        checkpoint: The open checkpoint.
        layer: The layer's expert tensors.
        plugins: Registry of schemes and formats; default the installed ones.

    Returns:
        The scheme, the format and the layout.

    Raises:
        SchemeNotInstalledError: A scheme that could read the layer is not installed. The message has the pip command.
        CheckpointError: No format reads the layer. The details list every installed format with its reason.
    """
    plugins = plugins or registry()
    quantization = checkpoint.quantization
    method = quantization.get("quant_method")
    reasons: list[tuple[bool, str]] = []
    refusals: list[MoEError] = []
    for scheme in _in_order(plugins, method):
        for kind in plugins.formats(scheme):
            named = names_method(kind.quant_methods, method)
            asked = attempt(functools.partial(_ask, kind, quantization, layer))
            if isinstance(asked, Raised):
                if not isinstance(asked.error, MoEError):
                    name, origin = f"{scheme}.{kind.__qualname__}", plugins.format_origin(scheme, kind)
                    plugins.leave_out(PluginFault("format", name, origin, f"it fails: {asked}", asked.error))
                elif named:
                    # A format for this tool rejects the config; its error is raised if no other format reads the layer.
                    refusals.append(asked.error)
                reasons.append((named, f"{kind.name} ({scheme}): {asked}"))
                continue
            adapter, found = asked
            if not isinstance(found, str):
                return Detected(scheme, adapter, found)
            reasons.append((named, f"{kind.name} ({scheme}): {found}"))
    stored = {suffix: layer.stored_dtype("down", suffix) for suffix in layer.suffixes("down")}
    plain = unquantized_reason(layer)
    foreign = unsupported_quantization(quantization, stored) if plain is None else None
    if foreign is not None:
        raise CheckpointError(
            f"{checkpoint.path}: {layer.prefix} is quantized as {foreign} ({_stored_as(stored)}), "
            f"which is not supported; {INSTEAD}",
            details="\n".join(text for _, text in reasons),
        )
    if refusals:
        raise refusals[0]
    what = f"quant_method {method!r}" if method is not None else f"no quant_method (weights are {_weight_dtype(layer)})"
    candidate = likely_scheme(quantization)
    if candidate is not None and candidate not in plugins.scheme_names():
        raise SchemeNotInstalledError(
            f"{checkpoint.path}: {what} is read by the scheme {candidate}, "
            f"which is not installed{how_to_add(candidate)}"
        )
    if plain is not None and any(named for named, _ in reasons):
        raise CheckpointError(
            f"{checkpoint.path}: {layer.prefix} is not quantized: {plain}, although config.json specifies {what}"
        )
    # The message has the reasons of formats for this method; those of other formats are in the details.
    relevant = [text for named, text in reasons if named]
    if reasons and not relevant:
        methods = sorted({name for scheme in plugins.schemes() for name in scheme.quant_methods})
        relevant.append(f"expected one of {', '.join(methods)}{did_you_mean(method, with_widths_of(method, methods))}")
    relevant += [str(fault) for fault in plugins.faults() if fault.kind in ("scheme", "format", "distribution")]
    known = "; ".join(relevant) if relevant else f"none is installed; a scheme brings them, e.g. {install_hint('fp8')}"
    raise CheckpointError(
        f"{checkpoint.path}: {what} of {layer.prefix} is not read by any installed format: {known}",
        details="\n".join(text for _, text in reasons),
    )


def _in_order(plugins: Registry, method: object) -> list[str]:
    """Sort the installed schemes: those that name the method first, then first-party ones."""
    schemes = sorted(plugins.schemes(), key=lambda s: (method not in s.quant_methods, s.name not in KNOWN_SCHEMES))
    return [scheme.name for scheme in schemes]


def _ask(
    kind: type[CheckpointFormat], quantization: Mapping[str, Any], layer: LayerExperts
) -> tuple[CheckpointFormat, ExpertLayout | str]:
    """Return a new format object, and its layout for the layer or the reason it has none."""
    adapter = kind()
    found: object = adapter.resolve(quantization, layer)
    if not isinstance(found, ExpertLayout | str):
        raise TypeError(f"resolve returned {found!r}, expected an ExpertLayout or a string")
    return adapter, found


def _stored_as(stored: Mapping[str, str]) -> str:
    """Describe a projection's tensors for a message: "tensors weight U8, weight_scale F8_E4M3"."""
    listed = [f"{suffix} {kind}" for suffix, kind in stored.items()]
    return "tensors " + ", ".join((*listed[:6], *["…"] * (len(listed) > 6)))


def _weight_dtype(layer: LayerExperts) -> str:
    suffixes = layer.suffixes("down")
    return layer.stored_dtype("down", suffixes[0]) if suffixes else "missing"


def likely_scheme(quantization: Mapping[str, Any]) -> str | None:
    """Guess from a checkpoint's JSON files which scheme would read it, for hints only.

    Args:
        quantization: Quantization settings of the checkpoint.

    Returns:
        Name of the scheme, or None if it cannot be guessed.
    """
    method = quantization.get("quant_method")
    if not isinstance(method, str):
        return None
    if method == "auto-round" and str(quantization.get("data_type", "")).startswith("mx_fp"):
        bits = quantization.get("bits")
        return {8: "fp8", 4: "mxfp4"}.get(bits) if isinstance(bits, int) else None
    if method in KNOWN_QUANT_METHODS:
        return KNOWN_QUANT_METHODS[method]
    if is_modelopt(quantization):
        return _modelopt_scheme(str(quantization.get("quant_algo", "")).upper())
    if method == "compressed-tensors":
        return _compressed_tensors_scheme(quantization)
    if method == "quark":
        text = str(quantization.get("global_quant_config", ""))
        return next((scheme for part, scheme in _QUARK_SCHEMES if part in text), None)
    return None


def _modelopt_scheme(algorithm: str) -> str | None:
    if "AWQ" in algorithm:
        return "wna16"
    if "MXFP4" in algorithm:
        return "mxfp4"
    if "W8A8" in algorithm or algorithm == "W8A16":
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
            in_bytes = bits == 8 and group.get("format", quantization.get("format")) == "int-quantized"
            inputs = group.get("input_activations")
            of_floats = isinstance(inputs, dict) and inputs.get("type") == "float"
            return "int8" if (inputs and not of_floats) or in_bytes else "wna16"
    return None
