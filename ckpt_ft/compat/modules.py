"""The inside of torch's modules."""

from __future__ import annotations

from . import Table

__getattr__ = Table(
    __name__,
    "torch 2.11 to 2.14",
    """
children_of: torch.nn.Module()._modules
    submodules by name at the speed of a dict, with those that are None or occur twice
""",
)
