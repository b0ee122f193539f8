"""``moe generate`` and ``moe perplexity`` on tiny checkpoints."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import transformers
from moe_core_cli.main import main
from moe_transformers_models import VOCABULARY, qwen3, save_fp8


@dataclass
class Result:
    code: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        return json.loads(self.out)


class Moe:
    """``moe(*arguments)`` runs a command in this process."""

    def __init__(self, capture: pytest.CaptureFixture[str]) -> None:
        self.capture = capture

    def __call__(self, *arguments: object) -> Result:
        self.capture.readouterr()
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as exit_:
            code = int(exit_.code or 0)
        out, err = self.capture.readouterr()
        return Result(code, out, err)

    def refuses(self, *arguments: object, match: str) -> None:
        """Exit code 2, nothing on stdout, one paragraph on stderr."""
        result = self(*arguments)
        assert (result.code, result.out) == (2, ""), result.err
        assert re.search(match, result.err), result.err
        assert result.err.count("\n") == 1


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
