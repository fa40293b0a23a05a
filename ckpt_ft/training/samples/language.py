"""The built-in language and vision-language models with their training data, made offline and cached.

The text is paragraphs of Python's own reference by topic (`pydoc_data`), with a byte-level BPE tokenizer trained on
them and a Llama of one million random parameters. The vision-language data is drawn pictures with questions,
for a LLaVA-NeXT of less than one million random parameters. All are files that are read like any others.
"""

from __future__ import annotations

import json
import platform
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    ProcessorMixin,
)

from ckpt_ft.files import made_once

VOCABULARY = 2048
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
IMAGE_CHAT_TEMPLATE = CHAT_TEMPLATE.replace(
    "{{ message.content }}",
    "{% for part in message.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}",
)
_IMAGE = "<image>"
_QUESTIONS = 1_500  # rows
_CLASSES = 5  # topics that texts are told apart by
_DIGITS = 5  # of the sums: 0 to 4
_VERSION = 3  # part of the cache directories' names: raise it when what is made changes
_TEXT_MODEL: dict[str, Any] = {
    "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": True,
}  # fmt: skip
_TILE, _PATCH = 48, 12  # pixels of a side
_GRIDS = [[_TILE, _TILE], [_TILE, 2 * _TILE]]  # (height, width) of the tiles beside the whole picture


def make_reference() -> tuple[str, str]:
    """Returns the language model's directory and its corpus, a jsonl file; made on first use (seconds)."""
    return str(_reference() / "model"), str(_reference() / "reference.jsonl")


def make_preferences() -> tuple[str, str]:
    """Returns the language model's directory and a jsonl file of preferences: an answer over its shuffled words."""
    return str(_reference() / "model"), str(_reference() / "preferences.jsonl")


def make_labelled_reference() -> tuple[str, str]:
    """Returns a BERT's directory and a jsonl file of paragraphs with their topic, of the topics that have most.

    Rows also have the two halves of the paragraph as a pair, for embeddings.
    """
    return str(_reference() / "encoder"), str(_reference() / "labelled.jsonl")


def _reference() -> Path:
    return made_once(f"reference-v{_VERSION}-py{platform.python_version()}", _write_reference)


def make_questions(rows: int = _QUESTIONS) -> tuple[str, str]:
    """Returns the vision-language model's directory and a jsonl file of questions; made on first use (seconds)."""
    made = made_once(f"drawn-v{_VERSION}-{rows}", lambda directory: _write_questions(directory, rows))
    return str(made / "model"), str(made / "questions.jsonl")


def make_sums() -> tuple[str, str]:
    """Returns the directory of a language model whose words are numbers, and a jsonl file of sums of two digits."""
    made = made_once(f"sums-v{_VERSION}", _write_sums)
    return str(made / "model"), str(made / "sums.jsonl")


def _write_sums(directory: Path) -> None:
    words = ["<|pad|>", "<|begin|>", "<|end|>", "+", "=", *map(str, range(2 * _DIGITS - 1))]
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="<|pad|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|end|>")
    fast.save_pretrained(directory / "model")
    config = LlamaConfig(vocab_size=len(words), intermediate_size=352, num_hidden_layers=2, **_TEXT_MODEL)
    _random_model(LlamaForCausalLM, config).save_pretrained(directory / "model")
    sums = [(one, other) for one in range(_DIGITS) for other in range(_DIGITS)]
    random.Random(0).shuffle(sums)
    rows = ({"prompt": f"{one} + {other} =", "answer": str(one + other)} for one, other in sums)
    _write_rows(directory / "sums.jsonl", rows)


def paragraphs() -> list[tuple[str, str]]:
    """Returns (topic, paragraph of 8 to 60 words) of Python's reference, always in the same order."""
    every = [(topic, " ".join(text.split())) for topic, page in sorted(topics.items()) for text in page.split("\n\n")]
    return [*dict.fromkeys((topic, text) for topic, text in every if 8 <= len(text.split()) <= 60)]


def _write_reference(directory: Path) -> None:
    draw = random.Random(0)
    every = paragraphs()
    common = dict(Counter(topic for topic, _ in every).most_common(_CLASSES))
    rows: dict[str, list[dict[str, str]]] = {"reference": [], "preferences": [], "labelled": []}
    for topic, text in every:
        prompt = f"What does Python's reference say about `{topic}`?\n"
        words = text.split()
        rows["reference"].append({"prompt": prompt, "completion": text})
        shuffled = " ".join(draw.sample(words, len(words)))
        rows["preferences"].append({"prompt": prompt, "chosen": text, "rejected": shuffled})
        if topic in common:
            middle = len(words) // 2
            begin = " ".join(words[:middle])
            end = " ".join(words[middle:])
            rows["labelled"].append({"text": text, "label": topic, "anchor": begin, "positive": end})
    for name, written in rows.items():
        _write_rows(directory / f"{name}.jsonl", written)
    tokenizer = make_tokenizer(row["prompt"] + row["completion"] for row in rows["reference"])
    config = LlamaConfig(vocab_size=VOCABULARY, intermediate_size=352, num_hidden_layers=4, **_TEXT_MODEL)
    encoder = BertConfig(
        vocab_size=VOCABULARY, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=352,
        max_position_embeddings=512, pad_token_id=0,
    )  # fmt: skip
    models = {"model": _random_model(LlamaForCausalLM, config), "encoder": _random_model(BertForMaskedLM, encoder)}
    for name, model in models.items():
        model.save_pretrained(directory / name)
        tokenizer.save_pretrained(directory / name)


def _write_questions(directory: Path, count: int) -> None:
    from .drawings import questions  # needs Pillow, which text does not

    drawn = questions(count)
    (directory / "images").mkdir()
    rows = []
    for at, (image, question, answer) in enumerate(drawn):
        name = f"images/{at:05}.png"
        image.save(directory / name)
        user = {"role": "user", "content": f"{_IMAGE}{question}"}
        rows.append({"messages": [user, {"role": "assistant", "content": answer}], "images": [name]})
    _write_rows(directory / "questions.jsonl", rows)
    tokenizer = make_tokenizer((f"{question} {answer}" for _, question, answer in drawn), extra=[_IMAGE])
    make_processor(tokenizer).save_pretrained(directory / "model")
    model = make_vision_language_model(len(tokenizer), tokenizer.convert_tokens_to_ids(_IMAGE))
    model.save_pretrained(directory / "model")


def _write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _random_model(model: Any, config: Any) -> PreTrainedModel:
    """Returns a model with the same random weights on each call; the caller's random state is unchanged."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return model(config)


def make_tokenizer(corpus: Iterable[str], extra: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE with the special tokens of `CHAT_TEMPLATE` and the `extra` ones."""
    special = ["<|pad|>", "<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", *extra]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|pad|>", bos_token="<|begin|>", eos_token="<|end|>",
        extra_special_tokens=special[3:], chat_template=CHAT_TEMPLATE,
    )  # fmt: skip


def make_processor(tokenizer: PreTrainedTokenizerFast) -> ProcessorMixin:
    """Returns a LLaVA-NeXT processor of small tiles, which needs no torchvision."""
    from transformers import LlavaNextImageProcessorPil, LlavaNextProcessor

    images = LlavaNextImageProcessorPil(
        size={"shortest_edge": _TILE}, crop_size={"height": _TILE, "width": _TILE}, image_grid_pinpoints=_GRIDS,
        image_mean=[0.5] * 3, image_std=[0.5] * 3,
    )  # fmt: skip
    return LlavaNextProcessor(
        images, tokenizer, patch_size=_PATCH, vision_feature_select_strategy="full", num_additional_image_tokens=0,
        image_token=_IMAGE, chat_template=IMAGE_CHAT_TEMPLATE,
    )  # fmt: skip


def make_vision_language_model(vocabulary: int, image_token: int) -> PreTrainedModel:
    """Returns the LLaVA-NeXT with the same random weights on each call."""
    from transformers import LlavaNextConfig, LlavaNextForConditionalGeneration

    text = {"model_type": "llama", "vocab_size": vocabulary, "intermediate_size": 256, "num_hidden_layers": 3}
    vision: dict[str, Any] = {
        "model_type": "siglip_vision_model", "hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 2,
        "num_attention_heads": 4, "patch_size": _PATCH, "image_size": _TILE, "vision_use_head": False,
    }  # fmt: skip
    config = LlavaNextConfig(
        text_config={**text, **_TEXT_MODEL}, vision_config=vision, image_token_index=image_token,
        image_grid_pinpoints=_GRIDS, vision_feature_layer=-1, vision_feature_select_strategy="full",
        tie_word_embeddings=True,
    )  # fmt: skip
    return _random_model(LlavaNextForConditionalGeneration, config)
