"""The option `--json [FILE]`, whose value may be left out."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated, Any, TypeAlias

import typer
from typer.core import TyperCommand

STANDARD_OUTPUT = "-"

JsonFile: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--json",
        metavar="[FILE]",
        help="Save all of it as JSON; without FILE, print that and nothing else.",
    ),
]


class JsonWithOrWithoutFile(TyperCommand):
    """A command whose `--json` may be the last word, or be followed by an option: then it is standard
    output that is meant, as by `anybatch plan --json`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, list(_with_file(args)))


def _with_file(words: list[str]) -> Iterator[str]:
    for word, following in pairwise([*words, "--"]):
        is_bare = word == "--json" and following.startswith("-") and following != STANDARD_OUTPUT
        yield f"--json={STANDARD_OUTPUT}" if is_bare else word
