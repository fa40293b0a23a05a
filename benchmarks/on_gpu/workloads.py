"""Workloads for the GPU, and toy sizes for `--dry-run`: data/gpu_workloads.json, the most informative first.

Peaks and seconds are those of `SPECS`. `NUMBERS` and `RACES` are small, because what differs does so at any size;
their saved tensors have 1 MiB and more, so that `offload` copies them.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.workloads.load import load
from ckpt_ft.workloads.workload import Workload

CORE = ("none", "full", "pointwise", "save:attention+matmul")
BUDGET, DRY_BUDGET = "24GiB", "8MiB"  # for the largest batch and the plan: less than any intended GPU has
_DATA = json.loads((Path(__file__).parents[1] / "data" / "gpu_workloads.json").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Spec:
    """A workload; `model` is a name that ckpt_ft knows without a download, or a configuration of the data."""

    name: str
    model: str
    batch: int
    policies: tuple[str, ...]
    settings: dict[str, Any] = field(default_factory=dict)

    def load(self) -> Workload:
        """The model on meta, its step and optimizer.

        Raises:
            UserError: diffusers is needed and absent.
        """
        settings, config = TrainingSpec.of(**self.settings), _DATA["models"].get(self.model)
        if config is None:
            return load(settings.edit(model=self.model), "t4")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "config.json"
            path.write_text(json.dumps(config), encoding="utf-8")
            return load(settings.edit(model=str(path)), "t4")


def _specs(part: str) -> tuple[Spec, ...]:
    return tuple(Spec(**{**row, "policies": tuple(row["policies"])}) for row in _DATA[part])


SPECS, NUMBERS, RACES, DRY_SPECS = (_specs(part) for part in ("specs", "numbers", "races", "dry specs"))
(OVERLAP,), (DRY_OVERLAP,) = _specs("overlap"), _specs("dry overlap")
