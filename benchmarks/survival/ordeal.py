"""Does a run end as if nothing had happened? Two questions, one command each:

    python benchmarks/survival/ordeal.py --kills 50        ranks and agents are killed, nothing else
    python benchmarks/survival/ordeal.py --minutes 20      everything happens, for so long

and of the kills once more for a model with dropout, on two ranks (`--dropout`), or reproducible on any
number of them (`--dropout --reproducible`): there nothing may differ.

Trains a small task by the command that a user types, while faults are done to its processes and its
checkpoints from outside (`tests/faults/ordeal.py`), and compares each run with one that nothing
disturbed. Prints the table and writes it to `benchmarks/results/survival-kills.md` or `-soak.md`, and
`.json`. Ends with status 1 if a run did not end as it should.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.faults.ordeal import KILLS, KINDS, Ordeal, Story

RESULTS = Path(__file__).parents[1] / "results"


def lines_of(title: str, stories: list[Story], seconds: float) -> list[str]:
    """The result as lines of Markdown."""
    faults: Counter[str] = sum((story.faults for story in stories), Counter())
    ranks = Counter(count for story in stories for count in story.ranks)
    wrong = [sentence for story in stories for sentence in story.wrong]
    machine = (
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, torch"
        f" {version('torch')}, anybatch {version('anybatch')}"
    )
    done = ", ".join(f"{kind} {faults[kind]}" for kind in KINDS if faults[kind])
    commands = ", ".join(f"{ranks[count]} on {count}" for count in sorted(ranks))
    redone = [story.redone for story in stories]
    again = f"{statistics.median(redone):.0f} ({max(redone)})"
    return [
        f"## {title}",
        "",
        f"{len(stories)} runs in {seconds / 60:.0f} minutes, on {machine}.",
        "",
        "| | |",
        "|---|---:|",
        f"| faults | {sum(faults.values())} ({done}) |",
        f"| commands given, by number of ranks | {commands} |",
        f"| runs that ended as the undisturbed one | {sum(not s.wrong for s in stories)} |",
        f"| largest relative deviation of a tensor | {max(s.deviation for s in stories):.1e} |",
        f"| steps done again after a fault, median of a run (most) | {again} |",
        f"| processes or temporary files left behind | {sum('left behind' in w for w in wrong)} |",
        *(["", "What went wrong:", "", *(f"- {one}" for one in wrong)] if wrong else []),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, help="so many kills, and nothing else")
    parser.add_argument("--minutes", type=float, default=20.0, help="how long everything happens")
    parser.add_argument("--dropout", action="store_true", help="train a model with dropout")
    parser.add_argument("--reproducible", action="store_true", help="reproducible runs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    kinds = KILLS if options.kills else KINDS
    name = "kills" if options.kills else "soak"
    name += "-dropout" * options.dropout + "-reproducible" * options.reproducible
    stories: list[Story] = []
    begun = time.monotonic()

    def goes_on() -> bool:
        if options.kills:
            return sum(sum(story.faults.values()) for story in stories) < options.kills
        return time.monotonic() - begun < 60 * options.minutes

    with tempfile.TemporaryDirectory(prefix="ordeal-") as folder:
        dropout = 0.3 if options.dropout else 0.0
        ordeal = Ordeal(Path(folder), dropout=dropout, reproducible=options.reproducible)
        ordeal.undisturbed()
        while goes_on():
            story = ordeal.run(options.seed + len(stories), kinds)
            stories.append(story)
            print(f"{len(stories)}: {story}", flush=True)
    title = "Ranks and agents killed" if options.kills else "Everything at random moments"
    title += ", a model with dropout" if options.dropout else ""
    title += ", reproducible runs" if options.reproducible else ""
    told = "\n".join(lines_of(title, stories, time.monotonic() - begun)) + "\n"
    print(told)
    (options.out / f"survival-{name}.md").write_text(told, encoding="utf-8")
    (options.out / f"survival-{name}.json").write_text(
        json.dumps([vars(story) for story in stories], indent=1) + "\n", encoding="utf-8"
    )
    sys.exit(any(story.wrong for story in stories))


if __name__ == "__main__":
    main()
