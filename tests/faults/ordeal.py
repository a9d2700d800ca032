"""Runs that everything happens to, and their end.

An ordeal is one training, started by the command that a user types and by nothing else. While it goes
on, faults are done to its processes from outside, at moments drawn from a seed:

    rank        SIGKILL to a rank                          the ranks are started again
    ranks       SIGKILL to two of them at once
    agent       SIGKILL to the process that started them   the command is given again
    stop        SIGTERM to it                              it saves and ends with 75; given again
    memory      a rank's RLIMIT_DATA lowered for a while   the step is done again
    freeze      SIGSTOP to a rank, SIGCONT a little later  nothing but time passes
    damage      between two commands: a bit of the newest checkpoint is flipped, its end cut off, a file
                of it lost, or a half-written one put beside it

Each time the command is given again with `--resume`, on a number of ranks that is drawn anew. The
weights at the end are compared with those of a run that nothing disturbed, on one rank. Afterwards no
process and no temporary file may be left.

A model with dropout draws other masks on another number of ranks: then all is done on two, or the runs
are reproducible, and nothing may differ.

`tests/faults/test_ordeal.py` runs one, `benchmarks/survival/` many.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch
from safetensors.torch import load_file

from anybatch.events import OutOfMemory, Resumed, StepDone
from anybatch.report import read

TASK = """
import time
import torch
import torch.nn.functional as F
from torch import nn
import anybatch as ab

SAMPLES, SEEN = 203, 24

def task(pause: float = 0.05):
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, 1, 8, 8, generator=draw, dtype=torch.float64)
    targets = torch.randint(0, 5, (SAMPLES,), generator=draw)

    class Samples(torch.utils.data.Dataset):
        def __len__(self):
            return SAMPLES
        def __getitem__(self, i):
            return inputs[i], targets[i]

    def model():
        return nn.Sequential(
            nn.Conv2d(1, 8, 3, bias=False), nn.BatchNorm2d(8), nn.Tanh(), nn.Flatten(),
            nn.Dropout(DROPOUT), nn.Linear(8 * 36, 64), nn.Tanh(), nn.Linear(64, 5),
        ).double()

    def loss(model, batch):
        if torch.is_grad_enabled():
            time.sleep(pause * len(batch[1]) / SEEN)
        logits = model(batch[0])
        return F.cross_entropy(logits, batch[1], reduction="sum"), len(batch[1])

    return ab.Task(
        model=model, loss=loss, optimizer=lambda p: torch.optim.AdamW(p, lr=3e-3, weight_decay=0.1),
        schedule=ab.warmup_cosine(0.1), train=Samples(), valid=Samples(), clip_norm=1.0,
        global_batch=SEEN, epochs=EPOCHS, ghost_batch=4, seed=3,
    )
"""

KINDS = ("rank", "ranks", "agent", "stop", "memory", "freeze", "damage")
KILLS = ("rank", "ranks", "agent")
TOLERANCE = 1e-6
_COMMAND_SECONDS = 300.0  # by then it hangs
_GONE_SECONDS = 60.0
_IN_TRAINING = 0.8  # part of the faults that wait until a step was done
_WELL = (0, 75, -signal.SIGKILL, -signal.SIGTERM, 128 + signal.SIGTERM)
"""Statuses of commands: done, saved and stopped, killed; stopped in its first moments."""

_OF_TORCH = ("torchinductor_root",)  # a cache that torch keeps


@dataclass
class Story:
    """What happened in an ordeal.

    Attributes:
        faults: how often each was done.
        ranks: of the commands, in order.
        statuses: with which they ended.
        deviation: largest relative distance of a tensor from the undisturbed one.
        redone: steps that were done more than once.
        recovered: steps redone for want of memory.
        faults_found: sentences; empty if all is well.
    """

    faults: Counter[str] = field(default_factory=Counter)
    ranks: list[int] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    deviation: float = float("nan")
    redone: int = 0
    recovered: int = 0
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)


class Ordeal:
    """See the module.

    Args:
        folder: for everything; empty.
        epochs: of the task; nine steps each.
        pause: seconds that a step takes at least, so that faults have time to come.
        dropout: probability that the model drops an activation.
        reproducible: whether the runs are.
    """

    def __init__(
        self,
        folder: Path,
        epochs: int = 6,
        pause: float = 0.1,
        dropout: float = 0.0,
        reproducible: bool = False,
    ) -> None:
        self._folder = folder
        self._pause = pause
        self._reproducible = reproducible
        self._ranks = 2 if dropout and not reproducible else None
        self._tolerance = 0.0 if dropout else TOLERANCE
        self._temporary = folder / "temporary"
        self._temporary.mkdir(parents=True)
        (folder / "ordeal.py").write_text(
            TASK.replace("EPOCHS", str(epochs)).replace("DROPOUT", str(dropout))
        )
        self._wanted: dict[str, torch.Tensor] = {}

    def undisturbed(self) -> None:
        """The run to compare with."""
        process = self._start(self._ranks or 1, "undisturbed", pause=0.0)
        _, told = process.communicate(timeout=_COMMAND_SECONDS)
        assert process.returncode == 0, told
        self._wanted = load_file(self._folder / "undisturbed" / "model.safetensors")

    def run(
        self,
        seed: int,
        kinds: Sequence[str] = KINDS,
        num_faults: int = 6,
        most_ranks: int = 4,
        pace: tuple[float, float] = (0.0, 2.0),
    ) -> Story:
        """One training with so many faults, the waits between them drawn from `pace` in seconds."""
        draw = random.Random(seed)
        story = Story()
        begun = time.monotonic()
        out = self._folder / f"run-{seed}"
        left = num_faults
        status: int | None = None
        while status != 0 and not story.wrong:
            if "damage" in kinds and left and story.statuses and draw.random() < 0.4:
                left -= _damage(out / "checkpoints", draw, story)
            ranks = self._ranks or draw.randint(2, most_ranks)
            story.ranks.append(ranks)
            process = self._start(ranks, out.name)
            watched = _Watched(process, draw, story, out / "events.jsonl")
            status, left = watched.see_through(left, kinds, pace)
            story.statuses.append(status)
            if status not in _WELL and not story.wrong:
                story.wrong.append(f"a command ended with {status}: {watched.told[-2000:]}")
            self._check_gone(watched, story)
            if len(story.statuses) > 4 * num_faults + 10:
                story.wrong.append("the run does not come to its end")
        story.seconds = time.monotonic() - begun
        if not story.wrong:
            self._compare(out, story)
            shutil.rmtree(out)
        return story

    def _start(self, ranks: int, out: str, pause: float | None = None) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "anybatch", "train", "ordeal.py", "--out", out, "--resume"]
        command += ["--ranks", str(ranks), "--checkpoint-every", "3", "--restarts", "20"]
        command += ["--reproducible"] if self._reproducible else ["--micro-batch", "8"]
        command += ["-s", f"pause={self._pause if pause is None else pause}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(self._temporary)}
        return subprocess.Popen(
            command,
            cwd=self._folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def _check_gone(self, watched: _Watched, story: Story) -> None:
        """No process of a command outlives it for long, nor a temporary file."""
        end = time.monotonic() + _GONE_SECONDS
        while True:
            alive = [pid for pid in watched.pids if _is_alive(pid)]
            files = [path for path in self._temporary.iterdir() if path.name not in _OF_TORCH]
            if not alive and not files:
                return
            if time.monotonic() > end:
                names = [path.name for path in files]
                for path in files:  # once is enough: the next run is another one
                    shutil.rmtree(path, ignore_errors=True)
                story.wrong.append(f"left behind: processes {alive}, files {names}")
                return
            time.sleep(0.05)

    def _compare(self, out: Path, story: Story) -> None:
        found = load_file(out / "model.safetensors")
        if found.keys() != self._wanted.keys():
            story.wrong.append(f"other weights: {sorted(found)}")
            return
        story.deviation = max(
            float((found[name] - value).double().norm() / value.double().norm().clamp_min(1e-12))
            for name, value in self._wanted.items()
        )
        if not story.deviation <= self._tolerance:
            story.wrong.append(f"the weights deviate by {story.deviation:.3g}")
        events = read(out / "events.jsonl")
        steps = [event.step for event in events if isinstance(event, StepDone)]
        story.redone = len(steps) - len(set(steps))
        story.recovered = sum(isinstance(event, OutOfMemory) for event in events)
        if set(steps) != set(range(1, max(steps) + 1)):
            story.wrong.append("steps are missing in the record")
        # No step is done again that was saved before the fault: at most those since a checkpoint.
        resumed = [event.step for event in events if isinstance(event, Resumed)]
        if sorted(resumed) != resumed and not story.faults["damage"]:
            story.wrong.append(f"it went back further each time: {resumed}")


class _Watched:
    """One command, while faults are done to it."""

    def __init__(
        self, process: subprocess.Popen[str], draw: random.Random, story: Story, log: Path
    ) -> None:
        self._process = process
        self._draw = draw
        self._story = story
        self._log = log
        self.pids: set[int] = {process.pid}
        self.told = ""

    def see_through(
        self, left: int, kinds: Sequence[str], pace: tuple[float, float]
    ) -> tuple[int, int]:
        """The exit status of the command, and how many faults are left to do."""
        acts: dict[str, Callable[[], bool]] = {
            "rank": lambda: self._kill(1),
            "ranks": lambda: self._kill(2),
            "agent": lambda: self._send(signal.SIGKILL),
            "stop": lambda: self._send(signal.SIGTERM),
            "memory": self._refuse_memory,
            "freeze": self._freeze,
        }
        possible = [kind for kind in kinds if kind in acts]
        end = time.monotonic() + _COMMAND_SECONDS
        while left and self._comes_to_a_moment(pace, end):
            kind = self._draw.choice(possible)
            if acts[kind]():
                self._story.faults[kind] += 1
                left -= 1
            if kind in ("agent", "stop"):
                break
        while self._runs(0.1, end):
            pass
        if self._process.poll() is None:
            self._story.wrong.append(f"a command hangs after {dict(self._story.faults)}")
            self._process.kill()
        self.told, _ = self._process.communicate()
        return self._process.returncode, left

    def _comes_to_a_moment(self, pace: tuple[float, float], end: float) -> bool:
        """Wait for the moment of the next fault: mostly one in the middle of training, else any.
        Whether the command still runs."""
        begun = time.time()
        if self._draw.random() < _IN_TRAINING:
            while not self._has_trained_since(begun):
                if not self._runs(0.05, end):
                    return False
        return self._runs(self._draw.uniform(*pace), end)

    def _has_trained_since(self, begun: float) -> bool:
        events = read(self._log) if self._log.exists() else []
        return bool(events) and isinstance(events[-1], StepDone) and events[-1].time > begun

    def _runs(self, seconds: float, end: float) -> bool:
        """Let `seconds` pass; whether the command still runs."""
        stop = min(end, time.monotonic() + seconds)
        while time.monotonic() < stop and self._process.poll() is None:
            self.pids |= {rank.pid for rank in self._ranks()}
            time.sleep(0.02)
        return self._process.poll() is None and time.monotonic() < end

    def _ranks(self) -> list[psutil.Process]:
        try:
            children = psutil.Process(self._process.pid).children(recursive=True)
            return [one for one in children if "anybatch.launch.worker" in one.cmdline()]
        except psutil.Error:
            return []

    def _drawn(self, count: int) -> list[psutil.Process]:
        ranks = self._ranks()
        return self._draw.sample(ranks, min(count, len(ranks)))

    def _kill(self, count: int) -> bool:
        victims = self._drawn(count)
        for one in victims:
            _try(one.kill)
        return bool(victims)

    def _send(self, number: int) -> bool:
        self.pids |= {rank.pid for rank in self._ranks()}
        self._process.send_signal(number)
        return True

    def _freeze(self) -> bool:
        victims = self._drawn(1)
        for one in victims:
            _try(one.suspend)
        time.sleep(self._draw.uniform(0.1, 1.0))
        for one in victims:
            _try(one.resume)
        return bool(victims)

    def _refuse_memory(self) -> bool:
        """The kernel refuses a rank whatever it asks for, until it has met that."""
        if not self._has_trained_since(time.time() - 1.0):
            return False  # a process that only begins has nowhere to go back to
        for one in self._drawn(1):
            _try(lambda one=one: _limit(one, 0.3))
            return True
        return False


def _limit(process: psutil.Process, seconds: float) -> None:
    found = process.rlimit(psutil.RLIMIT_DATA)
    used = next(
        int(line.split()[1]) * 1024
        for line in Path(f"/proc/{process.pid}/status").read_text().splitlines()
        if line.startswith("VmData:")
    )
    process.rlimit(psutil.RLIMIT_DATA, (used, found[1]))
    try:
        time.sleep(seconds)
    finally:
        process.rlimit(psutil.RLIMIT_DATA, found)


def _damage(checkpoints: Path, draw: random.Random, story: Story) -> int:
    """Harm the newest checkpoint, if an older one is there to go back to. How many faults were done."""
    complete = sorted(checkpoints.glob("step-*"))
    if len(complete) < 2:
        return 0
    newest = complete[-1]
    path = draw.choice(sorted(newest.iterdir()))
    how = draw.choice(("flip", "cut", "lose", "half"))
    if how == "half":
        shutil.copytree(newest, checkpoints / f".{newest.name}-00000000.partial")
    elif how == "lose":
        path.unlink()
    else:
        data = bytearray(path.read_bytes())
        place = draw.randrange(len(data))
        if how == "cut":
            data = data[:place]
        else:
            data[place] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
    story.faults["damage"] += 1
    return 1


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _try(act: Callable[[], object]) -> None:
    try:
        act()
    except (psutil.Error, OSError):
        return  # it has ended by itself
