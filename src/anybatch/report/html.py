"""What all HTML pages have in common. Templates with one style and one script, and plotly.js in the
page itself, so that it works offline and for years."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any

import jinja2
from plotly.offline import get_plotlyjs


def render(template: str, **values: Any) -> str:
    """The page of a template of this package, filled with `values`."""
    return _environment().get_template(template).render(plotlyjs=get_plotlyjs(), **values)


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
