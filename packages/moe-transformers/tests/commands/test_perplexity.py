"""moe perplexity.

What is compared with a model that the test runs itself, or names a backend, is run on the CPU of whatever machine.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import moe_transformers
import pytest
import torch
from moe_transformers.commands.perplexity import windows
from transformers import AutoModelForCausalLM

TEXT = "the quick brown fox jumps over the lazy dog\n" * 2
ON_CPU = ("--device", "cpu")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.mark.parametrize(("window", "stride"), [(None, None), (32, None), (32, 8), (8, 1), (3, 2)])
def test_each_token_from_those_before_it(
    moe: Any, folder: Path, text: Path, letters: Callable[[str], list[int]], window: int | None, stride: int | None
) -> None:
    sizes = [word for name, size in (("--window", window), ("--stride", stride)) if size for word in (name, size)]
    result = moe("perplexity", folder, "--text", text, "--max-tokens", 50, "--json", *ON_CPU, *sizes)
    assert result.code == 0, result.err
    data = result.data
    with moe_transformers.loading():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="bfloat16")
    ids = torch.tensor(letters(TEXT)[:50])
    ids[ids < 32] = 0  # the end of a line is no letter
    window, stride = window or 50, stride or window or 50
    losses, scored = [], set()
    for begin in range(0, 50, stride):
        part = ids[begin : begin + window]
        with torch.no_grad():
            logits = model(part[None]).logits[0].double().log_softmax(-1)
        for place in range(1, len(part)):
            if begin + place not in scored:
                scored.add(begin + place)
                losses.append(-float(logits[place - 1, part[place]]))
    assert data["scored_tokens"] == len(losses)
    # log-probabilities are summed in float32 there
    assert data["negative_log_likelihood"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert data["perplexity"] == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-4)
    assert data["experts"] == {"fp8 by torch": 2}


@pytest.mark.parametrize("count", [2, 7, 10, 11, 64])
@pytest.mark.parametrize(("window", "stride"), [(2, 1), (4, 4), (5, 3), (10, 1), (64, 64)])
def test_windows_score_a_token_once(count: int, window: int, stride: int) -> None:
    spans = list(windows(count, window, stride))
    scored = [token for _, first, end in spans for token in range(first, end)]
    assert len(scored) == len(set(scored))
    # what begins a window has nothing before it there
    missing = set(range(count)) - set(scored)
    assert missing == ({0} if stride < window else set(range(0, count, stride)))
    assert all(0 <= begin < first < end <= min(begin + window, count) for begin, first, end in spans)


def test_formats_compare(moe: Any, plain: Path, text: Path, tmp_path: Path) -> None:
    ids = tmp_path / "ids.txt"
    ids.write_text(" ".join(str(token % 100) for token in range(7, 500, 13)))

    def perplexity(*arguments: str) -> float:
        result = moe("perplexity", plain, "--text", ids, "--ids", "--json", *arguments)
        assert result.code == 0, result.err
        found: float = result.data["perplexity"]
        return found

    exact = perplexity()
    assert perplexity("--experts", "eager") == pytest.approx(exact, rel=1e-2)
    assert 0 < abs(perplexity("--quantize", "fp8_per_channel") / exact - 1) < 0.1


def test_text_for_people(moe: Any, folder: Path, text: Path) -> None:
    lines = moe("perplexity", folder, "--text", text, "--window", 40, "--stride", 20, *ON_CPU).out.splitlines()
    assert lines[0].startswith("perplexity ")
    assert lines[0].endswith(
        f" of 87 tokens of {text} (windows of 40, 20 apart; every token but the first of the text)"
    )
    assert lines[1].startswith("experts: fp8 by torch (2 layers); ")
    assert lines[2].startswith("88 tokens in ")


@pytest.mark.parametrize(("window", "stride", "unscored"), [(32, 32, 2), (40, 8, 1), (64, 64, 1)])
def test_which_tokens_are_scored(moe: Any, folder: Path, text: Path, window: int, stride: int, unscored: int) -> None:
    sizes = ("--window", window, "--stride", stride, "--max-tokens", 50, "--json", *ON_CPU)
    data = moe("perplexity", folder, "--text", text, *sizes).data
    assert (data["scored_tokens"], data["skipped_tokens"]) == (50 - unscored, unscored)


@pytest.mark.parametrize(
    "arguments",
    [
        ["perplexity", "/nonexistent", "--text", "/dev/null"],
        ["perplexity", "/", "--text", "/nonexistent"],
        ["perplexity", "/", "--text", "/dev/null", "--stride", "4096"],
        ["perplexity", "/", "--text", "/dev/null", "--window", "8", "--stride", "9"],
        ["generate", "/nonexistent", "--prompt", "x"],
        ["generate", "/", "--prompt", "x", "--batch", "0"],
    ],
)
def test_refused_before_anything_heavy_is_imported(arguments: list[str]) -> None:
    code = f"import sys\nfrom moe_core.cli.main import main\nprint(main({arguments}))\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    ended, loaded = done.stdout.splitlines()
    assert (ended, done.stderr.count("\n")) == ("2", 1)
    assert not {"torch", "numpy", "transformers", "moe_transformers.version"} & set(loaded.split())


def test_refused(moe: Any, folder: Path, bare: Path, text: Path, tmp_path: Path) -> None:
    def refuses(path: Path, *arguments: object, match: str) -> None:
        moe.refuses("perplexity", path, *arguments, match=match)

    refuses(folder, "--text", tmp_path / "nowhere", match="nowhere")
    (tmp_path / "latin").write_bytes(b"caf\xe9 ")
    refuses(folder, "--text", tmp_path / "latin", match="UTF-8.* 3")
    (tmp_path / "one").write_text("x")
    refuses(folder, "--text", tmp_path / "one", match="1 token")
    refuses(bare, "--text", text, match="tokenizer .*--ids")
    refuses(folder, "--text", text, "--window", 1, match="--window 1")
    refuses(folder, "--text", text, "--stride", 0, match="--stride 0")
    refuses(folder, "--text", text, "--window", 8, "--stride", 9, match="--stride 9.*--window 8")
    # the model takes 128 tokens, which are the window where none is given
    refuses(folder, "--text", text, "--stride", 129, match="--stride 129.*--window 128")
    refuses(folder, "--text", text, "--stride", 4096, match="--stride 4096.*--window 2048")
    refuses(folder, "--text", text, "--window", 129, match="--window 129.* 128")


def test_a_model_that_gives_no_numbers(moe: Any, plain: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.functional, "cross_entropy", lambda *_, **__: torch.tensor(math.nan))
    (text.parent / "ids").write_text("1 2 3")
    result = moe("perplexity", plain, "--text", text.parent / "ids", "--ids", "--json")
    assert result.code == 1
    assert result.data["perplexity"] is None


HOSTILE = [
    {"hidden_size": "x"},
    {"hidden_size": None},
    {"num_attention_heads": 0},
    {"num_key_value_heads": 0},
    {"num_key_value_heads": 3},
    {"num_hidden_layers": -1},
    {"head_dim": 0},
    {"head_dim": 7},
    {"hidden_act": 5},
    {"rms_norm_eps": "x"},
    {"rope_parameters": 5},
    {"rope_parameters": {"rope_type": "nonsense"}},
    {"rope_parameters": {"rope_type": "default", "rope_theta": "x"}},
    {"vocab_size": "x"},
    {"vocab_size": 0},
    {"vocab_size": []},
    {"max_position_embeddings": "x"},
    {"max_position_embeddings": -5},
    {"max_position_embeddings": 0.5},
    {"sliding_window": "x", "use_sliding_window": True},
    {"layer_types": ["nonsense"]},
    {"attention_dropout": "x"},
    {"eos_token_id": "x"},
    {"eos_token_id": []},
    {"pad_token_id": {}},
    {"architectures": 5},
    {"model_type": 5},
    {"model_type": []},
    {"dtype": "nonsense"},
    {"use_cache": "x"},
]


@pytest.mark.parametrize("change", HOSTILE, ids=str)
@pytest.mark.parametrize("generate", [False, True])
def test_a_config_that_no_model_has_ends_in_a_sentence(
    moe: Any, plain: Path, tmp_path: Path, change: dict[str, Any], generate: bool
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(plain, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    (tmp_path / "ids").write_text("1 2 3 4")
    if generate:
        arguments = ["generate", folder, "--prompt", "1 2 3", "--ids", "--max-new-tokens", 2]
    else:
        arguments = ["perplexity", folder, "--text", tmp_path / "ids", "--ids"]
    # a raw exception would come through
    result = moe(*arguments, *ON_CPU)
    assert result.code in (0, 1, 2)
    assert (result.code == 2) == (f"moe {arguments[0]}: " in result.err), result.err
