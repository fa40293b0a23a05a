"""The parameters that commands share: the flags of a TrainingSpec, made from its fields, and a few of their own."""

from __future__ import annotations

import functools
import inspect
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from inspect import Parameter
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from ckpt_ft.errors import UserError, did_you_mean
from ckpt_ft.files import check_writable
from ckpt_ft.memory.gpus import GPU, find_gpu, gpu_of
from ckpt_ft.policy import Policy
from ckpt_ft.spec.defaults import LORA_R, ONLINE, TRAINERS, TRL_BATCH
from ckpt_ft.spec.flags import Flag, fields_of, flags, on_gpus
from ckpt_ft.spec.launch import SIZES
from ckpt_ft.spec.settings import TYPED, entry_of, known_names, lines_of, typed_as
from ckpt_ft.spec.training_file import read_training_file, read_typed
from ckpt_ft.spec.training_spec import DTYPES, TrainingSpec
from ckpt_ft.workloads.model_config import checkpoint_dtype, find_model, hub_id

from .named import Named, named, unpacked
from .words import hear

Command = Callable[..., None]
NOTHING: Mapping[str, Any] = MappingProxyType({})
ONE_LAUNCH = ("gpus",)
ONE_PROCESS = ("launch", "processes", "gpus", "machines", *SIZES, "ep", "offload", "link", "alloc_conf")
Model = Annotated[str, typer.Argument(help="Hub id, local directory or config file")]
Config = Annotated[
    str,
    typer.Option(
        "--config",
        help="a file of a recipe, TRL, axolotl, LLaMA-Factory or diffusers' scripts; command-line flags override it",
    ),
]
Recipe = Annotated[
    str, typer.Option("--recipe", help="with --config: the kind of file, llm, trl or axolotl for example")
]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON instead of a table")]


def writable(parameter: typer.CallbackParam, file: str) -> str:
    """An option's file, which must be writable; "" for none."""
    if file:
        check_writable(file, parameter.opts[0])
    return file


Html = Annotated[
    str, typer.Option("--html", callback=writable, help="write an HTML page with the answer to this file")
]
_BASIC = (
    "--device", "--config", "--task", "--lora", "--load-in-4bit", "--seq-length", "--batch-size", "--policy",
    "--dtype", "--launch", "--processes", "--gpus", "--budget", "--method", "--dataset",
)  # fmt: skip
_SHOWN = 11
_COUNTED = re.compile(r"(\d{1,4})\s*[x*]\s*(\S.*)|(\S.*?)\s*[x*]\s*(\d{1,2})$", re.IGNORECASE)  # 2xrtx-4090, T4 x2
_PRECISION = {"dtype", "mixed_precision", "bf16", "fp16"}
_ADAPTERS = ("lora_r", "use_peft", "peft_config")
_OF_EVERY_COMMAND = {"model": Model, "config": Config, "recipe": Recipe}


def takes_spec(
    *without: str, defaults: Mapping[str, Any] = NOTHING, fixed: Mapping[str, Any] = NOTHING, counts: bool = False
) -> Callable[[Command], Command]:
    """For commands with a parameter `spec`: MODEL, --config and the spec's flags stand in its place.

    A flag that is also a parameter of the command is the command's own; a file of --config sets those, too, where they
    are not given and None is their default.

    Args:
        without: flags that the command does not have.
        defaults: fields of the spec where no flag sets them.
        fixed: fields that the command decides; they have no flags.
        counts: whether the command chooses a number of GPUs where a file does not say it.

    A command with a parameter `others` takes several models: those after the first.
    Of a training file, what a model cannot have is left out of the answer: `UserError.without`.
    """

    def decorate(command: Command) -> Command:
        own = dict(inspect.signature(command, eval_str=True).parameters)
        del own["spec"]
        compares = own.pop("others", None) is not None
        taken = {name: flag for name, flag in flags().items() if name not in {*without, *fixed, *own}}

        @functools.wraps(command)
        def typed(model: str, config: str, recipe: str, **given: Any) -> None:
            typed_flags = {name: given.pop(name) for name in taken}
            typed_flags = {name: value for name, value in typed_flags.items() if value is not None}
            found = Named(model, config) if config else named(model)
            left_out: tuple[str, ...] = ()
            model, config, typed_flags = found.model, found.file, {**found.flags, **typed_flags}
            print_notes(found.notes)
            if config:
                length, content = typed_flags.get("seq_length"), found.content
                read = read_training_file(
                    config, recipe or found.kind, bool(given.get("dataset")), length, bool(typed_flags.get("strict")),
                    content, bool(typed_flags.get("images")),
                )  # fmt: skip
                print_notes(read.notes)
                model, left_out = model or read.model, read.left_out
                typed_flags = {name: value for name, value in read.flags.items() if name in taken} | typed_flags
                given |= {n: read.flags[n] for n in own if given[n] is None and n in read.flags}
            elif recipe:
                raise UserError(f"--recipe {recipe}: of which file? give --config file.yaml too")
            if counted := _COUNTED.match(str(typed_flags.get("device") or given.get("device") or "")):
                (typed_flags if "device" in typed_flags else given)["device"] = counted[2] or counted[3]
                typed_flags |= _several(int(counted[1] or counted[4]), typed_flags, taken, own, given)
            alone = not any(typed_flags.get(name) for name in ("launch", "gpus", *SIZES, "offload"))
            if (typed_flags.get("processes") or 0) > 1 and alone:
                typed_flags |= _several(typed_flags.pop("processes"), typed_flags, taken, own, given)
            if typed_flags.get("trainer") in ONLINE and not typed_flags.get("batch_size"):
                typed_flags["batch_size"] = TRL_BATCH
                print_notes((f"batches of {TRL_BATCH} samples, as TRL's by default; --batch-size changes it",))

            for card in str(typed_flags.get("device") or "").split(","):
                if card:  # refused before the Hub is asked for a model
                    gpu_of(card)

            def spec_of(model: str) -> TrainingSpec:
                copy, flags = unpacked(model), typed_flags
                if copy is not None:
                    model, flags = copy.model, {**({} if flags.get("load_in_8bit") else copy.flags), **flags}
                    print_notes(copy.notes)
                adapts = any(flags.get(name) for name in _ADAPTERS)
                if "lora_r" in taken and not adapts and (flags.get("load_in_4bit") or flags.get("load_in_8bit")):
                    flags, adapts = {**flags, "lora_r": LORA_R}, True
                    print_notes((f"packed weights are frozen: LoRA of rank {LORA_R} trains; --lora changes it",))
                if flags.get("num_labels") and not flags.get("task"):
                    from ckpt_ft.workloads.load import task_with_labels

                    flags = {**flags, "task": task_with_labels(hub_id(model))}
                if flags.get("dtype") == "auto":
                    flags = {**flags, "dtype": _checkpoint_dtype(hub_id(model))}
                elif "dtype" in taken and not (config or _PRECISION & flags.keys()):
                    flags = {**flags, **_published_precision(model, adapts)}
                spec = TrainingSpec.of(**{"model": hub_id(model), **defaults, **fields_of(flags), **fixed})
                return _with_left_out(spec, left_out, "gpus" in without and counts)

            models = [model] if Path(model).exists() else [name.strip() for name in model.split(",")]
            if len(models) > 1 and not compares:
                raise UserError(f"{model}: one model at a time; `ckpt-ft estimate` compares several")
            specs = [spec_of(name) for name in models]
            if "policy" in taken:
                require_applicable(specs[0])
            more = {"others": specs[1:]} if compares else {}
            from_file = bool(config) or Path(str(typed_flags.get("launch") or "")).suffix != ""
            _forgiving(command, specs[0], from_file, **more, **given)

        parameters = [_parameter(name, kind, "") for name, kind in _OF_EVERY_COMMAND.items()]
        parameters += [_parameter(name, _option(flag), None) for name, flag in taken.items()]
        parameters += [p.replace(kind=Parameter.KEYWORD_ONLY) for p in own.values()]
        typed.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what typer reads
        typed.__annotations__ = {p.name: p.annotation for p in parameters}
        return typed

    return decorate


def _forgiving(command: Command, spec: TrainingSpec, forgives: bool, **given: Any) -> None:
    """Runs `command`; what the model of a file cannot have is left out, and said."""
    while True:
        try:
            return command(spec=spec, **given)
        except UserError as error:
            if not forgives or spec.host.strict or all(spec.get(name) == to for name, to in error.without.items()):
                raise
            said = f"{', '.join(name for name in error.without if spec.get(name))}: {error}"
            print(f"not modelled: {said}", file=sys.stderr)
            spec = spec.edit(**error.without, left_out=(*spec.host.left_out, said))


def _several(
    count: int, typed: Mapping[str, Any], taken: Mapping[str, Any], own: Mapping[str, Any], given: dict[str, Any]
) -> dict[str, Any]:
    """The flags of "--device 4xh100", which names the number of cards; puts the command's own one into `given`."""
    if count < 2 or typed.get("gpus") or typed.get("processes"):
        return {}
    if "gpus" in own:
        given["gpus"] = count
        return {}
    if "gpus" in taken and not typed.get("launch"):
        return {"gpus": count}
    if "processes" not in taken:
        raise UserError(f"--device {count}x...: this command is about one card; name it without the number")
    if not typed.get("launch"):
        print_notes((f"{count} cards share the model by FSDP2; --launch ddp, zero2 or zero3 are others",))
    return {"processes": count, "launch": typed.get("launch", "fsdp2")}


def _with_left_out(spec: TrainingSpec, left_out: tuple[str, ...], counts: bool) -> TrainingSpec:
    """Prints what the answer about `spec` is without; where its file does not say how many GPUs, they are the most."""
    spec = spec.edit(left_out=(*left_out, *spec.host.left_out))
    if spec.host.left_out:
        print(f"not modelled: {'; '.join(spec.host.left_out)}", file=sys.stderr)
    open_launches = spec.launch.launches and "--gpus" not in spec.launch.asked
    if not open_launches or counts:
        return spec
    launch = spec.launch.launches[-1]
    print_notes((f"the file does not say on how many GPUs: {launch.processes}; --processes changes it",))
    return on_gpus(spec, launch)


def _parameter(name: str, kind: Any, default: Any) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def _option(flag: Flag) -> Any:
    text = f"{flag.help} [default: {flag.default}]" if flag.default else flag.help
    return Annotated[flag.type | None, typer.Option(*flag.options, help=text, rich_help_panel=flag.part)]


class GroupedCommand(TyperCommand):
    """A command whose --help has the options that most people need, and whose --help-all has all, by what they set."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        params = [(one, record) for one in self.get_params(ctx) if (record := one.get_help_record(ctx))]
        groups: dict[str, list[tuple[str, str]]] = {
            "Arguments": [],
            "Basic options": [],
            "Options of this command": [],
        }
        options = {one.opts[0]: one for one, _ in params if one.param_type_name == "option"}
        basic = [name for name in _BASIC if name in options][:_SHOWN]
        for one, record in sorted(params, key=lambda pair: (*basic, pair[0].opts[0]).index(pair[0].opts[0])):
            panel = getattr(one, "rich_help_panel", None)
            title = "Basic options" if one.opts[0] in basic else f"{panel.capitalize()}" if panel else ""
            title = "Arguments" if one.param_type_name == "argument" else title or "Options of this command"
            groups.setdefault(title, []).append(record)
        every = "--help-all" in sys.argv
        for title, records in groups.items():
            if records and (every or title in ("Arguments", "Basic options")):
                with formatter.section(title):
                    formatter.write_dl(records)
        if not every:
            formatter.write_paragraph()
            formatter.write_text(f"{len(options) - len(basic)} more options, by what they set: --help-all")


def _checkpoint_dtype(model: str) -> str:
    """The dtype of a model's checkpoint; of a configuration alone, which may not say it, that of most checkpoints."""
    if not Path(model).exists():
        return checkpoint_dtype(model)
    with suppress(UserError):
        return checkpoint_dtype(model)
    print_notes((f"dtype auto: {model} does not say the dtype of its checkpoint: bfloat16; --dtype changes it",))
    return "bfloat16"


def _published_precision(model: str, adapts: bool) -> dict[str, str]:
    """The default dtype and autocast of a model, if no flag or file sets them; prints them.

    Transformers models default to the dtype of their checkpoint, as `from_pretrained` does; known diffusion models to
    what the recipes and diffusers' scripts do: bf16 autocast, and frozen weights in bfloat16.
    """
    known = find_model(model)
    if known is not None and "_class_name" in known.config:
        weights = {"dtype": "bfloat16"} if adapts else {}
        said = "frozen weights are bfloat16" if adapts else "the weights are float32"
        print_notes((f"{said}, under bf16 autocast, as the recipes train; --dtype or --mixed-precision changes it",))
        return {**weights, "mixed_precision": "bf16"}
    with suppress(UserError):  # of a model that cannot be read, which is refused where it is built
        dtype = checkpoint_dtype(hub_id(model))
        if dtype in DTYPES and dtype != "float32":
            why = f"{model} is published" if known is not None else f"transformers loads {model}"
            print_notes((f"the weights are {dtype}, as {why}; --dtype float32 takes twice the bytes",))
            return {"dtype": dtype}
    return {}


def print_notes(notes: tuple[str, ...]) -> None:
    for note in notes:
        print(f"note: {note}", file=sys.stderr)


def cards_of(device: str) -> list[GPU | None]:
    """The cards that --device names, with commas between them; None for the CPU."""
    if "," in device:
        return list({card.name: card for card in map(find_gpu, device.split(","))}.values())
    return [gpu_of(device)]


def require_applicable(spec: TrainingSpec) -> None:
    """Raises UserError for a policy that is none, or that does nothing with or without torch.compile."""
    policy = Policy.parse(spec.policy)
    if policy.budget is not None and not spec.kernels.compile:
        raise UserError(f"--policy {spec.policy}: budget: acts under torch.compile alone; give --torch-compile too")
    idle = {"head": policy.head, "offload": policy.offload, "tile": policy.tile is not None}
    if spec.kernels.compile and (terms := [term for term, asked in idle.items() if asked]):
        raise UserError(f"--policy {spec.policy}: {terms[0]} does nothing under torch.compile; drop it, or --compile")


# What people type for our options, and no library calls so.
_SYNONYMS = {
    "processes": (
        "gpus", "num_gpus", "n_gpu", "n_gpus", "ngpu", "nproc_per_node", "num_processes", "world_size", "multi_gpu",
        "num_devices", "devices",
    ),
    "seq-length": ("context", "context_length", "ctx", "length", "seq_len", "seqlen", "max_len"),
    "batch-size": ("batch", "bs", "batchsize"),
    "device": ("memory", "gpu_memory", "device_memory"),
    "launch": ("strategy", "accelerate_config", "distributed"),
    "model_name_or_path": ("model",), "dtype": ("precision",), "num-labels": ("labels",),
}  # fmt: skip
# Name -> value -> ours, with {} for the value; "" is an option without a value, or none of ours.
_METHODS = {r"q-?lora": f"--lora={LORA_R} --load-in-4bit", r"lora|peft|true|": "--lora", r"full|none|false": ""}
_PACKINGS = {r".*4.*|awq|gptq|gguf|true|": "--load-in-4bit", r".*8.*": "--load-in-8bit", r"none|false|16|32": ""}
_PEOPLE_SAY: dict[str, Mapping[str, str | None]] = {
    **{name: {".+": f"--{ours}={{}}", "": f"--{ours}"} for ours, names in _SYNONYMS.items() for name in names},
    **dict.fromkeys(("peft", "method", "adapter_type", "fine_tuning", "finetune"), _METHODS),
    **dict.fromkeys(("bits", "quant", "quantize", "quantization"), _PACKINGS),
    **{name: {"true|": ""} for name in ("unet", "train_unet", "dreambooth", "full")},
    **{name: {"true|": f"--trainer={name}"} for name in TRAINERS},
    "cpu_offload": {"true|": "--offload=all"}, "qlora": {"true|": _METHODS["q-?lora"], "false": ""},
    "4bit": {"true|": "--load-in-4bit"}, "8bit": {"true|": "--load-in-8bit"},
    "zero": {"[123]": "--launch=zero{}"}, "classifier": {"true|": "--task=text-classification"},
    "ddp": {"true|": "--launch=ddp"},
    "fsdp": {r"(full_shard|hybrid_shard|auto_wrap|true|[12]|\s)*": "--launch=fsdp2", ".*(shard|load|false).*": None},
    "deepspeed": {"true|": "--launch=zero3", "[123]": "--launch=zero{}", ".*": "--launch={}"},
    "stage": {"rm": "--trainer=reward", "sft|pt": ""} | {name: f"--trainer={name}" for name in TRAINERS},
    "task": {name: f"--trainer={name}" for name in TRAINERS},
}  # fmt: skip
# Options whose value is auto or max -> the command that finds it.
_CHOSEN = {"--batch-size": "max-batch", "--seq-length": "max-length", "--policy": "plan"}
_CARDS = ("--device", "--gpu", "--card", "--vram")
_WITH_MODEL = ("estimate", *_CHOSEN.values())


def words_in_our_names(words: Sequence[str], switches: Callable[[str], Mapping[str, bool]]) -> list[str]:
    """Returns a command line in which other libraries' flags, as a Trainer's command has them, are ours.

    The words that are no options say the model, and may say the card, the method and more (cli/words.py). A question
    about a card without a model is that of `where`; `--batch-size auto`, say, is answered by `max-batch`.

    Args:
        words: the words after `ckpt-ft`.
        switches: returns the options of a command, and whether each has no value.

    Raises:
        UserError: a setting of another library is refused.
    """
    own = switches(words[0]) if words else {}
    if not own:
        return list(words)
    command, kept, said = words[0], list[str](), list[str]()
    given, values = dict[str, Any](), dict[str, str]()
    rest = list(words[1:])
    while rest:
        word = rest.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        plain, option = name.replace("-", "_"), f"--{typed_as(name)}"
        if not word.startswith("--") or word == "--":
            (kept if word.startswith("-") else said).append(word)
            continue
        follows = bool(rest) and not equals and not rest[0].startswith("--")
        meant = _by_value(plain, [value] if equals else [*rest[:follows], ""])
        if meant is not None and (option not in own or plain == "task"):
            ours, text = meant
            rest = [*ours, *rest[bool(text) and not equals :]]
        elif own.get(option) and follows and rest[0].lower() in ("true", "false"):
            kept += [word] if rest.pop(0).lower() == "true" else []  # as HfArgumentParser reads switches
        elif option in ("--help", "--help-all") or own.get(option):
            kept.append(word)
        elif option in own:
            if word == "--lora" and not (rest and re.match(r"-?[\d.]", rest[0])):
                rest.insert(0, str(LORA_R))  # the rank of the recipes
            value = _tokens_of(option, value if equals else rest.pop(0) if rest else "")
            if command == "estimate" and option in _CHOSEN and value in ("auto", "max", "largest", "longest"):
                command = _CHOSEN[option]
                continue
            kept += [f"--{name}={value}"] if equals else [word, *filter(None, [value])]
            values[option] = value
        elif entry_of(plain, TYPED) is None:
            known = [*own, *(f"--{name}" for name in known_names(TYPED))]
            raise UserError(f"No such option: --{name}{did_you_mean(f'--{name}', known)}")
        else:
            given[plain] = _tokens_of(plain, value if equals else rest.pop(0)) if equals or follows else True
    left_out: dict[str, str] | None = None if "--strict" in words else {}
    found = read_typed(given, values.get("--batch-size", ""), left_out) if given else {}
    if left_out:
        print(f"not modelled: {'; '.join(lines_of(left_out))}", file=sys.stderr)
    model = found.pop("model", "")
    for name, value in found.items():
        kept += [f"--{typed_as(name)}"] if value is True else [f"--{typed_as(name)}={value}"]
    heard = hear(said)
    print_notes(heard.notes())
    command = heard.command if command == "estimate" and heard.command else command
    line = [command, *filter(None, [heard.model]), *heard.options(), *kept, *heard.rest, *filter(None, [model])]
    device = next((values[name] for name in _CARDS if name in values), heard.flags.get("device", ""))
    if device and command in _WITH_MODEL and not (heard.model or model or "--config" in values):
        line = ["where", "--device", device]
    if line[0] != words[0]:
        print(f"note: ckpt-ft {shlex.join(line)}", file=sys.stderr)
    return line


def _by_value(option: str, values: Sequence[str]) -> tuple[list[str], str] | None:
    """What an option says in our words with the first of `values` that it takes, and that value; None if unknown."""
    for value in values:
        for pattern, ours in _PEOPLE_SAY.get(option, {}).items():
            if re.fullmatch(pattern, value, re.IGNORECASE):
                return None if ours is None else ([word.format(value) for word in ours.split()], value)
    return None


def _tokens_of(option: str, value: str) -> str:
    """The value of an option, with 8192 for 8k tokens."""
    if not re.search("len|ctx|context|tokens", option):
        return value
    return re.sub(r"\b(\d+)k\b", lambda found: str(int(found[1]) * 1024), value, flags=re.IGNORECASE)
