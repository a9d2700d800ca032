"""A pytest plugin that runs a host's own tests with the adapter in place (`-p in_place`).

`transformers.Trainer` becomes one with the mixin in front. What a test asks for by
`per_device_train_batch_size` and `gradient_accumulation_steps` is its global batch, and the former the
micro-batch. Names that tests of another version import and this one has no more are None.
"""

from __future__ import annotations

import copy
import os
import sys

import transformers
import transformers.testing_utils

GONE = ("GlueDataset", "GlueDataTrainingArguments", "LineByLineTextDataset")

sys.path.extend(os.environ.get("LAST_PATHS", "").split(os.pathsep))

for name in GONE:
    if not hasattr(transformers, name):
        setattr(transformers, name, None)


def mixed(host):
    """`host`, a class of trainers, with the adapter in front."""
    from anybatch.integrations.transformers import AnyBatch

    class Mixed(AnyBatch, host):
        def __init__(self, model=None, args=None, *rest, **options):
            if args is None:
                args = transformers.TrainingArguments(output_dir="tmp_trainer")
            micro_batch = args.per_device_train_batch_size
            global_batch = micro_batch * args.gradient_accumulation_steps * args.world_size
            args = copy.copy(args)
            args.gradient_accumulation_steps = 1
            sizes = {"global_batch": global_batch, "micro_batch": micro_batch}
            super().__init__(model, args, *rest, **options, **sizes)

    Mixed.__name__ = Mixed.__qualname__ = host.__name__
    Mixed.__module__ = host.__module__
    return Mixed


if os.environ.get("IN_PLACE") == "1":
    import transformers.trainer_seq2seq

    transformers.Seq2SeqTrainer = mixed(transformers.trainer_seq2seq.Seq2SeqTrainer)
    transformers.Trainer = mixed(transformers.trainer.Trainer)
