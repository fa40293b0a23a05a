"""The built-in language-model sample: a corpus, a tokenizer and a small model that every machine can make offline.

The corpus is questions and answers from the docstrings of Python's own standard library; the tokenizer is a byte-level
BPE trained on it; the model is a Llama of one million random parameters. `make_sample` makes them once, as a jsonl
file and a model directory that are read like any others.
"""

from __future__ import annotations

import ast
import inspect
import json
import platform
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_ft.errors import WorkFailed
from ckpt_ft.files import cache_root
from ckpt_ft.training.run.manifest import make_whole

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 2048
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
_VERSION = 1  # part of the cache directory's name: raise it when what is made changes
_SKIPPED = ("test", "tests", "idlelib", "lib2to3", "turtledemo", "site-packages", "encodings", "ensurepip")


def docstring_pairs() -> list[dict[str, str]]:
    """`{"prompt", "completion"}` of every documented module, class and function, in one order, the same on each call.

    Source files are parsed, never imported. The answer is the first paragraph of the docstring on one line.

    Raises:
        WorkFailed: this Python carries no source of its standard library.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    pairs = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if not any(part in _SKIPPED for part in parts[:-1]) and parts[0] not in _SKIPPED:
            pairs += [
                {"prompt": f"What is `{name}` in Python?\n", "completion": answer}
                for name, answer in _documented(path, parts)
            ]
    if not pairs:
        raise WorkFailed(
            f"the built-in sample needs the standard library's source files, and {root} has none; give --dataset_name"
        )
    return pairs


def make_sample() -> tuple[str, str]:
    """The built-in model's directory and the corpus' jsonl file, made on first use (about ten seconds)."""
    made = make_whole(cache_root() / f"docstrings-v{_VERSION}-py{platform.python_version()}", _write)
    return str(made / "model"), str(made / "docstrings.jsonl")


def _write(directory: Path) -> None:
    pairs = docstring_pairs()
    lines = "".join(json.dumps(pair) + "\n" for pair in pairs)
    (directory / "docstrings.jsonl").write_text(lines, encoding="utf-8")
    make_tokenizer(pair["prompt"] + pair["completion"] for pair in pairs).save_pretrained(directory / "model")
    _make_model().save_pretrained(directory / "model")


def _documented(path: Path, parts: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """(qualified name, first paragraph of the docstring) of a source file and of what it defines."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return
    module = ".".join(part for part in parts if part != "__init__")
    stack: list[tuple[str, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]] = [(module, tree)]
    while stack:
        name, node = stack.pop()
        text = ast.get_docstring(node, clean=False)
        paragraph = " ".join(inspect.cleandoc(text).split("\n\n")[0].split()) if text else ""
        if len(paragraph) >= 20:
            yield name, paragraph
        for child in reversed(node.body):
            if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and not child.name.startswith(
                "_"
            ):
                stack.append((f"{name}.{child.name}", child))


def make_tokenizer(corpus: Iterable[str], extra: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """A byte-level BPE with the special tokens of `CHAT_TEMPLATE`, and the `extra` ones."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<|pad|>", "<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", *extra]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        bos_token="<|begin|>",
        eos_token="<|end|>",
        extra_special_tokens=special[3:],
        chat_template=CHAT_TEMPLATE,
    )


def _make_model() -> LlamaForCausalLM:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config)
