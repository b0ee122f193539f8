"""Tests of a scheme's quantization at load: by command line, from tensors, and on reload."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from moe_core.checkpoint import Checkpoint, read_layer
from moe_core.cli.main import main
from moe_core.errors import CheckpointError, TensorError
from moe_core.layer.layer import FusedMoELayer
from moe_core.reference.quantization import dequantize_weight, quantize_moe_weights
from moe_core.reference.tolerance import expected_output
from moe_core.selection.registry import registry
from moe_core.spec.config import FusedMoEConfig
from moe_core.spec.weights import MoEWeights
from moe_core.testing.checkpoints import CONFIG, write
from moe_core.testing.harness import same_bits
from torch import Tensor

from moe_kit.ensure import ensure

BLOCK = "model.layers.0.mlp"
#: experts, hidden size, intermediate size (not a multiple of the group size 128) and top-k
EXPERTS, HIDDEN, INTERMEDIATE, TOP_K = 6, 256, 192, 2
#: config.json entries that differ in gpt-oss
GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss",
    "intermediate_size": INTERMEDIATE,
    "moe_intermediate_size": None,
    "num_local_experts": EXPERTS,
    "swiglu_limit": 7.0,
}


class OnlineTests:
    """Base of a test class for quantization at load: set ``scheme``.

    :attr:`moe_core.Scheme.online` lists what the scheme quantizes 16-bit experts to.

    Attributes:
        scheme: Name of the scheme.
        gpt_oss: Whether experts are stored as in gpt-oss: transposed, gate and up interleaved, with biases. Otherwise
            they are stored as in Qwen3-MoE.
    """

    scheme: ClassVar[str]
    gpt_oss: ClassVar[bool] = False

    @classmethod
    def names(cls) -> list[str]:
        """Names of what the scheme quantizes 16-bit experts to."""
        return [online.name for online in registry().scheme(cls.scheme).online]

    @classmethod
    def pytest_generate_tests(cls, metafunc: pytest.Metafunc) -> None:
        """Parametrize tests by name (pytest hook)."""
        if "name" in metafunc.fixturenames:
            metafunc.parametrize("name", cls.names())

    @pytest.fixture(autouse=True)
    def no_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make commands and layers choose the CPU automatically."""
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    @classmethod
    def quantize(cls, weights: MoEWeights, name: str) -> MoEWeights:
        """Quantize canonical 16-bit weights.

        Args:
            weights: Canonical 16-bit weights.
            name: One of :meth:`names`.

        Returns:
            The quantized weights.
        """
        return registry().online(name).quantize(weights)

    @classmethod
    def layer(cls, **changes: Any) -> FusedMoEConfig:
        """Return the configuration of the suite's layer.

        Args:
            **changes: Fields to replace.

        Returns:
            The configuration.
        """
        return FusedMoEConfig(EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, **changes)

    @classmethod
    def sixteen_bit(cls, seed: int = 0, *, bias: bool | None = None) -> MoEWeights:
        """Return canonical 16-bit weights.

        Args:
            seed: Seed of the random generator.
            bias: Whether to add biases; None: only if the model has them.

        Returns:
            The weights.
        """
        generator = torch.Generator().manual_seed(seed)

        def make(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).mul(float(shape[-1]) ** -0.5).bfloat16()

        bare = MoEWeights(
            weight_key=None,
            activation_key=None,
            w13=make(EXPERTS, 2 * INTERMEDIATE, HIDDEN),
            w2=make(EXPERTS, HIDDEN, INTERMEDIATE),
        )
        if not (cls.gpt_oss if bias is None else bias):
            return bare
        return replace(bare, w13_bias=make(EXPERTS, 2 * INTERMEDIATE).float(), w2_bias=make(EXPERTS, HIDDEN).float())

    @classmethod
    def checkpoint(cls, folder: Path, quantization: dict[str, Any] | None = None) -> Path:
        """Write a checkpoint of bfloat16 experts, stacked as transformers stores them.

        Args:
            folder: Parent of the checkpoint folder.
            quantization: ``quantization_config`` of config.json; it does not affect the tensors.

        Returns:
            The checkpoint folder.
        """
        made = cls.sixteen_bit()
        tensors = {"experts.gate_up_proj": made.w13, "experts.down_proj": made.w2}
        router = torch.randn(EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(7)).bfloat16()
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
        sizes = {
            "num_experts": EXPERTS,
            "num_experts_per_tok": TOP_K,
            "hidden_size": HIDDEN,
            "moe_intermediate_size": INTERMEDIATE,
        }
        config = {**CONFIG, **sizes, **(GPT_OSS if cls.gpt_oss else {})}
        named = {f"{BLOCK}.{name}": tensor.contiguous() for name, tensor in tensors.items()}
        return write(folder / "checkpoint", named, config, quantization_config=quantization)

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        """Checkpoint folder with 16-bit experts."""
        return self.checkpoint(tmp_path)

    def test_moe_run_quantizes_what_it_loads(self, name: str, folder: Path, tmp_path: Path, capsys: Any) -> None:
        """Check that the output is the quantized layer's and that the report states what was made."""
        from safetensors.torch import load_file, save_file

        generator = torch.Generator().manual_seed(1)
        x = torch.randn(9, HIDDEN, generator=generator).bfloat16()
        topk_weights, topk_ids = torch.rand(9, EXPERTS, generator=generator).topk(TOP_K)
        inputs = {"hidden_states": x, "topk_weights": topk_weights, "topk_ids": topk_ids}
        save_file(inputs, tmp_path / "in.safetensors")
        out = tmp_path / "out.safetensors"
        arguments = ["--quantize", name, "--device", "cpu", "--input", str(tmp_path / "in.safetensors")]
        code = main(["run", str(folder), *arguments, "--output", str(out), "--json"])
        printed = capsys.readouterr()
        ensure(code == 0, printed.err)
        report = json.loads(printed.out)
        ensure(report["scheme"] == self.scheme and name in report["format"], report)
        source = read_layer(Checkpoint.open(folder), quantize=name)
        weights = self.quantize(self.sixteen_bit(), name)
        keys = (source.weight_key, source.activation_key), (weights.weight_key, weights.activation_key)
        ensure(keys[0] == keys[1], keys)
        expected = expected_output(x, weights, source.config, topk_weights=topk_weights, topk_ids=topk_ids)
        expected.compare(load_file(out)["output"], name)

    def test_the_quantized_weights(self, name: str) -> None:
        """Check the rules of the reference for both matrices, with biases and without a gate."""
        self.check_weights(name, torch.bfloat16)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
    def test_other_types(self, dtype: torch.dtype) -> None:
        """Check experts in float16 and float32."""
        self.check_weights(self.names()[0], dtype)

    def check_weights(self, name: str, dtype: torch.dtype) -> None:
        """Check that the scheme quantizes weights to the same bits as the reference.

        Args:
            name: One of :meth:`names`.
            dtype: Dtype of the weights.
        """
        keys = registry().online(name)
        plain = self.sixteen_bit(bias=True)
        plain = replace(plain, w13=plain.w13.to(dtype), w2=plain.w2.to(dtype))
        ungated = replace(plain, w13=plain.w13[:, :INTERMEDIATE], w13_bias=None, w2_bias=None)
        for weights, gated in ((plain, True), (ungated, False)):
            found = self.quantize(weights, name)
            expected = quantize_moe_weights(
                weights.w13,
                weights.w2,
                gated=gated,
                weight_key=keys.weight_key,
                activation_key=keys.activation_key,
                w13_bias=weights.w13_bias,
                w2_bias=weights.w2_bias,
            )
            _ensure_same(found, expected)
            found.validate(self.layer(activation="silu" if gated else "silu_no_mul", has_bias=gated), values=True)

    def test_groups_and_rows_of_zeros(self, name: str) -> None:
        """Check that zeros have a scale, values of 0 and a finite result, without 0/0."""
        plain = self.sixteen_bit(bias=False)
        plain.w13[0] = 0.0
        plain.w13[1, :INTERMEDIATE] = 0.0
        plain.w2[2, :, :32] = 0.0
        plain.w2[3, 5] = 0.0
        found = self.quantize(plain, name)
        for label, parts in (("w13", 2), ("w2", 1)):
            values = dequantize_weight(
                getattr(found, label),
                getattr(found, f"{label}_scale"),
                registry().online(name).weight_key,
                parts=parts,
                zero_point=getattr(found, f"{label}_zero_point"),
            )
            ensure(bool(values.isfinite().all()), f"{label} of zeros is not finite")
            ensure(not bool(values[getattr(plain, label) == 0].any()), f"zeros of {label} have values")
        layer = FusedMoELayer.from_weights(self.scheme, replace(self.layer(), top_k=1), plain, quantize=name)
        x = torch.ones(3, HIDDEN).bfloat16()
        y = layer(x, topk_weights=torch.ones(3, 1), topk_ids=torch.tensor([[0], [1], [3]]))
        ensure(bool(y.isfinite().all()), "zeros have a result that is not finite")
        ensure(not bool(y[0].any()), "an expert of zeros has a result")
        ensure(float(y[2, 5]) == 0.0, "a row of zeros has a result")

    def test_a_layer_from_tensors(self, name: str) -> None:
        """Check that the layer equals a prequantized one and that reloading quantizes in place."""
        config = self.layer(has_bias=True)
        layer = FusedMoELayer.from_weights(self.scheme, config, self.sixteen_bit(bias=True), quantize=name, copy=True)
        quantized = self.quantize(self.sixteen_bit(bias=True), name)
        generator = torch.Generator().manual_seed(2)
        x = torch.randn(5, HIDDEN, generator=generator).bfloat16()
        topk_weights, topk_ids = torch.rand(5, EXPERTS, generator=generator).topk(TOP_K)

        def ensure_same(weights: MoEWeights, what: str) -> None:
            outputs = [
                each(x, topk_weights=topk_weights, topk_ids=topk_ids)
                for each in (layer, FusedMoELayer.from_weights(self.scheme, config, weights))
            ]
            ensure(same_bits(*outputs), what)

        ensure_same(quantized, "the layer is not that of the quantized weights")
        pointers = [tensor.data_ptr() for _, tensor in layer.weights.tensors()]
        layer.reload(self.sixteen_bit(seed=1, bias=True))
        ensure([tensor.data_ptr() for _, tensor in layer.weights.tensors()] == pointers, "reloading moved a tensor")
        new = self.quantize(self.sixteen_bit(seed=1, bias=True), name)
        ensure_same(new, "reloaded, the layer is not that of the new weights")
        with pytest.raises(TensorError, match=f"{name}"):
            self.quantize(quantized, name)

    def test_some_experts_only(self, name: str, folder: Path) -> None:
        """Check expert parallelism: codes and scales are those of the selected experts."""
        chosen = [3, 1, EXPERTS - 1]
        here = read_layer(Checkpoint.open(folder), quantize=name, experts=chosen).weights()
        whole = read_layer(Checkpoint.open(folder), quantize=name).weights()
        mine: dict[str, Any] = {label: tensor[torch.tensor(chosen)] for label, tensor in whole.tensors()}
        _ensure_same(here, replace(whole, **mine))

    def test_16_bit_experts_are_refused_where_the_config_says_otherwise(self, tmp_path: Path) -> None:
        """Check that the scheme rejects weights without scales, whatever config.json states."""
        spec = registry().scheme(self.scheme)
        if spec.quickstart is None:
            pytest.skip("the scheme writes no checkpoint, whose config would say so")
        spec.write_quickstart(tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        folder = self.checkpoint(tmp_path, config["quantization_config"])
        with pytest.raises(CheckpointError, match="quantize|BF16"):
            read_layer(Checkpoint.open(folder)).weights()


def _in_turns(rows: Tensor) -> Tensor:
    """Interleave gate rows and up rows as gate 0, up 0, gate 1, ..."""
    gate, up = rows.chunk(2, dim=1)
    return torch.stack([gate, up], dim=2).reshape(rows.shape)


def _ensure_same(found: MoEWeights, expected: MoEWeights) -> None:
    """Check that every tensor of the weights has the same bits."""
    tensors, wanted = dict(found.tensors()), dict(expected.tensors())
    ensure(tensors.keys() == wanted.keys(), f"{sorted(tensors)}, expected {sorted(wanted)}")
    other = [name for name, tensor in wanted.items() if not same_bits(tensors[name].contiguous(), tensor.contiguous())]
    ensure(not other, f"other bits in {', '.join(other)}")
