"""Sinks that send the curves of a run to an experiment tracker.

    ab.train(task, sinks=[WandbLog(project="digits")])         anybatch train digits --track wandb

Each run of training is one run of the tracker, with the settings and the plan as its configuration and
the curves of the TensorBoard log, under the same names, against steps. Where and as whom the tracker
writes is its own matter: `WANDB_MODE`, `MLFLOW_TRACKING_URI`, `TRACKIO_SPACE_ID`.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from importlib import import_module
from typing import Any, Self

from anybatch.errors import InputError
from anybatch.events import Event, RunEnded, RunStarted
from anybatch.report.tensorboard import Scalars, scalars_of, settings_of


class TrackerLog:
    """What the sinks of this module have in common. Use one as a context, or call `close`; the end of
    the run closes it, too.

    A tracker that fails does not end training: one warning says so, and the rest is left out.

    Args:
        project: where the tracker puts the run (MLflow: the experiment).
        name: of the run; None: the tracker finds one.

    Raises `InputError` if the library cannot be imported.
    """

    library: str
    """The module that is imported."""

    def __init__(self, project: str = "anybatch", name: str | None = None) -> None:
        self._is_open = False
        # Opened here and not at the first event: its memory is not training's.
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
        except Exception as error:  # of a network, a disk, a service
            self._is_open = False
            warnings.warn(
                f"{self.library} has failed ({error}). Training goes on without it; events.jsonl in the"
                " run folder has everything.",
                stacklevel=2,
            )

    def close(self, failed: bool = False) -> None:
        """End the run of the tracker; `failed`: as one that did not come to its end. Closing twice does
        no harm."""
        if self._is_open:
            self._is_open = False
            self._end(failed)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_rest: object) -> None:
        self.close(failed=kind is not None)

    # The interface of wandb, which trackio has, too.

    def _open(self, library: Any, project: str, name: str | None) -> None:
        self._run = library.init(project=project, name=name)

    def _configure(self, settings: Mapping[str, Any], plan: Mapping[str, Any]) -> None:
        self._run.config.update({**settings, "plan": dict(plan)})

    def _log(self, values: Scalars, step: int, time: float) -> None:
        self._run.log(values, step=step)

    def _end(self, failed: bool) -> None:
        self._run.finish()


class WandbLog(TrackerLog):
    """Sends a run to Weights & Biases."""

    library = "wandb"

    def _end(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class TrackioLog(TrackerLog):
    """Sends a run to Trackio."""

    library = "trackio"


class MlflowLog(TrackerLog):
    """Sends a run to MLflow; the plan is an artifact, `plan.json`."""

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
"""By the names that `--track` takes."""


def check_tracker(name: str) -> type[TrackerLog]:
    """The sink for the tracker called `name`. Raises `InputError` if there is none, or its library
    cannot be imported."""
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
            f" pip install {library}. Curves can be had without it by --tensorboard."
        ) from None
