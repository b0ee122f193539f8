"""``torch.autocast`` has no effect on any scheme's layer: not when it is made, not when it runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from moe_core import RoutingConfig, registry, route
from moe_core.spec.routing import RoutingMethodType
from moe_core.testing.data import make_weights
from moe_core.testing.harness import same_bits
from moe_core_layers import Kind, all_kinds, some_kinds
from torch import Tensor

CASES = [(kind, torch.float16) for kind in all_kinds()] + [(kind, torch.bfloat16) for kind in some_kinds(2)]


@contextlib.contextmanager
def autocast(dtype: torch.dtype) -> Iterator[None]:
    kinds = ["cpu"] + ["cuda"] * torch.cuda.is_available()
    with contextlib.ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(torch.autocast(kind, dtype=dtype))
        yield


def hidden_states(tokens: int = 3, size: int = 256) -> Tensor:
    # large values, whose sums of products leave float16's range
    return (50 * torch.randn(tokens, size, generator=torch.Generator().manual_seed(5))).to(torch.bfloat16)


@pytest.mark.parametrize(("kind", "dtype"), CASES, ids=str)
def test_a_layer_gives_the_same_bits(kind: Kind, dtype: torch.dtype) -> None:
    x = hidden_states()
    expected = kind.layer()(x)
    with autocast(dtype):
        layer = kind.layer()
        assert torch.equal(layer(x), expected)
        layer.reload(kind.weights(layer.config, seed=0))
        assert torch.equal(layer(x), expected)


@pytest.mark.parametrize("method", [m for m in RoutingMethodType if m < RoutingMethodType.Custom and m.value != 9])
def test_routing_gives_the_same_bits(method: RoutingMethodType) -> None:
    groups = {"num_expert_group": 2, "topk_group": 1} if method is RoutingMethodType.DeepSeekV3 else {}
    routing = RoutingConfig.from_method(method.name, **groups)
    bias = torch.rand(8) if routing.has_correction_bias else None
    logits = torch.randn(33, 8)
    expected = route(logits, top_k=1, config=routing, correction_bias=bias)
    with autocast(torch.bfloat16):
        found = route(logits, top_k=1, config=routing, correction_bias=bias)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_compiled_layer_gives_the_same_bits() -> None:
    layer = all_kinds()[0].layer()
    x = hidden_states()
    expected = layer(x)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def model(x: Tensor) -> Tensor:
        return layer(x)

    with autocast(torch.float16):
        assert torch.equal(model(x), expected)


@pytest.mark.parametrize("name", registry().online_names())
def test_quantizing_at_load_gives_the_same_bits(name: str) -> None:
    online = registry().online(name)
    config = Kind(online.scheme, None, None).config()
    plain = make_weights(config, None, None, seed=1)
    expected = online.quantize(plain)
    with autocast(torch.float16):
        found = online.quantize(plain)
    for (part, a), (_, b) in zip(found.tensors(), expected.tensors(), strict=True):
        assert same_bits(a, b), part
