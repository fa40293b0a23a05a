"""Flags of the vision-language recipe: which towers are trained, which conversations, how large an image may be."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt_ft.errors import UserError
from ckpt_ft.spec.defaults import TRAINED_TOWERS
from ckpt_ft.training.flags import AT_LEAST_ONE, NOT_NEGATIVE, SplitArguments, check_numbers, flag
from ckpt_ft.training.models import ModelArguments

_NUMBERS = {
    "answered": NOT_NEGATIVE,
    "dataset_num_proc": NOT_NEGATIVE,
    "max_pixels": AT_LEAST_ONE,
    "longest_side": AT_LEAST_ONE,
}


@dataclass
class VisionLanguageModelArguments(ModelArguments):
    """Which model, in which precision, and what of it is trained."""

    train_towers: str = flag(
        "language",
        "Towers that are trained, or that get adapters; the others are frozen. Without --use_peft what lies between "
        "the towers is trained as well.",
        choices=list(TRAINED_TOWERS),
    )


@dataclass
class VisionLanguageArguments(SplitArguments):
    """Which conversations about images are trained on; the names are TRL's and the processors'.

    Raises:
        UserError: a length, a share or a size that nothing can have.
    """

    dataset_name: str | None = flag(
        None, "Hub id, or a local directory or file (json, jsonl, parquet); without it, drawn pictures."
    )
    messages_column: str = flag("messages", "Column of conversations.")
    image_column: str = flag("images", "Column of each row's images: files, or images of the dataset; also one image.")
    image_folder: str | None = flag(None, "Folder of images that rows name by path; by default the dataset's own.")
    dataset_num_proc: int | None = flag(None, "Processes that look through the rows.")
    max_length: int = flag(
        2048,
        "Tokens per sequence, images included; text beyond it is cut, and rows whose images do not fit are left out.",
    )
    packing: bool = flag(False, "Several rows per sequence; attention and loss stay within each row.")
    max_pixels: int | None = flag(None, "Most pixels of an image; larger ones are scaled down (Qwen-VL and its kin).")
    longest_side: int | None = flag(None, "Pixels of an image's longer side (Idefics3, SmolVLM, Pixtral).")
    answered: int = flag(0, "Held-out questions to answer before and after training: how many are right.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_length < 2:
            raise UserError(f"--max_length {self.max_length}: a sequence needs at least 2 tokens to learn anything")
        check_numbers(self, _NUMBERS)
