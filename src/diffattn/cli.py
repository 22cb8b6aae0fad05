"""The command line: `diffattn VERB`, each verb a thin call of one public function."""

import argparse
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from types import FrameType
from typing import NoReturn

from diffattn import __version__
from diffattn.compare.arms import ARMS, DEFAULT_ARMS
from diffattn.compare.presets import PRESETS
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
    _add_convert(verbs)
    return parser


def _add_compare(verbs: "argparse._SubParsersAction[_Parser]") -> None:
    parser = verbs.add_parser(
        "compare",
        help="train architectures on the same text and compare them",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Train several architectures from the same starting weights on the same "
        "text,\nmeasure them on held-out text, and write report.html and results.json.",
        epilog=f"arms, where a Transformer has N heads of D:\n"
        f"{_listed([(arm.name, arm.about) for arm in ARMS])}\n\n"
        f"presets:\n{_listed([(preset.name, preset.about) for preset in PRESETS])}",
    )
    parser.add_argument(
        "--arms",
        default=DEFAULT_ARMS,
        help="names from the list below, separated by commas, the first is the baseline; "
        "NAME:lr=0.1 scales a learning rate (default: %(default)s)",
    )
    parser.add_argument(
        "--preset", default="quick", help="a name from the list below (default: %(default)s)"
    )
    parser.add_argument(
        "--seeds",
        type=int,
        default=3,
        help="number of seeds; may grow with --resume (default: %(default)s)",
    )
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
        "--tokens",
        type=_count,
        default=None,
        help="training tokens of one run, as in 2000000, 2e6 or 2M (default: preset's)",
    )
    parser.add_argument(
        "--out", default="diffattn-compare", help="folder of the results (default: %(default)s)"
    )
    parser.add_argument("--resume", action="store_true", help="go on with what the folder holds")
    parser.add_argument(
        "--jobs", type=int, default=None, help="processes at a time (default: one a core)"
    )
    parser.set_defaults(run=_compare)


def _listed(pairs: Sequence[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in pairs)
    return "\n".join(f"  {name:{width}}  {about}" for name, about in pairs)


def _count(text: str) -> int:
    """A whole number, also as 1_000_000, 1e6, 500k, 2M or 1.5G."""
    size = {"k": 3, "m": 6, "g": 9, "b": 9, "t": 12}.get(text[-1:].lower(), 0)
    try:
        value = Decimal(text[:-1] if size else text)
        # an exponent without end would fill the memory with digits
        if value.is_finite() and abs(value.adjusted()) < 100:
            count = Fraction(value) * 10**size
            if count.denominator == 1:
                return int(count)
    except InvalidOperation:
        pass
    raise argparse.ArgumentTypeError(
        f"expected a whole number such as 2000000, 2e6 or 2M, got {text!r}"
    )


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


def _add_convert(verbs: "argparse._SubParsersAction[_Parser]") -> None:
    parser = verbs.add_parser(
        "convert",
        help="convert a checkpoint between layouts, or start from a plain model",
        description="Convert a checkpoint of one published layout to another, tensor by tensor, "
        "or start a differential model from a plain one (--from-softmax).",
        epilog="layouts: diffattn, diffllama, motif, motif2 (whole models); unilm-v1, unilm-v2, "
        "timm, phi4flash (attention layers inside any model)",
    )
    parser.add_argument("source", metavar="IN", help="folder, or one safetensors file")
    parser.add_argument("target", metavar="OUT", help="new folder; appears when it is whole")
    parser.add_argument(
        "--from", dest="from_layout", default="auto", help="layout of IN (default: auto)"
    )
    parser.add_argument(
        "--to", dest="to_layout", default="diffattn", help="layout of OUT (default: diffattn)"
    )
    parser.add_argument(
        "--fold-gain",
        action="store_true",
        help="fold the head norm's gain into the output projection",
    )
    parser.add_argument(
        "--from-softmax",
        choices=("v1", "v2"),
        help="IN is a plain llama, mistral, qwen2 or qwen3 model: v2 starts exactly, v1 nearly",
    )
    parser.add_argument(
        "--lambda-start",
        type=float,
        help="lam at the start of --from-softmax v1 (default: 0.2)",
    )
    parser.set_defaults(run=_convert)


def _convert(args: argparse.Namespace) -> int:
    with needs_extra("diffattn convert", "hf"):
        from diffattn.models.convert import convert_checkpoint, start_from_softmax

    def say(line: str) -> None:
        print(line, file=sys.stderr)

    with _stopped_by_sigterm():
        if args.from_softmax:
            _refuse_beside_a_start(args)
            start_from_softmax(
                args.source, args.target, args.from_softmax, lambda_start=args.lambda_start, say=say
            )
            return 0
        if args.lambda_start is not None:
            raise UserError(
                f"lambda-start: expected with --from-softmax v1 alone, got {args.lambda_start}"
            )
        convert_checkpoint(
            args.source,
            args.target,
            from_layout=args.from_layout,
            to_layout=args.to_layout,
            fold_gain=args.fold_gain,
            say=say,
        )
    return 0


def _refuse_beside_a_start(args: argparse.Namespace) -> None:
    """A start reads a plain model and writes ours: layouts and gains are not its options."""
    for option, value, default in (
        ("from", args.from_layout, "auto"),
        ("to", args.to_layout, "diffattn"),
        ("fold-gain", args.fold_gain, False),
    ):
        if value != default:
            raise UserError(f"{option}: expected {default} with --from-softmax, got {value}")


@contextmanager
def _stopped_by_sigterm() -> Iterator[None]:
    """Let SIGTERM unwind the block, so that what is half written is removed."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield  # no other thread may set what a signal does
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
