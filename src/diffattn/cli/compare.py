"""`diffattn compare`."""

import argparse
import sys

from diffattn.cli.arguments import Parser, count, listed, said
from diffattn.compare.arms import ARMS, DEFAULT_ARMS
from diffattn.compare.presets import PRESETS
from diffattn.errors import needs_extra


def add(verbs: "argparse._SubParsersAction[Parser]") -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "compare",
        help="train architectures on the same text and compare them",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Train several architectures from the same starting weights on the same "
        "text,\nmeasure them on held-out text, and write report.html and results.json.",
        epilog=f"arms, where a Transformer has N heads of D:\n"
        f"{listed([(arm.name, arm.about) for arm in ARMS])}\n\n"
        f"presets:\n{listed([(preset.name, preset.about) for preset in PRESETS])}",
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
        type=count,
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
            say=said,
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
