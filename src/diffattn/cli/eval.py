"""`diffattn eval`."""

import argparse
import shlex
import sys

from diffattn.cli.arguments import Parser, again, memory, names, said
from diffattn.errors import UserError, needs_extra
from diffattn.suites import SUITES


def add(verbs: "argparse._SubParsersAction[Parser]") -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "eval",
        help="test the papers' claims on any language models",
        description="Measure models in suites; each later model is compared with the first one on "
        "the same items. Writes cards/NAME.json for each claim, and report.html.",
    )
    parser.add_argument(
        "models",
        nargs="+",
        metavar="MODEL",
        help="folder of a Hugging Face causal language model, or an arm OUT/runs/ARM of "
        "`diffattn compare`, with all its seeds",
    )
    parser.add_argument(
        "--suite",
        required=True,
        type=names,
        help=f"names separated by commas, or all: {', '.join(SUITES)}",
    )
    parser.add_argument("--out", required=True, help="folder of the results")
    parser.add_argument(
        "--data",
        help="held-out text: a file, a folder, a JSONL or a saved data set (default: what the "
        "arms' comparison held out, else the held-out part of the bundled speeches)",
    )
    parser.add_argument(
        "--dtype", default="fp32", help="of weights in memory, fp32 or bf16 (default: fp32)"
    )
    parser.add_argument(
        "--memory",
        type=memory,
        metavar="SIZE",
        help="what a model and a batch may take, as in 4GB; batches are as large as that allows "
        "(default: most of what is free)",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SUITE.FIELD=VALUE",
        help="a setting of a suite, as in loss.characters=8192; may be given again",
    )
    parser.add_argument("--resume", action="store_true", help="go on with what the folder holds")
    parser.set_defaults(run=_eval)


def _eval(args: argparse.Namespace) -> int:
    with needs_extra("diffattn eval", "all"):
        import jinja2  # noqa: F401  the report's, wanted before anything is measured
        import matplotlib  # noqa: F401

        from diffattn.suites.report import claims_table
        from diffattn.suites.run import StoppedError, evaluate

        settings: dict[str, dict[str, str]] = {}
        for text in args.set:
            place, equals, value = text.partition("=")
            suite, dot, field = place.partition(".")
            if not (equals and dot and field):
                raise UserError(f"set: expected SUITE.FIELD=VALUE, got {text!r}")
            settings.setdefault(suite, {})[field] = value
        try:
            cards = evaluate(
                args.models,
                SUITES if args.suite == ("all",) else tuple(dict.fromkeys(args.suite)),
                args.out,
                data=args.data,
                dtype=args.dtype,
                memory=args.memory,
                settings=settings,
                resume=args.resume,
                command=shlex.join(["diffattn", *sys.argv[1:]]),
                say=said,
            )
        except (StoppedError, KeyboardInterrupt):
            print(f"diffattn eval: stopped; to go on: {again()}", file=sys.stderr)
            return 130
    print(claims_table(cards).text())
    print(f"report: {args.out}/report.html")
    return 0
