"""From `pip install` of the wheel to the first plan of a model of one's own, in seconds.

    python benchmarks/install/run.py

torch and the other dependencies are those of this environment: how long they take to download says
nothing about anybatch. Ends with status 1 if it takes more than a minute.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path
from site import getsitepackages

ROOT = Path(__file__).parents[2]
MOST_SECONDS = 60.0


def timed(name: str, *words: str | Path, cwd: Path) -> float:
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    start = time.perf_counter()
    subprocess.run(
        [str(word) for word in words], cwd=cwd, env=env, check=True, stdout=subprocess.DEVNULL
    )
    seconds = time.perf_counter() - start
    print(f"{name:24}{seconds:6.1f} s", flush=True)
    return seconds


def main() -> int:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        pip = [sys.executable, "-m", "pip"]
        wheel = [*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT]
        timed("build the wheel", *wheel, cwd=folder)
        (found,) = folder.glob("*.whl")
        venv.create(folder / "environment", with_pip=False)
        python = folder / "environment/bin/python"
        (packages,) = folder.glob("environment/lib/python*/site-packages")
        (packages / "dependencies.pth").write_text("\n".join(getsitepackages()))
        model = folder / "own_task.py"
        model.write_text((ROOT / "examples/own_task.py").read_text())
        into = [*pip, "--python", python, "install", "--quiet", "--no-deps", "--no-index", found]
        plan = [folder / "environment/bin/anybatch", "plan", model, "--device", "rtx-4090"]
        seconds = timed("install the wheel", *into, cwd=folder)
        seconds += timed("plan a model of one's own", *plan, cwd=folder)
    print(f"{'in all':24}{seconds:6.1f} s of {MOST_SECONDS:.0f} s")
    return int(seconds > MOST_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
