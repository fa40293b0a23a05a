"""Default settings that `--help` shows before torch is imported."""

from __future__ import annotations

SEQ_LENGTH = 1024  # tokens
IMAGE_SIZE = (1024, 1024)  # width and height in pixels
LORA_R = 16  # if LoRA is requested without a rank
LORA_DROPOUT = 0.05  # for transformers models, as in the recipes; 0 for diffusion models
DEFAULT_GPU = "a100-80gb"  # if no GPU is named and none is available
# Values of `--train_towers`: the towers of a vision-language model.
TRAINED_TOWERS = {"language": ("language",), "vision": ("vision",), "both": ("language", "vision")}
ONLINE = ("grpo", "rloo")  # TRL's trainers that generate what they train on
TRAINERS = ("sft", "dpo", "kto", "reward", *ONLINE)
TRL_BATCH = 8  # samples by TRL's default, which these trainers divide into groups of `num_generations`
