"""The `vllm-dense-mla` command. Errors are one line on stderr and exit code 2."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from . import __version__

PROGRAM = "vllm-dense-mla"
SMS_HELP = "streaming multiprocessors of the GPU: 132 on an H100 SXM or H200"


class _Parser(argparse.ArgumentParser):
    """argparse without the usage text before an error: `--help` shows it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with `argv` (the process's own by default) and return its exit code."""
    args = _parser().parse_args(argv)
    try:
        args.command(args)
    except ValueError as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> _Parser:
    parser = _Parser(prog=PROGRAM, description="Tools around the DENSE_MLA attention backend for vLLM.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_demo(commands)
    _add_plan(commands)
    return parser


def _add_demo(commands: argparse._SubParsersAction[_Parser]) -> None:
    about = "decode a ragged paged batch, with the kernels on a Hopper GPU and with their torch reference elsewhere"
    parser = commands.add_parser("demo", help=about, description=about, allow_abbrev=False)
    parser.add_argument("--heads", type=_positive, default=12, help="query heads on one GPU, 1 to 128 (default %(default)s, Kimi-K3 at TP 8)")
    parser.add_argument("--batch", type=_positive, default=8, help="requests (default %(default)s)")
    parser.add_argument("--max-len", type=_positive, default=4096, help="keys of the longest request (default %(default)s)")
    parser.add_argument("--page-size", type=_positive, default=64, help="keys of a page, a multiple of 16 (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the random lengths, queries and keys (default %(default)s)")
    parser.set_defaults(command=_demo)


def _add_plan(commands: argparse._SubParsersAction[_Parser]) -> None:
    about = "print the workspace that a deployment reserves, for every batch size that it captures a CUDA graph of; needs no GPU"
    parser = commands.add_parser("plan", help=about, description=about, allow_abbrev=False)
    parser.add_argument("--heads", type=_positive, required=True, help="query heads on one GPU: the model's heads / tensor parallel size")
    parser.add_argument("--max-num-seqs", type=_positive, required=True, help="as given to vllm serve")
    parser.add_argument("--capture-sizes", type=_sizes, required=True, help="as given to vllm serve, with commas: 1,2,4,8")
    parser.add_argument("--sms", type=_positive, default=132, help=f"{SMS_HELP} (default %(default)s)")
    parser.set_defaults(command=_plan)


def _demo(args: argparse.Namespace) -> None:
    from . import demo  # torch

    demo.run(heads=args.heads, batch=args.batch, max_len=args.max_len, page_size=args.page_size, seed=args.seed)


def _plan(args: argparse.Namespace) -> None:
    from dense_mla.problem import PARTIAL_DTYPES, TILE_KEYS, DecodeProblem

    from .buckets import size_buckets
    from .demo import PARTIAL_NAMES

    # Any page size: the bytes do not depend on it.
    problems = [DecodeProblem(args.heads, TILE_KEYS, dtype) for dtype in PARTIAL_DTYPES]
    print(f"{args.heads} heads on each GPU of {args.sms} SMs. Workspace of each decode batch, by the storage of the split partials (rows: requests):")
    for problem in problems:
        table = size_buckets(problem, args.capture_sizes, args.max_num_seqs, args.sms)
        print(f"\n{PARTIAL_NAMES[problem.partial_dtype]}: each GPU reserves {table.largest.total_bytes:,} bytes, once for all layers\n{table}")
    if max(args.capture_sizes) > args.max_num_seqs:
        print(f"\nCapture sizes above max-num-seqs {args.max_num_seqs} hold no decode batch: no bucket is theirs.")


def _positive(text: str) -> int:
    value = int(text) if text.isascii() and text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return value


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(_positive(size.strip()) for size in text.split(","))


if __name__ == "__main__":
    sys.exit(main())
