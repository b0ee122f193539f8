"""What the conformance kit takes as an experts class, and what it says of anything else."""

from __future__ import annotations

import gc
import sys
import types
from pathlib import Path

import pytest
from moe_core import ConfigError, MoEError
from moe_core.errors import ProtocolVersionError
from moe_core.interface.experts import FusedMoEExperts, FusedMoEExpertsModular
from moe_core.plugins.backend import checked_experts
from moe_core.selection.registry import registry
from moe_core.testing import ConformanceTests
from moe_core.testing.loading import load_experts, load_plugin
from moe_core_toys import ToyExperts


class NoVersion(ToyExperts):
    interface_api = None


class OtherVersion(ToyExperts):
    interface_api = (99, 0)


def test_experts_are_named_by_module_and_class() -> None:
    assert load_experts("moe_core_toys:ToyExperts") is ToyExperts
    assert load_experts(ToyExperts) is ToyExperts


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("moe_core_toys", '"module:Class"'),
        ("moe_core_toys:", '"module:Class"'),
        (":ToyExperts", '"module:Class"'),
        ("moe_core_toys:Toy.Experts", '"module:Class"'),
        ("src/moe_core_toys.py:ToyExperts", "for a module of that name: moe_core_toys:ToyExperts"),
        ("moe_core_toys:ToyExpert", "did you mean 'ToyExperts'?"),
        ("moe_core_toys:Missing", "module 'moe_core_toys' has no 'Missing'; it has BatchedToyExperts, GpuToyExperts, "),
        ("json:Missing", "module 'json' has no 'Missing'; it has no experts class"),
        ("no_such_module:Missing", "install the package that has it, or name its folder in PYTHONPATH"),
        ("moe_core_toys:toy_weights", "is not a FusedMoEExperts class"),
        ("moe_core.interface.experts:FusedMoEExperts", "is neither a FusedMoEExpertsModular nor"),
    ],
)
def test_anything_else_is_refused_with_what_helps(spec: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_experts(spec)
    assert message in str(caught.value)


def test_another_packages_faulty_class_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refuses(type(FusedMoEExperts)):  # type: ignore[misc]
        def __subclasscheck__(cls, other: type) -> bool:
            raise OSError("meta")

    module = types.ModuleType("of_a_package")
    module.Experts = type("Experts", (ToyExperts,), {"__module__": "of_a_package"})  # type: ignore[attr-defined]
    module.Other = type("Other", (), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "of_a_package", module)
    faulty = Refuses("Faulty", (ToyExperts,), {})
    with pytest.raises(ConfigError, match="'Experts'"):
        load_experts("of_a_package:Expert")
    del faulty
    gc.collect()  # it would stand among the subclasses of ToyExperts in other tests


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import sys\nsys.exit(0)", "SystemExit: 0"),
        ("def (", "SyntaxError: invalid syntax"),
        ("import no_such_dependency", "No module named 'no_such_dependency'"),
    ],
)
def test_a_module_that_does_not_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    name = f"faulty_{abs(hash(text))}"
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_experts(f"{name}:Mine")
    assert f"{name}:Mine can't be imported: " in str(caught.value)
    assert message in str(caught.value)
    # what it needs is not what is to be installed here
    assert "PYTHONPATH" not in str(caught.value)


def test_claims_are_asked_for() -> None:
    with pytest.raises(ConfigError, match="FusedMoEExpertsModular"):
        load_experts(FusedMoEExpertsModular)


@pytest.mark.parametrize("experts", [NoVersion, OtherVersion])
def test_what_the_registry_refuses_is_refused(experts: type[FusedMoEExperts]) -> None:
    with pytest.raises(ProtocolVersionError) as by_registry:
        checked_experts(experts)
    with pytest.raises(ProtocolVersionError) as by_kit:
        load_plugin(experts)
    assert str(by_kit.value) == f"{experts.__name__} {by_registry.value}"

    class Tests(ConformanceTests):
        pass

    Tests.experts = experts
    asked = type("Asked", (), {"fixturenames": ["conformance_case"], "cls": Tests})()
    asked.config = type("Config", (), {"getoption": staticmethod(lambda name, default=None: default)})()
    with pytest.raises(MoEError, match="interface_api"):
        Tests().pytest_generate_tests(asked)


def test_a_scheme_s_own_classes_are_covered_by_the_scheme() -> None:
    assert "moe_fp8" in registry().scheme_packages()
    experts = registry().oracle("fp8").table()[-1].load()[0]
    assert getattr(experts, "interface_api", None) is None
    assert load_plugin(experts) is experts
