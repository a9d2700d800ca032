"""What kernels keep beside tensors, by the rules of the estimate."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from anybatch.errors import InputError
from anybatch.estimate.cuda_kernels import CudaKernels
from anybatch.estimate.images import Convolved
from anybatch.estimate.kernels import PRIMITIVE_BYTES, CpuKernels, Scratch
from anybatch.processor import Processor

_aten = torch.ops.aten
KIB = 1 << 10
HALF = (torch.bfloat16, torch.float16)


def fake(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return torch.empty(*shape, dtype=dtype)


def all_kept(kernels: CpuKernels) -> int:
    """Whatever the shapes, with the buffers of products."""
    return kernels.kept_bytes + kernels.products.kept_bytes


def multiply(kernels: CpuKernels, m: int, k: int, n: int) -> int:
    """What stays beyond what was there before."""
    before = kernels.products.kept_bytes
    kernels.scratch(_aten.mm.default, (fake(m, k), fake(k, n)), fake(m, n))
    return kernels.products.kept_bytes - before


@pytest.mark.parametrize("name", ["_softmax", "_log_softmax"])
def test_a_softmax_copies_what_does_not_lie_in_a_row(name: str):
    kernels, turned, straight = CpuKernels(2), fake(64, 32).t(), fake(32, 64)
    forward, backward = (getattr(_aten, name + way).default for way in ("", "_backward_data"))
    assert kernels.scratch(forward, (turned, 1, False), turned) == turned.nbytes
    assert kernels.scratch(forward, (straight, 1, False), straight) == 0
    both = (turned, turned, 1, torch.float32)
    assert kernels.scratch(backward, both, straight) == 2 * turned.nbytes


def test_a_product_keeps_what_each_thread_packs():
    # A slice of 192 of k: 1024 columns and 384 rows, in float32, for each of two threads.
    kept = multiply(CpuKernels(2), 4096, 1024, 1024)
    assert 0 <= kept - 2 * 4 * 192 * (1024 + 384) < 40 * KIB


def test_a_buffer_that_is_large_enough_is_used_again():
    kernels = CpuKernels(2)
    large = multiply(kernels, 1024, 256, 4000)
    assert multiply(kernels, 1024, 256, 1000) == 0
    assert multiply(kernels, 256, 256, 256) == 0
    assert kernels.products.kept_bytes == large


def test_a_buffer_that_is_too_small_stays_beside_the_new_one():
    kernels = CpuKernels(2)
    small = multiply(kernels, 256, 256, 256)
    large = multiply(kernels, 1024, 256, 4000)
    assert kernels.products.kept_bytes == small + large
    alone = CpuKernels(2)
    assert multiply(alone, 1024, 256, 4000) == large


def test_of_growing_products_no_more_than_five_buffers_are_kept():
    kernels = CpuKernels(1)
    kept = [multiply(kernels, 1024, 512, n) for n in range(64, 64 * 9, 64)]
    # The sixth takes the place of the first, and each later one that of the one before.
    assert kernels.products.kept_bytes == sum(kept)
    last = kernels.products.kept_bytes
    assert multiply(kernels, 1024, 512, 64 * 9) == 4 * 192 * 64
    assert kernels.products.kept_bytes == last + 4 * 192 * 64


def test_thin_products_pack_nothing():
    kernels = CpuKernels(2)
    assert multiply(kernels, 512, 256, 10) == 0
    assert multiply(kernels, 1, 256, 512) == 0


WITHOUT_HALVES = Processor(halves=frozenset())
NARROW = Processor(vector_bytes=32, halves=frozenset())
"""A processor without instructions for half precision, and one with AVX2 alone."""


def halves(kernels: CpuKernels, m: int, k: int, n: int, dtype: torch.dtype) -> tuple[int, int]:
    """What a product in half precision adds: bytes that stay, and bytes that stay for its shape."""
    kept, shapes = all_kept(kernels), kernels.shape_bytes
    args = fake(m, k, dtype=dtype), fake(k, n, dtype=dtype)
    kernels.scratch(_aten.mm.default, args, fake(m, n, dtype=dtype))
    more = kernels.shape_bytes
    return (
        all_kept(kernels) - kept,
        more.forward + more.backward - shapes.forward - shapes.backward,
    )


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("by_onednn", [True, False])
def test_a_product_in_half_precision_keeps_a_kernel_or_what_it_packs(
    by_onednn: bool, dtype: torch.dtype
):
    kernels = CpuKernels(2, processor=Processor() if by_onednn else WITHOUT_HALVES)
    first, shape = halves(kernels, 64, 64, 64, dtype)
    assert first > 0
    assert (shape > 0) == by_onednn
    assert halves(kernels, 64, 64, 64, dtype) == (0, 0)
    assert halves(kernels, 128, 64, 64, dtype)[1] == shape


@pytest.mark.parametrize("dtype", HALF)
def test_a_small_product_in_half_precision_is_not_onednns(dtype: torch.dtype):
    assert halves(CpuKernels(2), 2, 204, 10, dtype)[1] == 0
    assert halves(CpuKernels(2), 2, 205, 10, dtype)[1] > 0


def attend(kernels: CpuKernels, length: int, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes that attention adds, whatever the size of its batch: in forward, and in backward."""
    before = all_kept(kernels)
    query = fake(4, 8, length, 32, dtype=dtype)
    kernels.scratch(_aten._scaled_dot_product_flash_attention_for_cpu.default, (query,) * 3, query)
    forward = all_kept(kernels)
    backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    kernels.scratch(backward, (query,) * 4, query)
    return forward - before, all_kept(kernels) - forward


def test_attention_in_half_precision_keeps_products_of_every_pair_of_pieces():
    even, uneven = (attend(CpuKernels(1), length, HALF[0])[1] for length in (1024, 1025))
    # 1025 queries are pieces of 256 and one of 1, and as many keys are pieces of 512 and one of 1.
    products = 3 * PRIMITIVE_BYTES["attention product"]
    assert even == uneven == products
    # 1040 leave 16 of each: four pairs.
    assert attend(CpuKernels(1), 1040, HALF[0])[1] == 4 * products


@pytest.mark.parametrize("processor", [Processor(), WITHOUT_HALVES])
def test_attention_in_half_precision_is_counted_once(processor: Processor):
    kernels = CpuKernels(2, processor=processor)
    kept, _ = attend(kernels, 256, HALF[0])
    assert kept > 0
    assert attend(kernels, 256, HALF[0]) == (0, 0)
    assert attend(kernels, 128, HALF[0])[0] == 0  # smaller ones fit the buffers


def test_a_convolution_keeps_less_for_one_gradient_than_for_two():
    image, weight, result = fake(4, 16, 8, 8), fake(16, 16, 3, 3), fake(4, 16, 8, 8)

    def kept(mask: list[bool]) -> int:
        kernels = CpuKernels(2)
        args = (result, image, weight, [0], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, mask)
        kernels.scratch(_aten.convolution_backward.default, args, None)
        return kernels.shape_bytes.forward + kernels.shape_bytes.backward

    assert 0 < kept([False, True, False]) * 2 == kept([True, True, True])


LAST = torch.channels_last


def laid(last: bool, *shape: int) -> Tensor:
    empty = fake(*shape)
    return empty.contiguous(memory_format=LAST) if last else empty


@pytest.mark.parametrize(
    ("image_last", "gradient_last", "forward", "backward"),
    [
        # An image of 32 MiB and a result of 64, and their kernels' peaks beside results, as measured.
        (False, False, 64, 96),
        (False, True, 64, 160),
        (True, True, 0, 0),
        (True, False, 0, 64),
    ],
)
def test_convolutions_copy_what_is_not_laid_out_as_they_compute(
    image_last: bool, gradient_last: bool, forward: int, backward: int
):
    kernels, some = CpuKernels(2), ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    image, weight = laid(image_last, 256, 32, 32, 32), laid(image_last, 64, 32, 3, 3)
    result = laid(image_last, 256, 64, 32, 32)
    gradient = laid(gradient_last, 256, 64, 32, 32)
    made = kernels.scratch(_aten.convolution.default, (image, weight, None, *some), result)
    assert made / 2**20 == pytest.approx(forward, abs=0.2)
    args = (gradient, image, weight, None, *some, [True, True, False])
    made = kernels.scratch(_aten.convolution_backward.default, args, None)
    assert made / 2**20 == pytest.approx(backward, abs=0.2)


def test_a_weight_whose_channels_lie_last_has_its_gradient_twice():
    image, weight = fake(16, 512, 4, 4), fake(512, 512, 3, 3).contiguous(memory_format=LAST)
    image = image.contiguous(memory_format=LAST)
    args = (image, image, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    args = (*args, [True, True, False])
    made = CpuKernels(2).scratch(_aten.convolution_backward.default, args, None)
    assert made == 2 * weight.numel() * 4  # measured: 17.7 MiB


@pytest.mark.parametrize(("image_last", "copied"), [(False, 0), (True, 48)])
def test_pooling_backward_copies_where_layouts_differ(image_last: bool, copied: int):
    image, gradient = fake(256, 32, 32, 32), fake(256, 32, 16, 16)
    indices = fake(256, 32, 16, 16, dtype=torch.int64)
    if image_last:
        image = image.contiguous(memory_format=LAST)
    pairs = [2, 2], [2, 2], [0, 0], [1, 1]
    args = (gradient, image, *pairs, False, indices)
    backward = _aten.max_pool2d_with_indices_backward.default
    assert CpuKernels(2).scratch(backward, args, image) == copied << 20


@pytest.mark.parametrize(
    ("image_last", "gradient_last", "forward", "backward"),
    [(False, False, 0, 0), (True, True, 1, 0), (True, False, 1, 64), (False, True, 0, 64)],
)
def test_on_cuda_weights_and_gradients_are_laid_out_as_images_are(
    image_last: bool, gradient_last: bool, forward: int, backward: int
):
    kernels, some = CudaKernels(1 << 17), ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    image, weight = laid(image_last, 256, 32, 32, 32), fake(512, 32, 4, 4)  # of 1 MiB
    gradient = laid(gradient_last, 128, 128, 32, 32)  # of 64

    def taken(op: Any, *args: Any) -> int:
        return kernels.scratch(op, args, None) + sum(kernels.copies(op, args))

    assert taken(_aten.convolution.default, image, weight, None, *some) == forward << 20
    args = (_aten.convolution_backward.default, gradient, image, weight, None, *some)
    assert taken(*args, [True, True, False]) == backward << 20
    # The copy of a weight is gone when its gradient is made, if there is one.
    assert taken(*args, [True, False, False]) == (backward + forward) << 20


@pytest.mark.parametrize("last", [False, True])
def test_on_cuda_pooling_backward_copies_its_gradient_where_layouts_differ(last: bool):
    image, gradient = laid(True, 8, 32, 32, 32), laid(last, 8, 32, 16, 16)
    args = (gradient, image, [2, 2], [2, 2], [0, 0], [1, 1], False, fake(8, 32, 16, 16))
    backward = _aten.max_pool2d_with_indices_backward.default
    assert CudaKernels(1 << 17).scratch(backward, args, image) == (0 if last else gradient.nbytes)


def test_a_number_by_a_rule_is_copied_as_the_number():
    made = Scratch(lambda rows: 4 * rows, 3)
    copied = copy.deepcopy({"bytes": made})["bytes"]
    assert type(copied) is int
    assert copied == made == 12


def test_a_cpu_that_packs_twice_as_deep_keeps_twice_as_much_of_deep_products():
    few, many = (CpuKernels(1, depth) for depth in (192, 384))
    for kernels in (few, many):
        multiply(kernels, 4096, 1024, 256)
    assert few.products.kept_bytes == (8 << 10) + 192 * 4 * (256 + 384)
    assert many.products.kept_bytes == (12 << 10) + 384 * 4 * (256 + 384)


@pytest.mark.parametrize(
    ("itemsize", "width", "row"), [(4, 80, 128), (4, 300, 304), (2, 300, 320), (4, 256, 272)]
)
def test_an_lstm_from_the_end_to_the_beginning_keeps_its_inputs_and_outputs_too(
    itemsize: int, width: int, row: int
):
    dtype = {4: torch.float32, 2: torch.bfloat16}[itemsize]
    inputs = torch.empty(10, 6, width, dtype=dtype, device="meta")
    weight, recurrent = (torch.empty(512, n, dtype=dtype, device="meta") for n in (width, 128))

    def kept(turned: bool) -> int:
        args = (inputs, weight, recurrent, None, None, None, None, turned)
        results = (None, None, None, torch.empty(1, device="meta"))
        found = CpuKernels(2).workspace(_aten.mkldnn_rnn_layer.default, args, results)
        assert found is not None
        return found[1]

    # Two of rows of whole cache lines, no multiple of 256 numbers, and the state before the first.
    assert kept(True) - kept(False) == 2 * (10 + 1) * 6 * row * itemsize


@pytest.mark.parametrize("has_tiles", [False, True])
def test_on_a_processor_with_tiles_kernels_in_bfloat16_keep_more(has_tiles: bool):
    processor = Processor(tiles=has_tiles)
    kept = {
        (rows, dtype): halves(CpuKernels(2, processor=processor), rows, 1024, 1024, dtype)[1]
        for rows in (64, 1024, 1000)  # the right matrix as it is
        for dtype in HALF
    }
    more = {key: size - kept[64, torch.float16] for key, size in kept.items()}
    # Read off resident memory: 868, 800 and 940 KiB, where others keep 590.
    assert more[64, torch.bfloat16] == has_tiles * 350 * KIB
    assert more[1024, torch.bfloat16] == has_tiles * 210 * KIB
    assert more[1000, torch.bfloat16] == has_tiles * 340 * KIB
    assert more[1024, torch.float16] == 0


def convolved(
    processor: Processor,
    image: Tensor,
    channels: int,
    kernel: int,
    *,
    stride: int = 1,
    padding: int = 0,
    transposed: bool = False,
    threads: int = 2,
) -> tuple[float, float]:
    """MiB that a convolution takes beside its results, and that its gradients do."""
    given, dtype = image.size(1), image.dtype
    sides = (given, channels) if transposed else (channels, given)
    weight = fake(*sides, kernel, kernel, dtype=dtype)
    some = ([stride] * 2, [padding] * 2, [1, 1], transposed, [0, 0], 1)
    result = _aten.convolution.default(image, weight, None, *some)
    kernels = CpuKernels(threads, processor=processor)
    forward = kernels.scratch(_aten.convolution.default, (image, weight, None, *some), result)
    args = (result, image, weight, None, *some, [True, True, False])
    backward = kernels.scratch(_aten.convolution_backward.default, args, None)
    return forward / 2**20, backward / 2**20


@pytest.mark.parametrize(
    ("channels", "side", "made", "kernel", "more", "forward", "backward"),
    [  # of 64 images; MiB beside results as measured on an EPYC with AVX2 and two threads
        (24, 32, 24, 3, {"padding": 1}, 5.8, 11.8),  # three blocks of eight channels
        (64, 32, 10, 3, {"padding": 1}, 17.3, 19.8),
        (20, 32, 64, 3, {"padding": 1}, 15.8, 21.8),
        (64, 16, 128, 2, {"stride": 2, "transposed": True}, 63.8, 35.9),
        (64, 16, 64, 3, {"padding": 1, "transposed": True}, 3.9, 7.8),
        (256, 2, 256, 3, {"padding": 1}, 2.4, 4.3),  # the kernel is larger than the image
        (256, 2, 256, 3, {"padding": 1, "threads": 1}, 2.3, 2.1),
        (256, 4, 256, 3, {"padding": 1}, 3.0, 2.1),
    ],
)
def test_convolutions_on_narrow_vectors(
    channels: int,
    side: int,
    made: int,
    kernel: int,
    more: dict[str, Any],
    forward: float,
    backward: float,
):
    found = convolved(NARROW, fake(64, channels, side, side), made, kernel, **more)
    assert found == pytest.approx((forward, backward), abs=0.3)


def test_a_weight_whose_gradient_is_a_product_has_its_images_unfolded_by_each_thread():
    _, backward = convolved(NARROW, fake(16, 64, 32, 32), 64, 14)
    assert backward == pytest.approx(40.6, abs=0.3)  # measured


@pytest.mark.parametrize(
    ("image", "weight", "stride", "padding", "dilation", "groups", "expected"),
    [  # by what oneDNN 3.12 printed on an EPYC with AVX2
        ((4, 16, 8, 16, 16), (32, 16, 3, 3, 3), 1, (0, 0, 0), 1, 1, False),
        ((4, 16, 8, 16, 16), (32, 16, 3, 3, 3), 1, (1, 0, 0), 1, 1, True),
        ((4, 16, 8, 16, 16), (32, 16, 3, 3, 3), 1, (0, 1, 1), 1, 1, False),
        ((4, 16, 20, 20), (32, 16, 13, 13), 1, (0, 0), 1, 1, False),
        ((4, 16, 20, 20), (32, 16, 1, 14), 1, (0, 0), 1, 1, True),
        ((4, 16, 20, 20), (32, 16, 14, 1), 1, (0, 0), 1, 1, False),
        ((4, 1, 16000), (32, 1, 80), 4, (0,), 1, 1, True),
        ((4, 32, 995), (64, 32, 3), 1, (0,), 1, 1, False),
        ((4, 32, 20, 20), (32, 1, 3, 3), 1, (1, 1), 1, 32, False),
        ((4, 32, 20, 20), (32, 8, 3, 3), 1, (1, 1), 1, 4, False),
        ((4, 10, 20, 20), (32, 5, 3, 3), 1, (1, 1), 1, 2, True),
        ((4, 32, 20, 20), (32, 32, 3, 3), 1, (2, 2), 2, 1, True),
        ((4, 16, 20, 2), (32, 16, 3, 3), 1, (1, 1), 1, 1, False),
        ((4, 16, 2, 20), (32, 16, 3, 3), 1, (1, 1), 1, 1, True),
        ((4, 16, 20, 20), (32, 16, 3, 3), 1, (3, 3), 1, 1, True),
        ((4, 16, 20, 20), (32, 16, 1, 1), 1, (1, 1), 1, 1, True),
        ((8, 64, 8, 8), (64, 64, 3, 3), 2, (1, 1), 1, 1, False),
    ],
)
def test_which_gradients_of_weights_are_products_on_narrow_vectors(
    image: tuple[int, ...],
    weight: tuple[int, ...],
    stride: int,
    padding: tuple[int, ...],
    dilation: int,
    groups: int,
    expected: bool,
):
    num = len(padding)
    some = ([stride] * num, list(padding), [dilation] * num, False, [0] * num, groups)
    given, kernel = fake(*image), fake(*weight)
    args = (given, kernel, None, *some)
    found = Convolved.forward(args, _aten.convolution.default(*args))
    assert found.is_product(NARROW) == expected
    assert not found.is_product(Processor())


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(
    ("num", "made", "kernel", "more", "forward", "backward"),
    [  # as above; of 64 channels, 32 by 32
        (64, 64, 3, {"padding": 1}, 71.9, 71.9),
        (8, 64, 3, {"padding": 1}, 8.9, 8.9),
        (64, 64, 3, {"padding": 1, "stride": 2}, 17.8, 17.8),
        (64, 64, 1, {}, 0.0, 0.6),
        (64, 64, 1, {"stride": 2}, 1.9, 1.9),
        (64, 128, 2, {"stride": 2, "transposed": True}, 64.9, 0.8),
    ],
)
def test_convolutions_in_half_precision_without_onednn_unfold_their_images(
    dtype: torch.dtype,
    num: int,
    made: int,
    kernel: int,
    more: dict[str, Any],
    forward: float,
    backward: float,
):
    found = convolved(NARROW, fake(num, 64, 32, 32, dtype=dtype), made, kernel, **more)
    assert found == pytest.approx((forward, backward), abs=0.7)


@pytest.mark.parametrize(
    ("num", "channels", "side", "made", "more", "forward", "backward"),
    [  # of 3 x 3; MiB beside results as measured on an EPYC with AVX-512 and two threads
        (12, 32, 28, 32, {}, 20.6, 20.5),
        (12, 32, 28, 64, {"stride": 2}, 5.0, 5.0),
        (2, 32, 96, 32, {}, 40.2, 40.2),
        (12, 32, 28, 32, {"transposed": True}, 20.5, 1.6),
        (12, 16, 28, 64, {"transposed": True}, 41.2, 3.4),
    ],
)
def test_convolutions_in_float64_unfold_their_images(
    num: int,
    channels: int,
    side: int,
    made: int,
    more: dict[str, Any],
    forward: float,
    backward: float,
):
    images = fake(num, channels, side, side, dtype=torch.float64)
    found = convolved(Processor(), images, made, 3, padding=1, **more)
    assert found == pytest.approx((forward, backward), abs=0.4)


def test_a_transposed_convolution_in_half_precision_unfolds_all_images():
    images = fake(12, 16, 28, 28, dtype=torch.bfloat16)
    found = convolved(WITHOUT_HALVES, images, 64, 3, padding=1, transposed=True)
    assert found == pytest.approx((11.6, 0.8), abs=0.5)  # measured


@pytest.mark.parametrize(
    ("image", "weight", "padding", "dilation", "groups", "forward", "backward"),
    [
        ((16, 32, 48, 48), (32, 32, 3, 3), 2, 2, 1, 1.3, 3.4),
        ((16, 32, 48, 48), (32, 8, 3, 3), 1, 1, 4, 5.4, 5.9),
        ((16, 32, 48, 48), (32, 1, 3, 3), 1, 1, 32, 1.5, 1.4),
        ((8, 16, 8, 16, 16), (32, 16, 3, 3, 3), 1, 1, 1, 13.3, 16.7),
        ((32, 32, 995), (64, 32, 3), 1, 1, 1, 5.7, 5.6),
    ],
)
def test_other_convolutions_that_are_unfolded(
    image: tuple[int, ...],
    weight: tuple[int, ...],
    padding: int,
    dilation: int,
    groups: int,
    forward: float,
    backward: float,
):
    """MiB as measured; groups, which are put together in the end, are told up to 2 MiB too high."""
    num = len(image) - 2
    some = ([1] * num, [padding] * num, [dilation] * num, False, [0] * num, groups)
    given, kernel = (fake(*shape, dtype=torch.bfloat16) for shape in (image, weight))
    args = (given, kernel, None, *some)
    made = _aten.convolution.default(*args)
    kernels = CpuKernels(2, processor=NARROW)
    found = kernels.scratch(_aten.convolution.default, args, made) / 2**20
    assert -0.1 < found - forward < 2
    args = (made, *args, [True, True, False])
    found = kernels.scratch(_aten.convolution_backward.default, args, None) / 2**20
    assert -0.1 < found - backward < 2


def test_an_lstm_in_half_precision_that_torch_has_not_is_told():
    state = fake(4, 3, 16, dtype=torch.bfloat16)
    with pytest.raises(InputError, match=r"LSTM.*bfloat16.*use precision fp32"):
        CpuKernels(2, processor=NARROW).scratch(_aten.mkldnn_rnn_layer.default, (state,), None)
