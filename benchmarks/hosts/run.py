"""What do the adapters for other frameworks' trainers change? Three commands:

    python benchmarks/hosts/run.py figures
    python benchmarks/hosts/run.py lightning
    python benchmarks/hosts/run.py judge NAME VERSION ALONE.xml IN_PLACE.xml

Each writes its part of `benchmarks/results/hosts.json`, and all that is there as `hosts.md`.
"""

from __future__ import annotations

import argparse
import copy
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import transformers

RESULTS = Path(__file__).parents[1] / "results"
ROUNDS = 7
STEPS = 6
NOT_APPLICABLE = {
    "grad_accum": "accumulates by a setting that global_batch replaces",
    "auto_batch_size": "searches for the batch size that global_batch sets",
    "compare_trainer_and_checkpoint_args": "compares batch sizes with accumulation",
    "dataloader_iter": "its training_step takes an iterator in place of a batch",
    "fetching_is_profiled": "its training_step takes an iterator in place of a batch",
    "manual": "optimizes by hand, for which there is anybatch.Step itself",
    "no_grad_optimizer": "its optimizer computes losses by itself",
    "no_closure": "its optimizer calls no closure, which is not left to the optimizer",
    "sampler_set_epoch": "needs a sampler that is not wrapped, as DDPStrategy wraps it",
    "skip_training_step": "skips steps, which no rank can by itself",
    "loop_state_on": "accumulates by a setting that global_batch replaces",
}
"""Parts of the names of tests, and why they say nothing of an adapter."""


# ---------------------------------------------------------------------------------------- distance


def distance(adapted: bool, folder: str) -> float:
    """Of four updates by the Trainer from those of the whole batch."""
    from tests.equivalence import test_transformers_trainer as case

    first = case.seeded_llama()
    model = copy.deepcopy(first)
    if adapted:
        made = case.trainer(folder, model, micro_batch=4)
    else:
        sizes = {"per_device_train_batch_size": 4, "kind": transformers.Trainer}
        world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        made = case.trainer(folder, model, gradient_accumulation_steps=4 // world, **sizes)
    made.train()
    order = case.order_of(made)
    wanted = copy.deepcopy(first)
    case.plainly(wanted, order)
    return case.distance(model.state_dict(), wanted.state_dict(), first.state_dict())


def distances() -> dict[str, float]:
    """By way and number of ranks, each in processes of their own."""
    found = {}
    for way in ("alone", "adapted"):
        for ranks in (1, 2):
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command += ["--nproc-per-node", str(ranks), __file__, "distance", way]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            [line] = [line for line in done.stdout.splitlines() if line.startswith("distance ")]
            found[f"{way}, {ranks}"] = float(line.split()[1])
    return found


# ---------------------------------------------------------------------------------------- overhead


class Clock(transformers.TrainerCallback):
    """The seconds of each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.begun = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.perf_counter() - self.begun)


def step_seconds(adapted: bool, equal: bool, folder: str) -> float:
    """Of a median step but for the first, at a global batch of 32 in micro-batches of 4."""
    from tests.equivalence.test_transformers_trainer import Trainer, collate

    draw = torch.Generator().manual_seed(0)
    sizes = torch.randint(16, 129, (32 * STEPS,), generator=draw).tolist()
    lengths = [96] * len(sizes) if equal else sizes
    data = [{"input_ids": torch.randint(3, 512, (n,), generator=draw).tolist()} for n in lengths]
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    given = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1 if adapted else 8}
    arguments = transformers.TrainingArguments(
        folder,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        max_steps=STEPS,
        logging_strategy="no",
        **given,
    )
    kind = Trainer if adapted else transformers.Trainer
    more = {"global_batch": 32, "micro_batch": 4} if adapted else {}
    clock = Clock()
    kind(
        model, arguments, train_dataset=data, data_collator=collate, callbacks=[clock], **more
    ).train()
    return statistics.median(clock.seconds[1:])


def overheads() -> dict[str, Any]:
    """Seconds of a step by the host alone and with the adapter, in turns, and the median ratio."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for equal in (True, False):
            pairs = [
                [step_seconds(adapted, equal, folder) for adapted in order]
                for order in ((False, True),) * ROUNDS
            ]
            alone, adapted = (statistics.median(times) for times in zip(*pairs, strict=True))
            ratio = statistics.median(b / a for a, b in pairs)
            found["equal" if equal else "unequal"] = {
                "alone_seconds": alone,
                "adapted_seconds": adapted,
                "ratio": ratio,
            }
    return found


def of_lightning() -> dict[str, Any]:
    """Distances of Lightning with the strategy, by number of ranks, and overheads as of the Trainer."""
    from tests.equivalence import test_lightning_trainer as case

    distances, overheads = {}, {}
    for ranks in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            found, *_ = case.fit(Path(folder), ranks)
        first = case.seeded_llama()
        case.plainly(wanted := copy.deepcopy(first), found["order"])
        states = found["state"], wanted.state_dict(), first.state_dict()
        distances[str(ranks)] = case.distance(*states)
    script = Path(__file__).with_name("lightning_step.py")
    for lengths in ("equal", "unequal"):
        pairs = []
        for _ in range(ROUNDS):
            pair = []
            for way in ("alone", "adapted"):
                command = [sys.executable, str(script), way, lengths]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                [line] = [line for line in done.stdout.splitlines() if line.startswith("seconds ")]
                pair.append(float(line.split()[1]))
            pairs.append(pair)
        alone, adapted = (statistics.median(times) for times in zip(*pairs, strict=True))
        ratio = statistics.median(b / a for a, b in pairs)
        overheads[lengths] = {"alone_seconds": alone, "adapted_seconds": adapted, "ratio": ratio}
    return {"distance": distances, "overhead": overheads}


# ------------------------------------------------------------------------------------------- judge


def outcomes(file: str) -> dict[str, tuple[str, str]]:
    """Of each test in a JUnit report: what became of it, and what was said."""
    found = {}
    for case in ElementTree.parse(file).getroot().iter("testcase"):
        name = f"{case.get('classname', '').rsplit('.')[-1]}.{case.get('name')}"
        said = [one for one in case if one.tag in ("failure", "error", "skipped")]
        message = (said[0].get("message") or "").splitlines() if said else []
        kind = said[0].tag if said else "passed"
        found[name] = (kind, message[0][:200] if message else "")
    return found


def judged(version: str, alone: str, in_place: str) -> dict[str, Any]:
    """Of the tests that both ran and the host passes by itself: those it passes with the adapter."""
    host, mixed = outcomes(alone), outcomes(in_place)
    host = {name: one for name, one in host.items() if name in mixed}
    passing = [name for name, (kind, _) in host.items() if kind == "passed"]
    failed, aside = {}, {}
    for name in passing:
        kind, said = mixed[name]
        if kind == "passed":
            continue
        reason = next((why for part, why in NOT_APPLICABLE.items() if part in name), None)
        if reason:
            aside[name] = reason
        else:
            failed[name] = said
    return {
        "version": version,
        "tests": len(host),
        "host_passes": len(passing),
        "applicable": len(passing) - len(aside),
        "passed": len(passing) - len(aside) - len(failed),
        "failed": failed,
        "not_applicable": aside,
    }


# ------------------------------------------------------------------------------------------- table


def as_text(found: dict[str, Any]) -> str:
    lines = ["## Adapters in other frameworks' trainers", ""]
    if "figures" in found:
        figures = found["figures"]
        versions = f"transformers {figures['transformers']}, torch {figures['torch']}"
        lines += [
            f"{versions}, on a CPU with {figures['threads']} threads.",
            "",
            "| distance from the true updates | 1 rank | 2 ranks |",
            "|---|---:|---:|",
        ]
        for way, name in (("alone", "the Trainer"), ("adapted", "with the mixin")):
            one, two = (figures["distance"][f"{way}, {ranks}"] for ranks in (1, 2))
            lines.append(f"| {name} | {one:.1e} | {two:.1e} |")
        lines += [
            "",
            "| step of 32 samples | Trainer | with the mixin | ratio |",
            "|---|---:|---:|---:|",
        ]
        lines += [*_rows(figures["overhead"]), ""]
    if "lightning" in found:
        figures = found["lightning"]
        lines += [
            f"Lightning {figures['version']}, torch {figures['torch']}.",
            "",
            "| distance from the true updates | 1 rank | 2 ranks |",
            "|---|---:|---:|",
            f"| with the strategy | {figures['distance']['1']:.1e} | {figures['distance']['2']:.1e} |",
            "",
            "| step of 32 samples | DDPStrategy | with the strategy | ratio |",
            "|---|---:|---:|---:|",
            *_rows(figures["overhead"]),
            "",
        ]
    if "judge" in found:
        lines += [
            "| host's own tests | in all | host passes | applicable | passed with the adapter |",
            "|---|---:|---:|---:|---:|",
        ]
        for name, row in found["judge"].items():
            part = 100 * row["passed"] / row["applicable"]
            lines.append(
                f"| {name}, tests of {row['version']} | {row['tests']} | {row['host_passes']} |"
                f" {row['applicable']} | {row['passed']} ({part:.0f}%) |"
            )
        lines += ["", "| test | | |", "|---|---|---|"]
        for row in found["judge"].values():
            rows = [(*one, "failed") for one in row["failed"].items()]
            rows += [(*one, "not applicable") for one in row["not_applicable"].items()]
            lines += [
                f"| `{name}` | {kind} | {why.replace('|', '/')} |" for name, why, kind in rows
            ]
    return "\n".join(lines).rstrip() + "\n"


def _rows(overhead: dict[str, Any]) -> list[str]:
    return [
        f"| {name} lengths | {row['alone_seconds']:.3f} s | {row['adapted_seconds']:.3f} s |"
        f" {row['ratio']:.2f} |"
        for name, row in overhead.items()
    ]


def main() -> None:
    """Measure or compare one part, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parts = parser.add_subparsers(dest="part", required=True)
    parts.add_parser("figures")
    parts.add_parser("lightning")
    parts.add_parser("distance").add_argument("way")
    judge = parts.add_parser("judge")
    for name in ("name", "version", "alone", "in_place"):
        judge.add_argument(name)
    given = parser.parse_args()
    if given.part == "distance":
        with tempfile.TemporaryDirectory() as folder:
            found = distance(given.way == "adapted", folder)
        if os.environ.get("RANK", "0") == "0":
            print("distance", found, flush=True)
        return
    file = RESULTS / "hosts.json"
    written = json.loads(file.read_text()) if file.exists() else {}
    if given.part == "figures":
        written["figures"] = {
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "distance": distances(),
            "overhead": overheads(),
        }
    elif given.part == "lightning":
        written["lightning"] = {
            "version": importlib.metadata.version("lightning"),
            "torch": torch.__version__,
            **of_lightning(),
        }
    else:
        found = judged(given.version, given.alone, given.in_place)
        written.setdefault("judge", {})[given.name] = found
    file.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    (RESULTS / "hosts.md").write_text(as_text(written), encoding="utf-8")
    print(as_text(written))


if __name__ == "__main__":
    main()
