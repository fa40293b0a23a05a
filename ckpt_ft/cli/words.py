"""What people type in place of a command line: `llama 8b qlora on two 4090s`, `longest context qwen3 4b 12gb`.

`hear` reads such words in any order: what is asked for, a card, a method, a task, a length, a launch. What remains is
the model, which `alike` finds among the known ones by a family and a size.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_ft.errors import UserError
from ckpt_ft.memory.gpus import find_gpu, is_other
from ckpt_ft.spec.defaults import LORA_R, TRAINERS
from ckpt_ft.spec.training_spec import HUB_TASKS, TASK_NAMES
from ckpt_ft.workloads.model_config import NICKNAMES, find_model, known_models, names

FILES = (".py", ".yaml", ".yml", ".json", ".toml", ".gguf")  # ends of the names of files that stand for a model
WORDS = re.compile(r"\d+(?:\.\d+)?[bm]?|[a-z]+")
TUNED = {"instruct", "chat", "base"}  # of the same shapes


@dataclass(frozen=True)
class Heard:
    """What words ask for.

    Attributes:
        command: that answers them; "" if they do not say.
        model: the words that name the model, or its file; "" for none.
        flags: values of our flags that the words say, by the flags' names.
        rest: words that are not understood beside a model that is named whole.
        ignored: plain words that are not understood beside the name of a known model.
    """

    command: str
    model: str
    flags: Mapping[str, Any]
    rest: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()

    def options(self) -> list[str]:
        """Returns the flags as a command line has them."""
        return [
            f"--{name.replace('_', '-')}{'' if value is True else f'={value}'}" for name, value in self.flags.items()
        ]

    def notes(self) -> tuple[str, ...]:
        return (f"not understood: {' '.join(self.ignored)}",) if self.ignored else ()


_GAP = r"[\s_-]*"
_MOST = rf"(?:max(?:imum|imal)?|largest|biggest|highest|long(?:est)?|find|optimal|auto){_GAP}(?:max{_GAP})?"
_LENGTH = r"(?:context|seq(?:uence)?s?|len(?:gth)?s?|tokens?|ctx|window)"
_LENGTHS = rf"(?:model{_GAP})?{_LENGTH}(?:{_GAP}{_LENGTH})*"
_NUMBER = r"(\d+k?)"
_PACKED = r"(?:4-?bits?|int4|nf4|gguf|awq|gptq|q[2-6](?:_\w+)?)"
_ASKED = {  # what is asked for -> the command that answers it
    rf"(?:{_MOST}|(?:what|which|how\s+(?:big|large)(?:\s+of)?)\s+(?:an?\s+)?)"
    rf"(?:micro{_GAP})?(?:batch(?:es)?(?:{_GAP}sizes?)?|bs)|how\s+many\s+samples"
    rf"|^batch(?:{_GAP}size)?(?!{_GAP}size|\s*\d)": "max-batch",
    rf"(?:{_MOST}|(?:what|which|how\s+\w+)\s+(?:\w+\s+){{0,2}}){_LENGTHS}(?!(?:{_GAP}{_LENGTH})*\s+of\s+\d)"
    rf"|^{_LENGTHS}(?!(?:{_GAP}{_LENGTH})*\s*(?:of\s+)?\d|\s+cl)": "max-length",
    r"(?:(?:best|which|what|fastest|compare|choose)\s+)?polic(?:y|ies)|optimi[sz]e|fastest|plan|trade-?off": "plan",
    r"(?:reduce|save|less|out\s+of)\s+(?:gpu\s+)?v?(?:memory|ram)|oom|selective\s+checkpointing": "plan",
    r"(?:which|what|best|cheapest|smallest|minimum|min)\s+(?:gpus?|cards?)|where|dollars": "where",
}
_SAID: dict[str, dict[str, Any]] = {  # what is said -> flags; {} is the number in it
    rf"(?:max{_GAP})?{_LENGTHS}\s*(?:of\s+)?{_NUMBER}": {"seq_length": "{}"},
    rf"{_NUMBER}\s*{_LENGTHS}": {"seq_length": "{}"},
    rf"(?:per{_GAP}device{_GAP}(?:train{_GAP})?|micro{_GAP})?(?:batch(?:{_GAP}size)?|bs)\s*(?:of\s+)?{_NUMBER}": {
        "batch_size": "{}"
    },
    rf"(?:grad(?:ient)?{_GAP})?accum(?:ulation)?(?:{_GAP}steps)?\s*(?:of\s+)?{_NUMBER}": {"accumulation": "{}"},
    rf"res(?:olution)?\s*(?:of\s+)?{_NUMBER}|(\d{{3,4}})\s*(?:px|x\s*\d{{3,4}})": {"resolution": "{}"},
    r"bf(?:loat)?16": {"dtype": "bfloat16"},
    r"fp16|float16": {"dtype": "float16"},
    r"fp32|float32": {"dtype": "float32"},
    rf"(?:cpu{_GAP})?offload(?:ing)?": {"offload": "all"},
    r"(\d+)x?\s+(?:gpus|cards)": {"processes": "{}"},
    r"(\d+)\s+(?:labels|classes)": {"num_labels": "{}"},
    rf"(?:deepspeed\s+)?zero{_GAP}(?:stage\s*)?([123])": {"launch": "zero{}"},
    r"fsdp\s*[12]?": {"launch": "fsdp2"},
    r"ddp": {"launch": "ddp"},
    r"deepspeed": {"launch": "zero3"},
    rf"(?:gradient|activation){_GAP}checkpointing": {"policy": "full"},
    r"(?:(?:google|free)\s+)*(?:colab|kaggle)": {"device": "t4"},  # the card that both offer free of charge
    r"(?:lora_)?(?:rank\s*|r\s+)(?:of\s+)?(\d+)": {"lora_r": "{}"},
    rf"q{_GAP}lora": {"lora_r": LORA_R, "load_in_4bit": True},
    r"lora": {"lora_r": LORA_R},
    r"8-?bits?|int8": {"load_in_8bit": True},
    rf"{_PACKED}(?:\s+{_PACKED})*": {"load_in_4bit": True},
    **{name: {"trainer": name} for name in TRAINERS},
}
_TASKS = {
    name.replace("-", r"[\s_-]"): HUB_TASKS.get(name, name)
    for name in sorted((*HUB_TASKS, *TASK_NAMES), key=len, reverse=True)
}
_COUNTS = {"two": 2, "dual": 2, "both": 2, "three": 3, "four": 4, "quad": 4, "eight": 8}
_FILLERS = frozenset("""
    a about accelerate ai am an and any are at batch be been best big biggest both by can card cards choose context
    cost costs could cpu currently day days desktop did do does dreambooth encoder enough estimate fast faster fine
    finetune finetuned finetuning fit fits for from full get give good gpu gpus graphics had happens has have
    hour hours how i if in is it just largest length limit llm llms long longer longest make many max maximum me
    memory method methods minute minutes model models more most much multi my need needs new now of on one only
    or our own per pick please possible pretrain pretrained pretraining price quantized ram recommend run runs
    scratch second seconds sequence should show single size slow slower some speed step steps still suggest take
    takes tell than that the there they think this time to torchrun train trainable training trains tune tuning
    under unet us use using versus vram vs want was way we weights what when which will with without work works
    would you your
""".split())  # noqa: SIM905  # fmt: skip
_MOST_WORDS = 6  # in the name of a card


def hear(words: Sequence[str], files: bool = True) -> Heard:
    """Returns what `words` ask for; they may be quoted together or apart. A word may name a file or folder if `files`.

    Raises:
        UserError: the card that they name is of a kind that is not predicted.
    """
    plain = ("out",) if len(words) > 1 else ()  # "out of memory" is no folder of that name
    whole = next((word for word in words if "/" in word or (files and word not in plain and _is_path(word))), "")
    said = " ".join(word for word in words if word != whole).replace("?", "").replace("=", " of ").strip()  # r=64
    if find_model(said):
        return Heard("", said, {})
    said = re.sub(rf"\b({'|'.join(_COUNTS)})\s+", lambda n: f"{_COUNTS[n[1].lower()]}x ", said, flags=re.IGNORECASE)
    flags: dict[str, Any] = {}
    command = ""
    for pattern, asked in _ASKED.items():
        found, said = _cut(pattern, said)
        command = command or (asked if found else "")
    for pattern, says in _SAID.items():
        found, said = _cut(pattern, said)
        if found:
            number = _tokens(next(filter(None, found.groups()), ""))
            values = {name: str(to).format(number) if isinstance(to, str) else to for name, to in says.items()}
            flags = {name: int(to) if to == str(number) else to for name, to in values.items()} | flags
    said, device = _card(said)
    flags |= {"device": device} if device else {}
    generic = False
    for pattern, task in _TASKS.items():
        found, said = _cut(pattern, said)
        if found and "task" not in flags:
            flags["task"], generic = task, found[0].lower().startswith("classif")
    left = [word for word in said.split() if word.lower().replace("-", "") not in _FILLERS]
    if whole:
        return Heard(command, whole, flags, tuple(left))
    at, end = _named(left)
    model, ignored = " ".join(left[at:end]), (*left[:at], *left[end:])
    if (others := [word for at, word in enumerate(left) if is_other(" ".join(left[at:]))]) and (
        is_other(model)
        or not alike(pieces_of(model))  # a card that is none of ours ("mac m2"), and no model ("bge m3")
    ):
        find_gpu(others[0])  # raises
    if generic and (known := find_model(alike(pieces_of(model)))) and known.family == "vision":
        del flags["task"]  # a classifier of images is one
    return Heard(command, model, flags, ignored=ignored)


def _is_path(word: str) -> bool:
    return Path(word).suffix in FILES or Path(word).exists()


def _named(words: Sequence[str]) -> tuple[int, int]:
    """Where the model is in `words`: the longest run that begins with a family, if no other has a digit; or all."""
    if len(words) < 2 or alike(pieces_of(" ".join(words))):
        return 0, len(words)
    runs = [(at, end) for at in range(len(words)) for end in range(at + 1, len(words) + 1)]
    for at, end in sorted(runs, key=lambda run: run[0] - run[1]):
        run, others = " ".join(words[at:end]).lower(), (*words[:at], *words[end:])
        pieces = pieces_of(run)
        found = alike(pieces).rpartition("/")[2].lower() or NICKNAMES.get(run, "")
        if (
            found
            and (run in NICKNAMES or (pieces[0].isalpha() and pieces[0] in WORDS.findall(found)[:2]))
            and not any(re.search(r"\d", w) for w in others)
        ):
            return at, end
    return 0, len(words)


def _cut(pattern: str, said: str) -> tuple[re.Match[str] | None, str]:
    """Looks for whole words; returns what is found, and `said` without it."""
    found = re.search(rf"(?<!\S)(?:{pattern})(?!\S)", said, re.IGNORECASE)
    return found, said if found is None else f"{said[: found.start()]} {said[found.end() :]}".strip()


def _tokens(number: str) -> int:
    """A number of tokens: 8k is 8192."""
    return int(number[:-1]) * 1024 if number.endswith(("k", "K")) else int(number or 0)


def _card(said: str) -> tuple[str, str]:
    """Returns `said` without the card that it names, and that card, with the number of them: "2x 4090"."""
    words = re.sub(r"(?<!\S)(\d{1,2})\s*x\s*(?=\S)(?!\d+b)", r"\1x ", said, flags=re.IGNORECASE).split()
    for length in range(min(_MOST_WORDS, len(words)), 0, -1):
        for at in range(len(words) - length + 1):
            span, before, after = " ".join(words[at : at + length]), words[:at], words[at + length :]
            plural = not is_card(span) and span[-1] in "sS"
            name = span[:-1] if plural else span
            if {words[at].lower(), words[at + length - 1].lower()} & _FILLERS or not is_card(name):
                continue
            # a number is of the cards, and not of a model's name ("phi 4 a100"), after plain words or a size
            counts = plural or not before[1:] or before[-2].lower() in _FILLERS or re.search(r"\d[bm]$", before[-2])
            times = re.fullmatch(r"(\d{1,2})x?" if counts else r"(\d{1,2})x", before[-1] if before else "")
            behind = None if times else re.fullmatch(r"x(\d{1,2})", after[0] if after else "")
            count = times or behind
            kept = [*(before[:-1] if times else before), *(after[1:] if behind else after)]
            return " ".join(kept), f"{count[1]}x {name}" if count else name
    return " ".join(words), ""


def is_card(name: str) -> bool:
    """Whether that is a card and no model: "4090" or "24GB", but not "3" or "135m"."""
    with suppress(UserError):
        if find_model(name) or re.search(r"\dm\b", name, re.IGNORECASE):
            return False
        return not (find_gpu(name).name.startswith("a card of") and re.fullmatch(r"[\d.]+", name))
    return False


def pieces_of(model: str) -> list[str]:
    """The words and numbers of what people call a model."""
    return WORDS.findall(re.sub(r"\bsd\s*(?=\d|xl)", "stable diffusion ", model.lower()))


def alike(words: Sequence[str]) -> str:
    """The known model with all of `words` in its name, in order if possible, and the fewest others; "" for none.

    Of several such models it is the first of its file: the one that most people mean.
    """
    order = {name: at for at, name in enumerate(known_models())}
    found: dict[str, tuple[Any, ...]] = {}
    for known, model in names().items() if words else ():
        own = WORDS.findall(re.sub(r"(\d)-(?=\d$)", r"\1.", known.rpartition("/")[2].lower()))  # v1-5
        if all(any(f"{have}.".startswith(f"{word}.") for have in own) for word in words):
            rest = iter(own)
            ordered = all(any(f"{have}.".startswith(f"{word}.") for have in rest) for word in words)
            newer = sum(word not in own for word in words)  # llama 3 is 3.1, too
            family = model.family != "language"
            found[known] = not ordered, newer, family, len(own), order[model.name], len(known)
    return min(found, key=found.__getitem__, default="")
