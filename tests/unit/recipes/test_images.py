"""The images recipe: which files it takes, what it makes of them, and what it refuses."""

from __future__ import annotations

import pickle
import sys
import types
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import default_collate

import anybatch as ab
from anybatch.data.fetch import Piece, open_fetch
from anybatch.errors import DataError, InputError
from anybatch.recipes.images import build, images, loss, normalised
from anybatch.recipes.images_data import CentreCrop, RandomCrop, find, opened

Image = pytest.importorskip("PIL.Image")

SMALL = {"pixels": 16, "global_batch": 8, "ghost_batch": 4}


def painted(path: Path, value=0, mode="RGB", size=(12, 10)) -> Path:
    """An image of one colour in a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value).save(path)
    return path


@pytest.fixture
def folder(tmp_path):
    """Two classes: 10 dark and 5 bright images."""
    for name, count, colour in (("bright", 5, 200), ("dark", 10, 50)):
        for i in range(count):
            painted(tmp_path / name / f"{i}.png", (colour + i,) * 3)
    return tmp_path


# ---------------------------------------------------------------------------------- which files


def labels(files) -> list[int]:
    return [label for _, label in files]


def test_of_each_class_a_part_is_held_out_by_seed(folder):
    found = find(folder, held_out=0.2, seed=0)
    assert found.classes == ["bright", "dark"]
    assert labels(found.train) == [0] * 4 + [1] * 8
    assert labels(found.held_out) == [0, 1, 1]
    assert len({path for path, _ in (*found.train, *found.held_out)}) == 15
    assert find(folder, 0.2, 0) == found
    assert any(find(folder, 0.2, seed) != found for seed in (1, 2, 3))


@pytest.mark.parametrize("name", ["val", "valid", "validation"])
def test_a_part_of_its_own_is_held_out_whole(folder, name):
    for path in sorted(folder.glob("*")):
        path.rename((folder / "train").mkdir(exist_ok=True) or folder / "train" / path.name)
    painted(folder / name / "dark" / "deep" / "a.PNG")
    found = find(folder, held_out=0.5, seed=0)
    assert labels(found.train) == [0] * 5 + [1] * 10
    assert found.held_out == [(str(folder / name / "dark" / "deep" / "a.PNG"), 1)]


def test_a_class_may_be_called_train(tmp_path):
    painted(tmp_path / "car" / "a.png")
    painted(tmp_path / "train" / "a.png")
    assert find(tmp_path, 0.1, 0).classes == ["car", "train"]


def test_a_class_of_one_image_has_it_to_learn_from(folder):
    painted(folder / "alone" / "a.png")
    found = find(folder, held_out=0.9, seed=0)
    assert 0 in labels(found.train)
    assert 0 not in labels(found.held_out)


def test_files_that_are_no_images_by_name_are_left_out_and_told(folder):
    (folder / "dark" / "notes.txt").write_text("dark")
    (folder / "dark" / ".DS_Store").write_text("")
    (folder / ".hidden").mkdir()
    with pytest.warns(UserWarning, match=r"1 file .* left out: .*notes.txt"):
        assert len(find(folder, 0.0, 0).train) == 15


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda f: None, r"is not there: give a folder"),
        (lambda f: f.write_text(""), r"is a file: give a folder"),
        (lambda f: f.mkdir(), r"has no folder in it: give one .* two classes or more"),
        (lambda f: painted(f / "a.png"), r"has 1 images, but no folder for each class"),
        (lambda f: painted(f / "cat" / "a.png"), r"one class only \('cat'\)"),
        (
            lambda f: (painted(f / "cat" / "a.png"), (f / "dog").mkdir()),
            r"no image of the class 'dog': put some there",
        ),
        (
            lambda f: [
                painted(f / p / "a.png") for p in ("train/cat", "train/dog", "val/cow", "val/dog")
            ],
            r"has the class 'cow', of which '.*train' has no image",
        ),
    ],
)
def test_a_folder_that_cannot_be_learned_from_is_refused(tmp_path, make, said):
    make(tmp_path / "images")
    with pytest.raises(InputError, match=said):
        images(data=tmp_path / "images")


# --------------------------------------------------------------------------------- which pixels


@pytest.mark.parametrize(
    ("mode", "value", "suffix", "rgb"),
    [
        ("RGB", (10, 20, 30), "png", (10, 20, 30)),
        ("RGBA", (10, 20, 30, 0), "png", (10, 20, 30)),
        ("L", 77, "png", (77, 77, 77)),
        ("LA", (77, 9), "png", (77, 77, 77)),
        ("1", 1, "png", (255, 255, 255)),
        ("I;16", 0x8112, "png", (0x81, 0x81, 0x81)),
        ("I;16", 0x0012, "tif", (0, 0, 0)),
        ("CMYK", (0, 0, 0, 0), "jpg", (255, 255, 255)),
    ],
)
def test_every_kind_of_image_becomes_rgb(tmp_path, mode, value, suffix, rgb):
    path = painted(tmp_path / f"a.{suffix}", value, mode)
    image = opened(str(path))
    assert image.mode == "RGB"
    assert image.getpixel((3, 3)) == rgb


def test_palettes_with_transparent_colours_become_rgb_without_a_warning(tmp_path):
    image = Image.new("P", (4, 4), 1)
    image.putpalette([0, 0, 0, 9, 8, 7])
    image.save(tmp_path / "a.png", transparency=bytes([0, 128]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert opened(str(tmp_path / "a.png")).getpixel((0, 0)) == (9, 8, 7)


def test_files_that_cannot_be_read_are_named(tmp_path):
    whole = painted(tmp_path / "whole.jpg", (1, 2, 3), size=(200, 200)).read_bytes()
    pixels = np.random.default_rng(0).integers(0, 255, (90, 90, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "noise.png")
    noise = (tmp_path / "noise.png").read_bytes()
    bad = {
        "text.png": b"not an image",
        "empty.png": b"",
        "cut.jpg": whole[: len(whole) // 2],
        "cut.png": noise[: len(noise) // 2],
    }
    for name, content in bad.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=f"{name}' cannot be read as an image"):
            opened(str(tmp_path / name))
    painted(tmp_path / "float.tif", 0.5, "F")
    with pytest.raises(DataError, match=r"float.tif' .*floating-point"):
        opened(str(tmp_path / "float.tif"))


def test_random_parts_are_bytes_of_the_asked_size_and_differ():
    image = Image.fromarray(np.arange(40 * 30 * 3).reshape(30, 40, 3).astype(np.uint8))
    view = RandomCrop(16, 0.25, flip=True)
    torch.manual_seed(0)
    views = [view(image) for _ in range(8)]
    assert {(v.shape, v.dtype) for v in views} == {((3, 16, 16), torch.uint8)}
    assert len({v.numpy().tobytes() for v in views}) == 8
    torch.manual_seed(0)
    assert torch.equal(view(image), views[0])


@pytest.mark.parametrize("size", [(40, 30), (400, 3), (1, 1), (7, 600)])
def test_random_parts_lie_inside_the_image_and_are_no_smaller_than_asked(size):
    torch.manual_seed(0)
    for _ in range(200):
        left, top, right, bottom = RandomCrop(8, 0.3, flip=False)._box(*size)
        assert 0 <= left < right <= size[0] + 1e-6
        assert 0 <= top < bottom <= size[1] + 1e-6
        area = (right - left) * (bottom - top) / (size[0] * size[1])
        assert area >= 0.3 - 1e-6


def test_half_of_the_images_are_mirrored_if_wished():
    left_is_bright = Image.fromarray(np.tile(np.uint8([200, 0]), (2, 1))).convert("RGB")
    torch.manual_seed(0)
    for flip, least, most in ((True, 30, 70), (False, 0, 0)):
        views = [RandomCrop(2, 1.0, flip)(left_is_bright.resize((8, 8))) for _ in range(100)]
        mirrored = sum(bool(view[0, 0, 1] > view[0, 0, 0]) for view in views)
        assert least <= mirrored <= most


@pytest.mark.parametrize("size", [(1000, 10), (10, 1000)])
@pytest.mark.parametrize("smallest", [0.001, 0.08, 0.5, 1.0])
def test_the_crop_of_a_long_image_has_the_least_area_too(size, smallest):
    for _ in range(20):
        left, top, right, bottom = RandomCrop(8, smallest, flip=False)._box(*size)
        assert left >= 0
        assert top >= 0
        assert right <= size[0]
        assert bottom <= size[1]
        assert (right - left) * (bottom - top) >= 0.999 * smallest * size[0] * size[1]


def test_evaluation_sees_the_middle():
    pixels = np.zeros((20, 40, 3), np.uint8)
    pixels[:, 12:28] = 255
    view = CentreCrop(8)(Image.fromarray(pixels))
    assert view.shape == (3, 8, 8)
    assert view[:, :, 1:7].min() == 255


def test_a_sample_is_the_same_however_it_is_fetched(folder):
    task = images(data=folder, held_out=0, **SMALL)
    fetch = open_fetch(task.train, None, seed=0)
    whole, labels = fetch([Piece(2, torch.tensor([7, 1, 4]))])
    one, _ = open_fetch(task.train, None, seed=0)([Piece(2, torch.tensor([4]))])
    assert torch.equal(whole[2:], one)
    assert labels.tolist() == [1, 0, 0]
    other, _ = fetch([Piece(3, torch.tensor([4]))])
    assert not torch.equal(other, one) or task.train[4][0].float().std() == 0


# ----------------------------------------------------------------------------------- which model


@pytest.mark.parametrize("pixels", [16, 33, 64, 128])
def test_the_model_takes_images_of_any_size_and_a_single_one(pixels):
    with torch.device("meta"):
        model = build("small", pixels, 7, dropout=0.0).train()
        out = model(torch.rand(1, 3, pixels, pixels))
    assert out.shape == (1, 7)


@pytest.fixture
def torchvision(monkeypatch):
    """A stand-in for torchvision with one model."""

    class Named(nn.Sequential):
        def forward(self, x):
            return super().forward(x), "auxiliary"

    def get_model(name, weights, num_classes):
        assert (name, weights) == ("tinynet", None)
        return Named(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, num_classes))

    models = types.ModuleType("torchvision.models")
    models.list_models = lambda module: ["othernet", "tinynet"]
    models.get_model = get_model
    package = types.ModuleType("torchvision")
    package.models = models
    monkeypatch.setitem(sys.modules, "torchvision", package)
    monkeypatch.setitem(sys.modules, "torchvision.models", models)


@pytest.mark.usefixtures("torchvision")
def test_a_model_of_torchvision_is_trained_as_it_is(folder):
    task = images(data=folder, model="tinynet", pixels=16, global_batch=8, steps=2)
    result = ab.train(task)
    assert result.ended.steps == 2
    assert set(result.model.state_dict()) == {"2.weight", "2.bias"}
    assert images(data=folder, model="tinynet").train[0][0].shape == (3, 224, 224)
    with pytest.raises(InputError, match=r"no model 'tinienet'.*othernet, tinynet"):
        images(data=folder, model="tinienet")


def test_without_torchvision_the_remedy_is_told(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision.models", None)
    with pytest.raises(InputError, match=r"'resnet18' is not 'small'.*pip install torch"):
        images(data=folder, model="resnet18")


# ------------------------------------------------------------------------------------- the task


def test_the_loss_is_a_sum_that_smooths_in_training_alone(folder):
    task = images(data=folder, label_smoothing=0.2, **SMALL)
    model = build("small", 16, 7, 0.0).double()
    pixels, labels = default_collate([task.train[i] for i in range(6)])
    model.eval()
    with torch.no_grad():
        whole = loss(model, (pixels, labels), 0.2)
        parts = [loss(model, (pixels[i], labels[i]), 0.2) for i in (slice(0, 2), slice(2, 6))]
        plain = nn.functional.cross_entropy(
            model(normalised(pixels, torch.float64)), labels, reduction="sum"
        )
    torch.testing.assert_close(whole.sum, parts[0].sum + parts[1].sum)
    torch.testing.assert_close(whole.sum, plain)
    assert whole.weight == 6
    assert set(whole.metrics) == {"accuracy", "top5_accuracy"}
    assert whole.metrics["top5_accuracy"] >= whole.metrics["accuracy"]
    two = loss(build("small", 16, 2, 0.0).train(), (pixels, labels), 0.2)
    assert set(two.metrics) == {"accuracy"}
    assert two.sum.dtype == torch.float32


def test_bytes_are_normalised_as_torchvision_does():
    pixels = torch.tensor([0, 255, 124], dtype=torch.uint8).view(1, 3, 1, 1)
    wanted = [-0.485 / 0.229, (1 - 0.456) / 0.224, (124 / 255 - 0.406) / 0.225]
    found = normalised(pixels, torch.bfloat16)
    assert found.dtype == torch.float32
    assert found.flatten().tolist() == pytest.approx(wanted, rel=1e-6)


def test_one_piece_and_many_give_the_same_step(folder):
    task = images(data=folder, held_out=0, steps=2, **SMALL)
    exact = replace(task, model=lambda: task.model().double())

    def trained(micro_batch):
        with ab.Session(exact, ab.plan(exact, micro_batch=micro_batch)) as session:
            return [done.loss for done in session.steps()], session.model.state_dict()

    (losses, weights), (cut, in_pieces) = trained(8), trained(4)
    assert cut == pytest.approx(losses, rel=1e-9)
    for name, value in weights.items():
        torch.testing.assert_close(in_pieces[name], value, rtol=1e-8, atol=1e-10)


def test_a_file_that_is_no_image_stops_training_by_name_or_is_left_out(folder):
    (folder / "dark" / "3.png").write_bytes(b"broken")
    # The classes are in order, and each fails or not by itself.
    options = {"data": folder, "held_out": 0, "epochs": 1, **SMALL}
    with pytest.raises(DataError, match=r"3.png' cannot be read as an image"):
        ab.train(images(**options), micro_batch=8)
    result = ab.train(images(**options, bad_data="skip"), micro_batch=8)
    assert result.ended.num_skipped == 1
    assert result.ended.finished


@pytest.mark.usefixtures("torchvision")
def test_the_options_say_what_the_optimizer_is(folder):
    task = images(data=folder, optimizer="adamw", weight_decay=0.3, lr=1e-3, **SMALL)
    groups = task.parameters_of(task.build_model())
    optimizer = task.optimizer(groups)
    assert isinstance(optimizer, torch.optim.AdamW)
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.3, 0.0]
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-3 / 32**0.5)
    assert isinstance(images(data=folder, **SMALL).optimizer(groups), torch.optim.AdamW)
    other = images(data=folder, model="tinynet").optimizer(groups)
    assert other.param_groups[0]["momentum"] == 0.9


def test_the_task_can_be_sent_to_a_worker_process(folder):
    task = pickle.loads(pickle.dumps(images(data=folder, **SMALL)))
    assert len(task.train) + len(task.valid) == 15
    assert task.train[0][0].shape == (3, 16, 16)


def test_every_option_out_of_range_is_named_at_once(folder):
    with pytest.raises(InputError) as caught:
        images(
            data=folder,
            pixels=3,
            lr=-1.0,
            weight_decay=float("nan"),
            label_smoothing=1.0,
            dropout=1.0,
            smallest_crop=0.0,
            held_out=-0.1,
        )
    for words in ("pixels is 3", "lr is -1", "weight_decay is nan", "label_smoothing is 1"):
        assert words in str(caught.value)
    for words in ("dropout is 1", "smallest_crop is 0", "held_out is -0.1"):
        assert words in str(caught.value)


def test_without_pillow_the_remedy_is_told(folder, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install anybatch\[images\]"):
        images(data=folder)
