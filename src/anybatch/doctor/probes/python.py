"""The interpreter, the system, and the packages that this one asks for."""

from __future__ import annotations

import importlib
import os
import platform
import re
import shutil
import sys
from importlib import metadata
from pathlib import Path

from anybatch.doctor.facts import Package, Python

_REQUIREMENT = re.compile(
    r"(?P<name>[\w.-]+)(?:\[[^]]*\])?\s*(?:>=\s*(?P<least>[\d.]+))?"
    r"\s*(?:;\s*extra\s*==\s*['\"](?P<extra>[\w-]+)['\"])?\s*"
)
"""Of what pyproject.toml has: other forms would be passed over."""

_MODULES = {"nvidia-ml-py": "pynvml"}

_FOR_DEVELOPMENT = "dev"


def look() -> Python:
    """See `Python`."""
    try:
        version = metadata.version("anybatch")
        requirements = metadata.requires("anybatch") or []
    except metadata.PackageNotFoundError:
        version, requirements = "", []
    compilers = (os.environ.get("CXX", ""), "g++", "clang++", "c++")
    return Python(
        version=platform.python_version(),
        executable=sys.executable,
        prefix=sys.prefix,
        anybatch=version,
        folder=str(Path(__file__).parents[2]),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        libc=" ".join(filter(None, platform.libc_ver())),
        compiler=next((found for name in compilers if (found := shutil.which(name))), ""),
        packages=tuple(map(_looked_up, parse(requirements))),
    )


def parse(requirements: list[str]) -> list[Package]:
    """The packages that these requirements name, the needed ones first."""
    matches = filter(None, map(_REQUIREMENT.fullmatch, requirements))
    found = [Package(m["name"], m["extra"] or "", m["least"] or "") for m in matches]
    return sorted(
        (one for one in found if one.extra != _FOR_DEVELOPMENT), key=lambda one: one.extra != ""
    )


def _looked_up(package: Package) -> Package:
    """With its version here, and if it is a needed one, whether it can be imported. torch, which takes
    long and may crash, is left to a probe of its own."""
    try:
        version = metadata.version(package.name)
    except metadata.PackageNotFoundError:
        version = None
    fault = ""
    if version is not None and not package.extra and package.name != "torch":
        try:
            importlib.import_module(_MODULES.get(package.name, package.name.replace("-", "_")))
        except Exception as error:
            fault = f"{type(error).__name__}: {error}".partition("\n")[0]
    return Package(package.name, package.extra, package.least, version, fault)
