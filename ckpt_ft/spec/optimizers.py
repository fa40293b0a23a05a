"""The names of optimizers: ours, and those of transformers, axolotl and LLaMA-Factory.

Layouts of those that are no part of PyTorch or transformers are in `standins/optimizers.py`.
"""

from __future__ import annotations

from typing import Literal, get_args

from ckpt_ft.errors import UserError

OptimizerName = Literal[
    "adamw", "adamw_fused", "adamw_8bit", "adafactor", "prodigy", "sgd", "none",
    "adagrad", "rmsprop", "muon",
    "adamw_32bit", "ademamix", "ademamix_8bit", "lion_32bit", "lion_8bit", "rmsprop_32bit", "rmsprop_8bit",
    "adamw_torch_4bit", "adamw_torch_8bit", "ao_adamw_4bit", "ao_adamw_8bit", "ao_adamw_fp8",
    "galore_adamw", "galore_adamw_8bit", "galore_adafactor",
    "galore_adamw_layerwise", "galore_adamw_8bit_layerwise", "galore_adafactor_layerwise",
    "apollo_adamw", "apollo_adamw_layerwise", "lomo", "adalomo", "grokadamw",
    "schedule_free_radam", "schedule_free_adamw", "schedule_free_sgd", "stable_adamw", "optimi_adamw",
    "adamw_anyprecision", "came", "adam_mini", "adamw_in_backward", "ao_adamw_offload", "ao_adamw_offload_gradients",
    "paged_adamw_8bit", "paged_adamw_32bit", "paged_ademamix_32bit", "paged_ademamix_8bit", "paged_lion_32bit",
    "paged_lion_8bit",
]  # fmt: skip
NAMES: tuple[str, ...] = get_args(OptimizerName)
# AdamW of torchao's CPUOffloadOptimizer: what a recipe's --offload_optimizer says -> our name.
OFFLOADING = {"states": "ao_adamw_offload", "gradients": "ao_adamw_offload_gradients"}


def check_offloading(what: str, norm: float, fp16: bool, accumulation: int, shared: bool, other: str = "") -> None:
    """Raises UserError if gradients that CPUOffloadOptimizer copies in backward would change later.

    Args:
        what: a key of `OFFLOADING`.
        shared: whether several processes train together.
        other: the flag of an optimizer that is not PyTorch's AdamW, or "".
    """
    early = "gradients are copied in backward, before that"
    for given, reason in (
        (other, "it is for PyTorch's AdamW"),
        ("--max_grad_norm" * bool(norm), f"{early}; add --max_grad_norm 0"),
        ("fp16" * fp16, f"{early} unscales them"),
        ("accumulation" * (what == "gradients" and accumulation > 1), f"{early} is complete; give states"),
        ("several processes" * shared, "take DeepSpeed's offload_optimizer"),
    ):
        if given:
            raise UserError(f"--offload_optimizer {what} with {given}: {reason}")


# Every name that is understood -> our name.
OPTIMIZERS: dict[str, str] = {
    "adamw_torch": "adamw",
    "adamw_hf": "adamw",
    "adamw_torch_fused": "adamw_fused",
    "adamw_torch_npu_fused": "adamw_fused",
    "adamw_bnb_8bit": "adamw_8bit",
    "adamw8bit": "adamw_8bit",
    "rmsprop_bnb": "rmsprop_32bit",
    "rmsprop_bnb_32bit": "rmsprop_32bit",
    "rmsprop_bnb_8bit": "rmsprop_8bit",
    "came_pytorch": "came",
    **{name: name for name in NAMES if name != "none"},
}
# Our names -> names of `TrainingArguments.optim`, except for those that a Trainer does not have.
OPTIM_OF_TRAINER: dict[str, str] = {
    name: name for name in NAMES
    if name not in ("none", "prodigy", "muon", "came", "adam_mini", "optimi_adamw", "adamw_32bit", "adamw_in_backward")
    and not name.startswith("ao_")
} | {
    "adamw": "adamw_torch",
    "adamw_fused": "adamw_torch_fused",
    "adamw_8bit": "adamw_bnb_8bit",
    "rmsprop_32bit": "rmsprop_bnb_32bit",
    "rmsprop_8bit": "rmsprop_bnb_8bit",
}  # fmt: skip
