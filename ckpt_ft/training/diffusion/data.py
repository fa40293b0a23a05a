"""The rows of a diffusion recipe: framed images, cached latents, and the order of the batches.

A loader's sample is addressed by (epoch, index), and everything random depends on the seed and that key alone. Any
process can therefore make any sample of any epoch, in any order, and a resumed run needs no state of the dataset.
Bad input raises UserError, one line that names the file or the row.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from datasets import Dataset
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import DataLoader, Sampler
from torch.utils.data import Dataset as TorchDataset

from ckpt_ft.errors import WorkFailed
from ckpt_ft.files import cache_root, write
from ckpt_ft.training.images import ImageArguments, framed, load_captioned, open_image, size_of
from ckpt_ft.workloads.sample_sizes import Size, nearest, sizes_of

from .arguments import LoopArguments
from .encoders import Encoders

Row = dict[str, Any]
Key = tuple[int, int]  # epoch, index
_VERSION = 4  # part of the cache key: raise it when the tensors of a row change


class FramedImages(TorchDataset[Row]):
    """Rows of `pixels`, `time_ids` and `caption`.

    Attributes:
        sizes: the sizes (height, width) in which images are trained; each is that of some image.
        buckets: the rows of each size.
    """

    def __init__(self, rows: Dataset, sizes: Sequence[Size], args: ImageArguments, seed: int) -> None:
        self.rows, self.args, self.seed = rows, args, seed
        # Images that are all cut to one size need not be opened.
        found = [nearest(size_of(image), sizes) for image in rows["image"]] if len(sizes) > 1 else [0] * len(rows)
        self.sizes = [size for at, size in enumerate(sizes) if at in found]
        place = {size: at for at, size in enumerate(self.sizes)}
        self._bucket = [place[sizes[at]] for at in found]
        self.buckets = [[row for row, of in enumerate(self._bucket) if of == at] for at in range(len(self.sizes))]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, key: Key) -> Row:
        epoch, index = key
        row = self.rows[index]
        draw = random.Random(f"{self.seed} {epoch} {index}")
        pixels, time_ids = framed(open_image(row["image"]), self.sizes[self._bucket[index]], self.args, draw)
        return {"pixels": pixels, "time_ids": time_ids, "caption": row["text"]}


class CachedLatents(TorchDataset[Row]):
    """Rows of `moments`, `time_ids` and encoded prompts, each read from its file (see `cache_latents`).

    Attributes:
        sizes, buckets: those of `FramedImages`.
    """

    def __init__(self, directory: Path, images: FramedImages) -> None:
        self.directory, self.sizes, self.buckets = directory, images.sizes, images.buckets

    def __len__(self) -> int:
        return sum(map(len, self.buckets))

    def __getitem__(self, key: Key) -> Row:
        return load_file(self.file(key[1]))

    def file(self, index: int) -> Path:
        return self.directory / f"{index:07}.safetensors"


def cache_latents(
    images: FramedImages, encoders: Encoders, root: Path, batch_size: int, rank: int = 0, ranks: int = 1
) -> CachedLatents:
    """Encodes the images that are not yet in the cache under `root`; this rank every `ranks`-th batch of one bucket.

    The latents are a safetensors file for each image, in a directory named by a digest of everything that they depend
    on: images, framing, tokenizers, encoders. With several processes,
    `accelerator.wait_for_everyone()` must follow before the latents are read.

    Raises:
        WorkFailed: the VAE's output is not finite.
        OSError: the cache cannot be written.
    """
    cached = CachedLatents(root / _digest(images, encoders), images)
    batches = [rows[at : at + batch_size] for rows in images.buckets for at in range(0, len(rows), batch_size)]
    for rows in batches[rank::ranks]:
        if all(cached.file(row).exists() for row in rows):
            continue
        encoded = encoders.encode(torch.utils.data.default_collate([images[0, row] for row in rows]))
        if not encoded["moments"].isfinite().all():
            raise WorkFailed(
                f"the VAE returns NaN or infinity for images {rows[0] + 1} to {rows[-1] + 1}; give "
                "--mixed_precision bf16, or --pretrained_vae_model_name_or_path of one that is stable in fp16"
            )
        for row, *values in zip(rows, *(tensor.cpu() for tensor in encoded.values()), strict=True):
            # A contiguous copy, because safetensors would write a slice with all of its batch.
            tensors = {name: value.contiguous().clone() for name, value in zip(encoded, values, strict=True)}
            write(cached.file(row), partial(save_file, tensors))
    return cached


def _digest(images: FramedImages, encoders: Encoders) -> str:
    digest = hashlib.blake2b(digest_size=12)
    digest.update(f"{list(images.rows['text'])} {images.sizes} {encoders.identity} {_VERSION}".encode())
    for file in images.rows["image"]:
        if file["bytes"] is None:
            status = os.stat(file["path"])
            digest.update(f"{file['path']} {status.st_size} {status.st_mtime_ns}".encode())
        else:
            digest.update(file["bytes"])
    for tokenizer in encoders.tokenizers:
        settings = json.loads(tokenizer.backend_tokenizer.to_str())
        del settings["truncation"], settings["padding"]  # those of the last call
        digest.update(f"{tokenizer.model_max_length} {json.dumps(settings)}".encode())
    for module in encoders.modules:
        _update(digest, module)
    return digest.hexdigest()


def _update(digest: Any, module: nn.Module) -> None:
    config: Any = module.config  # a transformers config, or diffusers' dict
    settings = config if isinstance(config, dict) else config.to_dict()
    kept = {name: value for name, value in settings.items() if not name.startswith("_")}  # not the path
    digest.update(json.dumps(kept, sort_keys=True, default=str).encode())
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).cpu().numpy())


Samples = FramedImages | CachedLatents


def load_samples(
    encoders: Encoders, resolution: int, image_args: ImageArguments, args: LoopArguments, accelerator: Accelerator
) -> Samples:
    """Returns the images and captions; with `cache_latents` encoded by all ranks together, with the VAE on the CPU.

    Raises:
        UserError: an image or a caption cannot be used.
        WorkFailed: the VAE's output is not finite.
    """
    with accelerator.main_process_first():
        rows = load_captioned(image_args, resolution)
    sizes = sizes_of(image_args.aspect_ratio_buckets, resolution, encoders.token)
    images = FramedImages(rows, sizes, image_args, args.seed)
    if image_args.aspect_ratio_buckets is not None:
        counts = zip(images.sizes, images.buckets, strict=True)
        accelerator.print("buckets: " + ", ".join(f"{height}x{width}: {len(of)}" for (height, width), of in counts))
    if not image_args.cache_latents:
        return images
    rank, ranks = accelerator.process_index, accelerator.num_processes
    cached = cache_latents(images, encoders, cache_root() / "latents", args.train_batch_size, rank, ranks)
    accelerator.wait_for_everyone()
    encoders.vae.to("cpu")  # validation moves it back
    return cached


def endless_batches(
    samples: Samples, args: LoopArguments, workers: int, accelerator: Accelerator, seen: int
) -> Iterator[Row]:
    """Returns this rank's micro-batches without end, from the position of a run that has seen `seen` samples.

    Not for `accelerator.prepare`, because they are already this rank's.

    Args:
        workers: number of processes that prepare them.
    """
    ranks = accelerator.num_processes
    start = seen // (args.train_batch_size * ranks)
    order = EndlessBatches(samples.buckets, args.train_batch_size, args.seed, accelerator.process_index, ranks, start)
    loader = DataLoader(
        samples,
        batch_sampler=order,
        num_workers=workers,
        pin_memory=accelerator.device.type == "cuda",
        generator=torch.Generator(),  # a loader draws a seed when it starts; the global generator draws the noise
    )
    return iter(loader)


class EndlessBatches(Sampler[list[Key]]):
    """This rank's micro-batches of (epoch, index), shuffled anew each epoch, from micro-batch `start` on, without end.

    Micro-batch m depends on the arguments and m alone, so a resumed run gets the batches of an uninterrupted one. A
    batch may hold the end of one epoch and the start of the next. All rows of a batch are of one bucket, the same on
    all ranks. An epoch has every bucket's batches that are full by its end, in random order; the rest of a bucket
    begins its next batch.
    """

    def __init__(
        self,
        buckets: Sequence[Sequence[int]],
        batch_size: int,
        seed: int,
        rank: int = 0,
        ranks: int = 1,
        start: int = 0,
    ) -> None:
        self.buckets, self.batch_size, self.seed = buckets, batch_size, seed
        self.rank, self.ranks, self.start = rank, ranks, start

    def __iter__(self) -> Iterator[list[Key]]:
        together, mine = self.batch_size * self.ranks, slice(self.rank * self.batch_size, None)
        rest: list[list[Key]] = [[] for _ in self.buckets]
        skipped = 0
        for epoch in itertools.count():
            batches = []
            for bucket, rows in enumerate(self.buckets):
                keys = rest[bucket] + [(epoch, rows[at]) for at in self._order(len(rows), epoch)]
                full = len(keys) - len(keys) % together
                batches += [keys[at : at + together] for at in range(0, full, together)]
                rest[bucket] = keys[full:]
            if len(self.buckets) > 1:
                batches = [batches[at] for at in self._order(len(batches), epoch)]
            left = min(self.start - skipped, len(batches))
            skipped += left
            yield from (batch[mine][: self.batch_size] for batch in batches[left:])

    def _order(self, length: int, epoch: int) -> list[int]:
        return torch.randperm(length, generator=torch.Generator().manual_seed(self.seed + epoch)).tolist()
