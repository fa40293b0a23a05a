"""What is missing of a class's images, drawn by the model before it is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils.memory import clear_device_cache
from torch import nn
from tqdm.auto import tqdm

from ckpt_ft.errors import WorkFailed, is_oom, one_line
from ckpt_ft.files import check_writable, write
from ckpt_ft.reading import library_reads
from ckpt_ft.training.images.captioned import PriorPreservation, missing_class_images, save_class_image
from ckpt_ft.workloads.workload import MIXED_PRECISION

from .parts import frozen_dtype

if TYPE_CHECKING:
    from accelerate import Accelerator

    from .frozen import Frozen
    from .sampling import Sampler


def draw_class_images(
    prior: PriorPreservation | None,
    sampler: Sampler,
    encoders: Frozen,
    load_model: Callable[[], Any],
    accelerator: Accelerator,
    seed: int,
    **more: Any,
) -> None:
    """Fill the gaps in `prior.folder`, each rank its share; image i is drawn from `seed` + i, whoever draws it.

    Each is whole or not there, so that a run which is killed here goes on with the next one.

    Args:
        load_model: what draws; it is on the device with the VAE alone.
        more: arguments of the pipeline.

    Raises:
        UserError: the folder cannot be written to, or was filled for another prompt.
        WorkFailed: memory runs out.
    """
    if prior is None:
        return
    missing = missing_class_images(prior)
    accelerator.wait_for_everyone()  # all have looked before any writes
    if not missing:
        return
    check_writable(next(iter(missing.values())), "--class_data_dir")
    ours = sorted(missing)[accelerator.process_index :: accelerator.num_processes]
    if ours:
        progress = tqdm(total=len(ours), disable=not accelerator.is_main_process, desc="class images")
        with progress, _advised(prior.batch):
            for numbers in _drawn(prior, sampler, encoders, load_model, accelerator, seed, ours, more):
                for number, image in numbers.items():
                    write(missing[number], partial(save_class_image, image, prior))
                progress.update(len(numbers))
        clear_device_cache(garbage_collection=True)
    accelerator.wait_for_everyone()


def _drawn(
    prior: PriorPreservation,
    sampler: Sampler,
    encoders: Frozen,
    load_model: Callable[[], Any],
    accelerator: Accelerator,
    seed: int,
    numbers: list[int],
    more: dict[str, Any],
) -> Iterator[dict[int, Any]]:
    """The images of `numbers`, batch by batch."""
    device, dtype = accelerator.device, _dtype(prior, accelerator)
    embeds = {
        name: value.to(dtype) if value.is_floating_point() else value
        for name, value in encoders.encode_prompts([prior.prompt, ""]).items()
    }
    with _parked(encoders):
        model = load_model()
        if not getattr(model, "is_quantized", False):
            nn.Module.to(model, dtype)  # diffusers' own warns of modules that want float32
        model.to(device)
        for start in range(0, len(numbers), prior.batch):
            part = numbers[start : start + prior.batch]
            with library_reads("--with_prior_preservation: the pipeline draws no images of the class"):
                images = sampler.images(
                    model,
                    {name: value[[0] * len(part) + [1]] for name, value in embeds.items()},
                    device,
                    partial(torch.autocast, device.type, dtype, enabled=dtype != torch.float32),
                    generator=[torch.Generator().manual_seed(seed + number) for number in part],
                    **more,
                )
            yield dict(zip(part, images, strict=True))


def _dtype(prior: PriorPreservation, accelerator: Accelerator) -> torch.dtype:
    if prior.precision is None:
        return frozen_dtype(accelerator)
    return MIXED_PRECISION.get(prior.precision) or torch.float32


@contextmanager
def _parked(encoders: Frozen) -> Iterator[None]:
    """Inside, what encodes is on the CPU: the prompts are encoded, and the model needs the room."""
    for module in encoders.modules:
        module.to("cpu")
    clear_device_cache()
    try:
        yield
    finally:
        for module in encoders.modules:
            module.to(encoders.device)


@contextmanager
def _advised(batch: int) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if not is_oom(error):
            raise
        raise WorkFailed(
            f"out of memory while class images were drawn: {one_line(error, 200)}; those that are done are kept: give "
            f"less than --sample_batch_size {batch}"
        ) from None  # without the cause, for which a leaner step would be planned
