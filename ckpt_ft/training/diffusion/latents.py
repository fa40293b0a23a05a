"""Images and captions as what is trained sees them, encoded once into files: then it alone is on the device.

The cache is a directory of safetensors shards, `SHARD` rows each, each whole or not there: a killed run keeps
what it had encoded. Of an image the moments of its latent distribution are kept, not one sample, so that each
epoch samples anew as it would without the cache. The directory's name is a digest of the data, of the framing, of the
tokenizers and of the encoders' weights; nothing that changes the latents can meet an old cache.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import Dataset as TorchDataset

from ckpt_ft.errors import WorkFailed, one_line
from ckpt_ft.files import write
from ckpt_ft.training.images.captioned import ImageArguments, framed
from ckpt_ft.training.images.files import open_image, size_of
from ckpt_ft.workloads.sample_sizes import Size, nearest

if TYPE_CHECKING:
    from datasets import Dataset

    from .frozen import Frozen

logger = logging.getLogger(__name__)

SHARD = 256
_LAYOUT = 2  # raise it when the tensors of a shard get other names
Row = dict[str, Tensor]
Key = tuple[int, int]  # epoch, index


class FramedImages(TorchDataset[Row]):
    """Rows of `pixels`, `time_ids` and `input_ids*`; what is random depends on seed, epoch and index alone.

    So any process can make any row of any epoch, in any order: resuming needs no state of this dataset.

    Attributes:
        sizes: height and width that images are trained in, each of some image.
        buckets: for each of them the rows in it.
    """

    def __init__(
        self, rows: Dataset, tokenize: Callable[[str], Row], sizes: Sequence[Size], args: ImageArguments, seed: int
    ) -> None:
        self.rows, self.tokenize, self.args, self.seed = rows, tokenize, args, seed
        found = self._nearest(sizes)
        self.sizes = [size for at, size in enumerate(sizes) if at in found]
        place = {size: at for at, size in enumerate(self.sizes)}
        self._bucket = [place[sizes[at]] for at in found]
        self.buckets = [[row for row, of in enumerate(self._bucket) if of == at] for at in range(len(self.sizes))]

    def size(self, index: int) -> Size:
        """Of a row's picture."""
        return self.sizes[self._bucket[index]]

    def _nearest(self, sizes: Sequence[Size]) -> list[int]:
        if len(sizes) == 1:
            return [0] * len(self.rows)
        return [nearest(size_of(image), sizes) for image in self.rows["image"]]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, key: Key) -> Row:
        epoch, index = key
        row = self.rows[index]
        draw = random.Random(f"{self.seed} {epoch} {index}")
        pixels, time_ids = framed(open_image(row["image"]), self.size(index), self.args, draw)
        return {"pixels": pixels, "time_ids": time_ids, **self.tokenize(row["text"])}


class CachedLatents(TorchDataset[Row]):
    """Rows of `moments`, `time_ids`, `prompt_embeds` (and what else a prompt is), read from shards one by one.

    Attributes:
        sizes, buckets: as of `FramedImages`.
    """

    def __init__(self, directory: Path, images: FramedImages) -> None:
        self.directory, self.sizes, self.buckets = directory, images.sizes, images.buckets
        self._place = {
            index: (shard, row) for shard, rows in enumerate(_shards(images)) for row, index in enumerate(rows)
        }
        self._open: dict[tuple[int, int], Any] = {}

    def __len__(self) -> int:
        return len(self._place)

    def __getitem__(self, key: Key) -> Row:
        shard, row = self._place[key[1]]
        place = (os.getpid(), shard)  # each loader process maps the files itself
        if place not in self._open:
            self._open[place] = safe_open(_shard_path(self.directory, shard), framework="pt")
        tensors = self._open[place]
        # A clone, because the slice keeps the whole mapped shard alive.
        return {name: tensors.get_slice(name)[row].clone() for name in tensors.keys()}  # noqa: SIM118  not a dict


def cache_latents(
    images: FramedImages, encoders: Frozen, root: Path, batch_size: int, rank: int = 0, ranks: int = 1
) -> CachedLatents:
    """Encode what is not yet in the cache under `root`, every `ranks`-th shard from `rank` on.

    With several processes, all must be through before any reads; `accelerator.wait_for_everyone()` says when.
    A shard that is damaged is made again, with a warning.

    Raises:
        WorkFailed: the VAE's output is no number.
        OSError: the cache cannot be written.
    """
    directory = root / _digest(images, encoders)
    directory.mkdir(parents=True, exist_ok=True)
    for shard, rows in islice(enumerate(_shards(images)), rank, None, ranks):
        path = _shard_path(directory, shard)
        keys = [(0, index) for index in rows]
        if path.exists():
            wrong = _what_is_wrong(path, len(keys))
            if wrong is None:
                continue
            logger.warning("%s is made again: %s", path, wrong)
        parts = []
        for start in range(0, len(keys), batch_size):
            batch = torch.utils.data.default_collate([images[key] for key in keys[start : start + batch_size]])
            parts.append({name: tensor.cpu() for name, tensor in encoders.encode(batch).items()})
        # Contiguous, because a VAE's convolutions may leave channels last, which safetensors refuse.
        tensors = {name: torch.cat([part[name] for part in parts]).contiguous() for name in parts[0]}
        if not tensors["moments"].isfinite().all():
            raise WorkFailed(
                f"the VAE makes no numbers of images {rows[0] + 1} to {rows[-1] + 1}; give "
                "--mixed_precision bf16, or --pretrained_vae_model_name_or_path of one that is stable in fp16"
            )
        write(path, partial(save_file, tensors))
    return CachedLatents(directory, images)


def _shards(images: FramedImages) -> list[list[int]]:
    """The rows of each shard, all of one bucket: tensors of one shape."""
    return [rows[start : start + SHARD] for rows in images.buckets for start in range(0, len(rows), SHARD)]


def _what_is_wrong(path: Path, rows: int) -> str | None:
    """Why a shard of `rows` cannot be trained on, None when it can."""
    try:
        with safe_open(path, framework="pt") as tensors:
            if any(tensors.get_slice(name).get_shape()[0] != rows for name in tensors.keys()):  # noqa: SIM118
                return f"it does not hold {rows} rows"
            return None if tensors.get_tensor("moments").isfinite().all() else "it holds what is no number"
    except (SafetensorError, OSError) as error:
        return one_line(error)


def _shard_path(directory: Path, shard: int) -> Path:
    return directory / f"{shard:06}.safetensors"


def _digest(images: FramedImages, encoders: Frozen) -> str:
    """Of all that the latents depend on: rows, framing, tokenizers, the encoders' settings, weights and precision."""
    digest = hashlib.blake2b(digest_size=12)
    digest.update(f"{images.rows._fingerprint} {images.sizes} {encoders.identity} {SHARD} {_LAYOUT}".encode())
    for file in images.rows["image"]:
        if file["bytes"] is None:  # the rows hold a path: the file behind it may change while the rows do not
            status = os.stat(file["path"])
            digest.update(f"{file['path']} {status.st_size} {status.st_mtime_ns}".encode())
    for tokenizer in encoders.tokenize.tokenizers:
        settings = json.loads(tokenizer.backend_tokenizer.to_str())
        del settings["truncation"], settings["padding"]  # those of the last call
        digest.update(f"{tokenizer.model_max_length} {json.dumps(settings)}".encode())
    for module in encoders.modules:
        _update(digest, module)
    return digest.hexdigest()


def _update(digest: Any, module: nn.Module) -> None:
    config: Any = module.config  # transformers' or diffusers', which is a dict
    settings = config if isinstance(config, dict) else config.to_dict()
    kept = {name: value for name, value in settings.items() if not name.startswith("_")}  # not where it was read from
    digest.update(json.dumps(kept, sort_keys=True, default=str).encode())
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).cpu().numpy())
