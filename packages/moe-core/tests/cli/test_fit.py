"""moe explain against a card: whether a model fits, and how fast its experts can be at most."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_core.parallel.distributed.cost import MACHINES
from moe_core.spec import device
from moe_core.spec.cards import CARDS, card_of
from moe_core_checkpoints import TOP_K, E, K, N, layer_tensors, write

SHAPE = ("--scheme", "plain", "--shape", "8,2,64,32")
EXPERTS = E * 3 * N * K * 2


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Two layers with MoE, and 10,000 bytes of something else."""
    tensors = {**layer_tensors(0), **layer_tensors(1), "lm_head.weight": torch.zeros(10_000, dtype=torch.uint8)}
    return write(tmp_path / "model", tensors)


def of_memory(monkeypatch: pytest.MonkeyPatch, name: str, memory: int) -> None:
    monkeypatch.setitem(device.CARDS, name, replace(device.CARDS[name], memory=memory))


def test_what_a_checkpoint_needs(moe: Any, model: Path) -> None:
    result = moe("explain", model, "--device", "l4", "--json", "--tokens", 16)
    data, fit = result.data, result.data["fit"]
    assert result.code == 0
    assert (fit["memory"], fit["layers"], fit["fits"]) == (24 << 30, 2, True)
    assert fit["experts"] == 2 * data["memory"]["weights"] == 2 * EXPERTS
    size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    assert fit["other"] == size - 2 * EXPERTS > 10_000
    steady = fit["experts"] + data["memory"]["workspace"]
    assert fit["needed"] == fit["other"] + max(steady, EXPERTS + data["memory"]["load_peak"])
    out = moe("explain", model, "--device", "l4").out
    assert "fits         yes: needs " in out
    assert " of 24.0 GiB (experts 24.0 KiB in 2 layers, everything else " in out
    every = moe("explain", model, "--device", "l4", "--json", "--tokens", 16, "--all-layers").data
    assert every["fit"] == fit
    assert (every["total"]["weights"], every["total"]["largest_layer"]) == (2 * EXPERTS, EXPERTS)


@pytest.mark.parametrize("more", [(), ("--all-layers",)])
def test_a_model_that_cannot_fit(moe: Any, model: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]) -> None:
    needed = moe("explain", model, "--device", "l4", "--json", *more).data["fit"]["needed"]
    of_memory(monkeypatch, "l4", needed)
    assert moe("explain", model, "--device", "l4", *more).code == 0
    of_memory(monkeypatch, "l4", needed - 1)
    result = moe("explain", model, "--device", "l4", *more)
    assert result.code == 1
    assert "fits         no: needs " in result.out
    assert "; 2 such GPUs at least" in result.out
    assert result.err.startswith("moe explain: does not fit on l4 (sm89): ")


def test_one_of_several_devices(moe: Any, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_memory(monkeypatch, "l4", 20_000)
    result = moe("explain", model, "--device", "h100,l4")
    assert result.code == 1
    assert result.err.startswith("moe explain: does not fit on l4: ")
    rows = [line.split() for line in result.out.splitlines() if line.startswith(("h100 ", "l4 "))]
    assert [row[-1] for row in rows] == ["yes", "no"]


def test_a_layer_without_a_checkpoint(moe: Any) -> None:
    large = moe("explain", "--scheme", "plain", "--shape", "512,8,7168,8192", "--device", "rtx4090", "--json")
    assert large.code == 1
    assert (large.data["fit"]["layers"], large.data["fit"]["other"]) == (1, 0)
    assert moe("explain", *SHAPE, "--device", "rtx4090").code == 0


@pytest.mark.parametrize("name", ["cpu", "sm90", "gfx942"])
def test_no_verdict_where_the_memory_is_unknown(moe: Any, name: str) -> None:
    """An architecture is no card."""
    result = moe("explain", "--scheme", "plain", "--shape", "512,8,7168,8192", "--device", name)
    assert result.code == 0
    assert "fits  " not in result.out
    assert "floor" not in result.out


def test_no_backend_is_another_exit_code(moe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    of_memory(monkeypatch, "l4", 1)
    result = moe("explain", *SHAPE, "--device", "l4", "--backend", "nothing_of_that_name")
    assert result.code == 2


def test_over_ranks_it_is_about_one(moe: Any, model: Path) -> None:
    alone = moe("explain", model, "--device", "h100", "--json").data["fit"]
    shared = moe("explain", model, "--device", "h100", "--json", "--ep", 2).data
    assert shared["fit"]["experts"] == alone["experts"] // 2
    assert shared["fit"]["other"] == alone["other"]
    assert shared["floor"] is None


@pytest.mark.parametrize("name", ["h100", "mi300x", "rtx5090"])
def test_floors(moe: Any, model: Path, name: str) -> None:
    card = CARDS[name]
    data = moe("explain", model, "--device", name, "--json").data["floor"]
    assert (data["bandwidth"], data["rate"], data["product"]) == (
        card.bandwidth * 1e9,
        card.rates["bf16"] * 1e12,
        "bf16",
    )
    for call, tokens in zip(data["calls"], (1, 32, 4096), strict=True):
        active = E * (1 - (1 - TOP_K / E) ** tokens)
        moved = EXPERTS / E * active + 2 * tokens * K * 2
        products = 2 * tokens * TOP_K * 3 * N * K
        times = moved / data["bandwidth"], products / data["rate"]
        assert call["tokens"] == tokens
        assert call["seconds"] == pytest.approx(max(times))
        assert call["bound"] == ["memory" if times[0] >= times[1] else "products"]
    every = moe("explain", model, "--device", name, "--json", "--all-layers").data["floor"]
    assert [c["seconds"] for c in every["calls"]] == pytest.approx([2 * c["seconds"] for c in data["calls"]])
    out = moe("explain", model, "--device", name).out
    assert out.count("floor        experts of ") == 2
    assert "floor        experts of 2 layers: " in out


def test_cards_have_figures_that_can_be() -> None:
    for name in ("rtx4090", "rtx5090", "l4", "l40s", "a100", "a100-40gb", "h100", "h100-pcie", "h200", "b200", "b300"):
        assert CARDS[name].rates["bf16"] > 0
    for card in CARDS.values():
        assert card == card_of(card.name)
        # the least of machine balance: below it, memory would never be the limit
        assert all(rate * 1e12 / (card.bandwidth * 1e9) > 20 for rate in card.rates.values()), card.name
    assert MACHINES["h200"].rates == CARDS["h200"].rates_by_bits


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("h100_pcie", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("AMD Instinct MI325X", "mi325x"),
    ],
)
def test_a_card_by_the_drivers_name(text: str, name: str) -> None:
    card = card_of(text)
    assert card is not None
    assert card.name == name


@pytest.mark.parametrize(
    ("card", "operand", "expected"),
    [
        ("a100", "fp8", ("bf16", 312e12)),
        ("a100", "int8", ("int8", 624e12)),
        ("h100", "fp4", ("fp8", 1979e12)),
        ("b200", "fp4", ("fp4", 9000e12)),
        ("rtx4090", "fp8", ("fp8", 330.3e12)),
        ("mi308x", "bf16", None),
    ],
)
def test_rates_of_operands(card: str, operand: str, expected: tuple[str, float] | None) -> None:
    found = CARDS[card].rate(operand)
    assert found == expected if expected is None else found == (expected[0], pytest.approx(expected[1]))
