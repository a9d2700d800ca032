"""Names: lookup of a catalogue row by the name that a user or a driver gives.

A single letter can distinguish two devices (an L40 has half the rate of an L40S, a 4070 Ti is not a
4070), so a name is treated as a set of words, and only whole words match.
"""

from __future__ import annotations

import difflib
import re

from anybatch.catalogue.rows import MODELS, Model
from anybatch.errors import InputError, listed, setting

# Words that do not distinguish devices: vendors, brands, memory types and module types.
_SAYS_NOTHING = re.compile(
    r"nvidia|geforce|tesla|rtx|amd|instinct|radeon|rx|sxm\d?|hbm\d?e?|oam|ac"
    r"|blackwell|workstation|edition|generation"
)
_SIZE = re.compile(r"\d+gb")


def find(name: str) -> Model:
    """Returns the device called `name`, in any common spelling: `h100-80gb`, `H100 80GB`, `RTX 4090`,
    `4090`. The memory size and other words may be omitted if the rest identifies a single device.

    Raises `InputError`, listing the closest names, if no device or more than one matches.
    """
    meant = _meant(name)
    if len(meant) == 1:
        return MODELS[meant[0]]
    if meant:
        raise InputError(
            f"{setting('device')} is {name!r}, of which there are several: write {listed(meant)}."
        )
    if not re.search(r"\d", name):
        raise InputError(
            f"{setting('device')} is {name!r}, which is no GPU of the catalogue; anybatch trains on"
            " CPUs, and on GPUs of CUDA or ROCm: write the name of one, such as 'rtx-4090', or its"
            " memory, such as '24GiB'."
        )
    key = "-".join(re.findall(r"[a-z0-9]+", name.lower()))
    family = re.findall("[a-z]*", key)[0]  # names have to begin with the same letters
    close = difflib.get_close_matches(
        key, [model for model in MODELS if model.startswith(family)], n=4, cutoff=0.65
    )
    near = f"write {listed(close, key)}, if you mean that, or" if close else "write"
    raise InputError(
        f"{setting('device')} is {name!r}, which is not in the catalogue of GPUs: {near} its memory,"
        " such as '24GiB'."
    )


def knows(name: str) -> bool:
    """Returns whether `name` matches one or more devices in the catalogue."""
    return bool(_meant(name))


def recognise(reported: str, total_bytes: int) -> Model | None:
    """Returns the device that a driver reports as `reported` (`"NVIDIA A100-SXM4-80GB"`), or None. A
    row does not match if `reported` has words that the row lacks, such as those of a laptop GPU or of
    a partition (MIG).

    If several rows differ only in memory, returns the one whose memory is closest to `total_bytes`.
    """
    words = _without_size(_words(reported))
    alike = [model for model in MODELS.values() if _without_size(_words(model.name)) == words]
    away = {model.name: abs(model.usable_bytes / max(1, total_bytes) - 1) for model in alike}
    nearest = min(alike, key=lambda model: away[model.name], default=None)
    return nearest if nearest is not None and away[nearest.name] < 0.15 else None


def _meant(name: str) -> list[str]:
    """Rows with exactly these words; if there are none, rows with these words and a size; if there are
    none, rows with these words and any others."""
    words = _words(name)
    if not _without_size(words):
        return []  # a size alone is not a name
    rows = {model: _words(model) for model in MODELS}
    return (
        [model for model, its in rows.items() if its == words]
        or [model for model, its in rows.items() if _without_size(its) == words]
        or [model for model, its in rows.items() if its >= words]
    )


def _words(name: str) -> frozenset[str]:
    """The words that distinguish a device: for `RTX 4070Ti SUPER`, these are `4070`, `ti` and `super`.
    A number of up to three digits is a size, `40gb`."""
    text = name.lower().replace("_", " ")
    text = re.sub(r"titan[\s-]*rtx", "titanrtx", text)  # other TITANs exist
    text = re.sub(r"(rtx|rx)(?=[a-z]?\d)", r"\1 ", text)
    text = re.sub(r"(?<=\d)(?=sxm|pcie|nvl)", " ", text)
    text = re.sub(r"(?<=\d{4})(?=(ti|super|xtx?|d)(super)?\b)|(?<=ti)(?=super)", " ", text)
    text = re.sub(r"\b(\d{1,3})[\s-]*(?:gib|gb|g)?\b", r"\1gb", text)
    words = re.findall(r"[a-z0-9]+", text)
    return frozenset(word for word in words if not _SAYS_NOTHING.fullmatch(word))


def _without_size(words: frozenset[str]) -> frozenset[str]:
    return frozenset(word for word in words if not _SIZE.fullmatch(word))
