"""Draws images with the model in training: for validation, and the class images of prior preservation.

The pipeline that training began with is put together around the model. Prompts are encoded in advance, so no text
encoder is loaded again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate.utils.memory import clear_device_cache
from PIL import Image, ImageDraw
from torch import Tensor, nn
from tqdm.auto import tqdm

from ckpt_ft.errors import WorkFailed, is_oom, one_line
from ckpt_ft.files import check_writable, write
from ckpt_ft.training.images import ImageArguments, missing_class_images, save_class_image
from ckpt_ft.training.samples.drawings import contact_sheet, drawings
from ckpt_ft.validation import library_reads
from ckpt_ft.workloads.adapters import without_adapters
from ckpt_ft.workloads.diffusion_models import TextAndUNet
from ckpt_ft.workloads.workload import MIXED_PRECISION

from .arguments import LoopArguments, PipelineArguments
from .denoiser import components_of, set_prediction_type
from .encoders import Encoders, frozen_dtype
from .families import Family

if TYPE_CHECKING:
    from accelerate import Accelerator

Autocast = Callable[[], AbstractContextManager[Any]]

TILE = 96  # most pixels of an image on the sheet
_MARGIN = 4
_LABEL = 72  # pixels for the row's name


class Sampler:
    """Draws images with the pipeline that training began with, around the model as it is now.

    Args:
        args: name the pipeline.
        encoders: only the VAE is kept; it moves to the model's device to draw, and back.
        size: side of the images in pixels.
    """

    def __init__(self, family: Family, args: PipelineArguments, encoders: Encoders, size: int) -> None:
        self.family, self.args, self.size = family, args, size
        self.vae, self.absent = encoders.vae, encoders.absent

    @torch.no_grad()
    def images(
        self,
        model: nn.Module,
        embeds: dict[str, Tensor],
        device: torch.device,
        autocast: Autocast,
        guidance: float | None = None,
        **options: Any,
    ) -> list[Image.Image]:
        """Returns one image per prompt and generator.

        Args:
            embeds: encoded prompts, the empty one last; their tokens if the model has text encoders of its own.
            guidance: None for the pipeline's own scale.
            options: arguments of the pipeline.
        """
        home, was_training = self.vae.device, model.training
        self.vae.to(device)
        model.eval()
        try:
            if isinstance(model, TextAndUNet):
                with autocast():
                    embeds = model.encode({name: value.to(device) for name, value in embeds.items()})
            # A copy for inpainting, because SDXL's pipeline leaves its VAE in another dtype.
            vae = copy.deepcopy(self.vae) if "mask_image" in options else self.vae
            component = self.family.component
            trained = components_of(model, component)[component]
            pipeline = self._pipeline(vae, without_adapters(trained))
            arguments: dict[str, Any] = {"height": self.size, "width": self.size, **options}
            for name, values in embeds.items():
                prompts, empty = values.to(device).split([len(values) - 1, 1])
                arguments[name], arguments[f"negative_{name}"] = prompts, empty.expand_as(prompts)
            return self.family.draw(pipeline, autocast, guidance, arguments)
        finally:
            model.train(was_training)
            self.vae.to(home)

    def _pipeline(self, vae: Any, model: nn.Module) -> Any:
        from diffusers import DiffusionPipeline

        pipeline = DiffusionPipeline.from_pretrained(
            self.args.pretrained_model_name_or_path, revision=self.args.revision, variant=self.args.variant,
            **{self.family.component: model, "vae": vae, **dict.fromkeys(self.absent)},
        )  # fmt: skip
        set_prediction_type(pipeline.scheduler, self.args)
        pipeline.set_progress_bar_config(disable=True)
        return pipeline


class Validation:
    """Draws `args.validation_prompt` during a run. The prompts are encoded now; the encoders are not kept.

    Args:
        options: arguments of the pipeline, such as the images to paint in.
    """

    def __init__(
        self, sampler: Sampler, args: LoopArguments, encoders: Encoders, folder: Path, **options: Any
    ) -> None:
        self.sampler, self.args, self.folder, self.options = sampler, args, folder, options
        self.prompts = args.validation_prompt or []
        self.embeds = {name: value.cpu() for name, value in encoders.encode_prompts([*self.prompts, ""]).items()}

    @property
    def tile(self) -> int:
        """Pixels of an image's side on a sheet; small images are enlarged."""
        return min(TILE, self.sampler.size * 3)

    def run(self, model: nn.Module, accelerator: Accelerator, step: int) -> None:
        """Draws all prompts, writes `step-{step}.png` and sends the images to the trackers; for the main process.

        The noise comes from a generator of its own, the same at each validation, so the run's random state is kept.
        """
        images = self.sampler.images(
            model, self.embeds, accelerator.device, accelerator.autocast, self.args.validation_guidance_scale,
            num_inference_steps=self.args.validation_inference_steps,
            num_images_per_prompt=self.args.num_validation_images,
            generator=torch.Generator().manual_seed(self.args.seed), **self.options,
        )  # fmt: skip
        if step == 0:
            for old in self.folder.glob("step-*.png"):  # of an earlier run in the same place
                old.unlink()
        sheet = contact_sheet(images, columns=len(images), tile=self.tile, margin=_MARGIN)
        write(self.folder / f"step-{step:06}.png", sheet.save)
        if self.sampler.size > TILE:
            for place, image in enumerate(images):
                write(self.folder / f"step-{step:06}-{place}.png", image.save)
        for tracker in accelerator.trackers:
            if tracker.name == "tensorboard":
                tracker.log_images({"validation": np.stack(images)}, step=step, dataformats="NHWC")
            elif tracker.name in ("wandb", "swanlab"):
                tracker.log_images({"validation": images}, step=step)

    def write_sheet(self, path: Path) -> None:
        """Writes all validations as the rows of one picture; for drawn shapes, a last row shows them."""
        rows = [
            (f"step {int(file.stem[5:])}", Image.open(file).copy())
            for file in sorted(self.folder.glob("step-??????.png"))
        ]
        if not rows:
            return
        known = {drawing.caption: drawing for drawing in drawings()}
        if all(prompt in known for prompt in self.prompts):
            wanted = [
                known[prompt].image(self.sampler.size)
                for prompt in self.prompts
                for _ in range(self.args.num_validation_images)
            ]
            rows.append(("expected", contact_sheet(wanted, columns=len(wanted), tile=self.tile, margin=_MARGIN)))
        width, height = rows[0][1].size
        page = Image.new("RGB", (_LABEL + width, height * len(rows)), (128, 128, 128))
        draw = ImageDraw.Draw(page)
        for place, (name, row) in enumerate(rows):
            page.paste(row, (_LABEL, place * height))
            draw.text((_MARGIN, place * height + height // 2 - 6), name, fill=(255, 255, 255))
        write(path, page.save)


def draw_class_images(
    prior: ImageArguments | None,
    sampler: Sampler,
    encoders: Encoders,
    load_model: Callable[[], Any],
    accelerator: Accelerator,
    seed: int,
    **options: Any,
) -> None:
    """Draws the class images that are missing in `prior.class_data_dir` with the untrained model, each rank its share.

    Image i is drawn from `seed` + i on any rank. Each file is written completely or not at all, so a run that is
    killed goes on with the next one.

    Args:
        load_model: loads the model that draws; only it and the VAE are on the device then.
        options: arguments of the pipeline.

    Raises:
        UserError: the folder cannot be written to, or has images of another prompt.
        WorkFailed: memory runs out.
    """
    if prior is None:
        return
    missing = missing_class_images(prior)
    accelerator.wait_for_everyone()  # all ranks have looked before any writes
    if not missing:
        return
    check_writable(next(iter(missing.values())), "--class_data_dir")
    numbers = sorted(missing)[accelerator.process_index :: accelerator.num_processes]
    device, dtype, most = accelerator.device, frozen_dtype(accelerator), prior.sample_batch_size
    if prior.prior_generation_precision is not None:
        dtype = MIXED_PRECISION.get(prior.prior_generation_precision) or torch.float32
    if numbers:
        progress = tqdm(total=len(numbers), disable=not accelerator.is_main_process, desc="class images")
        with progress, _advise_on_class_images(most):
            embeds = {
                name: value.to(dtype) if value.is_floating_point() else value
                for name, value in encoders.encode_prompts([prior.class_prompt, ""]).items()
            }
            encoders.to("cpu")  # the prompts are encoded, and the model needs the memory
            clear_device_cache()
            model = load_model()
            if not getattr(model, "is_quantized", False):
                nn.Module.to(model, dtype)  # diffusers' own `to` warns about modules that should stay in float32
            model.to(device)
            for part in (numbers[start : start + most] for start in range(0, len(numbers), most)):
                with library_reads("--with_prior_preservation: the pipeline draws no images of the class"):
                    images = sampler.images(
                        model,
                        {name: value[[0] * len(part) + [1]] for name, value in embeds.items()},
                        device,
                        partial(torch.autocast, device.type, dtype, enabled=dtype != torch.float32),
                        generator=[torch.Generator().manual_seed(seed + number) for number in part],
                        **options,
                    )
                for number, image in zip(part, images, strict=True):
                    write(missing[number], partial(save_class_image, image, prior))
                progress.update(len(part))
            del model
            encoders.to(encoders.device)
        clear_device_cache(garbage_collection=True)
    accelerator.wait_for_everyone()


@contextmanager
def _advise_on_class_images(batch: int) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if not is_oom(error):
            raise
        raise WorkFailed(
            f"out of memory while class images were drawn: {one_line(error, 200)}; finished ones are kept: give "
            f"a --sample_batch_size below {batch}"
        ) from None  # without the cause: a cheaper policy would not help
