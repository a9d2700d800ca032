"""Prediction: what a plan tells of the bytes and seconds of its choice."""

from __future__ import annotations

from anybatch.estimate.calibration import SHEET_ERROR
from anybatch.planner.option import Option
from anybatch.planner.setting import Setting
from anybatch.plans import Prediction


def prediction_of(option: Option, setting: Setting, meeting_seconds: float = 0.0) -> Prediction:
    """The prediction for `option`, its time corrected by earlier runs, and with the seconds of a step
    that ranks spend meeting in norms."""
    learned = setting.correction
    training, evaluation = option.footprint.peak, option.evaluation
    higher = max(training, evaluation, key=lambda peak: peak.num_bytes)
    seconds = {
        "forward": option.seconds.forward,
        "backward": option.seconds.backward,
        "recompute": option.seconds.recompute,
        "update": option.seconds.update,
        "exchange of gradients": option.seconds.exchange,
        "norms over ranks": meeting_seconds,
    }
    return Prediction(
        peak_bytes=higher.num_bytes,
        evaluation_peak_bytes=evaluation.num_bytes,
        commit_bytes=option.footprint.commit_bytes,
        step_seconds=option.seconds.total + meeting_seconds,
        by_kind=dict(higher.by_kind),
        totals={
            name: max(size, evaluation.totals.get(name, 0))
            for name, size in training.totals.items()
        },
        choice=option.choice,
        method=option.footprint.method,
        step_parts={part: time for part, time in seconds.items() if time},
        seconds_method=_told_of_time(setting),
        seconds_corrected_by=learned.seconds,
        corrected_runs=learned.num_runs,
    )


def _told_of_time(setting: Setting) -> str:
    if not setting.pace.measured:
        return f"from nominal figures of the device: expect them within a factor of {SHEET_ERROR:g}"
    way = "from speeds measured on this device"
    if not setting.correction.num_runs:
        return way
    runs = f"{setting.correction.num_runs} run{'s' if setting.correction.num_runs > 1 else ''}"
    return f"{way}, corrected by {setting.correction.seconds:.2f} from {runs} on this machine"
