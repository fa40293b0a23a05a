"""Workloads of transformers models: the class of a config on the meta device, its batches and its loss.

transformers' own tables of auto classes decide which batch and loss a class is trained with: each `Task` is one table,
and its `Field`s describe one row of a batch. A class that is in none of these tables has no known training step.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional as F

from ckpt_ft.compat.libraries import FROM_CONFIG, attention_of, kept_in_float32, kept_strictly
from ckpt_ft.errors import UserError, one_line
from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.standins import flash_attention, liger
from ckpt_ft.validation import library_reads
from ckpt_ft.workloads.adapters import adapt, notes_on_experts
from ckpt_ft.workloads.from_trainer import own_loss
from ckpt_ft.workloads.images import RowImages, images_of_row
from ckpt_ft.workloads.model_config import (
    beyond_note,
    check_causal,
    position_limit,
    read_processor,
    set_router_loss,
    stretch_positions,
    trained_positions,
)
from ckpt_ft.workloads.workload import DTYPES, Batch, Forward, Loss, Workload

POSITIVES = "positives"  # input ids of the text that is paired with each row's text
POSITIVES_MASK = "positives_mask"  # the attention mask of these ids
_SCALE = 20.0  # default of sentence-transformers' MultipleNegativesRankingLoss


def in_batch_loss(model: Forward, batch: Batch) -> torch.Tensor:
    """The in-batch contrastive loss of sentence-transformers (MultipleNegativesRankingLoss)."""
    anchors = _embedded(model, batch["input_ids"], batch.get("attention_mask"))
    positives = _embedded(model, batch[POSITIVES], batch.get(POSITIVES_MASK))
    scores = _SCALE * F.normalize(anchors, dim=1) @ F.normalize(positives, dim=1).T
    return F.cross_entropy(scores, torch.arange(len(scores), device=scores.device))


def _embedded(model: Forward, ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Embeddings (rows, width): the mean over each row's tokens, as in sentence-transformers' Pooling."""
    tokens = model(input_ids=ids, attention_mask=mask).last_hidden_state
    mask = torch.ones_like(ids) if mask is None else mask
    weights = mask.unsqueeze(-1).expand(tokens.shape).to(tokens.dtype)
    mean: torch.Tensor = (tokens * weights).sum(1) / weights.sum(1).clamp(min=1e-9)
    return mean


_RATE = 16_000  # samples per second of every model that takes a waveform
_FRAMES = 100  # frames per second of a spectrogram
_LETTERS = 15  # spoken per second
_OTHER_SENSES = {"pixel_values", "input_features", "input_values"}  # inputs of multimodal models


@dataclass(frozen=True)
class Field:
    """An input: its `shape` for one sample, and for integers the number `top` of different values; 0 for floats."""

    shape: tuple[int, ...]
    top: int = 0


Fields = dict[str, Field]


def takes(model: Any) -> Collection[str]:
    """The names of the arguments of the model's forward."""
    return inspect.signature(model.forward).parameters


def _ids(model: Any, spec: TrainingSpec) -> Field:
    # a model without a vocabulary is refused where its fields are checked
    return Field((spec.data.tokens,), getattr(model.config.get_text_config(), "vocab_size", 2))


def _pixels(model: Any, spec: TrainingSpec) -> Field:
    return Field((getattr(model.config, "num_channels", 3), spec.data.resolution, spec.data.resolution))


def _class(model: Any, spec: TrainingSpec) -> Field:
    return Field((), model.config.num_labels)


def _class_of_text(model: Any, spec: TrainingSpec) -> Field:
    """A class, a switch for each class, or a score."""
    classes = model.config.num_labels
    several = model.config.problem_type == "multi_label_classification"
    return Field((classes,) if several else (), 0 if several or classes == 1 else classes)


def _log_mel(model: Any, spec: TrainingSpec) -> Field:
    """A log-mel window of 30 seconds, the only length that Whisper accepts."""
    config = model.config
    if not (hasattr(config, "num_mel_bins") and hasattr(config, "max_source_positions")):
        raise UserError(f"no batch is known for {type(model).__name__}; of speech inputs, only Whisper's are")
    return Field((config.num_mel_bins, 2 * config.max_source_positions))


def _sound(model: Any, spec: TrainingSpec) -> Field:
    """The waveform, or the features that the model takes instead."""
    config, seconds = model.config, spec.data.audio_seconds
    if "input_features" in takes(model):
        stacked = getattr(config, "feature_projection_input_dim", None)  # wav2vec2-BERT: two frames
        return Field((seconds * _FRAMES // 2, stacked)) if stacked else _log_mel(model, spec)
    if hasattr(config, "max_length") and hasattr(config, "num_mel_bins"):  # AST's spectrogram has one length
        return Field((config.max_length, config.num_mel_bins))
    return Field((seconds * _RATE,))


Input = Callable[[Any, TrainingSpec], Field]  # (model, spec) -> the input


@dataclass(frozen=True)
class Task:
    """The training task of the classes in a table of transformers' auto classes.

    Attributes:
        name: as `--task` has it.
        table: X of transformers' MODEL_XMAPPING_NAMES.
        inputs: what a row of a batch has, by name; "sound" is what forward names `input_features` or `input_values`.
        sized: the fields of the spec that set the size of a sample.
        loss: (forward, batch) -> scalar.
        loss_fields: inputs of the loss that forward does not take.
    """

    name: str
    table: str
    inputs: dict[str, Input]
    sized: tuple[str, ...] = ("seq_length",)
    loss: Loss = own_loss
    loss_fields: frozenset[str] = frozenset()

    @property
    def classes(self) -> dict[str, tuple[str, ...]]:
        """The names of the classes of each model type."""
        from transformers.models.auto import modeling_auto

        table = getattr(modeling_auto, f"MODEL_{self.table}MAPPING_NAMES")
        return {kind: (names,) if isinstance(names, str) else tuple(names) for kind, names in table.items()}

    def is_of_text(self, model: Any) -> bool:
        """Whether rows are text alone; so are those of a language model that also takes sound."""
        return self.inputs == _TEXT or (self.inputs == _SPEECH and not model.config.is_encoder_decoder)

    def fields(self, model: Any, spec: TrainingSpec) -> Fields:
        """The inputs of `model`."""
        inputs = _TEXT if self.is_of_text(model) else self.inputs
        sound = "input_features" if "input_features" in takes(model) else "input_values"
        return {sound if name == "sound" else name: make(model, spec) for name, make in inputs.items()}


_TEXT: dict[str, Input] = {"input_ids": _ids, "labels": _ids}
_SPEECH: dict[str, Input] = {"input_features": _log_mel, "labels": _ids}
_CLASSIFIED: dict[str, Input] = {"input_ids": _ids, "labels": _class_of_text}


def _position(model: Any, spec: TrainingSpec) -> Field:
    return Field((), spec.data.tokens)


# In order of preference: a configuration that names no class gets the first class for its model type.
TASKS = (
    Task("speech", "FOR_SPEECH_SEQ_2_SEQ_", _SPEECH),
    Task("seq2seq", "FOR_SEQ_TO_SEQ_CAUSAL_LM_", _TEXT),
    Task("causal-lm", "FOR_CAUSAL_LM_", _TEXT),
    Task("masked-lm", "FOR_MASKED_LM_", _TEXT),
    Task(
        "image-classification", "FOR_IMAGE_CLASSIFICATION_", {"pixel_values": _pixels, "labels": _class},
        ("resolution",),
    ),
    Task("image-text-to-text", "FOR_IMAGE_TEXT_TO_TEXT_", _TEXT),
    Task("text-classification", "FOR_SEQUENCE_CLASSIFICATION_", _CLASSIFIED),
    Task("token-classification", "FOR_TOKEN_CLASSIFICATION_", {
        "input_ids": _ids, "labels": lambda model, spec: Field((spec.data.tokens,), model.config.num_labels),
    }),
    Task("question-answering", "FOR_QUESTION_ANSWERING_", {
        "input_ids": _ids, "start_positions": _position, "end_positions": _position,
    }),
    Task("image-segmentation", "FOR_SEMANTIC_SEGMENTATION_", {
        "pixel_values": _pixels,
        "labels": lambda model, spec: Field((spec.data.resolution, spec.data.resolution), model.config.num_labels),
    }, ("resolution",)),
    Task("speech", "FOR_CTC_", {
        "sound": _sound,
        "labels": lambda model, spec: Field((spec.data.audio_seconds * _LETTERS,), model.config.vocab_size),
    }, ("audio_seconds",)),
    Task(
        "audio-classification", "FOR_AUDIO_CLASSIFICATION_", {"sound": _sound, "labels": _class}, ("audio_seconds",)
    ),
    Task(
        "contrastive", "FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_", {"input_ids": _ids, "pixel_values": _pixels},
        ("resolution", "seq_length"), lambda model, batch: own_loss(model, {**batch, "return_loss": True}),
    ),
    Task(
        "embedding", "", {"input_ids": _ids, POSITIVES: _ids}, loss=in_batch_loss, loss_fields=frozenset({POSITIVES})
    ),
    Task("reranker", "FOR_SEQUENCE_CLASSIFICATION_", _CLASSIFIED),
)  # fmt: skip


def task_of(class_name: str) -> Task | None:
    """The task of the transformers class of that name; None if no training step is known for it."""
    return next((task for task in TASKS if any(class_name in names for names in task.classes.values())), None)


def tasks_of(model_type: str) -> dict[str, Task]:
    """The tasks that transformers has a class of that type for, by name."""
    return {task.name: task for task in TASKS if model_type in task.classes}


def class_for(model_type: str) -> str:
    """The class for a model type whose configuration names none, towers included; "" if no task has that type."""
    found = [task.classes[model_type][0] for task in TASKS if model_type in task.classes]
    return max(found, key=lambda name: "ForConditional" in name, default="")


def check_fields(model: Any, fields: Collection[str]) -> None:
    """Raises UserError if the forward of `model` does not take `fields`, or needs other inputs, too."""
    parameters = inspect.signature(model.forward).parameters.values()
    missing = {p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD} - set(fields)
    foreign = set(fields) - {p.name for p in parameters}
    if missing or foreign:
        wants = ", ".join(sorted(missing)) or f"no {', '.join(sorted(foreign))}"
        raise UserError(f"no batch is known for {type(model).__name__}, which takes {wants}")


def notes_on(model: Any, task: Task, spec: TrainingSpec) -> tuple[str, ...]:
    """Returns what a batch of the task omits or assumes, one sentence each."""
    if task.name == "embedding":
        return ("rows are pairs, told apart from the others of their batch (sentence-transformers' in-batch loss)",)
    if not task.is_of_text(model) or spec.data.images:
        return ()
    senses = _OTHER_SENSES & set(takes(model))
    if senses:
        said = f"rows are text alone: what takes {', '.join(sorted(senses))} is resident and does not run"
        return (f"{said}; --images 1 gives rows one" if "pixel_values" in senses else said,)
    if "linear_attention" in (getattr(model.config.get_text_config(), "layer_types", None) or ()):
        return (
            "linear attention runs as without flash-linear-attention and causal-conv1d; with these packages a step "
            "needs less memory and far less time",
        )
    return ("sources and targets are of the same length",) if model.config.is_encoder_decoder else ()


def zeros(fields: Fields, samples: int, spec: TrainingSpec) -> Batch:
    """A micro-batch of zeros; floats are float32 under autocast, else they have the weights' dtype."""
    floats = torch.float32 if spec.precision.mixed_precision != "no" else DTYPES[spec.precision.dtype]
    return {
        name: torch.zeros(samples, *field.shape, dtype=torch.long if field.top else floats)
        for name, field in fields.items()
    }


def in_one_sequence(model: Any) -> bool:
    """Whether the rows of a batch must be packed into one sequence, as for flash attention, which gets no mask."""
    return "flash" in (attention_of(model.config.get_text_config()) or "")


_SECONDS = 10  # default length of audio


def transformers_model(name: str, config: Mapping[str, Any], spec: TrainingSpec) -> Workload:
    """The workload of a transformers config (one with `model_type`): of its `architectures[0]`, or else of its type.

    Raises:
        UserError: no training step is known for the class, it has fewer positions, or its config makes no model.
    """
    kind, task = class_and_task(name, config, spec.model.task)
    others = [] if spec.model.task or task.name != "masked-lm" else [*tasks_of(config["model_type"])]
    config, spec = _with_labels(name, config, task, spec.model.num_labels), spec.edit(task=task.name)
    if "resolution" in task.sized:
        spec = spec.edit(resolution=spec.data.resolution or _image_size(config, task))
        config = _of_size(config, spec.data.resolution)
    if "audio_seconds" in task.sized:
        spec = spec.edit(audio_seconds=spec.data.audio_seconds or _SECONDS)
    try:
        built = _build(name, kind, config, spec)
    except UserError as error:
        language = config.get("text_config") or {}
        if spec.data.images or not isinstance(error.__cause__, ImportError) or "model_type" not in language:
            raise
        found = transformers_model(name, language, spec.edit(task=""))
        without = f"the language model alone is predicted, without its towers: {one_line(error.__cause__, 100)}"
        return replace(found, notes=(without, *found.notes))
    seen = images_of_row(built, read_processor(name), spec) if spec.data.images else None
    if seen is not None and spec.data.rows == "packed":
        raise UserError("packed rows with images are not predicted, and no recipe trains them: leave packing out")
    spec, said = _with_length(name, built, spec, seen) if "seq_length" in task.sized else (spec, ())
    text = built.config.get_text_config()
    if task.inputs == _CLASSIFIED and text.pad_token_id is None:
        text.pad_token_id = 0  # as training code does: the model looks for the last token before the padding
    _fuse(built, spec)
    fields = task.fields(built, spec)
    check_fields(built, fields.keys() - task.loss_fields)
    if spec.data.rows != "alike" and "input_ids" not in fields:
        raise UserError(f"{spec.data.rows} rows: the batches of {name}, of kind '{task.name}', hold no text")

    def make_batch(samples: int, length: int | None) -> Batch:
        shaped = fields if length is None else task.fields(built, spec.edit(seq_length=length))
        batch = zeros(shaped, samples, spec)
        if seen is not None:
            seen.put_into(batch)
        if spec.data.rows == "padded":
            batch["attention_mask"] = torch.ones_like(batch["input_ids"])  # for the longest row; the others are padded
            batch["attention_mask"][1:, -1:] = 0
        elif spec.data.rows == "packed":
            tokens = batch["input_ids"].shape[1]  # of two rows, one after the other
            positions = torch.cat([torch.arange(tokens // 2), torch.arange(tokens - tokens // 2)])
            batch["position_ids"] = positions.expand(samples, -1).clone()
        return batch

    shape = {sized: (spec.data.tokens if sized == "seq_length" else spec.get(sized)) for sized in task.sized}
    if seen is not None:
        shape |= {"images": spec.data.images, "image_tokens": seen.image_tokens}
    if kind.__name__ not in (config.get("architectures") or [kind.__name__]):
        said = (*said, f"{kind.__name__} is trained: the checkpoint has another head, or none")
    if others:
        heads = ", ".join(other for other in others if other not in ("causal-lm", "masked-lm", "text-classification"))
        said = (*said, f"trained on masked tokens; --task text-classification for a classifier (or {heads})")
    notes = (*said, *notes_on(built, task, spec), *notes_on_experts(built, spec))
    return Workload(adapt(built, spec), make_batch, task.loss, kind=task.name, shape=shape, notes=notes)


def _with_length(
    name: str, model: Any, spec: TrainingSpec, seen: RowImages | None
) -> tuple[TrainingSpec, tuple[str, ...]]:
    """Returns the spec with the length of a sequence, and notes about it.

    A default length counts the text after the images, and is clamped to the number of positions that the model was
    trained on.

    Raises:
        UserError: the requested length exceeds the model's table of positions, or the images do not fit in it.
    """
    limit = position_limit(model) or (trained_positions(model.config) if spec.data.length_is_open else 0)
    images = seen.length if seen else 0
    length = spec.data.tokens + (images if spec.data.length_is_open else 0)
    said: tuple[str, ...] = ()
    if 0 < limit < length:
        if not spec.data.length_is_open:
            raise UserError(f"sequence length {length}: {name} has {limit} positions")
        length, said = limit, (f"sequences of {limit} tokens: {name} has no more positions",)
    if images >= length:
        wide, high = spec.data.image_size
        raise UserError(
            f"sequence length {length}: {spec.data.images} images of {wide}x{high} pixels take {images} tokens "
            "of it; give a longer one, or fewer or smaller images"
        )
    beyond = beyond_note(model.config, spec.model.rope_scaling, length)
    return spec.edit(seq_length=length), (*said, *([beyond] if beyond else ()))


def _of_size(config: Mapping[str, Any], side: int) -> Mapping[str, Any]:
    """Returns `config` for images of `side` x `side` pixels."""
    if isinstance(config.get("vision_config"), Mapping):
        return {**config, "vision_config": _of_size(config["vision_config"], side)}
    return {**config, "image_size": side} if "image_size" in config else config


def class_and_task(name: str, config: Mapping[str, Any], asked: str = "") -> tuple[Any, Task]:
    """The class to build and its task: the one that `asked` names, or else that of the configuration's class.

    A bare backbone is replaced by the class that adds a head to it.
    """
    import transformers

    kind, named = config["model_type"], (config.get("architectures") or [""])[0]
    if asked:
        tasks = tasks_of(kind)
        if asked not in tasks:
            raise UserError(f"task {asked}: transformers has no {kind} for it; {name} has {', '.join(tasks)}")
        classes = tasks[asked].classes[kind]
        return getattr(transformers, named if named in classes else classes[0]), tasks[asked]
    named = named or class_for(kind)
    found = getattr(transformers, named, None)
    if found is None:
        wanted = f"class {named}" if named else f"model of type '{kind}' whose training step is known"
        raise UserError(f"{name}: transformers {transformers.__version__} has no {wanted}")
    task = task_of(named)
    if task is None:
        kinds = ", ".join(dict.fromkeys(task.name for task in TASKS))
        raise UserError(f"{name}: no training step is known for {named} (known: {kinds})")
    alone = task.loss_fields and found.main_input_name != "input_ids"  # a backbone for images or sound
    if alone and class_for(kind) != named:
        return class_and_task(name, {"model_type": kind})
    scores = len(config.get("id2label") or ()) == 1 and task.name == "text-classification"
    if scores and "masked-lm" in tasks_of(kind):  # sentence-transformers' CrossEncoder
        return found, tasks_of(kind)["reranker"]
    return found, task


def _with_labels(name: str, config: Mapping[str, Any], task: Task, labels: int) -> Mapping[str, Any]:
    """Returns `config` with that number of labels; 0 keeps its own, of which a reranker has one."""
    if labels and not re.search("classification|segmentation|reranker", task.name):
        raise UserError(f"{labels} labels: {name}, of kind '{task.name}', has none; --task text-classification has")
    labels = labels or int(task.name == "reranker")
    if not labels:
        return config
    own = {key: value for key, value in config.items() if key not in ("id2label", "label2id")}
    # a reranker's scores have the binary cross entropy of sentence-transformers' CrossEncoder
    binary = task.name == "reranker" and labels == 1
    return {**own, "num_labels": labels, **({"problem_type": "multi_label_classification"} if binary else {})}


def _build(name: str, kind: Any, config: Mapping[str, Any], spec: TrainingSpec) -> Any:
    """The model on the meta device in the spec's dtype, from its config."""
    from transformers import AutoConfig

    attention: str | None = spec.kernels.attn_implementation or None
    if attention not in (None, "sdpa", "eager"):
        flash_attention.register()
        flash = attention != "flex_attention"
        if not getattr(kind, "_supports_flash_attn" if flash else "_supports_flex_attn", False):
            raise UserError(f"{name}: transformers has no {attention} for {kind.__name__}", attn_implementation="")
        if flash:
            attention = flash_attention.NAME_3 if attention.endswith("3") else flash_attention.NAME
    values = {key: value for key, value in config.items() if key not in ("model_type", "quantization_config")}
    with library_reads(f"{name}: its config does not make a model"):
        parsed = AutoConfig.for_model(config["model_type"], **values)
        if (task := task_of(kind.__name__)) and task.name == "causal-lm":
            check_causal(name, parsed)
        stretch_positions(parsed, spec.model.rope_scaling, spec.data.tokens)
        set_router_loss(parsed, spec.model.router_aux_loss_coef, kind, by_trl=bool(spec.trainer.trainer))
        with torch.device("meta"):
            model = getattr(kind, FROM_CONFIG)(
                parsed, dtype=DTYPES[spec.precision.dtype], attn_implementation=attention,
                experts_implementation=spec.kernels.experts_implementation or None,
            )  # fmt: skip
    if config.get("tie_word_embeddings") is False:  # a checkpoint has two weights, even if the class ties them (T5)
        head = model.get_output_embeddings()
        if head is not None and head.weight is model.get_input_embeddings().weight:
            head.weight = torch.nn.Parameter(torch.empty_like(head.weight))
    keep_in_float32(model, spec.precision.dtype)
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
    if spec.kernels.cut_cross_entropy:
        if spec.trainer.trainer:
            raise UserError("cut cross entropy: TRL's trainers have a fused head of their own; leave it out")
        liger.apply_cut_cross_entropy(model)


def keep_in_float32(model: Any, dtype: str) -> None:
    """Cast to float32 the weights that transformers keeps so even in half precision (T5's `wo` in float16).

    [transformers/modeling_utils.py, _get_dtype_plan; core_model_loading.py, build_glob_alternation]
    """
    kept = () if dtype == "float32" else kept_strictly(model) or ()
    kept = [*kept, *(kept_in_float32(model) or ())] if dtype == "float16" else kept
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point() and any(re.search(part.replace("*", ".*"), name) for part in kept):
            tensor.data = tensor.data.float()


def _image_size(config: Mapping[str, Any], task: Task) -> int:
    usual = 512 if task.table == "FOR_SEMANTIC_SEGMENTATION_" else 224  # ADE20K's crops, ImageNet's
    tower = config.get("vision_config") or {}
    size = config.get("image_size") or tower.get("image_size") or usual
    side = size[0] if isinstance(size, (list, tuple)) else size
    if not isinstance(side, (int, float)):
        raise UserError(f"image_size {str(size)[:50]!r} of the model's config is no number of pixels")
    return int(side)
