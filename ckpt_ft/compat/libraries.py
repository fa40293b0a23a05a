"""What libraries on top of torch do not offer to their callers."""

from __future__ import annotations

from . import Table

__getattr__ = Table(
    __name__,
    "transformers 5.16 to 5.24",
    """
attention_of: transformers.PreTrainedConfig()._attn_implementation
    the attention that a model was built with
from_config: transformers.PreTrainedModel._from_config
    every way to a model without its weights goes through it
init_weights: transformers.PreTrainedModel()._init_weights
    draws the random numbers of weights that a checkpoint lacks
""",
)
