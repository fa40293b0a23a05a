"""What of a pipeline is not trained, whichever pipeline it is: what caches, noise and validation ask of it."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ckpt_ft.workloads.sample_sizes import Size


class Frozen(Protocol):
    """A pipeline's VAE and text encoders, whichever they are.

    Attributes:
        rows: class of the images as they are read: FramedImages, or masked ones.
        tokenize: caption -> what a row keeps of it; it knows its `tokenizers`.
        absent: components that drawing from prompts already encoded does without.
        token: pixels of an image's side that what is trained takes a whole number of.
        identity: what encodings depend on beside weights and tokenizers.
    """

    rows: Any
    device: torch.device
    vae: Any
    tokenize: Any
    absent: list[str]
    identity: str

    @property
    def token(self) -> int: ...

    @property
    def modules(self) -> list[nn.Module]:
        """All that has weights."""

    def blank(self, images: int, size: Size) -> dict[str, Any]:
        """What `encode` is given of so many black images of `size` without captions."""

    def encode(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        """`moments` of the latents and the prompts' encodings of what `FramedImages` yields."""

    def encode_prompts(self, prompts: list[str]) -> dict[str, Tensor]:
        """By the names of the pipeline's arguments."""
