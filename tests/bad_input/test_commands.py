"""What a user can do wrong on the command line: each mistake ends with its own exit status and one
sentence that names the value, the place and the remedy, and leaves nothing half-written.

A mistake that is seen before training leaves the folder as it was. One that only shows in a step (a
loss that turns NaN, sample 17 of a data set) leaves the record of the run: plan, events to the end,
report; no weights.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.bad_input.conftest import Outcome, tree

from anybatch.events import RunEnded, StepDone
from anybatch.parallel import SingleDevice
from anybatch.plans import Plan
from anybatch.report import read
from anybatch.state import Checkpoints


class Bad(NamedTuple):
    """A mistake: code after the good task, the command, and words that the sentence must have."""

    name: str
    code: str
    words: tuple[str, ...]
    arguments: str = "train task.py"
    status: int = 2
    record: bool = False  # it shows in a step, so the record of the run stays
    trace: tuple[str, ...] = ()  # lines of the user's own traceback
    table: tuple[str, ...] = ()  # what would help, below the sentence


NORM = "def model(): return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))\n"
STREAM = "class S(IterableDataset):\n    def __iter__(self):\n        {}\n"
DATA = """\
class D(Dataset):
    def __len__(self): return 40
    def __getitem__(self, i): {}
"""


def a_loss(code: str) -> str:
    return f"def loss(model, batch): {code}\n"


TASKS = [
    Bad("unknown-recipe", "", ("'digit'", "give 'digits', "), "train digit"),
    Bad("missing-file", "", ("'tsk.py'", "does not exist", "'task.py'"), "train tsk.py"),
    Bad("folder", "", ("'.'", "is not a .py file", "FILE.py"), "train ."),
    Bad("no-such-function", "", ("'tsk'", "FILE.py:function, 'task'"), "train task.py:tsk"),
    Bad("no-task-function", "del task\n", ("no function 'task'", "FILE.py:function", "'given'")),
    Bad("not-callable", "task = 3\n", ("no function 'task'", "FILE.py:function")),
    Bad("not-a-task", "def task(): return 3\n", ("'task'", "type int", "return an anybatch.Task")),
    Bad("returns-nothing", "def task(): pass\n", ("returned None", "return an anybatch.Task")),
    Bad(
        "file-fails",
        "import nothing_like_this\n",
        ("'task.py'", "ModuleNotFoundError", "correct the file"),
        trace=("import nothing_like_this", "No module named 'nothing_like_this'"),
    ),
    Bad("syntax", "def task(:\n", ("'task.py'", "SyntaxError"), trace=("def task(:",)),
    Bad("file-exits", "raise SystemExit(0)\n", ("SystemExit",), trace=("raise SystemExit(0)",)),
    Bad(
        "task-function-fails",
        "def task(): raise ValueError('no data at hand')\n",
        ("'task'", "ValueError"),
        trace=("in task", "ValueError: no data at hand"),
    ),
    Bad("required-option", "def task(size: int): pass\n", ("'size' (int)", "-s size=VALUE")),
    Bad("unknown-option", "", ("'epoch'", "give 'epochs'"), "train task.py -s epoch=3"),
    Bad("option-without-value", "", ("'epochs'", "KEY=VALUE"), "train task.py -s epochs"),
    Bad(
        "global-batch-twice",
        "",
        ("--global-batch is '8' and -s global_batch=4", "leave one of them out"),
        "plan digits --global-batch 8 -s global_batch=4",
    ),
    Bad("option-without-name", "", ("'=3'", "KEY=VALUE"), "train task.py -s =3"),
    Bad("option-of-wrong-type", "", ("'many'", "has to be int"), "train task.py -s epochs=many"),
    Bad("unknown-recipe-to-list", "", ("'digit'", "'digits'"), "recipes digit"),
    Bad(
        "unknown-field",
        "CHANGES = dict(globl_batch=8)\n",
        ("TypeError", "correct the function"),
        trace=("globl_batch",),
    ),
]

WORDS = [
    Bad("no-such-command", "", ("'trian'", "'train'", "anybatch --help"), "trian task.py"),
    Bad("no-task", "", ("TASK", "anybatch train --help"), "train"),
    Bad("no-task-of-memory", "", ("TASK", "anybatch memory --help"), "memory"),
    Bad("report-without-a-word", "", ("RUN", "anybatch report --help"), "report"),
    Bad("doctor-of-a-task", "", ("task.py", "anybatch doctor --help"), "doctor task.py"),
    Bad("two-tasks", "", ("task.py", "anybatch train --help"), "train digits task.py"),
    Bad("no-such-option", "", ("--globalbatch", "--global-batch"), "train task.py --globalbatch 3"),
    Bad("no-trial", "", ("--no-trial", "give --no-rehearsal"), "train task.py --no-trial"),
    Bad("if-faster", "", ("give --compile,",), "plan task.py --compile-if-faster"),
    Bad("option-at-the-end", "", ("--memory", "argument"), "train task.py --memory"),
    Bad("global-batch-text", "", ("--global-batch", "'many'"), "train task.py --global-batch many"),
    Bad(
        "global-batch-0",
        "",
        ("--global-batch is '0'", "at least 1"),
        "plan task.py --global-batch 0",
    ),
    Bad("global-batch-negative", "", ("is '-1'", "at least 1"), "verify task.py --global-batch -1"),
    Bad("micro-batch-0", "", ("micro-batch is 0", "from 1 to"), "train task.py --micro-batch 0"),
    Bad("micro-batch-negative", "", ("micro-batch is -2",), "train task.py --micro-batch -2"),
    Bad(
        "micro-batch-large",
        "",
        ("micro-batch is 9", "global batch 8", "leave it out"),
        "train task.py --micro-batch 9",
    ),
    Bad(
        "micro-batch-cuts-a-ghost",
        NORM + "CHANGES = dict(ghost_batch=4)\n",
        ("micro-batch is 6", "ghost batch", "multiple of 4"),
        "train task.py --micro-batch 6",
    ),
    Bad("grain-alone", "", ("--grain is 4", "--reproducible too"), "train task.py --grain 4"),
    Bad(
        "grain-0",
        "",
        ("reproducible.samples is 0", "at least 1"),
        "plan task.py --reproducible --grain 0",
    ),
    Bad(
        "grain-cuts-a-ghost",
        NORM + "CHANGES = dict(ghost_batch=4)\n",
        ("grains of 6", "ghost batches", "multiple of 4"),
        "train task.py --reproducible --grain 6",
    ),
    Bad(
        "reproducible-divided",
        "",
        ("parallel is 'shard'", "reproducible", "'replicate'"),
        "plan task.py --reproducible --parallel shard --devices 2",
    ),
    Bad("backend", "", ("--backend is 'mpi'", "gloo", "mpirun"), "train task.py --backend mpi"),
    Bad("norms", "", ("norms is 'sync'", "synchronised"), "train task.py --norms sync"),
    Bad(
        "norms-as-written-in-pieces",
        NORM,
        ("micro-batch is 4", "ghost batch", "multiple of 8"),
        "train task.py --norms as-written --micro-batch 4",
    ),
    Bad("shard-over-0", "", ("shard-over is 0", "at least 1"), "plan task.py --shard-over 0"),
    Bad(
        "shard-over-no-divisor",
        "",
        ("divided over 3 ranks", "does not divide the number of ranks, 4"),
        "plan task.py --shard-over 3 --devices 4",
    ),
    Bad(
        "shard-over-whole-models",
        "",
        ("--parallel is 'replicate'", "--shard-over is given", "leave one of them out"),
        "plan task.py --shard-over 2 --parallel replicate --devices 4",
    ),
    Bad(
        "compress-unknown",
        "",
        ("compress is 'int8'", "bf16, fp16"),
        "train task.py --compress int8",
    ),
    Bad("local-steps-0", "", ("local-steps is 0", "at least 1"), "train task.py --local-steps 0"),
    Bad(
        "local-steps-stale",
        "",
        ("local-steps is 2", "stale", "one of the two"),
        "train task.py --local-steps 2 --stale",
    ),
    Bad("memory-0", "", ("'0'", "no room", "512MiB"), "train task.py --memory 0"),
    Bad("memory-unit", "", ("'12XB'", "not a size", "10GiB"), "plan task.py --memory 12XB"),
    Bad("memory-negative", "", ("'-3GiB'", "not a size"), "train task.py --memory=-3GiB"),
    Bad("memory-empty", "", ("''", "not a size"), "train task.py --memory="),
    Bad("memory-beyond", "", ("'900TiB'", "has only"), "train task.py --memory 900TiB"),
    Bad("precision", "", ("'fp7'", "fp32", "bf16"), "train task.py --precision fp7"),
    Bad("tf32-on-cpu", "", ("tf32", "cpu", "use fp32"), "train task.py --precision tf32"),
    Bad("fp8-on-cpu", "", ("fp8", "cpu", "use bf16"), "train task.py --precision fp8"),
    Bad("recompute-unknown", "", ("'layer7'", "'0'"), "train task.py --recompute layer7"),
    Bad("recompute-nothing", "", ("','", "names of modules"), "train task.py --recompute ,"),
    Bad("recompute-all", "", ("'all'", "no repeated blocks"), "train task.py --recompute all"),
    Bad(
        "recompute-nested",
        "def model(): return nn.Linear(3, 1)\n",
        ("'nested'", "no nn.Sequential", "leave it out"),
        "train task.py --recompute nested",
    ),
    Bad("device", "", ("'big'", "24GiB"), "plan task.py --device big"),
    Bad("device-like", "", ("'h2000'", "'h200'"), "plan task.py --device h2000"),
    Bad("device-of-several", "", ("'a100'", "'a100-40gb'"), "plan task.py --device a100"),
    Bad("device-of-none", "", ("'0x24GiB'", "no device"), "plan task.py --device 0x24GiB"),
    Bad("device-not-here", "", ("'cuda:99'", "here"), "plan task.py --device cuda:99"),
    Bad(
        "device-too-small",
        "",
        ("'30GiB'", "only 24.0 GiB"),
        "plan task.py --device 24GiB --memory 30GiB",
    ),
    Bad("devices-of-none", "", ("devices is 0", "at least 1"), "plan task.py --devices 0"),
    Bad("devices-twice", "", ("3 devices", "once"), "plan task.py --device 2x24GiB --devices 3"),
    Bad("plot-nowhere", "", ("no/p.html", "cannot be written"), "plan task.py --plot no/p.html"),
    Bad("memory-html", "", ("no/p.html", "cannot be written"), "memory task.py --html no/p.html"),
    Bad("memory-json", "", ("cannot be written", "folder"), "memory task.py --json ."),
    Bad("samples-1", "", ("--samples is 1", "at least 2"), "verify task.py --samples 1"),
    Bad("samples-negative", "", ("samples is -4",), "verify task.py --samples=-4"),
    Bad("report-of-no-run", "", (". is not a run folder", "anybatch train"), "report ."),
    Bad("report-of-nothing", "", ("missing does not exist", "anybatch train"), "report missing"),
    Bad("out-below-a-file", "", ("task.py/x", "--out"), "train task.py --out task.py/x"),
    Bad("resume-nothing", "", ("resume", "out"), "train task.py --resume"),
    Bad("keep-word", "", ("'few' is not valid", "valid integer"), "train task.py --keep few"),
    Bad("depth", "", ("'-1' is not valid", "equal to 0"), "memory task.py --depth -1"),
    Bad("keep-0", "", ("keep is 0", "at least 1"), "train task.py --keep 0"),
    Bad("restarts", "", ("restarts is -1", "at least 0"), "train task.py --restarts -1"),
    Bad("often", "", ("'often'", "30s, 10min or 2h"), "train task.py --checkpoint-every often"),
    Bad("every-0", "", ("--checkpoint-every is '0'",), "train task.py --checkpoint-every 0"),
    Bad(
        "shard-alone",
        "",
        ("parallel is 'shard', which is for ranks that have joined", "--ranks 2 or more"),
        "train task.py --parallel shard",
    ),
    Bad(
        "setting-twice",
        "",
        ("-s lr is given twice, as '1' and '2'",),
        "plan digits -s lr=1 -s lr=2",
    ),
    Bad("stall-0", "", ("stall-seconds is 0",), "train task.py --stall-seconds 0"),
    Bad("out-is-a-file", "", ("task.py", "File exists"), "train task.py --out task.py"),
    Bad("out-deep-below", "", ("task.py/a/b", "--out"), "train task.py --out task.py/a/b"),
    Bad(
        "plan-into-nowhere",
        "",
        ("nowhere/plan.json", "folder"),
        "plan task.py --out nowhere/plan.json",
    ),
    Bad(
        "plan-below-a-file",
        "",
        ("task.py/p.json", "Not a directory"),
        "plan task.py --out task.py/p.json",
    ),
    Bad("plan-into-a-folder", "", ("it is a folder", "name a file"), "plan task.py --out ."),
]

FIELDS = [
    Bad(
        "no-length", "CHANGES = dict(epochs=None)\n", ("epochs, steps and samples", "none of them")
    ),
    Bad("two-lengths", "CHANGES = dict(steps=3)\n", ("exactly one", "epochs and steps")),
    Bad("epochs-0", "", ("epochs is 0", "at least 1"), "train task.py -s epochs=0"),
    Bad("batch-of-wrong-type", "CHANGES = dict(global_batch=8.0)\n", ("global_batch is 8.0",)),
    Bad(
        "criterion",
        "CHANGES = dict(loss=torch.nn.CrossEntropyLoss())\n",
        ("torch's CrossEntropyLoss", "outputs and targets", "model(batch[0])"),
    ),
    Bad(
        "two-schedules",
        "CHANGES = dict(schedule=lambda p: 1.0, scheduler=lambda o: None)\n",
        ("schedule and scheduler", "give one"),
    ),
    Bad("last", "CHANGES = dict(last='skip')\n", ("'skip'", "'drop', 'keep' or 'wrap'")),
    Bad("drops-all", "CHANGES = dict(last='drop', global_batch=41)\n", ("40", "41", "'keep'")),
    Bad("clip-0", "CHANGES = dict(clip_norm=0)\n", ("clip_norm is 0", "above zero")),
    Bad("clip-nan", "CHANGES = dict(clip_norm=float('nan'))\n", ("clip_norm is nan",)),
    Bad("seed", "CHANGES = dict(seed='x')\n", ("seed is 'x'", "whole number")),
    Bad("workers", "CHANGES = dict(num_workers=-1)\n", ("num_workers is -1", "at least 0")),
    Bad(
        "two-faults-at-once",
        "CHANGES = dict(clip_norm=-1, seed='x')\n",
        ("clip_norm is -1", "seed is 'x'"),
    ),
    Bad("model-of-wrong-type", "CHANGES = dict(model=3)\n", ("model is a value of type int",)),
    Bad("model-function", "def model(): pass\n", ("NoneType", "return a torch.nn.Module")),
    Bad(
        "model-function-fails",
        "def model(): raise RuntimeError('no weights')\n",
        ("RuntimeError",),
        trace=("in model", "no weights"),
    ),
    Bad("nothing-to-train", "def model(): return nn.ReLU()\n", ("no parameter", "requires_grad_")),
    Bad(
        "all-frozen",
        "def model(): return nn.Linear(3, 1).requires_grad_(False)\n",
        ("no parameter that requires a gradient",),
    ),
    Bad(
        "model-on-two-devices",
        "def model(): return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1, device='meta'))\n",
        ("several devices", "'0.bias' on cpu", "'1.bias' on meta", "leave it on one"),
    ),
    Bad(
        "module-on-two-devices",
        "CHANGES = dict(model=nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1, device='meta')))\n",
        ("several devices", "'1.bias' on meta"),
    ),
    Bad(
        "model-on-meta",
        "CHANGES = dict(model=nn.Linear(3, 1, device='meta'))\n",
        ("'bias'", "'meta'", "build the model on the CPU"),
    ),
    Bad("optimizer-function", "def sgd(params): pass\n", ("NoneType", "torch.optim.Optimizer")),
    Bad(
        "optimizer-function-fails",
        "def sgd(params): return torch.optim.SGD(params, lr=-1)\n",
        ("ValueError",),
        trace=("in sgd", "Invalid learning rate: -1"),
    ),
    Bad(
        "optimizer-of-another-model",
        "def sgd(params): return torch.optim.SGD(nn.Linear(5, 1).parameters(), lr=0.1)\n",
        ("2 parameters that the model does not have", "(1, 5)", "is given"),
    ),
    Bad(
        "optimizer-instead-of-function",
        "CHANGES = dict(optimizer=sgd(model().parameters()))\n",
        ("optimizer is a value of type SGD", "give a function"),
    ),
    Bad(
        "optimizer-with-closure",
        "def sgd(params): return torch.optim.LBFGS(params)\n",
        ("LBFGS", "closure", "SGD or AdamW"),
    ),
    Bad("groups", "CHANGES = dict(parameters=lambda m: 3)\n", ("parameters function", "type int")),
    Bad(
        "group-without-parameters",
        "CHANGES = dict(parameters=lambda m: [{'lr': 3}])\n",
        ("entry 0", "a group without 'params'"),
    ),
    Bad(
        "schedule-gives-text",
        "CHANGES = dict(schedule=lambda p: 'a')\n",
        ("'a'", "step 1 (progress.step is 0)", "finite number"),
        record=True,
    ),
    Bad(
        "schedule-gives-nan",
        "CHANGES = dict(schedule=lambda p: float('nan') if p.step else 1.0)\n",
        ("nan", "step 2 (progress.step is 1)", "finite number"),
        record=True,
    ),
    Bad(
        "schedule-fails",
        "CHANGES = dict(schedule=lambda p: 1 / 0)\n",
        ("ZeroDivisionError",),
        record=True,
        trace=("1 / 0",),
    ),
    Bad(
        "schedule-of-a-stream",
        STREAM.format("yield from zip(X, Y)")
        + "CHANGES = dict(train=S(), schedule=ab.warmup_cosine(0.1))\n",
        ("schedule", "length of the training data is unknown", "steps=... or samples=..."),
        record=True,
    ),
    Bad("scheduler", "CHANGES = dict(scheduler=lambda o: 3)\n", ("type int", "LRScheduler")),
    Bad(
        "plateau-of-nothing",
        "CHANGES = dict(scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau)\n",
        ("ReduceLROnPlateau", "no held-out data", "valid="),
    ),
    Bad(
        "plateau-of-a-score",
        "CHANGES = dict(valid=TensorDataset(X, Y),"
        " scheduler=lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, 'max'))\n",
        ("ReduceLROnPlateau", "mode='max'", "mode='min'"),
    ),
    Bad(
        "scheduler-as-schedule",
        "CHANGES = dict(schedule=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9))\n",
        ("Progress is not an Optimizer", "scheduler="),
        record=True,
    ),
]

DATA_SETS = [
    Bad("no-data", "CHANGES = dict(train=None)\n", ("train", "NoneType", "__getitem__")),
    Bad("empty", "CHANGES = dict(train=TensorDataset(X[:0], Y[:0]))\n", ("train is an empty",)),
    Bad(
        "empty-valid", "CHANGES = dict(valid=TensorDataset(X[:0], Y[:0]))\n", ("valid is an empty",)
    ),
    Bad(
        "empty-stream",
        STREAM.format("return iter(())") + "CHANGES = dict(train=S())\n",
        ("gave no sample", "at least one"),
    ),
    Bad(
        "stream-fails-at-once",
        STREAM.format("raise OSError('gone')") + "CHANGES = dict(train=S())\n",
        ("stream S", "cannot be begun", "OSError: gone", "mend its __iter__"),
    ),
    Bad(
        "stream-fails-later",
        STREAM.format("yield from list(zip(X, Y))[:13]; raise OSError('gone')")
        + "CHANGES = dict(train=S())\n",
        ("sample 13", "stream S", "OSError: gone", "catch the error in the stream"),
        record=True,
    ),
    Bad(
        "first-sample-fails",
        DATA.format("raise ValueError('bad pixel')") + "CHANGES = dict(train=D())\n",
        ("sample 0 of D", "ValueError: bad pixel", "D[0]"),
    ),
    Bad(
        "sample-17-fails",
        DATA.format("return (X[i], Y[i]) if i != 17 else [][0]") + "CHANGES = dict(train=D())\n",
        ("sample 17 of D", "IndexError"),
        record=True,
    ),
    Bad(
        "held-out-sample-fails",
        DATA.format("return (X[i], Y[i]) if i != 17 else {}['x']") + "CHANGES = dict(valid=D())\n",
        ("sample 17 of D", "KeyError: 'x'", "D[17]"),
        record=True,
    ),
    Bad(
        "fewer-samples-than-told",
        DATA.format("return [*zip(X[:30], Y)][i]") + "CHANGES = dict(train=D())\n",
        ("of D", "it has 40 samples", "is __len__ right?"),
        record=True,
    ),
    Bad(
        "cannot-be-collated",
        DATA.format("return torch.zeros(3 + i % 2), Y[i]") + "CHANGES = dict(train=D())\n",
        ("samples 0, 1", "float32 [3]", "float32 [4]", "collate="),
    ),
    Bad(
        "one-cannot-be-collated",
        DATA.format("return torch.zeros(3 + (i == 17)), Y[i]") + "CHANGES = dict(train=D())\n",
        ("sample 17 is (float32 [4]", "collate="),
        record=True,
    ),
    Bad(
        "collate-fails",
        "def pad(samples): raise KeyError('image')\nCHANGES = dict(collate=pad)\n",
        ("pad raised KeyError: 'image'", "collate function"),
    ),
    Bad(
        "collate-gives-no-samples",
        "CHANGES = dict(collate=lambda samples: 3)\n",
        ("type int", "no samples", "return tensors from collate"),
    ),
    Bad(
        "single-sample-to-verify",
        "CHANGES = dict(train=TensorDataset(X[:1], Y[:1]))\n",
        ("single sample",),
        "verify task.py",
    ),
]

LOSSES = [
    Bad(
        "nan",
        a_loss("return model(batch[0]).mean() * float('nan')"),
        ("step 1 is nan", "micro-batch 0", "samples 11, 23", "each of the samples"),
        record=True,
    ),
    Bad(
        "inf-at-one-sample",
        a_loss("return ab.Loss((model(batch[0]) / (batch[1] != Y[17])).sum(), len(batch[1]))"),
        ("sample 17", "loss of step 2 inf", "-s bad_data=skip"),
        "train task.py --micro-batch 1",
        record=True,
    ),
    Bad(
        "none",
        a_loss("model(batch[0])"),
        ("None", "return statement", "anybatch.Loss(sum, weight)"),
    ),
    Bad("list", a_loss("return [model(batch[0]).mean()]"), ("a list of 1", "anybatch.Loss")),
    Bad("vector", a_loss("return model(batch[0])[:, 0]"), ("(8,)", "reduction='sum'")),
    Bad("int", a_loss("return 3"), ("type int", "anybatch.Loss")),
    Bad(
        "whole-numbers",
        a_loss("return model(batch[0]).sum().long()"),
        ("torch.int64", "no gradient"),
    ),
    Bad("detached", a_loss("return model(batch[0]).mean().detach()"), (".detach()", "frozen")),
    Bad(
        "negative-weight", a_loss("return ab.Loss(model(batch[0]).sum(), -1)"), ("-1", "below zero")
    ),
    Bad(
        "negative-weight-tensor",
        a_loss("return ab.Loss(model(batch[0]).sum(), torch.tensor(-1.0))"),
        ("step 1", "below zero"),
        record=True,
    ),
    Bad(
        "total-weight-0",
        a_loss("return ab.Loss(model(batch[0]).sum(), 0)"),
        ("total weight of step 1 is zero", "every sample"),
        record=True,
    ),
    Bad(
        "weight-vector",
        a_loss("return ab.Loss(model(batch[0]).sum(), batch[1])"),
        ("(8, 1)", "sum"),
    ),
    Bad("weight-text", a_loss("return ab.Loss(model(batch[0]).sum(), '3')"), ("type str",)),
    Bad(
        "metric",
        a_loss("return ab.Loss(model(batch[0]).sum(), 8, {'hits': 'many'})"),
        ("'hits'", "type str", "pair (sum, weight)"),
        record=True,
    ),
    Bad(
        "metrics",
        "CHANGES = dict(valid=TensorDataset(X, Y), metrics=lambda model, batch: 3)\n",
        ("metrics", "type int", "return a dict"),
        record=True,
    ),
    Bad(
        "fails",
        a_loss("raise KeyError('targets')"),
        ("KeyError", "task's own code", "correct the file"),
        trace=("in loss", "KeyError: 'targets'"),
    ),
    Bad(
        "shapes",
        a_loss("return model(batch[0][:, :2]).mean()"),
        ("RuntimeError", "task's own code"),
        trace=("in loss", "(2x2 and 3x4)"),
    ),
    Bad(
        "one-value-per-channel",
        NORM + "CHANGES = dict(global_batch=1)\n",
        ("BatchNorm '1'", "single value per channel", "at least 2", "GroupNorm"),
    ),
    Bad(
        "last-batch-of-1",
        NORM + "CHANGES = dict(global_batch=13)\n",
        ("step 4 has 1 sample", "BatchNorm '1'", "another global batch", "last='drop'"),
    ),
    Bad(
        "last-step-of-1",
        NORM + "CHANGES = dict(global_batch=13, epochs=None, samples=27)\n",
        ("step 3 has 1 sample", "BatchNorm '1'", "another global batch"),
    ),
    Bad(
        "ghost-batch-of-1",
        NORM + "CHANGES = dict(ghost_batch=1)\n",
        ("BatchNorm '1'", "ghost batch of at least 2"),
    ),
    Bad(
        "budget",
        "def model(): return nn.Linear(3, 400_000)\n" + a_loss("return model(batch[0]).mean()"),
        ("budget of 1.00 MiB", "the leanest", "at least", "--memory"),
        "train task.py --memory 1MiB",
        status=3,
        table=("one change at a time", "small adapters on frozen weights"),
    ),
]

ALL = [*TASKS, *WORDS, *FIELDS, *DATA_SETS, *LOSSES]


@pytest.mark.parametrize("bad", ALL, ids=lambda bad: bad.name)
@pytest.mark.filterwarnings("ignore")
def test_a_mistake_is_told_in_a_sentence_and_leaves_nothing_half_written(
    bad: Bad, folder: Path, write_task: Callable[..., Path], command: Callable[..., Outcome]
):
    write_task(bad.code)
    before = tree(folder)

    outcome = command(*bad.arguments.split())

    assert outcome.status == bad.status, outcome.err
    check_told(outcome.err, bad.words, bad.trace or bad.table)
    if bad.record:
        made = tree(folder).keys() - before.keys()
        assert {path for path in made if "/checkpoints" not in path} == {
            "runs",
            *(f"runs/task-1{file}" for file in ("", "/plan.json", "/events.jsonl", "/report.html")),
        }
        check_record(folder / "runs" / "task-1", outcome.sentence)
    else:
        assert tree(folder) == before


def test_the_table_is_long_and_its_names_are_all_different():
    names = [bad.name for bad in ALL]
    assert len(set(names)) == len(names)
    assert len(ALL) >= 60


def check_told(err: str, words: tuple[str, ...], trace: tuple[str, ...] = ()) -> None:
    """One sentence with these words; behind it, if anything, the user's own traceback, or a table."""
    first, *rest = err.splitlines()
    assert first.startswith("anybatch: "), err
    assert first.rstrip().endswith((".", "?")), err
    for word in words:
        assert word in first, err
    assert bool(rest) == bool(trace), err
    for line in trace:
        assert line in "\n".join(rest), err
    for frame in rest:
        assert "site-packages" not in frame, err
        assert "src/anybatch" not in frame, err
    assert len(rest) <= 8, err


def check_record(run: Path, sentence: str) -> None:
    """A run that ended early: its plan, its events to the last, its report, and what its whole steps
    made."""
    Plan.load(run / "plan.json")
    *events, last = read(run / "events.jsonl")
    steps = [event.step for event in events if isinstance(event, StepDone)]
    found = Checkpoints(run / "checkpoints", SingleDevice()).newest()
    assert (found.step if found else 0) == (steps[-1] if steps else 0)
    assert isinstance(last, RunEnded)
    assert not last.finished
    if "own code" not in sentence:
        assert last.reason == sentence.removeprefix("anybatch: ")
    assert (run / "report.html").read_text().rstrip().endswith("</html>")


@pytest.mark.parametrize(
    "arguments",
    [
        ("--out", "a\n#SBATCH --wrap=evil"),
        ("--", "-s", "name=\n#SBATCH --wrap=evil"),
        ("--job-name", "a\n#SBATCH --wrap=evil"),
        ("--partition", "a\n#SBATCH --wrap=evil"),
        ("--time", "1\n#SBATCH --wrap=evil"),
        ("--signal", "TERM@60\n#SBATCH --wrap=evil"),
    ],
)
def test_no_line_of_a_batch_script_is_the_users(
    arguments: tuple[str, ...], folder: Path, command: Callable[..., Outcome]
):
    outcome = command("submit", "digits", "--dry-run", *arguments)
    assert (outcome.status, outcome.out) == (2, "")
    assert "\\n#SBATCH" in outcome.err
