"""The command line: `diffattn VERB`, each verb a thin call of one public function."""

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from diffattn import __version__
from diffattn.errors import UserError, needs_extra


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, exit code 2."""
        self.exit(2, f"{self.prog}: {message} ('{self.prog} --help' lists what there is)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments; None means those of the process.

    Returns:
        0, or 2 for bad input (one line on standard error), or 130 when stopped by Ctrl-C.
    """
    args = _parser().parse_args(argv)
    try:
        return args.run(args)
    except UserError as error:
        print(f"diffattn {args.verb}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\ndiffattn {args.verb}: stopped", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="diffattn", description="Differential attention for PyTorch.")
    parser.add_argument("--version", action="version", version=f"diffattn {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    _add_compare(verbs)
    return parser


def _add_compare(verbs: "argparse._SubParsersAction[_Parser]") -> None:
    parser = verbs.add_parser(
        "compare",
        help="train architectures on the same text and compare them",
        description="Train several architectures from the same starting weights on the same "
        "text, measure them on held-out text, and write report.html and results.json.",
    )
    parser.add_argument(
        "--arms",
        default="transformer,transformer-wide,diff-v1,diff-v2",
        help="names separated by commas, the first is the baseline: transformer, "
        "transformer-wide, diff-v1, diff-v2, diff-grouped; NAME:lr=0.1 scales a learning rate "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--preset", default="quick", help="smoke, quick, laptop or gpu (default: %(default)s)"
    )
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (default: 3)")
    parser.add_argument(
        "--data",
        default=None,
        help="text: a file, a folder, a JSONL or a saved data set (default: bundled speeches)",
    )
    parser.add_argument(
        "--tokenizer",
        default=None,
        help="folder of a Hugging Face tokenizer with BOS and EOS (default: one is trained)",
    )
    parser.add_argument(
        "--tokens", type=int, default=None, help="training tokens of one run (default: preset's)"
    )
    parser.add_argument(
        "--out", default="diffattn-compare", help="folder of the results (default: %(default)s)"
    )
    parser.add_argument("--resume", action="store_true", help="go on with what the folder holds")
    parser.add_argument(
        "--jobs", type=int, default=None, help="processes at a time (default: one a core)"
    )
    parser.set_defaults(run=_compare)


def _compare(args: argparse.Namespace) -> int:
    with needs_extra("diffattn compare", "all"):
        from diffattn.compare import StoppedError, compare
        from diffattn.compare.table import terminal_table
    try:
        results = compare(
            args.out,
            arms=args.arms,
            preset=args.preset,
            seeds=args.seeds,
            data=args.data,
            tokenizer=args.tokenizer,
            tokens=args.tokens,
            resume=args.resume,
            jobs=args.jobs,
            say=lambda line: print(line, file=sys.stderr),
        )
    except StoppedError:
        print(
            "diffattn compare: stopped; what ran is saved, add --resume to go on",
            file=sys.stderr,
        )
        return 130
    print(terminal_table(results))
    print(f"peak memory {results['peak_memory_bytes'] / 2**30:.2f} GiB, all processes together")
    print(f"report: {args.out}/report.html")
    return 0
