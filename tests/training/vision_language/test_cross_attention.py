"""Llama 3.2 Vision's cross-attention: each token sees the images of its row, after truncation and padding too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, MllamaImageProcessorPil, MllamaProcessor
from vision_language_configs import MLLAMA

from ckpt_ft.errors import UserError
from ckpt_ft.training.conversations import ImageLoader, VisionLanguageArguments
from ckpt_ft.training.samples.language import IMAGE_CHAT_TEMPLATE, make_tokenizer
from ckpt_ft.training.vision_language import collator_of, encode_conversations

ASKED = {"role": "user", "content": "<image>What is it?"}
BLIND = {"role": "user", "content": "What is it?"}
SHORT, LONG = ({"role": "assistant", "content": answer} for answer in ("red", "red green red green red"))


@pytest.fixture(scope="module")
def processor() -> Any:
    words = make_tokenizer(["What is it? red green"], extra=["<|image|>"])
    template = words.bos_token + IMAGE_CHAT_TEMPLATE.replace("<image>", "<|image|>")
    images = MllamaImageProcessorPil(size={"height": 28, "width": 28}, max_image_tiles=4)
    return MllamaProcessor(images, words, chat_template=template)


@pytest.fixture(scope="module")
def model(processor: Any) -> Any:
    words = processor.tokenizer
    config = AutoConfig.for_model(
        "mllama", text_config={**MLLAMA["text_config"], "vocab_size": len(words)},
        vision_config=MLLAMA["vision_config"], image_token_index=words.convert_tokens_to_ids("<|image|>"),
    )  # fmt: skip
    torch.manual_seed(0)
    made = AutoModelForImageTextToText.from_config(config).eval()
    for name, parameter in made.named_parameters():
        if name.endswith("gate"):  # gates are closed in a new model
            torch.nn.init.constant_(parameter, 1.0)
    torch.nn.init.normal_(made.model.multi_modal_projector.weight)  # so that images matter
    return made


def rows_of(processor: Any, folder: Path, *talks: list[dict[str, str]], max_length: int = 512) -> Dataset:
    for name, size in (("square", (28, 28)), ("wide", (80, 28))):
        Image.linear_gradient("L").resize(size).convert("RGB").save(folder / f"{name}.png")
    images = [[f"{('square', 'wide')[at % 2]}.png"] * talk.count(ASKED) for at, talk in enumerate(talks)]
    rows = Dataset.from_dict({"messages": list(talks), "images": images})
    args = VisionLanguageArguments(dataset_name="rows", max_length=max_length)
    return encode_conversations(rows, processor, ImageLoader(folder), args)


@pytest.mark.parametrize("max_length", [512, 18])
@torch.no_grad()
def test_batch_equals_its_single_rows(processor: Any, model: Any, max_length: int, tmp_path: Path) -> None:
    rows = rows_of(processor, tmp_path, [ASKED, SHORT], [ASKED, LONG], max_length=max_length)
    collate = collator_of(model, 0)
    batch = collate([rows[0], rows[1]])
    length = batch["input_ids"].shape[1]
    assert batch["cross_attention_mask"].shape == (2, length, 1, 4)
    assert batch["cross_attention_mask"].sum(-1)[:, -1].tolist() == [[1], [3]]  # tiles
    together = model(**batch).logits
    for at in range(2):
        alone = collate([rows[at]])
        logits = model(**alone).logits[0]
        assert torch.allclose(together[at, : len(logits)], logits, atol=1e-6)
        other = model(**{**alone, "pixel_values": -alone["pixel_values"]}).logits[0]
        assert not torch.allclose(other, logits, atol=1e-3)


def test_second_image_adds_no_start_token(processor: Any, model: Any, tmp_path: Path) -> None:
    """The processor adds a start token to each text without one, also to a later turn's."""
    row = rows_of(processor, tmp_path, [ASKED, SHORT, ASKED, LONG])[0]
    words = processor.tokenizer
    turns = "<|user|>\n<|image|>What is it?<|end|>\n<|assistant|>\n"
    assert words.decode(row["input_ids"]) == (
        f"{words.bos_token}{turns}red<|end|>\n{turns}red green red green red<|end|>\n"
    )
    mask = collator_of(model, 0)([row])["cross_attention_mask"][0]
    at = [place for place, token in enumerate(row["input_ids"]) if token == processor.image_token_id]
    assert mask.sum((1, 2)).nonzero().min() == at[0]
    assert mask[:, 1].sum(-1).nonzero().min() == at[1]


def test_mixed_rows_with_and_without_images_are_refused(processor: Any, tmp_path: Path) -> None:
    assert len(rows_of(processor, tmp_path, [BLIND, SHORT], [BLIND, LONG])) == 2
    with pytest.raises(UserError, match="1 of 2 rows have no image: this model reads images by cross-attention"):
        rows_of(processor, tmp_path, [ASKED, SHORT], [BLIND, LONG])
