"""A pytest plugin that runs a host's own tests with the adapter in place: `-p in_place`, and
`IN_PLACE=transformers` or `lightning` in the environment; without that variable, the host alone. The
adapter for Lightning is a `DDPStrategy`: what it is compared with is that (`IN_PLACE=ddp`).

What a test asks for by batch size and accumulation steps is its global batch, and the former the
micro-batch. In transformers, names that tests of another version import and this one has no more are
None.
"""

from __future__ import annotations

import copy
import os

GONE = ("GlueDataset", "GlueDataTrainingArguments", "LineByLineTextDataset")


def mixed(host):
    """`host`, a class of transformers' trainers, with the adapter in front."""
    import transformers

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


def in_lightning(adapted):
    """Every Trainer without a strategy of its own has the adapter's, for the batch size that each
    loader has; or `DDPStrategy`."""
    import lightning.pytorch as pl

    from anybatch.integrations.lightning import AnyBatch

    class OfLoader(AnyBatch):
        def __init__(self):
            super().__init__(global_batch=1)

        def process_dataloader(self, dataloader):
            self.global_batch = getattr(dataloader, "batch_size", None) or 1
            self._options["micro_batch"] = self.global_batch
            return super().process_dataloader(dataloader)

    init = pl.Trainer.__init__

    def with_strategy(self, *args, **options):
        if not args and options.get("devices", 1) in (1, "auto", "1"):
            options.setdefault("strategy", OfLoader() if adapted else "ddp")
        init(self, *args, **options)

    pl.Trainer.__init__ = with_strategy


if os.environ.get("IN_PLACE") in ("lightning", "ddp"):
    in_lightning(os.environ["IN_PLACE"] == "lightning")
else:
    import transformers
    import transformers.testing_utils
    import transformers.trainer_seq2seq

    for name in GONE:
        if not hasattr(transformers, name):
            setattr(transformers, name, None)
    if os.environ.get("IN_PLACE") == "transformers":
        transformers.Seq2SeqTrainer = mixed(transformers.trainer_seq2seq.Seq2SeqTrainer)
        transformers.Trainer = mixed(transformers.trainer.Trainer)
