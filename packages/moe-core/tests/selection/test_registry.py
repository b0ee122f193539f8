from __future__ import annotations

import importlib.metadata
import sys
import types
from collections.abc import Iterator
from dataclasses import replace

import pytest
from moe_core import (
    Backend,
    ConfigError,
    FusedMoEConfig,
    PluginWarning,
    ProtocolVersionError,
    Registry,
    RegistryError,
    SchemeNotInstalledError,
)
from moe_core.interface.versions import INTERFACE_API
from moe_core_toys import TOY, ToyExperts, toy_oracle

CONFIG = FusedMoEConfig(num_experts=8, top_k=2, hidden_size=64, intermediate_size=48)


class OtherExperts(ToyExperts):
    interface_api = (1, 0)


class SilentExperts(ToyExperts):
    interface_api = None  # type: ignore[assignment]


class FutureExperts(ToyExperts):
    interface_api = (99, 0)


@pytest.fixture
def plugin() -> Iterator[types.ModuleType]:
    module = types.ModuleType("moe_test_plugin")
    module.TOY = TOY  # type: ignore[attr-defined]
    module.FUTURE = replace(TOY, name="future", interface_api=(INTERFACE_API.major + 1, 0))  # type: ignore[attr-defined]
    for cls in (OtherExperts, SilentExperts, FutureExperts):
        setattr(module, cls.__name__, cls)
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


def make(**groups: dict[str, str]) -> Registry:
    points = {
        f"moe_core.{group}": [
            importlib.metadata.EntryPoint(name, value, f"moe_core.{group}") for name, value in entries.items()
        ]
        for group, entries in groups.items()
    }
    return Registry(lambda group: points.get(group, []))


def test_names_are_known_without_loading_anything() -> None:
    assert make(schemes={"toy": "no_such_module:X", "a": "no_such_module:Y"}).scheme_names() == ("a", "toy")


def test_a_scheme_is_loaded_once(plugin: types.ModuleType) -> None:
    registry = make(schemes={"toy": "moe_test_plugin:TOY"})
    assert registry.scheme("toy") is plugin.TOY
    assert registry.oracle("toy") is registry.oracle("toy")


def test_a_missing_scheme_names_the_command_that_adds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    with monkeypatch.context() as patch:
        patch.setattr(importlib.metadata, "version", absent)
        with pytest.raises(SchemeNotInstalledError, match=r"'int8' .*moe-int8"):
            make().oracle("int8")
        patch.setattr(importlib.metadata, "version", lambda name: "0.1.0")
        # the same command once more would end in the same error
        with pytest.raises(SchemeNotInstalledError, match=r"moe-int8 0\.1\.0 .*--upgrade"):
            make().oracle("int8")
    with pytest.raises(SchemeNotInstalledError, match="'fp3'"):
        make().oracle("fp3")


def test_another_protocol_is_refused_by_name_and_version(plugin: types.ModuleType) -> None:
    with pytest.raises(ProtocolVersionError, match=r"'future'.*interface_api 2\.0"):
        make(schemes={"future": "moe_test_plugin:FUTURE"}).scheme("future")
    schemes = {"toy": "moe_test_plugin:TOY"}
    for experts, text in (("Future", r"interface_api 99\.0"), ("Silent", "no interface_api")):
        expected = rf"'toy.x' .*{text}"
        with pytest.warns(PluginWarning, match=expected):
            oracle = make(schemes=schemes, backends={"toy.x": f"moe_test_plugin:{experts}Experts"}).oracle("toy")
        with pytest.raises(ProtocolVersionError, match=expected):
            oracle.select(CONFIG, weight_key=None, activation_key=None, device="cpu", moe_backend="x")


def test_another_packages_backend_joins_the_table(plugin: types.ModuleType) -> None:
    registry = make(
        schemes={"toy": "moe_test_plugin:TOY"},
        backends={"toy.mine": "moe_test_plugin:OtherExperts", "other.theirs": "no_such_module:X"},
    )
    assert [b.name for b in registry.oracle("toy").table()] == ["gpu", "plain", "mine"]


@pytest.mark.parametrize("group", ["backends", "formats"])
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("mine", ""),
        ("toy", ""),
        ("toy.", ""),
        (".mine", "; unknown scheme '' (installed: toy)"),
        ("acme.toy.mine", "; unknown scheme 'acme' (installed: toy)"),
    ],
)
def test_names_that_belong_to_no_scheme(plugin: types.ModuleType, group: str, name: str, why: str) -> None:
    registry = make(schemes={"toy": "moe_test_plugin:TOY"}, **{group: {name: "moe_test_plugin:OtherExperts"}})
    kind = group.removesuffix("s")
    text = f"{kind} {name!r} of an unknown distribution is left out: its entry point is named {name!r}, "
    use = registry.oracle if kind == "backend" else registry.formats
    with pytest.warns(PluginWarning) as warned:
        use("toy")
    assert [str(one.message) for one in warned] == [f"{text}expected <scheme>.<{kind}>{why}"]
    assert [fault.name for fault in registry.faults()] == [name]


def test_names_with_more_dots_behind_the_scheme(plugin: types.ModuleType) -> None:
    backends = {"toy.acme.mine": "moe_test_plugin:OtherExperts", "fp8.acme.mine": "no_such_module:X"}
    registry = make(schemes={"toy": "moe_test_plugin:TOY"}, backends=backends)
    oracle = registry.oracle("toy")
    assert [b.name for b in oracle.table()] == ["gpu", "plain", "acme.mine"]
    request = {"weight_key": None, "activation_key": None, "device": "cpu", "moe_backend": "acme.mine"}
    assert oracle.select(CONFIG, **request).backend == "acme.mine"
    assert not registry.faults()


def test_a_scheme_with_dots_in_its_name(plugin: types.ModuleType) -> None:
    plugin.TOY = replace(TOY, name="acme.toy")  # type: ignore[attr-defined]
    registry = make(schemes={"acme.toy": "moe_test_plugin:TOY"})
    with pytest.raises(RegistryError, match=r"'acme.toy' .*dots"):
        registry.oracle("acme.toy")


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (
            {"schemes": {"toy": "moe_no_such_module:X"}},
            "'toy'.*moe_no_such_module:X",
        ),
        ({"schemes": {"toy": "moe_test_plugin:OtherExperts"}}, "expected a moe_core.Scheme"),
    ],
)
def test_a_broken_entry_point_is_named(
    plugin: types.ModuleType, groups: dict[str, dict[str, str]], message: str
) -> None:
    with pytest.raises(RegistryError, match=message):
        make(**groups).oracle("toy")


def test_a_name_taken_twice_is_refused(plugin: types.ModuleType) -> None:
    points = [
        importlib.metadata.EntryPoint("toy", value, "moe_core.schemes")
        for value in ("moe_test_plugin:TOY", "other:TOY")
    ]
    registry = Registry(lambda group: points)
    assert registry.scheme_names() == ("toy",)
    with pytest.raises(RegistryError, match="'toy' .*other:TOY"):
        registry.scheme("toy")
    with pytest.raises(ConfigError, match="backend 'plain'"):
        toy_oracle().add_backend(Backend("plain", (OtherExperts,)))
