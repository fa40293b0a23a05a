"""Only completions, assistant turns or plain text are learned, and packing does not change the loss."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from ckpt_ft.errors import UserError
from ckpt_ft.training.text import IGNORED, DataArguments, PadCollator, encode_rows, load_rows, pack

ASK = {"role": "user", "content": "What is a list?"}
ANSWER = {"role": "assistant", "content": "A mutable sequence."}
MORE = {"role": "user", "content": "And a tuple?"}
LAST = {"role": "assistant", "content": "An immutable one."}


@pytest.fixture(scope="module")
def tokenizer(sample: tuple[Path, Path]):  # type: ignore[no-untyped-def]
    return AutoTokenizer.from_pretrained(sample[0])


def encode(rows, tokenizer, **kwargs):  # type: ignore[no-untyped-def]
    return encode_rows(Dataset.from_list(rows), tokenizer, DataArguments(**kwargs))


def learned(row, tokenizer) -> str:  # type: ignore[no-untyped-def]
    assert len(row["input_ids"]) == len(row["labels"])
    assert all(label in (IGNORED, token) for token, label in zip(row["input_ids"], row["labels"], strict=True))
    return tokenizer.decode([label for label in row["labels"] if label != IGNORED])


def test_loss_is_on_the_completion_only(tokenizer) -> None:  # type: ignore[no-untyped-def]
    (row,) = encode([{"prompt": "What is a list?\n", "completion": "A sequence."}], tokenizer)
    assert tokenizer.decode(row["input_ids"]) == "What is a list?\nA sequence.<|end|>"
    assert learned(row, tokenizer) == "A sequence.<|end|>"


def test_loss_of_plain_text_excludes_its_first_token(tokenizer) -> None:  # type: ignore[no-untyped-def]
    (row,) = encode([{"body": "Lists are mutable."}], tokenizer, dataset_text_field="body")
    assert row["labels"] == [IGNORED, *row["input_ids"][1:]]
    assert row["input_ids"][-1] == tokenizer.eos_token_id


def test_loss_is_on_the_assistants_turns(tokenizer) -> None:  # type: ignore[no-untyped-def]
    (row,) = encode([{"messages": [ASK, ANSWER, MORE, LAST]}], tokenizer)
    whole = tokenizer.apply_chat_template([ASK, ANSWER, MORE, LAST], tokenize=False)
    assert tokenizer.decode(row["input_ids"]) == whole
    assert learned(row, tokenizer) == "A mutable sequence.<|end|>\nAn immutable one.<|end|>\n"


def test_prompt_may_be_a_conversation(tokenizer) -> None:  # type: ignore[no-untyped-def]
    (row,) = encode([{"prompt": [ASK, ANSWER, MORE], "completion": [LAST]}], tokenizer)
    assert learned(row, tokenizer) == "An immutable one.<|end|>\n"


def test_template_that_rewrites_earlier_turns_is_refused(sample: tuple[Path, Path]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(sample[0])
    tokenizer.chat_template = "{% for m in messages %}[{{ loop.revindex }}]{{ m.content }}{% endfor %}"
    with pytest.raises(UserError, match="row 1: the chat template renders turn 2 differently"):
        encode([{"messages": [ASK, ANSWER, MORE, LAST]}], tokenizer)


def test_generation_marks_of_a_template_decide_what_is_learned(sample: tuple[Path, Path]) -> None:
    """Also if the template rewrites earlier turns: this one keeps only their first word."""
    tokenizer = AutoTokenizer.from_pretrained(sample[0])
    answer = "{% generation %}{{ m.content if loop.last else m.content.split()[0] }}<|end|>{% endgeneration %}"
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}" + answer + "{% else %}{{ m.content }}"
        "{% endif %}{% endfor %}"
    )
    talk = [ASK, ANSWER, MORE, LAST]
    (row,) = encode([{"messages": talk}], tokenizer)
    assert tokenizer.decode(row["input_ids"]) == tokenizer.apply_chat_template(talk, tokenize=False)
    assert learned(row, tokenizer) == "A<|end|>An immutable one.<|end|>"
    (row,) = encode([{"prompt": talk[:3], "completion": talk[3:]}], tokenizer)
    assert learned(row, tokenizer) == "An immutable one.<|end|>"


def test_error_names_the_row_number_before_the_split(tokenizer, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    rows = [{"text": f"row {number}"} if number != 7 else {"text": None} for number in range(1, 11)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    args = DataArguments(dataset_name=str(path), test_split_size=0.2)
    for seed in (0, 1):  # in one of both orders, it is not the seventh row of its part
        train, test = load_rows(args, evaluate=True, seed=seed)
        assert test is not None
        bad = train if None in train["text"] else test
        with pytest.raises(UserError, match="^row 7: 'text' is NoneType"):
            encode_rows(bad, tokenizer, args)


def test_truncated_and_dropped_rows_are_counted(tokenizer, caplog: pytest.LogCaptureFixture) -> None:  # type: ignore[no-untyped-def]
    rows = [{"prompt": "x " * 50, "completion": "lost"}, {"prompt": "Hi. ", "completion": "kept " * 50}]
    encode([*rows, {"prompt": "Hi. ", "completion": "short"}, rows[1]], tokenizer, max_length=20)
    words = "of 4 rows, 2 are cut and 1 are left out because they have no token to learn"
    assert caplog.messages == [f"--max_length 20: {words}"]
    encode([{"text": "short"}], tokenizer, max_length=20)
    assert len(caplog.messages) == 1


def test_template_error_is_one_line(tokenizer, sample: tuple[Path, Path]) -> None:  # type: ignore[no-untyped-def]
    """Most published templates join strings, which fails if the parts of a message are a list."""
    joining = AutoTokenizer.from_pretrained(sample[0])
    joining.chat_template = "{% for m in messages %}{{ m['role'] + m['content'] }}{% endfor %}"
    parts = [{"role": role, "content": [{"type": "text", "text": "Hi."}]} for role in ("user", "assistant")]
    for row, words in ((parts, "can only concatenate str"), ([{"role": "user"}, ANSWER], "('content'|NoneType)")):
        with pytest.raises(UserError, match=f"row 1: the chat template refuses these messages: .*{words}"):
            encode([{"messages": row}], joining)


def test_message_parts_are_not_learned_as_python_lists(sample: tuple[Path, Path]) -> None:
    trimming = AutoTokenizer.from_pretrained(sample[0])
    trimming.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] | trim }}\n{% endfor %}"
    parts = [{"role": role, "content": [{"type": "text", "text": "Hi."}]} for role in ("user", "assistant")]
    with pytest.raises(
        UserError, match=r"row 1: the chat template knows no parts .* \(\[{'type': 'text', 'text': 'Hi.'"
    ):
        encode([{"messages": parts}], trimming)
    knowing = "{% for m in messages %}{{ m['role'] }}: {{ m['content'][0]['text'] }}\n{% endfor %}"
    trimming.chat_template = knowing + "{% if add_generation_prompt %}assistant:{% endif %}"
    (row,) = encode([{"messages": parts}], trimming)
    assert learned(row, trimming) == " Hi.\n"


def test_long_rows_are_truncated_and_rows_without_loss_dropped(tokenizer) -> None:  # type: ignore[no-untyped-def]
    rows = [{"prompt": "x " * 50, "completion": "lost"}, {"prompt": "Hi. ", "completion": "kept " * 50}]
    (row,) = encode(rows, tokenizer, max_length=20)
    assert len(row["input_ids"]) == 20
    assert learned(row, tokenizer).startswith("kept kept")
    with pytest.raises(UserError, match="none of the 1 rows has a token to learn within --max_length 20"):
        encode(rows[:1], tokenizer, max_length=20)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [{"body": "x"}],
            "the dataset has the columns body; expected 'messages', 'prompt' and 'completion', or 'text'",
        ),
        ([{"text": "x"}, {"text": None}], "row 2: 'text' is NoneType, expected a string"),
        ([{"messages": "hello"}], "row 1: expected a list of messages"),
        ([{"prompt": "x", "completion": 3}], "row 1: 'completion' is int, expected a string"),
        ([{"prompt": [{"role": "user", "content": "x"}], "completion": "y"}], "row 1: 'completion' is str after a"),
    ],
)
def test_invalid_row_is_one_line(tokenizer, rows, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UserError) as caught:
        encode(rows, tokenizer)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 16), min_size=1, max_size=60))
def test_packing_loses_no_token_and_splits_no_row(lengths: list[int]) -> None:
    ids = [[row] * length for row, length in enumerate(lengths)]
    packed = pack({"input_ids": ids, "labels": ids}, max_length=16)
    rows = []
    for tokens, positions in zip(packed["input_ids"], packed["position_ids"], strict=True):
        assert len(tokens) == len(positions) <= 16
        starts = [at for at, position in enumerate(positions) if position == 0]
        rows += [tokens[a:b] for a, b in zip(starts, [*starts[1:], len(tokens)], strict=True)]
    assert sorted(rows) == sorted(ids)
    # Any two sequences that fit into one are packed together, so at most one is at most half full.
    assert sum(len(tokens) <= 8 for tokens in packed["input_ids"]) <= 1


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_packed_rows_give_the_same_loss_and_gradients(sample, tokenizer, attention: str) -> None:  # type: ignore[no-untyped-def]
    rows = [
        {"prompt": "What is a list?\n", "completion": "A sequence."},
        {"prompt": "Why? ", "completion": "Because it is."},
    ]
    model = AutoModelForCausalLM.from_pretrained(sample[0], attn_implementation=attention, use_cache=False)
    collate = PadCollator(tokenizer.pad_token_id)
    results = []
    for packing in (False, True):
        batch = collate(list(encode(rows * 2, tokenizer, packing=packing, max_length=40)))
        model.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        results.append(
            (batch["input_ids"].shape[0], loss.detach(), model.model.layers[0].mlp.up_proj.weight.grad.clone())
        )
    (plain_rows, plain_loss, plain_grad), (packed_rows, packed_loss, packed_grad) = results
    assert (plain_rows, packed_rows) == (4, 2)
    torch.testing.assert_close(packed_loss, plain_loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(packed_grad, plain_grad, rtol=1e-4, atol=1e-8)
