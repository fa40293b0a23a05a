"""A plugin for axolotl: a policy and a memory report from its YAML file.

plugins:
  - ckpt_ft.integrations.axolotl.Plugin
ac_policy: full,head        # any flag of ACArguments
gradient_checkpointing: false
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_type_hints

from axolotl.integrations.base import BasePlugin
from pydantic import create_model

from ckpt_ft.training.arguments import ACArguments
from ckpt_ft.training.callback import ACCallback

# The keys that the plugin adds to axolotl's configuration: the flags of ACArguments.
_KINDS = get_type_hints(ACArguments)
_KEYS: dict[str, Any] = {flag.name: (_KINDS[flag.name], flag.default) for flag in fields(ACArguments)}
Settings = create_model("Settings", **_KEYS)


class Plugin(BasePlugin):
    """Attaches an ACCallback to the trainer that axolotl makes."""

    def get_input_args(self) -> str:
        """The class whose fields axolotl accepts in its file."""
        return "ckpt_ft.integrations.axolotl.Settings"

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Attaches the callback; without `ac_policy` it only measures.

        Raises:
            UserError: a setting is out of range, or as `ACCallback.attach`.
        """
        given = {field.name: cfg.get(field.name) for field in fields(ACArguments)}
        ACCallback(ACArguments(**{name: value for name, value in given.items() if value is not None})).attach(trainer)
