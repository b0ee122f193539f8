"""Layers over two ranks whose tokens a double of DeepEP moves give what they give on one."""

from __future__ import annotations

from moe_core_deepep_double import deepep_cases
from moe_core_layers import all_kinds
from moe_core_rank_layers import Case
from moe_kit.ranks import run_ranks

#: tokens that travel as e4m3 with scales of blocks, as int8 (quantized where they arrive), in 16 bits
KINDS = ("fp8-kFp8Static128BlockSym-kFp8Dynamic128Sym", "int8-kInt8StaticChannelSym-kInt8DynamicTokenSym")


def test_layers_give_what_they_give_on_one_rank() -> None:
    kinds = {str(kind): kind for kind in all_kinds()}
    most = (("max_num_tokens", 9),)
    cases = [
        Case(kinds[name], "deepep", tokens, ep=2, placement=placement, changes=most)
        for name in KINDS
        for tokens, placement in (((4, 4), "contiguous"), ((0, 9), "arbitrary"), ((7, 1), "replicated"))
    ]
    for wrong, made, waited in run_ranks(deepep_cases, cases, ranks=2, seconds=90):
        assert not wrong, "\n".join(wrong)
        # layers of one size share a buffer; each call waits for what came and for what came back
        assert made <= len(KINDS)
        assert waited == 2 * 2 * len(cases)
