"""Pages that need no other file: one look, no network, no scripts."""

from __future__ import annotations

from importlib import resources
from typing import Any

from diffattn.errors import needs_extra
from diffattn.report import palette


def render_page(package: str, template: str, context: dict[str, Any]) -> str:
    """Renders a page from a template that extends `page.html.jinja`.

    Args:
        package: Name of the package that holds the template.
        template: File name of the template; it fills the block `main`.
        context: Its values, with `title` and `subtitle` for the head of the page.

    Returns:
        HTML that needs no other file; the same context gives the same text.

    Raises:
        MissingExtraError: Where Jinja2 is missing.
    """
    with needs_extra("the report", "plot"):
        from jinja2 import DictLoader, Environment, StrictUndefined
    sources = {
        name: _read("diffattn.report", name) for name in ("page.html.jinja", "parts.html.jinja")
    }
    environment = Environment(
        loader=DictLoader({**sources, template: _read(package, template)}),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters["css_name"] = palette.css_name
    return environment.get_template(template).render(
        context,
        light_theme=palette.light_theme(),
        dark_theme=palette.dark_theme(),
        dark_figures=palette.dark_figures(),
    )


def _read(package: str, name: str) -> str:
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")
