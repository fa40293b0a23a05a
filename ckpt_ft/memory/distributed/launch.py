"""Launch: on how many processes a step runs, and how they share the model."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ckpt_ft.errors import UserError

STRATEGIES = ("ddp", "fsdp2")
PRECISIONS = ("no", "bf16", "fp16")


@dataclass(frozen=True)
class Launch:
    """Processes, one for each GPU, and what they share.

    Attributes:
        strategy: "ddp" (every process holds everything) or "fsdp2" (parameters, gradients and optimizer states are
            sharded, as accelerate wraps the model: each block, the embedding, the head, the rest).
        processes: of all machines together.
        machines: that they are on, evenly.
        mixed_precision: "no", "bf16" or "fp16": FSDP2 gathers parameters and reduces gradients in it.
        reshard_after_forward: whether FSDP2 drops a block's gathered parameters after its forward.
        gradient_as_bucket_view: whether DDP's gradients lie in its buckets rather than beside them.
        wrap: names of the block classes that FSDP2 shards one by one; () for the model's own.
        link: bytes a second that a rank sends in a large collective; None for what the card usually has (links.py).

    Raises:
        UserError: a strategy that is not modelled, or counts that do not fit.
    """

    strategy: str = "ddp"
    processes: int = 1
    machines: int = 1
    mixed_precision: str = "no"
    reshard_after_forward: bool = True
    gradient_as_bucket_view: bool = False
    wrap: tuple[str, ...] = ()
    link: float | None = None

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            close = difflib.get_close_matches(self.strategy, STRATEGIES, n=1)
            meant = f"; did you mean '{close[0]}'?" if close else ""
            raise UserError(f"launch: no strategy '{self.strategy}'{meant} ({', '.join(STRATEGIES)})")
        if self.mixed_precision not in PRECISIONS:
            raise UserError(
                f"launch: mixed precision '{self.mixed_precision}' is not modelled ({', '.join(PRECISIONS)})"
            )
        if self.processes < 1 or self.machines < 1 or self.processes % self.machines:
            raise UserError(
                f"launch: {self.processes} processes on {self.machines} machines; give at least one, and as many on "
                "each machine"
            )

    def __str__(self) -> str:
        where = f" on {self.machines} machines" if self.machines > 1 else ""
        kept = "" if self.strategy != "fsdp2" or self.reshard_after_forward else ", parameters kept after forward"
        return f"{self.strategy} on {self.processes} GPUs{where}{kept}"

    @classmethod
    def from_file(cls, path: str | Path, processes: int | None = None) -> Launch:
        """The launch that an accelerate configuration file describes.

        Args:
            processes: in place of the file's `num_processes`.

        Raises:
            UserError: there is no such file, or it asks for what is not modelled.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
            config = yaml.safe_load(text)
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"launch {path}: cannot be read ({error})") from error
        except yaml.YAMLError as error:
            raise UserError(f"launch {path}: not YAML ({' '.join(str(error).split())[:120]})") from error
        if not isinstance(config, dict):
            raise UserError(f"launch {path}: not an accelerate configuration (`accelerate config` writes one)")
        return cls(
            **_sharing(config, path),
            processes=_count(processes or config.get("num_processes", 1), "num_processes", path),
            machines=_count(config.get("num_machines", 1), "num_machines", path),
            mixed_precision=str(config.get("mixed_precision", "no")),
        )


def _sharing(config: dict[str, Any], path: str | Path) -> dict[str, Any]:
    kind = str(config.get("distributed_type", "NO")).upper()
    if kind in ("NO", "MULTI_GPU"):
        return {"strategy": "ddp"}
    if kind != "FSDP":
        raise UserError(f"launch {path}: distributed_type {kind} is not modelled (MULTI_GPU, FSDP of version 2)")
    options = config.get("fsdp_config") or {}
    if str(options.get("fsdp_version", 1)) != "2":
        raise UserError(f"launch {path}: FSDP of version 1 is not modelled; set fsdp_version: 2 in fsdp_config")
    if _truth(options.get("fsdp_offload_params", False)):
        raise UserError(f"launch {path}: parameters on the host are not modelled; set fsdp_offload_params: false")
    classes = options.get("fsdp_transformer_layer_cls_to_wrap") or ""
    return {
        "strategy": "fsdp2",
        "reshard_after_forward": _truth(options.get("fsdp_reshard_after_forward", True)),
        "wrap": tuple(name.strip() for name in classes.split(",") if name.strip()),
    }


def _truth(value: Any) -> bool:
    return str(value).strip().lower() in ("true", "1", "yes")


def _count(value: Any, name: str, path: str | Path) -> int:
    if not str(value).isdecimal() or int(value) < 1:
        raise UserError(f"launch {path}: {name} {value}: give a whole number of at least 1")
    return int(value)
