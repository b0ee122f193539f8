"""moe explain: what people read of it, memory, all layers of a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from moe_core import Requirement, kFp8DynamicTokenSym, kFp8StaticChannelSym
from moe_core_checkpoints import E, K, N, PlainFormat, PlainLayout, layer_tensors, write
from moe_core_toys import GpuToyExperts, ToyExperts

SHAPE = ("--scheme", "plain", "--shape", "8,2,64,32")


def lines(text: str) -> list[str]:
    return text.splitlines()


def test_the_verdict_and_what_matters(moe: Any) -> None:
    out = lines(moe("explain", *SHAPE, "--device", "cpu").out)
    assert out[:5] == [
        "plain on cpu: plain",
        "  layer        E=8 k=2 K=64 N=32 silu bfloat16",
        "  weights      16-bit",
        "  activations  16-bit",
        "  chosen       ToyExperts: not tested on hardware",
    ]
    # a GPU's backend is no news on a CPU
    assert "gpu" not in moe("explain", *SHAPE, "--device", "cpu").out
    assert out[-1] == "-v: every backend with every reason"


def test_everything_on_request(moe: Any) -> None:
    out = moe("explain", *SHAPE, "--device", "cpu", "-v").out
    assert "  no gpu [GpuToyExperts]: needs sm90 or newer, device is cpu" in lines(out)
    assert "-> plain [ToyExperts]: fits" in out


def test_where_it_was_tested(moe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ToyExperts, "claims", replace(ToyExperts.claims, verified_on=("cpu", "NVIDIA H200 (sm90)")))
    assert "  chosen       ToyExperts: tested on cpu, NVIDIA H200 (sm90)" in lines(
        moe("explain", *SHAPE, "--device", "cpu").out
    )
    assert "tested on cpu, NVIDIA H200 (sm90); not on sm80" in moe("explain", *SHAPE, "--device", "sm80").out


def test_what_the_claims_say_in_words(moe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GpuToyExperts, "claims", replace(GpuToyExperts.claims, notes="products in bfloat16"))
    for more in ((), ("-v",)):
        assert "  note         products in bfloat16" in lines(moe("explain", *SHAPE, "--device", "sm90", *more).out)
    assert "products in bfloat16" not in moe("explain", *SHAPE, "--device", "cpu").out
    data = moe("explain", *SHAPE, "--device", "sm90", "--json").data
    (chosen,) = (c for c in data["candidates"] if c["experts"] == data["experts"])
    assert (chosen["fits"], chosen["backend"], chosen["claims_notes"]) == (True, "gpu", "products in bfloat16")


def test_json_has_what_the_text_says_of_the_layer(moe: Any) -> None:
    shape = ("--scheme", "plain", "--shape", "8,2,64,32", "--device", "cpu", "--bias", "--activation-format", "batched")
    data = moe("explain", *shape, "--json").data
    assert (data["num_experts"], data["local_experts"], data["has_bias"]) == (8, 8, True)
    assert data["activation_format"] == "batched"
    assert data["experts"].endswith(":BatchedToyExperts")


def test_what_was_passed_over(moe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    needs = (Requirement("nothing_here", "nothing"),)
    monkeypatch.setattr(GpuToyExperts, "claims", replace(GpuToyExperts.claims, requires=needs))
    out = lines(moe("explain", *SHAPE, "--device", "sm90").out)
    assert "  passed over  gpu: needs nothing, which is not installed (pip install 'nothing')" in out
    assert not any("passed over" in line for line in lines(moe("explain", *SHAPE, "--device", "sm80").out))


def test_where_nothing_fits_the_closest_is_shown(moe: Any) -> None:
    result = moe("explain", *SHAPE, "--backend", "gpu", "--device", "cpu")
    assert result.code == 2
    assert lines(result.out)[0] == "plain on cpu: no backend fits (asked for gpu)"
    assert "  closest      gpu: needs sm90 or newer, device is cpu" in lines(result.out)
    assert "memory" not in result.out


def test_memory(moe: Any) -> None:
    data = moe("explain", *SHAPE, "--device", "cpu", "--tokens", 7, "--json").data["memory"]
    weights = 8 * (2 * 32 * 64 + 64 * 32) * 2
    assert (data["weights"], data["num_tokens"], data["exact"]) == (weights, 7, True)
    assert data["load_peak"] >= weights
    assert f"weights {weights / 1024:.1f} KiB, up to" in moe("explain", *SHAPE, "--device", "cpu").out


def test_the_batched_format(moe: Any) -> None:
    out = moe("explain", *SHAPE, "--device", "cpu", "--activation-format", "batched").out
    assert "  layer        E=8 k=2 K=64 N=32 silu bfloat16 batched" in lines(out)
    assert "BatchedToyExperts" in out


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--tokens", "0"), "argument --tokens: expected 1 or more"),
        (("--all-layers",), "--all-layers is for a checkpoint folder"),
        (("--layer", "1"), "--layer needs a checkpoint folder"),
        (("--stack", "talker"), "--stack needs a checkpoint folder"),
        (("--routing", "softmax"), "--routing needs a checkpoint folder"),
        (("--assume",), "--assume needs a checkpoint folder"),
        (("--top-k", "2"), "--top-k needs a checkpoint folder"),
    ],
)
def test_refuses(moe: Any, arguments: tuple[str, ...], part: str) -> None:
    moe.refuses("explain", *SHAPE, *arguments, parts=(part,))


def test_a_folder_and_a_shape(moe: Any, folder: Path) -> None:
    moe.refuses("explain", folder, *SHAPE, parts=("combined with --scheme and --shape",))


# ------------------------------------------------------------------ all layers


def test_all_layers(moe: Any, folder: Path) -> None:
    result = moe("explain", folder, "--all-layers", "--device", "cpu")
    assert (result.code, result.err) == (0, "")
    out = lines(result.out)
    assert out[0] == f"{folder}: 2 MoE layers"
    assert out[3].split() == ["1-2", "plain", "plain", "12.0", "KiB", "24.0", "KiB"]
    assert "layers 1-2, plain 16-bit: plain on cpu: plain" in out
    data = moe("explain", folder, "--all-layers", "--device", "cpu", "--json").data
    each = E * 3 * N * K * 2
    assert [layer["layer"] for layer in data["layers"]] == [1, 2]
    assert [layer["memory"]["weights"] for layer in data["layers"]] == [each, each]
    assert data["layers"][0]["selection"]["chosen"] == "plain"
    assert data["total"]["weights"] == 2 * each
    assert data["total"]["load_peak"] == each + data["layers"][0]["memory"]["load_peak"]


def test_layers_that_differ_have_rows_of_their_own(moe: Any, tmp_path: Path) -> None:
    tensors = {name: tensor for index in (0, 1, 2) for name, tensor in layer_tensors(index).items()}
    tensors.pop("model.layers.1.mlp.experts.3.up_proj.weight")
    folder = write(tmp_path / "c", tensors)
    result = moe("explain", folder, "--all-layers", "--device", "cpu")
    assert result.code == 2
    assert result.err == "moe explain: 1 of 3 layers can't be run\n"
    rows = [line.split()[:3] for line in lines(result.out)[3:5]]
    assert rows == [["0,", "2", "plain"], ["1", "not", "read"]]
    assert "layer 1: model.layers.1.mlp.experts.3.up_proj.weight is missing" in result.out
    layers = moe("explain", folder, "--all-layers", "--device", "cpu", "--json").data["layers"]
    assert "is missing" in layers[1]["fault"]


def test_all_layers_that_no_backend_fits(moe: Any, folder: Path) -> None:
    result = moe("explain", folder, "--all-layers", "--device", "cpu", "--backend", "gpu")
    assert result.code == 2
    assert "none" in lines(result.out)[3]
    assert "  closest      gpu: needs sm90 or newer, device is cpu" in lines(result.out)


def test_all_layers_of_a_dense_model(moe: Any, tmp_path: Path) -> None:
    tensors = {name: t for name, t in layer_tensors().items() if "experts" not in name}
    moe.refuses("explain", write(tmp_path / "c", tensors), "--all-layers", parts=("no layer has MoE experts",))
    moe.refuses("explain", tmp_path / "c", "--all-layers", "--layer", 0, parts=("without --layer",))


# ------------------------------------------------------------------ errors and warnings


def test_what_was_tried_on_request(moe: Any, folder: Path) -> None:
    short, long = (moe("run", folder, "--backend", "gpu", "--device", "cpu", *extra).err for extra in ((), ("-v",)))
    assert short == (
        "moe run: plain: backend 'gpu' does not fit, and is never replaced: needs sm90 or newer, device is cpu; "
        "'plain' fits (-v: details)\n"
    )
    assert "  ok plain [ToyExperts]: fits; not tested on hardware" in lines(long)


def test_a_loop_on_the_host_is_told(moe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ToyExperts, "claims", replace(ToyExperts.claims, cuda_graph=False))
    out = lines(moe("explain", *SHAPE, "--device", "sm80").out)
    assert "  warning      no GPU kernel fits; plain is a loop driven by the host" in out
    assert not any("warning" in line for line in lines(moe("explain", *SHAPE, "--device", "cpu").out))


def test_warnings_are_lines(moe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import warnings

    from moe_core.cli.commands import doctor

    def warn(_: object) -> int:
        warnings.simplefilter("always")
        warnings.warn("something\x1b[2K is left out", UserWarning, stacklevel=1)
        return 0

    monkeypatch.setattr(doctor, "run", warn)
    assert moe("doctor").err == "moe: warning: something\\x1b[2K is left out\n"


@pytest.mark.parametrize("command", [("explain",), ("explain", "--all-layers"), ("bench",)], ids=" ".join)
@pytest.mark.parametrize("option", [("--weight-key", "kMxfp8Static"), ("--bias",)], ids=lambda option: option[0])
def test_what_a_checkpoint_says_by_itself(moe: Any, command: tuple[str, ...], option: tuple[str, ...]) -> None:
    moe.refuses(*command, "somewhere", *option, parts=(f"{option[0]} describes a layer of --scheme and --shape",))
    moe.refuses(*command, "somewhere", "--scheme", "plain", parts=("combined with --scheme and --shape",))


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("more", [(), ("--all-layers",)])
def test_explains_two_levels_of_scales(
    moe: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, which: int, more: tuple[str, ...]
) -> None:
    base = (kFp8StaticChannelSym, kFp8DynamicTokenSym)[which]
    keys = tuple(replace(base, scale2=base.scale) if at == which else None for at in range(2))
    monkeypatch.setattr(ToyExperts, "claims", replace(ToyExperts.claims, keys=(keys,)))
    monkeypatch.setattr(PlainFormat, "resolve", lambda _, quantization, layer: PlainLayout(layer, *keys))
    result = moe("explain", folder, "--device", "cpu", *more)
    assert result.code == 0
    assert "second scale" in result.out
