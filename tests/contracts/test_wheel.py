"""The wheel as a user installs it: what is in it, and the first plan of a model of one's own by it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from email import message_from_string
from pathlib import Path
from site import getsitepackages

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

MODEL = '''
import torch
import torch.nn.functional as F

import anybatch as ab


def loss(model, batch):
    inputs, labels = batch
    return ab.Loss(F.cross_entropy(model(inputs), labels, reduction="sum"), weight=len(labels))


def task(width: int = 64) -> ab.Task:
    """A model of one's own."""
    return ab.Task(
        model=lambda: torch.nn.Sequential(
            torch.nn.Linear(32, width), torch.nn.ReLU(), torch.nn.Linear(width, 2)
        ),
        loss=loss,
        optimizer=lambda params: torch.optim.AdamW(params),
        train=torch.utils.data.TensorDataset(torch.zeros(512, 32), torch.zeros(512).long()),
        global_batch=256,
        epochs=1,
    )
'''


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    done = run(
        sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", folder, ROOT, cwd=folder
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (found,) = folder.glob("*.whl")
    return found


def run(*words: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """A command that does not see the checkout."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run(
        [str(word) for word in words], cwd=cwd, env=env, capture_output=True, text=True, timeout=300
    )


@pytest.mark.slow
def test_a_wheel_has_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = message_from_string(archive.read(name_of(names, "METADATA")).decode())
        scripts = archive.read(name_of(names, "entry_points.txt")).decode()
    source = ROOT / "src"
    package = {
        path.relative_to(source).as_posix()
        for path in (source / "anybatch").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name for name in names if ".dist-info/" not in name} == package
    assert "anybatch/report/page.html.jinja" in names  # no Python, but needed
    assert "anybatch = anybatch.__main__:main" in scripts
    assert (metadata["Name"], metadata["Version"]) == ("anybatch", PROJECT["version"])
    assert metadata["Requires-Python"] == PROJECT["requires-python"]
    assert metadata.get_all("Classifier") == PROJECT["classifiers"]
    needed = [it for it in metadata.get_all("Requires-Dist") if "extra ==" not in it]
    assert {re.match(r"[\w-]+", it)[0] for it in needed} == {
        re.match(r"[\w-]+", it)[0] for it in PROJECT["dependencies"]
    }
    assert {"recipes", "hf", "docs"} <= set(metadata.get_all("Provides-Extra"))
    readme = metadata.get_payload()
    assert readme.startswith("# anybatch")


def name_of(names: set[str], end: str) -> str:
    (found,) = (name for name in names if name.endswith(f".dist-info/{end}"))
    return found


@pytest.mark.nightly
def test_an_installed_wheel_plans_a_model_of_ones_own(wheel, tmp_path):
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=False, symlinks=True)
    python = environment / "bin/python"
    pip = [sys.executable, "-m", "pip", "--python", python]
    done = run(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    # What anybatch depends on is here already, and comes after it on the path.
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text("\n".join(getsitepackages()))
    (tmp_path / "my_model.py").write_text(MODEL)

    where = run(python, "-c", "import anybatch; print(anybatch.__file__)", cwd=tmp_path)
    version = run(environment / "bin/anybatch", "--version", cwd=tmp_path)
    plan = run(
        environment / "bin/anybatch", "plan", "my_model.py", "--device", "rtx-4090", cwd=tmp_path
    )

    assert Path(where.stdout.strip()).is_relative_to(packages)
    assert PROJECT["version"] in version.stdout
    assert plan.returncode == 0, plan.stderr[-3000:]
    assert re.search(r"global batch +256 samples per step", plan.stdout)


def test_the_changelog_tells_the_version():
    told = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    releases = re.findall(r"^## \[(.+?)\](?: - (\d{4}-\d\d-\d\d))?$", told, re.MULTILINE)
    assert releases[0] == ("Unreleased", "")
    assert releases[1][0] == PROJECT["version"]
    assert releases[1][1]  # its day
