"""Devices as data: what a kernel must know of a GPU, also of one that is not here."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from moe_core.errors import ConfigError


@dataclass(frozen=True)
class DeviceInfo:
    """One device.

    ``kind`` is "cuda", "hip", "xpu" or "cpu"; ``arch`` is "sm90", "gfx950", "cpu" ….
    ``shared_memory`` is the most that one block can have, in bytes;
    ``memory`` in bytes; 0 where unknown.
    """

    kind: str
    arch: str
    name: str = ""
    multiprocessors: int = 0
    shared_memory: int = 0
    l2_cache: int = 0
    memory: int = 0

    @property
    def capability(self) -> int:
        """Compute capability as one number (90 for sm_90); 0 for what is no NVIDIA GPU."""
        match = re.fullmatch(r"sm(\d+)", self.arch)
        return int(match.group(1)) if match and self.kind == "cuda" else 0

    @property
    def supports_fp8(self) -> bool:
        """Whether the matrix units read e4m3fn operands."""
        return self.capability >= 89 or self.arch in ("gfx950",)

    def __str__(self) -> str:
        return f"{self.name} ({self.arch})" if self.name and self.name != self.arch else self.arch

    @staticmethod
    def parse(text: str) -> DeviceInfo:
        """A device by architecture name: ``sm90``, ``sm_90``, ``h200``, ``gfx950``, ``cpu`` …

        Raises ConfigError for a name that is not known.
        """
        name = text.strip().lower().replace("sm_", "sm").removesuffix("a")
        name = _ALIASES.get(name, name)
        if name in _KNOWN:
            return _KNOWN[name]
        raise ConfigError(f"unknown device {text!r}; known: {', '.join(_KNOWN)}, and {', '.join(_ALIASES)}")

    @staticmethod
    def current(device: torch.device | str | None = None) -> DeviceInfo:
        """The device that torch would use, or the given one."""
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        device = torch.device(device)
        if device.type == "cpu":
            return _KNOWN["cpu"]
        if device.type == "xpu":
            return DeviceInfo("xpu", "xpu", torch.xpu.get_device_name(device))
        if device.type != "cuda":
            raise ConfigError(f"device {device} is not known; expected cpu, cuda or xpu")
        if not torch.cuda.is_available():
            raise ConfigError(f"device {device} was asked for, but torch {torch.__version__} sees no GPU here")
        properties = torch.cuda.get_device_properties(device)
        if torch.version.hip:
            arch = properties.gcnArchName.split(":")[0]
            return DeviceInfo(
                "hip",
                arch,
                properties.name,
                properties.multi_processor_count,
                64 * 1024,
                properties.L2_cache_size,
                properties.total_memory,
            )
        return DeviceInfo(
            "cuda",
            f"sm{properties.major}{properties.minor}",
            properties.name,
            properties.multi_processor_count,
            properties.shared_memory_per_block_optin,
            properties.L2_cache_size,
            properties.total_memory,
        )


def _sm(number: int, multiprocessors: int, shared_kib: int, l2_mib: int, memory_gib: int) -> DeviceInfo:
    return DeviceInfo(
        "cuda", f"sm{number}", f"sm{number}", multiprocessors, shared_kib << 10, l2_mib << 20, memory_gib << 30
    )


# one typical product per architecture; shared memory is the architecture's limit per block
_KNOWN: dict[str, DeviceInfo] = {
    "cpu": DeviceInfo("cpu", "cpu", "cpu"),
    "sm75": _sm(75, 40, 64, 4, 16),
    "sm80": _sm(80, 108, 163, 40, 80),
    "sm86": _sm(86, 84, 99, 6, 48),
    "sm89": _sm(89, 142, 99, 96, 48),
    "sm90": _sm(90, 132, 227, 50, 141),
    "sm100": _sm(100, 148, 227, 126, 192),
    "sm103": _sm(103, 148, 227, 126, 288),
    "sm120": _sm(120, 188, 99, 128, 96),
    "gfx942": DeviceInfo("hip", "gfx942", "gfx942", 304, 64 << 10, 4 << 20, 192 << 30),
    "gfx950": DeviceInfo("hip", "gfx950", "gfx950", 256, 160 << 10, 4 << 20, 288 << 30),
    "xpu": DeviceInfo("xpu", "xpu", "xpu"),
}

_ALIASES = {
    "a100": "sm80",
    "l40s": "sm89",
    "h100": "sm90",
    "h200": "sm90",
    "b200": "sm100",
    "b300": "sm103",
    "rtx5090": "sm120",
    "mi300x": "gfx942",
    "mi355x": "gfx950",
}


@dataclass(frozen=True)
class DeviceRange:
    """Devices that a backend claims: a kind, and bounds on the compute capability or a list of architectures.

    ``kind`` "any" takes every device that torch runs on.
    """

    kind: str
    min: int = 0
    max: int = 10_000
    archs: tuple[str, ...] = ()

    def reason_against(self, device: DeviceInfo) -> str | None:
        """Why ``device`` is outside, or None if it is inside."""
        if self.kind == "any":
            return None
        if device.kind != self.kind:
            return f"needs {self}, device is {device}"
        if self.archs and device.arch not in self.archs:
            return f"needs {self}, device is {device}"
        if device.kind == "cuda" and not self.min <= device.capability <= self.max:
            return f"needs {self}, device is {device}"
        return None

    def __str__(self) -> str:
        if self.kind == "any":
            return "any device"
        if self.archs:
            return " or ".join(self.archs)
        if self.kind == "cuda" and self.min:
            newer = "" if self.max == self.min else f" to sm{self.max}" if self.max < 10_000 else " or newer"
            return f"sm{self.min}{newer}"
        return self.kind


def cuda(min: int = 0, max: int = 10_000) -> DeviceRange:
    """NVIDIA GPUs of compute capability ``min`` to ``max`` (90 for sm_90)."""
    return DeviceRange("cuda", min, max)


def hip(*archs: str) -> DeviceRange:
    """AMD GPUs of the named architectures, e.g. ``hip("gfx942", "gfx950")``."""
    return DeviceRange("hip", archs=archs)


def cpu() -> DeviceRange:
    """The CPU."""
    return DeviceRange("cpu")


def any_device() -> DeviceRange:
    """Every device that torch itself runs on."""
    return DeviceRange("any")
