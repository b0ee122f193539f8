"""Plug-ins with faults of every kind beside the four schemes: each is left out and named, everything else works on."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import shutil
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_core import (
    CheckpointError,
    Environment,
    FusedMoEExpertsModular,
    PluginWarning,
    Registry,
    RegistryError,
    Selection,
)
from moe_core.checkpoint import Checkpoint, read_layer
from moe_core.plugins.backend import reason_against_class
from moe_core.plugins.entry_points import installed
from moe_core.selection.registry import KNOWN_SCHEMES

SCHEME_GROUP, BACKEND_GROUP, FORMAT_GROUP = "moe_core.schemes", "moe_core.backends", "moe_core.formats"

#: a scheme that would work and reads nothing; what is wrong with it follows
SCHEME = """
import dataclasses, sys
import moe_core as mc
from moe_core.checkpoint import CheckpointFormat, ExpertLayout

METHODS = ("fp8", "mxfp4", "gptq", "compressed-tensors", "modelopt")

class Layout(ExpertLayout):
    def load(self, config, *, experts, device="cpu"): raise NotImplementedError

class Format(CheckpointFormat):
    format_api = (1, 0)
    name = "faulty format"
    quant_methods = METHODS
    def resolve(self, quantization, layer): return "it is not mine"

SCHEME = mc.SchemeSpec("faulty", interface_api=(1, 0), format_api=(1, 0), formats=(Format,), quant_methods=METHODS)
changed = lambda **changes: dataclasses.replace(SCHEME, **changes)
"""

#: a backend that would work and takes what every scheme has
BACKEND = """
import sys
import moe_core as mc

class Experts(mc.FusedMoEExpertsModular):
    interface_api = (1, 0)
    claims = mc.Claims(
        devices=(mc.any_device(),), keys=((mc.kFp8Static128BlockSym, mc.kFp8Dynamic128Sym),), activations=mc.GATED
    )
    def convert(self, weights): raise NotImplementedError
    def apply(self, *args, **kwargs): raise NotImplementedError
"""


@dataclass(frozen=True)
class Fault:
    """``source`` of the module ``faulty``; its entry points; ``named``: part of what is said of it."""

    source: str
    named: str
    points: tuple[tuple[str, str, str], ...]


def scheme(extra: str, named: str, value: str = "faulty:SCHEME", name: str = "faulty") -> Fault:
    return Fault(SCHEME + extra, named, ((SCHEME_GROUP, name, value),))


def backend(extra: str, named: str, value: str = "faulty:Experts", name: str = "fp8.faulty") -> Fault:
    return Fault(BACKEND + extra, named, ((BACKEND_GROUP, name, value),))


def form(extra: str, named: str, value: str = "faulty:Format", name: str = "fp8.faulty") -> Fault:
    return Fault(SCHEME + extra, named, ((FORMAT_GROUP, name, value),))


HOSTILE = """
class Hostile(Exception):
    def __str__(self): raise RuntimeError("no text either")
"""

FAULTS = {
    # while it is imported
    "scheme module missing": scheme("", "ModuleNotFoundError", "no_such_faulty:SCHEME"),
    "scheme attribute missing": scheme("", "AttributeError", "faulty:NOTHING"),
    "scheme value is no path": scheme("", "cannot be loaded", "faulty SCHEME"),
    "scheme import error": scheme("raise ImportError('libfaulty.so.9 is missing')", "libfaulty.so.9 is missing"),
    "scheme syntax error": scheme("def (:", "SyntaxError"),
    "scheme exits": scheme("sys.exit(0)", "SystemExit: 0"),
    "scheme raises an error without a text": scheme(HOSTILE + "raise Hostile", "Hostile"),
    "scheme recurses": scheme("def f(): return f()\nf()", "RecursionError"),
    "scheme asks for itself": scheme("import test_faulty_plugins as t; t.CURRENT[0].scheme('faulty')", "faulty"),
    "scheme of bad memory": scheme("raise MemoryError", "MemoryError"),
    "backend module missing": backend("", "ModuleNotFoundError", "no_such_faulty:Experts"),
    "backend exits": backend("sys.exit('bye')", "SystemExit: bye"),
    "backend claims of wrong types": backend("mc.Claims(devices=('sm90',), keys=(), activations=())", "devices is"),
    "format exits": form("sys.exit(3)", "SystemExit: 3"),
    # what it gives
    "scheme is None": scheme("SCHEME = None", "is a NoneType, expected a moe_core.SchemeSpec"),
    "scheme is its class": scheme("SCHEME = mc.SchemeSpec", "is a type, expected a moe_core.SchemeSpec"),
    "scheme of another interface": scheme("SCHEME = changed(interface_api=(0, 9))", "was built for interface_api 0.9"),
    "scheme of newer kernels": scheme("SCHEME = changed(kernel_api=(1, 99))", "was built for kernel_api 1.99"),
    "scheme of another version of formats": scheme("SCHEME = changed(format_api=(2, 0))", "format_api 2.0"),
    "scheme without the version of its formats": scheme("SCHEME = changed(format_api=None)", "states no format_api"),
    "scheme whose version cannot be compared": scheme(
        "class P:\n    def __ne__(self, other): raise OSError('no')\nSCHEME = changed(interface_api=P())",
        "interface_api = ",
    ),
    "scheme of another name": scheme("SCHEME = changed(name='other')", "is the scheme 'other'"),
    "scheme order of no kind": scheme("SCHEME = changed(order=7)", "has order of type int, expected a function"),
    "scheme reason of no kind": scheme("SCHEME = changed(reason_against='no')", "has reason_against of type str"),
    "scheme backends in a list": scheme("SCHEME = changed(backends=[1])", "has backends of type list"),
    "scheme backends of no kind": scheme("SCHEME = changed(backends=(1,))", "has backends = (1,)"),
    "scheme kinds None": scheme("SCHEME = changed(kinds=None)", "has kinds of type NoneType"),
    "scheme formats None": scheme("SCHEME = changed(formats=None)", "formats of type NoneType"),
    "scheme format missing": scheme("SCHEME = changed(formats=('faulty:No',))", "has no attribute 'No'"),
    "scheme formats of no kind": scheme("SCHEME = changed(formats=(7,))", "is not a CheckpointFormat class"),
    "scheme format abstract": scheme(
        "class Half(CheckpointFormat): name = 'half'\nSCHEME = changed(formats=(Half,))", "does not define resolve"
    ),
    "scheme format without a name": scheme("Format.name = None", "has no name"),
    "scheme methods as one text": scheme("SCHEME = changed(quant_methods='fp8')", "quant_methods of type str"),
    "scheme online of no kind": scheme("SCHEME = changed(online=(7,))", "registers a int, expected"),
    "scheme online with a taken name": scheme(
        "from moe_core.kernels.ops.online import OnlineQuantization as O\n"
        "SCHEME = changed(online=(O('fp8_per_channel', 'faulty', mc.kFp8StaticChannelSym, None),))",
        "the name is taken by fp8 too",
    ),
    "scheme with dots in its name": scheme("", "expected a name without dots", name="acme.faulty"),
    "scheme with the name of another": scheme("SCHEME = changed(name='fp8')", "has the same name", name="fp8"),
    "backend is no class": backend("Experts = 7", "is not a FusedMoEExperts class"),
    "backend is a class of no kind": backend("class Experts: pass", "is not a FusedMoEExperts class"),
    "backend abstract": backend("class Experts(mc.FusedMoEExpertsModular): claims = 1", "does not define apply"),
    "backend without claims": backend("del Experts.claims", "has claims that are missing"),
    "backend claims are a dict": backend("Experts.claims = {}", "has claims that are a dict"),
    "backend without a version": backend("del Experts.interface_api", "states no interface_api"),
    "backend of another interface": backend("Experts.interface_api = (9, 0)", "interface_api 9.0"),
    "backend of newer kernels": backend("Experts.kernel_api = (1, 7)", "kernel_api 1.7"),
    "backend place of no kind": backend("Experts.placement = 'first'", "has a placement of type a str"),
    "backend place of wrong names": backend("mc.Placement(before='triton')", "before and after must be tuples"),
    "backend with the name of another": backend("", "already has a backend 'torch'", name="fp8.torch"),
    "backend without a name": backend("", "is named 'fp8', expected <scheme>.<backend>", name="fp8"),
    "backend behind another name": backend("", "unknown scheme 'acme'", name="acme.fp8.faulty"),
    "backend whose metaclass raises": backend(
        "class M(type(Experts)):\n    def __subclasscheck__(cls, other): raise OSError('meta')\n"
        "    def __getattribute__(cls, name):\n        if name == 'claims': raise OSError('meta')\n"
        "        return super().__getattribute__(name)\n"
        "class Experts(Experts, metaclass=M): pass",
        "OSError: meta",
    ),
    "format is no class": form("Format = 7", "is not a CheckpointFormat class"),
    "format behind another name": form("", "unknown scheme 'acme'", name="acme.fp8.faulty"),
    "format without a version": form("del Format.format_api", "states no format_api"),
    "format of another version": form("Format.format_api = (0, 1)", "was built for format_api 0.1"),
    # when it is asked
    "scheme format raises": scheme("Format.resolve = lambda *a: 1 / 0", "ZeroDivisionError"),
    "scheme format exits": scheme("Format.resolve = lambda *a: sys.exit(0)", "SystemExit: 0"),
    "scheme format says no text": scheme("Format.resolve = lambda *a: True", "expected an ExpertLayout or a string"),
    "scheme format cannot be made": scheme("def f(self): raise OSError('made')\nFormat.__init__ = f", "OSError: made"),
    "added format raises": form("Format.resolve = lambda *a: {}['x']", "KeyError"),
    "backend reasons raise": backend(
        "Experts.unsupported_reasons = classmethod(lambda *a: 1 / 0)", "the claims of Experts fail: ZeroDivisionError"
    ),
    "backend reasons None": backend("Experts.unsupported_reasons = classmethod(lambda *a: None)", "returned None"),
    "backend reasons as one text": backend("Experts.unsupported_reasons = classmethod(lambda *a: 'no')", "'no'"),
    "backend reasons of no texts": backend("Experts.unsupported_reasons = classmethod(lambda *a: [7])", "[7]"),
    "backend reasons exit": backend("Experts.extra_reasons = classmethod(lambda *a: sys.exit(0))", "SystemExit: 0"),
    "two backends of one name": Fault(
        BACKEND + "class Other(Experts): pass",
        "has the same name; uninstall one of them",
        ((BACKEND_GROUP, "fp8.faulty", "faulty:Experts"), (BACKEND_GROUP, "fp8.faulty", "faulty:Other")),
    ),
    "two schemes of one name": Fault(
        SCHEME + "OTHER = SCHEME",
        "has the same name; uninstall one of them",
        ((SCHEME_GROUP, "faulty", "faulty:SCHEME"), (SCHEME_GROUP, "faulty", "faulty:OTHER")),
    ),
}  # fmt: skip

#: nothing is wrong with these; they must not be in anybody's way
HARMLESS = {
    "scheme that works": scheme("", ""),
    "scheme that claims to read everything": scheme(
        "Format.resolve = lambda self, _, layer: Layout(layer, None, None)", ""
    ),
    "scheme that refuses what others read": scheme(
        "def f(*a): raise mc.CheckpointError('refused')\nFormat.resolve = f", ""
    ),
    "scheme that is slow and prints": scheme("import time; time.sleep(0.05); print('hello')", ""),
    "scheme that warns": scheme("import warnings; warnings.warn('old', DeprecationWarning)", "DeprecationWarning: old"),
    "backend of no scheme": backend("", "", name="none.faulty"),
    "backend for no GPU here": backend(
        "import dataclasses\nExperts.claims = dataclasses.replace(Experts.claims, devices=(mc.cuda(min=999),))", ""
    ),
}

#: the registry under test, for the plug-in that asks it while it is imported
CURRENT: list[Registry] = []


here_installed = functools.cache(installed)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    """A small checkpoint of each scheme, and one that nobody reads."""
    found = {}
    for name in KNOWN_SCHEMES:
        write = Registry(installed).scheme(name).write_quickstart
        assert write is not None
        folder = tmp_path_factory.mktemp(name)
        write(folder)
        found[name] = Checkpoint.open(folder)
    folder = tmp_path_factory.mktemp("nobody")
    shutil.copytree(found["fp8"].path, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["quant_method"] = "nobody"
    (folder / "config.json").write_text(json.dumps(config))
    return {**found, "nobody": Checkpoint.open(folder)}


def outcome(plugins: Registry, checkpoints: dict[str, Checkpoint]) -> tuple[dict[str, Any], list[str]]:
    """(what each checkpoint is and what runs it, what selections say of plug-ins)."""
    found: dict[str, Any] = {}
    messages: list[str] = []
    for name in KNOWN_SCHEMES:
        source = read_layer(checkpoints[name], experts=[0], plugins=plugins)
        weights = source.weights()
        oracle = plugins.oracle(source.scheme)
        keys = {"weight_key": source.weight_key, "activation_key": source.activation_key}
        selections = [
            oracle.select(source.config, **keys, device=device, moe_backend=backend, environment=environment)
            for device, backend, environment in (
                ("cpu", "auto", Environment({})),
                ("cpu", "torch", Environment({})),
                ("sm90", "auto", Environment({"triton": "3.7"})),
            )
        ]
        messages += [str(text) for s in selections for text in (*s.report.left_out, *s.report.notes)]
        oracle.convert(selections[0], weights)
        found[name] = (
            source.scheme,
            source.format.name,
            [(s.backend, s.experts.__name__) for s in selections],
            [c.backend for c in selections[0].report.candidates if c.backend != "faulty"],
            hash(weights.w13.view(torch.uint8).numpy().tobytes()),
        )
    found["online"] = plugins.online_names()
    return found, messages


@pytest.fixture(scope="module")
def expected(checkpoints: dict[str, Checkpoint]) -> dict[str, Any]:
    return outcome(Registry(installed), checkpoints)[0]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Fault], Registry]:
    """Brings a distribution ``moe-faulty 1.0`` with the module ``faulty`` beside what is installed."""

    def bring(fault: Fault) -> Registry:
        (tmp_path / "faulty.py").write_text(fault.source)
        info = tmp_path / "moe_faulty-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: moe-faulty\nVersion: 1.0\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "faulty", raising=False)
        (distribution,) = importlib.metadata.distributions(path=[str(tmp_path)])

        def points(group: str) -> list[Any]:
            mine = [EntryPoint(name, value, here) for here, name, value in fault.points if here == group]
            return [*here_installed(group), *(point._for(distribution) for point in mine)]  # type: ignore[attr-defined]

        plugins = Registry(points)
        CURRENT[:] = [plugins]
        return plugins

    yield bring
    sys.modules.pop("faulty", None)


@pytest.mark.parametrize("name", FAULTS)
def test_a_faulty_plugin_is_left_out_and_named(
    name: str,
    install: Callable[[Fault], Registry],
    checkpoints: dict[str, Checkpoint],
    expected: dict[str, Any],
) -> None:
    fault = FAULTS[name]
    plugins = install(fault)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found, messages = outcome(plugins, checkpoints)
        plugins.oracles()
        # no format reads this, so that all are asked
        with pytest.raises(CheckpointError) as nobody:
            read_layer(checkpoints["nobody"], plugins=plugins)
        again, _ = outcome(plugins, checkpoints)
    assert found == again == expected
    told = [str(w.message) for w in caught if issubclass(w.category, PluginWarning)]
    assert len(told) == len(set(told))  # once each
    messages += [*map(str, plugins.faults()), str(nobody.value)]
    mine = [text for text in messages if fault.named in text]
    assert mine, messages
    assert all("moe-faulty 1.0" in text for text in mine)
    at_selection = name.startswith("backend reasons")
    assert at_selection or any(fault.named in text for text in told)


#: those that have a name to ask for; formats and what a scheme registers beside its oracle have none
ASKED = [
    name
    for name, fault in FAULTS.items()
    if fault.points[0][1] in ("faulty", "fp8.faulty")
    and fault.points[0][0] != FORMAT_GROUP
    and not any(part in name for part in ("scheme format ", "formats of no kind", "online"))
]


def test_a_class_that_raises_says_nothing_of_others() -> None:
    class Raises(type(FusedMoEExpertsModular)):  # type: ignore[misc]
        def __subclasscheck__(cls, other: type) -> bool:
            raise OSError("meta")

    class Faulty(FusedMoEExpertsModular, metaclass=Raises):
        pass

    class Other:
        pass

    assert reason_against_class(Other) == "is not a FusedMoEExperts class"
    assert "does not define" in str(reason_against_class(Faulty))


@pytest.mark.parametrize("name", ASKED)
def test_asking_for_a_faulty_plugin_by_name_says_the_cause(
    name: str, install: Callable[[Fault], Registry], checkpoints: dict[str, Checkpoint]
) -> None:
    fault = FAULTS[name]
    plugins = install(fault)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PluginWarning)
        with pytest.raises(RegistryError) as caught:
            if fault.points[0][0] == SCHEME_GROUP:
                plugins.oracle("faulty")
            else:
                select(plugins, checkpoints["fp8"])
    assert fault.named in str(caught.value)
    assert "moe-faulty 1.0" in str(caught.value)


def select(plugins: Registry, checkpoint: Checkpoint) -> Selection:
    source = read_layer(checkpoint, plugins=plugins)
    return plugins.oracle("fp8").select(
        source.config,
        weight_key=source.weight_key,
        activation_key=source.activation_key,
        moe_backend="faulty",
        device="cpu",
    )


@pytest.mark.parametrize("name", HARMLESS)
def test_other_plugins_are_in_nobodys_way(
    name: str, install: Callable[[Fault], Registry], checkpoints: dict[str, Checkpoint], expected: dict[str, Any]
) -> None:
    plugins = install(HARMLESS[name])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert outcome(plugins, checkpoints)[0] == expected
    assert not [w for w in caught if issubclass(w.category, PluginWarning)]


#: of a scheme that reads what nobody else does, and can be asked for
READS = """
KEYS = mc.kFp8Static128BlockSym, mc.kFp8Dynamic128Sym
Format.resolve = lambda self, entries, layer: Layout(layer, *KEYS) if entries["quant_method"] == "nobody" else "no"
"""


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ("", "NotImplementedError"),
        ("Layout.load = lambda self, *a, **k: sys.exit(0)", "SystemExit: 0"),
        (
            "SCHEME = changed(order=lambda *a: 1 / 0)",
            "'faulty' .*ZeroDivisionError",
        ),
        ("SCHEME = changed(order=lambda *a: None)", "'faulty' .*TypeError"),
        ("SCHEME = changed(order=lambda *a: [7])", r"TypeError: order .*\(7,\)"),
        ("SCHEME = changed(reason_against=lambda *a: sys.exit(0))", "SystemExit: 0"),
        ("SCHEME = changed(reason_against=lambda *a: 7)", "reason_against .*7"),
    ],
)
def test_a_scheme_that_is_used_and_fails_is_named(
    extra: str, named: str, install: Callable[[Fault], Registry], checkpoints: dict[str, Checkpoint]
) -> None:
    plugins = install(scheme(READS + extra, named))
    with pytest.raises(RegistryError, match=named) as caught:
        source = read_layer(checkpoints["nobody"], plugins=plugins)
        keys = {"weight_key": source.weight_key, "activation_key": source.activation_key}
        if "SCHEME" in extra:
            plugins.oracle(source.scheme).select(source.config, **keys, device="cpu")
        source.weights()
    assert caught.value.__cause__ is not None
    assert "faulty" in str(caught.value)
