"""Look up a selected layer in a tuning profile, or explain why the profile is not used."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from moe_core.errors import ConfigError
from moe_core.interface.experts import FusedMoEExperts
from moe_core.kernels.experts.grouped import GroupedExperts
from moe_core.kernels.gemm.heuristics.tuned import Tuned
from moe_core.kernels.tuning.places import VARIABLE, given_path, user_path
from moe_core.kernels.tuning.profile import TuningProfile
from moe_core.spec.config import FusedMoEConfig
from moe_core.spec.device import DeviceInfo
from moe_core.spec.quant_key import QuantKey, key_name

#: value that disables profiles, in place of a path
NONE = "none"


@dataclass(frozen=True)
class TuningChoice:
    """Result of the lookup of a layer in a tuning profile.

    Attributes:
        source: Origin of the profile.
        tuned: Measured configurations of the layer; None if the profile is not used.
        reason: Why the profile is not used.
    """

    source: str
    tuned: Tuned | None = None
    reason: str = ""

    def __str__(self) -> str:
        if self.tuned is None:
            return f"{self.source} is not used: {self.reason}"
        count, last = len(self.tuned.ranges), self.tuned.ranges[-1].last
        return f"{self.source}: launch configurations for {count} ranges of tokens, up to {last}"

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        ranges = 0 if self.tuned is None else len(self.tuned.ranges)
        return {"source": self.source, "used": self.tuned is not None, "ranges": ranges, "reason": self.reason}


def choose(
    tuning: TuningProfile | str | Path | None,
    experts: type[FusedMoEExperts],
    config: FusedMoEConfig,
    keys: tuple[QuantKey | None, QuantKey | None],
    device: DeviceInfo,
) -> TuningChoice | None:
    """Look up a layer's configurations in the given or the default profile.

    Args:
        tuning: Profile, path, or "none"; None selects the default of :func:`find`.
        experts: Experts of the layer.
        config: Configuration of the layer.
        keys: Quantization of weights and activations.
        device: The device.

    Returns:
        The result, or None without a profile.
    """
    found = find(tuning, device)
    if found is None:
        return None
    profile, source = found
    reason = profile if isinstance(profile, str) else profile.reason_against(device)
    if reason is not None:
        return TuningChoice(source, reason=reason)
    return _of_layer(profile, source, experts, config, keys, device)  # type: ignore[arg-type]


def _of_layer(
    profile: TuningProfile,
    source: str,
    experts: type[FusedMoEExperts],
    config: FusedMoEConfig,
    keys: tuple[QuantKey | None, QuantKey | None],
    device: DeviceInfo,
) -> TuningChoice:
    if not issubclass(experts, GroupedExperts):
        return TuningChoice(source, reason=f"{experts.__name__} selects its launches itself")
    if config.batch_invariant:
        return TuningChoice(source, reason="a batch-invariant layer keeps one configuration for all numbers of tokens")
    made = experts(config, weight_key=keys[0], activation_key=keys[1], device=device)
    tuned = profile.find(name_of(keys[0]), name_of(keys[1]), made.problem)
    if tuned is None or not tuned.ranges:
        return TuningChoice(source, reason="it holds nothing of this layer; moe tune adds it")
    return TuningChoice(source, tuned)


def find(tuning: TuningProfile | str | Path | None, device: DeviceInfo) -> tuple[TuningProfile | str, str] | None:
    """Find the tuning profile to use.

    It is the given one, the one that ``MOE_TUNING`` names, or the user's own for ``device``. The user's own profile may
    be missing or broken. The value "none", as argument or in the variable, disables profiles.

    Args:
        tuning: Profile, path, or "none".
        device: The device.

    Returns:
        ``(profile, source)``, with the reason in place of the profile if it cannot be used; None without a profile.

    Raises:
        ConfigError: If an explicit path, from the argument or the variable, cannot be read.
    """
    if isinstance(tuning, TuningProfile):
        return tuning, "the given profile"
    if tuning is not None and not isinstance(tuning, str | Path):
        raise ConfigError(f"tuning is {tuning!r}, expected a TuningProfile, a path, or 'none'")
    named = tuning is None
    tuning = given_path() if named else tuning
    if tuning is not None:
        if str(tuning) == NONE:
            return None
        path = Path(tuning)
        try:
            return _read(path, _stamp(path)), str(path)
        except ConfigError as error:
            raise ConfigError(f"{VARIABLE}: {error.message}" if named else error.message) from None
    own = user_path(device.name) if device.is_gpu else None
    stamp = None if own is None else _stamp(own)
    if own is None or stamp is None:
        return None
    try:
        return _read(own, stamp), str(own)
    except ConfigError as error:
        return error.message, str(own)


def _stamp(path: Path) -> tuple[int, int] | None:
    """Return a value that changes with the file; None if there is none."""
    try:
        found = path.stat()
    except (OSError, ValueError):
        return None
    return found.st_mtime_ns, found.st_size


@lru_cache(maxsize=16)
def _read(path: Path, stamp: tuple[int, int] | None) -> TuningProfile:
    return TuningProfile.read(path)


def name_of(key: QuantKey | None) -> str | None:
    """Return the name of a quantization key in a profile.

    Args:
        key: The key; None for 16 bits.

    Returns:
        The name; None for 16 bits.
    """
    return None if key is None else key_name(key)
