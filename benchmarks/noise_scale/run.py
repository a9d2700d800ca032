"""Does the noise scale that a run measures tell which batch is worth it? One command:

    python benchmarks/noise_scale/run.py

Prints the tables and writes them to `benchmarks/results/noise_scale.md` and `noise_scale.json`.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import anybatch as ab
from anybatch.insight.noise import NoiseScale, scale_of, windows
from anybatch.insight.noise_series import Series

RESULTS = Path(__file__).parents[1] / "results"
BATCHES = (8, 16, 32, 64, 128, 256, 512, 1024)
TARGETS = (0.5, 0.3, 0.15)
"""Held-out losses that end a run; without training it is 2.3."""

FIRST_RATE, FACTOR = 0.25, math.sqrt(2)
MOST_STEPS = 6_000
EXACT_BATCH, EXACT_RATE, EXACT_STEPS, EXACT_EVERY = 64, 0.2, 360, 1


@dataclass(frozen=True)
class Run:
    """One training to the target.

    Attributes:
        steps: that it took; None: it did not come there in time.
        scale: the noise scale that it measured, over all of it, in samples.
        first, last: that of its first and last window.
    """

    steps: int | None
    scale: float | None = None
    first: float | None = None
    last: float | None = None


@dataclass(frozen=True)
class Tuned:
    """What a batch takes at its best learning rate: a run for each seed."""

    batch: int
    rate: float
    runs: tuple[Run, ...]
    num_rates: int

    @property
    def steps(self) -> float:
        """On average over the seeds."""
        return _mean_steps(self.runs)


# --------------------------------------------------------------------------------------- the task


@cache
def images() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training and held-out digits of 8 x 8 pixels: every fifth is held out."""
    pixels, labels = load_digits(return_X_y=True)
    x = torch.as_tensor(pixels, dtype=torch.float32) / 16
    y = torch.as_tensor(labels, dtype=torch.int64)
    held_out = torch.arange(len(y)) % 5 == 0
    return x[~held_out], y[~held_out], x[held_out], y[held_out]


def build() -> nn.Sequential:
    """No norm that looks across the batch: samples are to be independent."""
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The mean cross-entropy of images (B, 64) against labels (B)."""
    return F.cross_entropy(model(batch[0]), batch[1])


def task_of(batch: int, rate: float, seed: int, steps: int = MOST_STEPS) -> ab.Task:
    """Plain SGD: what the theory is about."""
    x, y, *_ = images()
    return ab.Task(
        model=build,
        loss=loss,
        optimizer=partial(torch.optim.SGD, lr=rate),
        train=TensorDataset(x, y),
        global_batch=batch,
        steps=steps,
        last="wrap",  # every step has its whole batch
        seed=seed,
        name="digits, perceptron",
    )


@cache
def plan_of(batch: int) -> ab.Plan:
    """Four micro-batches to a step, so that there is a part to measure."""
    return ab.plan(task_of(batch, FIRST_RATE, 0), micro_batch=batch // 4)


# ------------------------------------------------------------------------------------- the sweep


def mean_over(scales: Sequence[NoiseScale], batch: float) -> float | None:
    """The noise scale, in samples, that stands for all of a run of this `batch`, in samples: its mean
    over the progress made, of which a step of much noise makes little. None if there was none.

    A step at B makes the progress 1 / (1 + B_noise / B) of one without noise (McCandlish et al. 2018,
    section 2.2), so
    steps are weighed by that: then (1 + mean / B) is what the run took beside the fewest steps.
    """
    progress = noise = 0.0
    for one in scales:
        square = max(0.0, one.square)
        if square:
            steps = one.last_step - one.first_step + 1  # measured or not
            made = steps * batch * square / (batch * square + max(0.0, one.noise))
            progress += made
            noise += made * max(0.0, one.noise) / square
    return noise / progress if progress else None


def train(batch: int, rate: float, seed: int, target: float, most: int) -> Run:
    """Until the held-out loss is `target` for the first time, or `most` steps are done."""
    _, _, x, y = images()
    series = Series()
    with ab.Session(task_of(batch, rate, seed, most), plan_of(batch)) as session:
        for done in session.steps():
            series(done)
            with torch.no_grad():
                held_out = float(loss(session.model, (x, y)))
            if held_out <= target:
                found = windows(series.blocks)
                ends = [one.samples for one in (found[0], found[-1])] if found else [None, None]
                return Run(done.step, mean_over(found, batch), *ends)
            if not math.isfinite(held_out) or held_out > 20:
                break
    return Run(None)


def tuned(batch: int, rate: float, seeds: Sequence[int], target: float) -> Tuned:
    """The best learning rate for `batch`, climbing from `rate` in steps of a factor of the square root
    of two until both neighbours are worse."""
    tried: dict[int, tuple[Run, ...]] = {}
    start = round(math.log(rate) / math.log(FACTOR))

    def steps(place: int) -> float:
        if place not in tried:
            best = min((_mean_steps(runs) for runs in tried.values()), default=math.inf)
            most = MOST_STEPS if math.isinf(best) else 2 * math.ceil(best) + 20
            tried[place] = tuple(train(batch, FACTOR**place, s, target, most) for s in seeds)
        return _mean_steps(tried[place])

    place = start
    while math.isinf(steps(place)):  # too fast to be stable, or too slow to arrive
        place -= 1
    while True:
        better = min((place - 1, place, place + 1), key=steps)
        if better == place:
            return Tuned(batch, FACTOR**place, tried[place], len(tried))
        place = better


def _mean_steps(runs: Sequence[Run]) -> float:
    steps = [run.steps for run in runs]
    return math.inf if None in steps else fmean(one for one in steps if one is not None)


def fitted(batches: Sequence[int], steps: Sequence[float]) -> tuple[float, float]:
    """(fewest steps, fewest samples) of S = S_min + E_min / B, which is the hyperbola
    (S / S_min - 1) (E / E_min - 1) = 1 with E = B S; least squares of relative errors."""
    s = np.array(steps)
    design = np.stack([1 / s, 1 / (np.array(batches) * s)], axis=1)
    (fewest, samples), *_ = np.linalg.lstsq(design, np.ones(len(s)), rcond=None)
    return float(fewest), float(samples)


def critical(sweep: Sequence[Tuned]) -> dict[str, float]:
    """The critical batch E_min / S_min of the sweep, and its 95 % interval over draws of seeds."""
    batches = [one.batch for one in sweep]
    fewest, samples = fitted(batches, [one.steps for one in sweep])
    rng = np.random.default_rng(0)
    drawn = []
    for _ in range(1000):
        steps = [
            fmean(one.runs[i].steps or 0 for i in rng.integers(len(one.runs), size=len(one.runs)))
            for one in sweep
        ]
        a, b = fitted(batches, steps)
        drawn.append(b / a)
    low, high = np.quantile(drawn, [0.025, 0.975])
    return {
        "fewest_steps": fewest,
        "fewest_samples": samples,
        "batch": samples / fewest,
        "low": float(low),
        "high": float(high),
    }


# ------------------------------------------------------------------- against per-sample gradients


def exact() -> list[dict[str, Any]]:
    """One run: what it measured in windows of 60 steps beside what the gradients of all training
    samples one by one say, every few steps of the same run."""
    x, y, *_ = images()
    task = task_of(EXACT_BATCH, EXACT_RATE, 0, EXACT_STEPS)
    series: list[Series] = []
    truths: list[list[tuple[float, float]]] = []
    with ab.Session(task, plan_of(EXACT_BATCH)) as session:
        steps = session.steps()
        for number in range(EXACT_STEPS):
            if number % 60 == 0:
                series.append(Series())
                truths.append([])
            if number % EXACT_EVERY == 0:
                truths[-1].append(_moments(session.model, x, y))
            series[-1](next(steps))
    rows = []
    for one, truth in zip(series, truths, strict=True):
        found = scale_of(one.blocks)
        assert found is not None
        square, noise = (fmean(values) for values in zip(*truth, strict=True))
        rows.append(
            {
                "steps": [found.first_step, found.last_step],
                "measured": {"square": found.square, "noise": found.noise, "scale": found.samples},
                "interval": [found.low, found.high],
                "exact": {"square": square, "noise": noise, "scale": noise / square},
            }
        )
    return rows


def _moments(model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float]:
    """(|G|^2, tr(Sigma)) as a step estimates them that takes its samples without putting them back:
    the squared mean gradient of all samples less tr(Sigma) / n, and their variance."""
    weights = {name: value.detach() for name, value in model.named_parameters()}

    def one(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        out = torch.func.functional_call(model, weights, (x.unsqueeze(0),))
        return F.cross_entropy(out, y.unsqueeze(0))

    each = torch.func.vmap(torch.func.grad(one), in_dims=(None, 0, 0))(weights, x, y)
    flat = torch.cat([value.flatten(1) for value in each.values()], dim=1).double()
    noise = float(flat.var(dim=0).sum())
    return float(flat.mean(dim=0).square().sum()) - noise / len(x), noise


# -------------------------------------------------------------------------------------- the tables


def told(found: dict[str, Any]) -> str:
    """The results as Markdown."""
    return "\n".join([*_of_sweeps(found), *_of_exact(found), "", found["machine"]]) + "\n"


def _of_sweeps(found: dict[str, Any]) -> Iterator[str]:
    for target, sweep in found["sweeps"].items():
        fit = sweep["critical"]
        yield f"### To a held-out loss of {target}"
        yield ""
        yield (
            f"Fitted: at the least {fit['fewest_steps']:.0f} steps and {fit['fewest_samples']:,.0f}"
            f" samples; **critical batch {fit['batch']:.0f}** ({fit['low']:.0f} to"
            f" {fit['high']:.0f}). Noise scale measured in training, the median of the runs:"
            f" **{sweep['measured']:.0f}**, {sweep['measured'] / fit['batch']:.1f} times as much."
        )
        yield ""
        yield (
            "| batch | learning rate | steps | of the fit | samples | noise scale over the run"
            " (least to most of the seeds) | in its first window | in its last |"
        )
        yield "|---:|---:|---:|---:|---:|---:|---:|---:|"
        for row in sweep["batches"]:
            fit_steps = fit["fewest_steps"] + fit["fewest_samples"] / row["batch"]
            yield (
                f"| {row['batch']} | {row['rate']:.3g} | {row['steps']:.1f} |"
                f" {row['steps'] / fit_steps:.2f} | {row['batch'] * row['steps']:,.0f} |"
                f" {_spread(row['runs'], 'scale', True)} | {_spread(row['runs'], 'first')} |"
                f" {_spread(row['runs'], 'last')} |"
            )
        yield ""


def _spread(runs: Sequence[dict[str, Any]], name: str, ends: bool = False) -> str:
    known = [run[name] for run in runs if run[name] is not None]
    if not known:
        return "–"
    middle = f"{median(known):.0f}"
    return f"{middle} ({min(known):.0f} to {max(known):.0f})" if ends else middle


def _of_exact(found: dict[str, Any]) -> Iterator[str]:
    yield "### Against the gradients of all samples, one by one"
    yield ""
    yield f"One run at a batch of {EXACT_BATCH}, measured for free and exactly."
    yield ""
    yield (
        "| steps | tr(Sigma) measured | exact | gradient squared, measured | exact | noise scale"
        " measured (95 %) | exact |"
    )
    yield "|---|---:|---:|---:|---:|---:|---:|"
    for row in found["exact"]:
        mine, truth = row["measured"], row["exact"]
        low, high = row["interval"]
        scale = "–" if mine["scale"] is None else f"{mine['scale']:.0f}"
        upper = "no end" if high is None else f"{high:.0f}"
        yield (
            f"| {row['steps'][0]} to {row['steps'][1]} | {mine['noise']:.3g} | {truth['noise']:.3g} |"
            f" {mine['square']:.3g} | {truth['square']:.3g} | {scale} ({low:.0f} to {upper}) |"
            f" {truth['scale']:.0f} |"
        )


def measure(seeds: Sequence[int], say: Callable[[str], None]) -> dict[str, Any]:
    """Everything."""
    sweeps: dict[str, Any] = {}
    for target in TARGETS:
        rate, sweep = FIRST_RATE, []
        for batch in BATCHES:
            sweep.append(tuned(batch, rate, seeds, target))
            rate = sweep[-1].rate
            say(f"{target}: batch {batch}, {sweep[-1].steps:.1f} steps at {rate:.3g}")
        known = [run.scale for one in sweep for run in one.runs if run.scale is not None]
        sweeps[str(target)] = {
            "batches": [{**asdict(one), "steps": one.steps} for one in sweep],
            "critical": critical(sweep),
            "measured": median(known),
        }
    machine = (
        f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}."
    )
    return {"sweeps": sweeps, "exact": exact(), "seeds": len(seeds), "machine": machine}


def main() -> None:
    """Run all, print the tables, and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=8)
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(range(given.seeds), lambda line: print(line, flush=True))
    text = told(found)
    print(text)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "noise_scale.md").write_text(text, encoding="utf-8")
    (RESULTS / "noise_scale.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
