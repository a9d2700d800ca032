"""Models of transformers, with adapters of peft and without, exported for `from_pretrained`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.unit.small_runs import tree

import anybatch as ab
from anybatch.events import Event, StepDone

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

IDS = torch.randint(32, (8, 6), generator=torch.Generator().manual_seed(0))


def llama(tied: bool = False) -> Any:
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=32,
        max_position_embeddings=16,
        tie_word_embeddings=tied,
    )
    return transformers.AutoModelForCausalLM.from_config(config)


def gpt2() -> Any:
    config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=32, n_positions=16)
    return transformers.AutoModelForCausalLM.from_config(config)


def adapted() -> Any:
    config = peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(llama(), config)


def task_of(model: Callable[[], Any]) -> ab.Task:
    data = [{"input_ids": ids, "labels": ids} for ids in IDS]
    return ab.Task(
        model=model,
        loss=ab.causal_lm_loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.05),
        train=data,
        valid=data,
        global_batch=4,
        epochs=1,
        name="words",
    )


def run_of(model: Callable[[], Any], folder: Path, **options: Any) -> Any:
    result = ab.train(task_of(model), out=folder, checkpoint_every=1, progress=False, **options)
    return result.model.eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


MODELS = {"llama": llama, "tied": lambda: llama(tied=True), "gpt2": gpt2}


@pytest.mark.parametrize("name", MODELS)
def test_from_pretrained_reads_the_folder(name: str, tmp_path: Path):
    expected = logits(run_of(MODELS[name], tmp_path / "run"))
    for step in (None, 2):
        folder = tmp_path / f"hf-{step}"
        done = ab.export(tmp_path / "run", folder, format="huggingface", step=step)
        assert done.format == "huggingface"
        found = transformers.AutoModelForCausalLM.from_pretrained(folder)
        assert torch.equal(logits(found), expected)
        assert type(found).__name__ in (folder / "config.json").read_text()


def test_in_half_precision_the_configuration_says_so(tmp_path: Path):
    run_of(llama, tmp_path / "run")
    ab.export(tmp_path / "run", tmp_path / "hf", format="huggingface", dtype="bf16")
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto")
    assert {param.dtype for param in found.parameters()} == {torch.bfloat16}


def test_an_export_is_replaced_if_that_is_asked_for(tmp_path: Path):
    run_of(llama, tmp_path / "run")
    folder = tmp_path / "hf"
    ab.export(tmp_path / "run", folder, format="huggingface", step=1)
    before = tree(folder)
    with pytest.raises(ab.InputError, match=r"is there already"):
        ab.export(tmp_path / "run", folder, format="huggingface")
    assert tree(folder) == before
    ab.export(tmp_path / "run", folder, format="huggingface", force=True)
    after = tree(folder)
    assert after.keys() == before.keys()
    assert after["model.safetensors"] != before["model.safetensors"]
    assert {path.name for path in tmp_path.iterdir()} == {"run", "hf"}


def test_the_tokenizer_of_the_folder_that_the_model_came_from_goes_with_it(tmp_path: Path):
    base = tmp_path / "base"
    llama().save_pretrained(base)
    (base / "tokenizer.json").write_text("{}")
    (base / "tokenizer_config.json").write_text("{}")

    def model() -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(base)

    run_of(model, tmp_path / "run")
    for name in ("config.json", "model.safetensors"):
        (base / name).unlink()
    (base / "tokenizer.json").unlink()
    ab.export(tmp_path / "run", tmp_path / "hf", format="huggingface")
    assert {"tokenizer.json", "tokenizer_config.json"} <= tree(tmp_path / "hf").keys()


def test_a_run_that_kept_no_configuration_takes_it_from_its_task(tmp_path: Path):
    """One of an earlier version."""
    import shutil

    expected = logits(run_of(llama, tmp_path / "run"))
    shutil.rmtree(tmp_path / "run" / "pretrained")
    with pytest.raises(ab.InputError, match=r"does not tell where its task"):
        ab.export(tmp_path / "run", tmp_path / "hf", format="huggingface")
    assert not (tmp_path / "hf").exists()
    ab.export(tmp_path / "run", tmp_path / "hf", format="huggingface", task=task_of(llama))
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert torch.equal(logits(found), expected)


# ---------------------------------------------------------------------------------------- adapters


@pytest.fixture(scope="module")
def with_adapters(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """A run of adapters, and the logits of its model."""
    folder = tmp_path_factory.mktemp("adapters") / "run"
    return folder, logits(run_of(adapted, folder))


def base_of_the_task() -> Any:
    """The model below the adapters, as the task builds it."""
    model: Any = task_of(adapted).build_model()
    return model.unload()


@pytest.mark.parametrize("step", [None, 2])
def test_adapters_are_exported_as_adapters(
    with_adapters: tuple[Path, torch.Tensor], tmp_path: Path, step: int | None
):
    run, expected = with_adapters
    done = ab.export(run, tmp_path / "hf", format="huggingface", step=step, task=task_of(adapted))
    assert tree(tmp_path / "hf").keys() == {"adapter_config.json", "adapter_model.safetensors"}
    found = peft.PeftModel.from_pretrained(base_of_the_task(), tmp_path / "hf")
    assert torch.equal(logits(found), expected)
    assert done.step == 2
    assert done.num_tensors == len(load_file(tmp_path / "hf" / "adapter_model.safetensors"))


def test_adapters_of_the_end_need_no_task(with_adapters: tuple[Path, torch.Tensor], tmp_path: Path):
    run, _ = with_adapters
    ab.export(run, tmp_path / "hf", format="huggingface", dtype="bf16")
    state = load_file(tmp_path / "hf" / "adapter_model.safetensors")
    assert {value.dtype for value in state.values()} == {torch.bfloat16}
    with pytest.raises(ab.InputError, match=r"does not tell where its task"):
        ab.export(run, tmp_path / "step", format="huggingface", step=1)


@pytest.mark.parametrize("step", [None, 2])
def test_adapters_are_merged_into_the_model_below(
    with_adapters: tuple[Path, torch.Tensor], tmp_path: Path, step: int | None
):
    run, expected = with_adapters
    options: Any = {"merge": True, "step": step, "task": task_of(adapted)}
    ab.export(run, tmp_path / "hf", format="huggingface", **options)
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    torch.testing.assert_close(logits(found), expected, rtol=1e-4, atol=1e-5)
    ab.export(run, tmp_path / "w.pt", **options)
    plain = llama()
    plain.load_state_dict(torch.load(tmp_path / "w.pt", weights_only=True), strict=True)
    assert torch.equal(logits(plain), logits(found))


@pytest.mark.parametrize("step", [None, 1])
def test_all_weights_load_strictly_into_the_adapted_model(
    with_adapters: tuple[Path, torch.Tensor], tmp_path: Path, step: int | None
):
    run, _ = with_adapters
    ab.export(run, tmp_path / "w.pt", step=step, task=task_of(adapted))
    adapted().load_state_dict(torch.load(tmp_path / "w.pt", weights_only=True), strict=True)


def test_a_run_with_adapters_is_evaluated(with_adapters: tuple[Path, torch.Tensor]):
    run, _ = with_adapters
    from tests.unit.small_runs import evaluated

    for step in (None, 2):
        found = ab.evaluate(run, task_of(adapted), step=step)
        assert found.loss == evaluated(run)[2].loss


def test_adapters_of_a_run_that_was_stopped(tmp_path: Path):
    def stop(event: Event) -> None:
        if isinstance(event, StepDone) and event.step == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_of(adapted, tmp_path / "run", sinks=[stop])
    done = ab.export(tmp_path / "run", tmp_path / "hf", format="huggingface", task=task_of(adapted))
    assert done.step == 1
    assert "adapter_model.safetensors" in tree(tmp_path / "hf")
