"""Files: the text of a plan, read from a file and looked at."""

from __future__ import annotations

import json
import os
from pathlib import Path

from anybatch.errors import InputError


def read(path: str | os.PathLike[str]) -> str:
    """The text in the file `path`. Raises `InputError` if there is none."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not a text file"
        raise InputError(
            f"the plan {path} cannot be read: {why}; give a file that 'anybatch plan --out' wrote."
        ) from None


def current(text: str, version: int, source: str) -> str:
    """The plan in `text` without the fields that earlier releases wrote and none reads any more.

    Raises `InputError` unless `text` is a JSON object of that version of the format.
    """
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(
            f"{source} is not JSON: {error.msg} at line {error.lineno}, column {error.colno};"
            " mend it there, or plan the task anew."
        ) from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, say
        raise InputError(f"{source} cannot be read: {error}; plan the task anew.") from None
    if not isinstance(data, dict):
        raise InputError(
            f"{source} holds {type(data).__name__} where a plan (an object) belongs: give a"
            " file that 'anybatch plan --out' wrote."
        )
    if data.get("version") != version:
        raise InputError(
            f"{source} has version {data.get('version')!r}, and this anybatch reads version"
            f" {version}: plan the task anew with this anybatch."
        )
    data.pop("devices", None)
    if isinstance(data.get("exchange"), dict):
        data["exchange"].pop("powersgd_rank", None)
    return json.dumps(data)
