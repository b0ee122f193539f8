"""On a GPU, vLLM's own layers with our experts: the bits of moe-core's own layer, eagerly and in a CUDA graph."""

from __future__ import annotations

import importlib.util
import types
import warnings
from collections.abc import Iterator

import pytest
import torch
import vllm_gpu
import vllm_stand_ins

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

#: one of each kind of kernel
NAMES = ("fp8_block", "fp8_channel", "int8_channel", "int4_compressed", "mxfp4_gpt_oss")


@pytest.fixture(scope="module")
def vllm() -> Iterator[types.SimpleNamespace]:
    """The tests' layers and formats, in a vLLM whose platform is CUDA; what of it is not installed is stood in for."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM's files are not on the import path: PYTHONPATH=FOLDER where tools/unpack_python.py put them")
    vllm_stand_ins.install()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        vllm_gpu.bring()
        import vllm_formats
        import vllm_layers
        from moe_vllm import oracles
    vllm_gpu.get_ready()
    changes = oracles.install(("fp8", "int8", "mxfp4", "wna16"))
    try:
        yield types.SimpleNamespace(formats=vllm_formats, layers=vllm_layers)
    finally:
        oracles.undo(changes)


@pytest.mark.parametrize("tokens", [5, 1024])
@pytest.mark.parametrize("name", NAMES)
def test_a_captured_call_is_bit_equal(vllm: types.SimpleNamespace, name: str, tokens: int) -> None:
    """So are calls before it, of which the third and later ones start recorded launches, and so does the capture.

    Of many tokens, kernels of newer GPUs read vLLM's scratch memory by descriptors.
    """
    form, layers = vllm.formats.FORMATS[name], vllm.layers
    layer = layers.make_layer(form.config(), layers.moe_config(device="cuda", **form.layer), "cuda")
    loaded = form.load(device="cuda")
    layers.fill(layer, loaded.tensors)
    layers.process(layer)
    assert not layers.copies(layer)
    own = vllm.formats.own_layer(form, loaded, "cuda")
    call, other = (layers.calls(tokens, device="cuda", seed=seed) for seed in (0, 1))
    expected = [own.apply(x, topk_weights=weights, topk_ids=ids) for x, weights, ids in (call, other)]
    assert torch.isfinite(expected[0]).all()
    assert not torch.equal(*expected)
    for _ in range(2):
        for arguments, result in zip((call, other), expected, strict=True):
            assert torch.equal(layers.run(layer, *arguments), result)
    assert layers.experts_of(layer)._kernel._replay.reasons() == (None,)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        captured = layers.run(layer, *call)
    for held, new in zip(call, other, strict=True):
        held.copy_(new)
    graph.replay()
    assert torch.equal(captured, expected[1])
