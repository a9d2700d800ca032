"""Remembered plans: choices that a rehearsal has confirmed, for the next run of the same task.

Measured peaks differ by a few percent from run to run, so two searches may select two choices. A
remembered choice is always the same and needs no trace; a rehearsal measures it again, and if it no
longer fits, the search is repeated. So a key that is too coarse costs time, but never memory.

Files are stored in the user's cache folder, under the hash of everything that a choice depends on.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from torch import Tensor
from torch.utils._pytree import tree_leaves

from anybatch.estimate import Subject
from anybatch.estimate.calibration import read, where, write
from anybatch.machine import Device
from anybatch.planner.ranks import reserve_of
from anybatch.plans import Plan
from anybatch.process.files import cache_folder

_MOST = 200
"""Maximum number of files; the most recently used ones are kept."""

_PLAN: TypeAdapter[Plan] = TypeAdapter(Plan)


def key_of(
    subject: Subject, devices: Sequence[Device], limited: bool, asked: Mapping[str, Any]
) -> str:
    """The hash of everything that the choice for `subject` depends on.

    Args:
        subject: the task.
        devices: devices by rank.
        limited: whether the user named the budget. Otherwise it is whatever is free, and only its
            order of magnitude counts.
        asked: arguments that constrain the choice, by name.
    """
    facts = {
        "task": subject.identity.model_dump(mode="json"),
        "blocks": subject.blocks,
        "chains": subject.chains,
        "batch": [_shape(leaf) for leaf in tree_leaves(subject.template)],
        "optimizer": subject.optimizer,
        "clip_norm": subject.clip_norm,
        "held-out samples": subject.num_valid,
        "code": sorted(set(_sources([subject.loss, *subject.users]))),
        "devices": [
            (
                asdict(where(device)),
                device.budget_bytes if limited else device.budget_bytes.bit_length(),
            )
            for device in devices
        ],
        "limited": limited,
        "asked": {name: repr(value) for name, value in sorted(asked.items())},
        "anybatch": _version(),
    }
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class Remembered:
    """The storage of one plan.

    Attributes:
        key: see `key_of`.
        frontier: whether the plan is requested with the whole frontier, which not every plan has.
        passing: notices on the current state of the machine, which are not stored.
    """

    key: str
    frontier: bool
    passing: tuple[str, ...]

    def recall(self, device: Device) -> tuple[Plan | None, bool]:
        """The plan, with the current budget of `device`, and whether its frontier is as requested."""
        found = self.frontier and self._read("-frontier")
        if found:
            return self._now(found, device), True
        found = self._read()
        return found and self._now(found, device), not self.frontier

    def keep(self, plan: Plan) -> None:
        """Store the plan, if files can be written."""
        lasting = tuple(notice for notice in plan.notices if notice not in self.passing)
        plan = plan.model_copy(update={"notices": lasting})
        for kind in ("", "-frontier") if self.frontier else ("",):
            write(self._path(kind), _PLAN, plan)
        with contextlib.suppress(OSError):
            files = self._path().parent.glob("*.json")
            for file in sorted(files, key=lambda file: file.stat().st_mtime)[:-_MOST]:
                file.unlink(missing_ok=True)

    def _now(self, plan: Plan, device: Device) -> Plan:
        return plan.model_copy(
            update={
                "budget_bytes": device.budget_bytes,
                "reserve_bytes": reserve_of(device.budget_bytes, device.kind),
                "notices": (*plan.notices, *self.passing),
            }
        )

    def _read(self, kind: str = "") -> Plan | None:
        path = self._path(kind)
        found = read(path, _PLAN)
        if found is not None:
            with contextlib.suppress(OSError):
                path.touch()
        return found

    def _path(self, kind: str = "") -> Path:
        return cache_folder() / "plans" / f"{self.key}{kind}.json"


def _version() -> str:
    with contextlib.suppress(PackageNotFoundError):  # not installed: found through PYTHONPATH
        return version("anybatch")
    return ""


def _shape(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"{tuple(leaf.shape)} {leaf.dtype}"
    return type(leaf).__qualname__


def _sources(users: Iterable[object]) -> Iterator[str]:
    """Hashes of the files in which `users` are defined, or of their bytecode if there is no file.
    Installed packages are skipped: their versions represent them."""
    installed = [Path(sysconfig.get_path(name)) for name in ("purelib", "platlib", "stdlib")]
    for user in users:
        while isinstance(user, partial):
            user = user.func
        known = user if inspect.isclass(user) or inspect.isroutine(user) else type(user)
        with contextlib.suppress(OSError, TypeError):
            file = Path(inspect.getsourcefile(known) or "")
            if any(file.is_relative_to(folder) for folder in installed):
                continue
            if file.is_file():
                yield hashlib.sha256(file.read_bytes()).hexdigest()
                continue
        code = getattr(known, "__code__", None)
        yield f"{known.__qualname__} {code.co_code.hex() if code else ''}"
