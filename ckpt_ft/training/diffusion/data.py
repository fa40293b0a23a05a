"""The rows of a diffusion recipe, and the order in which each rank is shown them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from datasets import concatenate_datasets
from torch.utils.data import DataLoader, Sampler

from ckpt_ft.files import cache_root
from ckpt_ft.training.images.captioned import ImageArguments, load_captioned, load_class_images
from ckpt_ft.workloads.sample_sizes import sizes_of

from .arguments import LoopArguments
from .latent_shapes import LatentShapes
from .latents import CachedLatents, FramedImages, Key, Row, cache_latents
from .prior import Pairs

if TYPE_CHECKING:
    from accelerate import Accelerator

    from .frozen import Frozen
    from .noise import NoisyBatches
    from .validation import Validation


Samples = FramedImages | CachedLatents | Pairs


class Data(NamedTuple):
    """What is learned from: rows, what makes micro-batches of them, prompts that show what has been learned.

    `latents` are the shapes of images' latents, as the model sees them.
    """

    samples: Samples
    noisy: NoisyBatches
    validation: Validation
    latents: LatentShapes


def load_samples(
    encoders: Frozen, resolution: int, image_args: ImageArguments, args: LoopArguments, accelerator: Accelerator
) -> Samples:
    """Images and captions; with `cache_latents` encoded by all ranks together, after which the VAE is on the CPU.

    With prior preservation in pairs with images of the class, which are there already.

    Raises:
        UserError: images or captions that cannot be trained on.
        WorkFailed: the VAE's output is no number.
    """
    with accelerator.main_process_first():
        rows = load_captioned(image_args, resolution)
        instances = len(rows)
        if image_args.prior is not None:
            others = load_class_images(image_args.prior, image_args)
            rows = concatenate_datasets([rows, others.cast(rows.features)])
    sizes = sizes_of(image_args.aspect_ratio_buckets, resolution, encoders.token)
    images = encoders.rows(rows, encoders.tokenize, sizes, image_args, args.seed)
    if image_args.aspect_ratio_buckets is not None:
        counts = zip(images.sizes, images.buckets, strict=True)
        accelerator.print("buckets: " + ", ".join(f"{height}x{width}: {len(of)}" for (height, width), of in counts))
    samples = _encoded(images, encoders, args, accelerator) if image_args.cache_latents else images
    return samples if image_args.prior is None else Pairs(samples, instances)


def _encoded(images: FramedImages, encoders: Frozen, args: LoopArguments, accelerator: Accelerator) -> CachedLatents:
    samples = cache_latents(
        images, encoders, cache_root() / "latents", args.train_batch_size,
        accelerator.process_index, accelerator.num_processes,
    )  # fmt: skip
    accelerator.wait_for_everyone()
    encoders.vae.to("cpu")  # validations bring it back
    return samples


def endless_batches(
    samples: Samples, args: LoopArguments, workers: int, accelerator: Accelerator, seen: int
) -> Iterator[Row]:
    """This rank's micro-batches of `samples` without end, from where a run stood that had seen so many of them.

    Not for `accelerator.prepare`, because they are already this rank's. `workers`: processes that make them.
    """
    ranks = accelerator.num_processes
    start = seen // (args.train_batch_size * ranks)
    order = EndlessBatches(samples.buckets, args.train_batch_size, args.seed, accelerator.process_index, ranks, start)
    loader = DataLoader(
        samples,
        batch_sampler=order,
        num_workers=workers,
        pin_memory=accelerator.device.type == "cuda",
        generator=torch.Generator(),  # a loader draws a seed when it starts: not from the RNG that draws the noise
    )
    return iter(loader)


class EndlessBatches(Sampler[list[Key]]):
    """This rank's micro-batches of (epoch, index), shuffled anew each epoch, from micro-batch `start` on, without end.

    Micro-batch m is a function of the arguments and m: the position in the data is one number, and a run resumed at m
    sees what an uninterrupted one would have seen. A batch may hold the end of one epoch and the start of the next.

    Each is of rows of one of the `buckets`, the same on all ranks. An epoch has those batches of every bucket that are
    full by its end, in an order drawn anew; what is left of a bucket begins its next one.
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
        order, epoch_of = lru_cache(maxsize=2 * len(self.buckets))(self._order), lru_cache(maxsize=1)(self._epoch)
        epoch = self.start * self.batch_size * self.ranks // sum(map(len, self.buckets))
        for batch in itertools.count(self.start):
            while self._made(epoch + 1) <= batch:
                epoch += 1
            bucket, place = epoch_of(epoch)[batch - self._made(epoch)]
            rows, first = self.buckets[bucket], (place * self.ranks + self.rank) * self.batch_size
            places = [divmod(sample, len(rows)) for sample in range(first, first + self.batch_size)]
            yield [(of, rows[order(len(rows), of)[at]]) for of, at in places]

    def _made(self, epochs: int) -> int:
        """Batches of all buckets that are full by the end of so many epochs."""
        return sum(self._full(bucket, epochs) for bucket in range(len(self.buckets)))

    def _full(self, bucket: int, epochs: int) -> int:
        return epochs * len(self.buckets[bucket]) // (self.batch_size * self.ranks)

    def _epoch(self, epoch: int) -> list[tuple[int, int]]:
        """Bucket and place in it of each batch of an epoch."""
        batches = [
            (bucket, place)
            for bucket in range(len(self.buckets))
            for place in range(self._full(bucket, epoch), self._full(bucket, epoch + 1))
        ]
        if len(self.buckets) == 1:
            return batches
        return [batches[at] for at in self._order(len(batches), epoch)]

    def _order(self, length: int, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed(self.seed + epoch)
        return torch.randperm(length, generator=generator).tolist()
