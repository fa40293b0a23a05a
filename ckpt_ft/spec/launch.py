"""Launch: the number of processes of a step, and how they share the model; accelerate's configuration files.

Names and defaults of `ZeroOptions` are those of deepspeed/runtime/zero/config.py (0.19.8). accelerate computes "auto"
from the model's hidden size (accelerator.py: _prepare_deepspeed), and so does `ZeroOptions.filled`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

from ckpt_ft.errors import UserError, did_you_mean
from ckpt_ft.spec.fields import refuse
from ckpt_ft.spec.settings import keys_of, leave_out, read_settings
from ckpt_ft.units import whole_number
from ckpt_ft.validation import load_entries

STRATEGIES = ("ddp", "fsdp2", "zero1", "zero2", "zero3")
# Default strategies of a plan. DeepSpeed's are excluded because they hold the model in half precision.
WORTH_A_LOOK = ("ddp", "fsdp2")
COUNTS = (1, 2, 4, 8)  # GPUs to answer for if a file does not say how many
_ON_A_MACHINE = 8  # GPUs of a DGX and of most cloud machines
PRECISIONS = ("no", "bf16", "fp16", "fp8")
_MOST = 2**20  # processes
_AUTO = ("reduce_bucket_size", "prefetch_bucket_size", "param_persistence_threshold")
SIZES = ("dp_replicate", "tp", "cp", "sp")  # fields of a launch besides the processes that shard or replicate
ROTATIONS = ("allgather", "alltoall")
_REDUCE = "seq_parallel_communication_data_type"
OFFLOADS = ("offload_optimizer", "offload_param")
_COUNTS = (*_AUTO, "model_persistence_threshold", "max_live_parameters", "max_reuse_distance", "sub_group_size")


@dataclass(frozen=True)
class ZeroOptions:
    """The modelled options of DeepSpeed's `zero_optimization`; counts are elements, None is "auto".

    Attributes:
        reduce_bucket_size: gradients reduced at a time.
        overlap_comm: reduce gradients during backward; None for DeepSpeed's default, which is stage 3 only.
        prefetch_bucket_size: parameters that stage 3 gathers before they are used.
        param_persistence_threshold: stage 3 does not partition parameters up to this size,
        model_persistence_threshold: unless they are more than this together.
        max_live_parameters: stage 3 gathers ahead only while it holds fewer parameters than this.
        max_reuse_distance: parameters stay gathered if they are used again within this many.
        sub_group_size: parameters that stage 3 updates at a time.
        offload_optimizer: master weights, gradients and states wait in host memory, where the step is computed.
        offload_param: stage 3's parts of the parameters wait there, too.
        seq_parallel_reduce: precision in which Ulysses reduces gradients, `seq_parallel_communication_data_type`.
    """

    reduce_bucket_size: int | None = 500_000_000
    overlap_comm: bool | None = None
    prefetch_bucket_size: int | None = 50_000_000
    param_persistence_threshold: int | None = 100_000
    model_persistence_threshold: int = 2**63 - 1
    max_live_parameters: int = 1_000_000_000
    max_reuse_distance: int = 1_000_000_000
    sub_group_size: int = 1_000_000_000
    offload_optimizer: bool = False
    offload_param: bool = False
    seq_parallel_reduce: str = "fp32"

    @classmethod
    def read(
        cls, options: Mapping[str, Any], source: str, seq_parallel_reduce: Any = None,
        left_out: dict[str, str] | None = None,
    ) -> ZeroOptions:  # fmt: skip
        """Returns the options of a DeepSpeed configuration's `zero_optimization`, whose names have been checked.

        Args:
            left_out: that of `read_settings`.

        Raises:
            UserError: a value that is not a count or a precision; without `left_out`, offloading to a disk.
        """
        reduce = str(seq_parallel_reduce or "fp32").lower()
        if reduce not in ("fp32", "bf16", "fp16"):
            raise UserError(f"{source}: {_REDUCE} {reduce}: give fp32, bf16 or fp16")
        found: dict[str, Any] = {}
        for key, value in options.items():
            name = key.removeprefix("stage3_")
            if name in _COUNTS:
                found[name] = None if value == "auto" and name in _AUTO else _count(value, key, source)
        for name in OFFLOADS:
            device = str((options.get(name) or {}).get("device") or "none").lower()
            found[name] = device in ("cpu", "nvme")
            if device == "nvme":
                leave_out(
                    left_out, f"{name} nvme", "answered as host memory: the disk is not predicted", f"{source}: "
                )
        overlap = options.get("overlap_comm")
        overlaps = None if overlap in (None, "auto") else bool(overlap)
        return cls(**found, overlap_comm=overlaps, seq_parallel_reduce=reduce)

    def filled(self, stage: int, hidden_size: int | None) -> ZeroOptions:
        """Returns the options with the stage's defaults, and "auto" computed from the model's hidden size.

        Raises:
            UserError: "auto" for a model without a hidden size; accelerate refuses it, too.
        """
        auto = [name for name in _AUTO if getattr(self, name) is None]
        if auto and hidden_size is None:
            raise UserError(f"launch: {', '.join(auto)}: auto, and the model has no hidden_size; give a number")
        wide = hidden_size or 0
        sizes: dict[str, Any] = {
            "reduce_bucket_size": wide**2,
            "prefetch_bucket_size": int(0.9 * wide**2),
            "param_persistence_threshold": 10 * wide,
        }
        overlap = stage == 3 if self.overlap_comm is None else self.overlap_comm
        return replace(self, overlap_comm=overlap, **{name: sizes[name] for name in auto})


@dataclass(frozen=True)
class Launch:
    """The processes of a step, one for each GPU, and how they share the model.

    Attributes:
        strategy: "ddp" (each process holds the whole model), "fsdp2" (parameters, gradients and optimizer states are
            sharded as accelerate wraps the model: each block, the embedding, the head, the rest), or DeepSpeed's
            "zero1" (optimizer states are sharded), "zero2" (and gradients) or "zero3" (and parameters).
        processes: number of processes on all machines.
        machines: number of machines, with equally many processes each; 0 for 8 processes per machine, or one machine
            if the number of processes is not a multiple of 8.
        mixed_precision: "no", "bf16", "fp16" or "fp8" (which is bf16 here): FSDP2 gathers parameters and reduces
            gradients in it; DeepSpeed holds the whole model in it, its optimizer's part in fp32 as well, and runs it
            without autocast.
        float8_gather: whether FSDP2 gathers weights of torchao's linear layers in 8 bits under "fp8".
        reshard_after_forward: whether FSDP2 drops a block's gathered parameters after its forward.
        offload_params: whether FSDP2 keeps parameters, gradients and optimizer states in host memory.
        gradient_as_bucket_view: whether DDP's gradients are views of its buckets instead of copies.
        find_unused_parameters: whether DDP looks for unused parameters (Trainer's default) and copies outputs.
        wrap: names of the block classes that FSDP2 shards one by one; () for the model's own, None for none.
        dp_replicate: copies of the sharded model, as FSDP2 replicates shards (HSDP).
        tp: processes that share each weight matrix, as transformers' tensor parallelism does.
        ep: processes that hold different experts and exchange tokens, as transformers' expert parallelism does; they
            are among those that shard the rest of the model.
        cp: processes that share each sequence in torch's ring attention.
        sp: processes that share each sequence, and the heads within attention, in DeepSpeed's Ulysses.
        rotation: how ring attention passes keys and values on: "allgather" or "alltoall".
        link: bytes a second that a rank sends in a large collective; None for the card's usual rate (collectives.py).
        rank: the traced rank; rank 0 has the largest share of uneven shards. With DeepSpeed it is always the last.

    Raises:
        UserError: a strategy that is not modelled, or counts that do not fit.
    """

    strategy: str = "ddp"
    processes: int = 1
    machines: int = 0
    mixed_precision: str = "no"
    float8_gather: bool = True
    reshard_after_forward: bool = True
    offload_params: bool = False
    gradient_as_bucket_view: bool = False
    find_unused_parameters: bool = False
    wrap: tuple[str, ...] | None = ()
    dp_replicate: int = 1
    tp: int = 1
    cp: int = 1
    sp: int = 1
    ep: int = 1
    rotation: str = "allgather"
    link: float | None = None
    zero: ZeroOptions = field(default_factory=ZeroOptions)
    rank: int = 0

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            likely = did_you_mean(self.strategy, STRATEGIES)
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
        self._check_sizes()

    def _check_sizes(self) -> None:
        """Raises UserError for combinations that accelerate, transformers or DeepSpeed refuse."""
        sizes = {name: getattr(self, name) for name in SIZES}
        said = ", ".join(f"{name} {size}" for name, size in {**sizes, "ep": self.ep}.items() if size != 1)
        ddp, fsdp2, together = self.strategy == "ddp", self.strategy == "fsdp2", prod(sizes.values())
        sharing = (self.processes // max(self.dp_replicate, 1)) % max(self.ep, 1)
        problems = {
            "sizes are at least 1": min(*sizes.values(), self.ep) < 1,
            f"{self.processes} processes are not a multiple of {together}": self.processes % max(together, 1) != 0,
            "accelerate takes context or sequence parallelism, not both": self.cp > 1 and self.sp > 1,
            "Ulysses is DeepSpeed's: give --launch zero1, zero2 or zero3": self.sp > 1 and not self.stage,
            "with DeepSpeed, only sp is predicted": self.stage and max(self.tp, self.cp, self.dp_replicate) > 1,
            "accelerate combines context parallelism with FSDP2: give --launch fsdp2": self.cp > 1 and not fsdp2,
            "it replicates what FSDP2 shards: give --launch fsdp2, and more processes than copies": (
                self.dp_replicate > 1 and (not fsdp2 or self.processes == together)
            ),
            "accelerate does not combine tensor parallelism with DDP: give --launch fsdp2": (
                self.tp > 1 and ddp and self.processes > self.tp
            ),
            "transformers combines expert parallelism with FSDP2: give --launch fsdp2": (
                self.ep > 1 and (self.stage or self.cp > 1 or (ddp and self.tp != self.processes))
            ),
            "give a multiple of tp that divides the processes which share the model": (
                self.ep != 1 and (self.ep % self.tp or sharing) if self.tp > 0 else False
            ),
            f"rotation '{self.rotation}' is not one of {', '.join(ROTATIONS)}": self.rotation not in ROTATIONS,
        }
        refuse({f"launch {self.strategy}, {said or 'cp 1'}: {text}": is_so for text, is_so in problems.items()})

    @property
    def mesh(self) -> dict[str, int]:
        """Sizes of the dimensions with several ranks, in accelerate's order; ranks of the last are neighbours."""
        shard = self.processes // (self.dp_replicate * self.tp * self.cp * self.sp)
        sizes = {
            "dp_replicate": self.dp_replicate, "dp_shard": shard, "cp": self.cp, "sp": self.sp, "tp": self.tp,
        }  # fmt: skip
        return {name: size for name, size in sizes.items() if size > 1} or {"dp_shard": 1}

    @property
    def by_transformers(self) -> bool:
        """Whether transformers' DistributedConfig lays the model out, and not accelerate."""
        return self.tp > 1 or self.ep > 1

    @property
    def ranks_of_a_sample(self) -> int:
        """Number of processes that work on the same samples."""
        return self.tp * self.cp * self.sp

    @property
    def stage(self) -> int:
        """The ZeRO stage; 0 for other strategies."""
        return int(self.strategy[-1]) if self.strategy.startswith("zero") else 0

    @property
    def sharing(self) -> str:
        """The strategy in words."""
        kept = self.strategy == "fsdp2" and not self.reshard_after_forward
        split = "".join(f", {name} {size}" for name in (*SIZES, "ep") if (size := getattr(self, name)) > 1)
        moved = {"optimizer": self.zero.offload_optimizer, "parameters": self.zero.offload_param}
        parts = [name for name, is_moved in moved.items() if is_moved]
        away = "all" if self.offload_params or len(parts) > 1 else "".join(parts)
        waits = f", {away} in host memory" if away else ""
        return f"{self.strategy}{split}{', kept after forward' if kept else ''}{waits}"

    @property
    def compiles(self) -> bool:
        """Whether a step that torch.compile compiles is predicted under it."""
        return self.strategy in ("ddp", "fsdp2") and self.ranks_of_a_sample * self.ep == 1

    @property
    def shards(self) -> bool:
        """Whether each process holds only a part of the parameters, gradients or optimizer states."""
        return self.strategy != "ddp" or self.by_transformers

    def with_offload(self, what: str) -> Launch:
        """Returns the launch with its "optimizer", or "all" that it shards, in host memory.

        Raises:
            UserError: another word, or a strategy that keeps this on the device.
        """
        if what not in ("optimizer", "all"):
            raise UserError(f"--offload {what}: give optimizer, or all (parameters too)")
        if self.stage == 3 or (self.stage and what == "optimizer"):
            return replace(self, zero=replace(self.zero, offload_optimizer=True, offload_param=what == "all"))
        if self.strategy == "fsdp2" and what == "all":
            return replace(self, offload_params=True)
        able = "zero3 or fsdp2" if what == "all" else "zero1, zero2 or zero3"
        raise UserError(f"--offload {what} with {self.strategy}: it keeps that on the GPU; give --launch {able}")

    def __str__(self) -> str:
        where = f" on {self.machines} machines" if self.machines > 1 else ""
        return f"{self.sharing}, on {self.processes} GPU{'s' if self.processes > 1 else ''}{where}"


def launches_on(gpus: int, machines: int = 0, strategies: Sequence[str] = WORTH_A_LOOK, **more: Any) -> list[Launch]:
    """Returns the launches on `gpus` GPUs to choose from: one of each strategy, and FSDP2 without resharding, too.

    Args:
        strategies: names of `Launch.strategy`.
        machines, more: other fields of the launches.

    Raises:
        UserError: there are fewer than two GPUs, or `Launch` refuses a field.
    """
    if gpus < 2:
        raise UserError(f"{gpus} GPUs: a launch is for at least 2; leave it out for one")
    found = [Launch(strategy, gpus, machines, **more) for strategy in strategies]
    kept = [replace(launch, reshard_after_forward=False) for launch in found if launch.strategy == "fsdp2"]
    return [*found, *kept]


def launches_that_share(gpus: int, machines: int = 0, **more: Any) -> list[Launch]:
    """Returns launches in which the GPUs of a machine share each sequence: in a ring, and by DeepSpeed's Ulysses."""
    alone = Launch("fsdp2", gpus, machines, **more)
    here = gpus // alone.machines
    return [replace(alone, cp=here), replace(alone, strategy="zero3", sp=here)] if here > 1 else []


def on_counts(launch: Launch) -> tuple[Launch, ...]:
    """The launch on 1, 2, 4 and 8 GPUs, where its sizes allow it."""
    found = []
    for processes in COUNTS:
        with suppress(UserError):
            found.append(replace(launch, processes=processes, machines=1))
    return tuple(found)


def _count(value: Any, name: str, source: str, least: int = 0) -> int:
    try:
        count = int(float(value))  # 5e8 is a string in YAML
    except (TypeError, ValueError, OverflowError):
        count = -1
    if count < least:
        raise UserError(f"{source}: {name} {value}: give a whole number of at least {least}")
    return count


def read_launch(
    source: str | Path | Mapping[str, Any],
    processes: int | None = None,
    mixed_precision: str = "no",
    left_out: dict[str, str] | None = None,
) -> tuple[Launch, dict[str, Any]]:
    """Returns the launch that an accelerate configuration describes, and the fields of a spec that it also sets.

    Args:
        source: the file, or its content; a configuration of DeepSpeed is one, too.
        processes: overrides the file's `num_processes`.
        mixed_precision: overrides the file's, unless it is "no".
        left_out: takes the settings that are not modelled; None refuses them.

    Raises:
        UserError: the file does not exist, asks for another launcher, or is refused by accelerate.
    """
    path = "--config" if isinstance(source, Mapping) else source
    config = _document(source)
    found = read_settings(config, ("accelerate",), f"launch {path}", left_out)
    kind = _kind(config)
    if kind not in _SHARING:
        raise UserError(f"launch {path}: distributed_type {kind} is not modelled (MULTI_GPU, FSDP, DEEPSPEED)")
    named = [name for name in (*SIZES, "dp_shard") if name in found]
    sizes = {name: _count(found.pop(name), f"{name} size", f"launch {path}", 1) for name in named}
    shard = sizes.pop("dp_shard", 0)
    given: dict[str, Any] = {
        **sizes,
        **{name: found.pop(name) for name in ("rotation", "float8_gather") if name in found},
        "mixed_precision": str(config.get("mixed_precision") or "no"),
        **_SHARING[kind](config, path, left_out),
    }
    found |= given.pop("found", {})
    if mixed_precision != "no":
        given["mixed_precision"] = mixed_precision
    launch = Launch(
        **given,
        processes=_count(processes or config.get("num_processes", 1), "num_processes", f"launch {path}", 1),
        machines=_count(config.get("num_machines", 1), "num_machines", f"launch {path}", 1),
    )
    if shard > 1 and shard != launch.mesh.get("dp_shard", 1):
        raise UserError(
            f"launch {path}: {launch.processes} processes, and the sizes of parallelism_config make "
            f"{shard * prod(sizes.values())}; they must agree"
        )
    if launch.tp > 1 and launch.strategy == "fsdp2":
        why = "answered as transformers' own DistributedConfig; accelerate 1.15 imports ReplicateParallel for it"
        leave_out(left_out, "tp_size with FSDP", why, f"launch {path}: ")
    also = {key: found[key] for key in _ALSO if found.get(key) not in (None, "auto")}
    if _truth(found.get("checkpointing")):  # FSDP's own
        also["policy"] = "full"
    return launch, {key: float(value) if key == "max_grad_norm" else value for key, value in also.items()}


_ALSO = ("accumulation", "max_grad_norm", "batch_size")  # fields of a spec that a launch's file may set, too


def _document(path: str | Path | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(path, Mapping):
        return path
    config = load_entries(path, f"launch {path}", "an accelerate configuration (`accelerate config` writes one)")
    if "zero_optimization" in config:  # DeepSpeed's own
        return {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": config}}
    return config


def _kind(config: Mapping[str, Any]) -> str:
    return str(config.get("distributed_type") or "NO").upper()  # YAML reads a bare NO as false


def states_processes(source: str | Path | Mapping[str, Any]) -> bool:
    """Whether a launch's file, or its content, says on how many GPUs it is."""
    config = _document(source)
    return _kind(config) not in ("FSDP", "DEEPSPEED") or bool(whole_number(str(config.get("num_processes", ""))))


# Sharding strategies of FSDP 1 -> whether FSDP2 drops gathered parameters after forward.
_RESHARDS = {
    **dict.fromkeys(("true", "1", "yes", "full_shard", "hybrid_shard"), True),
    **dict.fromkeys(("false", "0", "no", "shard_grad_op", "2", "hybrid_shard_zero2"), False),
}


def _fsdp2(config: Mapping[str, Any], path: str | Path, left_out: dict[str, str] | None) -> dict[str, Any]:
    options = {key.removeprefix("fsdp_"): value for key, value in _section(config, "fsdp_config", path).items()}
    reshard = str(options.get("reshard_after_forward", True)).strip().lower()
    if str(options.get("version", 1)) != "2":
        why = "answered as FSDP2, whose shards have the same sizes and whose buffers are smaller"
        leave_out(left_out, "fsdp_version 1", why, f"launch {path}: ")
        reshard = str(options.get("sharding_strategy") or reshard).strip().lower()
        if reshard in ("no_shard", "3"):
            return {"strategy": "ddp"}
        if "hybrid" in reshard:
            why = "all GPUs are predicted to share the model: copies need more memory"
            leave_out(left_out, "sharding_strategy", why, f"launch {path}: ")
    wrapping = str(options.get("auto_wrap_policy", "TRANSFORMER_BASED_WRAP")).upper()
    classes = options.get("transformer_layer_cls_to_wrap") or options.get("transformer_cls_names_to_wrap") or ""
    classes = classes if isinstance(classes, list) else str(classes).split(",")
    if reshard not in _RESHARDS:
        raise UserError(
            f"launch {path}: fsdp_reshard_after_forward {reshard}: accelerate takes true or false for FSDP2"
        )
    return {
        "strategy": "fsdp2",
        "reshard_after_forward": _RESHARDS[reshard],
        "offload_params": _truth(options.get("offload_params", options.get("cpu_offload", False))),
        "wrap": None if wrapping == "NO_WRAP" else tuple(str(name).strip() for name in classes if str(name).strip()),
    }


def _zero(config: Mapping[str, Any], path: str | Path, left_out: dict[str, str] | None) -> dict[str, Any]:
    options = _section(config, "deepspeed_config", path)
    file = options.get("deepspeed_config_file")
    if file in (None, "none"):
        away = {name: {"device": options.get(f"{name}_device")} for name in OFFLOADS}
        return {
            **_stage(options.get("zero_stage", 2), path),
            "zero": ZeroOptions.read(away, f"launch {path}", left_out=left_out),
        }
    return _deepspeed_file(beside(file, path), left_out)


def beside(file: Any, source: str | Path) -> Any:
    """Returns the path `file` from the working directory, or from a folder around the file `source` that names it."""
    folder = Path(str(source)).absolute().parent
    places = [] if isinstance(file, Mapping) else [at / str(file) for at in (Path(), folder, *folder.parents)]
    return next((str(place) for place in places if place.is_file()), file)


def _deepspeed_file(file: Any, left_out: dict[str, str] | None) -> dict[str, Any]:
    """Returns the fields of a launch that DeepSpeed's configuration sets: a file, or its content.

    With `left_out`, the stage of a file that does not exist is read from the file's name.
    """
    name = "deepspeed" if isinstance(file, Mapping) else f"deepspeed_config_file {file}"
    named = re.search(r"(?:zero|z|stage)[-_]?([0-3])", Path(str(file)).stem.lower())
    if named and left_out is not None and not isinstance(file, Mapping) and not Path(str(file)).is_file():
        left_out[name] = f"no such file; by its name it is ZeRO-{named[1]}: --launch takes the file, where it lies"
        away = [part for part in OFFLOADS if "offload" in str(file) and (part == OFFLOADS[0] or "all" in str(file))]
        file = {"zero_optimization": {"stage": int(named[1]), **{part: {"device": "cpu"} for part in away}}}
        file |= {"bf16": {"enabled": "auto"}}
    try:
        config = dict(file) if isinstance(file, Mapping) else json.loads(Path(str(file)).read_text("utf-8"))
        zero = config["zero_optimization"]
        stage = zero["stage"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"launch: {name}: cannot be read, or has no ZeRO stage ({error!r})") from error
    stated = config.get("optimizer")
    if isinstance(stated, Mapping):
        config["optimizer"] = str(stated.get("type"))
    found = read_settings(config, ("deepspeed",), f"launch: {name}", left_out)
    precision = [dtype for dtype in ("bf16", "fp16") if _truth(_section(config, dtype, name).get("enabled", False))]
    return {
        **_stage(stage, name, left_out),
        "zero": ZeroOptions.read(zero, f"launch: {name}", config.get(_REDUCE), left_out),
        "mixed_precision": precision[0] if precision else "no",
        "found": found,
    }


def _stage(stage: Any, path: str | Path, left_out: dict[str, str] | None = None) -> dict[str, Any]:
    if str(stage) == "0":
        why = "answered as DDP: DeepSpeed's own copies of the weights come on top"
        leave_out(left_out, "ZeRO stage 0", why, f"launch {path}: ")
        return {"strategy": "ddp"}
    if str(stage) not in ("1", "2", "3"):
        raise UserError(f"launch {path}: ZeRO stage {stage} is not modelled (1, 2, 3); for stage 0 take MULTI_GPU")
    return {"strategy": f"zero{stage}"}


def _section(config: Mapping[str, Any], key: str, path: str | Path) -> dict[str, Any]:
    return dict(keys_of(config.get(key), f"launch {path}: {key}"))


def _truth(value: Any) -> bool:
    return str(value).strip().lower() in ("true", "1", "yes")


_SHARING: dict[str, Callable[..., dict[str, Any]]] = {
    **dict.fromkeys(("NO", "MULTI_GPU"), lambda *given: {"strategy": "ddp"}),
    "FSDP": _fsdp2,
    "DEEPSPEED": _zero,
}


def parallelism(launch: Launch, attention: str = "") -> dict[str, int | str]:
    """Returns the fields of accelerate's ParallelismConfig; {} if the launch needs none.

    attention: `attn_implementation` of the model, which DeepSpeed's Ulysses must be told; "" for sdpa.
    """
    if all(getattr(launch, name) == 1 for name in SIZES):
        return {}
    sizes: dict[str, int | str] = {
        f"{name}_size": launch.mesh.get(name, 1) for name in ("dp_replicate", "dp_shard", "tp", "cp", "sp")
    }
    if launch.sp > 1:
        return {**sizes, "sp_attn_implementation": attention or "sdpa"}
    return {**sizes, "cp_comm_strategy": launch.rotation} if launch.cp > 1 else sizes
