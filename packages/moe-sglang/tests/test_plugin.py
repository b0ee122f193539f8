"""How the package joins SGLang: its entry point, its hook, its versions and its switch."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.metadata
import types
from typing import Any

import moe_sglang
import pytest
from moe_core import ConfigError
from moe_core.api import engines as engine_api
from moe_core.api.engines import Engine
from moe_sglang import plugin
from moe_sglang.doctor import lines
from moe_sglang.engine import ENGINE
from moe_sglang.fused import TENSORS, names
from moe_sglang.kinds import FLAGS


def test_sglang_finds_it_by_its_entry_point() -> None:
    [point] = [p for p in importlib.metadata.entry_points(group="sglang.srt.plugins") if p.name == "moe_sglang"]
    assert point.load() is moe_sglang.register


def record(*fields: str) -> type:
    """A type of SGLang's with other fields."""
    return dataclasses.make_dataclass("Other", fields)


@pytest.fixture
def afresh(sglang: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[object]]:
    """A process in which nothing was brought yet: the hooks that it registers."""
    hooks: dict[str, list[object]] = {}
    monkeypatch.setattr(plugin, "_brought", ())
    monkeypatch.setattr(sglang.HookRegistry, "_hooks", hooks)
    monkeypatch.setattr(sglang.HookRegistry, "register", lambda target, hook, kind: hooks.setdefault(target, [hook]))
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.5.23" if name == "sglang" else version(name))
    monkeypatch.delenv("MOE_SGLANG", raising=False)
    return hooks


def test_one_hook_however_often_it_is_loaded(afresh: dict[str, list[object]], said: list[str]) -> None:
    moe_sglang.register()
    moe_sglang.register()
    assert afresh == {plugin.TARGET: [plugin.get_fused_func]}
    assert said == ["moe-sglang is on for fp8, int8, wna16 (MOE_SGLANG=off turns it off)"]


@pytest.mark.parametrize(
    ("switch", "reason", "line"),
    [
        ("off", None, "moe-sglang is off: MOE_SGLANG=off"),
        ("on", "sglang is 0.6", "moe-sglang is off: sglang is 0.6"),
    ],
)
def test_nothing_is_changed_where_it_is_off(
    afresh: dict[str, list[object]],
    monkeypatch: pytest.MonkeyPatch,
    said: list[str],
    switch: str,
    reason: str | None,
    line: str,
) -> None:
    monkeypatch.setenv("MOE_SGLANG", switch)
    monkeypatch.setattr(Engine, "reason_against_version", lambda self: reason)
    moe_sglang.register()
    assert not afresh
    assert said == [line]


CHANGED: dict[str, tuple[str, str, Any, str]] = {
    "no such function": ("batch_invariant_ops", "is_batch_invariant_mode_enabled", None, "cannot import name"),
    "a field of a layer": ("layers.moe.moe_runner.base", "MoeRunnerConfig", record("activation"), "has no is_gated, "),
    "a field of its weights": (
        "layers.moe.moe_runner.triton",
        "TritonMoeQuantInfo",
        record(
            *(name for name in (*FLAGS, *TENSORS) if name != "w13_zp"),
            *("per_channel_quant", "block_shape", "fuse_swiglu_interleaved"),
        ),
        "has no w13_zp",
    ),
    "a field of the tokens": ("layers.moe.topk", "StandardTopKOutput", record("topk_ids"), "has no topk_weights"),
    "the hook's place": ("layers.moe.moe_runner.base", "FusedOpPool", record(), "has no get_fused_func"),
}


@pytest.mark.parametrize("case", CHANGED)
def test_an_sglang_without_what_it_needs_is_left_alone(
    afresh: dict[str, list[object]], monkeypatch: pytest.MonkeyPatch, said: list[str], case: str
) -> None:
    module, name, changed, reason = CHANGED[case]
    place = importlib.import_module(f"sglang.srt.{module}")
    if changed is None:
        monkeypatch.delattr(place, name)
    else:
        monkeypatch.setattr(place, name, changed)
    names.cache_clear()
    moe_sglang.register()
    assert not afresh
    [line] = said
    assert line.startswith("moe-sglang is off: sglang 0.5.23 lacks what it needs: ")
    assert reason in line


def test_doctor_says_what_sglang_would_get(afresh: dict[str, list[object]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_api, "select_kernel", functools.partial(engine_api.select_kernel, device="cpu"))
    said = lines()
    assert said[0] == "moe-sglang is on for fp8, int8, wna16 (MOE_SGLANG=off turns it off)"
    assert "fp8 kFp8Static128BlockSym x kFp8Dynamic128Sym: left to sglang, torch sees no GPU" in said
    assert len(said) == 5


def test_a_switch_that_says_nothing_known_is_an_error(
    afresh: dict[str, list[object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOE_SGLANG", "fp9")
    with pytest.raises(ConfigError, match="MOE_SGLANG='fp9'"):
        moe_sglang.register()
    assert not afresh


def test_versions() -> None:
    assert ENGINE.reason_against_version("0.5.23") is None
    assert ENGINE.reason_against_version("0.5.23.post1") is None
    assert ENGINE.reason_against_version("0.5.22") is not None
    assert ENGINE.reason_against_version("0.5.24") is not None
