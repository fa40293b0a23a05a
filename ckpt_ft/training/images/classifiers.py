"""An image classifier for given classes, and its image processor: pretrained or made here, all weights or LoRA."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ckpt_ft.errors import UserError
from ckpt_ft.reading import library_reads
from ckpt_ft.training.flags import changed
from ckpt_ft.training.models import ModelArguments, load_pretrained, with_adapters
from ckpt_ft.workloads.adapters import without_adapters

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainingArguments

_BUILT_IN_SIDE = 32


def load_classifier(args: ModelArguments, names: list[str]) -> PreTrainedModel:
    """A model with one output for each of `names`; a pretrained head of another size is made anew, and that is logged.

    With adapters the weights are frozen but for the head and BatchNorm: both are saved whole beside the adapters,
    because BatchNorm's statistics change in training and an adapter without them would predict otherwise when loaded.

    Raises:
        UserError: the model cannot be read from here or is no image classifier.
    """
    from transformers import AutoModelForImageClassification

    classes = {
        "num_labels": len(names),
        "id2label": dict(enumerate(names)),
        "label2id": {name: index for index, name in enumerate(names)},
    }
    if args.model_name_or_path is None:
        model = _built_in(classes)
    else:
        model = load_pretrained(args, AutoModelForImageClassification, ignore_mismatched_sizes=True, **classes)
    if not args.adapts:
        return model
    head = _head(model)
    norms = [name for name, module in model.named_modules() if isinstance(module, _BatchNorm)]
    adaptable = _adaptable(model, head)
    return with_adapters(model, args, targets=lambda asked: asked or adaptable, modules_to_save=[head, *norms])


def load_processor(args: ModelArguments) -> Any:
    """The model's image processor: its size, scaling and normalisation.

    Raises:
        UserError: the model has none that can be read from here.
    """
    from transformers import AutoImageProcessor, ViTImageProcessor

    if args.model_name_or_path is None:
        return ViTImageProcessor(size={"height": _BUILT_IN_SIDE, "width": _BUILT_IN_SIDE})
    with library_reads(f"model {args.model_name_or_path}: no image processor can be loaded"):
        return AutoImageProcessor.from_pretrained(args.model_name_or_path, **args.source)


def _built_in(classes: dict[str, Any]) -> PreTrainedModel:
    """A ResNet of basic blocks (He et al. 2015, arXiv:1512.03385) that learns the drawn shapes quickly on a CPU."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32, 64, 128], depths=[1, 1, 1, 1], layer_type="basic", **classes
    )
    return ResNetForImageClassification(config)


def own_resolution(processor: Any) -> int:
    """Pixels of the side that `processor` gives a square image.

    Raises:
        UserError: it says no size.
    """
    size = (getattr(processor, "do_center_crop", None) and processor.crop_size) or processor.size or {}
    for key in ("height", "shortest_edge"):
        if size.get(key):
            return int(size[key])
    raise UserError("the model's image processor says no size; give --resolution")


def position_arguments(model: Any, resolution: int | None) -> dict[str, Any]:
    """What `model` must be called with at another resolution than its own: its position embeddings interpolated."""
    base = without_adapters(model)
    own = getattr(base.config, "image_size", None)
    if resolution is None or own in (None, resolution, [resolution, resolution]):
        return {}
    if "interpolate_pos_encoding" in inspect.signature(base.forward).parameters:
        print(f"position embeddings of {own} pixels are interpolated to --resolution {resolution}", flush=True)
        return {"interpolate_pos_encoding": True}
    return {}


def mind_batch_norm(model: nn.Module, args: TrainingArguments, count: int) -> TrainingArguments:
    """`args` as they keep BatchNorm from taking statistics of one image: with `dataloader_drop_last`, which is said,
    where the last of `count` images would be a batch of its own.

    Raises:
        UserError: every batch is one image.
    """
    if not any(isinstance(module, _BatchNorm) and module.track_running_stats for module in model.modules()):
        return args
    size = args.train_batch_size
    if size == 1:
        raise UserError(
            f"--per_device_train_batch_size 1: {type(model).__name__} has BatchNorm, which takes statistics over a "
            "batch; give at least 2 (gradient accumulation does not help)"
        )
    if args.world_size == 1 and count % size == 1 and not args.dataloader_drop_last:
        print(
            f"the last of {count} images is left out of each epoch: BatchNorm cannot train on a batch of one",
            flush=True,
        )
        return changed(args, dataloader_drop_last=True)
    return args


def _head(model: PreTrainedModel) -> str:
    """The name of what stands on the base model and is made for the classes."""
    return next(name for name, _ in reversed(list(model.named_children())) if name != model.base_model_prefix)


def _adaptable(model: nn.Module, head: str) -> list[str]:
    """The layers that get an adapter when none are named: every linear one, or in a pure CNN every convolution."""
    inside = [(name, module) for name, module in model.named_modules() if not f"{name}.".startswith(f"{head}.")]
    linear = [name for name, module in inside if isinstance(module, nn.Linear)]
    return linear or [name for name, module in inside if isinstance(module, nn.Conv2d) and module.groups == 1]
