"""Arguments of ``moe generate`` and ``moe perplexity``.

Nothing here imports torch, since help and shell completion load this module.
"""

from __future__ import annotations

import argparse

from moe_core import ConfigError
from moe_core.api.command_line import (
    Command,
    add_activation_key,
    add_backend,
    add_checkpoint,
    add_device,
    add_dtype,
    add_quantize,
    add_seed,
    check_file,
    check_folder,
    check_least,
    path,
    whole,
)

_GENERATE = """\
The model is transformers', its quantized experts are moe-core's, the rest is in 16 bits.  The times are those of a
second call: the first, on the same prompt, compiles kernels.  Prefill ends with the first new token; decode is the time
from there to the last.  Without --greedy the checkpoint's generation_config.json says how tokens are chosen."""

_PERPLEXITY = """\
exp of the mean negative log-likelihood of the tokens of --text, each predicted from those before it in its window.
Windows begin --stride tokens apart, at most --window; where they overlap, a token is scored in the first that has it.
The first token of the text is never scored; without overlap, neither is the first of any other window.  So two formats,
or two backends (--backend, --experts), compare on the same text."""

#: default of --window, unless the model's context is shorter
WINDOW = 2048


def _generate(parser: argparse.ArgumentParser) -> None:
    add_checkpoint(parser)
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="what the text begins with")
    parser.add_argument("--ids", action="store_true", help="the prompt is token ids (1 2 3): needs no tokenizer")
    parser.add_argument("--max-new-tokens", type=whole, default=64, metavar="N", help="at most (default: 64)")
    parser.add_argument("--batch", type=whole, default=1, metavar="N", help="continuations at once (default: 1)")
    parser.add_argument("--greedy", action="store_true", help="always the likeliest token")
    add_seed(parser, "of the tokens that are drawn (default: 0)")
    _model(parser)


def _perplexity(parser: argparse.ArgumentParser) -> None:
    add_checkpoint(parser)
    parser.add_argument("--text", required=True, type=path, metavar="FILE", help="a text in UTF-8")
    parser.add_argument("--ids", action="store_true", help="FILE holds token ids (1 2 3): needs no tokenizer")
    parser.add_argument(
        "--window", type=whole, metavar="N", help="tokens at once (default: 2048, or what the model takes)"
    )
    parser.add_argument("--stride", type=whole, metavar="N", help="from window to window (default: the window)")
    parser.add_argument("--max-tokens", type=whole, metavar="N", help="of the text, the first (default: all)")
    _model(parser)


def _model(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of model loading."""
    add_device(parser, "cpu, cuda, cuda:1 … or auto, over all GPUs (default: cuda if there is one)")
    add_dtype(parser)
    add_backend(parser)
    add_quantize(parser)
    add_activation_key(parser)
    parser.add_argument(
        "--experts",
        default="moe_core",
        metavar="NAME",
        help="eager, grouped_mm … : transformers loads and runs the experts by itself (default: moe_core)",
    )


def _check_generate(args: argparse.Namespace) -> None:
    check_least(args, max_new_tokens=1, batch=1)
    check_folder(args)


def check_windows(args: argparse.Namespace, longest: int | None = None) -> int:
    """Determine the window size from ``--window`` and ``--stride``.

    Args:
        args: Parsed arguments: ``window``, ``stride`` and ``max_tokens``, None where not given.
        longest: Maximum number of tokens of the model, None if unknown.

    Returns:
        Tokens per window.

    Raises:
        ConfigError: A number is too small, the window exceeds the model's maximum, or windows ``stride`` tokens apart
            would skip tokens.
    """
    check_least(args, window=2, stride=1, max_tokens=2)
    window: int = args.window or min(WINDOW, longest or WINDOW)
    if longest is not None and window > longest:
        raise ConfigError(f"--window {window}: the model takes {longest} tokens (max_position_embeddings)")
    if args.stride is not None and args.stride > window:
        default = "" if args.window is not None else " (the default)"
        raise ConfigError(
            f"--stride {args.stride}: expected --window {window}{default} or less; tokens between windows would not be "
            "scored"
        )
    return window


def _check_perplexity(args: argparse.Namespace) -> None:
    check_windows(args)
    check_file(args, "text")
    check_folder(args)


GENERATE = Command(
    "generate text with a whole model; show speed and memory",
    _generate,
    "moe_transformers.commands.generate:run",
    _GENERATE,
    _check_generate,
)
PERPLEXITY = Command(
    "measure how well a whole model predicts a text",
    _perplexity,
    "moe_transformers.commands.perplexity:run",
    _PERPLEXITY,
    _check_perplexity,
)
