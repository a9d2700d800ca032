"""Sheet: what all pages have in common. Templates with one style and one script, and plotly.js in the
page itself, so that it works offline and for years."""

from __future__ import annotations

import contextlib
import os
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from plotly.offline import get_plotlyjs

from anybatch.errors import InputError


def render(template: str, **values: Any) -> str:
    """The page of a template of this package, filled with `values`."""
    return _environment().get_template(template).render(plotlyjs=get_plotlyjs(), **values)


def write_whole(path: str | os.PathLike[str], text: str, what: str) -> Path:
    """Write `text` to `path`, whole or not at all, and return the path.

    Raises `InputError`, which calls it `what`, if it cannot be written.
    """
    target = Path(path)
    if target.is_dir():
        raise InputError(f"{what} cannot be written to {target}: it is a folder; name a file.")
    partial = target.with_name(f".{target.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(target)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise InputError(f"{what} cannot be written to {target}: {error.strerror}.") from None
    return target


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
