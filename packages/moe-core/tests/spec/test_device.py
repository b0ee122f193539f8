from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from moe_core import (
    ConfigError,
    DeviceInfo,
    FusedMoEConfig,
    LoRAWeights,
    MoEWeights,
    Workspace,
    any_device,
    cpu,
    cuda,
    hip,
    load_layer,
)

W = torch.zeros(1)


@pytest.mark.parametrize("text", ["sm90", "sm_90", "SM90", "sm_90a", "h200", "H100"])
def test_parse_accepts_the_usual_spellings(text: str) -> None:
    assert DeviceInfo.parse(text).capability == 90


def test_parse_names_what_is_known() -> None:
    with pytest.raises(ConfigError, match=r"'rtx4091'.*'rtx4090'"):
        DeviceInfo.parse("rtx4091")
    for name in ("sm9", "smXX", "gfx", "gfx12345", "", "90", "cuda", "80GB", "NVIDIA A100 MIG 1g.10gb"):
        with pytest.raises(ConfigError, match="unknown device"):
            DeviceInfo.parse(name)
    with pytest.raises(ConfigError, match="device .*90"):
        DeviceInfo.parse(90)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        ("t4", "sm75"),
        ("a100", "sm80"),
        ("a10", "sm86"),
        ("a40", "sm86"),
        ("l4", "sm89"),
        ("L40S", "sm89"),
        ("RTX 4090", "sm89"),
        ("NVIDIA GeForce RTX 4090", "sm89"),
        ("h20", "sm90"),
        ("h800", "sm90"),
        ("gb200", "sm100"),
        ("b300", "sm103"),
        ("rtx5090", "sm120"),
        ("mi250x", "gfx90a"),
        ("AMD Instinct MI300X", "gfx942"),
        ("mi355x", "gfx950"),
        # as drivers name them
        ("NVIDIA A100-SXM4-80GB", "sm80"),
        ("NVIDIA A100 80GB PCIe", "sm80"),
        ("NVIDIA L40S", "sm89"),
        ("NVIDIA RTX 6000 Ada Generation", "sm89"),
        ("NVIDIA H100 80GB HBM3", "sm90"),
        ("NVIDIA GH200 480GB", "sm90"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "sm120"),
    ],
)
def test_cards_have_their_architecture(name: str, arch: str) -> None:
    card = DeviceInfo.parse(name)
    assert (card.arch, card.kind) == (arch, "hip" if arch.startswith("gfx") else "cuda")
    assert str(card) == f"{card.name} ({arch})"
    assert min(card.multiprocessors, card.shared_memory, card.l2_cache, card.memory) > 0


@pytest.mark.parametrize("number", [70, 75, 80, 86, 87, 89, 90, 91, 100, 101, 103, 110, 120, 121, 130])
def test_any_number_is_a_device(number: int) -> None:
    for text in (f"sm{number}", f"sm_{number}", f"SM{number}a", f"sm_{number}f"):
        device = DeviceInfo.parse(text)
        assert (device.kind, device.arch, device.capability) == ("cuda", f"sm{number}", number)
    assert DeviceInfo.parse("sm91").shared_memory == DeviceInfo.parse("sm90").shared_memory
    assert DeviceInfo.parse("sm130").shared_memory == 0


@pytest.mark.parametrize("arch", ["gfx906", "gfx90a", "gfx942", "gfx1100", "gfx1250"])
def test_any_gfx_is_a_device(arch: str) -> None:
    assert (DeviceInfo.parse(arch).kind, DeviceInfo.parse(arch).arch) == ("hip", arch)


@pytest.mark.parametrize("device", ["nonsense", "sm90", "", "cuda:x", [], 5])
def test_what_torch_takes_as_no_device_is_refused(device: Any) -> None:
    for made in (
        lambda: DeviceInfo.current(device),
        lambda: Workspace(device),
        lambda: LoRAWeights.zeros(FusedMoEConfig(2, 1, 8, 8, is_lora_enabled=True), device),
        lambda: MoEWeights(weight_key=None, activation_key=None, w13=W, w2=W).to(device),
        lambda: load_layer("nowhere", device=device),
    ):
        with pytest.raises(ConfigError, match=re.escape(f"device {device!r}")):
            made()


def test_a_gpu_beyond_those_that_are_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="cuda:2"):
        DeviceInfo.current("cuda:2")


def test_ranges() -> None:
    sm80, sm90, gfx950, host = (DeviceInfo.parse(name) for name in ("sm80", "sm90", "gfx950", "cpu"))
    assert cuda(min=89).reason_against(sm90) is None
    assert cuda(min=89).reason_against(sm80) == "needs sm89 or newer, device is sm80"
    assert cuda(min=90, max=90).reason_against(DeviceInfo.parse("sm100")) is not None
    assert cuda().reason_against(gfx950) is not None
    assert hip("gfx942", "gfx950").reason_against(gfx950) is None
    assert hip("gfx942").reason_against(gfx950) == "needs gfx942, device is gfx950"
    assert cpu().reason_against(host) is None
    assert cpu().reason_against(sm90) is not None
    assert all(any_device().reason_against(device) is None for device in (sm80, sm90, gfx950, host))


def test_fp8_support_follows_the_architecture() -> None:
    assert [DeviceInfo.parse(n).supports_fp8 for n in ("sm80", "sm86", "sm89", "sm90", "gfx942", "gfx950")] == [
        False,
        False,
        True,
        True,
        False,
        True,
    ]


def test_current_device_agrees_with_torch() -> None:
    device = DeviceInfo.current()
    assert device.kind == ("cpu" if not torch.cuda.is_available() else "hip" if torch.version.hip else "cuda")
    assert DeviceInfo.current("cpu").arch == "cpu"


def test_a_gpu_that_is_not_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="cuda.*no GPU"):
        DeviceInfo.current("cuda")


def test_an_xpu_that_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.xpu, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="XPU"):
        DeviceInfo.current("xpu")
