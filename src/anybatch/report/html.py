"""What all HTML pages have in common: templates with one style and one script. Figures are inline SVG,
so that a page is small, and works offline and for years."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any

import jinja2

from anybatch.report.svg import draw


def render(template: str, **values: Any) -> str:
    """The page of a template of this package, filled with `values`."""
    return _environment().get_template(template).render(draw=draw, **values)


@cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FunctionLoader(_read),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )


def _read(name: str) -> str:
    return resources.files(__package__ or "anybatch.report").joinpath(name).read_text("utf-8")
