"""The tables of words: terms people search for are there, rows have a link, and lines run."""

from __future__ import annotations

import re
import shlex
from itertools import pairwise

import pytest
from tests.docs.reading import blocks, text_of

PAGES = ("docs/words.md", "docs/zh/words.md")

TERMS = {
    "docs/words.md": (
        "gradient accumulation",
        "gradient checkpointing",
        "DataParallel",
        "DataParallelModel",
        "DataParallelCriterion",
        "gather",
        "BalancedDataParallel",
        "DDP",
        "torch.distributed.launch",
        "node rank",
        "DistributedSampler",
        "set_epoch",
        "no_sync",
        "SyncBatchNorm",
        "apex",
        "O0, O1, O2, O3",
        "GradScaler",
        "empty_cache",
        "CUDA out of memory",
        "distributed evaluation",
        "asynchronous updates",
        "effective batch size",
        "linear scaling",
        "Horovod",
        "Paddle",
        "spawn",
        "state_dict",
    ),
    "docs/zh/words.md": (
        "梯度累积",
        "梯度累加",
        "梯度检查点",
        "显存",
        "显存不足",
        "爆显存",
        "数据并行",
        "模型并行",
        "单机多卡",
        "多机多卡",
        "同步 BN",
        "混合精度",
        "分布式评估",
        "异步更新",
        "学习率线性缩放",
        "有效批量",
        "Horovod",
        "Paddle",
    ),
}


def rows(page: str) -> list[tuple[str, str, str]]:
    """(terms, explanation, line) of every row of the tables of three columns."""
    lines = text_of(page).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    is_row = [line.startswith("| ") for line in lines]
    found = []
    for (before, now), row in zip(pairwise(is_row), cells[1:], strict=True):
        if before and now and len(row) == 3 and row[0] != "---":
            found.append(tuple(cell.strip("| ") for cell in row))
    return found


@pytest.mark.parametrize("page", PAGES)
def test_the_terms_that_people_search_for_are_in_the_tables(page):
    terms = " ".join(row[0] for row in rows(page)).lower()
    assert not [term for term in TERMS[page] if term.lower() not in terms]


@pytest.mark.parametrize("page", PAGES)
def test_every_row_leads_to_a_page_and_has_a_line(page):
    assert len(rows(page)) > 40
    assert not [
        row for row in rows(page) if "](" not in row[1] or not re.fullmatch("`[^`]+`", row[2])
    ]


def test_both_languages_have_the_same_lines():
    english, chinese = ([row[2] for row in rows(page)] for page in PAGES)
    assert english == chinese


_RUN = """
import sys
from anybatch.cli import run

names = {}
for block in BLOCKS:
    exec(block, names)
for line in LINES:
    print("==", line, flush=True)
    if isinstance(line, tuple):
        assert run(list(line)) == 0, line
    else:
        exec(line, names)
"""


@pytest.mark.nightly
def test_every_line_runs(warm, tmp_path):
    """All in one process: the code blocks in order, which the lines build on, and then the lines."""
    code = [b.text for b in blocks(PAGES[0]) if b.language == "python" and not b.is_fragment]
    lines = [
        tuple(shlex.split(line)[1:]) if line.startswith("anybatch ") else line
        for line in dict.fromkeys(row[2].strip("`") for row in rows(PAGES[0]))
    ]
    script = tmp_path / "script.py"
    program = _RUN.replace("BLOCKS", repr(code)).replace("LINES", repr(lines))
    script.write_text(program, encoding="utf-8")
    done = warm(["python", script], tmp_path)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
