"""`diffattn dex adapt`, `merge`, `select` and `study`."""

import argparse
import sys

from diffattn.cli.arguments import Parser, again, count, listed, names, numbers, said
from diffattn.errors import needs_extra
from diffattn.study.arms import ARMS

_MODEL = "folder of a Hugging Face causal LM, or smollm2 as fetched"


def add(verbs: "argparse._SubParsersAction[Parser]") -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "dex",
        help="adapt a pretrained model",
        description="Differential extension of pretrained models (arXiv 2505.16333).",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    _add_adapt(actions)
    _add_merge(actions)
    _add_select(actions)
    _add_study(actions)


def _add_adapt(actions: "argparse._SubParsersAction[Parser]") -> None:
    parser = actions.add_parser(
        "adapt",
        help="train one adapter",
        description="Train the extension with W_K, W_V and W_O on some text; print the held-out "
        "loss before and after.",
    )
    parser.add_argument("model", metavar="MODEL", help=_MODEL)
    parser.add_argument("--data", default=None, help="text (default: bundled speeches)")
    parser.add_argument("--steps", type=count, required=True, help="optimizer steps")
    parser.add_argument("--out", required=True, help="new folder of the adapter")
    parser.add_argument(
        "--length", type=count, default=1024, help="tokens of a window (default: %(default)s)"
    )
    parser.add_argument(
        "--rows", type=count, default=1, help="windows of a step (default: %(default)s)"
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
        "--ramp-steps", type=count, default=None, help="T of lam's schedule (default: steps / 2)"
    )
    parser.add_argument(
        "--heads",
        default="entropy",
        help="entropy, importance, all, or a plan file (default: %(default)s)",
    )
    parser.add_argument("--bf16", action="store_true", help="bf16 autocast; weights stay fp32")
    parser.add_argument(
        "--heldout-windows", type=count, default=32, help="measured (default: %(default)s)"
    )
    parser.add_argument("--seed", type=count, default=0, help="(default: %(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on with what the folder holds")
    parser.set_defaults(run=_adapt)


def _adapt(args: argparse.Namespace) -> int:
    with needs_extra("diffattn dex", "all"):
        from diffattn.study.adapt import AdaptSettings, adapt
        from diffattn.training import Interrupted
    fields = AdaptSettings.__dataclass_fields__
    settings = AdaptSettings(**{name: getattr(args, name) for name in fields})
    try:
        adapt(settings, args.out, resume=args.resume, say=said)
    except Interrupted as stopped:
        print(f"diffattn dex: {stopped}; to go on: {again()}", file=sys.stderr)
        return 130
    print(f"adapter: {args.out}; a stock checkpoint: diffattn dex merge {args.out} --out FOLDER")
    return 0


def _add_merge(actions: "argparse._SubParsersAction[Parser]") -> None:
    parser = actions.add_parser(
        "merge",
        help="fold an adapter into a stock checkpoint",
        description="Fold an adapter into its base model; plain transformers loads the result.",
    )
    parser.add_argument("adapter", metavar="DIR", help="folder of the adapter")
    parser.add_argument("--out", required=True, help="new folder; appears when it is whole")
    parser.add_argument("--base", default=None, help="base model (default: as trained)")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of the checkpoint (default: the base's)",
    )
    parser.set_defaults(run=_merge)


def _merge(args: argparse.Namespace) -> int:
    with needs_extra("diffattn dex", "hf"):
        from diffattn.study.merged import merge_checkpoint
    merge_checkpoint(args.adapter, args.out, base=args.base, dtype=args.dtype, say=said)
    return 0


def _add_select(actions: "argparse._SubParsersAction[Parser]") -> None:
    parser = actions.add_parser(
        "select",
        help="choose heads and draw them",
        description="Choose the heads of each layer by their attention on some text; write the "
        "plan as JSON with a PNG beside it, and print a map.",
    )
    parser.add_argument("model", metavar="MODEL", help=_MODEL)
    parser.add_argument("--data", default=None, help="text (default: bundled speeches)")
    parser.add_argument("--out", required=True, help="plan file, as in plan.json")
    parser.add_argument(
        "--criterion",
        choices=("entropy", "importance"),
        default="entropy",
        help="highest entropy or lowest importance (default: %(default)s)",
    )
    parser.add_argument(
        "--count", type=count, default=None, help="heads of a layer (default: half)"
    )
    parser.add_argument(
        "--sequences", type=count, default=64, help="windows of text (default: %(default)s)"
    )
    parser.add_argument(
        "--length", type=count, default=1024, help="tokens of a window (default: %(default)s)"
    )
    parser.add_argument(
        "--skip", type=count, default=32, help="first positions left out (default: %(default)s)"
    )
    parser.add_argument(
        "--without-first-key", action="store_true", help="entropy over all keys but the first"
    )
    parser.set_defaults(run=_select)


def _select(args: argparse.Namespace) -> int:
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
        say=said,
    )
    print(terminal_map(plan))
    return 0


def _add_study(actions: "argparse._SubParsersAction[Parser]") -> None:
    parser = actions.add_parser(
        "study",
        help="adapt a model in several ways and say what each one adds",
        description="Train DEX and its controls on the same text with equal tuning, measure all\n"
        "of them, and write report.html, results.json and claim.md. Started again with\n"
        "--resume it goes on run by run; several processes may work on one folder.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"arms:\n{listed([(arm.name, arm.about) for arm in ARMS])}",
    )
    parser.add_argument("model", metavar="MODEL", help=_MODEL)
    parser.add_argument("--data", default=None, help="text (default: bundled speeches)")
    parser.add_argument(
        "--outside",
        default=None,
        help="other text, for what is forgotten (default: bundled questions to a bank)",
    )
    parser.add_argument("--out", required=True, help="folder of the study")
    parser.add_argument("--arms", type=names, help="names, separated by commas (default: all)")
    for name, kind, about in (
        ("seeds", count, "of DEX and attention alone (default: 3)"),
        ("other-seeds", count, "of the other arms (default: 1)"),
        ("steps", count, "optimizer steps of a run (default: 200)"),
        ("length", count, "tokens of a window (default: 1024)"),
        ("rows", count, "windows of a step (default: 1)"),
        ("rates", numbers, "multiples of each arm's usual rate to try (default: 0.3,1,3)"),
        ("tuning-steps", count, "optimizer steps of a trial (default: 24)"),
        ("tuning-windows", count, "held-out windows that judge a trial (default: 6)"),
        ("ramp-steps", count, "T of lam's schedule (default: half the steps)"),
        ("lam-rate", float, "learning rate of lam as a multiple of the others' (default: 10)"),
        ("heads", str, "entropy, importance, all, or a plan file (default: entropy)"),
        ("heldout-windows", count, "measured (default: 24)"),
        ("outside-windows", count, "measured (default: 12)"),
        ("items", count, "texts with needles, and lists of examples (default: 12)"),
        ("context", count, "tokens of each of these (default: 1024)"),
    ):
        parser.add_argument(f"--{name}", type=kind, help=about)
    parser.add_argument("--bf16", action="store_true", help="bf16 autocast; weights stay fp32")
    parser.add_argument("--resume", action="store_true", help="go on with what the folder holds")
    parser.set_defaults(run=_study)


def _study(args: argparse.Namespace) -> int:
    with needs_extra("diffattn dex study", "all"):
        from diffattn.study.claim import terminal
        from diffattn.study.settings import StudySettings
        from diffattn.study.study import study
        from diffattn.training import Interrupted
    given = {name: getattr(args, name) for name in StudySettings.__dataclass_fields__}
    settings = StudySettings(**{n: value for n, value in given.items() if value is not None})
    try:
        results = study(settings, args.out, resume=args.resume, say=said)
    except Interrupted as stopped:
        print(f"diffattn dex: {stopped}; to go on: {again()}", file=sys.stderr)
        return 130
    print(terminal(results), end="")
    print(f"report: {args.out}/report.html; claim: {args.out}/claim.md")
    return 0
