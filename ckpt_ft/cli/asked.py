"""What a command asks about, from its options: how a model is trained, and on which card.

A command names what it needs as a parameter, `spec` or `gpu`; the options that say it stand in its place.
"""

from __future__ import annotations

import functools
import inspect
import shlex
from collections.abc import Callable, Mapping
from inspect import Parameter
from types import MappingProxyType
from typing import Any

import typer

from ckpt_ft.errors import UserError
from ckpt_ft.memory.gpus import GPU, asked_gpu
from ckpt_ft.spec.defaults import IMAGE_SIZE, LORA_R
from ckpt_ft.spec.peft_file import read_peft
from ckpt_ft.spec.training_spec import TrainingSpec

from .launches import asked_launch, asked_launches
from .options import (
    Accumulation,
    AllocConf,
    Attention,
    AudioSeconds,
    Bf16,
    Buckets,
    Device,
    Dora,
    DoubleQuant,
    Dtype,
    EightBit,
    Ema,
    EncodeEachStep,
    FourBit,
    Fp16,
    Frames,
    Freeze,
    GpuLike,
    GpuMemory,
    Gpus,
    Images,
    ImageSize,
    LaunchOption,
    Link,
    LongestSide,
    Lora,
    LoraDropout,
    LoraTargets,
    Machines,
    MaxGradNorm,
    MaxPixels,
    MixedPrecision,
    Optimizer,
    Packing,
    Padding,
    PeftConfig,
    PrepareKbit,
    Processes,
    QuantStorage,
    Resolution,
    SeqLength,
    TrainTextEncoder,
    TrainTowers,
    UsePeft,
    memory,
)

Command = Callable[..., None]
# Parameters of an estimate: what a plan chooses, and where this answer goes.
_NOT_OF_A_PLAN = ("policy", "batch_size", "as_json", "html", "snapshot", "perfetto")


def takes(fixed: Mapping[str, Any] = MappingProxyType({})) -> Callable[[Command], Command]:
    """For commands: in place of a parameter that `_MADE` names, the options that it is made of.

    fixed: options that the command decides.
    """

    def decorate(command: Command) -> Command:
        own = inspect.signature(command, eval_str=True).parameters
        options = {name: _options(make, fixed) for name, make in _MADE.items() if name in own}
        every = [p for name in own for p in options.get(name, [own[name]])]

        @functools.wraps(command)
        def typed(**given: Any) -> None:
            for name, its in options.items():
                taken = {option.name: given.pop(option.name) for option in its}
                decided = {key: value for key, value in fixed.items() if key in _parameters(_MADE[name])}
                given[name] = _MADE[name](**taken, **decided)
            command(**given)

        signature = inspect.Signature([p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in every])
        typed.__signature__ = signature  # type: ignore[attr-defined]  # what typer reads, and the annotations
        typed.__annotations__ = {p.name: p.annotation for p in every}
        return typed

    return decorate


def plan_command(context: typer.Context) -> str:
    """The `ckpt-ft plan` that asks the question of a `ckpt-ft estimate`, without its policy and batch."""
    words = ["ckpt-ft", "plan"]
    for parameter in context.command.params:
        name, value = str(parameter.name), context.params[str(parameter.name)]
        source = context.get_parameter_source(name)
        if source is None or source.name != "COMMANDLINE" or name in _NOT_OF_A_PLAN:
            continue
        option = "--budget" if name == "capacity" else parameter.opts[0]
        words += [str(value)] if name == "model" else [option] if value is True else [option, str(value)]
    return shlex.join(words)


def _options(make: Callable[..., Any], fixed: Mapping[str, Any]) -> list[Parameter]:
    return [option for name, option in _parameters(make).items() if name not in fixed]


def _parameters(make: Callable[..., Any]) -> Mapping[str, Parameter]:
    return inspect.signature(make, eval_str=True).parameters


def _card(device: Device = "", gpu_memory: GpuMemory = "", gpu_like: GpuLike = "") -> GPU | None:
    """The GPU that is asked about, None for the CPU."""
    memory("--gpu-memory", gpu_memory)
    return asked_gpu(device, gpu_memory, gpu_like)


def _settings(
    seq_length: SeqLength = None,
    accumulation: Accumulation = 1,
    max_grad_norm: MaxGradNorm = 1.0,
    resolution: Resolution = 0,
    aspect_ratio_buckets: Buckets = "",
    train_text_encoder: TrainTextEncoder = False,
    encode_each_step: EncodeEachStep = False,
    frames: Frames = 0,
    audio_seconds: AudioSeconds = 0,
    images: Images = 0,
    image_size: ImageSize = "",
    max_pixels: MaxPixels = 0,
    longest_side: LongestSide = 0,
    train_towers: TrainTowers = "",
    dtype: Dtype = "float32",
    mixed_precision: MixedPrecision = "no",
    bf16: Bf16 = False,
    fp16: Fp16 = False,
    optimizer: Optimizer = "adamw_fused",
    lora: Lora = 0,
    use_peft: UsePeft = False,
    lora_targets: LoraTargets = "",
    attn_implementation: Attention = "",
    dora: Dora = False,
    peft_config: PeftConfig = "",
    freeze: Freeze = "",
    packing: Packing = False,
    padding: Padding = False,
    ema: Ema = False,
    load_in_4bit: FourBit = False,
    double_quant: DoubleQuant = False,
    quant_storage: QuantStorage = "uint8",
    load_in_8bit: EightBit = False,
    launch: LaunchOption = "",
    processes: Processes = 0,
    gpus: Gpus = None,
    machines: Machines = 0,
    link: Link = "",
    alloc_conf: AllocConf = "",
    prepare_kbit: PrepareKbit = False,
    lora_dropout: LoraDropout = None,
) -> TrainingSpec:
    mixed_precision = _precision(mixed_precision, bf16, fp16)
    launches = () if gpus is None else asked_launches(gpus, launch, processes, machines, link, mixed_precision)
    launched = asked_launch(launch, processes, machines, link, mixed_precision) if gpus is None else None
    if launched is not None and mixed_precision == "no":
        mixed_precision = launched.mixed_precision
    return TrainingSpec.of(
        launch=launched,
        launches=launches,
        alloc_conf=alloc_conf,
        dtype=dtype,
        mixed_precision=mixed_precision,
        optimizer=optimizer,
        lora_r=lora or (LORA_R if use_peft else 0),
        lora_targets=_parts("--lora-targets", lora_targets),
        use_dora=dora,
        peft=read_peft(peft_config, f"--peft-config {peft_config}") if peft_config else None,
        frozen=_parts("--freeze", freeze),
        rows=_rows(packing, padding),
        ema=ema,
        seq_length=seq_length,
        accumulation=accumulation,
        max_grad_norm=max_grad_norm,
        resolution=resolution,
        buckets=aspect_ratio_buckets,
        train_text_encoder=train_text_encoder,
        encode_each_step=encode_each_step,
        frames=frames,
        audio_seconds=audio_seconds,
        images=images or int(bool(image_size)),
        image_size=_image_size(image_size),
        max_pixels=max_pixels,
        longest_side=longest_side,
        train_towers=train_towers,
        attn_implementation=attn_implementation,
        load_in_4bit=load_in_4bit,
        double_quant=double_quant,
        quant_storage=quant_storage,
        load_in_8bit=load_in_8bit,
        prepare_kbit=prepare_kbit,
        lora_dropout=lora_dropout,
    )


def _image_size(given: str) -> tuple[int, int]:
    """(width, height) of `--image-size`: WxH, or the side of a square."""
    sides = given.lower().split("x") if given else [str(side) for side in IMAGE_SIZE]
    if not (len(sides) in (1, 2) and all(side.strip().isdecimal() for side in sides)):
        raise UserError(f"--image-size {given}: give width and height in pixels, 640x480 for example")
    return int(sides[0]), int(sides[-1])


def _parts(flag: str, text: str) -> tuple[str, ...]:
    parts = tuple(part.strip() for part in text.split(",") if part.strip())
    if text and not parts:
        raise UserError(f"{flag} '{text}': names nothing; give comma-separated names, or leave it out")
    return parts


def _rows(packing: bool, padding: bool) -> str:
    if packing and padding:
        raise UserError("--packing and --padding: packed sequences are full, give one of them")
    return "packed" if packing else "padded" if padding else "alike"


def _precision(named: str, bf16: bool, fp16: bool) -> str:
    flags = [name for name, given in (("bf16", bf16), ("fp16", fp16)) if given]
    asked = sorted({*flags, *([named] if named != "no" else [])})
    if len(asked) > 1:
        raise UserError(f"mixed precision {' and '.join(asked)}: give one of them")
    return asked[0] if asked else "no"


_MADE: dict[str, Callable[..., Any]] = {"spec": _settings, "gpu": _card}
