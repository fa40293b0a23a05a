"""Adapters on a U-Net or transformer: LoRA as pipelines read it; every other kind of PEFT in PEFT's own files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_ft.errors import one_line
from ckpt_ft.files import write
from ckpt_ft.reading import library_reads
from ckpt_ft.training.peft_flag import adapter_of
from ckpt_ft.workloads.diffusion_models import ATTENTION_PROJECTIONS

from .arguments import PipelineArguments

if TYPE_CHECKING:
    from peft import PeftConfig

# Of LoraConfig what `pipe.load_lora_weights` makes again of a file: all else would be lost on the way.
_OF_PIPELINES = {
    "r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "init_lora_weights", "use_rslora",
    "use_dora", "lora_bias", "rank_pattern", "alpha_pattern", "layers_to_transform", "layers_pattern",
}  # fmt: skip
_BASE_AS_IT_IS = (True, False, "gaussian", "orthogonal")  # first weights that leave the base's alone


def adapted(model: Any, args: PipelineArguments, targets: list[str] | None = None) -> Any:
    """`model`, frozen, with the adapters that `args` ask for; under PEFT's wrapper where pipelines cannot read them.

    targets: names of the modules that get LoRA by rank; the attention's projections when left out.

    Raises:
        UserError: the model has no such modules, or cannot have such an adapter.
    """
    model.requires_grad_(False)
    if args.peft_config is None:
        asked = f"--lora_target_modules {' '.join(targets or ATTENTION_PROJECTIONS)}"
    else:
        asked = f"--peft_config {args.peft_config}"
    with library_reads(asked):
        config = _configuration(args, targets)
        if _pipelines_read(config):
            model.add_adapter(config)
            return model
        from peft import get_peft_model

        wrapped = get_peft_model(model, config)
        config.base_model_name_or_path = args.pretrained_model_name_or_path  # a pipeline, which peft cannot know
        return wrapped


def _configuration(args: PipelineArguments, targets: list[str] | None) -> PeftConfig:
    if args.peft_config is not None:
        return adapter_of(args.peft_config, targets=lambda asked: asked or list(ATTENTION_PROJECTIONS))
    from peft import LoraConfig

    assert args.rank is not None
    return LoraConfig(
        r=args.rank,
        lora_alpha=args.lora_alpha or args.rank,
        lora_dropout=args.lora_dropout,
        init_lora_weights="gaussian",
        target_modules=targets or list(ATTENTION_PROJECTIONS),
    )


def _pipelines_read(config: PeftConfig) -> bool:
    from peft import LoraConfig

    if type(config) is not LoraConfig or config.init_lora_weights not in _BASE_AS_IT_IS:
        return False
    ours, plain = config.to_dict(), LoraConfig().to_dict()
    return {name for name, value in ours.items() if value != plain[name]} <= _OF_PIPELINES


def write_card(component: str, args: PipelineArguments, kind: str, output_dir: str) -> None:
    """README.md of an adapter in PEFT's own files: the lines that load it."""
    base, place = args.pretrained_model_name_or_path, Path(output_dir)
    named = "" if base is None or Path(base).exists() else f"base_model: {one_line(base)}\n"
    lines = f"""---
library_name: peft
{named}tags:
- diffusers
- {kind.lower()}
---

# {kind} of the {component} of {base}

```python
from diffusers import DiffusionPipeline
from peft import PeftModel

pipe = DiffusionPipeline.from_pretrained("{base}")
PeftModel.from_pretrained(pipe.{component}, "{place}")  # in place: the pipeline draws with it
```

`ckpt-ft merge {place} --output merged` makes a pipeline of both, which loads without peft.
"""
    write(place / "README.md", lines)
