"""Builds libraries that stand for CUDA's own, so that torch's CUDA build runs where no GPU is.

Each library of `libraries/` defines what torch asks of CUDA and needs an answer to. Whatever else
torch's libraries import from the same one is generated here: it does nothing and succeeds."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

SOURCES = Path(__file__).parent / "libraries"
_STANDS_FOR = {  # source -> what it stands for, as torch's imports name it
    "runtime": ("libcudart",),
    "cublas": ("libcublas", "libcublasLt"),
    "cudnn": ("libcudnn",),
}
_DRIVER = re.compile(r"^cu[A-Z]\w*$")
_ORDER = "nccl", "driver", "runtime", "cublas", "cudnn"
"""That of nccl has functions of the runtime, which wait for collectives, and stands before it."""

_NAMES = {"driver": "libcuda.so.1"}


def build(folder: Path) -> list[Path]:
    """The libraries, made in `folder`, in an order in which they can be preloaded.

    Needs a C++ compiler, `nm`, and headers: CUDA's in `$CUDA_HOME` (default: `/usr/local/cuda`), and
    those that came with torch. Raises `CalledProcessError` where one is missing."""
    import torch

    packages = Path(torch.__file__).parents[1]
    imports = _imports(packages / "torch" / "lib")
    includes = [
        Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include",
        *sorted(packages.glob("nvidia/*/include")),
    ]
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for source in sorted(SOURCES.glob("*.cpp"), key=lambda path: _ORDER.index(path.stem)):
        wanted = {
            symbol
            for symbol, library in imports
            if library in _STANDS_FOR.get(source.stem, ())
            or (source.stem == "driver" and not library and _DRIVER.match(symbol))
        }
        made.append(_built(source, wanted, folder, includes))
    return made


def _built(source: Path, wanted: set[str], folder: Path, includes: list[Path]) -> Path:
    compiler = ["g++", "-std=c++17", "-O1", "-fPIC", "-w", *(f"-I{path}" for path in includes)]
    target = folder / _NAMES.get(source.stem, f"lib{source.stem}_null.so")
    object_file, rest = folder / f"{source.stem}.o", folder / f"{source.stem}_rest.c"
    subprocess.run([*compiler, "-c", source, "-o", object_file], check=True)
    defined = {line.split()[-1] for line in _nm("--defined-only", object_file)}
    rest.write_text(
        "".join(f"long {name}(void) {{ return 0; }}\n" for name in sorted(wanted - defined))
    )
    subprocess.run(
        [
            "g++",
            "-shared",
            "-fPIC",
            "-w",
            f"-Wl,-soname,{target.name}",
            object_file,
            "-xc",
            rest,
            "-o",
            target,
        ],
        check=True,
    )
    return target


def _imports(folder: Path) -> set[tuple[str, str]]:
    """What torch's libraries ask others for: the name, and the library without its version."""
    found = set()
    for library in folder.glob("*.so"):
        for line in _nm("-D", "--undefined-only", library):
            name, _, version = line.split()[-1].partition("@")
            found.add((name, version.lstrip("@").partition(".")[0]))
    return found


def _nm(*args: str | Path) -> list[str]:
    return subprocess.run(
        ["nm", *args], check=True, capture_output=True, text=True
    ).stdout.splitlines()
