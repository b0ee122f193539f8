"""Tuning profile: what ``moe tune`` measured on one GPU, as a value and as a JSON file.

    {"profile": 1, "gpu": "NVIDIA A100-SXM4-80GB", "arch": "sm80", "kernels": 3,
     "versions": {"moe-core": "0.1.0", "torch": "2.11.0", "triton": "3.6.0"},
     "layers": [{"scheme": "fp8", "weight_key": …, "activation_key": …, "problem": {…},
                 "ranges": [{"first": 1, "last": 1, "default_us": 20.1, "best_us": 18.4,
                             "plan": {"kind": "tiles", "gemm1": {…}, "gemm2": {…}, …}}]}]}

Times in µs are for a whole call. A layer is identified by its problem (sizes, element type, scales, device) and keys.

A range uses what was measured at ``last`` tokens, the nearest measured number above. At the same layer, more tokens
mean more rows per expert, and a tile that is too tall costs less than one that is too short.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from moe_core.errors import CheckpointError, ConfigError
from moe_core.kernels.gemm.heuristics import KERNELS, LayerProblem
from moe_core.kernels.gemm.heuristics.rules import RULES
from moe_core.kernels.gemm.heuristics.tuned import Tuned, TunedRange
from moe_core.kernels.tuning.limits import Plan, refusals
from moe_core.kernels.tuning.plans import from_json, plan_from_json, plan_to_json
from moe_core.spec.device import DeviceInfo
from moe_core.spec.environment import distribution_version, parse_version

#: version of the file format
FORM = 1
#: largest file size in bytes; a thousand layers with 16 ranges take 6 MB
MOST_BYTES = 16 << 20
#: distributions whose versions a profile records
NAMED = ("moe-core", "torch", "triton")


@dataclass(frozen=True)
class TunedLayer:
    """Measurements of one kind of layer.

    Attributes:
        scheme: Quantization scheme.
        weight_key: Name of the weight quantization; None for 16 bits.
        activation_key: Name of the activation quantization; None for 16 bits.
        problem: The layer, as the heuristics see it.
        ranges: Best plan for each range of tokens.
    """

    scheme: str
    weight_key: str | None
    activation_key: str | None
    problem: LayerProblem
    ranges: tuple[TunedRange, ...]

    def same_layer(self, other: TunedLayer) -> bool:
        """Report whether ``other`` measures the same kind of layer.

        Args:
            other: Another measurement.

        Returns:
            Whether everything but the ranges is equal.
        """
        return replace(self, ranges=()) == replace(other, ranges=())


@dataclass(frozen=True)
class TuningProfile:
    """Layers measured on one GPU, with one revision of the kernels and one Triton version.

    Attributes:
        gpu: Name of the GPU, as its driver reports it.
        arch: Architecture of the GPU.
        layers: Measured layers.
        kernels: Revision of the kernels, see `moe_core.kernels.gemm.heuristics.KERNELS`.
        versions: Versions of the installed distributions.
    """

    gpu: str
    arch: str
    layers: tuple[TunedLayer, ...] = ()
    kernels: int = KERNELS
    versions: Mapping[str, str | None] = field(default_factory=dict)

    @staticmethod
    def of_this_machine(device: DeviceInfo) -> TuningProfile:
        """Create an empty profile for ``device`` and the installed versions.

        Args:
            device: The device.

        Returns:
            A profile without layers.
        """
        return TuningProfile(device.name, device.arch, versions={name: distribution_version(name) for name in NAMED})

    def reason_against(self, device: DeviceInfo) -> str | None:
        """Explain why the profile cannot be used on ``device`` with the installed versions.

        Args:
            device: The device.

        Returns:
            The reason, or None if it can be used.
        """
        if (self.gpu, self.arch) != (device.name, device.arch):
            return f"measured on {self.gpu} ({self.arch}), this is {device}"
        if self.kernels != KERNELS:
            return f"measured with state {self.kernels} of the kernels, expected {KERNELS}: run moe tune again"
        then, now = self.versions.get("triton"), distribution_version("triton")
        if then is None or now is None or parse_version(then)[:2] != parse_version(now)[:2]:
            return f"measured with Triton {then}, this is {now}: run moe tune again"
        return None

    def find(self, weight_key: str | None, activation_key: str | None, problem: LayerProblem) -> Tuned | None:
        """Return the measured configurations of a layer.

        Args:
            weight_key: Name of the weight quantization; None for 16 bits.
            activation_key: Name of the activation quantization; None for 16 bits.
            problem: The layer, as the heuristics see it.

        Returns:
            The configurations, or None if the layer was not measured.

        Raises:
            ConfigError: If a plan is not valid for the layer.
        """
        for layer in self.layers:
            if (layer.weight_key, layer.activation_key, layer.problem) == (weight_key, activation_key, problem):
                for one in layer.ranges:
                    _check_plan(problem, one.plan, one.first, one.last, f"tokens {one.first} to {one.last}")
                return Tuned(layer.ranges)
        return None

    def with_layer(self, layer: TunedLayer) -> TuningProfile:
        """Return the profile with ``layer`` added, or replaced if it contains the same kind.

        Args:
            layer: The measurement.

        Returns:
            A new profile.
        """
        return replace(self, layers=(*(one for one in self.layers if not one.same_layer(layer)), layer))

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        return {
            "profile": FORM,
            "gpu": self.gpu,
            "arch": self.arch,
            "kernels": self.kernels,
            "versions": dict(self.versions),
            "layers": [
                {
                    "scheme": layer.scheme,
                    "weight_key": layer.weight_key,
                    "activation_key": layer.activation_key,
                    "problem": asdict(layer.problem),
                    "ranges": [{**vars(one), "plan": plan_to_json(one.plan)} for one in layer.ranges],
                }
                for layer in self.layers
            ],
        }

    def to_json(self) -> str:
        """Return the text of the file."""
        return json.dumps(self.as_dict(), indent=1) + "\n"

    @staticmethod
    def from_json(content: bytes, where: str) -> TuningProfile:
        """Parse the content of a profile file.

        Args:
            content: Content of the file.
            where: Name of the file, for messages.

        Returns:
            The profile.

        Raises:
            ConfigError: If the content is invalid; the message states what is wrong.
        """
        # imported here: the checkpoint readers import more than the lookup of a plan needs
        from moe_core._support.strict_json import parse_object

        try:
            data = parse_object(content, where)
        except CheckpointError as error:
            raise ConfigError(error.message) from None
        if data.get("profile") != FORM:
            raise ConfigError(
                f"{where} is no tuning profile of form {FORM}: profile is {str(data.get('profile'))[:40]!r}"
            )
        gpu, arch, kernels, versions = (data.get(name) for name in ("gpu", "arch", "kernels", "versions"))
        if not isinstance(gpu, str) or not isinstance(arch, str) or not isinstance(kernels, int):
            raise ConfigError(f"{where}: gpu, arch and kernels are a name, an architecture and a number, one is not")
        if not isinstance(versions, dict) or not all(v is None or isinstance(v, str) for v in versions.values()):
            raise ConfigError(f"{where}: versions is {str(versions)[:80]!r}, expected an object of strings")
        layers = data.get("layers")
        if not isinstance(layers, list):
            raise ConfigError(f"{where}: layers is {str(layers)[:80]!r}, expected a list")
        if kernels != KERNELS:
            # configurations of other kernels may have other fields; `reason_against` reports the mismatch on use
            layers = []
        made = tuple(_layer(layer, f"{where}: layers[{number}]") for number, layer in enumerate(layers))
        return TuningProfile(gpu, arch, made, kernels, versions)

    @staticmethod
    def read(path: Path) -> TuningProfile:
        """Read a profile file.

        Args:
            path: The file.

        Returns:
            The profile.

        Raises:
            ConfigError: If the file cannot be read, or its content is invalid.
        """
        try:
            with path.open("rb") as file:
                content = file.read(MOST_BYTES + 1)
        except (OSError, ValueError) as error:  # ValueError: a NUL in the name
            why = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(f"the tuning profile {str(path)!r} can't be read: {why}") from None
        if len(content) > MOST_BYTES:
            raise ConfigError(f"the tuning profile {path} has more than {MOST_BYTES} bytes")
        return TuningProfile.from_json(content, str(path))


def _layer(data: object, where: str) -> TunedLayer:
    if not isinstance(data, dict):
        raise ConfigError(f"{where} is {str(data)[:80]!r}, expected an object")
    scheme, weights, activations = (data.get(name) for name in ("scheme", "weight_key", "activation_key"))
    if not isinstance(scheme, str) or not all(key is None or isinstance(key, str) for key in (weights, activations)):
        raise ConfigError(f"{where}: scheme, weight_key and activation_key are names, one is not")
    problem = from_json(LayerProblem, data.get("problem"), f"{where}.problem")
    sizes = (problem.num_experts, problem.top_k, problem.hidden_size, problem.intermediate_size)
    if not all(0 < size < 2**31 for size in sizes):
        raise ConfigError(f"{where}.problem: a size is not positive, or too large")
    if problem.group_size != -1 and not 0 < problem.group_size < 2**31:
        raise ConfigError(
            f"{where}.problem.group_size is {problem.group_size}, expected a number of columns, or -1 for all of a row"
        )
    ranges = data.get("ranges")
    if not isinstance(ranges, list):
        raise ConfigError(f"{where}.ranges is {str(ranges)[:80]!r}, expected a list")
    made: list[TunedRange] = []
    for number, one in enumerate(ranges):
        made.append(_range(problem, one, f"{where}.ranges[{number}]"))
        if number and made[number - 1].last >= made[number].first:
            raise ConfigError(f"{where}.ranges[{number}] begins before the one before it ends")
    return TunedLayer(scheme, weights, activations, problem, tuple(made))


def _range(problem: LayerProblem, data: object, where: str) -> TunedRange:
    if not isinstance(data, dict):
        raise ConfigError(f"{where} is {str(data)[:80]!r}, expected an object")
    first, last = data.get("first"), data.get("last")
    if type(first) is not int or type(last) is not int or not 0 < first <= last < 2**31:
        raise ConfigError(f"{where}: first and last are {first!r} and {last!r}, expected numbers of tokens")
    times = [data.get(name) for name in ("default_us", "best_us")]
    if not all(isinstance(time, (int, float)) and 0 <= time < 1e12 for time in times):
        raise ConfigError(f"{where}: default_us and best_us are {times}, expected µs")
    plan = plan_from_json(data.get("plan"), f"{where}.plan")
    # the package that brings the rules of an element type may not be imported yet; `find` checks again
    if (problem.family, problem.element) in RULES:
        _check_plan(problem, plan, first, last, where)
    return TunedRange(first, last, plan, float(times[0] or 0), float(times[1] or 0))


def _check_plan(problem: LayerProblem, plan: Plan, first: int, last: int, where: str) -> None:
    reasons = refusals(problem, plan, first, last)
    if reasons:
        raise ConfigError(f"{where}.plan: {'; '.join(reasons)}")
