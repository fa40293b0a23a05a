"""Aspect-ratio buckets: their sizes, the bucket of an image, and their effect on an estimate."""

from __future__ import annotations

from pathlib import Path

import pytest
from model_configs import write_config

from ckpt_ft.errors import UserError
from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.workloads.load import load
from ckpt_ft.workloads.sample_sizes import nearest, read_buckets, sizes_of

UNET = {
    "_class_name": "UNet2DConditionModel", "in_channels": 4, "out_channels": 4, "sample_size": 16,
    "block_out_channels": [16, 32], "layers_per_block": 1, "cross_attention_dim": 16, "attention_head_dim": 4,
    "norm_num_groups": 8, "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
}  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> str:
    return write_config(tmp_path, UNET)


def test_automatic_buckets_equal_those_of_sdxl() -> None:
    """No bucket has more pixels than the square, and each side is a multiple of the step."""
    wide = [(1024, 1024), (960, 1088), (896, 1152), (832, 1216), (768, 1344)]
    assert set(sizes_of("auto", 1024, 16)) == {*wide, *((width, height) for height, width in wide)}
    for resolution, token in ((32, 8), (96, 32), (512, 16)):
        sizes = sizes_of("auto", resolution, token)
        assert (resolution, resolution) in sizes
        assert all(h * w <= resolution**2 and h % token == w % token == 0 and h <= 2 * w <= 4 * h for h, w in sizes)
    assert sizes_of(None, 64, 8) == [(64, 64)]


def test_image_gets_the_bucket_of_the_nearest_aspect_ratio() -> None:
    sizes = read_buckets("64,64; 48,80;80,48 ;128,128")
    shapes = [(100, 100), (300, 310), (50, 90), (500, 290), (10, 9)]
    assert [sizes[nearest(shape, sizes)] for shape in shapes] == [(128, 128), (128, 128), (48, 80), (80, 48), (64, 64)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("64x64", "'64x64' is no height,width in pixels, each from 8 to 16384; give '1024,1024;832,1216' for example"),
        ("64,64;", "'' is no height,width"),
        ("64,0", "'64,0' is no height,width"),
        ("64,60", "64,60 is not in whole steps of 8 pixels, which this model needs; 64,64 is"),
    ],
)
def test_invalid_bucket_is_refused(text: str, says: str) -> None:
    with pytest.raises(UserError) as refused:
        sizes_of(text, 64, 8)
    assert says in str(refused.value)


@pytest.mark.slow
def test_peak_is_of_the_largest_bucket_and_time_of_the_usual_one(config: str) -> None:
    both, square = (
        load(TrainingSpec.of(config, buckets="64,64;48,80;128,128"), "t4"),
        load(TrainingSpec.of(config, resolution=128), "t4"),
    )
    assert both.trace(2).peak_allocated == square.trace(2).peak_allocated
    assert both.shape == {"resolution": 128, "height": 128, "width": 128}
    assert "buckets: a batch of 128x128 pixels, the largest of 3" in both.notes
    assert both.lengths is not None
    assert str(both.lengths) == "3 rows of 3840 to 16384 pixels, 8107 on average"
    shapes = [both.make_batch(2, length)["sample"].shape for length in (None, both.lengths.padded(2), 3840)]
    assert shapes == [(2, 4, 16, 16), (2, 4, 8, 8), (2, 4, 6, 10)]


def test_buckets_of_a_model_without_images_are_refused() -> None:
    with pytest.raises(UserError, match="hold no images in buckets"):
        load(TrainingSpec.of("microsoft/resnet-50", buckets="auto"), "t4")
