"""What cases the compile session has."""

from __future__ import annotations

import itertools
from collections import defaultdict

import pytest
import torch
from moe_core.spec.config import FusedMoEActivationFormat
from moe_core.testing.compile_cases import FEATURES, FEW_TOKENS, TOKENS, Turn, calls

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.mark.parametrize("dtypes", [DTYPES, DTYPES[:2]])
@pytest.mark.parametrize("formats", [list(FusedMoEActivationFormat), [FusedMoEActivationFormat.STANDARD]])
def test_every_number_of_tokens_has_every_turn(
    dtypes: tuple[torch.dtype, ...], formats: list[FusedMoEActivationFormat]
) -> None:
    every = list(itertools.product(FEATURES, dtypes, formats))
    turns, found = itertools.cycle(every), defaultdict[int, set[Turn]](set)
    for _ in every:
        key = list(calls(turns, formats))
        assert all({turn[2] for t, turn in key if t == tokens} == set(formats) for tokens in range(1, FEW_TOKENS + 1))
        for tokens, turn in key:
            found[tokens].add(turn)
    assert found == {tokens: set(every) for tokens in TOKENS}
