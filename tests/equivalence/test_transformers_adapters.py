"""Adapters of peft: planned, trained, resumed and written as what they are, a small part of a model."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file
from tests.equivalence.reference import assert_equal, train, train_plainly
from tests.equivalence.test_resume import assert_close, plan_of, trained
from tests.equivalence.test_transformers import (
    bert,
    gpt2,
    llama,
    mean_of_the_model,
    task_of,
    vit,
)

import anybatch as ab
from anybatch.state import whole_state

peft = pytest.importorskip("peft")

RANK = 2


def adapted(model, **options):
    config = peft.LoraConfig(
        r=RANK, lora_alpha=4, target_modules=options.pop("targets", "all-linear"), **options
    )
    return peft.get_peft_model(model, config)


def llama_with_adapters():
    return adapted(llama(), task_type="CAUSAL_LM").double()


def classifier_with_adapters():
    return adapted(bert("SequenceClassification", 3), task_type="SEQ_CLS").double()


MADE = {
    "llama": llama_with_adapters,
    "bert, sequences": classifier_with_adapters,
    "vit": lambda: adapted(
        vit(), targets=["q_proj", "v_proj"], modules_to_save=["classifier"]
    ).double(),
}


def task_with_adapters(case, loss=None):
    if loss is None:
        loss = ab.causal_lm_loss if case == "llama" else ab.model_loss
    return dataclasses.replace(
        task_of(case, loss),
        model=MADE[case],
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.01),
    )


@pytest.mark.parametrize("case", MADE)
@pytest.mark.parametrize("micro_batch", [1, 3])
def test_adapters_train_as_in_one_piece_and_the_model_below_stays(case, micro_batch):
    plain = train_plainly(task_with_adapters(case, mean_of_the_model))
    task = task_with_adapters(case)
    found = train(task, micro_batch)
    assert_equal(found, plain, 1e-5 if case == "llama" else 1e-6)
    begun = dict(task.build_model().named_parameters())
    for name, param in found.model.named_parameters():
        assert torch.equal(param, begun[name]) != param.requires_grad, name


def test_with_recompute():
    plain = train_plainly(task_with_adapters("llama", mean_of_the_model))
    knobs = {"recompute": {"blocks": ("base_model.model.model.layers.*",)}}
    assert_equal(train(task_with_adapters("llama"), 3, **knobs), plain, 1e-5)


def wide(with_adapters):
    """A model in which weights, their gradients and the optimizer's states are most of the memory."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=16,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    return adapted(model, task_type="CAUSAL_LM") if with_adapters else model


def test_frozen_weights_have_no_gradient_and_no_state_in_the_estimate():
    task = task_with_adapters("llama")
    kinds = {}
    for with_adapters in (False, True):
        one = dataclasses.replace(task, model=lambda w=with_adapters: wide(w))
        kinds[with_adapters] = ab.plan(one, micro_batch=8).prediction.by_kind
    model = wide(True)
    trained_bytes = sum(4 * p.numel() for p in model.parameters() if p.requires_grad)
    all_bytes = sum(4 * p.numel() for p in model.parameters())
    assert kinds[True]["parameters"] == pytest.approx(all_bytes, rel=0.05)
    # At the moment of the peak, which of the small ones may not have been made yet.
    assert kinds[True].get("gradients", 0) <= 1.2 * trained_bytes < 0.1 * kinds[False]["gradients"]
    assert (
        kinds[True]["optimizer state"]
        <= 2.4 * trained_bytes
        < 0.1 * kinds[False]["optimizer state"]
    )


def test_a_resumed_run_ends_as_one_that_was_not_stopped(tmp_path):
    task = task_with_adapters("llama")
    plan = plan_of(task, 1)
    whole, _ = trained(task, plan)
    trained(task, plan, tmp_path, until=3)
    resumed, _ = trained(task, plan, tmp_path, resume=True)
    assert_close(resumed, whole)


def test_adapters_alone_are_written_and_peft_reads_them(tmp_path):
    task = task_with_adapters("llama")
    model = train(task, 3).model.eval()
    assert ab.save_adapters(model, tmp_path / "made") == tmp_path / "made"
    files = sorted(path.name for path in (tmp_path / "made").iterdir())
    assert files == ["README.md", "adapter_config.json", "adapter_model.safetensors"][-len(files) :]
    held = load_file(tmp_path / "made" / "adapter_model.safetensors")
    assert held
    assert all("lora_" in name for name in held)
    assert sum(map(torch.Tensor.numel, held.values())) == sum(
        p.numel() for p in model.parameters() if p.requires_grad
    )
    config = json.loads((tmp_path / "made" / "adapter_config.json").read_text())
    assert (config["r"], config["inference_mode"]) == (RANK, True)

    base = model.get_base_model()
    ids = torch.tensor([[3, 4, 5, 6]])
    wanted = model(input_ids=ids).logits
    torch.manual_seed(0)
    again = dataclasses.replace(task, model=lambda: llama().double()).build_model()
    loaded = peft.PeftModel.from_pretrained(again, tmp_path / "made").eval()
    torch.testing.assert_close(loaded(input_ids=ids).logits, wanted)
    assert type(base) is type(again)


def test_what_peft_writes_itself_has_the_same_names(tmp_path):
    model = classifier_with_adapters()
    ab.save_adapters(model, tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs")
    ours, theirs = (
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ours", "theirs")
    )
    assert ours.keys() == theirs.keys()
    assert any("classifier" in name for name in ours)  # trained whole beside the adapters
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    told = [
        json.loads((tmp_path / name / "adapter_config.json").read_text())
        for name in ("ours", "theirs")
    ]
    assert told[0] == told[1]


def test_a_model_without_adapters_is_refused(tmp_path):
    with pytest.raises(ab.InputError, match="has no adapters of peft"):
        ab.save_adapters(gpt2(), tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ab.InputError, match="cannot be written to"):
        ab.save_adapters(llama_with_adapters(), tmp_path / "file" / "below")


def test_the_whole_weights_hold_the_adapters_too(tmp_path):
    model = llama_with_adapters()
    ab.save_weights(model, tmp_path / "all.safetensors")
    other = adapted(llama(), task_type="CAUSAL_LM").double()
    ab.load_weights(other, tmp_path / "all.safetensors")
    assert_close(whole_state(other), whole_state(model), 0.0)


def test_a_run_leaves_its_adapters_in_its_folder(tmp_path):
    task = dataclasses.replace(task_with_adapters("llama"), epochs=None, steps=2)
    result = ab.train(task, plan=ab.plan(task, micro_batch=8), out=tmp_path / "run")
    held = load_file(tmp_path / "run" / "adapters" / "adapter_model.safetensors")
    assert sum(map(torch.Tensor.numel, held.values())) == sum(
        p.numel() for p in result.model.parameters() if p.requires_grad
    )
