"""Weights go out and come back equal, whatever wrote them; what is no file of weights is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor, nn

from anybatch.errors import InputError
from anybatch.state import load_weights, save_weights

FILES = ["w.safetensors", "w.pt", "w"]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 3)
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(3)


class WithModule(nn.Module):
    """A model that has a part called `module`, as some do."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        self.head = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))


def views() -> nn.Module:
    """Two parameters in one storage, as an RNN's are on a GPU, and one that is not contiguous."""
    model = nn.Module()
    flat = torch.randn(10)
    model.a = nn.Parameter(flat[:6].view(2, 3))
    model.b = nn.Parameter(flat[6:])
    model.c = nn.Parameter(torch.randn(4, 3).t())
    model.d = nn.Parameter(torch.empty(0))
    return model


BUILDS = {
    "tied": Tied,
    "lstm": lambda: nn.LSTM(3, 4, 2),
    "half": lambda: nn.Linear(2, 2).half(),
    "views": views,
    "module": WithModule,
    "complex": lambda: nn.Linear(2, 2, dtype=torch.complex64),
}


def same(one: nn.Module, other: nn.Module) -> bool:
    mine, yours = one.state_dict(), other.state_dict()
    return mine.keys() == yours.keys() and all(torch.equal(mine[k], yours[k]) for k in mine)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_weights_come_back_equal(build: Callable[[], nn.Module], name: str, tmp_path: Path):
    saved, loaded = build(), build()
    assert not same(saved, loaded)
    assert save_weights(saved, tmp_path / name) == tmp_path / name
    load_weights(loaded, tmp_path / name)
    assert same(saved, loaded)
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", FILES)
def test_tied_weights_are_stored_once_and_stay_tied(name: str, tmp_path: Path):
    model = Tied()
    model.embed = nn.Embedding(700, 300)
    model.head.weight = model.embed.weight
    save_weights(model, tmp_path / name)
    loaded = Tied()
    loaded.embed = nn.Embedding(700, 300)
    loaded.head.weight = loaded.embed.weight
    load_weights(loaded, tmp_path / name)
    assert loaded.head.weight is loaded.embed.weight
    assert same(model, loaded)
    assert (tmp_path / name).stat().st_size < 700 * 300 * 4 * 1.1


@pytest.mark.parametrize("name", FILES)
def test_whoever_may_read_other_files_may_read_weights(name: str, tmp_path: Path):
    (tmp_path / "other").write_bytes(b"")
    path = save_weights(nn.Linear(2, 2), tmp_path / name)
    assert path.stat().st_mode == (tmp_path / "other").stat().st_mode


def test_plain_code_reads_what_is_written(tmp_path: Path):
    model, other = WithModule(), WithModule()
    save_weights(model, tmp_path / "w.pt")
    other.load_state_dict(torch.load(tmp_path / "w.pt", weights_only=True))
    assert same(model, other)
    save_weights(model, tmp_path / "w.safetensors")
    other = WithModule()
    other.load_state_dict(safetensors.torch.load_file(tmp_path / "w.safetensors"))
    assert same(model, other)
    tied, loaded = Tied(), Tied()
    save_weights(tied, tmp_path / "t.safetensors")
    safetensors.torch.load_model(loaded, tmp_path / "t.safetensors")  # knows of tied weights
    assert same(tied, loaded)
    with safe_open(tmp_path / "t.safetensors", "pt") as file:
        assert file.metadata()["format"] == "pt"


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: state,
        lambda state: {"state_dict": state, "epoch": 3},
        lambda state: {"epoch": torch.tensor(3.0), "model": state, "optimizer": {"state": {}}},
        lambda state: {"anything": state, "best": 0.5},
        lambda state: {"ema": {"decay": torch.ones(1)}, "net": state},
    ],
    ids=["plain", "state_dict", "model", "another name", "beside others"],
)
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_what_torch_saved_is_read(wrap: Callable[[Any], Any], zipped: bool, tmp_path: Path):
    model, loaded = Tied(), Tied()
    torch.save(wrap(model.state_dict()), tmp_path / "w", _use_new_zipfile_serialization=zipped)
    load_weights(loaded, tmp_path / "w")
    assert same(model, loaded)


def prefixed(prefix: str, only: str = "") -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda state: {(prefix + n if n.startswith(only) else n): v for n, v in state.items()}


@pytest.mark.parametrize(
    "rename",
    [
        prefixed("module."),
        prefixed("_orig_mod."),
        prefixed("module._orig_mod."),
        prefixed("module.module."),
        prefixed("_fsdp_wrapped_module."),
        prefixed("module.", only="head"),
        lambda s: {n.replace("head.", "head._fsdp_wrapped_module."): v for n, v in s.items()},
        lambda s: {
            n.replace("head.0", "head.0._checkpoint_wrapped_module"): v for n, v in s.items()
        },
        lambda s: {n.replace("head.", "head.module."): v for n, v in s.items()},
    ],
    ids=["ddp", "compile", "both", "twice", "fsdp", "only some", "inside", "recompute", "inner"],
)
def test_prefixes_of_wrappers_are_understood(rename: Callable[..., Any], tmp_path: Path):
    model, loaded = WithModule(), WithModule()
    torch.save(rename(model.state_dict()), tmp_path / "w")
    load_weights(loaded, tmp_path / "w")
    assert same(model, loaded)


WRAPPERS = [
    pytest.param(nn.DataParallel, id="data parallel"),
    pytest.param(torch.compile, id="compiled", marks=pytest.mark.slow),  # imports the compiler
]


@pytest.mark.parametrize("wrap", WRAPPERS)
@pytest.mark.parametrize("name", FILES)
def test_wrapped_models_write_and_read_plain_names(wrap: Any, name: str, tmp_path: Path):
    model, plain = WithModule(), WithModule()
    save_weights(wrap(model), tmp_path / name)
    load_weights(plain, tmp_path / name)
    assert same(model, plain)
    other = WithModule()
    load_weights(wrap(other), tmp_path / name)
    assert same(model, other)
    read = torch.load if name == "w.pt" else safetensors.torch.load_file
    assert read(tmp_path / name).keys() == model.state_dict().keys()


@pytest.mark.slow
def test_a_wrapped_part_is_plain_in_the_file(tmp_path: Path):
    model = WithModule()
    names = set(model.state_dict())
    model.head[0] = torch.compile(model.head[0])
    save_weights(model, tmp_path / "w")
    assert safetensors.torch.load_file(tmp_path / "w").keys() == names


def test_weights_take_the_dtype_of_the_model(tmp_path: Path):
    model = nn.Linear(2, 2, dtype=torch.float64)
    save_weights(model, tmp_path / "w")
    loaded = nn.Linear(2, 2).bfloat16()
    load_weights(loaded, tmp_path / "w")
    assert loaded.weight.dtype == torch.bfloat16
    assert torch.equal(loaded.weight, model.weight.bfloat16())


def test_old_files_without_the_counters_of_batch_norm(tmp_path: Path):
    model, loaded = Tied(), Tied()
    state = model.state_dict()
    del state["norm.num_batches_tracked"]
    torch.save(state, tmp_path / "w")
    load_weights(loaded, tmp_path / "w")
    assert torch.equal(loaded.embed.weight, model.embed.weight)


# ---------------------------------------------------------------------------------------- what is wrong


def without(name: str) -> Callable[[dict[str, Tensor]], dict[str, Any]]:
    return lambda state: {n: v for n, v in state.items() if n != name}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (without("head.0.bias"), ["'head.0.bias' is missing"]),
        (lambda s: {}, ["there is no state dict in it"]),
        (lambda s: {"epoch": 3}, ["there is no state dict in it, only 'epoch'"]),
        (
            lambda s: {**without("head.0.bias")(s), "heads.0.bias": torch.ones(3)},
            [
                "'head.0.bias' is missing",
                "'heads.0.bias' is not in the model",
            ],
        ),
        (
            lambda s: {**s, "module.weight": torch.ones(5, 2)},
            ["'module.weight' has the shape (5, 2) in the file and (2, 2) in the model"],
        ),
        (lambda s: {**s, "module.head.0.bias": torch.ones(3)}, ["'head.0.bias' comes twice"]),
        (
            lambda s: {**s, "head.0.bias": torch.ones(3, dtype=torch.int8)},
            ["'head.0.bias' is torch.int8 in the file and torch.float32 in the model"],
        ),
        (lambda s: {**s, "head.0.bias": "three"}, ["'head.0.bias' is a value of type str in the"]),
        (
            lambda s: {f"net.{n}": v for n, v in s.items()},
            ["and 3 more are missing", "'net.", "and 3 more are not in the model"],
        ),
    ],
)
def test_weights_of_another_model_are_told(change: Any, says: list[str], tmp_path: Path):
    torch.save(change(WithModule().state_dict()), tmp_path / "w")
    model = WithModule()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(InputError, match="w are for another model") as caught:
        load_weights(model, tmp_path / "w")
    for words in says:
        assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


class Trap:
    """Would make a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_code_in_a_file_is_not_run(tmp_path: Path):
    for content in (
        {"weight": torch.ones(1, 3), "trap": Trap(tmp_path / "sprung")},
        nn.Linear(3, 1),
    ):
        torch.save(content, tmp_path / "w.pt")
        with pytest.raises(InputError, match="unpacking these could run any code"):
            load_weights(nn.Linear(3, 1), tmp_path / "w.pt")
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "no file of weights"),
        (b"not weights", "no file of weights"),
        (b"\x08" + b"\x00" * 7 + b"{{{{{{{{", "no file of weights"),
        (b"<!DOCTYPE html><html>404", "a web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "a pointer of Git LFS"),
        (b'{"metadata": {}, "weight_map": {"a": "b"}}', "no file of weights"),
        (b"PK\x03\x04 torn", "is damaged"),
        (b"\x80\x02 torn", "is damaged"),
    ],
)
def test_a_file_that_is_something_else_is_told(content: bytes, says: str, tmp_path: Path):
    (tmp_path / "w").write_bytes(content)
    with pytest.raises(InputError, match=f"w cannot be read.*{says}"):
        load_weights(nn.Linear(3, 1), tmp_path / "w")


@pytest.mark.parametrize("name", FILES)
def test_a_torn_file_is_told_wherever_it_is_torn(name: str, tmp_path: Path):
    save_weights(nn.Linear(30, 10), tmp_path / name)
    whole = (tmp_path / name).read_bytes()
    for length in range(1, len(whole), len(whole) // 40):
        (tmp_path / name).write_bytes(whole[:length])
        model = nn.Linear(30, 10)
        before = model.weight.detach().clone()
        with pytest.raises(InputError, match="cannot be read"):
            load_weights(model, tmp_path / name)
        assert torch.equal(model.weight, before)


def test_a_header_as_long_as_the_mark_of_another_format(tmp_path: Path):
    # 640 bytes of header: the file then begins as a pickle does.
    names = {f"{'x' * 38}{i}": torch.zeros(1) for i in range(4)}
    for pad in range(400):
        safetensors.torch.save_file(names, tmp_path / "w", {"format": "pt", "pad": "y" * pad})
        if (tmp_path / "w").read_bytes()[:2] == b"\x80\x02":
            break
    else:
        pytest.fail("no header of that length was made")
    model = nn.Module()
    for name in names:
        model.register_parameter(name, nn.Parameter(torch.ones(1)))
    load_weights(model, tmp_path / "w")
    assert all(not value.any() for value in model.state_dict().values())


def test_no_file_is_told(tmp_path: Path):
    with pytest.raises(InputError, match="no weights at"):
        load_weights(nn.Linear(3, 1), tmp_path / "w")
    with pytest.raises(InputError, match=r"no weights at .*Is a directory"):
        load_weights(nn.Linear(3, 1), tmp_path)


def test_models_without_values(tmp_path: Path):
    with torch.device("meta"):
        model = nn.Linear(3, 1)
    with pytest.raises(InputError, match="meta device"):
        save_weights(model, tmp_path / "w")
    save_weights(nn.Linear(3, 1), tmp_path / "w")
    with pytest.raises(InputError, match="no room for values"):
        load_weights(model, tmp_path / "w")


def test_what_safetensors_cannot_hold(tmp_path: Path):
    class Extra(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"seen": 3}

        def set_extra_state(self, state: Any) -> None:
            self.seen = state["seen"]

    with pytest.raises(InputError, match=r"'_extra_state' is a value of type dict.*\.pt"):
        save_weights(Extra(3, 1), tmp_path / "w.safetensors")
    assert not list(tmp_path.iterdir())
    save_weights(Extra(3, 1), tmp_path / "w.pt")
    loaded = Extra(3, 1)
    load_weights(loaded, tmp_path / "w.pt")
    assert loaded.seen == 3


@pytest.mark.parametrize("place", ["missing/w", "file/w", ".", "missing/w.pt"])
def test_where_nothing_can_be_written_nothing_is_left(place: str, tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        save_weights(nn.Linear(3, 1), tmp_path / place)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_file_that_is_there_is_kept_until_the_new_one_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    save_weights(nn.Linear(3, 1), tmp_path / "w")
    before = (tmp_path / "w").read_bytes()

    def full(_state: object, path: Path, _metadata: object) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("anybatch.state.weights.save_file", full)
    with pytest.raises(InputError, match="No space left"):
        save_weights(nn.Linear(3, 1), tmp_path / "w")
    assert (tmp_path / "w").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["w"]


def test_the_same_names_give_the_same_header(tmp_path: Path):
    """Though the library writes metadata, of which ties have several, in an order that it draws."""
    headers = set()
    for number in range(20):
        file = save_weights(Tied(), tmp_path / f"{number}.safetensors").read_bytes()
        headers.add(file[8 : 8 + int.from_bytes(file[:8], "little")])
    (header,) = headers
    assert list(json.loads(header)["__metadata__"]) == ["format", "head.weight"]


def test_numbers_that_safetensors_cannot_hold_are_named_with_a_format_that_can(
    tmp_path: Path,
) -> None:
    model = nn.Linear(2, 2, dtype=torch.complex128)
    with pytest.raises(InputError, match=r"'weight' is torch.complex128.*ends in \.pt"):
        save_weights(model, tmp_path / "w.safetensors")
    assert not list(tmp_path.iterdir())
    other = nn.Linear(2, 2, dtype=torch.complex128)
    load_weights(other, save_weights(model, tmp_path / "w.pt"))
    assert same(model, other)
