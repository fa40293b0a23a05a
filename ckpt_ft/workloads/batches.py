"""Batches and losses of transformers models, chosen by transformers' own tables of auto classes.

The `Field`s of one row describe a batch. A class that is in no table of `TASKS` has no known training step. The end of
the file handles packed rows of vision-language models: which models keep them apart, and by which positions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from ckpt_ft.errors import UserError
from ckpt_ft.spec.training_spec import TrainingSpec

from .workload import DTYPES, Batch, Forward, Loss

POSITIVES = "positives"  # input ids of the text that is paired with each row's text
_SCALE = 20.0  # default of sentence-transformers' MultipleNegativesRankingLoss


def own_loss(model: Forward, batch: Batch) -> torch.Tensor:
    """The loss that a transformers model computes itself."""
    loss: torch.Tensor = model(**batch).loss
    return loss


def of_pairs_by_itself(model: Forward, batch: Batch) -> torch.Tensor:
    """The contrastive loss of CLIP and similar models, which compute it if `return_loss` is set."""
    return own_loss(model, {**batch, "return_loss": True})


def of_pairs(model: Forward, batch: Batch) -> torch.Tensor:
    """The in-batch contrastive loss of sentence-transformers (MultipleNegativesRankingLoss)."""
    rows = {name: value for name, value in batch.items() if name != POSITIVES}
    anchors, positives = (
        _embedded(model, {**rows, "input_ids": ids}) for ids in (batch["input_ids"], batch[POSITIVES])
    )
    scores = _SCALE * F.normalize(anchors, dim=1) @ F.normalize(positives, dim=1).T
    return F.cross_entropy(scores, torch.arange(len(scores), device=scores.device))


def _embedded(model: Forward, inputs: Batch) -> torch.Tensor:
    """Embeddings (rows, width): the mean over each row's tokens, as in sentence-transformers' Pooling."""
    tokens = model(**inputs).last_hidden_state
    mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))
    weights = mask.unsqueeze(-1).expand(tokens.shape).to(tokens.dtype)
    mean: torch.Tensor = (tokens * weights).sum(1) / weights.sum(1).clamp(min=1e-9)
    return mean


_RATE = 16_000  # samples per second of every model that takes a waveform
_FRAMES = 100  # frames per second of a spectrogram
_LETTERS = 15  # spoken per second
_OTHER_SENSES = {"pixel_values", "input_features", "input_values"}  # inputs of multimodal models


@dataclass(frozen=True)
class Field:
    """One input: its `shape` for one sample, and the number of classes `top` of integers; 0 for floats."""

    shape: tuple[int, ...]
    top: int = 0


Fields = dict[str, Field]


@dataclass(frozen=True)
class Task:
    """The training task of the classes in a table of transformers' auto classes.

    Attributes:
        kind: the name in messages, for example "language model".
        table: X of transformers' MODEL_XMAPPING_NAMES.
        fields: (model, spec) -> the inputs.
        sized: the fields of the spec that set the size of a sample.
        loss: (forward, batch) -> scalar.
        loss_fields: inputs of the loss that forward does not take.
    """

    kind: str
    table: str
    fields: Callable[[Any, TrainingSpec], Fields]
    sized: tuple[str, ...] = ("seq_length",)
    loss: Loss = own_loss
    loss_fields: frozenset[str] = frozenset()

    @property
    def classes(self) -> dict[str, tuple[str, ...]]:
        """The names of the classes of each model type."""
        from transformers.models.auto import modeling_auto

        table = getattr(modeling_auto, f"MODEL_{self.table}MAPPING_NAMES")
        return {kind: (names,) if isinstance(names, str) else tuple(names) for kind, names in table.items()}


def _text(model: Any, spec: TrainingSpec) -> Fields:
    ids = Field((spec.data.tokens,), model.config.get_text_config().vocab_size)
    return {"input_ids": ids, "labels": ids}


def _speech(model: Any, spec: TrainingSpec) -> Fields:
    labels = Field((spec.data.tokens,), model.config.vocab_size)
    return {"input_features": _log_mel(model), "labels": labels}


def _log_mel(model: Any) -> Field:
    """A log-mel window of 30 seconds, the only length that Whisper accepts."""
    config = model.config
    if not (hasattr(config, "num_mel_bins") and hasattr(config, "max_source_positions")):
        raise UserError(f"no batch is known for {type(model).__name__}: of speech, Whisper's log-mel windows are")
    return Field((config.num_mel_bins, 2 * config.max_source_positions))


def _sound(model: Any, spec: TrainingSpec) -> Fields:
    """The waveform, or the features that the model takes instead."""
    config, taken = model.config, inspect.signature(model.forward).parameters
    if (
        hasattr(config, "feature_projection_input_dim") and "input_features" in taken
    ):  # wav2vec2-BERT: two frames stacked
        return {"input_features": Field((spec.data.audio_seconds * _FRAMES // 2, config.feature_projection_input_dim))}
    if "input_features" in taken:
        return {"input_features": _log_mel(model)}
    if hasattr(config, "max_length") and hasattr(config, "num_mel_bins"):  # AST's spectrogram has one length
        return {"input_values": Field((config.max_length, config.num_mel_bins))}
    return {"input_values": Field((spec.data.audio_seconds * _RATE,))}


def _letters(model: Any, spec: TrainingSpec) -> Fields:
    letters = Field((spec.data.audio_seconds * _LETTERS,), model.config.vocab_size)
    return {**_sound(model, spec), "labels": letters}


def _whole_sound(model: Any, spec: TrainingSpec) -> Fields:
    return {**_sound(model, spec), "labels": Field((), model.config.num_labels)}


def _pixels(model: Any, spec: TrainingSpec) -> Field:
    side = spec.data.resolution
    return Field((getattr(model.config, "num_channels", 3), side, side))


def _image(model: Any, spec: TrainingSpec) -> Fields:
    return {"pixel_values": _pixels(model, spec), "labels": Field((), model.config.num_labels)}


def _each_pixel(model: Any, spec: TrainingSpec) -> Fields:
    side = spec.data.resolution
    return {"pixel_values": _pixels(model, spec), "labels": Field((side, side), model.config.num_labels)}


def _image_and_text(model: Any, spec: TrainingSpec) -> Fields:
    return {"input_ids": _text(model, spec)["input_ids"], "pixel_values": _pixels(model, spec)}


def _pair(model: Any, spec: TrainingSpec) -> Fields:
    check_fields(model, {"input_ids"})
    ids = _text(model, spec)["input_ids"]
    return {"input_ids": ids, POSITIVES: ids}


def _whole_text(model: Any, spec: TrainingSpec) -> Fields:
    classes = model.config.num_labels
    several = model.config.problem_type == "multi_label_classification"
    labels = Field((classes,) if several else (), 0 if several or classes == 1 else classes)
    return {"input_ids": _text(model, spec)["input_ids"], "labels": labels}


def _each_token(model: Any, spec: TrainingSpec) -> Fields:
    labels = Field((spec.data.tokens,), model.config.num_labels)
    return {"input_ids": _text(model, spec)["input_ids"], "labels": labels}


def _span(model: Any, spec: TrainingSpec) -> Fields:
    position = Field((), spec.data.tokens)
    ids = _text(model, spec)["input_ids"]
    return {"input_ids": ids, "start_positions": position, "end_positions": position}


# In order of preference: a configuration that names no class gets the first class for its model type.
TASKS = (
    Task("speech recogniser", "FOR_SPEECH_SEQ_2_SEQ_", _speech),
    Task("sequence-to-sequence model", "FOR_SEQ_TO_SEQ_CAUSAL_LM_", _text),
    Task("language model", "FOR_CAUSAL_LM_", _text),
    Task("language model", "FOR_MASKED_LM_", _text),
    Task("image classifier", "FOR_IMAGE_CLASSIFICATION_", _image, ("resolution",)),
    Task("language model", "FOR_IMAGE_TEXT_TO_TEXT_", _text),
    Task("text classifier", "FOR_SEQUENCE_CLASSIFICATION_", _whole_text),
    Task("token classifier", "FOR_TOKEN_CLASSIFICATION_", _each_token),
    Task("question answerer", "FOR_QUESTION_ANSWERING_", _span),
    Task("image segmenter", "FOR_SEMANTIC_SEGMENTATION_", _each_pixel, ("resolution",)),
    Task("speech recogniser", "FOR_CTC_", _letters, ("audio_seconds",)),
    Task("audio classifier", "FOR_AUDIO_CLASSIFICATION_", _whole_sound, ("audio_seconds",)),
    Task(
        "image-text model", "FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_", _image_and_text, ("resolution", "seq_length"),
        of_pairs_by_itself,
    ),
    Task("embedding model", "", _pair, loss=of_pairs, loss_fields=frozenset({POSITIVES})),
)  # fmt: skip


def task_of(class_name: str) -> Task | None:
    """The task of the transformers class of that name; None if no training step is known for it."""
    return next((task for task in TASKS if any(class_name in names for names in task.classes.values())), None)


def class_for(model_type: str) -> str:
    """The class for a model type whose configuration names none; "" if no task has that type."""
    return next((task.classes[model_type][0] for task in TASKS if model_type in task.classes), "")


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
    if task.fields is _pair:
        return ("rows are pairs, told apart from the others of their batch (sentence-transformers' in-batch loss)",)
    if task.fields is not _text or spec.data.images:
        return ()
    senses = _OTHER_SENSES & set(inspect.signature(model.forward).parameters)
    if senses:
        said = f"rows are text alone: what takes {', '.join(sorted(senses))} is resident and does not run"
        return (said,)
    return ("sources and targets are of the same length",) if model.config.is_encoder_decoder else ()


def zeros(fields: Fields, samples: int, spec: TrainingSpec) -> Batch:
    """A micro-batch of zeros; floats are float32 under autocast, else they have the weights' dtype."""
    floats = torch.float32 if spec.precision.mixed_precision != "no" else DTYPES[spec.precision.dtype]
    return {
        name: torch.zeros(samples, *field.shape, dtype=torch.long if field.top else floats)
        for name, field in fields.items()
    }


# Types of vision-language models, and of the language models in them, that keep packed rows apart. transformers'
# attention, given neither a mask nor a KV cache, starts a new row where the positions restart (masking_utils.py,
# find_packed_sequence_indices); flash attention does so only in a batch of one sequence
# (modeling_flash_attention_utils.py, _is_packed_sequence). A test compares packed rows of each type with single rows.
# Types are excluded if their mask does not follow the positions (PaliGemma's prefixes, images under Gemma 3's sliding
# window), if their text attends to images in separate layers (Llama 3.2 Vision, IDEFICS), or if they carry a state
# along the sequence (Qwen3.5, LFM2-VL).
SEEING = {
    "aya_vision", "glm4v", "idefics2", "idefics3", "internvl", "llava", "llava_next", "llava_onevision", "qwen2_5_vl",
    "qwen2_vl", "qwen3_vl", "smolvlm",
}  # fmt: skip
READING = {
    "cohere2", "gemma", "glm4v_text", "granite", "llama", "mistral", "olmo2", "phi3", "qwen2",
    "qwen2_5_vl_text", "qwen2_vl_text", "qwen3", "qwen3_vl_text", "smollm3",
}  # fmt: skip


def check_packing(model: Any) -> None:
    """Raises UserError if packed rows with images might attend to each other."""
    kind, text = model.config.model_type, model.config.get_text_config().model_type
    if kind not in SEEING:
        raise UserError(f"packing: a {kind} is not known to keep packed rows apart ({', '.join(sorted(SEEING))} do)")
    if text not in READING:
        raise UserError(f"packing: the {text} in this {kind} is not known to keep packed rows apart; leave it out")


def in_one_sequence(model: Any) -> bool:
    """Whether the rows of a batch must be packed into one sequence, as for flash attention, which gets no mask."""
    return "flash" in (model.config.get_text_config()._attn_implementation or "")


@dataclass(frozen=True)
class ImagePositions:
    """Positions of image tokens by time, height and width, as some models (Qwen-VL) use them.

    kind, config: the class and configuration of the model's part that computes the positions. Its weights are not
    needed, so they are not sent to the processes that fetch batches.
    """

    kind: type[nn.Module]
    config: Any

    @classmethod
    def of(cls, model: nn.Module) -> ImagePositions | None:
        """The positions of `model`; None if its positions only count tokens."""
        knows = next((module for module in model.modules() if hasattr(type(module), "get_rope_index")), None)
        return None if knows is None else cls(type(knows), knows.config)

    def compute(self, batch: Batch) -> Tensor:
        """Returns positions (4, sequences, tokens): first `position_ids` of `batch`, which restart in each row."""
        along = batch["position_ids"]
        lengths = along.numel() - (along.flatten() == 0).nonzero().flatten()
        lengths = (lengths - torch.cat([lengths[1:], lengths.new_zeros(1)])).tolist()
        ids, kinds = (
            pad_sequence(batch[name].flatten().split(lengths), batch_first=True)
            for name in ("input_ids", "mm_token_type_ids")
        )
        there = pad_sequence([torch.ones(length, dtype=torch.bool) for length in lengths], batch_first=True)
        bare: Any = self.kind.__new__(self.kind)  # an instance without layers
        nn.Module.__init__(bare)
        bare.config = self.config
        found, _ = bare.get_rope_index(
            ids, mm_token_type_ids=kinds, image_grid_thw=batch.get("image_grid_thw"), attention_mask=there
        )
        return torch.cat([along[None], found[:, there].view(3, *along.shape)])


def one_behind_another(rows: Sequence[Batch], along: Collection[str], image_positions: ImagePositions | None) -> Batch:
    """Pack one row of each batch into each sequence; inputs in `along` are joined along the tokens."""
    batch = {name: torch.cat([row[name] for row in rows], 1 if name in along else 0) for name in rows[0]}
    positions = torch.cat([torch.arange(row["input_ids"].shape[1]) for row in rows])
    batch["position_ids"] = positions.expand(len(batch["input_ids"]), -1).clone()
    return batch if image_positions is None else {**batch, "position_ids": image_positions.compute(batch)}
