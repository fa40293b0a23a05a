"""The plugin for axolotl, on the methods of its published base class (axolotl 0.19, integrations/base.py)."""

from __future__ import annotations

import sys
from dataclasses import fields
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ckpt_ft.training.arguments import ACArguments


class BasePlugin:
    """The two methods of axolotl's class that the plugin overrides."""

    def get_input_args(self) -> str | None:
        return None

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        pass


@pytest.fixture
def axolotl(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("axolotl", "axolotl.integrations", "axolotl.integrations.base"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["axolotl.integrations.base"].BasePlugin = BasePlugin  # type: ignore[attr-defined]
    monkeypatch.delitem(sys.modules, "ckpt_ft.integrations.axolotl", raising=False)
    from ckpt_ft.integrations import axolotl

    return axolotl


def test_plugin_adds_the_callback_of_the_file(axolotl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {own.name: own.default for own in fields(ACArguments)} == axolotl.Settings().model_dump()
    module, _, name = axolotl.Plugin().get_input_args().rpartition(".")
    assert getattr(sys.modules[module], name) is axolotl.Settings
    attached: list[Any] = []
    monkeypatch.setattr(axolotl.ACCallback, "attach", lambda self, trainer: attached.append((self, trainer)))
    trainer = SimpleNamespace()
    axolotl.Plugin().post_trainer_create(
        {"ac_policy": "full,head", "ac_report": "json", "micro_batch_size": 2}, trainer
    )
    [(callback, given)] = attached
    assert given is trainer
    assert (str(callback.policy), callback.session.settings.ac_report) == ("full,head", "json")
