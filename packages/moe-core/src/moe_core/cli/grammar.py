"""Arguments of the commands; the docstring of each function here is the command's help. Nothing imports torch."""

from __future__ import annotations

import argparse
import importlib.metadata
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence

from moe_core.cli import installed
from moe_core.cli.arguments import (
    add_activation_key,
    add_backend,
    add_checkpoint,
    add_choice,
    add_device,
    add_dtype,
    add_quantize,
    add_ranks,
    add_scheme,
    add_seed,
    add_tokens,
)
from moe_core.cli.checks import check_file, check_folder, check_origin
from moe_core.cli.command import Command
from moe_core.cli.parser import (
    Paragraphs,
    Parser,
    at_least,
    device_names,
    path,
    positive,
    shape,
    shown,
    token_counts,
    whole,
)
from moe_core.errors import ConfigError, did_you_mean
from moe_core.plugins.faults import PluginFault
from moe_core.plugins.install import how_to_install

_ABOUT = "Quantized mixture-of-experts layers: what runs them, why, how exactly and how fast."

FORMATS = ("standard", "batched")
#: default shape of a timed layer (Qwen3-30B-A3B)
TIMED_SHAPE = "128,8,2048,768"

#: adds the arguments of a command to its parser
Arguments = Callable[[argparse.ArgumentParser], None]

#: commands of this package, keyed by name
COMMANDS: dict[str, Command] = {}


def _command(check: Callable[[argparse.Namespace], None] | None = None) -> Callable[[Arguments], Arguments]:
    """Make a command of the function that adds its arguments; its docstring is the command's summary and help."""

    def register(arguments: Arguments) -> Arguments:
        name = arguments.__name__.strip("_")
        summary, _, description = (inspect.getdoc(arguments) or name).partition("\n\n")
        summary = summary[0].lower() + summary[1:].rstrip(".")
        COMMANDS[name] = Command(summary, arguments, f"moe_core.cli.commands.{name}:run", description, check)
        return arguments

    return register


def build(names: Iterable[str] | None = None) -> Parser:
    """Return the parser of commands.

    Args:
        names: Names of the commands; None for all, including those of other packages.

    Returns:
        The parser; its help lists the commands, and why a command does not work.
    """
    names = (*COMMANDS, *installed.names()) if names is None else names
    found = {name: COMMANDS.get(name) or installed.load(name) for name in names}
    listed = "\n".join(f"  {name:<10}  {_summary(command)}" for name, command in found.items())
    parser = Parser(
        prog="moe",
        usage="moe COMMAND …",
        description=f"{_ABOUT}\n\ncommands:\n{listed}",
        epilog="moe COMMAND --help lists the arguments of a command. MOE_TRACEBACK=1 shows the traceback of an error.",
        formatter_class=Paragraphs,
    )
    version = importlib.metadata.version("moe-core")
    about = "print the version of moe-core and exit"
    parser.add_argument("--version", action="version", version=f"moe-core {version}", help=about)
    # The description lists the commands.
    commands = parser.add_subparsers(
        prog="moe", dest="command", required=True, metavar="COMMAND", help=argparse.SUPPRESS
    )
    for name, command in found.items():
        if isinstance(command, Command):
            about = f"moe {name}: {command.summary}.\n\n{command.description}".rstrip()
            made = commands.add_parser(name, description=about, formatter_class=Paragraphs)
            command.arguments(made)
            made.add_argument("-v", "--verbose", action="store_true", help="everything: all candidates, all reasons")
            made.add_argument("--json", action="store_true", help="print JSON instead of text")
            made.set_defaults(run=command.run, precheck=command.check)
    return parser


def _summary(command: Command | PluginFault) -> str:
    return command.summary if isinstance(command, Command) else command.reason


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the arguments of one command.

    Args:
        argv: Arguments; None for those of the process.

    Returns:
        The parsed arguments; ``run`` names the function to call.

    Raises:
        SystemExit: Help was requested, or the arguments are invalid. Then stderr has one line.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    command = next((text for text in given if not text.startswith("-")), None)
    if command is None:
        return build().parse_args(given or ["--help"])
    found = COMMANDS.get(command) or (installed.load(command) if command in installed.names() else None)
    if not isinstance(found, Command):
        build([]).error(_unknown(command) if found is None else str(found))
    return build([command]).parse_args(given)


def _unknown(command: str) -> str:
    """Return the message about a command that does not exist."""
    package = installed.KNOWN.get(command)
    if package is None:
        return f"unknown command {shown(command)}{did_you_mean(command, (*COMMANDS, *installed.names()), cutoff=0.6)}"
    return f"{command!r} is a command of {package}, which is not installed; add it with: {how_to_install(package)}"


@_command()
def _quickstart(parser: argparse.ArgumentParser) -> None:
    """Write, load, explain, run and check a small checkpoint."""
    add_scheme(parser, "default: the first that is installed")
    add_device(parser)
    add_backend(parser)
    add_tokens(parser, 64, "default: 64")
    parser.add_argument("--keep", type=path, metavar="DIR", help="write the checkpoint there and keep it")


def _check_run(args: argparse.Namespace) -> None:
    check_file(args, "input")
    check_folder(args)


@_command(_check_run)
def _run(parser: argparse.ArgumentParser) -> None:
    """Run one MoE layer of a checkpoint on given or random tokens.

    The output is the routed experts' weighted sum [M, K], without shared experts. --input is a safetensors file with
    hidden_states [M, K] and either router_logits [M, E] or topk_ids [M, k] (integers) and topk_weights [M, k]; where
    both are given, the top-k pair wins. --output receives output [M, K] as float32, computed in --dtype.

    --check compares the output with the float64 reference of the same weights and prints the error next to the
    tolerance, which follows from what a sound implementation rounds. Exit code 1 where the error is larger.

    Over several GPUs: torchrun --nproc-per-node 4 -m moe_core run DIR --tp 2 --ep 2. Each rank reads its part of the
    layer, the tokens are divided among --dp batches, and the first rank prints.
    """
    add_checkpoint(parser)
    _of_checkpoint(parser, activation="by model_type")
    add_tokens(parser, 32, "random tokens without --input (default: 32)", least=0)
    add_seed(parser, "of the random tokens (default: 0)")
    add_backend(parser)
    add_device(parser)
    parser.add_argument("--input", type=path, metavar="F", help="safetensors file to read tokens from")
    parser.add_argument("--output", type=path, metavar="F", help="safetensors file to write")
    parser.add_argument("--check", action="store_true", help="compare the output with the float64 reference")
    add_dtype(parser)
    add_ranks(parser, "several ranks, each a process of torchrun's")


def _check_explain(args: argparse.Namespace) -> None:
    if args.tp is args.ep is args.dp is None and (args.all2all is not None or args.machine is not None):
        raise ConfigError("--all2all and --machine are for several ranks: give --tp, --ep or --dp")
    if args.all_layers and (args.path is None or args.layer is not None):
        raise ConfigError("--all-layers is for a checkpoint folder, without --layer")
    if args.all_layers and len(args.devices) > 1:
        raise ConfigError(f"--all-layers is of one device, got --device {','.join(args.devices)}")
    check_origin(args)
    if args.path is None and (args.shape is None or args.scheme is args.quantize is None):
        raise ConfigError("give a checkpoint folder, or --scheme and --shape E,k,K,N")
    check_folder(args)


@_command(_check_explain)
def _explain(parser: argparse.ArgumentParser) -> None:
    """Show which backend runs a layer and why, on any GPU.

    The layer is one of a checkpoint folder, or described by --scheme and --shape. Prints what was chosen, which
    preferred backends were not and why, and the memory that the layer takes: weights as the backend lays them out, the
    most that is allocated while they are converted, workspace of a call with --tokens tokens. --all-layers does so for
    every MoE layer of a checkpoint, with the total and the largest. Exit code 2 where no backend fits.

    On a card (--device h100, rtx4090, mi300x …; an architecture is none) it compares what the whole checkpoint needs
    with the card's memory, layers taken to be alike unless --all-layers reads each, and states the floor of a call with
    1, 32 and 4096 tokens: the larger of the experts' bytes over the bandwidth and of operations over the rate of dense
    products, by data sheets. Exit code 1 where the model cannot fit.

    A folder that holds config.json and no weights yet is estimated from it. DIR may be the name of a model in the local
    Hugging Face cache (owner/name).

    With --tp, --ep or --dp it is about one rank of several, here or elsewhere: which prepare/finalize classes (all2all
    backends) go with which backends and why others do not, the bytes and the time of each with --tokens tokens per
    rank, and from how many tokens which is fastest. Times follow from figures of the machine.
    """
    add_checkpoint(parser, optional=True)
    _of_checkpoint(parser)
    parser.add_argument("--all-layers", action="store_true", help="every MoE layer of the checkpoint, and the total")
    add_tokens(parser, 4096, "of one call, for its workspace (default: 4096)")
    text = "sm90, sm100, gfx950, cpu, h200 …, or several: a100,h100 (default: this machine's)"
    parser.add_argument("--device", dest="devices", type=device_names, default=(None,), metavar="D", help=text)
    add_backend(parser)
    add_dtype(parser)
    _shape(parser)
    add_ranks(parser, "a layer over several ranks")


@_command()
def _backends(parser: argparse.ArgumentParser) -> None:
    """List the installed backends and what they claim.

    A table for each scheme: backends in order of preference, GPUs, and whether a backend was tested on one or claims
    it. --scheme S --backend B, or -v, prints everything that they claim.
    """
    add_scheme(parser, "only this scheme's (default: all that are installed)")
    parser.add_argument("--backend", metavar="B", help="only this one, with all that it claims")


@_command()
def _doctor(parser: argparse.ArgumentParser) -> None:
    """Show versions, GPUs, schemes, what is missing and how to add it."""


def _check_bench(args: argparse.Namespace) -> None:
    if args.fail_slower is not None and args.compare is None:
        raise ConfigError("--fail-slower needs --compare FILE")
    check_origin(args)
    check_file(args, "compare")
    check_folder(args)


@_command(_check_bench)
def _bench(parser: argparse.ArgumentParser) -> None:
    """Time a layer per token count, next to the machine's limits.

    The layer is one of a checkpoint folder, or described by --scheme and --shape (random weights). The floor is the
    larger of bytes over bandwidth (weights of the experts that have tokens, hidden states, output) and operations over
    the rate of a dense product, both measured on this machine, or given (--bandwidth, --rate). On a GPU, a
    CUDA graph holds eight calls that rotate through input sets. Warm-up calls repeat until they get no faster. Times
    are medians; the spread reaches from the 10th to the 90th percentile.

    --compare FILE shows the times of an earlier run, written by --output, and marks those that moved: "slower" if even
    the 10th percentile is above the earlier 90th. --fail-slower makes that exit code 1.

    Over several GPUs: torchrun --nproc-per-node 4 -m moe_core bench --ep 4. --tokens are those that each rank brings,
    times are those of the slowest rank, and the first rank prints.
    """
    add_checkpoint(parser, optional=True)
    _of_checkpoint(parser)
    parser.add_argument(
        "--tokens",
        type=token_counts,
        default="1,8,32,128",
        metavar="M,M,…",
        help="token counts (default: 1,8,32,128)",
    )
    parser.add_argument("--backend", metavar="B,B,…", help="backends by name (default: all that fit)")
    add_device(parser)
    parser.add_argument(
        "--budget", type=positive, default=1.0, metavar="S", help="seconds per measurement (default: 1)"
    )
    parser.add_argument(
        "--skew",
        type=at_least(0.0),
        default=0.0,
        metavar="S",
        help="the r-th most popular expert gets tokens in proportion to 1 / r^S (default: 0, all alike; 1: Zipf's law)",
    )
    parser.add_argument("--output", type=path, metavar="F.json", help="write the results there as well")
    parser.add_argument("--svg", type=path, metavar="F.svg", help="draw times and floor over token counts")
    parser.add_argument("--compare", type=path, metavar="F.json", help="an earlier run's --output: what has moved")
    parser.add_argument(
        "--fail-slower",
        type=at_least(0.0),
        nargs="?",
        const=0.0,
        metavar="P",
        help="with --compare: exit code 1 where a time is longer, beyond the spread and by more than P %% (default: 0)",
    )
    parser.add_argument("--bandwidth", type=positive, metavar="GB/s", help="of the floor (default: measured)")
    parser.add_argument("--rate", type=positive, metavar="TFLOP/s", help="of the floor (default: measured)")
    add_dtype(parser)
    _shape(parser, TIMED_SHAPE)
    add_ranks(parser, "several ranks, each a process of torchrun's")


def _check_tune(args: argparse.Namespace) -> None:
    check_origin(args)
    check_folder(args)


@_command(_check_tune)
def _tune(parser: argparse.ArgumentParser) -> None:
    """Find the best launch configurations for this GPU.

    Times launch configurations of core's own kernels on this GPU for every kind of layer of a checkpoint folder, or for
    one that --scheme and --shape describe, starting from the built-in ones, and writes the best to a tuning profile, a
    JSON file with the figures. Selection finds your own profile of the GPU ($XDG_CACHE_HOME/moe-core/tuning, by default
    ~/.cache); MOE_TUNING=FILE names another, or none. A profile changes how kernels are launched, never which backend
    is taken nor how numbers are rounded.
    """
    add_checkpoint(parser, optional=True)
    _of_checkpoint(parser)
    parser.add_argument(
        "--tokens",
        type=token_counts,
        default="1,2,4,8,16,32,64,128,256,512,1024,2048,4096",
        metavar="M,M,…",
        help="numbers of tokens; a call uses the next larger one (default: 1,2,4 … 4096)",
    )
    add_backend(parser)
    add_device(parser, "cuda, cuda:1 … (default: cuda)")
    parser.add_argument(
        "--budget", type=positive, default=180.0, metavar="S", help="seconds for each kind of layer (default: 180)"
    )
    parser.add_argument(
        "--output", type=path, metavar="F.json", help="the profile, which keeps its other layers (default: your own)"
    )
    add_dtype(parser)
    _made_up(parser, TIMED_SHAPE)


def _of_checkpoint(parser: argparse.ArgumentParser, activation: str = "by model_type, silu without DIR") -> None:
    parser.add_argument("--layer", type=whole, metavar="N", help="index of the layer (default: the first with MoE)")
    add_quantize(parser)
    add_activation_key(parser)
    parser.add_argument("--stack", metavar="NAME", help="of several stacks of layers, e.g. talker (default: thinker)")
    parser.add_argument(
        "--routing",
        metavar="R",
        help="scoring function and what else is on, e.g. sigmoid,renormalize,routed_scaling_factor=2.5; per_call: "
        "topk_ids and topk_weights are given (default: by config.json's model_type)",
    )
    parser.add_argument("--activation", metavar="NAME", help=f"default: {activation}")
    parser.add_argument("--assume", action="store_true", help="of an unknown model_type, accept what is guessed")
    parser.add_argument("--top-k", type=whole, metavar="N", help="experts per token (default: by config.json)")


def _shape(parser: argparse.ArgumentParser, default: str = "") -> None:
    """Add options for a layer without a checkpoint, and options that no checkpoint states."""
    add_choice(
        parser, "--activation-format", "standard", FORMATS, "|".join(FORMATS), "layout of the tokens that experts get"
    )
    parser.add_argument(
        "--tuning", metavar="F.json", help="a tuning profile, or none (default: MOE_TUNING, or your own of the GPU)"
    )
    _made_up(parser, default)


def _made_up(parser: argparse.ArgumentParser, default: str = "") -> None:
    """Add options that describe a layer by its sizes.

    ``default`` states the sizes that the command uses, if any.
    """
    group = parser.add_argument_group("a layer without a checkpoint")
    add_scheme(group, "quantization scheme, e.g. fp8")
    sizes = "experts, experts per token, hidden and intermediate size"
    stated = f" (default: {default})" if default else ""
    group.add_argument("--shape", type=shape, metavar="E,k,K,N", help=sizes + stated)
    group.add_argument("--weight-key", metavar="NAME", help="e.g. kFp8Static128BlockSym[64x128] (default: the first)")
    group.add_argument("--bias", action="store_true", help="the experts have biases")
