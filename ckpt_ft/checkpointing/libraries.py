"""Checks for classes of optional libraries without importing those libraries, which would take seconds."""

from __future__ import annotations

import sys

Class = tuple[str, str]  # module name and class name

PRETRAINED: Class = ("transformers.modeling_utils", "PreTrainedModel")
LAYER: Class = ("transformers.modeling_layers", "GradientCheckpointingLayer")
DIFFUSERS: Class = ("diffusers.models.modeling_utils", "ModelMixin")
KV_CACHE: Class = ("transformers.cache_utils", "Cache")
CONFIG: Class = ("transformers.configuration_utils", "PreTrainedConfig")
ADAPTED: Class = ("peft.tuners.lora.layer", "ParamWrapper")  # swaps the parameter for the time of its forward
INT8: Class = ("bitsandbytes.nn", "Linear8bitLt")
FSDP2: Class = ("torch.distributed.fsdp", "FSDPModule")


def is_a(value: object, kind: Class) -> bool:
    """Whether `value` is an instance of `kind`; False if its library is not imported."""
    return is_class(type(value), kind)


def is_class(given: type, kind: Class) -> bool:
    module, name = kind
    found = getattr(sys.modules.get(module), name, None)
    return found is not None and issubclass(given, found)
