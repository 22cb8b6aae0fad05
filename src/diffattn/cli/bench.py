"""`diffattn bench operator`, `lengths`, `model`, `auto` and `table`."""

import argparse
import sys
from typing import Any

from diffattn.cli.arguments import Parser, count, said
from diffattn.errors import needs_extra

_PLACE = (
    ("dtype", str, None, "fp32 or bf16 (default: fp32)"),
    ("device", str, None, "cpu or cuda (default: cpu)"),
)
_IMPL = ("impl", str, "+", "implementations (default: all)")
_SECONDS = ("seconds", float, None, "for each measurement; sides have five turns at the least")
# action -> what it does, and its options: name, kind of value, number of values, help
_ACTIONS = {
    "operator": (
        "times of attention operators, forward and backward",
        (
            ("shapes", str, "+", "B,PAIRS,TOKENS,HEAD_DIM of a Transformer of 2 PAIRS heads; "
             ":forward after it leaves out the backward pass"),
            *_PLACE, _IMPL, _SECONDS,
        ),
    ),
    "lengths": (
        "time and memory of an operator over length",
        (
            ("lengths", count, "+", "tokens (default: 512 to 32768)"),
            ("batch", count, None, "sequences (default: 1)"),
            ("pairs", count, None, "pairs of heads (default: 1)"),
            ("width", count, None, "of a head (default: 64)"),
            *_PLACE, _IMPL, _SECONDS,
        ),
    ),
    "model": (
        "training and decoding speed of language models",
        (
            ("training", str, "+", "ROWSxTOKENS of a training step (default: 4x512 1x2048)"),
            ("decoding", count, "+", "cached tokens (default: 1024 8192)"),
            ("impl", str, "+", "attention by the names of transformers (default: all)"),
            ("width", count, None, "of the model (default: 512)"),
            ("layers", count, None, "(default: 6)"),
            ("heads", count, None, "of the Transformer (default: 16)"),
            ("vocabulary", count, None, "entries (default: 16000)"),
            *_PLACE, _SECONDS,
        ),
    ),
    "auto": (
        "whether impl='auto' is about as fast as the best implementation",
        (
            ("cases", str, "+", "FORM:B,H,G,T,S,HEAD_DIM:DTYPE:PASS, FORM v1, v2 or softmax, PASS "
             "forward or both (default: 16 of them)"),
            _PLACE[1], _SECONDS,
            ("tolerance", float, None, "share by which auto may be slower (default: 0.05)"),
        ),
    ),
}  # fmt: skip


def add(verbs: "argparse._SubParsersAction[Parser]") -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "bench",
        help="measure speed and memory on this machine",
        description="Measure speed and memory on this machine: correctness first, sides in turns, "
        "medians with quartiles. Writes results.json and report.html.",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for action, (about, options) in _ACTIONS.items():
        parser = actions.add_parser(action, help=about, description=f"Measure {about}.")
        for name, kind, number, text in options:
            parser.add_argument(f"--{name}", type=kind, nargs=number, help=text)
        parser.add_argument("--out", required=True, help="folder of the results")
        parser.add_argument(
            "--resume", action="store_true", help="go on with what the folder holds"
        )
        parser.set_defaults(run=_bench)
    _add_table(actions)


def _bench(args: argparse.Namespace) -> int:
    with needs_extra(f"diffattn bench {args.action}", "all"):
        import jinja2  # noqa: F401  the report's, wanted before anything is measured
        import matplotlib  # noqa: F401

        from diffattn.bench.run import bench, settings_of

        names = [name for name, *_ in _ACTIONS[args.action][1]]
        given: dict[str, Any] = {name: getattr(args, name) for name in names}
        settings = settings_of(args.action, {n: v for n, v in given.items() if v is not None})
    _, tables, problems = bench(args.action, settings, args.out, resume=args.resume, say=said)
    print("\n\n".join(table.text() for table in tables))
    print(f"report: {args.out}/report.html")
    for problem in problems:
        print(f"diffattn bench {args.action}: {problem}", file=sys.stderr)
    return 1 if problems else 0


def _add_table(actions: "argparse._SubParsersAction[Parser]") -> None:
    parser = actions.add_parser(
        "table",
        help="write tables of results into a document",
        description="Write the tables of results between <!-- speed:begin --> (or "
        "<!-- speed:begin brief -->, one table a benchmark) and <!-- speed:end --> of a document.",
    )
    parser.add_argument("results", nargs="+", metavar="RESULTS", help="files results.json")
    parser.add_argument("--readme", required=True, nargs="+", help="documents to write into")
    parser.set_defaults(run=_table)


def _table(args: argparse.Namespace) -> int:
    with needs_extra("diffattn bench table", "all"):
        from diffattn.bench.pages import write_tables
    for document in args.readme:
        write_tables(document, args.results)
    return 0
