"""The recipe finetune as a task: its samples, that it is exact and learns, and what it refuses."""

from __future__ import annotations

import json
import math
import pickle
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from tests.stand_in_datasets import datasets as datasets

import anybatch as ab
from anybatch.errors import DataError, InputError
from anybatch.events import Said
from anybatch.recipes import resolve

transformers = pytest.importorskip("transformers")
from anybatch.recipes.finetune import finetune  # noqa: E402
from anybatch.recipes.finetune_model import num_positions  # noqa: E402

WORDS = 300
LLAMA = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
}
SUMS = [{"prompt": f"{i}+{i % 3}=", "completion": str(i + i % 3)} for i in range(40)]
MOODS = [
    {"text": f"{'good' if i % 2 else 'bad'} {i * i}", "label": "pos" if i % 2 else "neg"}
    for i in range(40)
]


@pytest.fixture(autouse=True)
def _short_texts(monkeypatch):
    monkeypatch.setattr("anybatch.recipes.finetune.TOKENS_TOLD", 8)


@pytest.fixture
def folder(tmp_path):
    """A Llama's configuration, without weights and tokenizer."""
    transformers.LlamaConfig(**LLAMA).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def data(tmp_path):
    def written(rows, name="data.jsonl"):
        path = tmp_path / name
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), "utf-8")
        return path

    return written


def tokenizer_of(*extra):
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: i for i, word in enumerate(["<s>", "</s>", "<pad>", "<?>", *"abcdefgh", *extra])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<?>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<?>",
    )


# ------------------------------------------------------------------------------------- samples


def test_a_completion_counts_and_its_prompt_does_not(folder, data):
    task = finetune(folder, data(SUMS))
    sample = task.train[0]
    assert bytes(sample["input_ids"][:-1].tolist()) == b"0+0=0"
    assert sample["labels"].tolist() == [-100] * 4 + [ord("0"), 256]
    assert len(task.train) == 38  # every 16th is held out
    assert len(task.valid) == 2


def test_a_batch_is_padded_to_its_own_longest_sample_and_padding_counts_nothing(folder, data):
    path = data([{"text": "abc"}, {"text": "a"}, {"text": "ab"}])
    task = finetune(folder, path, valid=path)
    batch = task.collate([task.train[0], task.train[1]])
    assert batch["input_ids"].tolist() == [[97, 98, 99, 256], [97, 256, 256, 256]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert batch["labels"].tolist() == [[97, 98, 99, 256], [97, 256, -100, -100]]
    assert task.lengths(task.train) == [4, 2, 3]


def test_the_tokens_are_those_of_the_folder(folder, data):
    tokenizer_of().save_pretrained(folder)
    task = finetune(
        folder, data([{"prompt": "a b", "completion": "c"}, {"prompt": "", "completion": "h"}])
    )
    assert task.train[0]["input_ids"].tolist() == [4, 5, 6, 1]
    assert task.train[0]["labels"].tolist() == [-100, -100, 6, 1]


def test_what_is_too_long_is_cut_and_counted_once(folder, data):
    path = data([{"text": "x" * n} for n in (3, 50, 60)])
    with pytest.warns(
        UserWarning, match="2 samples of .* have more than 32 tokens, and are cut"
    ) as told:
        task = finetune(folder, path)
    assert len(told) == 1
    assert "2 of them cut to 32 tokens" in task.tell.keywords["origin"]
    assert [len(sample["input_ids"]) for sample in (task.train[1], task.valid[0])] == [32, 32]


def test_rows_without_anything_to_learn_from_are_left_out_and_told(folder, data):
    path = data([{"text": "a"}, {"text": " "}, {"text": ""}, {"text": "b"}])
    with pytest.warns(UserWarning, match="left out, .*line 2 of .* and 1 more"):
        task = finetune(folder, path)
    assert (len(task.train), len(task.valid)) == (1, 1)
    path = data([{"prompt": "x" * 40, "completion": "y"}, {"prompt": "x", "completion": "y"}] * 2)
    with pytest.warns(UserWarning, match="or was cut off"):
        assert len(finetune(folder, path).train) == 1
    with (
        pytest.warns(UserWarning, match="left out"),
        pytest.raises(InputError, match=r"no row of .* has anything to learn from"),
    ):
        finetune(folder, data([{"text": ""}] * 3))


# -------------------------------------------------------------------------------------- training


def first_step(task, micro_batch):
    with ab.Session(task, ab.plan(task, micro_batch=micro_batch)) as session:
        done = next(session.steps())
        return done, [p.detach().clone() for p in session.model.parameters()]


@pytest.mark.parametrize("rows", [SUMS, MOODS], ids=["language", "classes"])
def test_one_piece_and_many_give_the_same_step(folder, data, rows):
    task = finetune(folder, data(rows), global_batch=16, lr=1e-2)
    exact = replace(
        task,
        model=lambda: task.model().double(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        valid=None,
    )
    (whole, at_once), (cut, in_pieces) = first_step(exact, 16), first_step(exact, 3)
    assert cut.loss == pytest.approx(whole.loss, rel=1e-6)
    assert cut.weight == whole.weight
    for a, b in zip(at_once, in_pieces, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


def test_perplexity_is_over_the_tokens_that_count(folder, data):
    task = finetune(folder, data(SUMS), steps=1)
    with ab.Session(task, ab.plan(task, micro_batch=2)) as session:
        found = session.evaluate()
        model = session.model.eval()
        nats = num = 0
        with torch.no_grad():
            for i in range(len(task.valid)):
                sample = task.valid[i]
                ids, labels = sample["input_ids"], sample["labels"]
                chances = model(input_ids=ids[None]).logits[0, :-1].log_softmax(1)
                counted = labels[1:] != -100
                nats -= float(chances[counted, labels[1:][counted]].sum())
                num += int(counted.sum())
    assert found.loss == pytest.approx(nats / num, rel=1e-5)
    assert found.metrics["perplexity"] == pytest.approx(math.exp(nats / num), rel=1e-5)


def test_it_learns_to_tell_classes_apart_and_writes_the_model(folder, data, tmp_path):
    task = finetune(folder, data(MOODS), steps=30, lr=1e-2, save=tmp_path / "made", seed=1)
    result = ab.train(task)
    assert result.metrics["accuracy"] == 1.0
    text = task.tell(result.model)
    assert f"The model is in {tmp_path / 'made'}." in text
    again = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "made", local_files_only=True
    )
    assert again.config.id2label == {0: "neg", 1: "pos"}
    wanted = result.model.state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in again.state_dict().items())


def test_what_was_written_is_where_the_next_run_begins(folder, data, tmp_path):
    first = finetune(folder, data(SUMS), steps=1)
    tokenizer_of().save_pretrained(folder)
    model = first.build_model()
    model.save_pretrained(folder)
    rows = data([{"text": "a b c"}] * 3, "more.jsonl")
    task = finetune(folder, rows)
    assert "with its weights" in task.tell.keywords["origin"]
    again = task.build_model().state_dict()
    assert all(torch.equal(value, again[name]) for name, value in model.state_dict().items())
    assert task.optimizer.keywords["lr"] == 2e-5
    plan = ab.plan(task, micro_batch=1)
    assert (
        plan.prediction.by_kind
        == ab.plan(replace(first, train=task.train), micro_batch=1).prediction.by_kind
    )


def test_it_tells_what_the_model_writes(folder, data):
    task = finetune(folder, data(SUMS), prompt="1+1=")
    text = task.tell(task.build_model().eval())
    assert "with random weights" in text
    assert "What the model writes after '1+1='" in text
    begun = finetune(folder, data(SUMS)).tell(task.build_model().eval())
    held = bytes(task.valid[0]["input_ids"][:-1].tolist()).decode()
    assert f"What the model writes after '{held.partition('=')[0]}='" in begun


def test_the_task_can_be_sent_to_another_process(folder, data):
    task = finetune(folder, data(SUMS))
    sent = pickle.loads(pickle.dumps(task))
    assert torch.equal(sent.train[3]["input_ids"], task.train[3]["input_ids"])
    assert sent.tell(sent.build_model().eval()) == task.tell(task.build_model().eval())


def trained_names(model):
    return {name.rpartition(".")[0] for name, p in model.named_parameters() if p.requires_grad}


def test_adapters_are_where_they_are_asked_for_and_a_new_head_is_trained(tmp_path, data):
    pytest.importorskip("peft")
    config = transformers.BertConfig(**{**LLAMA, "num_key_value_heads": None})
    config.save_pretrained(tmp_path / "m")
    task = finetune(
        tmp_path / "m", data(MOODS), lora_rank=2, lora_targets="query,value", lora_alpha=3
    )
    names = trained_names(task.build_model())
    adapters = {name for name in names if "lora_" in name}
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in adapters} == {"query", "value"}
    assert len(adapters) == 8  # two matrices in two layers of two blocks
    assert all("classifier" in name for name in names - adapters)
    assert names > adapters


def test_weights_may_be_held_in_half_and_adapters_are_not(folder, data):
    pytest.importorskip("peft")
    model = finetune(folder, data(SUMS), lora_rank=2, dtype="bfloat16").build_model()
    for name, param in model.named_parameters():
        assert param.dtype == (torch.float32 if "lora_" in name else torch.bfloat16), name


def test_classes_have_the_names_that_a_data_set_gives_them(folder, tmp_path, datasets):
    features = datasets.Features(
        {
            "text": datasets.Value("string"),
            "label": datasets.ClassLabel(names=["no", "yes", "maybe"]),
        }
    )
    rows = datasets.Dataset.from_dict({"text": ["a", "b"], "label": [1, 0]}, features=features)
    rows.save_to_disk(str(tmp_path / "rows"))
    task = finetune(folder, tmp_path / "rows", valid=tmp_path / "rows")
    assert task.build_model().config.id2label == {0: "no", 1: "yes", 2: "maybe"}
    assert [int(task.train[i]["labels"]) for i in range(2)] == [1, 0]


@pytest.mark.slow
def test_adapters_are_trained_alone_and_written_alone(folder, data, tmp_path):
    peft = pytest.importorskip("peft")
    said = []
    task = finetune(folder, data(SUMS), lora_rank=2, steps=3, save=tmp_path / "made")
    result = ab.train(task, out=tmp_path / "run", sinks=[said.append])
    (event,) = [event for event in said if isinstance(event, Said)]
    assert f"The adapters are in {tmp_path / 'made'}." in event.text
    base = task.build_model().unload()
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "made").eval()
    ids = torch.tensor([[50, 43, 49, 61]])
    torch.testing.assert_close(loaded(input_ids=ids).logits, result.model(input_ids=ids).logits)


# -------------------------------------------------------------------------------------- bad input


def test_a_model_that_is_no_folder(data):
    with pytest.raises(
        InputError, match=r"'gpt2' is no folder .*nothing is downloaded.*hf download gpt2"
    ):
        resolve("finetune", {"model": "gpt2", "data": str(data(SUMS))})


def test_what_must_be_given_is_named():
    with pytest.raises(InputError, match=r"'model' .* is required; .*'data' .* is required"):
        resolve("finetune")


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "has no config.json"),
        ({"adapter_config.json": "{}"}, "has no config.json: .*adapters alone"),
        (
            {"config.json": "not JSON"},
            "is no configuration that this version of transformers can use",
        ),
        ({"config.json": '{"model_type": "strange"}'}, "is no configuration that .* can use"),
        (
            {"config.json": '{"model_type": "vit"}'},
            "of type 'vit', cannot be made for .*'causal-lm'",
        ),
        ({"config.json": '{"model_type": "t5"}'}, "of type 't5', cannot be made for .*'causal-lm'"),
    ],
)
def test_a_folder_without_a_model_of_text(tmp_path, data, files, said):
    (tmp_path / "m").mkdir()
    for name, text in files.items():
        (tmp_path / "m" / name).write_text(text)
    with pytest.raises(InputError, match=said):
        finetune(tmp_path / "m", data(SUMS))


def test_weights_that_cannot_be_read(folder, data):
    tokenizer_of().save_pretrained(folder)
    (folder / "model.safetensors").write_bytes(b"not weights at all")
    task = finetune(folder, data([{"text": "a b"}] * 3))
    with pytest.raises(
        InputError, match=r"the weights in .* cannot be read as a model of type 'llama'"
    ):
        task.build_model()


def test_weights_without_a_tokenizer(folder, data):
    finetune(folder, data(SUMS)).build_model().save_pretrained(folder)
    with pytest.raises(InputError, match="has weights and no tokenizer"):
        finetune(folder, data(SUMS))


def test_a_tokenizer_of_another_model(tmp_path, data):
    transformers.LlamaConfig(**{**LLAMA, "vocab_size": 12}).save_pretrained(tmp_path / "m")
    tokenizer_of("more").save_pretrained(tmp_path / "m")
    with pytest.raises(
        InputError, match=r"has 13 tokens, and the model's embedding 12: it belongs to"
    ):
        finetune(tmp_path / "m", data([{"text": "a b"}] * 3))


def test_new_weights_begin_and_end_texts_as_the_tokenizer_does(folder, data):
    tokenizer_of().save_pretrained(folder)
    config = finetune(folder, data([{"text": "a b"}] * 3)).build_model().config
    assert (config.bos_token_id, config.eos_token_id) == (0, 1)


def test_a_head_that_is_the_embedding_trains_exactly_and_stays_it(tmp_path, data):
    config = transformers.LlamaConfig(**LLAMA, tie_word_embeddings=True)
    config.save_pretrained(tmp_path / "tied")
    task = finetune(tmp_path / "tied", data(SUMS), global_batch=16, lr=1e-2)
    exact = replace(task, model=lambda: task.model().double())
    (whole, there), (cut, here) = (first_step(exact, size) for size in (16, 3))
    assert cut.loss == pytest.approx(whole.loss, rel=1e-12)
    for one, other in zip(here, there, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
    model = task.build_model()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path / "saved")
    tokenizer_of().save_pretrained(tmp_path / "saved")
    again = finetune(tmp_path / "saved", data([{"text": "a b"}] * 3, "more.jsonl")).build_model()
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)


def test_too_few_words_for_bytes(tmp_path, data):
    transformers.LlamaConfig(**{**LLAMA, "vocab_size": 100}).save_pretrained(tmp_path / "m")
    with pytest.raises(InputError, match="text is read as bytes, but the model knows 100 words"):
        finetune(tmp_path / "m", data(SUMS))


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"a": 1}], "line 1 of .* has 'a', .*: give rows with 'text'"),
        ([{"text": "a"}, {"text": None}], "line 2 of .* has None as 'text'"),
        ([{"text": "a"}, {"other": "b"}], "line 2 of .* has None as 'text'"),
        ([{"text": "a"}, {"text": 3}], "line 2 of .* has 3 as 'text'"),
        ([{"input_ids": [1, 2]}], "line 1 of .* has 'input_ids', .*: give rows with 'text'"),
        ([{"text": "a", "label": "x"}] * 3, "every row of .* has the label 'x'"),
        (
            [{"text": "a", "label": "x"}, {"text": "b", "label": None}],
            "line 2 of .* has the label None",
        ),
        ([{"text": "a", "label": 0}, {"text": "b", "label": -1}], "line 2 of .* has the label -1"),
        (
            [{"text": "a", "label": 0}, {"text": "b", "label": "x"}],
            "line 2 of .* has the label 'x': give a name in every row, or",
        ),
        (
            [{"text": "a", "label": 10**9}],
            "the labels of .* go up to 1000000000, and only 1 occur",
        ),
        ([{"text": "a", "label": 0}, {"text": "b"}], "line 2 of .* has the label None"),
    ],
)
def test_rows_that_cannot_be_used(folder, data, rows, said):
    with pytest.raises((DataError, InputError), match=said):
        finetune(folder, data(rows))


def test_a_label_that_the_model_does_not_know(tmp_path, data):
    config = transformers.LlamaConfig(**LLAMA, num_labels=2, pad_token_id=0)
    config.architectures = ["LlamaForSequenceClassification"]
    config.save_pretrained(tmp_path / "m")
    rows = [{"text": "a", "label": 0}, {"text": "b", "label": 1}, {"text": "c", "label": 2}]
    with pytest.raises(
        DataError, match=r"line 3 .* label 2, .* none of the 2 classes .*LABEL_0, LABEL_1"
    ):
        finetune(tmp_path / "m", data(rows))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lr": 0.0}, "lr is 0.0; give a number above zero"),
        ({"clip": math.nan}, "clip is nan"),
        ({"warmup": 2.0}, "warmup is 2.0"),
        ({"weight_decay": -1.0}, "weight_decay is -1.0"),
        ({"max_length": 1}, "max_length is 1; give at least 2"),
        ({"max_length": 33}, "max_length is 33, and the model in .* takes 32 tokens"),
        ({"lora_rank": -1}, "lora_rank is -1"),
        ({"lora_rank": 2, "lora_alpha": 0.0}, "lora_alpha is 0.0"),
        ({"lora_rank": 2, "lora_dropout": 1.0}, "lora_dropout is 1.0"),
        (
            {"lora_rank": 2, "lora_targets": " ,"},
            "lora_targets is .*; give names of linear layers",
        ),
        (
            {"lora_rank": 2, "lora_targets": "q_proj,query"},
            "names 'query', which no linear layer of LlamaForCausalLM is called: give some of ",
        ),
        (
            {"task": "classification"},
            "'completion' or 'prompt', which is no row for classification",
        ),
        ({"global_batch": 0}, "global_batch is 0"),
        ({"epochs": 0}, "epochs is 0"),
    ],
)
def test_options_out_of_range_are_refused(folder, data, options, said):
    with pytest.raises(InputError, match=said):
        finetune(folder, data(SUMS), **options)


def test_every_option_out_of_range_is_named_at_once(folder, data):
    with pytest.raises(InputError, match=r"lr is -1.*warmup is 3.*lora_rank is -2"):
        finetune(folder, data(SUMS), lr=-1, warmup=3, lora_rank=-2)


def test_a_file_where_the_model_is_to_be_written(folder, data):
    with pytest.raises(InputError, match=r"save is '.*data.jsonl'; give a folder"):
        finetune(folder, data(SUMS), save=data(SUMS))


def test_where_another_model_is(folder, data, tmp_path):
    with pytest.raises(InputError, match="the folder of the model itself"):
        finetune(folder, data(SUMS), save=folder)
    made = tmp_path / "made"
    made.mkdir()
    (made / "adapter_config.json").touch()
    with pytest.raises(InputError, match="holds adapters, and a whole model would be added"):
        finetune(folder, data(SUMS), save=made)
    finetune(folder, data(SUMS), save=made, lora_rank=2)
    (made / "model.safetensors").touch()
    with pytest.raises(InputError, match="holds a whole model, and adapters would be added"):
        finetune(folder, data(SUMS), save=made, lora_rank=2)


def test_positions_that_are_not_for_tokens_are_not_counted():
    config = transformers.RobertaConfig(**{**LLAMA, "num_key_value_heads": None, "pad_token_id": 1})
    assert num_positions(config) == 30  # of 32: it begins to count after the padding token
    model = transformers.AutoModelForCausalLM.from_config(config)
    model(input_ids=torch.full((1, 30), 5))
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=torch.full((1, 31), 5))
    assert num_positions(transformers.LlamaConfig(**LLAMA)) == 32
    assert num_positions(transformers.T5Config()) is None


@pytest.mark.nightly
def test_ranks_that_divide_a_model_with_adapters_write_what_one_does(folder, data, warm, tmp_path):
    pytest.importorskip("peft")
    path = data(SUMS)
    written = []
    for name, options in (("one", ()), ("two", ("--ranks", "2", "--parallel", "shard"))):
        settings = (
            f"model={folder}",
            f"data={path}",
            "lora_rank=2",
            f"save={tmp_path / name}",
            "steps=3",
        )
        words = [word for setting in settings for word in ("-s", setting)]
        line = ["train", "finetune", "--out", str(tmp_path / f"run-{name}"), "--micro-batch", "4"]
        done = warm(["anybatch", *line, *words, *options], tmp_path)
        assert done.returncode == 0, done.stderr
        written.append(load_file(tmp_path / name / "adapter_model.safetensors"))
    one, two = written
    assert one.keys() == two.keys()
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-4, atol=1e-6)
