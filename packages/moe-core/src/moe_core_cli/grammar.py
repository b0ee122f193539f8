"""What the commands take.  Nothing here imports torch."""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from moe_core_cli.parser import Paragraphs, Parser, meant, one_of, seconds, shown, whole

_ABOUT = "Quantised mixture-of-experts layers: what runs them, why, how exactly and how fast."

FORMATS = ("standard", "batched")
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}

_RUN = """\
The output is the routed experts' weighted sum [M, K], without shared experts.  --input is a safetensors file with
hidden_states [M, K] and either router_logits [M, E] or topk_ids [M, k] (integers) and topk_weights [M, k]; where both
are given, the top-k pair wins.  --output receives output [M, K] as float32, computed in --dtype.

--check compares the output with the float64 reference of the same weights and prints the error beside the tolerance,
which follows from what a sound implementation rounds.  Exit code 1 where the error is larger."""

_EXPLAIN = """\
The layer is one of a checkpoint folder, or described by --scheme and --shape.  Prints what was chosen, which preferred
backends were not and why, and the memory that the layer takes: weights as the backend lays them out, the most that is
allocated while they are converted, workspace of a call with --tokens tokens.  --all-layers does so for every MoE layer
of a checkpoint, with the total.  Exit code 2 where no backend fits."""

_BACKENDS = """\
A table for each scheme: backends in order of preference, GPUs, and whether a backend was tested on one or claims it.
--scheme S --backend B, or -v, prints everything that they claim."""

_BENCH = """\
The layer is one of a checkpoint folder, or described by --scheme and --shape (random weights).  The floor is the larger
of bytes over bandwidth (weights of the experts that have tokens, hidden states, output) and operations over the rate of
a dense product, both measured on this machine.  On a GPU calls are CUDA graphs over rotating inputs.
Times are medians, after as many calls as it takes until they get no faster; the spread is half the distance of the
quartiles."""


def build() -> argparse.ArgumentParser:
    """The parser of all commands."""
    return _build()[0]


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments of one command.  SystemExit, after a line on stderr, for what no command takes."""
    given = list(sys.argv[1:] if argv is None else argv)
    parser, commands = _build()
    command = next((text for text in given if not text.startswith("-")), None)
    if command is not None and command not in commands:
        parser.error(f"unknown command {shown(command)}{meant(command, commands)}")
    arguments, extras = parser.parse_known_args(given)
    if extras:
        commands[arguments.command].refuse(extras)
    return arguments


def _build() -> tuple[Parser, dict[str, Parser]]:
    listed = "\n".join(f"  {name:<10}  {summary}" for name, (summary, _, _) in _COMMANDS.items())
    parser = Parser(
        prog="moe",
        usage="moe COMMAND …",
        description=f"{_ABOUT}\n\ncommands:\n{listed}",
        epilog="moe COMMAND --help says what a command takes.  MOE_TRACEBACK=1 shows the traceback of an error.",
        formatter_class=Paragraphs,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version of moe-core and exit")
    commands = parser.add_subparsers(prog="moe", dest="command", required=True, metavar="COMMAND")
    # the list above says more than argparse's
    parser._action_groups = [group for group in parser._action_groups if commands not in group._group_actions]
    built = {}
    for name, (summary, description, add) in _COMMANDS.items():
        command = commands.add_parser(
            name,
            description=f"moe {name}: {summary}.\n\n{description}".rstrip(),
            formatter_class=Paragraphs,
        )
        add(command)
        command.add_argument("-v", "--verbose", action="store_true", help="everything: all candidates, all reasons")
        command.add_argument("--json", action="store_true", help="print JSON instead of text")
        built[name] = command
    return parser, built


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        print(f"moe-core {importlib.metadata.version('moe-core')}")
        parser.exit()


def _quickstart(parser: argparse.ArgumentParser) -> None:
    _scheme(parser, "default: the first that is installed")
    _device(parser, "cpu, cuda … (default: cuda if there is a GPU)")
    _backend(parser)
    _tokens(parser, 64, "default: 64")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="write the checkpoint there and keep it")


def _run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="DIR", type=Path, help="checkpoint folder: config.json and safetensors")
    _of_checkpoint(parser)
    _tokens(parser, 32, "random tokens without --input (default: 32)")
    parser.add_argument("--seed", type=whole, default=0, metavar="N", help="of the random tokens (default: 0)")
    _backend(parser)
    _device(parser, "cpu, cuda, cuda:1 … (default: cuda if there is a GPU)")
    parser.add_argument("--input", type=Path, metavar="F", help="safetensors file to read tokens from")
    parser.add_argument("--output", type=Path, metavar="F", help="safetensors file to write")
    parser.add_argument("--check", action="store_true", help="compare the output with the float64 reference")
    _dtype(parser)


def _explain(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="DIR", type=Path, nargs="?", help="checkpoint folder")
    _of_checkpoint(parser)
    parser.add_argument("--all-layers", action="store_true", help="every MoE layer of the checkpoint, and the total")
    _tokens(parser, 4096, "of one call, for its workspace (default: 4096)")
    _device(parser, "sm90, sm100, gfx950, cpu, h200 … (default: this machine's)")
    _backend(parser)
    _dtype(parser)
    _shape(parser)


def _backends(parser: argparse.ArgumentParser) -> None:
    _scheme(parser, "only this scheme's (default: all that are installed)")
    parser.add_argument("--backend", metavar="B", help="only this one, with all that it claims")


def _doctor(parser: argparse.ArgumentParser) -> None:
    """No arguments of its own."""


def _bench(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="DIR", type=Path, nargs="?", help="checkpoint folder")
    _of_checkpoint(parser)
    parser.add_argument("--tokens", default="1,8,32,128", metavar="M,M,…", help="token counts (default: 1,8,32,128)")
    parser.add_argument("--backend", metavar="B,B,…", help="backends by name (default: all that fit)")
    _device(parser, "cpu, cuda … (default: cuda if there is a GPU)")
    parser.add_argument("--budget", type=seconds, default=1.0, metavar="S", help="seconds per measurement (default: 1)")
    parser.add_argument("--output", type=Path, metavar="F.json", help="write the results there as well")
    parser.add_argument("--plot", type=Path, metavar="F.png", help="draw the results (needs matplotlib)")
    _dtype(parser)
    _shape(parser)


_COMMANDS: dict[str, tuple[str, str, Callable[[argparse.ArgumentParser], None]]] = {
    "quickstart": ("a small checkpoint written, loaded, explained, run and compared", "", _quickstart),
    "run": ("one MoE layer of a checkpoint folder on given or random tokens", _RUN, _run),
    "explain": ("which backend runs a layer and why, also for a GPU elsewhere", _EXPLAIN, _explain),
    "backends": ("every installed backend and what it claims", _BACKENDS, _backends),
    "doctor": ("versions, GPU, schemes, what is missing and how to add it", "", _doctor),
    "bench": ("a layer's time per token count, beside the machine's limits", _BENCH, _bench),
}

COMMANDS = tuple(_COMMANDS)


def _of_checkpoint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layer", type=whole, metavar="N", help="index of the layer (default: the first with MoE)")
    parser.add_argument("--quantize", metavar="NAME", help="quantise 16-bit experts at load, e.g. fp8_per_channel")
    parser.add_argument(
        "--activation-key",
        metavar="NAME",
        help="of the activations, e.g. kFp8DynamicTokenSym; none: 16-bit (default: what the checkpoint says)",
    )
    parser.add_argument("--stack", metavar="NAME", help="of several stacks of layers, e.g. talker (default: thinker)")
    parser.add_argument(
        "--routing",
        metavar="R",
        help="scoring function and what else is on, e.g. sigmoid,renormalize,routed_scaling_factor=2.5; per_call: "
        "topk_ids and topk_weights are given (default: by config.json's model_type)",
    )
    parser.add_argument("--activation", metavar="NAME", help="default: by model_type, silu without DIR")
    parser.add_argument("--assume", action="store_true", help="of an unknown model_type, accept what is guessed")


def _tokens(parser: argparse.ArgumentParser, default: int, text: str) -> None:
    parser.add_argument("--tokens", type=whole, default=default, metavar="M", help=text)


def _backend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backend", default="auto", metavar="B", help="a backend by name (default: auto)")


def _device(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("--device", metavar="D", help=text)


def _scheme(parser: Any, text: str) -> None:
    # entry points are looked up, not loaded
    action = parser.add_argument("--scheme", metavar="S", help=text)
    action.completer = lambda **_: sorted(importlib.metadata.entry_points(group="moe_core.schemes").names)


def _dtype(parser: Any) -> None:
    names = (*DTYPES, *DTYPES.values())
    named = one_of(*names)

    def of_torch(text: str) -> str:
        name = named(text)
        return DTYPES.get(name, name)

    text = "of hidden states (default: bf16)"
    action = parser.add_argument("--dtype", type=of_torch, default="bf16", metavar="|".join(DTYPES), help=text)
    action.completer = lambda **_: names


def _choice(parser: Any, name: str, default: str, names: Sequence[str], metavar: str, text: str) -> None:
    action = parser.add_argument(name, type=one_of(*names), default=default, metavar=metavar, help=text)
    action.completer = lambda **_: names


def _shape(parser: argparse.ArgumentParser) -> None:
    """A layer without a checkpoint, and what none says."""
    _choice(parser, "--activation-format", "standard", FORMATS, "|".join(FORMATS), "of what experts get")
    group = parser.add_argument_group("a layer without a checkpoint")
    _scheme(group, "quantisation scheme, e.g. fp8")
    group.add_argument("--shape", metavar="E,k,K,N", help="experts, experts per token, hidden and intermediate size")
    group.add_argument("--weight-key", metavar="NAME", help="e.g. kFp8Static128BlockSym[64x128] (default: the first)")
    group.add_argument("--bias", action="store_true", help="the experts have biases")
