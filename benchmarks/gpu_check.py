"""Everything that needs a GPU, in one command: `make gpu-check`, or

    python -m benchmarks.gpu_check [--out FOLDER] [--only WORD ...] [--seconds 560]

Runs the tests marked `gpu`, the command line from doctor to export, and what `gpu_parts` measures, and
writes what it found to gpu.json and gpu.md (in benchmarks/results), anew after each part. Ends within
ten minutes on one GPU. What fails, hangs or ends its process is told in a sentence, and costs nothing
but itself: each test file and each command has a process and a deadline of its own, and the process of
the parts is started anew after a failure. With `--only`, the rest of the folder's record stays where it
is of the same GPU and torch."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from benchmarks.gpu_parts import CELL, MARK, parts

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests" / "gpu"
SECONDS = 560.0
TESTS_SECONDS, FILE_SECONDS, COMMAND_SECONDS, PART_SECONDS = 240.0, 120.0, 60.0, 90.0
"""Time limits for all tests, one test file, one command and one part, in seconds."""
MEASURE = (sys.executable, "-m", "benchmarks.gpu_parts")
OUT_OF_TIME = "left out for want of time"


@dataclass
class Record:
    """The results so far.

    Attributes:
        device: name of the GPU.
        torch: version of torch.
        tests: by file, the last line of pytest's output, or how the file's process ended.
        failures: by test, command or part, a sentence about the failure.
        commands: by name, the command line, exit status, seconds, and last lines of output.
        found: measurements, by part.
        took: duration in seconds, by part.
        left_out: commands and parts that were not run for lack of time.
    """

    device: str
    torch: str = torch.__version__
    tests: dict[str, str] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    commands: dict[str, dict[str, Any]] = field(default_factory=dict)
    found: dict[str, Any] = field(default_factory=dict)
    took: dict[str, float] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path, device: str) -> Record:
        """The record in `folder` if it is of this device and torch version, else an empty one."""
        record = cls(device)
        with contextlib.suppress(OSError, ValueError):
            earlier = json.loads((folder / "gpu.json").read_text(encoding="utf-8"))
            if (earlier["device"], earlier["torch"]) == (device, record.torch):
                record = cls(**earlier)
        return record

    def forget(self, name: str) -> None:
        """Remove earlier results of `name`: a test file, `command NAME`, or a part."""
        for what in (self.tests, self.commands, self.found, self.took):
            what.pop(name.removeprefix("command "), None)
        for failed in [one for one in self.failures if one.startswith((f"test {name}::", name))]:
            del self.failures[failed]
        self.left_out = [one for one in self.left_out if one != name]

    def write(self, folder: Path) -> None:
        """Write gpu.json and gpu.md to `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "gpu.json").write_text(json.dumps(vars(self), indent=2) + "\n", encoding="utf-8")
        try:
            text = as_text(self)
        except Exception as error:  # unexpected values, which can be read in gpu.json
            text = f"{self.device}: the text could not be made: {type(error).__name__}: {error}\n"
        (folder / "gpu.md").write_text(text, encoding="utf-8")


# ---------------------------------------------------------------------------------------- running


def run(command: Sequence[str], seconds: float, env: dict[str, str]) -> tuple[int | None, str]:
    """Run a command; return its exit status (None: killed after `seconds`) and its output."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=env, cwd=ROOT, start_new_session=True
        )
        try:
            status = process.wait(max(1.0, seconds))
        except subprocess.TimeoutExpired:
            kill(process)
            status = None
        output.seek(0)
        return status, output.read()


def kill(process: subprocess.Popen[Any]) -> None:
    """Kill `process` and its process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_tests(
    record: Record, until: float, env: dict[str, str], words: Sequence[str] | None
) -> None:
    """Run the tests marked `gpu`, file by file."""
    until = min(until, time.monotonic() + TESTS_SECONDS)
    for file in sorted(TESTS.glob("test_*.py")):
        if not _is_wanted(file.name, words):
            continue
        record.forget(file.name)
        left = until - time.monotonic()
        if left <= 0:
            record.tests[file.name] = OUT_OF_TIME
            continue
        options = ["-m", "gpu", "-v", "--tb=short", "-p", "no:cacheprovider", str(file)]
        seconds = min(FILE_SECONDS, left)
        wide = {**env, "COLUMNS": "400"}  # a narrow terminal truncates the reasons of failures
        status, output = run([sys.executable, "-m", "pytest", *options], seconds, wide)
        print(output, flush=True)
        record.tests[file.name] = closing_line(status, output, seconds)
        for name, reason in failed_tests(output):
            record.failures[f"test {name}"] = reason


def closing_line(status: int | None, output: str, seconds: float) -> str:
    """One-line result of a test file: the summary line of pytest, or how the process ended."""
    lines = output.strip().splitlines() or ["no output"]
    passed = sum(" PASSED" in line for line in lines)
    if status is None:
        begun = next((line for line in reversed(lines) if "::" in line), lines[-1])
        return f"killed after {seconds:.0f} s and {passed} passed, in {begun.split(' ')[0]}"
    if status < 0:
        return f"ended by signal {-status} after {passed} passed"
    return lines[-1].strip("= ")


def failed_tests(output: str) -> Iterator[tuple[str, str]]:
    """Names of failed tests and the reasons, from the summary of pytest."""
    for line in output.splitlines():
        if match := re.match(r"(?:FAILED|ERROR) (\S*::.*)", line):
            name, _, reason = match[1].partition(" - ")
            yield name.rpartition("/")[2], reason or "see the output"


def run_commands(
    record: Record, until: float, env: dict[str, str], words: Sequence[str] | None
) -> None:
    """Run the commands of anybatch, from `doctor` to `export` and a reproducible run."""
    with tempfile.TemporaryDirectory() as folder:
        run_folder = f"{folder}/run"
        training = "digits --global-batch 512 --micro-batch 128 -s epochs=4 --out"
        commands = {
            "doctor": "doctor",
            "train": f"train {training} {run_folder} --memory 2GiB",
            "resume": f"train {training.replace('=4', '=6')} {run_folder} --memory 2GiB --resume",
            "evaluate": f"evaluate {run_folder}",
            "export": f"export {run_folder} --out {folder}/weights.safetensors",
            "report": f"report {run_folder}",
            "reproducible": f"train digits -s epochs=2 --reproducible --out {folder}/again",
        }
        for name, line in commands.items():
            if not _is_wanted(f"command {name}", words):
                continue
            record.forget(f"command {name}")
            left = until - time.monotonic()
            if left <= 0:
                record.left_out.append(f"command {name}")
                continue
            begun = time.monotonic()
            arguments = [sys.executable, "-m", "anybatch", *line.split()]
            status, output = run(arguments, min(COMMAND_SECONDS, left), env)
            output = output.replace(str(ROOT), "CHECKOUT")
            print(output, flush=True)
            seconds = time.monotonic() - begun
            record.commands[name] = {
                "command": line.replace(folder, "FOLDER"),
                "status": status,
                "seconds": seconds,
                "output": output.splitlines() if name == "doctor" else output.splitlines()[-25:],
            }
            if status != 0:
                how = f"killed after {seconds:.0f} s" if status is None else f"exit status {status}"
                last = output.strip().splitlines()[-1:] or ["no output"]
                record.failures[f"command {name}"] = f"{how}: {last[0]}"


def run_parts(
    record: Record,
    names: Sequence[str],
    until: float,
    env: dict[str, str],
    folder: Path,
    command: Sequence[str] = MEASURE,
) -> None:
    """Run the measurements of `gpu_parts`. Parts that could not start in time are left out."""
    left = list(names)
    while left and time.monotonic() < until:
        for name, result in measured(tuple(left), until, env, command):
            left.remove(name)
            record.forget(name)
            if "found" in result:
                record.found[name], record.took[name] = result["found"], result["took"]
                print(f"{name}: {result['took']:.1f} s", flush=True)
            elif result["failed"] == OUT_OF_TIME:
                record.left_out.append(name)
            else:
                record.failures[name] = result["failed"]
                print(f"{name}: {result['failed']}", flush=True)
            record.write(folder)
    for name in left:
        record.forget(name)
    record.left_out += left


def measured(
    names: Sequence[str], until: float, env: dict[str, str], command: Sequence[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run the parts `names` in one process, and yield the name and result of each: the measurements, or
    the failure, after which it stops. Yields at least one result."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        process = subprocess.Popen(
            [*command, *names],
            stdout=subprocess.PIPE,
            stderr=errors,
            env=env,
            cwd=ROOT,
            start_new_session=True,
            text=True,
        )
        lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=_read, args=(process, lines), daemon=True).start()
        name, num_told = names[0], 0
        try:
            while num_told < len(names):
                name = names[num_told]
                left = until - time.monotonic()
                result = _next(lines, min(PART_SECONDS, left))
                if result is None:
                    result = {"failed": _ending(process, errors)}
                elif not result:
                    late = left < PART_SECONDS
                    why = OUT_OF_TIME if late else f"killed after {PART_SECONDS:.0f} s"
                    result = {"failed": why}
                num_told += 1
                yield name, result
                if "failed" in result:
                    return
        finally:
            kill(process)


def _read(process: subprocess.Popen[str], lines: queue.SimpleQueue[str | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(MARK):
            lines.put(line[len(MARK) :])
    lines.put(None)


def _next(lines: queue.SimpleQueue[str | None], seconds: float) -> dict[str, Any] | None:
    """The result of the next part. None: the process has ended; empty: timeout."""
    until = time.monotonic() + seconds
    while True:
        try:
            line = lines.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            return {}
        if line is None:
            return None
        told: dict[str, Any] = json.loads(line)
        if "found" in told or "failed" in told:
            return told


def _ending(process: subprocess.Popen[str], errors: Any) -> str:
    status = process.wait()
    errors.seek(0)
    last = errors.read().strip().splitlines()[-1:] or ["it printed no error"]
    return f"the process ended with status {status}: {last[0]}"


# -------------------------------------------------------------------------------------- reporting


def as_text(record: Record) -> str:
    """The results as Markdown."""
    lines = [f"# {record.device}", "", f"torch {record.torch}", ""]
    lines += [f"- tests of {name}: {closing}" for name, closing in record.tests.items()]
    for name, done in record.commands.items():
        lines.append(f"- anybatch {name}: exit status {done['status']}, {done['seconds']:.1f} s")
    if record.failures:
        lines += ["", "What failed:", ""]
        lines += [f"- {what}: {why}" for what, why in record.failures.items()]
    cells = [found for name, found in record.found.items() if name.startswith(CELL)]
    for told in (
        _of_device(record.found.get("device")),
        _of_cells(cells),
        _of_vocabulary(record.found.get("vocabulary")),
        _of_overhead(record.found.get("overhead")),
        _of_host_memory(record.found.get("host memory")),
        *(_of_choice(name, one) for name, one in record.found.items() if name.startswith("choice")),
    ):
        lines += ["", *told] if told else []
    if record.left_out:
        lines += ["", f"Left out for want of time: {'; '.join(record.left_out)}."]
    return "\n".join(lines) + "\n"


def _of_device(found: dict[str, Any] | None) -> list[str]:
    if not found:
        return []
    mib = {key: found[key] / 2**20 for key in ("context_bytes", "typical_context_bytes")}
    context, typical = mib.values()
    lines = [
        f"Context and kernels: {context:.0f} MiB; where no GPU is, {typical:.0f} MiB are taken.",
        "",
        "| speed | data sheet | measured |",
        "|---|---:|---:|",
    ]
    return lines + [
        f"| {name} | {told:.3g} | {found['measured'][name]:.3g} |"
        for name, told in found["sheet"].items()
    ]


def _of_cells(cells: list[dict[str, Any]]) -> list[str]:
    if not cells:
        return []
    accounts = list(dict.fromkeys(name for cell in cells for name in cell["measured_totals"]))
    columns = ["peak", *accounts, "MemTracker", "Accelerate", "step ms", "elsewhere"]
    lines = [
        "Peak: MiB of the process, predicted / measured. Then the most by each account of the",
        "allocator, as a machine without this GPU predicts it / measured. Errors of torch's MemTracker",
        "and of Accelerate's estimator are against what was measured in tensors. Elsewhere: the time",
        "that a machine without this GPU predicts, against the measured one.",
        "",
        f"| model | variant | {' | '.join(columns)} |",
        f"|---|---|{'---:|' * len(columns)}",
    ]
    for cell in cells:
        told, found = cell.get("elsewhere_totals", {}), cell["measured_totals"]
        peak = [cell[f"{kind}_bytes"] / 2**20 for kind in ("predicted", "measured")]
        figures = [f"{peak[0]:.1f} / {peak[1]:.1f}"]
        figures += [
            f"{told.get(name, 0) / 2**20:.1f} / {found.get(name, 0) / 2**20:.1f}"
            for name in accounts
        ]
        for key in ("mem_tracker_bytes", "accelerate_bytes"):
            figures.append(_error(cell.get(key), found.get("allocated"), 0))
        seconds = [cell.get(f"{kind}_seconds") for kind in ("predicted", "measured")]
        figures.append(" / ".join("-" if one is None else f"{one * 1e3:.1f}" for one in seconds))
        figures.append(_error(cell.get("elsewhere_seconds"), cell.get("measured_seconds"), 0))
        lines.append(f"| {cell['model']} | {cell['variant']} | {' | '.join(figures)} |")
    lines.append("")
    lines += _summary("peak", [(c["predicted_bytes"], c["measured_bytes"]) for c in cells])
    for name in accounts:
        pairs = [
            (c.get("elsewhere_totals", {}).get(name), c["measured_totals"].get(name)) for c in cells
        ]
        lines += _summary(f"{name}, predicted elsewhere", pairs)
    for name, key in (
        ("seconds", "predicted_seconds"),
        ("seconds, elsewhere", "elsewhere_seconds"),
    ):
        lines += _summary(name, [(c.get(key), c.get("measured_seconds")) for c in cells])
    return lines


def _summary(name: str, pairs: Sequence[tuple[float | None, float | None]]) -> list[str]:
    """Summary of prediction errors; `pairs` are (predicted, measured)."""
    errors = [told / found - 1 for told, found in pairs if told and found]
    if not errors:
        return []
    sentence = (
        f"- {name}: median error {statistics.median(map(abs, errors)):.2%}, largest"
        f" {max(errors, key=abs):+.2%}; below the measured one in"
        f" {sum(error < 0 for error in errors)} of {len(errors)} cells."
    )
    return [sentence]


def _error(told: float | None, found: float | None, digits: int) -> str:
    return f"{told / found - 1:+.{digits}%}" if told and found else "-"


def _of_vocabulary(found: list[dict[str, Any]] | None) -> list[str]:
    if not found:
        return []
    lines = [
        "Loss of 8,192 tokens over 256,000 words, width 2,304, bfloat16:",
        "",
        "| backend | extra GB | ms |",
        "|---|---:|---:|",
    ]
    for one in found:
        gigabytes, milliseconds = one["extra_bytes"] / 1e9, one["seconds"] * 1e3
        lines.append(f"| {one['backend']} | {gigabytes:.2f} | {milliseconds:.1f} |")
    return lines


def _of_overhead(found: dict[str, float] | None) -> list[str]:
    if not found:
        return []
    plain = found["plain"]
    told = (
        f"{name} {value * 1e3:.2f} ms ({value / plain - 1:+.1%})" for name, value in found.items()
    )
    return [f"A step of four micro-batches, against a loop written by hand: {', '.join(told)}."]


def _of_host_memory(found: dict[str, Any] | None) -> list[str]:
    if not found:
        return []
    lines = [
        "What is kept for backward, predicted / measured:",
        "",
        "| way | peak MiB | step ms |",
        "|---|---:|---:|",
    ]
    for way, one in found.items():
        size = [(one[f"{kind}_bytes"] or 0) / 2**20 for kind in ("predicted", "measured")]
        taken = [(one[f"{kind}_seconds"] or 0) * 1e3 for kind in ("predicted", "measured")]
        lines.append(f"| {way} | {size[0]:.1f} / {size[1]:.1f} | {taken[0]:.1f} / {taken[1]:.1f} |")
    return lines


def _of_choice(name: str, found: dict[str, Any]) -> list[str]:
    sizes = found["sizes"]
    best = min(one["measured_seconds"] for one in sizes.values())
    mine = sizes[str(found["of"])]["measured_seconds"]
    lines = [
        f"{name.capitalize()}: the plan is {found['chosen']}, {mine / best - 1:.1%} above the fastest.",
        "",
        "| micro-batch | predicted ms | measured ms |",
        "|---:|---:|---:|",
    ]
    for size, one in sizes.items():
        told, taken = (one["predicted_seconds"] or 0) * 1e3, one["measured_seconds"] * 1e3
        lines.append(f"| {size} | {told:.2f} | {taken:.2f} |")
    return lines


def main() -> int:
    """Run everything. Returns the exit status: 0, 1 if anything failed, 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS, help="the folder of the results")
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="WORD",
        help="test files, commands and parts with one of these in the name",
    )
    parser.add_argument("--seconds", type=float, default=SECONDS, help="after which all ends")
    given = parser.parse_args()
    until = time.monotonic() + given.seconds
    if not torch.cuda.is_available():
        print("gpu-check needs a CUDA device, and torch sees none here.", file=sys.stderr)
        return 2
    # In a separate process: device memory of this one would be attributed to the parts.
    name = "import torch; print(torch.cuda.get_device_name(0))"
    status, told = run([sys.executable, "-c", name], COMMAND_SECONDS, dict(os.environ))
    device = told.strip().splitlines()[-1] if status == 0 and told.strip() else "CUDA"
    record = Record.read(given.out, device) if given.only else Record(device)
    with tempfile.TemporaryDirectory() as cache:
        env = {**os.environ, "XDG_CACHE_HOME": cache}
        run_tests(record, until, env, given.only)
        record.write(given.out)
        run_commands(record, until, env, given.only)
        record.write(given.out)
        names = [name for name in parts() if _is_wanted(name, given.only)]
        run_parts(record, names, until, env, given.out)
    record.write(given.out)
    print(as_text(record))
    return 1 if record.failures else 0


def _is_wanted(name: str, words: Sequence[str] | None) -> bool:
    return not words or any(word in name for word in words)


if __name__ == "__main__":
    sys.exit(main())
