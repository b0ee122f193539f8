"""``moe generate`` and ``moe perplexity`` on tiny checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import transformers
from moe_kit.commands import Moe
from moe_transformers_models import VOCABULARY, qwen3, save_fp8


@pytest.fixture
def moe(capsys: pytest.CaptureFixture[str]) -> Iterator[Moe]:
    # its log goes to the stream that was stderr at first, which no test sees
    before = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()
    yield Moe(capsys)
    transformers.utils.logging.set_verbosity(before)


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An FP8 checkpoint without tokenizer."""
    return save_fp8(tmp_path_factory.mktemp("bare"), qwen3())


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One with a tokenizer, whose tokens are letters."""
    path = save_fp8(tmp_path_factory.mktemp("fp8"), qwen3())
    letter_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model in 16 bits, without tokenizer."""
    path = tmp_path_factory.mktemp("bf16")
    qwen3().save_pretrained(path)
    return path


def letter_tokenizer() -> transformers.PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {"<unk>": 0, "<eos>": 1} | {chr(code): code for code in range(32, VOCABULARY - 1)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>")


@pytest.fixture(scope="session")
def letters() -> Callable[[str], list[int]]:
    """The ids of a text of :func:`folder`."""
    return lambda text: [ord(letter) for letter in text]
