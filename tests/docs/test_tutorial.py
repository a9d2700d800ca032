"""The tutorial notebook, run by a real kernel."""

from __future__ import annotations

import re

import nbformat
import pytest
from nbclient import NotebookClient
from tests.docs.reading import ROOT

TUTORIAL = ROOT / "docs/tutorial.ipynb"


def test_the_tutorial_is_kept_without_outputs():
    notebook = nbformat.read(TUTORIAL, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert cells
    assert not any(cell.outputs or cell.execution_count for cell in cells)


@pytest.mark.nightly
def test_the_tutorial_runs(tmp_path):
    notebook = nbformat.read(TUTORIAL, as_version=4)
    NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()

    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    printed = "".join(output.text for output in outputs if output.get("name") == "stdout")
    assert re.search(r"budget +48\.0 MiB, enforced", printed)
    assert float(re.search(r"accuracy ([\d.]+)", printed)[1]) > 0.6
    measured = int(re.search(r"measured +([\d,]+)", printed)[1].replace(",", ""))
    assert 0 < measured <= 48 * 2**20
    assert float(re.search(r"largest difference of a weight (\S+)", printed)[1]) < 1e-4
    # Plan and progress of both runs are shown below their cells.
    shown = [
        output.data["text/plain"] for output in outputs if output.output_type == "display_data"
    ]
    assert ["step 12/12" in text for text in shown] == [True, True]
    assert (tmp_path / "runs/tutorial/report.html").exists()
