"""What tensorboard's own reader finds in a log."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

Points = list[tuple[int, float]]


class Found(NamedTuple):
    """Curves and texts by name, each as (step, value)."""

    scalars: dict[str, Points]
    texts: dict[str, list[tuple[int, str]]]
    settings: dict[str, Any]


def found_in(folder: Path) -> Found:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    all_of_it = {"scalars": 0, "tensors": 0}
    reader = EventAccumulator(str(folder), size_guidance=all_of_it).Reload()
    tags = reader.Tags()
    scalars = {
        tag: [(point.step, point.value) for point in reader.Scalars(tag)] for tag in tags["scalars"]
    }
    texts = {
        tag.removesuffix("/text_summary"): [
            (one.step, one.tensor_proto.string_val[0].decode()) for one in reader.Tensors(tag)
        ]
        for tag in tags["tensors"]
        if not tag.startswith("_hparams_")
    }
    settings = {}
    for tag, content in reader.summary_metadata.items():
        if tag == "_hparams_/session_start_info":
            data = HParamsPluginData.FromString(content.plugin_data.content)
            for name, value in data.session_start_info.hparams.items():
                settings[name] = getattr(value, value.WhichOneof("kind"))
    return Found(scalars, texts, settings)
