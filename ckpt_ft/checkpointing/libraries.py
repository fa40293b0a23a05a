"""Classes of libraries that may not be in use. To ask for one imports nothing: that would take seconds."""

from __future__ import annotations

import sys

Class = tuple[str, str]  # its module and its name

PRETRAINED: Class = ("transformers.modeling_utils", "PreTrainedModel")
LAYER: Class = ("transformers.modeling_layers", "GradientCheckpointingLayer")
DIFFUSERS: Class = ("diffusers.models.modeling_utils", "ModelMixin")
FSDP2: Class = ("torch.distributed.fsdp", "FSDPModule")


def is_a(value: object, kind: Class) -> bool:
    """Whether `value` is an instance of `kind`; nothing is where its library is not loaded."""
    module, name = kind
    found = getattr(sys.modules.get(module), name, None)
    return found is not None and isinstance(value, found)
