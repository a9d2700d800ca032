"""Small tensors: one thread is the fastest, and leaves the cores to other tests. Speeds are nominal, so
that choices are the same on every machine."""

import pytest
import torch

from anybatch.estimate.calibration import Correction, nominal
from anybatch.planner import setting


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def nominal_speeds(monkeypatch):
    monkeypatch.setattr(setting, "speeds_of", nominal)
    monkeypatch.setattr(setting, "correction", lambda device, task: Correction())
