"""Find the experts of a layer in a checkpoint, complete and alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from moe_core.checkpoint.config.families import refusal_of
from moe_core.checkpoint.config.keys import names_experts
from moe_core.checkpoint.experts.layer_experts import LayerExperts
from moe_core.checkpoint.files.safetensors_file import TensorInfo
from moe_core.checkpoint.files.shards import PICKLE_HINT, pickled_files
from moe_core.checkpoint.files.tensor_names import Key, LayerNames, parse_name
from moe_core.checkpoint.files.unsupported import unsupported_names
from moe_core.checkpoint.reader import Checkpoint
from moe_core.errors import CheckpointError, ConfigError


def find_layer(checkpoint: Checkpoint, index: int | None = None, stack: str | None = None) -> LayerExperts:
    """Find the experts of a layer.

    Args:
        checkpoint: The open checkpoint.
        index: Index of the layer; default the first one with experts.
        stack: First component of the tensor names of one stack of layers, see ``Checkpoint.expert_tensors``.

    Returns:
        The layer's expert tensors.

    Raises:
        CheckpointError: The layer has no experts, or they are incomplete or differ in shape or dtype.
        ConfigError: ``index`` is not an integer.
    """
    layers = checkpoint.expert_tensors(stack)
    if not layers:
        raise _no_experts(checkpoint)
    if index is None:
        index = next(iter(layers))
    elif isinstance(index, bool) or not hasattr(index, "__index__"):
        raise ConfigError(f"layer is {index!r}, expected the index of a layer: {ranges(layers)}")
    if index not in layers:
        raise CheckpointError(
            f"{checkpoint.path}: layer {index} has no MoE block; MoE layers: "
            f"{ranges(layers)}{left_out(checkpoint, index)}"
        )
    return checkpoint.once((stack, index), lambda: _collect(checkpoint, layers[index]))


def left_out(checkpoint: Checkpoint, layer: int | None = None) -> str:
    """Return a hint for errors about missing experts: an ignored file that contains some.

    Args:
        checkpoint: The open checkpoint.
        layer: Index of the layer with missing experts; default any layer.

    Returns:
        A clause that starts with "; ", or "" if no ignored file contains any.
    """

    def wanted(name: str) -> bool:
        parsed = parse_name(name)
        return parsed is not None and layer in (None, parsed.layer)

    return checkpoint.left_out(wanted)


def _no_experts(checkpoint: Checkpoint) -> CheckpointError:
    """Return the error for a checkpoint without experts, with the likely reason."""
    kind = checkpoint.config.get("model_type")
    refusal = refusal_of(kind) if isinstance(kind, str) else None
    pickled = pickled_files(checkpoint.path)
    foreign = unsupported_names(checkpoint.names)
    hint = left_out(checkpoint)
    if refusal is None and not pickled and foreign is None and not hint and not names_experts(checkpoint.config):
        return CheckpointError(
            f"{checkpoint.path} is a dense model (model_type {kind!r}): config.json names no experts and no tensor is "
            "one's; what is run here are the experts of mixture-of-experts models"
        )
    hint += f"; models of this type are not supported: {refusal}" if refusal is not None else ""
    hint += f"; the experts may be in {', '.join(pickled[:3])}: {PICKLE_HINT}" if pickled else ""
    hint += f"; {foreign}" if foreign is not None else ""
    return CheckpointError(
        f"{checkpoint.path}: no layer has MoE experts (model_type {kind!r}; no tensor is named "
        f"<block>.experts.<e>.<projection>.<suffix> or <block>.experts.<projection>){hint}"
    )


def _collect(checkpoint: Checkpoint, found: LayerNames) -> LayerExperts:
    for one, other in found.twice:
        raise CheckpointError(f"{one} and {other} are the same projection of the same expert")
    stacked = [tensors[None] for tensors in found.tensors.values() if None in tensors]
    names: dict[Key, tuple[str, ...]]
    if stacked:
        single = [name for tensors in found.tensors.values() for expert, name in tensors.items() if expert is not None]
        if single:
            raise CheckpointError(
                f"{found.prefix} mixes stacked experts ({stacked[0]}) and separate experts ({single[0]})"
            )
        names = {key: (tensors[None],) for key, tensors in found.tensors.items()}
        infos = _stacked_infos(checkpoint, names)
        experts = max(info.shape[0] for info in infos.values() if info.shape)
    else:
        names = _complete(checkpoint, found)
        infos = {key: _uniform_info(checkpoint, tensors) for key, tensors in names.items()}
        experts = len(next(iter(names.values())))
    _check_projections(checkpoint, found, frozenset(projection for projection, _ in infos))
    _refuse_others(checkpoint, found.prefix)
    return LayerExperts(checkpoint, found.prefix, found.block, found.layer, experts, bool(stacked), names, infos)


def _stacked_infos(checkpoint: Checkpoint, names: Mapping[Key, Sequence[str]]) -> dict[Key, TensorInfo]:
    infos = {key: checkpoint.info(name) for key, (name,) in names.items()}
    # The weights determine the number of experts. Tensors of shape [] and [1] hold a value shared by all experts.
    weights = [info for info in infos.values() if len(info.shape) >= 3]
    if not weights:
        one = next(iter(infos.values()))
        raise CheckpointError(f"{one.name} is {one}, expected weights [E, rows, columns]")
    experts = max(weights, key=lambda info: info.shape[0])
    for info in infos.values():
        if info.shape in ((), (1,)):
            continue
        if info.shape[0] != experts.shape[0] or info.shape[0] == 0:
            raise CheckpointError(
                f"{info.name} is {info}, expected [E, ...] with the number of experts of {experts.name}, "
                f"which is {experts}"
            )
    return infos


def _complete(checkpoint: Checkpoint, found: LayerNames) -> dict[Key, tuple[str, ...]]:
    """Return the names of per-expert tensors by expert; raise CheckpointError if one is missing."""
    experts = sorted({expert for tensors in found.tensors.values() for expert in tensors if expert is not None})
    for position, expert in enumerate(experts):
        if position != expert:
            sample = next(tensors[expert] for tensors in found.tensors.values() if expert in tensors)
            raise CheckpointError(
                f"expert {position} is missing: {sample} is there, tensors of {position} are not"
                f"{left_out(checkpoint, found.layer)}"
            )
    names: dict[Key, tuple[str, ...]] = {}
    for key, tensors in sorted(found.tensors.items()):
        if len(tensors) < len(experts):
            expert = next(expert for expert in experts if expert not in tensors)
            other, there = next(iter(tensors.items()))
            # The first number after the prefix is the expert id; the projection may precede or follow it.
            begin, _, end = there[len(found.prefix) :].partition(f".{other}.")
            missing = f"{found.prefix}{begin}.{expert}.{end}"
            raise CheckpointError(
                f"{missing} is missing in {checkpoint.path} ({there} is there){left_out(checkpoint, found.layer)}"
            )
        names[key] = tuple(map(tensors.__getitem__, experts))
    return names


def _uniform_info(checkpoint: Checkpoint, names: Sequence[str]) -> TensorInfo:
    """Return the common shape and dtype of the tensors; raise CheckpointError if they differ."""
    info = checkpoint.info(names[0])
    other = checkpoint.first_unlike(names)
    if other is not None:
        raise CheckpointError(f"{other} is {checkpoint.info(other)}, expected {info} as {info.name}")
    return info


def _check_projections(checkpoint: Checkpoint, layer: LayerNames, found: frozenset[str]) -> None:
    if found not in ({"gate", "up", "down"}, {"gate_up", "down"}, {"up", "down"}):
        raise CheckpointError(
            f"{layer.prefix} has the projections {', '.join(sorted(found))}; "
            f"expected gate, up and down, or gate_up and down, or up and down{left_out(checkpoint, layer.layer)}"
        )


def _refuse_others(checkpoint: Checkpoint, prefix: str) -> None:
    """Refuse tensors of no projection under ``prefix``: they may change what experts compute."""
    for name in checkpoint.no_projections:
        # Granite stores its experts next to the router, and Laguna its correction bias under the experts' prefix.
        if not prefix.endswith(".experts") or name == f"{prefix}.e_score_correction_bias":
            continue
        if name.startswith(f"{prefix}."):
            raise CheckpointError(
                f"{name} in {checkpoint.path} is unknown: it does not belong to a projection of an expert"
            )


def ranges(layers: Iterable[int]) -> str:
    """Format indices for a message: "3-60", "0, 2, 4-7".

    Args:
        layers: Distinct indices.

    Returns:
        Their ranges in ascending order.
    """
    parts: list[list[int]] = []
    for number in sorted(layers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
