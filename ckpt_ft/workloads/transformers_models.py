"""Builds workloads of transformers models: the class of a config on the meta device, its batches and its loss."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from ckpt_ft.errors import UserError, is_oom, one_line
from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.standins import flash_attention, liger

from . import batches
from .adapters import adapt, by_task, notes_on_experts, refusals
from .batches import ImagePositions, check_packing, one_behind_another
from .images import Pictured, pictured
from .model_config import read_processor
from .positions import beyond_note, position_limit, stretch_positions, trained_positions
from .workload import DTYPES, Batch, Forward, Loss, Workload

_SECONDS = 10  # default length of audio
# Attention kernels, each with the attribute of the classes that support it.
_FUSED = {"flash_attention_2": "_supports_flash_attn", "flex_attention": "_supports_flex_attn"}


def transformers_model(name: str, config: Mapping[str, Any], spec: TrainingSpec) -> Workload:
    """The workload of a transformers config (one with `model_type`): of its `architectures[0]`, or else of its type.

    Raises:
        UserError: no training step is known for the class, it has fewer positions, or its config makes no model.
    """
    kind, task = _class(name, config)
    if "resolution" in task.sized:
        spec = spec.edit(resolution=spec.data.resolution or _image_size(config, task))
        config = _of_size(config, spec.data.resolution)
    if "audio_seconds" in task.sized:
        spec = spec.edit(audio_seconds=spec.data.audio_seconds or _SECONDS)
    built = _build(name, kind, config, spec)
    text = built.config.get_text_config()
    seen = pictured(built, read_processor(name), spec) if spec.data.images else None
    if seen is not None and spec.data.rows == "packed":
        check_packing(built)
    spec, said = _lengthened(name, built, spec, seen) if "seq_length" in task.sized else (spec, ())
    if task.kind == "text classifier" and text.pad_token_id is None:
        text.pad_token_id = 0  # as training code does: the model looks for the last token before the padding
    _fuse(built, spec)
    fields = task.fields(built, spec)
    batches.check_fields(built, fields.keys() - task.loss_fields)
    if spec.data.rows != "alike" and "input_ids" not in fields:
        raise UserError(f"{spec.data.rows} rows: the batches of {name}, of kind '{task.kind}', hold no text")

    def filled(samples: int, length: int | None) -> Batch:
        shaped = fields if length is None else task.fields(built, spec.edit(seq_length=length))
        batch = batches.zeros(shaped, samples, spec)
        if seen is not None:
            seen.put_into(batch)
        return batch

    def make_batch(samples: int, length: int | None) -> Batch:
        if spec.data.rows == "packed" and seen is not None:
            halves = (spec.data.tokens // 2, spec.data.tokens - spec.data.tokens // 2)
            along = seen.along | {"input_ids", "labels"}
            return one_behind_another([filled(samples, tokens) for tokens in halves], along, ImagePositions.of(built))
        batch = filled(samples, length)
        if spec.data.rows == "padded":
            batch["attention_mask"] = torch.ones_like(batch["input_ids"])  # for the longest row; the others are padded
            batch["attention_mask"][1:, -1:] = 0
        elif spec.data.rows == "packed" and seen is None:
            batch["position_ids"] = _packed_positions(batch["input_ids"])
        if by_task(spec):
            batch["task_ids"] = torch.zeros(samples, dtype=torch.long)
        return batch

    shape = {sized: (spec.data.tokens if sized == "seq_length" else spec.get(sized)) for sized in task.sized}
    if seen is not None:
        shape |= {"images": spec.data.images, "image_tokens": seen.image_tokens}
    if kind.__name__ not in (config.get("architectures") or [kind.__name__]):
        said = (*said, f"a backbone alone has no loss: {kind.__name__} is trained")
    notes = (*said, *batches.notes_on(built, task, spec), *notes_on_experts(built, spec))
    loss = partial(_loss, task.loss, refusals(spec))
    return Workload(adapt(built, spec), make_batch, loss, kind=task.kind, shape=shape, notes=notes)


def _lengthened(
    name: str, model: Any, spec: TrainingSpec, seen: Pictured | None
) -> tuple[TrainingSpec, tuple[str, ...]]:
    """Returns the spec with the length of a sequence, and notes about it.

    A default length counts the text after the images, and is clamped to the number of positions that the model was
    trained on.

    Raises:
        UserError: the requested length exceeds the model's table of positions, or the images do not fit in it.
    """
    limit = trained_positions(model.config) if spec.data.length_is_open else position_limit(model)
    rows = 2 if spec.data.rows == "packed" else 1  # rows per sequence, each with its images
    images = seen.length * rows if seen else 0
    length = spec.data.tokens + (images if spec.data.length_is_open else 0)
    said: tuple[str, ...] = ()
    if 0 < limit < length:
        if not spec.data.length_is_open:
            raise UserError(f"sequence length {length}: {name} has {limit} positions")
        length, said = limit, (f"sequences of {limit} tokens: {name} has no more positions",)
    if images >= length:
        wide, high = spec.data.image_size
        raise UserError(
            f"sequence length {length}: {spec.data.images * rows} images of {wide}x{high} pixels take {images} tokens "
            "of it; give a longer one, or fewer or smaller images"
        )
    beyond = beyond_note(model.config, spec.model.rope_scaling, length)
    return spec.edit(seq_length=length), (*said, *([beyond] if beyond else ()))


def _of_size(config: Mapping[str, Any], side: int) -> Mapping[str, Any]:
    """Returns `config` for images of `side` x `side` pixels."""
    if isinstance(config.get("vision_config"), Mapping):
        return {**config, "vision_config": _of_size(config["vision_config"], side)}
    return {**config, "image_size": side} if "image_size" in config else config


def _packed_positions(ids: torch.Tensor) -> torch.Tensor:
    """Positions (samples, tokens) of two rows in each sequence, one after the other."""
    samples, tokens = ids.shape
    first = tokens // 2
    return torch.cat([torch.arange(first), torch.arange(tokens - first)]).expand(samples, -1).clone()


def _loss(loss: Loss, refused: Mapping[type[Exception], str], model: Forward, batch: Batch) -> torch.Tensor:
    """Computes `loss` of a model that was never called before; turns errors about missing input into a UserError."""
    try:
        lost = loss(model, batch)
        if torch.is_grad_enabled() and not lost.requires_grad:
            raise UserError(refused.get(RuntimeError, "nothing that is trained has a part in the loss"))
        return lost
    except UserError:
        raise
    except tuple(refused) as error:
        if is_oom(error) or "overflow" in str(error):  # the batch is too large for memory, which the trace reports
            raise
        said = next(said for kind, said in refused.items() if isinstance(error, kind))
        said = said or f"its forward refuses a batch of {', '.join(batch)}"
        raise UserError(f"{said}: {one_line(error, 200)}") from error


def _class(name: str, config: Mapping[str, Any]) -> tuple[Any, batches.Task]:
    """The class to build and its task. A bare backbone is replaced by the class that adds a head to it."""
    import transformers

    named: str = (config.get("architectures") or [""])[0] or batches.class_for(config["model_type"])
    kind = getattr(transformers, named, None)
    if kind is None:
        wanted = f"class {named}" if named else f"model of type '{config['model_type']}' whose training step is known"
        raise UserError(f"{name}: transformers {transformers.__version__} has no {wanted}")
    task = batches.task_of(named)
    if task is None:
        kinds = ", ".join(dict.fromkeys(f"{task.kind}s" for task in batches.TASKS))
        raise UserError(f"{name}: no training step is known for {named} (known: {kinds})")
    alone = task.loss_fields and kind.main_input_name != "input_ids"  # a backbone for images or sound
    if alone and batches.class_for(config["model_type"]) != named:
        return _class(name, {"model_type": config["model_type"]})
    return kind, task


def _build(name: str, kind: Any, config: Mapping[str, Any], spec: TrainingSpec) -> Any:
    """The model on the meta device in the spec's dtype, from its config."""
    from transformers import AutoConfig

    attention: str | None = spec.kernels.attn_implementation or None
    if attention in _FUSED:
        flash_attention.register()
        if not getattr(kind, _FUSED[attention], False):
            raise UserError(f"{name}: transformers has no {attention} for {kind.__name__}")
        attention = flash_attention.NAME
    values = {key: value for key, value in config.items() if key not in ("model_type", "quantization_config")}
    try:
        parsed = AutoConfig.for_model(config["model_type"], **values)
        stretch_positions(parsed, spec.model.rope_scaling, spec.data.tokens)
        with torch.device("meta"):
            model = kind._from_config(parsed, dtype=DTYPES[spec.precision.dtype], attn_implementation=attention)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{name}: its config does not make a model: {one_line(error, 200)}") from error
    if config.get("tie_word_embeddings") is False:
        _untie(model)
    _keep_in_float32(model, spec.precision.dtype)
    model.config.use_cache = model.config.get_text_config().use_cache = False  # the recipes train without a KV cache
    return model.train()


def _fuse(model: Any, spec: TrainingSpec) -> None:
    """Replaces layers by stand-ins for the fused kernels of `spec`."""
    if spec.kernels.use_liger_kernel:
        asked = spec.kernels.liger_kernels
        if spec.trainer.trainer:  # TRL has a fused head of its own, and turns Liger's off
            if asked.get("fused_linear_cross_entropy"):
                raise UserError("Liger's fused_linear_cross_entropy: TRL has a fused head of its own; leave it out")
            asked["fused_linear_cross_entropy"] = False
        liger.apply(model, asked)
    if spec.kernels.use_kernels:
        liger.apply_hub_kernels(model)
    if spec.kernels.cut_cross_entropy:
        if spec.trainer.trainer:
            raise UserError("cut cross entropy: TRL's trainers have a fused head of their own; leave it out")
        liger.apply_cut_cross_entropy(model)


def _keep_in_float32(model: Any, dtype: str) -> None:
    """Cast to float32 the weights that transformers keeps so even in half precision (T5's `wo` in float16).

    [transformers/modeling_utils.py, _get_dtype_plan; core_model_loading.py, build_glob_alternation]
    """
    kept = () if dtype == "float32" else model._keep_in_fp32_modules_strict or ()
    kept = [*kept, *(model._keep_in_fp32_modules or ())] if dtype == "float16" else kept
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point() and any(re.search(part.replace("*", ".*"), name) for part in kept):
            tensor.data = tensor.data.float()


def _untie(model: Any) -> None:
    """Give the head its own weight. A checkpoint with two weights loads this way, even if the class ties them (T5)."""
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if head is not None and head.weight is embeddings.weight:
        head.weight = torch.nn.Parameter(torch.empty_like(head.weight))


def _image_size(config: Mapping[str, Any], task: batches.Task) -> int:
    usual = 512 if task.table == "FOR_SEMANTIC_SEGMENTATION_" else 224  # ADE20K's crops, ImageNet's
    tower = config.get("vision_config") or {}
    size = config.get("image_size") or tower.get("image_size") or usual
    return int(size[0] if isinstance(size, (list, tuple)) else size)
