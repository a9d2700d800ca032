"""Models and collators of transformers as they are: any cut trains as the model's own loss of the whole
batch does, in one piece."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch
from tests.equivalence.reference import assert_equal, deviation, train, train_plainly
from tests.stand_in_datasets import datasets as datasets

import anybatch as ab

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

WORDS = 41
PAD = 0
TEXT = {"vocab_size": WORDS, "pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": 2}
NARROW = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def tokenizer():
    """One that pads: what else it does is of no interest here."""
    words = {"[PAD]": PAD, **{f"w{i}": i for i in range(1, WORDS)}}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w1"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="[PAD]")


def sequences(num=26, seed=1):
    """Lists of 3 to 11 ids, none of them padding."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 12, (num,), generator=generator).tolist()
    return [torch.randint(3, WORDS, (n,), generator=generator).tolist() for n in lengths]


def of_text():
    return [{"input_ids": ids} for ids in sequences()]


def of_classes():
    return [{"input_ids": ids, "label": sum(ids) % 3} for ids in sequences()]


def of_tagged_tokens():
    tags = [[i % 5 if i % 3 else -100 for i in ids] for ids in sequences()]
    return [{"input_ids": ids, "labels": one} for ids, one in zip(sequences(), tags, strict=True)]


def of_pairs():
    pairs = zip(sequences(), sequences(seed=2), strict=True)
    return [{"input_ids": ids, "labels": other} for ids, other in pairs]


def of_images():
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(26, 3, 8, 8, generator=generator, dtype=torch.float64)
    return [{"pixel_values": image, "labels": i % 3} for i, image in enumerate(images)]


def gpt2():
    config = transformers.GPT2Config(
        **TEXT,
        n_embd=16,
        n_layer=2,
        n_head=2,
        n_positions=16,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return transformers.AutoModelForCausalLM.from_config(config)


def llama():
    config = transformers.LlamaConfig(
        **TEXT, **NARROW, num_key_value_heads=1, max_position_embeddings=16
    )
    return transformers.AutoModelForCausalLM.from_config(config)


def bert(kind, num_labels):
    config = transformers.BertConfig(
        **TEXT, **NARROW, **STILL, max_position_embeddings=16, num_labels=num_labels
    )
    return getattr(transformers, f"AutoModelFor{kind}").from_config(config)


def t5():
    config = transformers.T5Config(
        **TEXT,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=PAD,
    )
    return transformers.AutoModelForSeq2SeqLM.from_config(config)


def vit():
    config = transformers.ViTConfig(**NARROW, **STILL, image_size=8, patch_size=4, num_labels=3)
    return transformers.AutoModelForImageClassification.from_config(config)


COLLATORS = {
    "language": partial(transformers.DataCollatorForLanguageModeling, mlm=False),
    "padding": transformers.DataCollatorWithPadding,
    "tokens": transformers.DataCollatorForTokenClassification,
    "pairs": transformers.DataCollatorForSeq2Seq,
}

CASES = {
    "gpt2": (gpt2, of_text, "language"),
    "llama": (llama, of_text, "language"),
    "bert, sequences": (partial(bert, "SequenceClassification", 3), of_classes, "padding"),
    "bert, tokens": (partial(bert, "TokenClassification", 5), of_tagged_tokens, "tokens"),
    "t5": (t5, of_pairs, "pairs"),
    "vit": (vit, of_images, None),
}
BY_TOKENS = ("gpt2", "llama", "bert, tokens", "t5")


def mean_of_the_model(model, batch):
    return model(**batch).loss


def task_of(case, loss=ab.model_loss):
    make, samples, collator = CASES[case]

    def model():
        return make().double()

    return ab.Task(
        model=model,
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
        train=samples(),
        collate=transformers.default_data_collator
        if collator is None
        else COLLATORS[collator](tokenizer()),
        global_batch=8,
        epochs=2,
        clip_norm=1.0,
    )


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("micro_batch", [1, 3])
def test_the_models_own_loss_is_exact_under_any_cut(case, micro_batch):
    plain = train_plainly(task_of(case, mean_of_the_model))
    assert_equal(train(task_of(case), micro_batch), plain)


@pytest.mark.parametrize("case", ["gpt2", "llama"])
def test_without_logits_it_is_the_same(case):
    plain = train_plainly(task_of(case, mean_of_the_model))
    assert_equal(train(task_of(case, ab.causal_lm_loss), 3), plain)


@pytest.mark.parametrize("case", BY_TOKENS)
def test_a_plain_mean_over_tokens_is_not(case):
    """What `model_loss` is there for: a mean that is weighed by samples favours short sequences."""
    plain = train_plainly(task_of(case, mean_of_the_model))
    found = train(task_of(case, mean_of_the_model), 3)
    assert deviation(found.model, plain.model) > 1e-3


def test_a_micro_batch_without_a_label_counts_nothing():
    task = task_of("t5")
    empty = [{**sample, "labels": [-100, -100]} for sample in task.train[:5]]
    task = dataclasses.replace(task, train=[*empty, *task.train[5:]], shuffle=False)
    plain = train_plainly(dataclasses.replace(task, loss=mean_of_the_model))
    assert_equal(train(task, 1), plain)


def test_a_data_set_of_datasets_is_trained_on_as_it_is(datasets):
    task = task_of("bert, sequences")
    plain = train_plainly(dataclasses.replace(task, loss=mean_of_the_model))
    held = datasets.Dataset.from_list(task.train)
    assert hasattr(held, "__getitems__")
    assert_equal(train(dataclasses.replace(task, train=held), 3), plain)


def test_a_model_that_is_read_from_a_folder_is_trained_as_one_that_is_built(tmp_path):
    def built():
        torch.manual_seed(1)
        return gpt2().double()

    def read():
        return transformers.AutoModelForCausalLM.from_pretrained(tmp_path, local_files_only=True)

    built().save_pretrained(tmp_path)
    task = dataclasses.replace(task_of("gpt2", ab.causal_lm_loss), model=built)
    from_folder = dataclasses.replace(task, model=read)
    assert ab.plan(from_folder, micro_batch=3).prediction is not None
    assert_equal(train(from_folder, 3), train_plainly(task))
