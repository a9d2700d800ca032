"""Prediction: what a plan tells of the bytes and seconds of its choice."""

from __future__ import annotations

from anybatch.estimate import Peak
from anybatch.estimate.calibration import SHEET_ERROR
from anybatch.estimate.calibration_history import Correction
from anybatch.planner.option import Option
from anybatch.planner.setting import Setting
from anybatch.plans import Prediction


def prediction_of(option: Option, setting: Setting, meeting_seconds: float = 0.0) -> Prediction:
    """The prediction for `option`, with what earlier runs taught, and with the seconds of a step that
    ranks spend meeting in norms."""
    learned = setting.correction
    training, evaluation = option.footprint.peak, option.evaluation
    higher = max(training, evaluation, key=lambda peak: peak.num_bytes)
    peak = learned.bytes_of(higher.num_bytes)
    seconds = {
        "forward": option.seconds.forward,
        "backward": option.seconds.backward,
        "recompute": option.seconds.recompute,
        "update": option.seconds.update,
        "exchange of gradients": option.seconds.exchange,
        "norms over ranks": meeting_seconds,
    }
    return Prediction(
        peak_bytes=peak,
        evaluation_peak_bytes=learned.bytes_of(evaluation.num_bytes),
        commit_bytes=option.footprint.commit_bytes,
        step_seconds=option.seconds.total + meeting_seconds,
        by_kind=kinds_of(higher, learned),
        totals={
            name: max(size, evaluation.totals.get(name, 0))
            for name, size in training.totals.items()
        },
        choice=option.choice,
        method=option.footprint.method,
        step_parts={part: time for part, time in seconds.items() if time},
        seconds_method=_told_of_time(setting),
        learned_bytes=peak - higher.num_bytes,
        seconds_corrected_by=learned.seconds,
        corrected_runs=learned.num_runs,
    )


def kinds_of(peak: Peak, learned: Correction) -> dict[str, int]:
    """What the bytes at `peak` are, with those that earlier runs taught."""
    more = learned.bytes_of(peak.num_bytes) - peak.num_bytes
    return {**peak.by_kind, "as in earlier runs": more} if more else dict(peak.by_kind)


def _told_of_time(setting: Setting) -> str:
    if not setting.pace.measured:
        return f"from nominal figures of the device: expect them within a factor of {SHEET_ERROR:g}"
    way = "from speeds measured on this device"
    if setting.pace.disturbed:
        way += " while other processes were using it: a rough guide"
    if not setting.correction.num_runs:
        return way
    runs = f"{setting.correction.num_runs} run{'s' if setting.correction.num_runs > 1 else ''}"
    return f"{way}, corrected by {setting.correction.seconds:.2f} from {runs} on this machine"
