"""ckpt_ft: fit fine-tuning into memory, with activation checkpointing that is predicted, chosen and proved."""

from .checkpointing.apply import AppliedPolicy, apply_policy
from .policy import Policy

__all__ = ["AppliedPolicy", "Policy", "apply_policy"]
