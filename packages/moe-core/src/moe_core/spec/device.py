"""Device properties as data, including GPUs that are not present."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import torch

from moe_core.errors import ConfigError, did_you_mean
from moe_core.spec import cards
from moe_core.spec.cards import Card, card_of, plain_name


@dataclass(frozen=True)
class DeviceInfo:
    """Properties of one device. Numbers are 0 if unknown.

    Attributes:
        kind: "cuda", "hip", "xpu" or "cpu".
        arch: "sm90", "gfx950", "cpu" ….
        name: Name of the product.
        multiprocessors: Number of SMs or compute units.
        shared_memory: Maximum shared memory per block in bytes.
        l2_cache: L2 cache in bytes.
        memory: Memory in bytes.
        bandwidth: Memory bandwidth in GB/s.
    """

    kind: str
    arch: str
    name: str = ""
    multiprocessors: int = 0
    shared_memory: int = 0
    l2_cache: int = 0
    memory: int = 0
    bandwidth: int = 0

    @property
    def capability(self) -> int:
        """Compute capability as one number (90 for sm_90); 0 for devices other than NVIDIA GPUs."""
        match = re.fullmatch(r"sm(\d+)", self.arch)
        return int(match.group(1)) if match and self.kind == "cuda" else 0

    @property
    def is_gpu(self) -> bool:
        """Whether the device is not the CPU."""
        return self.kind != "cpu"

    @property
    def supports_fp8(self) -> bool:
        """Whether the tensor cores accept e4m3fn operands."""
        return self.capability >= 89 or self.arch in ("gfx950",)

    def __str__(self) -> str:
        return f"{self.name} ({self.arch})" if self.name and self.name != self.arch else self.arch

    @staticmethod
    def parse(text: str) -> DeviceInfo:
        """Look up a device by architecture or product name.

        Driver names such as "NVIDIA A100-SXM4-80GB" work too; the figures are those of the usual card of that name.
        Any ``smXX`` or ``gfxXXX`` is accepted; unknown figures are 0.

        Args:
            text: ``sm90``, ``sm_90a``, ``gfx942``, ``h200``, ``rtx4090`` …

        Returns:
            The device.

        Raises:
            ConfigError: The name is unknown.
        """
        if not isinstance(text, str):
            raise ConfigError(f"device must be a name (sm90, gfx942, h200, cpu), got {text!r}")
        card, name = card_of(text), plain_name(text)
        if card is not None:
            return CARDS[card.name]
        if re.fullmatch(r"sm\d{2,3}[af]?", name):
            return _of_sm(int(name.rstrip("af")[2:]))
        if name in _KNOWN:
            return _KNOWN[name]
        if re.fullmatch(r"gfx[0-9a-f]{3,4}", name):
            return DeviceInfo("hip", name, name, shared_memory=64 << 10)
        raise ConfigError(
            f"unknown device {text!r}{did_you_mean(name, (*_KNOWN, *CARDS))}: expected an architecture (sm90, gfx942), "
            "a card (h200, rtx4090, mi300x), cpu or xpu",
            details=f"cards: {', '.join(CARDS)}",
        )

    @staticmethod
    def current(device: torch.device | str | None = None) -> DeviceInfo:
        """Describe the given device, or the one that torch would use.

        Args:
            device: A device of this machine; None: the GPU if there is one, else the CPU.

        Returns:
            The device.

        Raises:
            ConfigError: The device does not exist here.
        """
        device = as_torch_device(device)
        if device.type == "cpu":
            return _KNOWN["cpu"]
        if device.type == "xpu":
            if not torch.xpu.is_available():
                raise ConfigError(f"device {device} is requested, but torch {torch.__version__} sees no XPU here")
            return DeviceInfo("xpu", "xpu", torch.xpu.get_device_name(device))
        if device.type != "cuda":
            raise ConfigError(f"device {device} is not known; expected cpu, cuda or xpu")
        if not torch.cuda.is_available():
            raise ConfigError(f"device {device} is requested, but torch {torch.__version__} sees no GPU here")
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise ConfigError(f"device {device} is requested, but torch sees {count} GPUs, from cuda:0")
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
            # Clock in kHz; two transfers per clock cycle.
            properties.memory_clock_rate * properties.memory_bus_width // 4_000_000,
        )


def as_torch_device(device: torch.device | str | None = None) -> torch.device:
    """Convert a device argument to a ``torch.device``.

    Args:
        device: A device or its name; None: the GPU if there is one, else the CPU.

    Returns:
        The torch device.

    Raises:
        ConfigError: torch does not accept ``device``.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if isinstance(device, torch.device):
        return device
    try:
        if not isinstance(device, str):
            raise TypeError
        return torch.device(device)
    except (RuntimeError, TypeError):
        raise ConfigError(
            f"device {device!r} is not known: expected one where tensors can be (cpu, cuda, cuda:1, xpu)"
        ) from None


def _sm(number: int, multiprocessors: int, shared_kib: int, l2_mib: int, memory_gib: int) -> DeviceInfo:
    return DeviceInfo(
        "cuda", f"sm{number}", f"sm{number}", multiprocessors, shared_kib << 10, l2_mib << 20, memory_gib << 30
    )


def _of_sm(number: int) -> DeviceInfo:
    """Device of an SM version; an unknown one is like the next older one of its generation."""
    if f"sm{number}" in _KNOWN:
        return _KNOWN[f"sm{number}"]
    older = [n for n in range(number // 10 * 10, number) if f"sm{n}" in _KNOWN]
    arch = f"sm{number}"
    return replace(_KNOWN[f"sm{older[-1]}"], arch=arch, name=arch) if older else DeviceInfo("cuda", arch, arch)


def _gfx(arch: str, compute_units: int, shared_kib: int, l2_mib: int, memory_gib: int) -> DeviceInfo:
    return DeviceInfo("hip", arch, arch, compute_units, shared_kib << 10, l2_mib << 20, memory_gib << 30)


# One typical product per architecture. Shared memory is the architecture's limit per block.
_KNOWN: dict[str, DeviceInfo] = {
    "cpu": DeviceInfo("cpu", "cpu", "cpu"),
    "sm70": _sm(70, 80, 96, 6, 32),
    "sm75": _sm(75, 40, 64, 4, 16),
    "sm80": _sm(80, 108, 163, 40, 80),
    "sm86": _sm(86, 84, 99, 6, 48),
    "sm87": _sm(87, 16, 163, 4, 64),
    "sm89": _sm(89, 142, 99, 96, 48),
    "sm90": _sm(90, 132, 227, 50, 141),
    "sm100": _sm(100, 148, 227, 126, 192),
    "sm103": _sm(103, 148, 227, 126, 288),
    "sm110": _sm(110, 20, 227, 32, 128),
    "sm120": _sm(120, 188, 99, 128, 96),
    "sm121": _sm(121, 48, 99, 24, 128),
    "gfx90a": _gfx("gfx90a", 104, 64, 8, 64),
    "gfx942": _gfx("gfx942", 304, 64, 4, 192),
    "gfx950": _gfx("gfx950", 256, 160, 4, 288),
    "xpu": DeviceInfo("xpu", "xpu", "xpu"),
}


def _of_card(card: Card) -> DeviceInfo:
    typical = _KNOWN.get(card.arch) or DeviceInfo("hip", card.arch, shared_memory=64 << 10)
    return replace(
        typical,
        name=card.name,
        multiprocessors=card.multiprocessors,
        l2_cache=card.l2_mib << 20,
        memory=card.memory_gib << 30,
        bandwidth=card.bandwidth,
    )


#: The cards of :mod:`moe_core.spec.cards`, by name.
CARDS: dict[str, DeviceInfo] = {name: _of_card(card) for name, card in cards.CARDS.items()}


@dataclass(frozen=True)
class DeviceRange:
    """Set of devices that a backend supports.

    Attributes:
        kind: Kind of device; "any": every device that torch runs on.
        min: Lowest compute capability, for "cuda".
        max: Highest compute capability, for "cuda".
        archs: The supported architectures; empty: all.
    """

    kind: str
    min: int = 0
    max: int = 10_000
    archs: tuple[str, ...] = ()

    def reason_against(self, device: DeviceInfo) -> str | None:
        """Explain why ``device`` is not in the range.

        Args:
            device: The device.

        Returns:
            The reason, or None if the device is in the range.
        """
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
    """Range of NVIDIA GPUs by compute capability.

    Args:
        min: Lowest capability, e.g. 90 for sm_90.
        max: Highest capability.

    Returns:
        The range.
    """
    return DeviceRange("cuda", min, max)


def hip(*archs: str) -> DeviceRange:
    """Range of AMD GPUs by architecture, e.g. ``hip("gfx942", "gfx950")``.

    Args:
        *archs: The architectures.

    Returns:
        The range.
    """
    return DeviceRange("hip", archs=archs)


def cpu() -> DeviceRange:
    """Range that contains the CPU only."""
    return DeviceRange("cpu")


def any_device() -> DeviceRange:
    """Range of every device that torch runs on."""
    return DeviceRange("any")
