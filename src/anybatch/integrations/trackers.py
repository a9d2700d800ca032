"""Sinks that log the curves of a run to an experiment tracker.

    ab.train(task, sinks=[WandbLog(project="digits")])         anybatch train digits --track wandb

Each training run becomes one run of the tracker. Its configuration contains the settings and the plan;
its curves are those of the TensorBoard log, with the same names, by step. Destination and account are
configured in the tracker: `WANDB_MODE`, `MLFLOW_TRACKING_URI`, `TRACKIO_SPACE_ID`.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from importlib import import_module
from typing import Any, Self

from anybatch.errors import InputError, as_setting
from anybatch.events import Event, RunEnded, RunStarted
from anybatch.report.tensorboard import Scalars, scalars_of, settings_of


class TrackerLog:
    """Base class of the sinks in this module. Use it as a context manager, or call `close`; the end of
    the run also closes it.

    If the tracker fails, training continues: a warning is issued once, and later events are not logged.

    Args:
        project: project of the run (in MLflow, its experiment).
        name: name of the run; None: chosen by the tracker.

    Raises `InputError` if the library cannot be imported.
    """

    library: str
    """Name of the module to import."""

    def __init__(self, project: str = "anybatch", name: str | None = None) -> None:
        self._is_open = False
        # Opened here, not at the first event, so that its memory does not count as training's.
        self._open(_imported(self.library), project, name)
        self._is_open = True

    def __call__(self, event: Event) -> None:
        if not self._is_open:
            return
        try:
            if isinstance(event, RunStarted):
                self._configure(settings_of(event), event.plan)
            elif values := scalars_of(event, None):
                self._log(values, getattr(event, "step", 0), event.time)
            elif isinstance(event, RunEnded):
                self.close(failed=not event.finished)
        except Exception as error:  # from the network, the disk or the service
            self._is_open = False
            warnings.warn(
                f"{self.library} has failed ({error}). Training goes on without it; events.jsonl in the"
                " run folder has everything.",
                stacklevel=2,
            )

    def close(self, failed: bool = False) -> None:
        """End the run of the tracker; `failed` marks it as failed. Can be called more than once."""
        if self._is_open:
            self._is_open = False
            self._end(failed)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_rest: object) -> None:
        self.close(failed=kind is not None)

    # The interface of wandb, which trackio shares.

    def _open(self, library: Any, project: str, name: str | None) -> None:
        self._run = library.init(project=project, name=name)

    def _configure(self, settings: Mapping[str, Any], plan: Mapping[str, Any]) -> None:
        self._run.config.update({**settings, "plan": dict(plan)})

    def _log(self, values: Scalars, step: int, time: float) -> None:
        self._run.log(values, step=step)

    def _end(self, failed: bool) -> None:
        self._run.finish()


class WandbLog(TrackerLog):
    """Logs a run to Weights & Biases."""

    library = "wandb"

    def _end(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class TrackioLog(TrackerLog):
    """Logs a run to Trackio."""

    library = "trackio"


class MlflowLog(TrackerLog):
    """Logs a run to MLflow; the plan is logged as an artifact, `plan.json`."""

    library = "mlflow"

    def _open(self, library: Any, project: str, name: str | None) -> None:
        self._client = library.MlflowClient()
        found = self._client.get_experiment_by_name(project)
        experiment = found.experiment_id if found else self._client.create_experiment(project)
        self._run_id = self._client.create_run(experiment, run_name=name).info.run_id

    def _configure(self, settings: Mapping[str, Any], plan: Mapping[str, Any]) -> None:
        for key, value in settings.items():
            self._client.log_param(self._run_id, key, value)
        self._client.log_dict(self._run_id, dict(plan), "plan.json")

    def _log(self, values: Scalars, step: int, time: float) -> None:
        metric = import_module("mlflow.entities").Metric
        metrics = [metric(key, value, int(time * 1000), step) for key, value in values.items()]
        self._client.log_batch(self._run_id, metrics)

    def _end(self, failed: bool) -> None:
        self._client.set_terminated(self._run_id, "FAILED" if failed else "FINISHED")


TRACKERS: Mapping[str, type[TrackerLog]] = {
    kind.library: kind for kind in (WandbLog, MlflowLog, TrackioLog)
}
"""Sinks by the names that `--track` accepts."""


def check_tracker(name: str) -> type[TrackerLog]:
    """Returns the sink class for the tracker `name`. Raises `InputError` if there is none, or if its
    library cannot be imported."""
    if name not in TRACKERS:
        raise InputError(f"track is {name!r}: choose one of {', '.join(TRACKERS)}.")
    _imported(name)
    return TRACKERS[name]


def _imported(library: str) -> Any:
    try:
        return import_module(library)
    except ImportError as error:
        raise InputError(
            f"tracking by {library} needs the package {library}, which cannot be imported ({error}):"
            f" pip install {library}. Curves can be had without it by {as_setting('tensorboard')}."
        ) from None
