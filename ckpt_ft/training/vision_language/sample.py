"""The built-in sample: drawn pictures with questions, a processor and a small vision-language model, made offline.

The model is a LLaVA-NeXT of less than a million random parameters: a SigLIP tower, which sees a wide picture in more
tiles than others, and a Llama. `make_sample` makes all once, as files that are read like any others.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_ft.files import cache_root
from ckpt_ft.training.run.manifest import make_whole
from ckpt_ft.training.text.sample import make_tokenizer

from .drawn import asked

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast, ProcessorMixin

_VERSION = 1  # part of the cache directory's name: raise it when what is made changes
_ROWS = 1_500
_TILE, _PATCH = 48, 12  # pixels of a side
_GRIDS = [[_TILE, _TILE], [_TILE, 2 * _TILE]]  # (height, width): tiles beside the whole picture
_IMAGE = "<image>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>\n{% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def make_sample(rows: int = _ROWS) -> tuple[str, str]:
    """The built-in model's directory and the jsonl file of the questions, made on first use (some seconds)."""
    made = make_whole(cache_root() / f"drawn-v{_VERSION}-{rows}", lambda directory: _write(directory, rows))
    return str(made / "model"), str(made / "questions.jsonl")


def _write(directory: Path, count: int) -> None:
    rows = asked(count)
    (directory / "images").mkdir()
    lines = []
    for at, row in enumerate(rows):
        row.image.save(directory / "images" / f"{at:05}.png")
        turns = [
            {"role": "user", "content": f"{_IMAGE}{row.question}"},
            {"role": "assistant", "content": row.answer},
        ]
        lines.append(json.dumps({"messages": turns, "images": [f"images/{at:05}.png"]}) + "\n")
    (directory / "questions.jsonl").write_text("".join(lines), encoding="utf-8")
    tokenizer = make_tokenizer((f"{row.question} {row.answer}" for row in rows), extra=[_IMAGE])
    make_processor(tokenizer).save_pretrained(directory / "model")
    make_model(len(tokenizer), tokenizer.convert_tokens_to_ids(_IMAGE)).save_pretrained(directory / "model")


def make_processor(tokenizer: PreTrainedTokenizerFast) -> ProcessorMixin:
    """A LLaVA-NeXT processor of small tiles; its images go through Pillow, torchvision or not."""
    from transformers import LlavaNextImageProcessorPil, LlavaNextProcessor

    images = LlavaNextImageProcessorPil(
        size={"shortest_edge": _TILE},
        crop_size={"height": _TILE, "width": _TILE},
        image_grid_pinpoints=_GRIDS,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )
    return LlavaNextProcessor(
        images,
        tokenizer,
        patch_size=_PATCH,
        vision_feature_select_strategy="full",
        num_additional_image_tokens=0,
        image_token=_IMAGE,
        chat_template=CHAT_TEMPLATE,
    )


def make_model(vocabulary: int, image_token: int) -> PreTrainedModel:
    """The model with random weights, the same on each call."""
    import torch
    from transformers import LlavaNextConfig, LlavaNextForConditionalGeneration

    text: dict[str, Any] = {
        "model_type": "llama", "vocab_size": vocabulary, "hidden_size": 128, "intermediate_size": 256,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": True,
    }  # fmt: skip
    vision: dict[str, Any] = {
        "model_type": "siglip_vision_model", "hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 2,
        "num_attention_heads": 4, "patch_size": _PATCH, "image_size": _TILE, "vision_use_head": False,
    }  # fmt: skip
    config = LlavaNextConfig(
        text_config=text,
        vision_config=vision,
        image_token_index=image_token,
        image_grid_pinpoints=_GRIDS,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlavaNextForConditionalGeneration(config)
