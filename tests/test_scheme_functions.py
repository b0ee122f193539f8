"""The functions that engines know the schemes by: alike in all of them."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import pickle
from collections.abc import Iterator
from enum import StrEnum
from types import ModuleType
from typing import Any

import moe_core as mc
import pytest
import torch
from moe_core.plugins.entry_points import installed
from moe_core.selection.registry import KNOWN_SCHEMES, registry
from moe_core.testing.harness import same_bits

#: the schemes of this project, by name
SPECS = {spec.name: spec for spec in registry().schemes() if spec.name in KNOWN_SCHEMES}
KINDS = [(spec, kind) for spec in SPECS.values() for kind in spec.kinds]
CONFIG = mc.FusedMoEConfig(num_experts=8, top_k=2, hidden_size=256, intermediate_size=128)


def package_of(spec: mc.SchemeSpec) -> ModuleType:
    return importlib.import_module(spec.package.replace("-", "_"))


@pytest.fixture(params=SPECS)
def scheme(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def module(scheme: str) -> ModuleType:
    return package_of(SPECS[scheme])


@pytest.fixture
def enum(scheme: str, module: ModuleType) -> type[StrEnum]:
    found = SPECS[scheme].backend_enum
    assert found is not None
    assert getattr(module, found.__name__) is found
    return found


def select(scheme: str, module: ModuleType, **request: Any) -> mc.Selection:
    found: mc.Selection = getattr(module, f"select_{scheme}_moe_backend")(CONFIG, device="cpu", **request)
    return found


def test_every_scheme_of_the_project_is_there() -> None:
    assert SPECS.keys() == KNOWN_SCHEMES.keys()
    assert all(spec.package == KNOWN_SCHEMES[name] for name, spec in SPECS.items())


def test_every_member_is_a_backend_and_the_reverse(scheme: str, enum: type[StrEnum]) -> None:
    members = [member.value for member in enum]
    assert sorted(row.name for row in registry().oracle(scheme).table()) == sorted(members)
    assert "none" not in members


def test_tensors_go_by_keyword(module: ModuleType) -> None:
    names = [name for name in module.__all__ if name.startswith(("convert_to_", "make_")) and name[-7:] != "_kernel"]
    assert len(names) >= 2
    for name in names:
        kinds = {p.kind for n, p in inspect.signature(getattr(module, name)).parameters.items() if n != "selection"}
        assert kinds == {inspect.Parameter.KEYWORD_ONLY}, name


def test_rows_are_named_by_the_package_that_brings_them(scheme: str) -> None:
    assert {row.origin for row in mc.Oracle(SPECS[scheme]).backends} == {SPECS[scheme].package}
    assert [row.name for row in SPECS[scheme].backends] == [row.name for row in mc.Oracle(SPECS[scheme]).table()]


def test_formats_read_the_methods_that_the_scheme_names(scheme: str) -> None:
    """Which are named apart, so that a scheme is asked first without its formats being loaded."""
    kinds = registry().formats(scheme)
    assert len(kinds) == len(SPECS[scheme].formats)
    assert set(SPECS[scheme].quant_methods) == {method for kind in kinds for method in kind.quant_methods}


@pytest.mark.parametrize(("spec", "kind"), KINDS, ids=[kind.name for _, kind in KINDS])
def test_functions_are_there_by_name_and_say_what_they_take(spec: mc.SchemeSpec, kind: mc.WeightKind) -> None:
    package = package_of(spec)
    functions = {name: getattr(package, name) for name in kind.functions}
    assert set(functions) | {f"map_{spec.name}_backend", "get_priority_backends"} <= set(package.__all__)
    signatures = {name: inspect.signature(function) for name, function in functions.items()}
    assert all(inspect.getdoc(function) for function in functions.values())
    select, convert, make, quant = signatures.values()
    assert select.parameters["weight_key"].default == kind.weight_key
    assert select.parameters["activation_key"].default == kind.activation_key
    assert {"config", "moe_backend", "device", "environment"} <= select.parameters.keys()
    assert functions[kind.functions[0]].__name__ == kind.functions[0]
    assert pickle.loads(pickle.dumps(functions[kind.functions[0]])) is functions[kind.functions[0]]
    # tensors by the names of canonical weights; what makes kernels takes what core's does
    assert convert.parameters.keys() - {"selection"} <= mc.MoEWeights.__dataclass_fields__.keys()
    assert make.parameters.keys() == inspect.signature(mc.Oracle.make_kernel).parameters.keys() - {"self"}
    assert {"w1_scale", "w2_scale"} <= quant.parameters.keys()


@pytest.mark.parametrize(("spec", "kind"), KINDS, ids=[kind.name for _, kind in KINDS])
def test_kernels_take_a_workspace_that_layers_share(spec: mc.SchemeSpec, kind: mc.WeightKind) -> None:
    package = package_of(spec)
    select, _, make, _ = (getattr(package, name) for name in kind.functions)
    selection, shared = select(CONFIG, device="cpu"), mc.Workspace("cpu")
    weights = mc.KernelWeights(
        w13=torch.empty(8, 1), w2=torch.empty(8, 1), quant_config=mc.FUSED_MOE_UNQUANTIZED_CONFIG
    )
    assert make(selection, weights, workspace=shared).workspace is shared


def test_the_result_unpacks_into_a_member_and_a_class(scheme: str, module: ModuleType, enum: Any) -> None:
    backend, experts = selection = select(scheme, module)
    assert backend is enum.TORCH
    assert backend == "torch"
    assert f"{backend}" == "torch"
    assert {backend: 1}["torch"] == 1
    assert experts in module.backend_to_kernel_cls(backend)
    assert issubclass(experts, mc.FusedMoEExperts)
    assert selection.report.chosen is not None


def test_every_member_has_classes_and_a_name(scheme: str, module: ModuleType, enum: type[StrEnum]) -> None:
    for member in enum:
        classes = module.backend_to_kernel_cls(member)
        assert classes == module.backend_to_kernel_cls(member.value)
        assert classes
        assert all(issubclass(experts, mc.FusedMoEExperts) for experts in classes)
        assert getattr(module, f"map_{scheme}_backend")(member.value) is member


def test_other_names_are_value_errors(scheme: str, module: ModuleType) -> None:
    for function in (module.backend_to_kernel_cls, getattr(module, f"map_{scheme}_backend")):
        with pytest.raises(ValueError, match=f"{scheme} .*'tirton'.*'triton'"):
            function("tirton")
    with pytest.raises(ValueError, match="'tirton'"):
        select(scheme, module, moe_backend="tirton")
    with pytest.raises(ValueError, match="'triton'.*replaced"):
        select(scheme, module, moe_backend="triton")


def test_the_priority_is_the_order_of_selection(scheme: str, module: ModuleType, enum: Any) -> None:
    for device in ("sm90", "sm100", "cpu"):
        keys = select(scheme, module)
        order = module.get_priority_backends(CONFIG, keys.weight_key, keys.activation_key, device=device)
        assert sorted(order) == sorted(enum)
        assert all(isinstance(backend, enum) for backend in order)
        report = (
            mc.oracle(scheme)
            .select(CONFIG, weight_key=keys.weight_key, activation_key=keys.activation_key, device=device)
            .report
        )
        assert order == list(dict.fromkeys(candidate.backend for candidate in report.candidates))


def test_what_is_quantized_at_load_goes_by_its_name(scheme: str, module: ModuleType) -> None:
    generator = torch.Generator().manual_seed(0)
    w13, w2 = (torch.randn(8, *shape, generator=generator).bfloat16() for shape in ((256, 256), (256, 128)))
    plain = mc.MoEWeights(weight_key=None, activation_key=None, w13=w13, w2=w2)
    online = mc.registry().scheme(scheme).online
    for one in online:
        found, expected = (
            dict(made.tensors()) for made in (module.quantize_moe_weights(plain, one.name), one.quantize(plain))
        )
        assert found.keys() == expected.keys()
        assert all(same_bits(found[name], tensor) for name, tensor in expected.items())
    with pytest.raises(mc.ConfigError, match=f"quantize='int3'.*{online[0].name}"):
        module.quantize_moe_weights(plain, "int3")
    other = "int8" if scheme == "fp8" else "fp8"
    with pytest.raises(mc.ConfigError, match=f"{scheme}, .*{other}"):
        mc.FusedMoELayer.from_weights(other, CONFIG, plain, quantize=online[0].name)


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from moe_wna16.experts.torch import TorchWNA16Experts

    mine = type("Mine", (TorchWNA16Experts,), {"interface_api": (1, 0), "placement": mc.Placement(before=("*",))})
    monkeypatch.setattr("moe_wna16.experts.torch.Mine", mine, raising=False)
    point = importlib.metadata.EntryPoint("wna16.mine", "moe_wna16.experts.torch:Mine", "moe_core.backends")
    everything = {group: installed(group) for group in ("moe_core.schemes", "moe_core.backends", "moe_core.formats")}
    everything["moe_core.backends"].append(point)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda *, group: everything[group])
    registry.cache_clear()
    yield
    registry.cache_clear()


def test_another_packages_backend_goes_by_its_name(added: None) -> None:
    import moe_wna16

    backend, experts = moe_wna16.select_wna16_moe_backend(CONFIG, device="cpu")
    assert (backend, experts.__name__) == ("mine", "Mine")
    assert moe_wna16.map_wna16_backend("mine") == "mine"
    assert moe_wna16.backend_to_kernel_cls("mine") == [experts]
    assert moe_wna16.get_priority_backends(CONFIG, mc.kInt4Static, device="sm90")[0] == "mine"


def test_wna16_takes_the_bits_that_engines_pass() -> None:
    from moe_wna16 import select_wna16_moe_backend

    assert select_wna16_moe_backend(CONFIG, weight_key=mc.kInt8Static, weight_bits=8, device="cpu").backend == "torch"
    assert select_wna16_moe_backend(CONFIG, weight_bits=4, device="cpu").weight_key == mc.kInt4Static
    with pytest.raises(ValueError, match="weight_bits .*8"):
        select_wna16_moe_backend(CONFIG, weight_bits=8, device="cpu")
