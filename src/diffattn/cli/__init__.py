"""The command line: `diffattn VERB`, each verb a thin call of one public function."""

import argparse
import sys
from collections.abc import Sequence

from diffattn import __version__
from diffattn.cli import bench, compare, convert, dex, eval, fetch
from diffattn.cli.arguments import Parser
from diffattn.errors import UserError


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
    except BrokenPipeError:
        raise
    except OSError as error:  # a full disk, a folder without permission
        print(f"diffattn {args.verb}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\ndiffattn {args.verb}: stopped", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="diffattn", description="Differential attention for PyTorch.")
    parser.add_argument("--version", action="version", version=f"diffattn {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb in (bench, compare, convert, dex, eval, fetch):
        verb.add(verbs)
    return parser
