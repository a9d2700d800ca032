"""What does a step take in less memory: anybatch and torch.compile under budgets. One command:

    python benchmarks/activation_budget/run.py [--budgets N] [--solver NAME ...]

Each cell trains a small Llama in a process of its own: as it is, with every block checkpointed, under
`ab.Step(memory=...)`, and with blocks compiled under `activation_memory_budget`. Counted are the
kernel's peak of a step above the process without the model, and the median time of a step.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

RESULTS = Path(__file__).parents[1] / "results"
LAYERS, WIDTH, SAMPLES, LENGTH, WORDS = 8, 256, 8, 512, 2000
STEPS, WARM_UP = 5, 2
SOLVERS = ("dp", "greedy")
SMALLEST = 0.05
MIB = 1 << 20

Cell = dict[str, Any]


def fractions(number: int) -> list[float]:
    return [round(SMALLEST + i * (1 - SMALLEST) / (number - 1), 3) for i in range(number)]


def measure(way: str, amount: str) -> Cell:
    """Train under `way`; `amount` is its budget."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import anybatch as ab
    from anybatch.process.process_memory import reset_peak, statuses, trim

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=int(WIDTH * 2.75),
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        vocab_size=WORDS,
        max_position_embeddings=LENGTH,
    )
    there, code = statuses("VmRSS", "RssFile")
    model = LlamaForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(WORDS, (SAMPLES, LENGTH))

    def loss_of(model: Any, batch: Any) -> Any:
        return model(input_ids=batch, labels=batch, use_cache=False).loss

    def by_hand() -> None:
        loss_of(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    step: Callable[[], object] = by_hand
    cell: Cell = {}
    if way == "checkpointed":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    elif way == "anybatch":
        whole = ab.Step(model, optimizer, loss_of, memory=int(float(amount)), verbose=False)
        try:
            whole(tokens)
        except ab.NoPlanFits as error:
            return {"refused": str(error).partition("\n")[0]}
        assert whole.plan is not None
        cell["plan"] = whole.plan.choice.describe()
        step = lambda: whole(tokens)  # noqa: E731
    elif way != "plain":
        import torch._functorch.config as functorch

        functorch.activation_memory_budget = float(amount)
        functorch.activation_memory_budget_solver = way
        for layer in model.model.layers:
            layer.compile()
    for _ in range(WARM_UP):
        step()
    trim()
    reset_peak()
    seconds: list[float] = []
    for _ in range(STEPS):
        begun = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begun)
    most, code_after = statuses("VmHWM", "RssFile")
    peak = (most - code_after) - (there - code)  # program files are not counted
    return cell | {"mib": peak / MIB, "seconds": statistics.median(seconds)}


def run(way: str, amount: float = 1.0) -> Cell:
    command = [sys.executable, __file__, "--cell", way, "--amount", str(amount)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def shown(cell: Cell, plain: Cell) -> str:
    if "refused" in cell:
        least = re.search(r"--memory (\w+)", cell["refused"])
        return f"– (least {least[1]}) | –" if least else "– | –"
    return f"{cell['mib']:.0f} MiB | {cell['seconds'] / plain['seconds']:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--budgets", type=int, default=12)
    parser.add_argument("--solver", action="append", help="default: dp and greedy")
    parser.add_argument("--cell", help="measure this one alone")
    parser.add_argument("--amount", default="1.0")
    args = parser.parse_args()
    if args.cell:
        print(json.dumps(measure(args.cell, args.amount)))
        return
    solvers = args.solver or list(SOLVERS)
    plain, checkpointed = run("plain"), run("checkpointed")
    found: dict[str, Any] = {"plain": plain, "checkpointed": checkpointed, "rows": []}
    head = [
        "budget",
        "anybatch",
        "time",
        "plan",
        *(t for s in solvers for t in (f"compiled, {s}", "time")),
    ]
    ratio = checkpointed["seconds"] / plain["seconds"]
    told = f"{checkpointed['mib']:.0f} MiB, {ratio:.2f} of its time"
    lines = [
        "## Activation budgets",
        "",
        f"Plain: {plain['mib']:.0f} MiB, {plain['seconds']:.2f} s a step. Checkpointed blocks: {told}.",
        "",
        f"| {' | '.join(head)} |",
        "|" + "---|" * len(head),
    ]
    print("\n".join(lines), flush=True)
    for fraction in fractions(args.budgets):
        ours = run("anybatch", fraction * plain["mib"] * MIB)
        theirs = {solver: run(solver, fraction) for solver in solvers}
        found["rows"].append({"fraction": fraction, "anybatch": ours, **theirs})
        told = [f"{fraction:.0%}, {fraction * plain['mib']:.0f} MiB", shown(ours, plain)]
        told += [ours.get("plan", "–"), *(shown(theirs[solver], plain) for solver in solvers)]
        lines.append(f"| {' | '.join(told)} |")
        print(lines[-1], flush=True)
    lines += ["", f"{platform.machine()}, {os.cpu_count()} cores, torch {version('torch')}."]
    (RESULTS / "activation_budget.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    text = json.dumps(found, indent=2)
    (RESULTS / "activation_budget.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
