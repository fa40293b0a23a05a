"""The options that several commands of `ckpt-ft` share, and what they mean."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpt_ft.errors import UserError
from ckpt_ft.memory.distributed.launch import STRATEGIES, Launch
from ckpt_ft.policy import Policy
from ckpt_ft.units import parse_bytes
from ckpt_ft.workloads.settings import Settings

if TYPE_CHECKING:
    pass

Command = Callable[..., None]
Model = Annotated[str, typer.Argument(help="Hub id, local directory or config file")]
PolicyOption = Annotated[str, typer.Option("--policy", help="e.g. full, every:2, save:attention+matmul, pointwise")]
BatchSize = Annotated[int, typer.Option("--batch-size", help="samples on the device at once")]
SeqLength = Annotated[int, typer.Option("--seq-length", help="tokens of a sequence (language models)")]
Resolution = Annotated[int, typer.Option("--resolution", help="pixels of an image's side; 0 for the model's own")]
Device = Annotated[str, typer.Option("--device", help="a GPU by name, or cpu")]
Dtype = Annotated[str, typer.Option("--dtype", help="of the weights: float32, bfloat16 or float16")]
MixedPrecision = Annotated[str, typer.Option("--mixed-precision", help="autocast: no, bf16 or fp16")]
Optimizer = Annotated[str, typer.Option("--optimizer", help="adamw_fused, adamw, adamw_8bit, adafactor, sgd or none")]
Lora = Annotated[int, typer.Option("--lora", help="LoRA rank; 0 trains all weights")]
LoraTargets = Annotated[
    str, typer.Option("--lora-targets", help="comma-separated module names; by default all linear layers")
]
Attention = Annotated[
    str, typer.Option("--attn-implementation", help="sdpa or eager; by default what the model prefers")
]
FourBit = Annotated[bool, typer.Option("--load-in-4bit", help="frozen weights in 4 bits (NF4)")]
LaunchOption = Annotated[
    str, typer.Option("--launch", help="several GPUs: ddp, fsdp2, or an accelerate configuration file")
]
Processes = Annotated[int, typer.Option("--processes", help="GPUs in all; by default the file's")]
Machines = Annotated[int, typer.Option("--machines", help="that they are on; by default the file's, or 1")]
Link = Annotated[
    str, typer.Option("--link", help="bytes that a GPU sends in a second of a large collective, e.g. 25GB")
]
AllocConf = Annotated[str, typer.Option("--alloc-conf", help="as in PYTORCH_CUDA_ALLOC_CONF")]
ONE_PROCESS = {"launch": "", "processes": 0, "machines": 0, "link": "", "alloc_conf": ""}
PrepareKbit = Annotated[
    bool,
    typer.Option(
        "--prepare-kbit", help="with 4 bits: peft's k-bit preparation, embeddings, norms and head in float32"
    ),
]
LoraDropout = Annotated[
    float | None,
    typer.Option("--lora-dropout", help="by default what the recipes take: 0.05, and 0 in diffusion models"),
]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON instead of a table")]


def takes_settings(fixed: Mapping[str, Any] = MappingProxyType({}), **defaults: Any) -> Callable[[Command], Command]:
    """For commands: in place of the parameter `settings`, an option for each of its fields.

    fixed: fields that the command decides. defaults: of options, where the command has another.
    """

    def decorate(command: Command) -> Command:
        own = inspect.signature(command, eval_str=True).parameters
        options = [
            option.replace(default=defaults.get(name, option.default))
            for name, option in inspect.signature(_settings, eval_str=True).parameters.items()
            if name not in fixed
        ]
        every = [p for name in own for p in (options if name == "settings" else [own[name]])]

        @functools.wraps(command)
        def typed(**given: Any) -> None:
            settings = _settings(**{option.name: given.pop(option.name) for option in options}, **fixed)
            command(**given, settings=settings)

        signature = inspect.Signature([p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in every])
        typed.__signature__ = signature  # type: ignore[attr-defined]  # what typer reads, and the annotations
        typed.__annotations__ = {p.name: p.annotation for p in every}
        return typed

    return decorate


def _settings(
    seq_length: SeqLength = 1024,
    resolution: Resolution = 0,
    dtype: Dtype = "float32",
    mixed_precision: MixedPrecision = "no",
    optimizer: Optimizer = "adamw_fused",
    lora: Lora = 0,
    lora_targets: LoraTargets = "",
    attn_implementation: Attention = "",
    load_in_4bit: FourBit = False,
    launch: LaunchOption = "",
    processes: Processes = 0,
    machines: Machines = 0,
    link: Link = "",
    alloc_conf: AllocConf = "",
    prepare_kbit: PrepareKbit = False,
    lora_dropout: LoraDropout = None,
) -> Settings:
    launched = _launch(launch, processes, machines, link, mixed_precision)
    if launched is not None and mixed_precision == "no":
        mixed_precision = launched.mixed_precision
    return Settings(
        launch=launched,
        alloc_conf=alloc_conf,
        dtype=dtype,
        mixed_precision=mixed_precision,
        optimizer=optimizer,
        lora_r=lora,
        lora_targets=tuple(part.strip() for part in lora_targets.split(",") if part.strip()),
        seq_length=seq_length,
        resolution=resolution,
        attn_implementation=attn_implementation,
        load_in_4bit=load_in_4bit,
        prepare_kbit=prepare_kbit,
        lora_dropout=lora_dropout,
    )


def _launch(given: str, processes: int, machines: int, link: str, mixed_precision: str) -> Launch | None:
    """What `--launch` and the options beside it say; None for one process."""
    if not given:
        for option, value in (("--processes", processes), ("--machines", machines), ("--link", link)):
            if value:
                raise UserError(f"{option} {value}: for several GPUs give --launch too (ddp, fsdp2, a file)")
        return None
    if given in STRATEGIES:
        launch = Launch(given, processes or 1, mixed_precision=mixed_precision)
    elif Path(given).suffix in (".yaml", ".yml", ".json"):
        launch = Launch.from_file(given, processes or None)
    else:
        raise UserError(
            f"--launch {given}: neither a strategy ({', '.join(STRATEGIES)}) nor accelerate's configuration (.yaml)"
        )
    rate = float(parse_bytes(link)) if link else None
    return replace(launch, machines=machines or launch.machines, link=rate)


def parse_policy(text: str) -> Policy:
    """The policy of `--policy`.

    Raises:
        UserError: it is none, or one of torch.compile, which no command runs.
    """
    policy = Policy.parse(text)
    if policy.budget is not None:
        raise UserError(f"--policy {text}: budget: acts under torch.compile alone, in a recipe with --torch_compile")
    return policy
