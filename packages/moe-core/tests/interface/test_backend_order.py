"""Where backends of other packages stand."""

from __future__ import annotations

from itertools import permutations

import pytest
from moe_core import Backend, ConfigError, DeviceInfo, FusedMoEConfig, Placement
from moe_core.interface.backend_order import arrange
from moe_core_toys import GpuToyExperts, ToyExperts, toy_oracle

OWN = ("trtllm", "marlin", "triton", "torch")


def placed(**added: Placement) -> tuple[list[str], dict[str, str]]:
    """The order, the same for every order in which the packages are found."""
    outcomes = [
        arrange(
            OWN,
            names,
            name_of=str,
            placement_of=lambda name: added.get(name, Placement()),
            last_resort="torch",
        )
        for names in permutations(added)
    ]
    assert all(outcome == outcomes[0] for outcome in outcomes)
    rows, notes = outcomes[0]
    assert [row for row in rows if row in OWN] == list(OWN)
    assert sorted(rows) == sorted((*OWN, *added))
    return list(rows), notes


@pytest.mark.parametrize(
    ("placement", "expected"),
    [
        (Placement(), ["trtllm", "marlin", "triton", "mine", "torch"]),
        (Placement(before=("marlin",)), ["trtllm", "mine", "marlin", "triton", "torch"]),
        (Placement(after=("marlin",)), ["trtllm", "marlin", "mine", "triton", "torch"]),
        (Placement(before=("torch",), after=("trtllm",)), ["trtllm", "marlin", "triton", "mine", "torch"]),
        (Placement(before=("*",)), ["mine", "trtllm", "marlin", "triton", "torch"]),
        (Placement(after=("*",)), ["trtllm", "marlin", "triton", "torch", "mine"]),
        (Placement(before=("triton", "marlin")), ["trtllm", "mine", "marlin", "triton", "torch"]),
    ],
)
def test_a_backend_stands_where_it_says(placement: Placement, expected: list[str]) -> None:
    assert placed(mine=placement) == (expected, {})


def test_added_backends_may_name_each_other() -> None:
    rows, notes = placed(
        a=Placement(after=("b",)), b=Placement(before=("marlin",)), c=Placement(), d=Placement(before=("c",))
    )
    assert rows == ["trtllm", "b", "a", "marlin", "triton", "d", "c", "torch"]
    assert not notes


@pytest.mark.parametrize(
    ("added", "named"),
    [
        ({"mine": Placement(before=("marlin",), after=("triton",))}, {"mine": "before marlin, after triton"}),
        ({"mine": Placement(before=("mine",))}, {"mine": "names 'mine'"}),
        ({"a": Placement(before=("b",)), "b": Placement(before=("a",))}, {"b": "names 'a'"}),
    ],
)
def test_a_placement_that_cannot_be_honored_is_ignored_and_named(
    added: dict[str, Placement], named: dict[str, str]
) -> None:
    rows, notes = placed(**added)
    assert rows[-1] == "torch"
    assert notes.keys() == named.keys()
    assert all(text in notes[name] for name, text in named.items())


def test_a_name_that_nobody_has_is_passed_over_and_named() -> None:
    rows, notes = placed(mine=Placement(before=("absent", "marlin")))
    assert rows == ["trtllm", "mine", "marlin", "triton", "torch"]
    assert "names 'absent'" in notes["mine"]
    rows, notes = placed(mine=Placement(after=("absent",)))
    assert rows == ["trtllm", "marlin", "triton", "mine", "torch"]
    assert "'absent'" in notes["mine"]


def test_places_are_names_in_tuples() -> None:
    with pytest.raises(ConfigError, match="before.*'triton'"):
        Placement(before="triton")  # type: ignore[arg-type]


def order(table, device, *request):  # type: ignore[no-untyped-def]
    """Depends on the device."""
    assert [backend.name for backend in table] == ["gpu", "plain"]
    return table if device.kind == "cuda" else tuple(reversed(table))


def test_selection_asks_in_that_order_on_every_device() -> None:
    oracle = toy_oracle(order=order, last_resort="plain")
    oracle.add_backend(Backend("mine", (ToyExperts,), "moe-mine 1.0", Placement(before=("gpu",), after=("plain",))))
    config = FusedMoEConfig(num_experts=8, top_k=2, hidden_size=64, intermediate_size=48)

    def report(device: str):  # type: ignore[no-untyped-def]
        return oracle.select(config, weight_key=None, activation_key=None, device=device).report

    assert list(dict.fromkeys(c.backend for c in report("cpu").candidates)) == ["plain", "mine", "gpu"]
    assert report("cpu").notes == ()
    # where the scheme turns its own order, no place is both
    found = report("sm90")
    assert list(dict.fromkeys(c.backend for c in found.candidates)) == ["gpu", "mine", "plain"]
    (note,) = found.notes
    assert "backend 'mine' of moe-mine 1.0: placement (before gpu, after plain) is ignored" in note
    assert note in str(found)
    assert found.as_dict()["notes"] == [note]


def test_a_backend_before_the_last_resort_is_chosen() -> None:
    oracle = toy_oracle(order=order, last_resort="plain")
    oracle.add_backend(Backend("mine", (ToyExperts,)))
    config = FusedMoEConfig(num_experts=8, top_k=2, hidden_size=64, intermediate_size=48, has_bias=True)
    selection = oracle.select(config, weight_key=None, activation_key=None, device=DeviceInfo.parse("sm90"))
    assert selection.backend == "mine"
    assert GpuToyExperts in [c.experts for c in selection.report.candidates if not c.fits]
