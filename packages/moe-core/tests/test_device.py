from __future__ import annotations

import pytest
import torch
from moe_core import ConfigError, DeviceInfo, any_device, cpu, cuda, hip


@pytest.mark.parametrize("text", ["sm90", "sm_90", "SM90", "sm_90a", "h200", "H100"])
def test_parse_accepts_the_usual_spellings(text: str) -> None:
    assert DeviceInfo.parse(text).capability == 90


def test_parse_names_what_is_known() -> None:
    with pytest.raises(ConfigError, match="'sm91'.*sm90.*h200"):
        DeviceInfo.parse("sm91")


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
