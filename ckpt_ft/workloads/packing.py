"""Packed rows of models that see: which of them keep rows apart, and by which positions.

transformers' attention, given neither mask nor KV cache, takes positions that begin again for the border of a row
(masking_utils.py: find_packed_sequence_indices); flash attention does so in a batch of one sequence alone
(modeling_flash_attention_utils.py: _is_packed_sequence).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ckpt_ft.errors import UserError

from .workload import Batch

# Types of models, and of the language models in them; a test holds packed rows of each against the rows alone. Left
# out are those whose mask does not follow the positions (PaliGemma's prefixes, images under Gemma 3's sliding window),
# whose text looks at images through layers of its own (Llama 3.2 Vision, IDEFICS), or that carry a state along the
# sequence (Qwen3.5, LFM2-VL).
SEEING = {
    "aya_vision", "glm4v", "idefics2", "idefics3", "internvl", "llava", "llava_next", "llava_onevision", "qwen2_5_vl",
    "qwen2_vl", "qwen3_vl", "smolvlm",
}  # fmt: skip
READING = {
    "cohere2", "gemma", "glm4v_text", "granite", "llama", "mistral", "olmo2", "phi3", "qwen2",
    "qwen2_5_vl_text", "qwen2_vl_text", "qwen3", "qwen3_vl_text", "smollm3",
}  # fmt: skip


def check_packing(model: Any) -> None:
    """Raises UserError where packed rows with images might see one another."""
    kind, text = model.config.model_type, model.config.get_text_config().model_type
    if kind not in SEEING:
        raise UserError(f"packing: a {kind} is not known to keep packed rows apart ({', '.join(sorted(SEEING))} do)")
    if text not in READING:
        raise UserError(f"packing: the {text} in this {kind} is not known to keep packed rows apart; leave it out")


def in_one_sequence(model: Any) -> bool:
    """Whether the rows of a whole batch are to be packed into one sequence: flash attention, no mask is made."""
    return "flash" in (model.config.get_text_config()._attn_implementation or "")


@dataclass(frozen=True)
class ImagePositions:
    """Positions by time, height and width, which some models (Qwen-VL) take of the tokens of an image.

    kind, config: of the part of a model that knows them; its weights do not go to the processes that fetch batches.
    """

    kind: type[nn.Module]
    config: Any

    @classmethod
    def of(cls, model: nn.Module) -> ImagePositions | None:
        """None where positions count tokens alone."""
        knows = next((module for module in model.modules() if hasattr(type(module), "get_rope_index")), None)
        return None if knows is None else cls(type(knows), knows.config)

    def beside(self, batch: Batch) -> Tensor:
        """(4, sequences, tokens): the `position_ids` (sequences, tokens) of packed rows, from 0 in each, and these."""
        along = batch["position_ids"]
        lengths = along.numel() - (along.flatten() == 0).nonzero().flatten()
        lengths = (lengths - torch.cat([lengths[1:], lengths.new_zeros(1)])).tolist()
        ids, kinds = (
            pad_sequence(batch[name].flatten().split(lengths), batch_first=True)
            for name in ("input_ids", "mm_token_type_ids")
        )
        there = pad_sequence([torch.ones(length, dtype=torch.bool) for length in lengths], batch_first=True)
        bare: Any = self.kind.__new__(self.kind)  # without its layers
        nn.Module.__init__(bare)
        bare.config = self.config
        found, _ = bare.get_rope_index(
            ids, mm_token_type_ids=kinds, image_grid_thw=batch.get("image_grid_thw"), attention_mask=there
        )
        return torch.cat([along[None], found[:, there].view(3, *along.shape)])
