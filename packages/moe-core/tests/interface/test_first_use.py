"""First use from several threads at once: everybody sees the whole table, each thing once."""

from __future__ import annotations

import importlib.metadata
import sys
import threading
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from moe_core import Backend, FusedMoEConfig, PluginWarning, Registry
from moe_core.checkpoint import CheckpointFormat
from moe_core_checkpoints import PlainFormat
from moe_core_toys import TOY, BatchedToyExperts, GpuToyExperts, ToyExperts

THREADS = 8
CONFIG = FusedMoEConfig(num_experts=8, top_k=2, hidden_size=64, intermediate_size=48)


def together(call: Callable[[], Any]) -> list[Any]:
    """The results of threads that begin at the same time."""
    barrier = threading.Barrier(THREADS)

    def run() -> Any:
        barrier.wait()
        return call()

    with ThreadPoolExecutor(THREADS) as pool:
        return [future.result(timeout=60) for future in [pool.submit(run) for _ in range(THREADS)]]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    made = types.ModuleType("moe_first_use")
    monkeypatch.setitem(sys.modules, made.__name__, made)
    return made


def test_a_table_that_is_being_loaded_is_not_seen_in_part(module: types.ModuleType) -> None:
    started, go_on = threading.Event(), threading.Event()

    def attribute(name: str) -> type:
        if name == "Slow":
            started.set()
            assert go_on.wait(30)
            return BatchedToyExperts
        raise AttributeError(name)

    module.Quick = ToyExperts  # type: ignore[attr-defined]
    module.__getattr__ = attribute  # type: ignore[method-assign]
    backend = Backend("plain", ("moe_first_use:Quick", "moe_first_use:Slow"))
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(backend.load)
        assert started.wait(30)
        second = pool.submit(backend.load)
        go_on.set()
        assert first.result(30) == second.result(30) == (ToyExperts, BatchedToyExperts)
    assert backend.load() == (ToyExperts, BatchedToyExperts)


def registry_of(module: types.ModuleType, backends: tuple[str, ...] = ("mine",)) -> Registry:
    # a table of its own, so that nothing is loaded yet
    backends_of_toys = (
        Backend("gpu", ("moe_first_use:Gpu",)),
        Backend("plain", ("moe_first_use:Plain", "moe_first_use:Batched")),
    )

    class Mine(ToyExperts):
        pass

    class Added(PlainFormat):
        format_api = (1, 0)

    module.Gpu, module.Plain, module.Batched, module.Mine = GpuToyExperts, ToyExperts, BatchedToyExperts, Mine  # type: ignore[attr-defined]
    module.Own = type("Own", (PlainFormat,), {})  # type: ignore[attr-defined]
    module.Added = Added  # type: ignore[attr-defined]
    module.TOY = replace(TOY, backends=backends_of_toys, formats=(PlainFormat, "moe_first_use:Own"))  # type: ignore[attr-defined]
    points = {
        "moe_core.schemes": {"toy": "moe_first_use:TOY", "lost": "moe_first_use:NOTHING"},
        "moe_core.backends": {f"toy.{name}": "moe_first_use:Mine" for name in backends},
        "moe_core.formats": {"toy.added": "moe_first_use:Added"},
    }

    def entry_points(group: str) -> list[importlib.metadata.EntryPoint]:
        return [importlib.metadata.EntryPoint(name, value, group) for name, value in points.get(group, {}).items()]

    return Registry(entry_points)


def test_eight_threads_select_from_the_same_table(module: types.ModuleType) -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(30):
            plugins = registry_of(module, backends=("a", "b", "c"))

            def once(plugins: Registry = plugins) -> tuple[Any, ...]:
                oracle = plugins.oracle("toy")
                report = oracle.select(CONFIG, weight_key=None, activation_key=None, device="cpu").report
                return id(oracle), tuple((c.backend, c.experts) for c in report.candidates), plugins.formats("toy")

            found = together(once)
            assert len(set(found)) == 1
            _, candidates, formats = found[0]
            assert [name for name, _ in candidates] == ["gpu", "plain", "plain", "a", "b", "c"]
            assert [issubclass(kind, CheckpointFormat) for kind in formats] == [True, True, True]
    finally:
        sys.setswitchinterval(interval)


def test_a_registry_has_one_oracle_with_each_backend_once(module: types.ModuleType) -> None:
    plugins = registry_of(module)
    single = plugins.oracle("toy")
    assert {id(oracle) for oracle in together(lambda: plugins.oracle("toy"))} == {id(single)}
    assert [backend.name for backend in single.table()] == ["gpu", "plain", "mine"]
    # a second registry of the same installation has an oracle of its own
    other = registry_of_the_same(plugins).oracle("toy")
    assert other is not single
    assert [backend.name for backend in other.table()] == ["gpu", "plain", "mine"]


def registry_of_the_same(plugins: Registry) -> Registry:
    return Registry(plugins._entry_points)


def test_a_fault_is_told_once_to_all_threads(module: types.ModuleType) -> None:
    plugins = registry_of(module)
    with pytest.warns(PluginWarning) as caught:
        together(plugins.schemes)
    assert len(caught) == 1
    assert len(plugins.faults()) == 1


def test_nothing_waits_for_a_plugin_that_waits_for_the_registry(module: types.ModuleType) -> None:
    """An import that asks the registry, in a thread, while another thread imports the same plug-in."""
    plugins = registry_of(module)
    answers: list[object] = []

    def attribute(name: str) -> object:
        if name != "ASKING":
            raise AttributeError(name)
        asking = threading.Thread(target=lambda: answers.append(plugins.oracle("toy")))
        asking.start()
        asking.join(20)
        assert answers, "the registry is locked while it imports"
        return replace(TOY, name="asking")

    module.__getattr__ = attribute  # type: ignore[method-assign]
    point = importlib.metadata.EntryPoint("asking", "moe_first_use:ASKING", "moe_core.schemes")
    mine = plugins._entry_points
    plugins._entry_points = lambda group: [*mine(group), *([point] if group == "moe_core.schemes" else [])]
    assert plugins.scheme("asking").name == "asking"
