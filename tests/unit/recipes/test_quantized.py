"""Frozen weights in 8 or 4 bits: how far they are from what they were, that gradients pass through
them, and adapters over them as a recipe: planned, trained, resumed, written."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.equivalence.test_resume import assert_close, trained
from torch import nn

import anybatch as ab
from anybatch.errors import InputError
from anybatch.recipes.quantized import (
    Base,
    QuantizedLinear,
    num_weights,
    quantize_frozen,
)

FAMILIES = {
    "llama": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
    },
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 32},
}
LAYERS = {"llama": 14, "gpt2": 8}  # linear ones of two blocks
WEIGHTS = 2 * (4 * 64 * 64 + 3 * 64 * 128)  # of those of Llama


def layer_of(weight: torch.Tensor, base: Base, bias: torch.Tensor | None = None) -> nn.Module:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None).requires_grad_(False)
    linear.weight.data = weight
    if bias is not None:
        linear.bias.data = bias
    return quantize_frozen(nn.Sequential(linear), base)[0]


def value_of(layer: nn.Module) -> torch.Tensor:
    """The weight as torchao dequantizes it in its own class."""
    plain = layer.plain()
    return plain.weight.detach() if isinstance(plain, nn.Linear) else plain.weight.detach().T


@pytest.mark.parametrize(("base", "away"), [("int8", 0.01), ("nf4", 0.1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [128, 96, 48])
def test_a_weight_is_near_what_it_was(base: Base, away: float, dtype: torch.dtype, columns: int):
    weight = torch.randn(6, columns, generator=torch.Generator().manual_seed(0)).to(dtype)
    layer = layer_of(weight, base)
    assert isinstance(layer, QuantizedLinear)
    found = value_of(layer)
    assert found.dtype == dtype
    mean = (found - weight).float().abs().mean() / weight.float().abs().mean()
    assert 1e-3 < mean < away
    held = sum(p.nbytes for p in layer.parameters())
    assert held < weight.numel() * {"int8": 1.2, "nf4": 0.9}[base] + 64


@pytest.mark.parametrize("base", ["int8", "nf4"])
def test_output_and_gradient_are_those_of_the_dequantized_weight(base: Base):
    generator = torch.Generator().manual_seed(0)
    layer = layer_of(
        torch.randn(10, 64, generator=generator), base, torch.randn(10, generator=generator)
    )
    inputs = torch.randn(2, 3, 64, generator=generator, requires_grad=True)
    plain = inputs.detach().clone().requires_grad_()
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        found = layer(inputs)
    wanted = F.linear(plain, value_of(layer), layer.bias)
    found.square().sum().backward()
    wanted.square().sum().backward()
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(inputs.grad, plain.grad)
    assert {t.data_ptr() for t in saved} == {
        p.data_ptr() for name, p in layer.named_parameters() if name != "bias"
    }


def test_autocast_computes_in_its_dtype_and_the_gradient_has_that_of_the_input():
    layer = layer_of(torch.randn(10, 64), "nf4")
    inputs = torch.randn(3, 64, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        found = layer(inputs)
    assert found.dtype == torch.bfloat16
    found.float().sum().backward()
    assert inputs.grad is not None
    assert inputs.grad.dtype == torch.float32


def test_what_is_trained_the_head_and_small_layers_stay():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 40), nn.Linear(40, 64))
            self.trained, self.head = nn.Linear(64, 64), nn.Linear(64, 300)
            self.requires_grad_(False)
            self.trained.requires_grad_()

        def get_output_embeddings(self) -> nn.Module:
            return self.head

    model = quantize_frozen(Model(), "nf4")
    kinds = {name: type(layer) for name, layer in model.named_modules()}
    assert kinds["block.0"] is kinds["block.1"] is QuantizedLinear
    assert kinds["block.2"] is kinds["trained"] is kinds["head"] is nn.Linear
    assert num_weights(model) == sum(p.numel() for p in Model().parameters())


# ------------------------------------------------------------------------------------ as a recipe


@pytest.fixture
def task_of(tmp_path: Path) -> Any:
    """Makes a task with adapters over a small model with weights, and few words to learn."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("peft")
    from anybatch.recipes.finetune import finetune
    from anybatch.recipes.finetune_model import find, tokenizer_of

    rows = [{"text": f"{i}+{i % 7}={i + i % 7}"} for i in range(40)]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows), "utf-8")

    def make(family: str = "llama", **options: Any) -> ab.Task:
        folder = tmp_path / family
        if not folder.exists():
            torch.manual_seed(0)
            config = transformers.AutoConfig.for_model(family, vocab_size=300, **FAMILIES[family])
            config.save_pretrained(folder)
            tokenizer_of(find(folder), 300).save_pretrained(folder)
            transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        given = {"lora_rank": 2, "global_batch": 8, "lr": 1e-2, "steps": 6, **options}
        return finetune(folder, data, **given)

    return make


def plain_twin(model: nn.Module) -> nn.Module:
    """A copy of `model` with linear layers that hold the decoded weights."""
    twin = copy.deepcopy(model)
    for parent in list(twin.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, QuantizedLinear):
                linear = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None)
                linear.weight = nn.Parameter(value_of(layer), requires_grad=False)
                linear.register_parameter("bias", layer.bias)
                setattr(parent, name, linear)
    return twin


@pytest.mark.parametrize("base", ["int8", "nf4"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_adapters_have_the_gradients_that_they_have_over_the_decoded_weights(
    task_of: Any, base: str, family: str
):
    task = task_of(family, base=base)
    model = task.build_model()
    for name, param in model.named_parameters():
        if "lora_B" in name:  # zero at the start, so that lora_A would have no gradient
            nn.init.normal_(param, std=0.1, generator=torch.Generator().manual_seed(0))
    twin = plain_twin(model)
    assert sum(isinstance(layer, QuantizedLinear) for layer in model.modules()) == LAYERS[family]
    batch = task.collate([task.train[i] for i in range(6)])
    gradients = []
    for one in (model, twin):
        loss = one(**batch).loss
        loss.backward()
        gradients.append({n: p.grad for n, p in one.named_parameters() if p.requires_grad})
    assert all(grad.abs().max() > 0 for grad in gradients[1].values())
    for name, grad in gradients[1].items():
        torch.testing.assert_close(gradients[0][name], grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_merged_weights_are_those_that_were_trained_over(task_of: Any, family: str, tmp_path: Path):
    import transformers

    task = task_of(family, base="nf4")
    result = ab.train(task, plan=ab.plan(task, micro_batch=4), out=tmp_path / "run", progress=False)
    ab.export(tmp_path / "run", tmp_path / "one", format="huggingface", merge=True, task=task)
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "one")
    assert not any("lora" in name for name, _ in whole.named_modules())
    ids = torch.tensor([[5, 6, 7, 8]])
    expected = result.model(input_ids=ids).logits
    torch.testing.assert_close(whole(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("base", ["int8", "nf4"])
def test_the_plan_counts_the_bits(task_of: Any, base: str):
    task = task_of(base=base, global_batch=32)
    prediction = ab.plan(task, micro_batch=32).prediction
    assert prediction is not None
    held = sum(p.nbytes for p in task.build_model().parameters())
    whole = sum(p.nbytes for p in task_of().build_model().parameters())
    assert prediction.by_kind["parameters"] == held
    assert held < whole - {"int8": 2.8, "nf4": 3.3}[base] * WEIGHTS


@pytest.mark.slow
@pytest.mark.parametrize("base", [pytest.param("int8", marks=pytest.mark.nightly), "nf4"])
def test_one_piece_and_many_give_the_same_adapters(task_of: Any, base: Base):
    def found(micro_batch: int) -> dict[str, torch.Tensor]:
        task = replace(task_of(base=base), valid=None)
        # AdamW would divide by gradients that are nearly zero.
        sgd = partial(torch.optim.SGD, lr=0.5)
        exact = replace(task, model=lambda: task.model().double(), optimizer=sgd, tell=None)
        return trained(exact, ab.plan(exact, micro_batch=micro_batch))[0]

    assert_close(found(8), found(3))


@pytest.mark.slow
def test_the_bits_stay_and_a_resumed_run_ends_as_one_that_was_not_stopped(
    task_of: Any, tmp_path: Path
):
    task = task_of(base="nf4")
    plan = ab.plan(task, micro_batch=4)
    whole, _ = trained(task, plan)
    trained(task, plan, tmp_path / "saved", until=3)
    resumed, _ = trained(task, plan, tmp_path / "saved", resume=True)
    assert_close(resumed, whole)
    begun = task.build_model().state_dict()
    changed = {
        name for name, value in begun.items() if not torch.equal(value.double(), whole[name])
    }
    assert changed
    assert all("lora_" in name for name in changed)


def test_the_adapters_are_written_for_peft(task_of: Any, tmp_path: Path):
    import peft
    import transformers

    task = task_of(base="int8", save=tmp_path / "made")
    result = ab.train(task, plan=ab.plan(task, micro_batch=4), progress=False)
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "llama")
    again = peft.PeftModel.from_pretrained(whole, tmp_path / "made", is_trainable=True)
    again = quantize_frozen(again, "int8").eval()
    ids = torch.tensor([[5, 6, 7, 8]])
    torch.testing.assert_close(again(input_ids=ids).logits, result.model(input_ids=ids).logits)


def test_bits_without_adapters_are_refused(task_of: Any):
    with pytest.raises(InputError, match=r"lora_rank is 0; give .*above zero with base"):
        task_of(base="nf4", lora_rank=0)
