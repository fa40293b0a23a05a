"""Command-line flags generated from the fields of a spec: options, parsing, and the way back to a command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

from ckpt_ft.errors import UserError
from ckpt_ft.spec.launch import (
    COUNTS,
    SIZES,
    STRATEGIES,
    WORTH_A_LOOK,
    Launch,
    launches_on,
    launches_that_share,
    on_counts,
    read_launch,
    states_processes,
)
from ckpt_ft.units import parse_bytes

from .fields import Declared, option_of
from .peft_file import read_peft
from .settings import leave_out, lines_of
from .training_spec import TrainingSpec, declared


@dataclass(frozen=True)
class Flag:
    """One flag of the command line.

    Attributes:
        name: with underscores.
        type: type of its value: str, int, float or bool.
        options: spellings on the command line: "--lora" and "--lora-r".
        default: as `--help` shows it; "" to show none.
        part: the part of a spec that it belongs to, such as "precision".
    """

    name: str
    type: Any
    help: str
    options: tuple[str, ...]
    default: str = ""
    part: str = "launch"


_LAUNCH = (
    ("launch", str, "several GPUs: ddp, fsdp2, zero1, zero2, zero3, or an accelerate configuration file"),
    ("processes", int, "number of GPUs; default: the file's"),
    ("gpus", int, "number of GPUs; plan chooses their launch (ddp or fsdp2, or one of those that --launch names)"),
    ("machines", int, "number of machines with these GPUs; default: the file's, or one for every 8 GPUs"),
    ("tp", int, "GPUs that share each weight matrix (tensor parallelism, transformers' own)"),
    ("cp", int, "GPUs that share each sequence in a ring (context parallelism, with --launch fsdp2)"),
    ("sp", int, "GPUs that share each sequence by heads (DeepSpeed's Ulysses, with --launch zero3)"),
    ("ep", int, "GPUs that hold different experts (expert parallelism, transformers' own, with --launch fsdp2)"),
    ("dp_replicate", int, "copies of a model that FSDP2 shards (HSDP)"),
    ("offload", str, "what is kept in host memory: optimizer, or all (parameters too); by default under zero3"),
    ("link", str, "bytes that a GPU sends in a second of a large collective, e.g. 25GB"),
)
_SYNONYMS = {"fsdp": "fsdp2", "deepspeed": "zero3", "zero": "zero3", "multi_gpu": "ddp"}
_POLICY = "e.g. full, every:2, save:attention+matmul, pointwise"


@lru_cache(maxsize=1)
def flags() -> dict[str, Flag]:
    """Returns every flag by its name, in the order of `--help`."""
    found = [Flag("policy", str, _POLICY, ("--policy",))]
    for own in declared().values():
        if own.flag is not None:
            typed = own.setting.typed or own.flag
            options = dict.fromkeys(map(option_of, (typed, *own.setting.also)))
            default = "" if own.default in (None, "", (), False) else str(own.default)
            default = own.setting.default_text or default
            found.append(Flag(own.flag, own.flag_type, own.setting.help, tuple(options), default, own.part))
        switches = own.setting.switches
        found += [Flag(one.name, bool, one.help, (option_of(one.name),), part=own.part) for one in switches]
    found += [Flag(name, kind, text, (option_of(name),)) for name, kind, text in _LAUNCH]
    return {flag.name: flag for flag in found}


def fields_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a spec that flags set, for `TrainingSpec.of` and `edit`.

    Args:
        given: values by the flags' names; None and "" mean that a flag is not given.

    Raises:
        UserError: an invalid value, two flags for one field, or incompatible launch options.
    """
    given = {name: value for name, value in given.items() if value is not None and value != ""}
    found: dict[str, Any] = {"policy": str(given["policy"])} if "policy" in given else {}
    for own in declared().values():
        found |= _field(own, given)
    for own in declared().values():
        if own.key in found:
            for key, value in own.setting.implies.items():
                found.setdefault(key, value)
    left_out: dict[str, str] | None = None if found.get("strict") else {}
    if "peft_config" in found:
        found["peft"] = read_peft(found["peft_config"], f"--peft-config {found['peft_config']}", left_out)
    found |= _launch_fields(given, found, left_out)
    return found | ({"left_out": lines_of(left_out)} if left_out else {})


def _field(own: Declared, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns {field: value} if flags set the field, else {}."""
    said: list[tuple[str, Any]] = []
    if own.flag in given:
        value = given[str(own.flag)]
        value = str(value) if own.flag_type is str else value
        value = own.setting.read(value) if own.setting.read else value
        said.append((own.option, value))
    for switch in own.setting.switches:
        others = [one for one in said if one[1] != own.default]
        if given.get(switch.name) and not (switch.weak and others):
            same = any(value == switch.value for _, value in others)
            said = others if same else [*others, (option_of(switch.name), switch.value)]
    if len(said) > 1:
        raise UserError(f"{' and '.join(option for option, _ in said)}: give one of them")
    return {own.key: said[0][1]} if said else {}


def _launch_fields(
    given: Mapping[str, Any], found: dict[str, Any], left_out: dict[str, str] | None
) -> dict[str, Any]:  # fmt: skip
    named: Any
    sizes = {name: given[name] for name in (*SIZES, "ep") if given.get(name)}
    named, processes, machines = given.get("launch", ""), given.get("processes", 0), given.get("machines", 0)
    link = _rate(given["link"]) if given.get("link") else None
    if isinstance(named, str):
        named = ",".join(_SYNONYMS.get(name.strip().lower(), name.strip()) for name in named.split(","))
    precision = found.get("mixed_precision", "no")
    if sizes and ("gpus" not in given or "ep" in sizes):
        named = named or ("zero3" if "sp" in sizes else "fsdp2" if sizes.keys() - {"tp"} else "ddp")
    if sizes and "gpus" not in given and not Path(str(named)).suffix:  # ep is among the processes of the others
        processes = processes or max(prod(sizes.get(name, 1) for name in SIZES), sizes.get("ep", 1))
    offload = given.get("offload", "")
    if offload and not named and "gpus" not in given:
        named, processes = "zero3", processes or 1
    words = {name: given[name] for name, *_ in _LAUNCH if name in given}
    if isinstance(named, Mapping) and "gpus" in given:  # of a training file
        raise UserError("--config: it has a launch of its own; give --processes, or --launch with names")
    asked = tuple(word for name, value in words.items() for word in (option_of(name), str(value)))
    if "gpus" in given:
        if processes or Path(named).suffix:
            said = f"--processes {processes}" if processes else f"--launch {named}"
            raise UserError(
                f"--gpus {given['gpus']} and {said}: --gpus chooses among strategies by name, a file is one launch"
            )
        strategies = [name.strip() for name in named.split(",")] if named else WORTH_A_LOOK
        launches = launches_on(given["gpus"], machines, strategies, mixed_precision=precision, link=link, **sizes)
        if not named and not sizes:
            launches += launches_that_share(given["gpus"], machines, mixed_precision=precision, link=link)
        if offload:
            launches = [launch.with_offload(offload) for launch in launches]
        return {"launches": tuple(launches), "asked": asked}
    if not named:
        if asked:
            raise UserError(f"{' '.join(asked)}: for several GPUs give --launch too (ddp, fsdp2, a file)")
        return {}
    is_open = not processes and _is_file(named) and not states_processes(named)
    launch, also = _launch(named, processes, precision, left_out)
    if "policy" in also and found.get("policy") not in (None, "none"):
        also["policy"] = found["policy"]
    for key, value in also.items():
        if found.setdefault(key, value) != value:
            source = "--config" if isinstance(named, Mapping) else f"launch {named}"
            raise UserError(f"{source}: {key.replace('_', ' ')} {value}, and {found[key]} elsewhere; give one")
    if "ep" in sizes and launch.processes > 1 and not (isinstance(named, str) and named in STRATEGIES):
        if launch.strategy != "ddp" and not isinstance(named, Mapping):
            raise UserError(
                f"launch {named}, ep {sizes['ep']}: accelerate would shard again what transformers has sharded; give "
                "accelerate_configs/multi_gpu.yaml"
            )
        if launch.strategy != "ddp":  # axolotl's experts under its FSDP
            leave_out(
                left_out, f"ep {sizes['ep']}", "answered as transformers' own, whose rest FSDP2 shards", "--config: "
            )
        launch = replace(launch, strategy="fsdp2")
    launch = replace(launch, machines=machines or launch.machines, link=link, **sizes)
    launch = launch.with_offload(offload) if offload else launch
    if isinstance(named, Mapping):
        asked = (option_of("launch"), launch.strategy, *asked[asked.index(option_of("launch")) + 2 :])
    counted = {"launches": on_counts(launch)} if is_open else {"launch": launch}
    return {**also, **counted, "asked": asked} | (
        {"mixed_precision": launch.mixed_precision} if precision == "no" else {}
    )


def _rate(said: str) -> int:
    """Bytes a second of `--link`."""
    try:
        return parse_bytes(said.removesuffix("/s"))
    except UserError:
        raise UserError(f"--link {said}: give the bytes that a GPU sends in a second, as in 25GB") from None


def on_gpus(spec: TrainingSpec, launch: Launch | None = None) -> TrainingSpec:
    """Returns `spec`, whose file does not say on how many GPUs it runs, under one of its launches; None for none."""
    if launch is None:
        return spec
    asked = (*spec.launch.asked, option_of("processes"), str(launch.processes))
    return spec.edit(launch=launch, launches=(), asked=asked)


def _is_file(named: Any) -> bool:
    return isinstance(named, Mapping) or Path(named).suffix in (".yaml", ".yml", ".json")


def _launch(
    named: Any, processes: int, precision: str, left_out: dict[str, str] | None
) -> tuple[Launch, dict[str, Any]]:
    """Returns the launch that `--launch` names or a file describes, and other fields of a spec that it sets."""
    if _is_file(named):
        count = processes or (None if states_processes(named) else COUNTS[-1])
        return read_launch(named, count, precision, left_out)
    if named in STRATEGIES:
        if not processes:
            raise UserError(f"--launch {named}: on how many GPUs? give --processes")
        return Launch(named, processes, mixed_precision=precision), {}
    raise UserError(
        f"--launch {named}: neither a strategy ({', '.join(STRATEGIES)}) nor accelerate's configuration (.yaml)"
    )


def words_of(spec: TrainingSpec, without: tuple[str, ...] = ()) -> list[str]:
    """Returns the shortest command line for `spec`: its model, and flags whose values differ from the defaults.

    without: names of fields to leave out.
    """
    words = [spec.model.name] if spec.model.name else []
    if spec.policy != "none" and "policy" not in without:
        words += ["--policy", spec.policy]
    for own in declared().values():
        if own.key not in without and spec.get(own.key) != own.default:
            words += _words(own, spec.get(own.key))
    return words + list(spec.launch.asked)


def _words(own: Declared, value: Any) -> list[str]:
    """Returns the words for a field's value; [] if it cannot be typed, such as a switch that is off."""
    switch = next((one for one in own.setting.switches if one.value == value and not one.weak), None)
    if switch is not None:
        return [option_of(switch.name)]
    off = value is None or value is False or value in ("", ()) or (own.setting.switches and value == own.default)
    if off or own.flag is None:
        return []
    option = own.option
    return [option] if value is True else [option, own.setting.write(value)]


@dataclass(frozen=True)
class Edit:
    """A change of some fields of a spec, as suggestions propose it: `Edit({"lora_r": 16, "dtype": "bfloat16"})`.

    `of` refuses invalid changes, so that every suggestion can be typed on the command line.
    """

    changes: Mapping[str, Any] = field(default_factory=dict)

    def of(self, spec: TrainingSpec) -> TrainingSpec:
        """Returns `spec` with the changes.

        Raises:
            UserError: an unknown field, an invalid value, or incompatible fields.
        """
        return spec.edit(**self.changes)

    def words(self, spec: TrainingSpec) -> list[str]:
        """Returns the flags to append to a command for `spec`: those of the changed fields, in the edit's order."""
        changed = self.of(spec)
        words: list[str] = []
        for key in self.changes:
            if changed.get(key) == spec.get(key):
                continue
            if key == "asked":
                words += changed.launch.asked
            else:
                words += ["--policy", changed.policy] if key == "policy" else _words(declared()[key], changed.get(key))
        return words

    def text(self, spec: TrainingSpec) -> str:
        """Describes the change of `spec` in one line: the flags to add, and those to leave out."""
        changed = self.of(spec)
        dropped = [
            own.option
            for own in declared().values()
            if own.flag is not None and changed.get(own.key) != spec.get(own.key) != own.default
            if not _words(own, changed.get(own.key))
        ]
        return " ".join(self.words(spec)) + (f" without {' '.join(dropped)}" if dropped else "")
