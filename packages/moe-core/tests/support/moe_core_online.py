"""What every scheme's quantisation at load must do: from the command line, from tensors, again on reload."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from moe_core import ConfigError, FusedMoEConfig, FusedMoELayer, MoEWeights, TensorError
from moe_core.checkpoint import Checkpoint, read_layer
from moe_core.cli import main
from moe_core.online import OnlineQuantization
from moe_core.quantization import dequantize_weight, quantize_moe_weights
from moe_core.testing.tolerance import expected_output
from safetensors.torch import load_file, save_file
from torch import Tensor

BLOCK = "model.layers.0.mlp"


class OnlineTests:
    """Subclasses name their scheme, its names and function, and the model whose experts are stored in 16 bits.

    ``model``: config.json's entries; ``sizes``: experts, hidden size, intermediate size, top-k; ``gpt_oss``: stored as
    that model is, transposed, gate and up in turns, with biases.
    """

    scheme: ClassVar[str]
    online: ClassVar[tuple[OnlineQuantization, ...]]
    quantize: ClassVar[Callable[..., MoEWeights]]
    model: ClassVar[dict[str, Any]]
    sizes: ClassVar[tuple[int, int, int, int]]
    gpt_oss: ClassVar[bool] = False

    @classmethod
    def pytest_generate_tests(cls, metafunc: pytest.Metafunc) -> None:
        if "name" in metafunc.fixturenames:
            metafunc.parametrize("name", [one.name for one in cls.online])

    @classmethod
    def layer(cls, **changes: Any) -> FusedMoEConfig:
        experts, hidden, inter, top_k = cls.sizes
        return FusedMoEConfig(experts, top_k, hidden, inter, **changes)

    @classmethod
    def sixteen_bit(cls, seed: int = 0, *, bias: bool | None = None) -> MoEWeights:
        """Canonical weights, with biases where the model has them or as ``bias`` says."""
        experts, hidden, inter, _ = cls.sizes
        generator = torch.Generator().manual_seed(seed)

        def make(*shape: int) -> Tensor:
            return (torch.randn(shape, generator=generator) * shape[-1] ** -0.5).bfloat16()

        bare = MoEWeights(
            weight_key=None,
            activation_key=None,
            w13=make(experts, 2 * inter, hidden),
            w2=make(experts, hidden, inter),
        )
        if not (cls.gpt_oss if bias is None else bias):
            return bare
        return replace(bare, w13_bias=make(experts, 2 * inter).float(), w2_bias=make(experts, hidden).float())

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return self.checkpoint(tmp_path)

    @classmethod
    def checkpoint(cls, tmp_path: Path) -> Path:
        """A checkpoint with experts in bfloat16, stacked as transformers stores them."""
        path = tmp_path / "checkpoint"
        path.mkdir()
        config = {key: value for key, value in cls.model.items() if key != "quantization_config"}
        (path / "config.json").write_text(json.dumps(config))
        made = cls.sixteen_bit()
        experts, hidden, _, _ = cls.sizes
        tensors = {"experts.gate_up_proj": made.w13, "experts.down_proj": made.w2}
        router = torch.randn(experts, hidden, generator=torch.Generator().manual_seed(7)).bfloat16()
        if made.w13_bias is not None and made.w2_bias is not None:
            tensors = {
                "experts.gate_up_proj": _in_turns(made.w13).mT,
                "experts.gate_up_proj_bias": _in_turns(made.w13_bias).bfloat16(),
                "experts.down_proj": made.w2.mT,
                "experts.down_proj_bias": made.w2_bias.bfloat16(),
                "router.weight": router,
                "router.bias": router[:, 0].clone(),
            }
        else:
            tensors["gate.weight"] = router
        save_file({f"{BLOCK}.{n}": t.contiguous() for n, t in tensors.items()}, path / "model.safetensors")
        return path

    def test_moe_run_quantises_what_it_loads(self, name: str, folder: Path, tmp_path: Path, capsys: Any) -> None:
        experts, hidden, _, top_k = self.sizes
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(9, hidden, generator=generator).bfloat16()
        topk_weights, topk_ids = torch.rand(9, experts, generator=generator).topk(top_k)
        inputs = {"hidden_states": x, "topk_weights": topk_weights, "topk_ids": topk_ids}
        save_file(inputs, tmp_path / "in.safetensors")
        out = tmp_path / "out.safetensors"
        arguments = ["--quantize", name, "--device", "cpu", "--input", str(tmp_path / "in.safetensors")]
        assert main(["run", str(folder), *arguments, "--output", str(out), "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["scheme"] == self.scheme
        assert name in report["format"]
        source = read_layer(Checkpoint.open(folder), quantize=name)
        weights = type(self).quantize(self.sixteen_bit(), name)
        assert (source.weight_key, source.activation_key) == (weights.weight_key, weights.activation_key)
        expected = expected_output(x, weights, source.config, topk_weights=topk_weights, topk_ids=topk_ids)
        expected.compare(load_file(out)["output"], name)

    def test_the_quantised_weights(self, name: str) -> None:
        """The rules of the reference, for both matrices, with biases and without a gate."""
        self.check_weights(name, torch.bfloat16)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
    def test_other_types(self, dtype: torch.dtype) -> None:
        self.check_weights(self.online[0].name, dtype)

    def check_weights(self, name: str, dtype: torch.dtype) -> None:
        keys = next(one for one in self.online if one.name == name)
        plain = self.sixteen_bit(bias=True)
        plain = replace(plain, w13=plain.w13.to(dtype), w2=plain.w2.to(dtype))
        rows = plain.w13.shape[1] // 2
        ungated = replace(plain, w13=plain.w13[:, :rows], w13_bias=None, w2_bias=None)
        for weights, gated in ((plain, True), (ungated, False)):
            found = type(self).quantize(weights, name)
            want = quantize_moe_weights(
                weights.w13,
                weights.w2,
                gated=gated,
                weight_key=keys.weight_key,
                activation_key=keys.activation_key,
                w13_bias=weights.w13_bias,
                w2_bias=weights.w2_bias,
            )
            assert _bits(found) == _bits(want)
            found.validate(self.layer(activation="silu" if gated else "silu_no_mul", has_bias=gated), values=True)

    def test_groups_and_rows_of_zeros(self, name: str) -> None:
        """They have a scale, values of 0 and a result: no 0/0."""
        plain = self.sixteen_bit(bias=False)
        plain.w13[0] = 0.0
        plain.w13[1, : plain.w13.shape[1] // 2] = 0.0
        plain.w2[2, :, :32] = 0.0
        plain.w2[3, 5] = 0.0
        found = type(self).quantize(plain, name)
        for label, parts in (("w13", 2), ("w2", 1)):
            assert found.weight_key is not None
            stored: Tensor = getattr(plain, label)
            values = dequantize_weight(
                getattr(found, label),
                getattr(found, f"{label}_scale"),
                found.weight_key,
                parts=parts,
                zero_point=getattr(found, f"{label}_zero_point"),
            )
            assert bool(values.isfinite().all())
            assert not bool(values[stored == 0].any())
        layer = FusedMoELayer.from_weights(self.scheme, replace(self.layer(), top_k=1), plain, quantize=name)
        x = torch.ones(3, self.sizes[1]).bfloat16()
        y = layer(x, topk_weights=torch.ones(3, 1), topk_ids=torch.tensor([[0], [1], [3]]))
        assert bool(y.isfinite().all())
        assert not bool(y[0].any())
        assert float(y[2, 5]) == 0.0

    def test_a_layer_from_tensors(self, name: str) -> None:
        experts, hidden, _, top_k = self.sizes
        config = self.layer(has_bias=True)
        layer = FusedMoELayer.from_weights(self.scheme, config, self.sixteen_bit(bias=True), quantize=name, copy=True)
        quantised = type(self).quantize(self.sixteen_bit(bias=True), name)
        generator = torch.Generator().manual_seed(2)
        x = torch.randn(5, hidden, generator=generator).bfloat16()
        topk_weights, topk_ids = torch.rand(5, experts, generator=generator).topk(top_k)

        def output(of: FusedMoELayer) -> Tensor:
            return of(x, topk_weights=topk_weights, topk_ids=topk_ids)

        assert torch.equal(output(layer), output(FusedMoELayer.from_weights(self.scheme, config, quantised)))
        # reloaded with 16-bit weights, which are quantised the same way, in place
        pointers = [tensor.data_ptr() for _, tensor in layer.weights.tensors()]
        layer.reload(self.sixteen_bit(seed=1, bias=True))
        assert [tensor.data_ptr() for _, tensor in layer.weights.tensors()] == pointers
        new = type(self).quantize(self.sixteen_bit(seed=1, bias=True), name)
        assert torch.equal(output(layer), output(FusedMoELayer.from_weights(self.scheme, config, new)))
        with pytest.raises(TensorError, match=f"{name} quantises 16-bit weights, these are"):
            type(self).quantize(quantised, name)

    def test_unknown_names(self) -> None:
        name = self.online[0].name
        with pytest.raises(ConfigError, match=f"quantize='int3' is unknown; installed: .*{name}"):
            type(self).quantize(self.sixteen_bit(), "int3")
        other = "int8" if self.scheme == "fp8" else "fp8"
        with pytest.raises(ConfigError, match=f"makes weights of the scheme {self.scheme}, not of {other}"):
            FusedMoELayer.from_weights(other, self.layer(), self.sixteen_bit(bias=False), quantize=name)

    def test_some_experts_only(self, name: str, folder: Path) -> None:
        """Expert parallelism: codes and scales of the experts that are here."""
        chosen = [3, 1, self.sizes[0] - 1]
        here = read_layer(Checkpoint.open(folder), quantize=name, experts=chosen).weights()
        whole = read_layer(Checkpoint.open(folder), quantize=name).weights()
        mine = {label: tensor[torch.tensor(chosen)] for label, tensor in whole.tensors()}
        assert _bits(here) == _bits(replace(whole, **mine))


def _in_turns(rows: Tensor) -> Tensor:
    """Gate rows, then up rows as gate 0, up 0, gate 1, ..."""
    gate, up = rows.chunk(2, dim=1)
    return torch.stack([gate, up], dim=2).reshape(rows.shape)


def _bits(weights: MoEWeights) -> dict[str, tuple[torch.dtype, tuple[int, ...], bytes]]:
    """Every tensor of the weights, comparable whatever its type."""
    return {
        name: (tensor.dtype, tuple(tensor.shape), tensor.contiguous().view(torch.uint8).numpy().tobytes())
        for name, tensor in weights.tensors()
    }
