"""`--peft_config`: adapters of any PEFT type instead of LoRA's own flags, in every recipe.

The file is PEFT's own `adapter_config.json`. It may leave out three settings that a recipe knows: the task, the
target modules, and the modules that are trained in full.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckpt_ft.errors import UserError
from ckpt_ft.spec.peft_file import configuration, read_peft, takes

if TYPE_CHECKING:
    from peft import PeftConfig

HELP = "An adapter_config.json of any kind of PEFT (DoRA, LoKr, LoHa, OFT ...), or the directory that has it."
# Maps requested module names (None for the default) to the target modules, as PEFT expects them.
Targets = Callable[[Any], Any]
_BY_DATA = ("corda", "eva", "loftq", "lora_ga")  # LoRA initialisations that need data or another package


def check_peft_flag(path: str | None, beside: Mapping[str, object]) -> None:
    """Validate the flag before anything is loaded.

    beside: LoRA's own flags, by name.

    Raises:
        UserError: the file is not a PEFT configuration, a plain loop cannot train it, or LoRA's flags are also given.
    """
    if path is None:
        return
    given = [f"--{name}" for name, value in beside.items() if value]
    if given:
        raise UserError(
            f"--peft_config {path} says all of an adapter, {' and '.join(given)} of another one: give one or the other"
        )
    asked = f"--peft_config {path}"
    content = read_peft(path, asked)
    if content["peft_type"] == "ADALORA":
        raise UserError(
            f"{asked}: ADALORA's ranks are allotted by calls between steps, and by scores that no "
            "checkpoint holds; give LORA, with a rank_pattern for ranks that differ"
        )
    first = content.get("init_lora_weights")
    if first in _BY_DATA:
        raise UserError(
            f"{asked}: init_lora_weights '{first}' is made before training, of data or by another package, "
            "which no recipe does; give true, gaussian, orthogonal, olora or pissa"
        )
    configuration(content, asked)


def adapter_of(
    path: str, targets: Targets | None = None, modules_to_save: Sequence[str] = (), task_type: str | None = None
) -> PeftConfig:
    """Returns the configuration in `path`.

    Args:
        targets: maps the file's target modules to those of the model.
        modules_to_save: modules that are trained in full, in addition to those in the file.
        task_type: the recipe's task type, which overrides the file's.

    Raises:
        UserError: the file is not a PEFT configuration, does not support `modules_to_save`, or is a prompt-learning
            type and the recipe has no task.
    """
    asked = f"--peft_config {path}"
    content = read_peft(path, asked)
    if task_type is not None:
        content["task_type"] = task_type
    if targets is not None and takes(content, "target_modules", asked):
        content["target_modules"] = targets(content.get("target_modules"))
    if modules_to_save:
        if not takes(content, "modules_to_save", asked):
            raise UserError(
                f"{asked}: {content['peft_type']} trains nothing beside itself, and {modules_to_save[0]} is new; give "
                "a kind that has modules_to_save, LORA for example"
            )
        content["modules_to_save"] = sorted({*(content.get("modules_to_save") or ()), *modules_to_save})
    config = configuration(content, asked)
    if task_type is None and (config.is_prompt_learning or config.is_adaption_prompt):
        raise UserError(
            f"{asked}: {content['peft_type']} is for the language models of recipes/llm.py and recipes/dpo.py; give a "
            "kind that adapts modules, LORA or LOKR for example"
        )
    return config


def kind_of(path: str | None) -> str | None:
    """Returns the PEFT type in the file."""
    return None if path is None else str(read_peft(path, f"--peft_config {path}")["peft_type"])
