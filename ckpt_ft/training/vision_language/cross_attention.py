"""Models whose text reads images by cross-attention (Llama 3.2 Vision): no token stands for an image's features, a
mask says which tokens see which tiles of which image.

The processor makes the mask of the text that it is given. Rows are cut, padded and asked in parts, so it is made here
of the tokens themselves, by the processor's own rules.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import ProcessorMixin

from ckpt_ft.errors import UserError

MASK = "cross_attention_mask"


def cross_attention_mask(input_ids: Tensor, tiles: Tensor, image_token: int) -> Tensor:
    """The mask of a batch of tokens (B, length), (B, length, images, tiles).

    tiles: (B, images, tiles), which of them an image has. image_token: what stands where an image is.
    """
    from transformers.models.mllama import processing_mllama as rules

    places = [rules.get_cross_attention_token_mask(ids, image_token) for ids in input_ids.tolist()]
    mask = rules.convert_sparse_cross_attention_mask_to_dense(
        places, tiles.sum(-1).tolist(), max_num_tiles=tiles.shape[-1], length=input_ids.shape[1]
    )
    return torch.from_numpy(mask)


def check_images_in_all(processor: ProcessorMixin, pixels: Sequence[int]) -> None:
    """Raises UserError where some rows have `pixels` and others none: such models take batches of one kind."""
    blind = sum(not count for count in pixels)
    if MASK in processor.model_input_names and 0 < blind < len(pixels):
        raise UserError(
            f"{blind} of {len(pixels)} rows have no image: this model reads images by cross-attention, and takes "
            "no batch of rows with and without; leave them out, or train on them by themselves"
        )
