"""The example of an engine over several ranks."""

from __future__ import annotations

from pathlib import Path

from moe_core_rank_commands import run_example
from moe_kit.ranks import run_ranks

EXAMPLE = Path(__file__).parents[1] / "examples" / "several-ranks" / "engine.py"


def test_ranks_together_give_what_one_gives() -> None:
    # parts of a sum are rounded to bfloat16 on each of two ranks, and their sum: sqrt(3) roundings of at most 2^-9
    assert max(run_ranks(run_example, str(EXAMPLE), ranks=2)) < 3**0.5 * 2**-9
