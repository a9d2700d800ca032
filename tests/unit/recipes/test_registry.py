"""A word becomes a task, or one sentence with value, place and remedy."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from anybatch.errors import InputError, LossError
from anybatch.recipes import names, options_of, resolve

pytestmark = pytest.mark.usefixtures("_clean_imports")

TASK = """
import torch
from torch.utils.data import TensorDataset
from anybatch.errors import LossError
from anybatch.task import Task

def build():
    return torch.nn.Linear(2, 1)

def loss(model, batch):
    return model(batch[0]).mean()

def task(global_batch: int = 4, **more):
    return Task(
        model=build, loss=loss, optimizer=torch.optim.SGD, global_batch=global_batch, epochs=1,
        train=TensorDataset(torch.zeros(8, 2)), **more,
    )
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(name, code, prefix=TASK):
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(prefix + dedent(code), "utf-8")


def test_listing_the_recipes_loads_neither_torch_nor_a_recipe():
    code = (
        "import sys; from anybatch import recipes; assert 'digits' in recipes.names();"
        "print([m for m in ('torch', 'sklearn', 'numpy', 'anybatch.task') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_recipe_resolves_and_documents_every_option():
    for name, description in names().items():
        assert description.endswith(".")
        assert all(option.doc for option in options_of(name))
        if not any(option.required for option in options_of(name)):
            assert resolve(name).name == name


def test_options_reach_the_recipe():
    task = resolve("digits", {"global-batch": "512", "epochs": "2", "data": "none", "seed": "3"})
    assert (task.global_batch, task.epochs, task.seed) == (512, 2, 3)


@pytest.mark.parametrize("spec", ["my run.py", "my run.py:task", "./my run.py", "{here}/my run.py"])
def test_a_file_becomes_a_task_named_after_it(here, spec):
    write("my run.py", "")
    task = resolve(spec.format(here=here), {"global_batch": "2"})
    assert (task.name, task.global_batch) == ("my run", 2)
    assert [option.name for option in options_of("my run.py")] == ["global_batch"]


def test_a_folder_with_a_colon_in_its_name_is_no_function(here):
    write("a:b/run.py", "def other(): return task(name='own')")
    assert resolve("a:b/run.py").name == "run"
    assert resolve("a:b/run.py:other").name == "own"


def test_a_file_imports_its_neighbours_even_while_it_trains(here):
    write("sub/neighbour_of_run.py", "WIDTH = 3", prefix="")
    write("sub/run_with_neighbour.py", "def loss(model, batch):\n    import neighbour_of_run")
    task = resolve("sub/run_with_neighbour.py")
    resolve("sub/run_with_neighbour.py")
    assert task.loss(None, None) is None
    assert sys.path.count(str(here / "sub")) == 1
    assert not list(here.glob("sub/__pycache__/run_with_neighbour*"))


def test_dataclasses_and_pickle_know_the_module(here):
    for folder in ("one", "two"):  # the second file of this name cannot have the plain name
        write(
            f"{folder}/same_name_twice.py",
            f"""
            from dataclasses import dataclass

            @dataclass
            class Samples:
                size: "int"
                folder = {folder!r}
                def __len__(self): return self.size
                def __getitem__(self, i): return i

            def other():
                return Task(model=build, loss=loss, optimizer=torch.optim.SGD, global_batch=1,
                            steps=1, train=Samples(3))
            """,
        )
    for folder in ("one", "two"):
        task = resolve(f"{folder}/same_name_twice.py:other")
        again = pickle.loads(pickle.dumps(task))
        assert again.train == task.train
        assert again.train.folder == folder


def test_a_spawned_process_can_unpickle_what_a_file_defines(here):
    write("run_for_spawn.py", "")
    task = resolve("run_for_spawn.py")
    (here / "task.pickle").write_bytes(pickle.dumps(task.model))
    code = "import pickle; print(pickle.load(open('task.pickle', 'rb'))())"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("Linear(")


def test_a_file_named_like_a_module_does_not_take_its_place(here):
    import json

    write("json.py", "")
    assert resolve("json.py").name == "json"
    assert sys.modules["json"] is json


def test_a_changed_file_is_run_again(here):
    write("changing.py", "SIZE = 1\ndef sized(): return task(SIZE)")
    assert resolve("changing.py:sized").global_batch == 1
    write("changing.py", "SIZE = 22\ndef sized(): return task(SIZE)")
    assert resolve("changing.py:sized").global_batch == 22


def test_an_unchanged_file_is_run_once(here):
    write("counted.py", "open('log', 'a').write('x')")
    resolve("counted.py")
    options_of("counted.py:task")
    assert Path("log").read_text() == "x"


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("digit", ["no recipe 'digit'", "give 'digits', 'finetune'", "FILE.py:function"]),
        ("", ["no recipe ''", "give 'digits'"]),
        ("nothing-like-it", ["no recipe 'nothing-like-it': give 'digits'"]),
        ("digits:task", ["'digits:task'", "give 'digits'"]),
        ("good", ["no recipe 'good'", "a file of your own as good.py or"]),
        ("good:other", ["a file of your own as good.py or good.py:function"]),
        ("goood.py", ["'goood.py'", "does not exist", "looked from", "such as 'good.py'"]),
        ("no/where.py:task", ["'no/where.py' of the task 'no/where.py:task'", "does not exist"]),
        ("x" * 5000 + ".py", ["does not exist"]),
        ("nul\0.py", ["does not exist"]),
        ("folder", ["'folder' is not a .py file", "FILE.py"]),
        (".", ["'.' is not a .py file"]),
        ("folder.py", ["'folder.py' is not a .py file"]),
        ("notes.txt", ["'notes.txt' is not a .py file", "FILE.py"]),
        ("good.py:tsk", ["no function 'tsk'", "FILE.py:function, 'task'"]),
        ("good.py:", ["no function ''"]),
        ("bare.py", ["no function 'task'", "it has none", "anybatch.Task"]),
        ("good.py:VALUE", ["no function 'VALUE'"]),
        ("good.py:nothing", ["'nothing' of 'good.py' returned None", "anybatch.Task"]),
        ("good.py:number", ["returned a value of type int", "anybatch.Task"]),
        ("good.py:build", ["returned a value of type Linear"]),
        ("good.py:needy", ["'needy' of 'good.py'", "'size' (int) is required", "-s size=VALUE"]),
    ],
)
def test_what_cannot_be_resolved_is_told_in_one_sentence(here, spec, said):
    write("bare.py", "from math import sqrt", prefix="")
    write("notes.txt", "", prefix="")
    (here / "folder").mkdir()
    (here / "folder.py").mkdir()
    write(
        "good.py",
        """
        VALUE = 3
        def nothing(): pass
        def number(): return 3
        def needy(size: int): return task(size)
        """,
    )
    with pytest.raises(InputError) as caught:
        resolve(spec)
    message = str(caught.value)
    assert [words for words in said if words not in message] == []
    assert message.endswith(".")
    assert "\n" not in message


def test_an_option_that_does_not_exist_is_told_with_the_nearest(here):
    with pytest.raises(InputError, match=r"recipe 'digits'.*'epoch'; give 'epochs', 'data'"):
        resolve("digits", {"epoch": "3"})


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import json\njson.loads('{')\n", ["JSONDecodeError", "line 2", "json.loads('{')"]),
        ("def task(:\n", ["SyntaxError", "line 1", "def task(:"]),
        ("import module_that_is_not_there\n", ["ModuleNotFoundError: No module named"]),
        ("raise SystemExit(3)\n", ["SystemExit: 3", "line 1"]),
        ("\0", ["null bytes"]),
    ],
)
def test_a_file_that_cannot_be_imported_shows_its_own_lines_alone(here, code, said):
    write("broken.py", code, prefix="")
    with pytest.raises(InputError) as caught:
        resolve("broken.py")
    message = str(caught.value)
    first, _, shown = message.partition("\n")
    assert first.startswith("the file of the task 'broken.py' cannot be imported")
    assert [words for words in said if words not in shown] == []
    assert "importlib" not in shown
    assert "decoder.py" not in shown
    assert not [name for name in sys.modules if "broken" in name and "anybatch_task" in name]


def test_a_function_that_raises_shows_the_lines_of_the_user(here):
    write("helper_that_fails.py", "def helper():\n    return {}['width']", prefix="")
    write(
        "failing.py",
        """
        def fails():
            from helper_that_fails import helper
            return torch.nn.Sequential(torch.nn.Identity(helper()))
        """,
    )
    with pytest.raises(InputError) as caught:
        resolve("failing.py:fails")
    message = str(caught.value)
    assert message.startswith("the function 'fails' of 'failing.py' raised KeyError: ")
    assert "failing.py" in message
    assert "helper_that_fails.py" in message
    assert message.endswith("KeyError: 'width'")
    assert "registry.py" not in message


def test_the_project_s_own_errors_pass_unchanged(here):
    write("own.py", "def lost(): raise LossError('a sentence.')")
    with pytest.raises(LossError, match=r"^a sentence\.$"):
        resolve("own.py:lost")
    with pytest.raises(InputError, match="cannot be trained: global_batch is 0"):
        resolve("own.py", {"global_batch": "0"})
    write("own_at_import.py", "TASK = task(0)")
    with pytest.raises(InputError, match=r"^the task 'task' cannot be trained"):
        resolve("own_at_import.py")
