"""The `vllm-dense-mla` command. Errors are one line on stderr and exit code 2."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from . import __version__

PROGRAM = "vllm-dense-mla"
H200_SMS = 132
SMS_HELP = f"streaming multiprocessors of the GPU (default {H200_SMS}, an H100 SXM's or H200's; needed with another --capability)"


class _Parser(argparse.ArgumentParser):
    """argparse without the usage text before an error: `--help` shows it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with `argv` (the process's own by default) and return its exit code."""
    args = _parser().parse_args(argv)
    try:
        return int(args.command(args))
    except ValueError as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 2


def _parser() -> _Parser:
    parser = _Parser(prog=PROGRAM, description="Tools around the DENSE_MLA attention backend for vLLM.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_demo(commands)
    _add_plan(commands)
    _add_check(commands)
    return parser


def _add_demo(commands: argparse._SubParsersAction[_Parser]) -> None:
    about = "decode a ragged paged batch, with the kernels on a GPU that they support and with their torch reference elsewhere"
    parser = commands.add_parser("demo", help=about, description=about, allow_abbrev=False)
    parser.add_argument("--heads", type=_positive, default=12, help="query heads on one GPU, 1 to 128 (default %(default)s, Kimi-K3 at TP 8)")
    parser.add_argument("--batch", type=_positive, default=8, help="requests (default %(default)s)")
    parser.add_argument("--max-len", type=_positive, default=4096, help="keys of the longest request (default %(default)s)")
    parser.add_argument("--page-size", type=_positive, default=64, help="keys of a page, a multiple of 16 (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the random lengths, queries and keys (default %(default)s)")
    parser.set_defaults(command=_demo)


def _add_plan(commands: argparse._SubParsersAction[_Parser]) -> None:
    about = "what a deployment decodes with and the workspace that it reserves, for every batch size of a CUDA graph; needs no GPU"
    parser = commands.add_parser("plan", help=about, description=about, allow_abbrev=False)
    source = parser.add_argument_group("the deployment: a serve config, a model, or a number of heads")
    source.add_argument("--config", type=Path, metavar="FILE", help="as given to vllm serve --config")
    source.add_argument("--model", type=Path, metavar="CONFIG.JSON", help="the model's; with --config, if the name in there does not lead to it")
    source.add_argument("--tensor-parallel-size", type=_positive, metavar="N", help="with --model (default 1)")
    source.add_argument("--heads", type=_positive, help="query heads on one GPU: the model's heads / tensor parallel size")
    parser.add_argument("--max-num-seqs", type=_positive, help="as given to vllm serve; needed with --heads, vLLM's default with --model")
    parser.add_argument("--capture-sizes", type=_sizes, help="as given to vllm serve, with commas: 1,2,4,8; as --max-num-seqs")
    parser.add_argument("--sms", type=_positive, help=SMS_HELP)
    parser.add_argument("--capability", type=_capability, default="9.0", help="compute capability of the GPU (default %(default)s)")
    parser.set_defaults(command=_plan)


def _add_check(commands: argparse._SubParsersAction[_Parser]) -> None:
    about = "one screen for a bug report: versions, GPU, kernels, settings, a numerical self-test and the bandwidth; exit code 0 only if all is well"
    parser = commands.add_parser("check", help=about, description=about, allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="the same as one JSON object")
    parser.set_defaults(command=_check)


def _demo(args: argparse.Namespace) -> int:
    from . import demo  # torch

    demo.run(heads=args.heads, batch=args.batch, max_len=args.max_len, page_size=args.page_size, seed=args.seed)
    return 0


def _plan(args: argparse.Namespace) -> int:
    arguments = _plan_arguments(args)
    if arguments is None:
        from dense_mla import unsupported_reason

        from .plan import print_heads_plan

        if (reason := unsupported_reason(args.capability)) is not None:
            raise ValueError(reason)
        print_heads_plan(args.heads, args.capture_sizes, args.max_num_seqs, _sms(args))
        return 0
    with _quiet():
        from .deployment import read_deployment
        from .plan import print_plan

        deployment = read_deployment(arguments, args.model, args.capability)
    print_plan(deployment, _sms(args), args.capability)
    return 0


def _sms(args: argparse.Namespace) -> int:
    """What --sms says, or an H200's: the other compute capabilities are of GPUs of many sizes."""
    if args.sms is None and args.capability != (9, 0):
        raise ValueError(f"--sms must be given with --capability {args.capability[0]}.{args.capability[1]}: the GPU's streaming multiprocessors")
    return int(args.sms or H200_SMS)


def _plan_arguments(args: argparse.Namespace) -> list[str] | None:
    """The arguments of `vllm serve` that are meant, or None for the plan of a number of heads.

    Raises:
        ValueError: options that do not go together.
    """
    options = ("config", "model", "heads", "tensor_parallel_size", "max_num_seqs", "capture_sizes")
    given = {name for name in options if getattr(args, name) is not None}
    if args.config:
        _only(given, "--config", {"config", "model"})
        if not args.config.is_file():
            raise ValueError(f"--config must be a file, got {args.config}")
        return ["--config", str(args.config)]
    if args.model:
        _only(given, "--model", {"model", "tensor_parallel_size", "max_num_seqs", "capture_sizes"})
        return _serve_arguments(args)
    needed = {"heads", "max_num_seqs", "capture_sizes"}
    if needed - given:
        missing = ", ".join(_option(name) for name in ("heads", "max_num_seqs", "capture_sizes") if name not in given)
        raise ValueError(f"plan needs --config FILE, --model CONFIG.JSON, or a number of heads, for which is missing: {missing}")
    _only(given, "--heads", needed)
    return None


def _serve_arguments(args: argparse.Namespace) -> list[str]:
    arguments = [str(args.model), "--attention-backend", "DENSE_MLA", "--tensor-parallel-size", str(args.tensor_parallel_size or 1)]
    if args.max_num_seqs:
        arguments += ["--max-num-seqs", str(args.max_num_seqs)]
    if args.capture_sizes:
        arguments += ["--cudagraph-capture-sizes", *map(str, args.capture_sizes)]
    return arguments


def _only(given: set[str], source: str, allowed: set[str]) -> None:
    if given - allowed:
        raise ValueError(f"{', '.join(sorted(map(_option, given - allowed)))} cannot be given with {source}")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _check(args: argparse.Namespace) -> int:
    with _quiet():
        from .check import collect_report

        report = collect_report()
    print(report.to_json() if args.json else report)
    return 0 if report.is_well else 1


@contextmanager
def _quiet() -> Iterator[None]:
    """vLLM and torch log what they miss on a machine without a GPU; a command says itself what it found."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def _positive(text: str) -> int:
    value = int(text) if text.isascii() and text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return value


def _capability(text: str) -> tuple[int, int]:
    major, dot, minor = text.partition(".")
    if not (dot and major.isdecimal() and minor.isdecimal() and text.isascii()):
        raise argparse.ArgumentTypeError(f"must be MAJOR.MINOR, such as 9.0, got {text!r}")
    return int(major), int(minor)


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(_positive(size.strip()) for size in text.split(","))


if __name__ == "__main__":
    sys.exit(main())
