"""The README's examples run, on a small model in the place of the one that they name."""

from __future__ import annotations

from pathlib import Path

import pytest
import run_examples
from moe_transformers import MoeCoreExperts
from moe_transformers.quantize import QuantizedExperts
from moe_transformers_checkpoints import completed
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

PACKAGE = Path(__file__).parents[1]
FRONT_PAGE = PACKAGE.parents[1] / "README.md"
#: written by transformers' own quantizer
CASE = PACKAGE.parent / "moe-fp8" / "tests" / "data" / "qwen3_hf_fp8_block"


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    words = {word: number for number, word in enumerate(["[UNK]", "Mixture", "of", "experts"])}
    words |= {f"w{number}": number for number in range(len(words), vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder)


def test_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # a folder of that name is taken before the Hub is asked
    model = tmp_path / "Qwen" / "Qwen3-30B-A3B-FP8"
    model.parent.mkdir()
    quantized, _ = completed(CASE, tmp_path)
    quantized.rename(model)
    write_tokenizer(model, 128)
    monkeypatch.chdir(tmp_path)
    called = set()
    forward = MoeCoreExperts.forward

    def recorded(module: MoeCoreExperts, *arguments: Tensor) -> Tensor:
        called.add(type(module))
        return forward(module, *arguments)

    monkeypatch.setattr(MoeCoreExperts, "forward", recorded)
    run_examples.run(PACKAGE / "README.md")
    assert called == {MoeCoreExperts, QuantizedExperts}


def test_the_first_example_is_the_front_pages_too() -> None:
    front = FRONT_PAGE.read_text(encoding="utf-8")
    own = run_examples.BLOCK.search((PACKAGE / "README.md").read_text(encoding="utf-8"))
    first = run_examples.BLOCK.search(front)
    assert own is not None
    assert first is not None
    assert first.group(2) == own.group(2)
    assert front.index("moe quickstart") < first.start()
