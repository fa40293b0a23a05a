"""Conversations with images in processors of several families: tokens, labels and pixels that the model gets."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from PIL import Image
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoProcessor,
    Gemma3ImageProcessorPil,
    Gemma3Processor,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    LlavaNextImageProcessorPil,
    LlavaNextProcessor,
    LlavaProcessor,
    SiglipImageProcessorPil,
)

from ckpt_ft.errors import UserError
from ckpt_ft.training.conversations import ImageLoader, VisionLanguageArguments, conversation, load_conversations
from ckpt_ft.training.samples.language import IMAGE_CHAT_TEMPLATE, make_tokenizer
from ckpt_ft.training.vision_language import (
    VisionLanguageModelArguments,
    collator_of,
    concatenated,
    encode_conversations,
    load_processor,
)

TEXT = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "intermediate_size": 32, "max_position_embeddings": 512, "pad_token_id": 0,
}  # fmt: skip
EYES = {
    "model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "patch_size": 8, "image_size": 32, "vision_use_head": False,
}  # fmt: skip
SQUARE = {"height": 32, "width": 32}
GRIDS = [[32, 32], [32, 64]]


def tokenizer(*extra: str) -> Any:
    return make_tokenizer(["What is it? red green"], extra=extra)


def llava() -> tuple[Any, dict[str, Any]]:
    words = tokenizer("<image>")
    images = SiglipImageProcessorPil(size=SQUARE)
    made = LlavaProcessor(images, words, patch_size=8, vision_feature_select_strategy="full", image_token="<image>")
    return made, {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}


def llava_next() -> tuple[Any, dict[str, Any]]:
    images = LlavaNextImageProcessorPil(size={"shortest_edge": 32}, crop_size=SQUARE, image_grid_pinpoints=GRIDS)
    made = LlavaNextProcessor(
        images, tokenizer("<image>"), patch_size=8, vision_feature_select_strategy="full", image_token="<image>"
    )
    strategy = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
    return made, {**strategy, "image_grid_pinpoints": GRIDS}


def idefics3() -> tuple[Any, dict[str, Any]]:
    images = Idefics3ImageProcessorPil(size={"longest_edge": 64}, max_image_size={"longest_edge": 32})
    rows = [f"<row_{i}_col_{j}>" for i in range(1, 7) for j in range(1, 7)]
    words = tokenizer("<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>", *rows)
    return Idefics3Processor(images, words, image_seq_len=4), {"scale_factor": 2}


def gemma3() -> tuple[Any, dict[str, Any]]:
    words = tokenizer("<image_soft_token>", "<start_of_image>", "<end_of_image>")
    for name, token in (("image", "<image_soft_token>"), ("boi", "<start_of_image>"), ("eoi", "<end_of_image>")):
        setattr(words, f"{name}_token", token)
        setattr(words, f"{name}_token_id", words.convert_tokens_to_ids(token))
    template = IMAGE_CHAT_TEMPLATE.replace("<image>", "<start_of_image>")
    made = Gemma3Processor(Gemma3ImageProcessorPil(size=SQUARE), words, chat_template=template, image_seq_length=4)
    return made, {"mm_tokens_per_image": 4}


FAMILIES = {"llava": llava, "llava_next": llava_next, "idefics3": idefics3, "gemma3": gemma3}


def encoded(processor: Any, folder: Path, max_length: int = 512, **changed: Any) -> Dataset:
    for name, size in (("square", (40, 40)), ("wide", (96, 48))):
        Image.new("RGB", size, "red").save(folder / f"{name}.png")
    answer = {"role": "assistant", "content": [{"type": "text", "text": "red"}]}
    picture, asked = {"type": "image", "text": None}, {"type": "text", "text": "What is it?"}
    turns = [
        [{"role": "user", "content": [picture, asked]}, answer],
        [{"role": "user", "content": [picture, asked]}, answer, {"role": "user", "content": [picture, asked]}, answer],
        [{"role": "user", "content": [asked]}, answer],
    ]
    images = [["square.png"], ["wide.png", "square.png"], []]
    rows = Dataset.from_dict({"messages": turns, "images": images})
    args = VisionLanguageArguments(dataset_name="rows", max_length=max_length)
    return encode_conversations(rows, processor, ImageLoader(folder, **changed), args)


@pytest.mark.parametrize("family", FAMILIES)
def test_model_of_each_family_accepts_the_encoded_rows(family: str, tmp_path: Path) -> None:
    processor, own = FAMILIES[family]()
    if processor.chat_template is None:
        processor.chat_template = IMAGE_CHAT_TEMPLATE
    words = processor.tokenizer
    token = words.convert_tokens_to_ids("<image_soft_token>" if family == "gemma3" else "<image>")
    kind = "gemma3_text" if family == "gemma3" else "llama"
    config = AutoConfig.for_model(
        family, text_config={"model_type": kind, "vocab_size": len(words), **TEXT}, vision_config=EYES,
        image_token_id=token, image_token_index=token, **own,
    )  # fmt: skip
    model = AutoModelForImageTextToText.from_config(config)
    rows = encoded(processor, tmp_path)
    answers = [words.decode([label for label in row["labels"] if label >= 0]) for row in rows]
    assert answers == ["red<|end|>\n", "red<|end|>\n" * 2, "red<|end|>\n"]
    pixels = rows.with_format(None)["pixels"]
    assert pixels[1] > pixels[0] > pixels[2] == 0
    batch = collator_of(model, 0)([rows[0], rows[1], rows[2]])
    assert batch["input_ids"].shape == batch["labels"].shape == batch["attention_mask"].shape
    loss = model(**batch).loss
    loss.backward()
    assert loss.isfinite()
    assert model.get_submodule("model").get_input_embeddings().weight.grad is not None


def test_rows_that_do_not_fit_are_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    processor, _ = llava()
    processor.chat_template = IMAGE_CHAT_TEMPLATE
    # two images of 16 tokens and their questions do not fit
    assert len(encoded(processor, tmp_path, max_length=35)) == 2
    assert "--max_length 35: of 3 rows, 0 are cut and 1 are left out" in caplog.text
    with pytest.raises(UserError, match="none of the 3 rows"):
        encoded(processor, tmp_path, max_length=3)


def test_error_names_the_conversation_number_before_the_split(tmp_path: Path) -> None:
    lines = []
    for number in range(1, 11):
        turns = [{"role": "user", "content": "<image>What is it?"}, {"role": "assistant", "content": "red"}]
        lines.append(json.dumps({"messages": turns, "images": ["none.png" if number == 7 else "a.png"]}) + "\n")
    (tmp_path / "rows.jsonl").write_text("".join(lines))
    Image.new("RGB", (40, 30)).save(tmp_path / "a.png")
    processor, _ = llava()
    processor.chat_template = IMAGE_CHAT_TEMPLATE
    args = VisionLanguageArguments(dataset_name=str(tmp_path / "rows.jsonl"), test_split_size=0.2)
    train, test, folder = load_conversations(args, evaluate=True, seed=0)
    assert test is not None
    bad = train if ["none.png"] in train["images"] else test
    assert list(bad["images"]).index(["none.png"]) != 6
    with pytest.raises(UserError, match="^row 7: image .*none.png' does not exist"):
        encode_conversations(bad, processor, ImageLoader(folder), args)


def test_image_is_bytes_or_a_path() -> None:
    turns = [{"role": "user", "content": "<image>What is it?"}]
    for image in ({"bytes": b"\x89PNG"}, {"path": "a.png"}, "a.png"):
        _, (cell,) = conversation({"messages": turns, "images": [image]}, "row 1")
        assert cell.keys() == {"bytes", "path"}
    for image in ({"bytes": "iVBORw0KGgo="}, {"bytes": "iVBORw0KGgo=", "path": None}, {"path": 3}, {"bytes": b""}, 3):
        with pytest.raises(UserError, match="row 1: an image is a file's path or an image of the dataset, not "):
            conversation({"messages": turns, "images": [image]}, "row 1")


def test_smaller_image_tensors_are_padded_with_zeros() -> None:
    one, two = torch.ones(1, 2, 3), torch.ones(2, 4, 1)
    both = concatenated([one, two])
    assert both.shape == (3, 4, 3)
    assert both.sum() == one.sum() + two.sum()
    assert both[0, :2].eq(1).all()


def test_model_with_cross_attention_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    made = SimpleNamespace(image_processor=None, model_input_names=["input_ids", "cross_attention_mask"])
    monkeypatch.setattr(AutoProcessor, "from_pretrained", lambda *args, **kwargs: made)
    with pytest.raises(UserError, match=r"reads images by cross-attention .*, which this recipe does not train"):
        load_processor(VisionLanguageModelArguments(model_name_or_path="x"), VisionLanguageArguments())
