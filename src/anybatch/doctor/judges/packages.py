"""Python, the system under it, and the packages."""

from __future__ import annotations

from collections.abc import Iterator

from anybatch.doctor.facts import Facts, Package, Python
from anybatch.doctor.finding import Finding
from anybatch.doctor.judges.versions import is_before


def judge(facts: Facts) -> Iterator[Finding]:
    """Findings on `Facts.python`."""
    python = facts.python
    if python is None:
        return
    yield Finding("Python", f"{python.version}, {python.executable}")
    yield _system(python)
    yield _anybatch(python)
    needed = [one for one in python.packages if not one.extra]
    faults = [finding for one in needed if (finding := _needed(one))]
    if needed and not faults:
        yield Finding("packages", f"all {len(needed)} that anybatch needs")
    yield from faults
    for extra in dict.fromkeys(one.extra for one in python.packages if one.extra):
        yield _extra(extra, [one for one in python.packages if one.extra == extra])


def _system(python: Python) -> Finding:
    value = ", ".join(filter(None, (python.system, python.libc)))
    if python.system.startswith("Linux") and not python.libc.startswith("glibc"):
        return Finding(
            "system",
            value,
            "note",
            meaning="the C library is not glibc, whose heap anybatch tells to give memory back: on"
            " the CPU more memory is used than is predicted",
        )
    return Finding("system", value)


def _anybatch(python: Python) -> Finding:
    if python.anybatch:
        return Finding("anybatch", with_folder(python.anybatch, python.folder, python))
    return Finding(
        "anybatch",
        python.folder,
        "note",
        meaning="it is found, but not installed, so it is not known which packages it needs",
        remedy="install it with pip",
    )


def with_folder(version: str, folder: str, python: Python | None) -> str:
    """The version of a package, and its folder unless that is the interpreter's own."""
    if python is not None and folder.startswith(python.prefix):
        return version
    return f"{version}, {folder}"


def _needed(one: Package) -> Finding | None:
    """None: it is as it should be."""
    install = f"pip install '{one.name}{'>=' * bool(one.least)}{one.least}'"
    if one.version is None:
        return Finding(
            one.name, "not installed", "problem", meaning="anybatch needs it", remedy=install
        )
    if one.least and is_before(one.version, one.least):
        meaning = f"anybatch needs {one.least} or later"
        return Finding(one.name, one.version, "problem", meaning=meaning, remedy=install)
    if one.fault:
        return Finding(
            one.name,
            one.version,
            "problem",
            meaning=f"it cannot be imported ({one.fault})",
            remedy=f"pip install --force-reinstall {one.name}",
        )
    return None


def _extra(extra: str, packages: list[Package]) -> Finding:
    """Optional packages that are installed together."""
    missing = [one.name for one in packages if one.version is None]
    early = [one for one in packages if one.version and is_before(one.version, one.least)]
    there = [f"{one.name} {one.version}" for one in packages if one.version is not None]
    value = ", ".join([*there, *(f"no {name}" for name in missing)])
    remedy = f"pip install 'anybatch[{extra}]'"
    if early:
        meaning = " and ".join(f"{one.least} or later is needed of {one.name}" for one in early)
        return Finding(f"[{extra}]", value, "warning", meaning=meaning, remedy=remedy)
    if missing:
        return Finding(f"[{extra}]", value, "note", remedy=remedy)
    return Finding(f"[{extra}]", value)
