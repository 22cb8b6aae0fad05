"""`diffattn convert`."""

import argparse

from diffattn.cli.arguments import Parser, said
from diffattn.errors import UserError, needs_extra
from diffattn.signals import unwound_by_sigterm


def add(verbs: "argparse._SubParsersAction[Parser]") -> None:
    """Add the verb."""
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

    with unwound_by_sigterm():
        if args.from_softmax:
            _refuse_beside_a_start(args)
            start_from_softmax(
                args.source,
                args.target,
                args.from_softmax,
                lambda_start=args.lambda_start,
                say=said,
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
            say=said,
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
