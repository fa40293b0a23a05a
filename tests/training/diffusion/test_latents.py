"""The latent cache equals the encoders' results, and the order of batches is a function of the position."""

from __future__ import annotations

import copy
import json
from itertools import islice
from pathlib import Path

import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_unets import make_tiny_pipeline
from torch.utils.data import DataLoader, default_collate

from ckpt_ft.errors import WorkFailed
from ckpt_ft.training.diffusion.arguments import DiffusionModelArguments
from ckpt_ft.training.diffusion.data import EndlessBatches, FramedImages, cache_latents
from ckpt_ft.training.diffusion.encoders import Encoders, family_of
from ckpt_ft.training.images import ImageArguments, load_captioned


@pytest.fixture(scope="module", params=["sd1", "sdxl"])
def encoders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Encoders:
    path = tmp_path_factory.mktemp(request.param)
    make_tiny_pipeline(request.param, 0, (16,)).save_pretrained(path)
    args = DiffusionModelArguments(pretrained_model_name_or_path=str(path))
    return Encoders(args, family_of(args)[0], torch.device("cpu"), torch.float32)


def framed(rows: int = 10, **flags: bool) -> FramedImages:
    args = ImageArguments(max_train_samples=rows, **flags)
    return FramedImages(load_captioned(args, 32), [(32, 32)], args, seed=0)


def test_cached_latents_equal_the_encoders_results(encoders: Encoders, tmp_path: Path) -> None:
    images = framed()
    cached = cache_latents(images, encoders, tmp_path, batch_size=3)
    assert len(cached) == 10
    assert len(list(tmp_path.glob("*/*.safetensors"))) == 10
    for index in (0, 5, 9):
        expected = encoders.encode(default_collate([images[(0, index)]]))
        row = cached[(7, index)]  # of any epoch
        assert row.keys() == expected.keys()
        assert {"moments", "time_ids", "prompt_embeds"} <= row.keys()
        for name, value in row.items():
            torch.testing.assert_close(value, expected[name][0], rtol=1e-4, atol=1e-4)


def test_cache_is_continued_after_a_kill(encoders: Encoders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = framed()
    cache_latents(images, encoders, tmp_path, batch_size=4)
    directory = next(tmp_path.iterdir())
    fifth = directory / "0000005.safetensors"
    before = fifth.read_bytes()
    fifth.unlink()
    calls = []
    encode = encoders.encode
    monkeypatch.setattr(encoders, "encode", lambda batch: calls.append(len(batch["pixels"])) or encode(batch))
    cache_latents(images, encoders, tmp_path, batch_size=4)
    assert calls == [4]
    assert fifth.read_bytes() == before  # the whole batch is encoded again, because bits depend on it
    cache_latents(images, encoders, tmp_path, batch_size=4)
    assert calls == [4]


def test_ranks_encode_different_rows(encoders: Encoders, tmp_path: Path) -> None:
    images = framed()
    cache_latents(images, encoders, tmp_path, batch_size=4, rank=1, ranks=2)
    assert sorted(int(path.stem) for path in tmp_path.glob("*/*")) == [4, 5, 6, 7]
    cached = cache_latents(images, encoders, tmp_path, batch_size=4, rank=0, ranks=2)
    assert len(list(tmp_path.glob("*/*"))) == 10
    assert cached[(0, 9)]["moments"].shape == (16, 8, 8)


@pytest.mark.slow
def test_settings_that_change_the_latents_have_their_own_cache(
    encoders: Encoders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache_latents(framed(4), encoders, tmp_path, batch_size=4)
    cache_latents(framed(5), encoders, tmp_path, batch_size=4)
    assert len(list(tmp_path.iterdir())) == 2
    weight = next(encoders.vae.parameters())
    with torch.no_grad():
        weight.add_(1)
        cache_latents(framed(4), encoders, tmp_path, batch_size=4)
        weight.sub_(1)
    assert len(list(tmp_path.iterdir())) == 3
    other_words = copy.deepcopy(encoders.tokenizers)
    vocabulary = json.loads(other_words[0].backend_tokenizer.to_str())
    ids = vocabulary["model"]["vocab"]
    ids["red</w>"], ids["blue</w>"] = ids["blue</w>"], ids["red</w>"]
    other_words[0]._tokenizer = tokenizers.Tokenizer.from_str(json.dumps(vocabulary))
    with monkeypatch.context() as patch:
        patch.setattr(encoders, "tokenizers", other_words)
        cache_latents(framed(4), encoders, tmp_path, batch_size=4)
    assert len(list(tmp_path.iterdir())) == 4
    cache_latents(framed(4), encoders, tmp_path, batch_size=4)
    assert len(list(tmp_path.iterdir())) == 4


def test_random_framing_depends_on_the_epoch(encoders: Encoders) -> None:
    images = framed(4, random_flip=True)
    flipped = [not torch.equal(images[(epoch, 0)]["pixels"], images[(0, 0)]["pixels"]) for epoch in range(12)]
    assert 0 < sum(flipped) < 12
    assert torch.equal(images[(3, 2)]["pixels"], images[(3, 2)]["pixels"])


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 9), st.integers(1, 4), st.integers(1, 3), st.integers(0, 12))
def test_batches_follow_from_their_position(rows: int, batch: int, ranks: int, start: int) -> None:
    def batches(rank: int, start: int, count: int) -> list[list[tuple[int, int]]]:
        return list(islice(EndlessBatches([range(rows)], batch, 0, rank, ranks, start), count))

    count = 3 * rows
    taken = [batches(rank, 0, count) for rank in range(ranks)]
    assert [batches(rank, start, 2) for rank in range(ranks)] == [
        list(islice(EndlessBatches([range(rows)], batch, 0, rank, ranks), start, start + 2)) for rank in range(ranks)
    ]
    in_order = [key for step in zip(*taken, strict=True) for part in step for key in part]
    for epoch in range(2):
        seen = [index for of, index in in_order[epoch * rows : (epoch + 1) * rows] if of == epoch]
        assert sorted(seen) == list(range(rows))  # every row once per epoch, over all ranks


def test_each_epoch_has_another_order() -> None:
    order = EndlessBatches([range(50)], 50, seed=0)
    first, second = islice(order, 2)
    assert [index for _, index in first] != [index for _, index in second]


def test_loader_processes_return_the_same_batches(encoders: Encoders, tmp_path: Path) -> None:
    cached = cache_latents(framed(), encoders, tmp_path, batch_size=4)
    loaders = [
        DataLoader(cached, batch_sampler=EndlessBatches([range(10)], 4, seed=0), num_workers=workers)
        for workers in (0, 1)
    ]
    in_process, in_workers = (list(islice(loader, 4)) for loader in loaders)
    for one, other in zip(in_process, in_workers, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_invalid_latents_are_not_cached(encoders: Encoders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = encoders.encode

    def overflowing(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        encoded = encode(batch)
        return {**encoded, "moments": encoded["moments"] * float("inf")}

    monkeypatch.setattr(encoders, "encode", overflowing)
    with pytest.raises(WorkFailed, match="the VAE returns NaN or infinity for images 1 to 4"):
        cache_latents(framed(4), encoders, tmp_path, batch_size=4)
    assert not list(tmp_path.rglob("*.safetensors"))
