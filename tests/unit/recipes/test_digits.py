"""The digits recipe as a task: what it is made of. How well it learns is tested end to end."""

from __future__ import annotations

import gzip
import pickle
import struct

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from anybatch.errors import InputError
from anybatch.recipes.digits import build, decay_groups, digits


@pytest.fixture
def mnist(tmp_path):
    """A folder in MNIST's format: 6 training and 3 test images of 28 x 28, classes 0 to 3."""

    def write(name, array, code=0x08, dtype=">u1"):
        header = bytes([0, 0, code, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
        (tmp_path / name).write_bytes(gzip.compress(header + array.astype(dtype).tobytes()))

    for prefix, n in (("train", 6), ("t10k", 3)):
        write(f"{prefix}-images-idx3-ubyte.gz", np.full((n, 28, 28), 255))
        write(f"{prefix}-labels-idx1-ubyte.gz", np.arange(n) % 4)
    return tmp_path, write


def test_the_split_is_fixed_whole_and_stratified():
    task, other = digits(seed=0), digits(seed=1, global_batch=7)
    (train_x, train_y), (valid_x, valid_y) = task.train.tensors, task.valid.tensors
    assert (len(task.train), len(task.valid)) == (1437, 360)
    assert train_x.shape[1:] == valid_x.shape[1:] == (1, 8, 8)
    assert (train_x.dtype, train_y.dtype) == (torch.float32, torch.int64)
    assert (train_x.min(), train_x.max()) == (0, 1)
    assert all(torch.equal(a, b) for a, b in zip(task.train.tensors, other.train.tensors, strict=1))
    share = valid_y.bincount() / (train_y.bincount() + valid_y.bincount())
    assert share == pytest.approx([0.2] * 10, abs=0.01)


@pytest.mark.parametrize("num_images", [1, 5])
@pytest.mark.parametrize("image", [(8, 8), (28, 28), (2, 2), (5, 32)])
def test_the_model_trains_on_any_image_and_on_a_single_one(image, num_images):
    model = build(image, num_classes=7, width=4, dropout=0.1).train()
    logits = model(torch.rand(num_images, 1, *image))
    logits.sum().backward()
    assert logits.shape == (num_images, 7)
    assert all(p.grad is not None for p in model.parameters())
    assert next(iter(dict(model.named_children()))) == "stem"


def test_the_loss_is_a_sum_over_the_samples():
    task = digits(width=4)
    model = task.build_model().eval()
    images, labels = task.valid[:10]
    whole = task.loss(model, (images, labels))
    parts = [task.loss(model, (images[i], labels[i])) for i in (slice(0, 3), slice(3, 10))]
    assert whole.weight == 10
    assert whole.sum.item() == pytest.approx(sum(p.sum.item() for p in parts), rel=1e-5)
    assert whole.metrics["accuracy"] == sum(p.metrics["accuracy"] for p in parts)


def test_weight_decay_is_on_weights_alone():
    model = digits(width=4).build_model()
    decayed, rest = decay_groups(model, weight_decay=0.1)
    assert (decayed["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)
    assert {p.ndim for p in decayed["params"]} == {2, 4}
    assert {p.ndim for p in rest["params"]} == {1}
    assert len(decayed["params"]) + len(rest["params"]) == len(list(model.parameters()))


def test_the_task_can_be_sent_to_a_worker_process():
    task = pickle.loads(pickle.dumps(digits(width=4, global_batch=64, seed=3)))
    assert task.build_model()(task.valid.tensors[0][:2]).shape == (2, 10)
    groups = task.parameters_of(task.build_model())
    assert task.optimizer(groups).param_groups[0]["lr"] == pytest.approx(3e-3 * 0.5**0.5)


def test_mnist_is_read_from_a_folder(mnist):
    task = digits(data=mnist[0], width=2)
    assert (len(task.train), len(task.valid)) == (6, 3)
    assert task.train.tensors[0].shape == (6, 1, 28, 28)
    assert task.train.tensors[0].max() == 1
    assert task.build_model()(task.train.tensors[0]).shape == (6, 4)


@pytest.mark.parametrize(
    ("name", "array", "kind", "said"),
    [
        ("t10k-images-idx3-ubyte.gz", np.zeros((3, 9, 28)), (0x08, ">u1"), "28 x 28.*9 x 28"),
        (
            "t10k-images-idx3-ubyte.gz",
            np.zeros((3, 28, 28)),
            (0x0D, ">f4"),
            "t10k-images.*unsigned bytes",
        ),
        (
            "train-labels-idx1-ubyte.gz",
            np.full(6, -1),
            (0x09, ">i1"),
            "train-labels.*unsigned bytes",
        ),
        (
            "t10k-labels-idx1-ubyte.gz",
            np.full(3, 0.5),
            (0x0D, ">f4"),
            "t10k-labels.*unsigned bytes",
        ),
    ],
)
def test_data_that_cannot_be_classified_is_refused(mnist, name, array, kind, said):
    folder, write = mnist
    write(name, array, *kind)
    with pytest.raises(InputError, match=said):
        digits(data=folder)


def test_every_option_out_of_range_is_named_at_once():
    with pytest.raises(InputError) as caught:
        digits(lr=float("nan"), width=0, weight_decay=-1, dropout=1.0)
    for words in ("lr is nan", "width is 0", "weight_decay is -1", "dropout is 1.0"):
        assert words in str(caught.value)


def test_the_images_are_those_that_scikit_learn_loads():
    mine, (pixels, labels) = digits(), load_digits(return_X_y=True)
    images = torch.as_tensor(pixels[labels.argsort(kind="stable")], dtype=torch.float32) / 16
    assert torch.equal(mine.valid.tensors[0].flatten(1), images[::5])
    assert len(mine.train) == len(images) - len(images[::5])


def test_without_scikit_learn_the_remedy_is_told(monkeypatch):
    monkeypatch.setattr("anybatch.recipes.digits.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install anybatch\[recipes\]"):
        digits()


@pytest.mark.parametrize("global_batch", [0, -3])
def test_a_batch_below_one_is_refused_by_the_task(global_batch):
    with pytest.raises(InputError, match=f"global_batch is {global_batch}; give a whole number"):
        digits(global_batch=global_batch)
