"""moe generate.

What is compared with a model that the test runs itself, or names a backend, is run on the CPU of whatever machine: the
tokens of models in 16 bits depend on the order of sums.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import moe_transformers
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

PROMPT = "the quick"
ON_CPU = ("--device", "cpu")


def test_text_and_numbers(moe: Any, folder: Path, letters: Callable[[str], list[int]]) -> None:
    count = ("--max-new-tokens", 5, "--batch", 2)
    result = moe("generate", folder, "--prompt", PROMPT, *count, "--greedy", "--json", *ON_CPU)
    assert result.code == 0, result.err
    data = result.data
    with moe_transformers.loading():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="bfloat16")
    ids = torch.tensor([letters(PROMPT)])
    expected = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)[0, ids.shape[1] :].tolist()
    assert data["token_ids"] == [expected, expected]
    text = "".join(chr(token) for token in expected if 32 <= token < 127)
    assert data["text"] == [text, text]
    assert (data["batch"], data["prompt_tokens"], data["new_tokens"]) == (2, len(PROMPT), 5)
    assert data["experts"] == {"fp8 by torch": 2}
    assert (data["device"], data["dtype"]) == ("cpu", "bfloat16")
    assert data["prefill_tokens_per_second"] == pytest.approx(2 * len(PROMPT) / data["seconds_prefill"])
    assert data["decode_tokens_per_second"] == pytest.approx(2 * 4 / data["seconds_decode"])
    assert data["peak_memory"] > sum(tensor.nbytes for tensor in model.parameters())
    assert min(data["seconds_load"], data["seconds_first_call"], data["seconds_prefill"]) > 0


def test_text_for_people(moe: Any, folder: Path) -> None:
    result = moe("generate", folder, "--prompt", PROMPT, "--max-new-tokens", 3, *ON_CPU)
    assert result.code == 0, result.err
    assert result.err == ""
    _, _, numbers = result.out.rpartition("\n\n")
    lines = numbers.splitlines()
    assert lines[0].startswith("experts: fp8 by torch (2 layers); bfloat16 on cpu; loaded in ")
    assert lines[1].startswith("prefill: 1 x 9 tokens in ")
    assert lines[2].startswith("decode: 1 x 2 tokens in ")
    assert all(line.endswith("tokens/s)") for line in lines[1:])


def test_seeds(moe: Any, folder: Path) -> None:
    def tokens(*arguments: object) -> Any:
        return moe("generate", folder, "--prompt", PROMPT, "--max-new-tokens", 6, "--json", *arguments).data[
            "token_ids"
        ]

    # the checkpoint says nothing of sampling, so all of them are greedy
    assert tokens() == tokens("--seed", 1) == tokens("--greedy")
    config = folder / "generation_config.json"
    before = config.read_text()
    config.write_text(before.replace("{", '{"do_sample": true, ', 1))
    try:
        first, again, other = tokens(), tokens(), tokens("--seed", 1)
        assert tokens("--greedy") != first == again != other
    finally:
        config.write_text(before)


def test_token_ids_need_no_tokenizer(moe: Any, bare: Path, device: torch.device) -> None:
    data = moe("generate", bare, "--prompt", "5, 6 7", "--ids", "--max-new-tokens", 1, "--json").data
    assert torch.device(data["device"]).type == device.type
    assert (data["prompt_tokens"], data["new_tokens"], data["text"]) == (3, 1, None)
    assert data["decode_tokens_per_second"] is None
    out = moe("generate", bare, "--prompt", "5 6 7", "--ids", "--max-new-tokens", 1).out
    assert out.startswith(f"{data['token_ids'][0][0]}\n\n")


@pytest.mark.parametrize(
    ("arguments", "experts"),
    [
        ([], {"bfloat16 by transformers (grouped_mm)": 2}),
        (["--quantize", "fp8_per_channel"], {"fp8 by torch": 2}),
        (["--experts", "eager"], {"bfloat16 by transformers (eager)": 2}),
        (["--dtype", "fp32", "--quantize", "int8_per_channel", "--backend", "torch"], {"int8 by torch": 2}),
    ],
)
def test_experts_in_16_bits(moe: Any, plain: Path, arguments: list[str], experts: dict[str, int]) -> None:
    result = moe("generate", plain, "--prompt", "5 6 7", "--ids", "--max-new-tokens", 2, "--json", *ON_CPU, *arguments)
    assert result.code == 0, result.err
    assert result.data["experts"] == experts


def test_refused(moe: Any, bare: Path, folder: Path, tmp_path: Path) -> None:
    def refuses(*arguments: object, match: str) -> None:
        moe.refuses("generate", *arguments, match=match)

    refuses(bare, "--prompt", "x", match="tokenizer .*--ids")
    refuses(bare, "--prompt", "x", "--ids", match="--prompt .*'x'")
    refuses(bare, "--prompt", "5 128", "--ids", match="--prompt .*128")
    refuses(folder, "--prompt", "", match="--prompt")
    refuses(folder, "--prompt", "x", "--batch", 0, match="--batch 0")
    refuses(folder, "--prompt", "x", "--max-new-tokens", -1, match="--max-new-tokens -1")
    refuses(folder, "--prompt", "x", "--seed", 2**64, match="--seed")
    refuses(tmp_path / "nowhere", "--prompt", "x", match="nowhere")
    refuses(folder, "--prompt", "x", "--device", "cuda:9", match="--device cuda:9")
    refuses(folder, "--prompt", "x", "--backend", "tritom", match="tritom")
    refuses(folder, "--prompt", "x", "--experts", "nothing", match="nothing")
    refuses(folder, "--prompt", "x", "--experts", "eager", "--backend", "torch", match="experts")
    refuses(folder, match="required: --prompt")


def test_a_config_of_another_model_is_refused(moe: Any, bare: Path, tmp_path: Path) -> None:
    folder = tmp_path / "other"
    shutil.copytree(bare, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 2 * config["vocab_size"]}))
    moe.refuses("generate", folder, "--prompt", "5", "--ids", *ON_CPU, match="config.json")


@pytest.mark.parametrize("experts", ["moe_core", "eager"])
def test_experts_without_values_are_refused(moe: Any, plain: Path, tmp_path: Path, experts: str) -> None:
    """transformers gives them random ones."""
    folder = tmp_path / "short"
    shutil.copytree(plain, folder)
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if "layers.1.mlp.experts." not in name}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    options = ("--prompt", "5", "--ids", *ON_CPU, "--experts", experts)
    moe.refuses("generate", folder, *options, match="layer 1 " if experts == "moe_core" else "layers.1.mlp.exp")


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nsys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from moe_core.cli.main import main\nmain(['generate', '--help'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ})
    assert (done.returncode, done.stderr) == (0, "")
    assert "--max-new-tokens N" in done.stdout
