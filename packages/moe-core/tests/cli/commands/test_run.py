from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from moe_core import MoEActivation, RoutingConfig, fused_moe_reference, load_layer, route
from moe_core.checkpoint import Checkpoint, ModelSettings, read_layer
from moe_core.cli.commands import run as command
from moe_core.errors import CheckpointWarning
from moe_core_checkpoints import TOP_K, E, K, layer_tensors, write
from safetensors.torch import load_file, save_file
from torch import Tensor

M = 5


def tokens(**changes: Any) -> dict[str, Tensor]:
    """Input tensors; ``changes`` replace, None removes."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(M, E, generator=generator)
    weights, ids = route(logits, top_k=TOP_K, config=RoutingConfig(routed_scaling_factor=2.0))
    found = {
        "hidden_states": torch.randn(M, K, generator=generator),
        "router_logits": logits,
        "topk_weights": weights,
        "topk_ids": ids.flip(1).contiguous(),
        "something_else": torch.zeros(3),
    } | changes
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def expected(folder: Path, layer: int, given: dict[str, Tensor], *, assume: bool = False) -> Tensor:
    source = read_layer(Checkpoint.open(folder), layer, dtype=torch.float32, settings=ModelSettings(assume=assume))
    weights, ids = given.get("topk_weights"), given.get("topk_ids")
    if weights is None or ids is None:
        weights, ids = route(given["router_logits"], top_k=TOP_K, config=RoutingConfig())
    x = given["hidden_states"].float()
    return fused_moe_reference(
        x, source.weights(), source.config, topk_weights=weights.float(), topk_ids=ids.long(), dtype=torch.float64
    ).float()


GIVEN = {
    "logits": {"topk_weights": None, "topk_ids": None},
    "the pair wins over logits": {},
    "int32": {"router_logits": None, "topk_ids": tokens()["topk_ids"].int()},
    "int64": {"router_logits": None, "topk_ids": tokens()["topk_ids"].long()},
    "uint8": {"router_logits": None, "topk_ids": tokens()["topk_ids"].to(torch.uint8)},
    "bf16 states": {"hidden_states": tokens()["hidden_states"].bfloat16()},
}


@pytest.mark.parametrize("layer", [1, 2])
@pytest.mark.parametrize("given", GIVEN)
def test_input_to_output(moe: Any, folder: Path, tmp_path: Path, layer: int, given: str) -> None:
    inputs = tokens(**GIVEN[given])
    save_file(inputs, tmp_path / "in.safetensors")
    out = tmp_path / "out.safetensors"
    arguments = ("--layer", layer, "--dtype", "fp32", "--input", tmp_path / "in.safetensors", "--output", out)
    result = moe("run", folder, *arguments)
    assert (result.code, result.err) == (0, "")
    written = load_file(out)
    assert list(written) == ["output"]
    assert written["output"].dtype is torch.float32
    # float32 sums of K = 32 and N = 16 terms, two products one after the other
    torch.testing.assert_close(written["output"], expected(folder, layer, inputs), rtol=1e-5, atol=1e-4)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint", "in.safetensors", "out.safetensors"]


def test_bf16_is_the_default_and_the_file_float32(moe: Any, folder: Path, tmp_path: Path) -> None:
    save_file(tokens(), tmp_path / "in.safetensors")
    out = tmp_path / "out.safetensors"
    result = moe("run", folder, "--input", tmp_path / "in.safetensors", "--output", out, "--json")
    assert result.data["dtype"] == "bfloat16"
    output = load_file(out)["output"]
    assert torch.equal(output, output.bfloat16().float())


def test_first_layer_with_moe_is_the_default(moe: Any, folder: Path) -> None:
    result = moe("run", folder, "--json", "--tokens", 3)
    data = result.data
    assert (data["layer"], data["prefix"], data["shape"]) == (1, "model.layers.1.mlp.experts", [3, K])
    assert (data["scheme"], data["format"], data["backend"]) == ("plain", "plain 16-bit", "plain")
    assert data["selection"]["chosen"] == "plain"
    assert data["output"] is None


def test_text_says_what_happened(moe: Any, folder: Path) -> None:
    out = moe("run", folder, "--layer", 2).out
    for part in (
        "layer 2 (model.layers.2.mlp.experts), plain 16-bit",
        "plain on cpu: plain",
        "32 tokens",
        "[32, 32]",
    ):
        assert part in out


def test_no_tokens(moe: Any, folder: Path, tmp_path: Path) -> None:
    result = moe("run", folder, "--tokens", 0, "--output", tmp_path / "o.safetensors")
    assert result.code == 0
    assert load_file(tmp_path / "o.safetensors")["output"].shape == (0, K)


def test_seed_decides_the_tokens(moe: Any, folder: Path) -> None:
    rms = [moe("run", folder, "--seed", seed, "--json").data["output_rms"] for seed in (1, 1, 2)]
    assert rms[0] == rms[1] != rms[2]


def test_output_replaces_a_file(moe: Any, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "o.safetensors"
    out.write_text("old")
    (tmp_path / "reader").hardlink_to(out)
    assert moe("run", folder, "--output", out).code == 0
    assert load_file(out)["output"].shape == (32, K)
    # whoever has the old file open goes on seeing all of it: it is replaced, never written into
    assert (tmp_path / "reader").read_text() == "old"


def test_random_tokens_are_routed_by_the_checkpoint(moe: Any, folder: Path) -> None:
    layer = load_layer(folder, layer=1, device="cpu")
    x = torch.randn(32, K, generator=torch.Generator().manual_seed(0)).bfloat16()
    rms = float(layer(x, router_logits=layer.router_logits(x)).float().square().mean().sqrt())
    assert moe("run", folder, "--json").data["output_rms"] == pytest.approx(rms, rel=1e-6)


def test_without_a_router(moe: Any, tmp_path: Path) -> None:
    tensors = {name: t for name, t in layer_tensors().items() if not name.endswith("gate.weight")}
    folder = write(tmp_path, tensors)
    result = moe("run", folder)
    assert (result.code, result.err) == (0, "")
    assert result.out.count("note: router logits are random: model.layers.0.mlp has no router weight") == 1
    data = moe("run", folder, "--json").data
    assert (data["random_router_logits"], data["routing"]) == (True, "random router logits")
    assert len(data["notes"]) == 1


@pytest.mark.parametrize(
    ("given", "routing"),
    [(None, "checkpoint router logits"), ("logits", "given router logits"), ("int64", "topk pair of --input")],
)
def test_says_where_the_routing_is_from(moe: Any, folder: Path, tmp_path: Path, given: str, routing: str) -> None:
    arguments = []
    if given is not None:
        save_file(tokens(**GIVEN[given]), tmp_path / "in.safetensors")
        arguments = ["--input", tmp_path / "in.safetensors"]
    data = moe("run", folder, *arguments, "--json").data
    assert (data["routing"], data["random_router_logits"], data["notes"]) == (routing, False, [])
    assert "note:" not in moe("run", folder, *arguments).out


def test_router_that_is_not_finite(moe: Any, tmp_path: Path) -> None:
    tensors = layer_tensors()
    tensors["model.layers.0.mlp.gate.weight"][1, 3] = float("nan")
    folder = write(tmp_path / "c", tensors)
    refuses(moe, tmp_path, folder, parts=("model.layers.0.mlp.gate.weight holds NaN or Inf",))


@pytest.mark.parametrize("given", ["logits", "int64"])
def test_unknown_family_runs_with_a_note(moe: Any, tmp_path: Path, given: str) -> None:
    folder = write(tmp_path / "c", layer_tensors(), model_type="new")
    inputs = tokens(**GIVEN[given])
    save_file(inputs, tmp_path / "in.safetensors")
    files = ("--input", tmp_path / "in.safetensors", "--output", tmp_path / "o.safetensors")
    moe.refuses("run", folder, *files, parts=("model_type 'new' is not known",))
    result = moe("run", folder, "--dtype", "fp32", "--assume", *files)
    assert (result.code, result.err) == (0, "")
    assert result.out.count("note: ") == 1
    assert "model_type 'new' is not known; routing is assumed to be softmax" in result.out
    assert "the activation is assumed to be silu" in result.out
    with pytest.warns(CheckpointWarning):
        wanted = expected(folder, 0, inputs, assume=True)
    torch.testing.assert_close(load_file(tmp_path / "o.safetensors")["output"], wanted, rtol=1e-5, atol=1e-4)
    note = moe("explain", folder, "--device", "cpu", "--assume").out
    assert "note: " in note
    assert "model_type 'new' is not known" in note
    (stated,) = moe("explain", folder, "--device", "cpu", "--assume", "--json").data["notes"]
    assert "routing is assumed to be softmax" in stated
    every = moe("explain", folder, "--device", "cpu", "--assume", "--all-layers")
    assert every.out.count("note: ") == every.out.count("model_type 'new' is not known") == 1
    data = moe("explain", folder, "--device", "cpu", "--assume", "--all-layers", "--json").data
    assert data["layers"][0]["notes"] == [stated]


def test_warns_of_what_is_not_finite(moe: Any, folder: Path, tmp_path: Path) -> None:
    x = tokens()["hidden_states"]
    x[1] = float("nan")
    save_file(tokens(hidden_states=x), tmp_path / "in.safetensors")
    result = moe("run", folder, "--input", tmp_path / "in.safetensors")
    assert result.code == 0
    assert f"warning: {K} values of the output are NaN or Inf" in result.out


# ------------------------------------------------------------------ what is refused, with nothing written

BAD_INPUTS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"hidden_states": None}, ("in.safetensors has no hidden_states [M, 32]", "router_logits")),
    ({"hidden_states": torch.zeros(M, K + 1)}, ("hidden_states has shape [5, 33], expected [M, 32]",)),
    ({"hidden_states": torch.zeros(M, K, 1)}, ("hidden_states has shape [5, 32, 1], expected [M, 32]",)),
    ({"hidden_states": torch.zeros(M, K, dtype=torch.int32)}, ("hidden_states has dtype torch.int32",)),
    ({"topk_ids": None}, ("topk_ids [5, 2] is missing, topk_weights is there",)),
    ({"topk_weights": None}, ("topk_weights [5, 2] is missing, topk_ids is there",)),
    ({"topk_ids": None, "topk_weights": None, "router_logits": None}, ("neither router_logits [5, 4] nor topk_ids",)),
    (
        {"topk_ids": None, "topk_weights": None, "router_logits": torch.zeros(M, E + 1)},
        ("router_logits has shape [5, 5], expected [5, 4]",),
    ),
    ({"topk_ids": torch.zeros(M, TOP_K)}, ("topk_ids has dtype torch.float32",)),
    ({"topk_weights": torch.zeros(M, TOP_K, dtype=torch.int32)}, ("topk_weights has dtype torch.int32",)),
    ({"topk_ids": torch.zeros(M, 3, dtype=torch.int64)}, ("topk_ids has shape [5, 3], expected [5, 2]",)),
    ({"topk_weights": torch.zeros(M - 1, TOP_K)}, ("topk_weights has shape [4, 2], expected [5, 2]",)),
]


def test_experts_per_token(moe: Any, tmp_path: Path) -> None:
    folder = write(tmp_path / "a", layer_tensors())
    assert "k=3" in moe("explain", folder, "--device", "cpu", "--top-k", "3").out
    save_file(tokens(**GIVEN["logits"]), tmp_path / "in.safetensors")
    output = tmp_path / "o.safetensors"
    moe("run", folder, "--dtype", "fp32", "--top-k", "3", "--input", tmp_path / "in.safetensors", "--output", output)
    layer = load_layer(folder, device="cpu", dtype=torch.float32, top_k=3)
    given = load_file(tmp_path / "in.safetensors")
    wanted = layer(given["hidden_states"], router_logits=given["router_logits"])
    torch.testing.assert_close(load_file(output)["output"], wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("changes", "parts"), BAD_INPUTS)
def test_bad_input(moe: Any, folder: Path, tmp_path: Path, changes: dict[str, Any], parts: tuple[str, ...]) -> None:
    save_file(tokens(**changes), tmp_path / "in.safetensors")
    refuses(moe, tmp_path, folder, "--input", tmp_path / "in.safetensors", parts=parts)


@pytest.mark.parametrize("value", [-1, E, 2**31 + 1, -(2**63)])
def test_ids_out_of_range(moe: Any, folder: Path, tmp_path: Path, value: int) -> None:
    ids = tokens()["topk_ids"].long()
    ids[2, 1] = ids[4, 0] = value
    save_file(tokens(topk_ids=ids), tmp_path / "in.safetensors")
    parts = (f"topk_ids[2, 1] is {value}, expected 0..3 (2 of 10 are not)",)
    refuses(moe, tmp_path, folder, "--input", tmp_path / "in.safetensors", parts=parts)


NOT_FINITE = [
    ("topk_weights", "nan", "a finite weight"),
    ("topk_weights", "inf", "a finite weight"),
    ("topk_weights", "-inf", "a finite weight"),
    ("router_logits", "nan", "a number, or -inf for an expert that the token shall not use"),
    ("router_logits", "inf", "a number, or -inf for an expert that the token shall not use"),
]


@pytest.mark.parametrize(("name", "value", "wanted"), NOT_FINITE)
def test_routing_that_is_not_finite(moe: Any, folder: Path, tmp_path: Path, name: str, value: str, wanted: str) -> None:
    """The output may show nothing of it, and the reference is routed alike."""
    given = tokens(**({} if name == "topk_weights" else GIVEN["logits"]))
    given[name][2, 1] = given[name][4, 0] = float(value)
    save_file(given, tmp_path / "in.safetensors")
    parts = (f"{name}[2, 1] is {value}, expected {wanted} (2 of {given[name].numel()} are not)",)
    refuses(moe, tmp_path, folder, "--input", tmp_path / "in.safetensors", parts=parts)


def test_a_logit_may_leave_an_expert_out(moe: Any, folder: Path, tmp_path: Path) -> None:
    given = tokens(**GIVEN["logits"])
    given["router_logits"][2, 1] = float("-inf")
    save_file(given, tmp_path / "in.safetensors")
    assert moe("run", folder, "--check", "--input", tmp_path / "in.safetensors").code == 0


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_only_finite_states_are_compared(moe: Any, folder: Path, tmp_path: Path, value: str) -> None:
    x = tokens()["hidden_states"]
    x[3, 7] = float(value)
    save_file(tokens(hidden_states=x), tmp_path / "in.safetensors")
    wanted = "a finite value, since --check compares the output with the reference's"
    parts = (f"hidden_states[3, 7] is {value}, expected {wanted} (1 of {M * K} are not)",)
    refuses(moe, tmp_path, folder, "--check", "--input", tmp_path / "in.safetensors", parts=parts)


def test_broken_input_files(moe: Any, folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "in.safetensors"
    refuses(moe, tmp_path, folder, "--input", file, parts=("in.safetensors can't be read: No such file",))
    save_file(tokens(), file)
    file.write_bytes(file.read_bytes()[:-5])
    refuses(moe, tmp_path, folder, "--input", file, parts=("in.safetensors is truncated",))
    refuses(moe, tmp_path, folder, "--input", tmp_path, parts=("is not a regular file",))


def refuses(moe: Any, tmp_path: Path, folder: Path, *arguments: object, parts: tuple[str, ...]) -> None:
    before = sorted(str(p) for p in tmp_path.rglob("*"))
    moe.refuses("run", folder, *arguments, "--output", tmp_path / "out.safetensors", parts=parts)
    assert sorted(str(p) for p in tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (
            ("--backend", "gpu"),
            ("backend 'gpu' does not fit, and is never replaced", "needs sm90 or newer", "'plain' fits (-v: details)"),
        ),
        (("--backend", "nonsense"), ("no backend 'nonsense'", "auto, gpu, plain")),
        (("--layer", "0"), ("layer 0 has no MoE block; MoE layers: 1-2",)),
        (("--device", "sm90"), ("--device sm90: expected a device of this machine", "moe explain takes others")),
        (("--device", "cuda:63"), ("--device cuda:63: torch",)),
        (("--device", "meta"), ("--device meta: expected cpu, cuda or xpu",)),
        (("--tokens", "-1"), ("argument --tokens: expected 0 or more",)),
        (
            ("--tokens", "1000000000000"),
            ("--tokens 1000000000000: out of memory: they take 128000000000000 bytes, this machine",),
        ),
        (("--tokens", str(2**40)), ("out of memory: they take",)),
        (("--tokens", str(10**23)), (f"argument --tokens: expected 1099511627776 or less, got '{10**23}'",)),
        (("--seed", "9" * 20), ("argument --seed: expected 18446744073709551615 or less",)),
        (("--seed", str(-(2**63) - 1)), ("argument --seed: expected -9223372036854775808 or more",)),
    ],
)
def test_bad_arguments(
    moe: Any, folder: Path, tmp_path: Path, arguments: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    refuses(moe, tmp_path, folder, *arguments, parts=parts)


def test_memory_that_is_refused_is_said(
    moe: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes.")

    monkeypatch.setattr(torch, "randn", refuse)
    refuses(moe, tmp_path, folder, parts=("out of memory: torch was refused 99 bytes; try fewer tokens",))


def test_unknown_routing_needs_the_pair(moe: Any, tmp_path: Path) -> None:
    folder = write(tmp_path / "c", layer_tensors(), model_type="new")
    arguments = ("--routing", "per_call", "--activation", "silu")
    refuses(
        moe, tmp_path, folder, *arguments, parts=("left to each call: give topk_ids and topk_weights with --input",)
    )
    save_file(tokens(), tmp_path / "in.safetensors")
    assert moe("run", folder, *arguments, "--input", tmp_path / "in.safetensors").code == 0


def test_routing_and_activation_by_hand(moe: Any, tmp_path: Path) -> None:
    folder = write(tmp_path / "c", layer_tensors(), model_type="new")
    arguments = ("--routing", "sigmoid,routed_scaling_factor=2.0", "--activation", "gelu", "--dtype", "fp32")
    result = moe("run", folder, *arguments, "--output", tmp_path / "o.safetensors")
    assert (result.code, result.err) == (0, "")
    assert "note: " not in result.out
    layer = load_layer(
        folder,
        device="cpu",
        dtype=torch.float32,
        routing=RoutingConfig("sigmoid", renormalize=False, routed_scaling_factor=2.0),
        activation=MoEActivation.GELU,
    )
    x = torch.randn(32, K, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(load_file(tmp_path / "o.safetensors")["output"], layer(x), rtol=1e-5, atol=1e-4)
    moe.refuses("run", folder, "--routing", "softmax,x=1", "--activation", "silu", parts=("has 'x=1', expected",))


def test_output_that_cannot_be_written(moe: Any, folder: Path, tmp_path: Path) -> None:
    moe.refuses("run", folder, "--output", tmp_path / "no" / "o", parts=("the folder", "does not exist"))
    moe.refuses("run", folder, "--output", tmp_path, parts=("is a folder, expected a file to write",))


def test_the_checkpoint_is_never_overwritten(moe: Any, folder: Path) -> None:
    shard = next(folder.glob("*.safetensors"))
    before = shard.read_bytes()
    moe.refuses("run", folder, "--output", shard, parts=("is in the checkpoint folder",))
    assert shard.read_bytes() == before


def test_no_file_in_the_checkpoint_is_replaced(moe: Any, folder: Path, tmp_path: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "notes.txt").write_text("notes")
    # as download caches have it: the folder's file is a link
    (folder / "config.json").rename(tmp_path / "blob")
    (folder / "config.json").symlink_to(tmp_path / "blob")
    (tmp_path / "link").symlink_to(folder / "model.safetensors.index.json")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for out in (
        "checkpoint/config.json",
        "checkpoint/model.safetensors.index.json",
        "checkpoint/sub/notes.txt",
        "blob",
        "link",
        "checkpoint/../checkpoint/config.json",
    ):
        moe.refuses("run", folder, "--output", tmp_path / out, parts=("is in the checkpoint folder",))
        moe.refuses("bench", folder, "--output", tmp_path / out, parts=("is in the checkpoint folder",))
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert (folder / "config.json").is_symlink()


def test_the_input_is_never_replaced(moe: Any, folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "in.safetensors"
    save_file(tokens(), file)
    (tmp_path / "link").symlink_to(file)
    before = file.read_bytes()
    for out in (file, tmp_path / "link"):
        moe.refuses("run", folder, "--input", file, "--output", out, parts=("is the input",))
        moe.refuses("run", folder, "--input", tmp_path / "link", "--output", out, parts=("is the input",))
    assert file.read_bytes() == before


def test_only_regular_files_are_replaced(moe: Any, folder: Path, tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "null").symlink_to("/dev/null")
    before = sorted(tmp_path.rglob("*"))
    for name, part in (
        ("pipe", "is not a regular file"),
        ("/dev/null", "is not a regular file"),
        ("null", "is not a regular file"),
        ("loop", "can't be written"),
        ("a\0b", "can't be written"),
        ("a" * 300, "can't be written"),
    ):
        for command_ in ("run", "bench"):
            moe.refuses(command_, folder, "--output", tmp_path / name, parts=(part,))
    assert (tmp_path / "pipe").is_fifo()
    assert Path("/dev/null").is_char_device()
    assert sorted(tmp_path.rglob("*")) == before


def test_a_link_stays_and_its_target_is_replaced(moe: Any, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    target = tmp_path / "elsewhere" / "o.safetensors"
    link = tmp_path / "link"
    link.symlink_to(target)
    for _ in range(2):  # first the link leads nowhere yet
        assert moe("run", folder, "--output", link).code == 0
        assert link.is_symlink()
        assert load_file(target)["output"].shape == (32, K)
    assert [path.name for path in target.parent.iterdir()] == ["o.safetensors"]
    (tmp_path / "lost").symlink_to(tmp_path / "nowhere" / "o")
    moe.refuses("run", folder, "--output", tmp_path / "lost", parts=("nowhere does not exist",))


def test_a_failing_write_leaves_nothing(
    moe: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    out = tmp_path / "o.safetensors"
    out.write_text("old")
    monkeypatch.setattr(os, "fsync", full)
    moe.refuses("run", folder, "--output", out, parts=(f"{out} can't be written: No space left",))
    assert out.read_text() == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint", "o.safetensors"]


def test_a_fault_of_moe_is_owned(moe: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a command's own code raises is no fault of the checkpoint, and of no other package."""
    monkeypatch.setattr(command, "_apply", None)
    result = moe("run", folder)
    assert (result.code, result.out) == (2, "")
    assert "is not callable\nThis is a fault of moe, not of the input; MOE_TRACEBACK=1 shows where" in result.err


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (KeyboardInterrupt(), 130, "moe: interrupted"),
        (MemoryError(), 2, "out of memory"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), 2, "CUDA out of memory; try fewer tokens"),
        (RuntimeError("Storage size calculation overflowed with sizes=[9, 9]"), 2, "out of memory: the tensors are"),
        (RuntimeError("CUDA error: out of memory"), 2, "out of memory"),
        (
            RuntimeError("boom"),
            2,
            f"unexpected RuntimeError: boom\nIt comes from {__name__.partition('.')[0]}; MOE_TRACE",
        ),
        (RecursionError("deep"), 2, "unexpected RecursionError"),
    ],
)
def test_every_failure_is_a_paragraph(
    moe: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, text: str
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(command, "_apply", fail)
    result = moe("run", folder)
    assert result.code == code
    assert text in result.err
    assert result.out == ""


def test_traceback_on_request(moe: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_TRACEBACK", "1")
    with pytest.raises(Exception, match="layer 0 "):
        moe("run", folder, "--layer", "0")
