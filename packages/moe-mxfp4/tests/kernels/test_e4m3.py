"""e2m1 as e4m3: every code at every power, what is left out, scales that are not numbers."""

from __future__ import annotations

import pytest
import torch
from moe_core.kernels.gemm.plan import TileConfig
from moe_core.kernels.gemm.tiles.launch import Gemm, OperandA, Result, Routing, grouped_gemm
from moe_core.kernels.gemm.workspaces import order_workspaces
from moe_core.kernels.ops.sort import sort_pairs
from moe_core.spec.numerics import E2M1_VALUES
from moe_core.spec.workspace import Workspace
from moe_mxfp4.kernels.e4m3 import E2M1
from moe_mxfp4.marlin_layout import convert_to_e4m3
from moe_mxfp4.scales import LARGEST_E4M3

COLUMNS, ROWS = 256, 128
FEW, MANY = TileConfig(16, 128, 4, 2, swap_ab=True), TileConfig(64, 128, 4, 2, swap_ab=True)
CONFIGS = pytest.mark.parametrize("config", [FEW, MANY], ids=["few", "many"])


@pytest.fixture(autouse=True)
def _e4m3_units(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        pytest.skip("no tensor cores for e4m3 before sm_89")


def widened(
    codes: torch.Tensor, exponents: torch.Tensor, device: torch.device, config: TileConfig = FEW
) -> torch.Tensor:
    """float32 [ROWS, COLUMNS]: what the product makes of codes [ROWS, COLUMNS] and unit vectors."""
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    found = convert_to_e4m3(packed.to(device)[None], exponents.to(torch.uint8).to(device)[None], COLUMNS)
    extra = (found.powers, found.powers.stride(0), found.powers.stride(1))
    workspace = Workspace(device).take(order_workspaces(COLUMNS, COLUMNS, 1, False))
    ids = torch.zeros(COLUMNS, 1, dtype=torch.int32, device=device)
    rows = torch.eye(COLUMNS).to(torch.float8_e4m3fn).to(device)
    y = torch.empty(COLUMNS, ROWS, device=device)
    scales = torch.ones(COLUMNS, device=device)
    gemm = Gemm(
        config,
        E2M1.weight(found.words, found.scales, None, ROWS, COLUMNS, extra=extra),
        OperandA((rows, scales, rows.stride(0), 1, 0, None), "position"),
        Result.of(y),
        sort_pairs(ids, 1, config.block_m, workspace=workspace),
        Routing(ids, torch.ones(COLUMNS, 1, device=device), 1),
    )
    grouped_gemm(gemm)
    return y.cpu().T


def every_code() -> torch.Tensor:
    """uint8 [ROWS, COLUMNS]: every code at every place of a word."""
    return ((torch.arange(COLUMNS)[None, :] * 5 // 4 + 7 * torch.arange(ROWS)[:, None]) % 16).to(torch.uint8)


def values(codes: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """float64 [ROWS, COLUMNS]."""
    numbers = torch.tensor(E2M1_VALUES, dtype=torch.float64)[codes.long()]
    return numbers * torch.exp2(exponents.double() - 127).repeat_interleave(32, 1)


@CONFIGS
@pytest.mark.parametrize("base", [7, 120, 243], ids=str)
def test_within_twelve_powers_every_code_is_exact(base: int, config: TileConfig, device: torch.device) -> None:
    exponents = (base + torch.tensor([0, 3, 11, 7, 10, 2, 9, 5])).expand(ROWS, -1).clone()
    exponents[1::2] = exponents[1::2].flip(1)
    exponents[2::3] = base + torch.tensor([11, 1, 4, 6, 8, 11, 0, 0])
    expected = values(every_code(), exponents).float()  # the largest become infinite
    assert torch.equal(widened(every_code(), exponents, device, config), expected)


@CONFIGS
def test_smaller_groups_become_zeros(config: TileConfig, device: torch.device) -> None:
    exponents = (140 - torch.tensor([0, LARGEST_E4M3, LARGEST_E4M3 + 1, 13, 40, 139, 1, 5])).expand(ROWS, -1)
    expected = values(every_code(), exponents)
    expected[:, 64:192] = 0.0
    assert torch.equal(widened(every_code(), exponents, device, config).double(), expected)


def test_groups_of_zeros_do_not_count(device: torch.device) -> None:
    codes = every_code()
    codes[:, 64:96] = 8 * (torch.arange(32) % 2).to(torch.uint8)  # of both signs
    codes[3] = 0
    exponents = torch.full((ROWS, COLUMNS // 32), 100)
    exponents[:, 2] = 254
    found = widened(codes, exponents, device)
    exponents[:, 2] = 100
    assert torch.equal(found.double(), values(codes, exponents))


def test_scales_that_are_not_numbers_show(device: torch.device) -> None:
    exponents = torch.full((ROWS, COLUMNS // 32), 127)
    exponents[5, 0] = 255
    found = widened(every_code(), exponents, device)
    assert found[5].isnan().all()
    assert torch.equal(found[:5].double(), values(every_code(), exponents)[:5])
