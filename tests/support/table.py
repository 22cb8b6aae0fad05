"""The page docs/support.md, from cells that were run."""

import re

import language_models as models
import layers

INTRODUCTION = """# What works with what

Every cell was run by `tests/support`: it works (yes; layers compared in fp64 with the definition,
models in fp32 with eager attention), or refuses with the sentence of that number. "-" has no
meaning. `pytest tests/support --write-support` writes this page; the ordinary run of the tests
fails where it is out of date (`-m slow` for flex_attention, which compiles each case).
"""


def page(cells):
    """Markdown from {(part, variant, feature, implementation): outcome}."""
    sentences = {}
    parts = {}
    for (part, variant, feature, impl), outcome in cells.items():
        row = parts.setdefault(part, {}).setdefault(feature, {}).setdefault(variant, [])
        row.append((impl, outcome))
        if outcome not in ("yes", "-"):
            sentences.setdefault(outcome, len(sentences) + 1)
    lines = [INTRODUCTION]
    for part, features in parts.items():
        variants = list(next(iter(features.values())))
        lines += ["", f"## {part}", "", f"| feature | {' | '.join(variants)} |"]
        lines.append("|---" * (len(variants) + 1) + "|")
        for feature, row in features.items():
            written = [_cell(row[variant], sentences) for variant in variants]
            lines.append(f"| {feature} | {' | '.join(written)} |")
    lines += ["", "## Sentences", ""]
    lines += [f"{number}. `{sentence}`" for sentence, number in sentences.items()]
    return "\n".join(lines) + "\n"


def _cell(outcomes, sentences):
    """One outcome where all implementations agree, else each with its name."""
    written = {impl: outcome if outcome in ("yes", "-") else f"[{sentences[outcome]}]"
               for impl, outcome in outcomes}  # fmt: skip
    told = {impl: mark for impl, mark in written.items() if mark != "-"}
    if len(set(told.values())) <= 1:
        return next(iter(told.values()), "-")
    groups = {}
    for impl, mark in told.items():
        groups.setdefault(mark, []).append(impl)
    return "; ".join(f"{', '.join(impls)}: {mark}" for mark, impls in groups.items())


def layer_cells(variant):
    """Outcomes of one layer."""
    return {
        ("Layers (`diffattn.nn`, implementations " + ", ".join(layers.IMPLEMENTATIONS) + ")",
         variant, feature, impl): layers.cell(variant, feature, impl)
        for feature in layers.FEATURES
        for impl in layers.IMPLEMENTATIONS
    }  # fmt: skip


def model_cells(name, implementations):
    """Outcomes of one language model."""
    return {
        (
            "Language models (`diffattn.models`, `attn_implementation` "
            + ", ".join(models.IMPLEMENTATIONS)
            + ", on a CPU)",
            name,
            feature,
            attn,
        ): models.cell(name, feature, attn)
        for feature in models.FEATURES
        for attn in implementations
    }


def outcomes_of(text):
    """Read a page back: {(part, variant, feature, implementation or None for all): outcome}."""
    sentences = {f"[{n}]": said for n, said in re.findall(r"^(\d+)\. `(.*)`$", text, re.MULTILINE)}
    found, part, variants = {}, "", []
    for line in text.splitlines():
        columns = [column.strip() for column in line.strip("|").split(" | ")]
        if line.startswith("## "):
            part, variants = line.removeprefix("## "), []
        elif line.startswith("| feature"):
            variants = columns[1:]
        elif line.startswith("| ") and variants:
            for variant, written in zip(variants, columns[1:], strict=True):
                for told in written.split("; "):
                    names, _, mark = told.rpartition(": ")
                    for impl in names.split(", ") if names else (None,):
                        found[part, variant, columns[0], impl] = sentences.get(mark, mark)
    return found
