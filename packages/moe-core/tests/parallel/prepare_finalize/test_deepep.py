"""The adapter of DeepEP: what it claims, and what it asks of the library, by a double."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from moe_core import DeviceInfo, Environment, FusedMoEConfig, FusedMoEParallelConfig
from moe_core.parallel.prepare_finalize.deepep import DeepEPPrepareAndFinalize, dispatch_arguments
from moe_core.parallel.prepare_finalize.token_rows import Tokens

INSTALLED = Environment({"deep_ep": "2.1.0"})
CONFIG = FusedMoEConfig(64, 8, 4096, 1024, parallel=FusedMoEParallelConfig(ep_size=8, dp_size=8), max_num_tokens=128)


def reasons(config: FusedMoEConfig = CONFIG, device: str = "h200", environment: Environment = INSTALLED) -> list[str]:
    return DeepEPPrepareAndFinalize.unsupported_reasons(config, None, DeviceInfo.parse(device), environment)


def test_what_it_claims() -> None:
    assert reasons() == []
    assert reasons(device="a100") == ["needs sm90 to sm109, device is a100 (sm80)"]
    assert reasons(environment=Environment())[0].startswith("needs deep_ep, which is not installed")
    assert reasons(environment=Environment({"deep_ep": "1.2.1"}))[0].startswith("needs deep_ep >= 2.0, found 1.2.1")
    assert reasons(replace(CONFIG, dtype=torch.float16)) == ["does not take hidden states in float16, takes bfloat16"]
    assert reasons(replace(CONFIG, max_num_tokens=None)) == [
        "needs max_num_tokens in the config, the largest number of tokens per rank"
    ]
    own = FusedMoEParallelConfig(tp_size=2, ep_size=4, dp_size=8)
    assert reasons(replace(CONFIG, parallel=own, num_local_experts=16)) == [
        "sends a token to one rank of an expert: tensor-parallel ranks must share theirs (dp_size = ep_size)"
    ]
    assert DeepEPPrepareAndFinalize.claims.verified_on == ()


@pytest.mark.parametrize("quantized", [False, True])
def test_a_rank_without_tokens_sends_one_that_goes_nowhere(quantized: bool) -> None:
    values = torch.zeros(0, 256).to(torch.float8_e4m3fn if quantized else torch.bfloat16)
    scale = torch.zeros(0, 2) if quantized else None
    given = dispatch_arguments(Tokens(values, scale, torch.zeros(0, 2), torch.zeros(0, 2).int()), 64, 0)
    hidden = given["x"][0] if quantized else given["x"]
    assert hidden.shape == (1, 256)
    assert given["topk_idx"].tolist() == [[-1, -1]]
    assert given["num_max_tokens_per_rank"] == 1
