"""Seconds of single kernels: rooflines computed by hand, tiles and waves, caches, and instructions per element."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from ckpt_ft.memory.cost import kernels, op_work
from ckpt_ft.memory.cost.kernels import (
    ACROSS,
    CAST,
    DIRECT,
    EXACT,
    INDEXED,
    KERNEL_GAP,
    KERNEL_RAMP,
    STRIDED,
    UNEVEN,
    WINDOW,
    WINOGRAD,
    matmul_seconds,
    winograd_seconds,
)
from ckpt_ft.memory.gpus import GPU, find_gpu
from ckpt_ft.memory.record.events import Op

aten, E4M3 = torch.ops.aten, torch.float8_e4m3fn
# 100 SMs, 100 TFLOP/s in half precision, 10 in fp32 (20 as TF32), 1 TB/s; each rate is reached in full; no cache.
ROUND = GPU("round", (8, 0), 100, 2**34, 0, 1e12, 10e12, 20e12, 100e12, 100e12, 0, 1.0, 1.0, 1.0)
CACHED = replace(ROUND, l2=40 * 10**6)


def busy(name="aten.mm.default", flops=0, nbytes=0, dtype="float16", kernels_=1, shape=(), gpu=ROUND):
    """Returns the seconds of a kernel without its launch and drain."""
    op = Op(name, flops, nbytes, dtype, "forward", "", 0, kernels_, shape=shape)
    return kernels.device_seconds(op, gpu) - kernels_ * (KERNEL_RAMP + KERNEL_GAP)


def meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def test_elementwise_kernel_is_limited_by_memory_traffic():
    assert busy("aten.add.Tensor", nbytes=10**9) == pytest.approx(1e-3)


def test_data_that_fits_in_the_cache_is_faster():
    cached = 20 * 100 * CACHED.clock  # bytes a second
    assert busy("aten.add.Tensor", nbytes=20 * 10**6, gpu=CACHED) == pytest.approx(20e6 / cached)
    assert busy("aten.add.Tensor", nbytes=40 * 10**6, gpu=CACHED) == pytest.approx(20e6 / cached + 20e6 / 1e12)
    assert busy("aten.add.Tensor", nbytes=60 * 10**6, gpu=CACHED) == pytest.approx(60e6 / 1e12)


def test_norms_with_statistics_read_their_input_twice():
    # reads x twice and writes y
    assert busy("aten.native_batch_norm.default", nbytes=2 * 10**9) == pytest.approx(3e-3)
    assert busy("aten.native_batch_norm_backward.default", nbytes=3 * 10**9) == pytest.approx(5e-3)


def test_rows_that_exceed_the_cache_are_read_again():
    """Softmax reads a row three times: from memory if the rows in progress exceed the cache."""
    short, long = (2**20, 2**10), (2**10, 2**20)  # (rows, bytes of a row): 1 GiB each
    moved = 2 * 2**30
    assert busy("aten._softmax.default", nbytes=moved, shape=short, gpu=CACHED) == pytest.approx(moved / 1e12)
    assert busy("aten._softmax.default", nbytes=moved, shape=long, gpu=CACHED) == pytest.approx(2 * moved / 1e12)
    backward = busy("aten._log_softmax_backward_data.default", nbytes=moved, shape=long, gpu=CACHED)
    assert backward == pytest.approx(1.5 * moved / 1e12)
    assert busy("aten.native_layer_norm.default", nbytes=moved, shape=long, gpu=CACHED) == pytest.approx(
        1.5 * moved / 1e12
    )


def test_norm_processes_a_row_in_whole_steps():
    """Rows of 768 fp32 take as long as those of 1,024: two steps of 512, at 10 bytes per cycle and SM."""
    name, rows = "aten.native_layer_norm.default", 2**16
    narrow, wide = (busy(name, 0, 2 * rows * 4 * n, "float32", shape=(rows, 4 * n), gpu=CACHED) for n in (768, 1024))
    assert narrow == wide == pytest.approx(2 * rows * 4096 / (10 * 100 * CACHED.clock))
    half = busy(name, 0, 2 * rows * 2 * 768, "float16", shape=(rows, 2 * 768), gpu=CACHED)
    assert half == pytest.approx(wide / 2)
    of_a_head = busy("aten._fused_rms_norm.default", 0, 2 * rows * 256, "bfloat16", shape=(rows, 256), gpu=ROUND)
    assert of_a_head == pytest.approx(busy("aten.add.Tensor", 0, 2 * rows * 256 + rows * 256))


@pytest.mark.parametrize(("how", "cycles"), [(CAST, 0.9), (STRIDED, 0.9), (INDEXED, 2.0)])
def test_elements_that_are_not_vectorized_cost_cycles(how, cycles):
    elements = 10**9
    found = busy("aten.mul.Tensor", nbytes=10**6, shape=(elements, how))
    assert found == pytest.approx(elements * cycles / (100 * ROUND.clock))


def test_which_kernels_are_not_vectorized():
    x, row = meta(64, 32), meta(32)
    shape = lambda func, args, out: op_work.measure(func, args, {}, out).shape  # noqa: E731
    assert shape(aten.mul.Tensor, (x, x), x) == ()
    assert shape(aten.mul.Tensor, (x, 2.0), x) == ()
    assert shape(aten.mul.Tensor, (x, row), x) == (2048, STRIDED)
    assert shape(aten.mul.Tensor, (x.t(), x.t()), x.t()) == ()  # both have the same strides
    assert shape(aten.clone.default, (x.t(),), meta(32, 64)) == (2048, STRIDED)
    assert shape(aten._to_copy.default, (meta(64, 32, dtype=torch.bfloat16),), x) == (2048, CAST)
    # narrowing has a vectorized kernel
    assert shape(aten._to_copy.default, (x,), meta(64, 32, dtype=torch.bfloat16)) == ()
    assert shape(aten.embedding.default, (meta(1000, 32), meta(64)), x) == (2048, INDEXED)


def test_bytes_count_each_stored_element_once():
    x = meta(64, 32)
    spread = torch.empty(1, 32, device="meta").expand(64, 32)
    assert op_work.measure(aten.add.Tensor, (x, spread), {}, x).nbytes == (2 * 64 * 32 + 32) * 4
    lists = ([x, x], [x, x])
    assert (
        op_work.measure(aten._foreach_add_.List, lists, {}, None).nbytes == 3 * 2 * x.nbytes
    )  # an in-place list operator returns nothing
    assert op_work.measure(aten._foreach_add.List, lists, {}, [x, x]).nbytes == 3 * 2 * x.nbytes
    labels = meta(64, dtype=torch.long)
    loss = op_work.measure(aten.nll_loss_forward.default, (x, labels, None, 1, -100), {}, (meta(), meta()))
    assert (loss.nbytes, loss.shape) == (2 * 2 * 4, (64,))  # one logit per row, not all of them


def test_large_matmul_is_limited_by_arithmetic():
    edge = 25600
    shape = (1, edge, edge, edge, 0)
    assert busy(flops=2 * edge**3, shape=shape) == pytest.approx(2 * edge**3 / 100e12, rel=2e-3)
    # without a shape, the full rate is assumed
    assert busy(flops=2 * edge**3) == pytest.approx(2 * edge**3 / 100e12)


def test_small_matmul_leaves_sms_idle():
    """10 x 10 tiles of 128 x 128 fill 100 SMs once; the next row of tiles needs a second wave."""
    one, two = (matmul_seconds((1, rows, 1280, 4096, 0), 10e12, False, ROUND) for rows in (1280, 1408))
    assert one == pytest.approx(2 * 1280 * 1280 * 4096 / 10e12, rel=1e-2)
    assert 1.1 < two / one <= 2.0
    assert matmul_seconds((1, 1280, 1280, 65536, 0), 10e12, False, ROUND) == pytest.approx(16 * one, rel=1e-2)


def test_skinny_matmul_is_slower_than_a_cube():
    """LoRA's 4096 x 32 x 4096 has the flops of a cube of 812 and takes longer, because its tiles are half empty."""
    skinny = matmul_seconds((1, 4096, 32, 4096, 0), 100e12, True, ROUND)
    cube = matmul_seconds((1, 812, 812, 812, 0), 100e12, True, ROUND)
    assert skinny > 1.3 * cube


def test_split_k_uses_more_sms():
    """A result of one tile would occupy one SM for 21 ms; four small tiles in 16 parts occupy 64 SMs."""
    alone = 2 * 128 * 128 * 65536 / (10e12 / 100)
    loads = 1 + 8 * (1 / 64 + 1 / 64 - 1 / 64)
    found = matmul_seconds((1, 128, 128, 65536, 0), 10e12, False, ROUND)
    assert found == pytest.approx(alone / 64 * loads, rel=0.02)


def test_small_tiles_cost_more_with_less_shared_memory_bandwidth():
    """A T4, and SMs with 128 lanes, have half the bytes per lane; the latter also have a tile of 256 x 128."""

    def relative(arch, high, wide):
        """Returns the seconds of one such tile on each SM over the seconds at the full rate."""
        shape = (100, high, wide, 65536, 0)
        return matmul_seconds(shape, 10e12, False, replace(ROUND, arch=arch)) / (2 * high * wide * 65536 / 1e11)

    assert relative((7, 0), 128, 128) == pytest.approx(1, rel=1e-2)
    assert relative((7, 0), 32, 32) == pytest.approx(1 + 8 * (2 / 32 - 2 / 128), rel=2e-2)
    assert relative((7, 5), 32, 32) == pytest.approx(1 + 16 * (2 / 32 - 2 / 128), rel=2e-2)
    assert relative((9, 0), 128, 128) == pytest.approx(1 + 16 * (1 / 128 - 1 / 256), rel=1e-2)


def test_power_cap_is_shared_by_the_sms_in_use():
    """Under a cap to half the clock, 50 of 100 SMs run at the full clock, in half the time of all 100."""
    half, whole = (matmul_seconds((1, 1280, 128 * n, 65536, 0), 10e12, False, ROUND, 0.5) for n in (5, 10))
    assert half / whole == pytest.approx(0.5, rel=1e-2)
    tail = [matmul_seconds((1, 1280, 128 * 11, 65536, 0), 10e12, False, ROUND, power) for power in (0.5, 1.0)]
    assert tail[0] / whole == pytest.approx(1.1, rel=1e-2)  # no second wave
    assert tail[1] / whole > 1.12


def test_ampere_has_one_tile_size_for_sums_across_rows():
    """1,024 x 1,024 has 64 tiles of 128 x 128, which leave 44 of an A100's SMs idle."""
    gpu = replace(ROUND, arch=(8, 0), sms=108)
    across, along = (matmul_seconds((1, 1024, 1024, 1024, flag), 18e12, False, gpu) for flag in (ACROSS, 0))
    assert across > 1.2 * along
    assert across == pytest.approx(2 * 128 * 128 * 1024 / (18e12 / 108), rel=0.05)


def test_part_of_the_stores_does_not_overlap_arithmetic():
    """Attention scores have 64 terms per stored element. An SM with twice the lanes hides less of the stores."""
    shape, stored = (128, 1024, 1024, 64, 0), 128 * 1024 * 1024 * 4 / 1e12
    arithmetic = 128 * 8 * 8 / 100 * (2 * 128 * 128 * 64 / 1e11 + 0.5e-6)
    found = matmul_seconds(shape, 10e12, False, ROUND)
    assert found == pytest.approx(arithmetic + 0.3 * stored, rel=1e-2)
    wide = matmul_seconds(shape, 10e12, False, replace(ROUND, arch=(8, 9)))
    assert wide == pytest.approx(arithmetic * (1 + 16 * (1 / 128 - 1 / 256)) + 0.65 * stored, rel=2e-2)


def test_sums_of_8_bit_products_take_longer_without_fast_accumulation():
    """1.15 times as long on Hopper; the rate is fp8's own, which is measured below bf16's share on an H200."""
    a, b, scale = meta(8192, 8192).to(E4M3), meta(8192, 8192).to(E4M3).t(), meta()
    fast, exact = (
        op_work.measure(aten._scaled_mm.default, (a, b, scale, scale, *more), {}, meta(8192, 8192))
        for more in ((None, None, torch.bfloat16, True), (None, None, torch.bfloat16))
    )
    assert (fast.shape, exact.shape) == ((1, 8192, 8192, 8192, 0), (1, 8192, 8192, 8192, EXACT))
    for card, ratio in (("h200", 1.15), ("b200", 1.0)):
        gpu = find_gpu(card)
        seconds = [
            busy("aten._scaled_mm.default", work.flops, work.nbytes, work.dtype, 1, work.shape, gpu)
            for work in (fast, exact)
        ]
        assert seconds[1] / seconds[0] == pytest.approx(ratio, rel=5e-3)
    assert find_gpu("h200").matmul_rate("float8_e4m3fn") == pytest.approx(0.73 * 1979e12)
    assert find_gpu("l4").matmul_rate("float8_e5m2") == pytest.approx(0.47 * 242e12)  # not measured: that of bf16


def test_unaligned_rows_are_slower():
    even, uneven = ((1, 8192, 8192, 8192, flag) for flag in (0, UNEVEN))
    ratio = matmul_seconds(uneven, 100e12, True, ROUND) / matmul_seconds(even, 100e12, True, ROUND)
    assert ratio == pytest.approx(1 / 0.6, rel=1e-2)
    odd = op_work.measure(
        aten.mm.default, (meta(64, 32, dtype=torch.half), meta(32, 50257, dtype=torch.half)), {}, None
    )
    assert odd.shape == (1, 64, 50257, 32, UNEVEN + ACROSS)
    t = op_work.measure(aten.mm.default, (meta(64, 32), meta(50257, 32).t()), {}, None)
    assert t.shape == (1, 64, 50257, 32, 0)  # in memory order its rows have 128 bytes


def test_operators_that_may_use_tf32_have_that_dtype():
    a, images, weight = meta(64, 64), meta(1, 3, 8, 8), meta(4, 3, 1, 1)
    convolve = (images, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)

    def dtypes():
        mm = op_work.measure(aten.mm.default, (a, a), {}, a)
        return mm.dtype, op_work.measure(aten.convolution.default, convolve, {}, meta(1, 4, 8, 8)).dtype

    assert dtypes() == ("float32", "tf32")  # torch's defaults
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        assert dtypes() == ("tf32", "tf32")
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    t4 = find_gpu("t4")  # it has no TF32
    same = [busy(flops=10**12, dtype=dtype, gpu=t4) for dtype in ("float32", "tf32")]
    assert same[0] == same[1]


def test_complex_product_has_four_real_products():
    a, b = meta(64, 32, dtype=torch.complex64), meta(32, 16, dtype=torch.complex64)
    assert op_work.measure(aten.mm.default, (a, b), {}, meta(64, 16)).flops == 4 * 2 * 64 * 32 * 16


def test_convolutions_with_small_windows_use_winograd_in_fp32():
    args = (meta(32, 256, 14, 14), meta(256, 256, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    work = op_work.measure(aten.convolution.default, args, {}, meta(32, 256, 14, 14))
    images = 2 * 32 * 256 * 14 * 14 * 4
    assert work.shape == (1, 32 * 14 * 14, 256, 256 * 9, WINOGRAD, images)
    direct = matmul_seconds(work.shape[:5], 10e12, False, ROUND)
    assert 1.5 < direct / winograd_seconds(work.shape[:5], 10e12, ROUND) < 4
    strided = (*args[:3], [2, 2], *args[4:])
    assert op_work.measure(aten.convolution.default, strided, {}, meta(32, 256, 7, 7)).shape[4] == 0


@pytest.mark.parametrize("window", [1, 3])
def test_channels_first_images_are_transposed_for_tensor_cores(window):
    """cuDNN reads and writes channels-first images once more in each pass, and channels-last images not."""
    weight, image = meta(256, 256, window, window, dtype=torch.half), meta(32, 256, 14, 14, dtype=torch.half)
    last = image.to(memory_format=torch.channels_last)
    how = ([1, 1], [window // 2] * 2, [1, 1], False, [0, 0], 1)
    forward = [op_work.measure(aten.convolution.default, (x, weight, None, *how), {}, x) for x in (image, last)]
    args = [(x, x, weight, None, *how, [True, True, False]) for x in (image, last)]
    backward = [op_work.measure(aten.convolution_backward.default, a, {}, (a[1], weight, None)) for a in args]
    for works, passes in ((forward, 1), (backward, 2)):
        assert [work.shape[5] for work in works] == [passes * 2 * image.nbytes, 0]
        seconds = [busy("aten.convolution.default", work.flops, 0, "float16", shape=work.shape) for work in works]
        assert seconds[0] - seconds[1] == pytest.approx(2 * passes * 2 * image.nbytes / 1e12)


def test_convolution_is_slower_if_a_pixel_is_no_multiple_of_16_bytes():
    image, how = meta(8, 18, 64, 64, dtype=torch.half), ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    work = op_work.measure(aten.convolution.default, (image, meta(24, 18, 3, 3), None, *how), {}, meta(8, 24, 64, 64))
    assert work.shape[4] == WINOGRAD + UNEVEN


@pytest.mark.parametrize(
    ("groups", "width", "last", "direct"),
    [(32, 4, True, False), (64, 32, True, False), (32, 64, True, True), (8, 16, True, True), (8, 16, False, False)],
)
def test_which_grouped_convolutions_are_direct(groups, width, last, direct):
    """Direct ones use no tensor cores and reach 16 % of the fp32 rate."""
    image = meta(8, groups * width, 14, 14, dtype=torch.half)
    image = image.to(memory_format=torch.channels_last) if last else image
    weight, how = meta(groups * width, width, 3, 3, dtype=torch.half), ([1, 1], [1, 1], [1, 1], False, [0, 0], groups)
    work = op_work.measure(aten.convolution.default, (image, weight, None, *how), {}, image)
    seconds = busy("aten.convolution.default", work.flops, 0, "float16", shape=work.shape)
    assert bool(work.shape[4] & DIRECT) is direct
    assert (seconds == pytest.approx(work.flops / (0.16 * 10e12))) is direct


@pytest.mark.parametrize(("channels", "last", "times"), [(64, True, 1), (60, True, 5), (60, False, 1), (64, False, 1)])
def test_odd_channel_counts_are_read_element_by_element(channels, last, times):
    image = meta(8, channels, 28, 28, dtype=torch.half)
    given = image.to(memory_format=torch.channels_last) if last else image
    weight, how = meta(channels, 1, 3, 3, dtype=torch.half), ([1, 1], [1, 1], [1, 1], False, [0, 0], channels)
    work = op_work.measure(aten.convolution.default, (given, weight, None, *how), {}, image)
    assert work.shape == (times * 15 * image.numel(), WINDOW)
    args = (image, given, weight, None, *how, [True, True, False])
    backward = op_work.measure(aten.convolution_backward.default, args, {}, (given, weight, None))
    assert backward.shape == (2 * times * 15 * image.numel(), WINDOW)


@pytest.mark.parametrize(
    ("dtype", "window", "last", "times"),
    [
        (torch.half, 3, False, 2),  # cuDNN's kernel
        (torch.half, 7, False, 5 + 9),  # PyTorch's own kernel
        (torch.float32, 3, False, 5 + 9),
        (torch.float32, 7, True, 2),
    ],
)
def test_depthwise_convolution_counts_values_under_its_windows(dtype, window, last, times):
    """Each pixel counts the values under its window, once in forward and by the backward kernel's factor in backward.

    With 64 channels, a pixel of a 3 x 3 window takes as long as six values: 1.8 cycles of an SM.
    """
    pixels, pad = meta(8, 64, 28, 28, dtype=dtype), window // 2
    given = pixels.to(memory_format=torch.channels_last) if last else pixels
    weight, count = meta(64, 1, window, window, dtype=dtype), 8 * 64 * 28 * 28
    under = count * (6 + window**2)
    how = ([1, 1], [pad, pad], [1, 1], False, [0, 0], 64)
    work = op_work.measure(aten.convolution.default, (given, weight, None, *how), {}, pixels)
    assert (work.shape, work.flops) == ((under, WINDOW), 2 * count * window**2)
    seconds = busy("aten.convolution.default", work.flops, 0, shape=work.shape)
    assert seconds == pytest.approx(count * (1.8 + 0.12 * (window**2 - 9)) / (100 * ROUND.clock))
    masked = [True, True, False]
    args = (pixels, given, weight, None, *how, masked)
    backward = op_work.measure(aten.convolution_backward.default, args, {}, (given, weight, None))
    assert backward.shape == (times * under, WINDOW)


@pytest.mark.parametrize(
    ("name", "dtype", "rate"),
    [
        ("aten.mm.default", "bfloat16", 100e12),
        ("aten.mm.default", "float32", 10e12),
        ("aten.convolution_backward.default", "tf32", 20e12),
        ("aten.mm.default", "tf32", 20e12),
        ("aten._scaled_dot_product_flash_attention.default", "float16", 82e12),
        ("aten._scaled_dot_product_flash_attention_backward.default", "float16", 69e12),
        ("aten._scaled_dot_product_efficient_attention_backward.default", "float16", 33e12),
        ("aten._scaled_dot_product_efficient_attention.default", "float32", 6.5e12),
    ],
)
def test_rates_by_kind_of_op(name, dtype, rate):
    flops = 2 * 25600**3
    assert busy(name, flops, 0, dtype) == pytest.approx(flops / rate, rel=2e-3)


def test_attention_rate_by_head_size_and_gpu():
    name, flops = "aten._scaled_dot_product_flash_attention.default", 10**15
    wide, narrow = (busy(name, flops, shape=(64, 4096, 4096, head)) for head in (128, 64))
    assert wide / narrow == pytest.approx(0.88)
    hopper = replace(ROUND, arch=(9, 0))
    assert wide / busy(name, flops, shape=(64, 4096, 4096, 128), gpu=hopper) == pytest.approx(0.62)
    cudnn = busy(name.replace("flash", "cudnn"), flops, shape=(64, 4096, 4096, 128), gpu=hopper)
    assert wide == pytest.approx(cudnn)
    third = "flash_attn_3.attention.default"  # 648 and 595 TFLOP/s on an H100 (arXiv:2407.08608, figure 5)
    assert cudnn / busy(third, flops, shape=(64, 4096, 4096, 128), gpu=hopper) == pytest.approx(648 / 595, rel=0.01)
    assert wide == pytest.approx(busy(third, flops, shape=(64, 4096, 4096, 128)))


def test_attention_processes_whole_blocks():
    """Blocks have 64 queries and 64 keys. Published backward of 384 x 197 x 88 in fp32 on an A100: 2.335 ms."""
    name = "aten._scaled_dot_product_efficient_attention_backward.default"
    flops = 2 * 5 * 384 * 197 * 197 * 88
    short, whole = (busy(name, flops, shape=(384, n, n, 88)) for n in (197, 256))
    assert short / whole == pytest.approx((256 / 197) ** 2)
    assert busy(name, flops, dtype="float32", shape=(384, 197, 197, 88), gpu=find_gpu("a100-40gb")) == pytest.approx(
        2.335e-3, rel=0.08
    )


def test_fourier_transform_passes_over_its_data():
    given, real = meta(64, 256, 8192, dtype=torch.complex64), meta(64, 256)
    halves = lambda func, *args: op_work.measure(func, args, {}, given).shape  # noqa: E731
    assert halves(aten._fft_c2c.default, given, [1], 0, True) == (2,)
    assert halves(aten._fft_c2c.default, given, [1, 2], 2, False) == (2 * 4,)  # a long dimension, and scaling
    assert halves(aten._fft_c2c.default, given.transpose(0, 1), [1], 0, True) == (2 * 2,)  # the input is copied first
    assert halves(aten._fft_r2c.default, real, [1], 0, True) == (2,)
    assert halves(aten._fft_r2c.default, real, [1], 0, False) == (3,)  # the conjugate half
    work = op_work.measure(aten._fft_c2c.default, (given, [1, 2], 2, False), {}, given)
    found = busy("aten._fft_c2c.default", 0, work.nbytes, work.dtype, shape=work.shape)
    assert found == pytest.approx(4 * 2 * given.nbytes / 1e12)


def test_embedding_backward_sorts_gradients_by_row():
    """16,384 tokens, drawn uniformly from as many rows, use 63 % of them; a small number of tokens is not sorted."""
    rows, tokens = 16384, meta(16384, dtype=torch.long)
    backward = aten.embedding_dense_backward.default
    work = op_work.measure(backward, (meta(16384, 4096), tokens, rows, -1, False), {}, meta(rows, 4096))
    met = rows * (1 - math.exp(-1))
    assert work.shape == (round(4096 * (16384 / 2 + 2 * met)), INDEXED)
    assert (work.kernels, work.nbytes) == (34, rows * 4096 * 4)
    few = op_work.measure(backward, (meta(2048, 64), tokens[:2048], rows, -1, False), {}, meta(rows, 64))
    assert (few.kernels, few.shape) == (2, (2048 * 64, INDEXED))


def test_sort_passes_over_its_keys():
    """Each pass sorts by eight bits; one thread block sorts up to 4,096 keys alone."""
    long, short = meta(2**20, dtype=torch.long), meta(8, 4096)
    work = op_work.measure(aten.sort.default, (long,), {}, (long, long))
    assert (work.shape, work.kernels) == ((3 * 8,), 10)
    found = busy("aten.sort.default", 0, work.nbytes, "int64", work.kernels, work.shape)
    assert found == pytest.approx(12 * 3 * long.nbytes / 1e12)
    work = op_work.measure(aten.sort.stable, (short,), {"stable": True}, (short, short))
    assert (work.shape, work.kernels) == ((), 1)


def test_block_diagonal_matrix_is_written_block_by_block():
    blocks = [meta(4, 4)] * 768
    work = op_work.measure(aten.block_diag.default, (blocks,), {}, meta(3072, 3072))
    assert (work.kernels, work.nbytes) == (769, (3072 * 3072 + 768 * 16) * 4)


def test_sparse_sum_copies_the_dense_tensor_to_fp32():
    """For a dense tensor in half precision this moves 20 bytes per element."""
    dense, values = meta(64, 32, dtype=torch.bfloat16), meta(5)
    places = meta(2, 5, dtype=torch.long)
    sparse = torch.sparse_coo_tensor(places, values, (64, 32), device="meta", check_invariants=False)
    assert op_work.measure(aten.add_.Tensor, (dense, sparse), {}, dense).nbytes == 20 * 64 * 32
    assert op_work.measure(aten.add_.Tensor, (dense, dense), {}, dense).nbytes == 6 * 64 * 32


def test_nll_loss_runs_in_one_thread_block():
    assert busy("aten.nll_loss_forward.default", nbytes=100, shape=(8192,)) == pytest.approx(8192 / 32 * 0.75e-6)


def test_sustained_load_lowers_clock_and_rates():
    held = replace(ROUND, sustained=0.8)
    assert busy(flops=10**15, gpu=held) == pytest.approx(busy(flops=10**15) / 0.8, rel=1e-2)
    assert held.clock == pytest.approx(0.8 * ROUND.clock)
    assert find_gpu("h100-500w").matmul_rate("bfloat16") == pytest.approx(593e12, rel=1e-3)


def test_small_result_with_long_sums_is_split_over_the_sms():
    """A 4 x 4 weight gradient from 7 million tokens is split in 64 parts on 100 SMs; no split has 100 parts."""
    terms = 64 * 100_000
    seconds = matmul_seconds((1, 4, 4, terms, 0), 100e12, True, ROUND)
    one = 2 * 64 * 64 * 100_000 / (1e12 / (1 + 30 * (2 / 64 - 1 / 256 - 1 / 128)))
    assert seconds == pytest.approx(one + 1.5e-6 + 2 * 4 * 16 * 64 / 1e12)


def test_tile_with_few_terms_fills_its_pipeline_sooner():
    """Each element has 4 terms; the pipeline holds 128."""
    tiles = 100 * 1000
    seconds = matmul_seconds((1, 64 * tiles, 4, 4, 0), 100e12, True, ROUND)
    assert seconds < 0.2 * tiles / 100 * 1.5e-6
