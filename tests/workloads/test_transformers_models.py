"""The class named in a configuration is estimated on a batch of its own task, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from model_configs import write_config
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    Gemma3ForConditionalGeneration,
)

from ckpt_ft.errors import UserError
from ckpt_ft.planning.check import check_model
from ckpt_ft.spec.training_spec import ModelSpec, TrainingSpec
from ckpt_ft.workloads.load import load
from ckpt_ft.workloads.transformers_models import TASKS, class_for

TEXT = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 64,
}  # fmt: skip
BERT = {"model_type": "bert", "num_labels": 3, **TEXT}
ANSWERS = {**BERT, "num_labels": 2}
XLNET = {"model_type": "xlnet", "vocab_size": 64, "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 32}
LLAMA = {"model_type": "llama", "num_key_value_heads": 1, **TEXT}
DECODER = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "vocab_size": 64}
FFN = {"decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
BART = {"model_type": "bart", "max_position_embeddings": 64, **DECODER, **FFN}
T5 = {
    "model_type": "t5", "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 64,
    "decoder_start_token_id": 0,
}  # fmt: skip
WHISPER = {
    "model_type": "whisper", "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 40,
    **DECODER, **FFN, "decoder_start_token_id": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SIGHT = {
    "model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "image_size": 32, "patch_size": 16,
}  # fmt: skip
GEMMA = {
    "model_type": "gemma3",
    "text_config": {"model_type": "gemma3_text", "num_key_value_heads": 1, "head_dim": 8, **TEXT},
    "vision_config": SIGHT,
    "mm_tokens_per_image": 4,
}
VIT = {"model_type": "vit", "num_labels": 3, **{k: v for k, v in SIGHT.items() if k != "model_type"}}
CLIP = {
    "model_type": "clip", "projection_dim": 16, "text_config": {**TEXT, "eos_token_id": 2},
    "vision_config": {k: v for k, v in SIGHT.items() if k != "model_type"},
}  # fmt: skip
WAVE = {
    "model_type": "wav2vec2", "conv_dim": [8] * 7, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
    "mask_time_length": 2, "num_labels": 3, "classifier_proj_size": 8,
    **{k: v for k, v in TEXT.items() if k != "max_position_embeddings"},
}  # fmt: skip
SPECTRUM = {
    "model_type": "audio-spectrogram-transformer", "max_length": 64, "num_mel_bins": 32, "patch_size": 16,
    "frequency_stride": 16, "time_stride": 16, "num_labels": 3,
    **{k: v for k, v in SIGHT.items() if k not in ("model_type", "image_size", "patch_size")},
}  # fmt: skip
SEGMENTS = {
    "model_type": "segformer", "num_labels": 3, "hidden_sizes": [8] * 4, "depths": [1] * 4, "decoder_hidden_size": 8,
    "num_attention_heads": [1] * 4, "sr_ratios": [2, 2, 1, 1],
}  # fmt: skip
SOUND = {"input_values": (2, 16_000)}
IDS = {"input_ids": (2, 24)}
LABELS = {"labels": (2, 24)}
CLASSES = {
    "XLNetForTokenClassification": (XLNET, "token-classification", {**IDS, **LABELS}),
    "BertForMaskedLM": (BERT, "masked-lm", {**IDS, **LABELS}),
    "BertForSequenceClassification": (BERT, "text-classification", {**IDS, "labels": (2,)}),
    "LlamaForSequenceClassification": (LLAMA, "text-classification", {**IDS, "labels": (2,)}),
    "BertForTokenClassification": (BERT, "token-classification", {**IDS, **LABELS}),
    "BertForQuestionAnswering": (
        ANSWERS,
        "question-answering",
        {**IDS, "start_positions": (2,), "end_positions": (2,)},
    ),
    "BartForConditionalGeneration": (BART, "seq2seq", {**IDS, **LABELS}),
    "T5ForConditionalGeneration": (T5, "seq2seq", {**IDS, **LABELS}),
    "WhisperForConditionalGeneration": (WHISPER, "speech", {"input_features": (2, 8, 40), **LABELS}),
    "Gemma3ForConditionalGeneration": (GEMMA, "causal-lm", {**IDS, **LABELS}),
    "ViTForImageClassification": (VIT, "image-classification", {"pixel_values": (2, 3, 32, 32), "labels": (2,)}),
    "BertModel": (BERT, "embedding", {**IDS, "positives": (2, 24)}),
    "LlamaModel": (LLAMA, "embedding", {**IDS, "positives": (2, 24)}),
    "Wav2Vec2ForCTC": (WAVE, "speech", {**SOUND, "labels": (2, 15)}),
    "Wav2Vec2ForSequenceClassification": (WAVE, "audio-classification", {**SOUND, "labels": (2,)}),
    "ASTForAudioClassification": (SPECTRUM, "audio-classification", {"input_values": (2, 64, 32), "labels": (2,)}),
    "WhisperForAudioClassification": (
        {**WHISPER, "num_labels": 3},
        "audio-classification",
        {"input_features": (2, 8, 40), "labels": (2,)},
    ),
    "SegformerForSemanticSegmentation": (
        SEGMENTS,
        "image-segmentation",
        {"pixel_values": (2, 3, 64, 64), "labels": (2, 64, 64)},
    ),
    "CLIPModel": (CLIP, "contrastive", {**IDS, "pixel_values": (2, 3, 32, 32)}),
}
# arguments that make a step short
ASKED: dict[str, dict[str, Any]] = {
    "speech": {"audio_seconds": 1},
    "audio-classification": {"audio_seconds": 1},
    "image-segmentation": {"resolution": 64},
}


def written(path: Path, config: dict[str, Any], *architectures: str) -> str:
    return write_config(path, {**config, **({"architectures": architectures} if architectures else {})})


@pytest.mark.parametrize("name", CLASSES)
def test_named_class_is_traced_on_its_own_batch(name: str, tmp_path: Path) -> None:
    """The estimate has the weights of the class, its step runs, and a policy keeps its numbers."""
    import transformers

    config, kind, shapes = CLASSES[name]
    file = written(tmp_path, config, name)
    asked = {} if name == "WhisperForConditionalGeneration" else ASKED.get(kind, {})  # its windows have 30 seconds
    settings = TrainingSpec.of(default_seq_length=24, **asked)
    workload = load(settings.edit(model=file), "cpu")
    assert type(workload.model).__name__ == name
    assert workload.kind == kind
    assert {key: tuple(x.shape) for key, x in workload.make_batch(2, None).items()} == shapes
    real = getattr(transformers, name)(workload.model.config)
    assert workload.trace(2).at_peak["parameters"] == sum(p.nbytes for p in real.parameters())
    assert check_model(settings.edit(model=file, policy="full", batch_size=2), 0).ok


@pytest.mark.parametrize(
    ("task", "labels", "kind", "shapes"),
    [
        ("masked-lm", 0, "BertForMaskedLM", LABELS), ("causal-lm", 0, "BertLMHeadModel", None),
        ("text-classification", 0, "BertForSequenceClassification", {"labels": (2,)}),
        ("text-classification", 7, "BertForSequenceClassification", {"labels": (2,)}),
        ("token-classification", 9, "BertForTokenClassification", LABELS),
        ("reranker", 0, "BertForSequenceClassification", {"labels": (2, 1)}),
        ("embedding", 0, "BertModel", {"positives": (2, 24)}),
    ],
)  # fmt: skip
def test_asked_task_decides_class_and_batch(
    task: str, labels: int, kind: str, shapes: dict[str, Any] | None, tmp_path: Path
) -> None:
    spec = TrainingSpec.of(written(tmp_path, BERT, "BertForMaskedLM"), default_seq_length=24, task=task)
    spec = spec.edit(num_labels=labels)
    if shapes is None:
        with pytest.raises(UserError, match="cannot be trained as a causal language model: a bert is an encoder"):
            load(spec, "cpu")
        return
    workload = load(spec, "cpu")
    model: Any = workload.model
    assert (type(model).__name__, workload.kind) == (kind, task)
    assert {key: tuple(x.shape) for key, x in workload.make_batch(2, None).items()} == {**IDS, **shapes}
    if hasattr(model, "classifier"):
        assert model.classifier.out_features == (labels or {"reranker": 1}.get(task, BERT["num_labels"]))
    assert workload.name.endswith(f"as {task}")
    assert workload.trace(2).at_peak["parameters"] == sum(p.nbytes for p in model.parameters())


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"task": "speech"}, "task speech: transformers has no bert for it; .* has .*text-classification"),
        ({"task": "masked-lm", "num_labels": 3}, "3 labels: .* of kind 'masked-lm', has none; --task text-class"),
    ],
)
def test_task_or_labels_that_a_model_lacks_are_refused(settings: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=says):
        load(TrainingSpec.of(written(tmp_path, BERT, "BertForMaskedLM"), **settings), "cpu")


def test_tasks_of_the_spec_are_the_known_ones() -> None:
    assert set(get_args(get_type_hints(ModelSpec)["task"])) == {"", *(task.name for task in TASKS)}


@pytest.mark.parametrize("task", ["text-classification", "token-classification", "reranker"])
def test_adapters_train_a_classifiers_new_head(task: str, tmp_path: Path) -> None:
    """PEFT trains the head whole for such a task type, as its own checkpoints have it."""
    spec = TrainingSpec.of(written(tmp_path, BERT, "BertForMaskedLM"), default_seq_length=24, task=task, lora_r=4)
    trained = {name for name, weight in load(spec, "cpu").model.named_parameters() if weight.requires_grad}
    assert {name for name in trained if "lora_" not in name} == {
        "base_model.model.classifier.modules_to_save.default.weight",
        "base_model.model.classifier.modules_to_save.default.bias",
    }


@pytest.mark.parametrize(
    ("config", "architectures", "says"),
    [
        (
            VIT,
            ["ViTForMaskedImageModeling"],
            r"no training step is known for ViTForMa\w+ \(known: speech, seq2seq.*image",
        ),
        ({"model_type": "vit_mae"}, ["ViTMAEModel"], "no batch is known for ViTMAEModel, which takes no input_ids"),
        (BERT, ["BertForPreTraining"], "no training step is known for BertForPreTraining"),
        (BERT, ["BertForNothing"], r"transformers [\d.]+ has no class BertForNothing"),
        (
            {"model_type": "speech_to_text"},
            ["Speech2TextForConditionalGeneration"],
            "no batch is known for Speech2TextForConditionalGeneration; of speech inputs, only Whisper's are",
        ),
        (WHISPER, ["WhisperForConditionalGeneration"], "sequence length 50: .* has 40 positions"),
    ],
)
def test_class_without_a_known_step_is_refused_by_name(
    config: dict[str, Any], architectures: list[str], says: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=says) as refused:
        load(TrainingSpec.of(written(tmp_path, config, *architectures), seq_length=50), "cpu")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (LLAMA, "LlamaForCausalLM"), (T5, "T5ForConditionalGeneration"), (WHISPER, "WhisperForConditionalGeneration"),
        (VIT, "ViTForImageClassification"), (GEMMA, "Gemma3ForConditionalGeneration"),
    ],
)  # fmt: skip
def test_model_type_decides_without_architectures(config: dict[str, Any], named: str, tmp_path: Path) -> None:
    assert type(load(TrainingSpec.of(written(tmp_path, config), default_seq_length=24), "cpu").model).__name__ == named


def test_text_rows_for_a_vision_language_model_are_noted(tmp_path: Path) -> None:
    workload = load(TrainingSpec.of(written(tmp_path, GEMMA, "Gemma3ForConditionalGeneration"), seq_length=24), "cpu")
    assert workload.notes == (
        "rows are text alone: what takes pixel_values is resident and does not run; --images 1 gives rows one",
    )
    assert workload.trace(1).notes[0] == workload.notes[0]


def test_towers_whose_library_is_missing_leave_the_language_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_a_library(*_: Any, **__: Any) -> None:
        raise ImportError("TimmWrapperModel requires the timm library")

    assert class_for("qwen3_5") == "Qwen3_5ForConditionalGeneration"
    path = write_config(tmp_path, GEMMA)
    monkeypatch.setattr(Gemma3ForConditionalGeneration, "_from_config", without_a_library)
    workload = load(TrainingSpec.of(path, seq_length=16), "cpu")
    assert type(workload.model).__name__ == "Gemma3ForCausalLM"
    assert workload.notes[0].endswith("without its towers: TimmWrapperModel requires the timm library")
    with pytest.raises(UserError, match="its config does not make a model: ImportError: TimmWrapperModel"):
        load(TrainingSpec.of(path, seq_length=16, images=1), "cpu")


def test_missing_argument_of_forward_is_one_line(tmp_path: Path) -> None:
    cross = {"model_type": "encoder-decoder", "encoder": BERT, "decoder": {**BERT, "is_decoder": True}}
    workload = load(TrainingSpec.of(written(tmp_path, cross, "EncoderDecoderModel"), seq_length=24), "cpu")
    with pytest.raises(UserError, match="its forward refuses a batch of input_ids, labels: .*decoder_start_token_id"):
        workload.trace(1)


def test_regression_labels_are_floats(tmp_path: Path) -> None:
    def labels(**more: Any) -> torch.Tensor:
        file = written(tmp_path, {**BERT, **more}, "BertForSequenceClassification")
        found: torch.Tensor = load(TrainingSpec.of(file, seq_length=24), "cpu").make_batch(2, None)["labels"]
        return found

    assert (labels(num_labels=1).dtype, labels(num_labels=1).shape) == (torch.float32, (2,))
    several = labels(problem_type="multi_label_classification")
    assert (several.dtype, several.shape) == (torch.float32, (2, 3))


@pytest.mark.parametrize(
    ("backbone", "trained", "config"),
    [
        ("Dinov2Model", "Dinov2ForImageClassification", {"model_type": "dinov2", "image_size": 28, "patch_size": 14}),
        ("HubertModel", "HubertForCTC", {"model_type": "hubert"}),
    ],
)
def test_backbone_is_trained_with_a_head(backbone: str, trained: str, config: dict[str, Any], tmp_path: Path) -> None:
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_labels": 3}
    workload = load(TrainingSpec.of(written(tmp_path, {**small, **config}, backbone)), "cpu")
    assert type(workload.model).__name__ == trained
    assert workload.notes == (f"{trained} is trained: the checkpoint has another head, or none",)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["t5", "gpt_oss"])
def test_weights_have_the_dtypes_of_a_loaded_checkpoint(kind: str, dtype: str, tmp_path: Path) -> None:
    """T5's `wo` and gpt-oss' norms are float32 in a float16 model, but not in a bfloat16 model."""
    sizes = {
        "t5": {"d_model": 32, "d_ff": 64, "num_layers": 1, "num_heads": 2, "d_kv": 16, "decoder_start_token_id": 0},
        "gpt_oss": {
            "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
            "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 4,
        },
    }[kind]  # fmt: skip
    auto = AutoModelForSeq2SeqLM if kind == "t5" else AutoModelForCausalLM
    model = auto.from_config(AutoConfig.for_model(kind, vocab_size=64, **sizes))
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=getattr(torch, dtype))
    workload = load(TrainingSpec.of(str(tmp_path / "config.json"), dtype=dtype, seq_length=16), "t4")
    assert _dtypes(workload.model) == _dtypes(loaded)
    kept = {"t5": ".wo.", "gpt_oss": "norm."}[kind]
    assert {found for name, found in _dtypes(loaded).items() if kept in name} == {
        torch.bfloat16 if dtype == "bfloat16" else torch.float32
    }
    assert workload.trace(1).peak_allocated > 0  # the forward accepts these dtypes


def _dtypes(model: torch.nn.Module) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def test_name_says_which_kernels_are_not_used(tmp_path: Path) -> None:
    """On a GPU, Mamba's scan in PyTorch needs several times the memory and time of mamba-ssm's kernels."""
    sizes = {"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64, "state_size": 4}
    (tmp_path / "config.json").write_text(json.dumps({**sizes, "architectures": ["MambaForCausalLM"]}))
    spec = TrainingSpec.of(str(tmp_path), seq_length=8)
    said = "(PyTorch's own code, slower than the kernels of causal_conv1d and mamba_ssm)"
    assert load(spec, "t4").name == f"{spec.title} {said}"
    assert load(spec, "cpu").name == spec.title
