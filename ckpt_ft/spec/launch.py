"""Launch: on how many processes a step runs, and how they share the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ckpt_ft.errors import UserError, meant

from .zero_options import ZeroOptions

STRATEGIES = ("ddp", "fsdp2", "zero1", "zero2", "zero3")
WORTH_A_LOOK = ("ddp", "fsdp2")  # DeepSpeed's hold the model in half precision: another training, by name alone
_ON_A_MACHINE = 8  # GPUs, of a DGX and of what clouds rent out
PRECISIONS = ("no", "bf16", "fp16")
_MOST = 2**20  # processes


@dataclass(frozen=True)
class Launch:
    """Processes, one for each GPU, and what they share.

    Attributes:
        strategy: "ddp" (every process holds everything), "fsdp2" (parameters, gradients and optimizer states are
            sharded, as accelerate wraps the model: each block, the embedding, the head, the rest), or DeepSpeed's
            "zero1" (optimizer states are), "zero2" (and gradients) and "zero3" (and parameters).
        processes: of all machines together.
        machines: that they are on, evenly; 0 for eight processes on each, or one machine where that does not come out.
        mixed_precision: "no", "bf16" or "fp16": FSDP2 gathers parameters and reduces gradients in it; DeepSpeed holds
            the whole model in it, its optimizer's part in fp32 as well, and runs it without autocast.
        reshard_after_forward: whether FSDP2 drops a block's gathered parameters after its forward.
        gradient_as_bucket_view: whether DDP's gradients lie in its buckets rather than beside them.
        find_unused_parameters: whether DDP looks for parameters that a step leaves out, as Trainer has it by default:
            it copies each output of the model then.
        wrap: names of the block classes that FSDP2 shards one by one; () for the model's own, None for none.
        link: bytes a second that a rank sends in a large collective; None for the card's usual rate (collectives.py).
        zero: DeepSpeed's bucket sizes and thresholds.
        rank: of the processes, the one that is traced; 0 has the most of what does not divide evenly. DeepSpeed's is
            always the last one.

    Raises:
        UserError: a strategy that is not modelled, or counts that do not fit.
    """

    strategy: str = "ddp"
    processes: int = 1
    machines: int = 0
    mixed_precision: str = "no"
    reshard_after_forward: bool = True
    gradient_as_bucket_view: bool = False
    find_unused_parameters: bool = False
    wrap: tuple[str, ...] | None = ()
    link: float | None = None
    zero: ZeroOptions = field(default_factory=ZeroOptions)
    rank: int = 0

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            likely = meant(self.strategy, STRATEGIES)
            raise UserError(f"launch: no strategy '{self.strategy}'{likely} ({', '.join(STRATEGIES)})")
        if self.mixed_precision not in PRECISIONS:
            raise UserError(
                f"launch: mixed precision '{self.mixed_precision}' is not modelled ({', '.join(PRECISIONS)})"
            )
        if not self.machines:
            whole = self.processes % _ON_A_MACHINE == 0
            object.__setattr__(self, "machines", max(self.processes // _ON_A_MACHINE, 1) if whole else 1)
        if not 1 <= self.processes <= _MOST or self.machines < 1 or self.processes % self.machines:
            raise UserError(
                f"launch: {self.processes} processes on {self.machines} machines; give at least one, and as many on "
                f"each machine, {_MOST} in all at most"
            )

    @property
    def stage(self) -> int:
        """Of ZeRO; 0 for what is not DeepSpeed's."""
        return int(self.strategy[-1]) if self.strategy.startswith("zero") else 0

    @property
    def sharing(self) -> str:
        """How the model is shared, in words."""
        kept = self.strategy == "fsdp2" and not self.reshard_after_forward
        return f"{self.strategy}, kept after forward" if kept else self.strategy

    @property
    def shards(self) -> bool:
        """Whether a process holds only its part of some of what is trained."""
        return self.strategy != "ddp"

    def __str__(self) -> str:
        where = f" on {self.machines} machines" if self.machines > 1 else ""
        return f"{self.sharing}, on {self.processes} GPUs{where}"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Launch:
        """What `dataclasses.asdict` made, JSON in between or not."""
        wrap = None if values["wrap"] is None else tuple(values["wrap"])
        return cls(**{**values, "wrap": wrap, "zero": ZeroOptions(**values["zero"])})


def launches_on(gpus: int, machines: int = 0, strategies: Sequence[str] = WORTH_A_LOOK, **more: Any) -> list[Launch]:
    """The launches on so many GPUs to choose from: FSDP2 is two, with resharding after forward and without.

    Args:
        machines: that the GPUs are on, evenly; 0 for eight on each.
        strategies: names of `Launch.strategy`.
        more: other fields of the launches.

    Raises:
        UserError: a strategy that is not modelled, or counts that do not fit.
    """
    if gpus < 2:
        raise UserError(f"{gpus} GPUs: a launch is for at least 2; leave it out for one")
    found = [Launch(strategy, gpus, machines, **more) for strategy in strategies]
    kept = [replace(launch, reshard_after_forward=False) for launch in found if launch.strategy == "fsdp2"]
    return [*found, *kept]
