"""recipes/text.py on the built-in texts and on small files of rows, run in this process."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForSequenceClassification, AutoPeftModelForTokenClassification
from recipe_scripts import history, load_recipe
from torch.nn import functional as F
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    RobertaConfig,
    RobertaForMaskedLM,
)

from ckpt_ft.errors import UserError
from ckpt_ft.training.samples.language import VOCABULARY
from ckpt_ft.workloads.transformers_models import POSITIVES

SMALL = ["--use_cpu", "--max_steps", "4", "--per_device_train_batch_size", "4", "--logging_steps", "1"]
QUIET = ["--disable_tqdm", "true", "--ac_report", "none", "--max_length", "24"]
WORDS = ["read", "write", "open", "close", "send"]
ROWS: dict[str, list[dict[str, Any]]] = {
    "text-classification": [
        {"text": f"{WORDS[at % 5]} the file {at}", "label": ("reader", "writer")[at % 2]} for at in range(12)
    ],
    "token-classification": [
        {"tokens": [WORDS[at % 5], "the", "file"], "label": ["verb", "other", "noun"]} for at in range(12)
    ],
    "embedding": [{"anchor": f"how to {word} {at}", "positive": f"to {word}: call it, then wait for {at}"}
                  for at in range(3) for word in WORDS],
    "reranker": [{"query": WORDS[at % 5], "passage": f"{WORDS[at % 4]} it", "label": at % 2} for at in range(12)],
}  # fmt: skip
AUTO = {
    "text-classification": AutoModelForSequenceClassification,
    "token-classification": AutoModelForTokenClassification,
    "embedding": AutoModel,
    "reranker": AutoModelForSequenceClassification,
}


@pytest.fixture(scope="module")
def recipe() -> ModuleType:
    return load_recipe("text")


@pytest.fixture(scope="module")
def base(sample: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT without dropout, as a masked language model, with the sample's tokenizer."""
    out = tmp_path_factory.mktemp("bert")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(vocab_size=VOCABULARY, max_position_embeddings=48, pad_token_id=0, **sizes, **still)
    BertForMaskedLM(config).save_pretrained(out)
    AutoTokenizer.from_pretrained(sample[0]).save_pretrained(out)
    return out


def rows_of(folder: Path, task: str, rows: list[dict[str, Any]] | None = None) -> str:
    path = folder / f"{task}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows or ROWS[task]))
    return str(path)


def train(recipe: ModuleType, base: Path, out: Path, task: str, *flags: str) -> Path:
    out.mkdir(parents=True, exist_ok=True)
    words = ["--model_name_or_path", str(base), "--dataset_name", rows_of(out, task), "--task", task]
    recipe.main([*SMALL, *QUIET, *words, "--output_dir", str(out / "run"), *flags])
    return out / "run"


@pytest.mark.slow
def test_built_in_run_is_accurate(recipe: ModuleType, tmp_path: Path) -> None:
    """The most common topic has 31 % of the rows."""
    recipe.main(["--use_cpu", *QUIET[:4], "--output_dir", str(tmp_path)])
    assert json.loads((tmp_path / "eval_results.json").read_text())["eval_accuracy"] > 0.6


@pytest.mark.parametrize("task", ROWS)
def test_every_task_trains_as_without_a_policy_and_loads_again(
    recipe: ModuleType, base: Path, tmp_path: Path, task: str
) -> None:
    evaluated = ["--test_split_size", "0.25", "--eval_strategy", "steps", "--eval_steps", "4"]
    plain = train(recipe, base, tmp_path / "plain", task, *evaluated)
    out = train(recipe, base, tmp_path / "full", task, *evaluated, "--ac_policy", "full", "--ac_check")
    assert history(out) == history(plain)
    assert len(history(out)) == 4
    results = json.loads((out / "eval_results.json").read_text())
    assert ("eval_accuracy" in results) == (task != "embedding")
    assert results["eval_loss"] > 0
    model = AUTO[task].from_pretrained(out)
    changed = model.base_model.state_dict()["encoder.layer.1.output.dense.weight"]
    assert not torch.equal(
        changed, AutoModel.from_pretrained(base).state_dict()["encoder.layer.1.output.dense.weight"]
    )
    if task == "token-classification":
        assert model.config.id2label == {0: "noun", 1: "other", 2: "verb"}
    if task == "reranker":
        assert model.classifier.out_features == 1


@pytest.mark.parametrize("task", ["text-classification", "token-classification"])
def test_accumulated_steps_have_the_gradients_of_the_whole_batch(
    recipe: ModuleType, base: Path, tmp_path: Path, task: str
) -> None:
    """transformers takes the losses of these models for sums over the accumulated batch, which they are not."""
    whole = train(recipe, base, tmp_path / "whole", task, "--max_steps", "1", "--learning_rate", "0")
    flags = ["--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "2"]
    parts = train(recipe, base, tmp_path / "parts", task, "--max_steps", "1", "--learning_rate", "0", *flags)
    assert history(parts, "grad_norm")[0] == pytest.approx(history(whole, "grad_norm")[0], rel=1e-3)


def test_embeddings_are_means_over_each_rows_own_tokens(recipe: ModuleType, base: Path, tmp_path: Path) -> None:
    """The logged loss equals one that is computed row by row, without padding."""
    rows = ROWS["embedding"][:4]
    words = ["--model_name_or_path", str(base), "--dataset_name", rows_of(tmp_path, "embedding", rows)]
    out = tmp_path / "run"
    recipe.main([*SMALL, *QUIET, *words, "--task", "embedding", "--max_steps", "1", "--output_dir", str(out)])
    model, tokenizer = AutoModel.from_pretrained(base).train(), AutoTokenizer.from_pretrained(base)

    def embedded(text: str) -> torch.Tensor:
        ids = tokenizer(text, return_tensors="pt").input_ids
        return F.normalize(model(input_ids=ids).last_hidden_state.mean(1), dim=1)[0]

    anchors, positives = (torch.stack([embedded(row[name]) for row in rows]) for name in ("anchor", "positive"))
    expected = F.cross_entropy(20 * anchors @ positives.T, torch.arange(4)).item()
    assert history(out)[0] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("task", "auto"),
    [
        ("text-classification", AutoPeftModelForSequenceClassification),
        ("token-classification", AutoPeftModelForTokenClassification),
    ],
)
def test_adapters_come_with_the_trained_head(
    recipe: ModuleType, base: Path, tmp_path: Path, task: str, auto: Any
) -> None:
    out = train(recipe, base, tmp_path, task, "--use_peft", "--lora_r", "4", "--ac_policy", "full")
    saved = json.loads((out / "adapter_config.json").read_text())
    assert "classifier" in saved["modules_to_save"]
    loaded = auto.from_pretrained(out, num_labels=3 if task == "token-classification" else 2)
    adapted = [name for name, value in loaded.state_dict().items() if "lora_B" in name and value.abs().max() > 0]
    linear = 2 * 6 + (task == "text-classification")  # of two blocks, and the pooler
    assert len(adapted) == linear


def test_token_labels_are_on_the_first_piece_of_each_word(base: Path) -> None:
    from ckpt_ft.training.text_tasks import _on_first_pieces

    assert _on_first_pieces([None, 0, 1, 1, 1, 2, None], [5, 6, 7]) == [-100, 5, 6, -100, -100, 7, -100]


def test_memory_report_predicts_pairs(recipe: ModuleType, base: Path, tmp_path: Path) -> None:
    out = train(recipe, base, tmp_path, "embedding", "--ac_report", "json", "--ac_policy", "every:2")
    ranks = json.loads((out / "memory_report.json").read_text())["ranks"]
    predicted, measured = ranks[0]["predicted"]["allocated"], ranks[0]["peaks"]
    assert predicted == pytest.approx(max(peak["allocated"] for peak in measured.values()), rel=0.005)


def test_length_is_cut_to_the_positions_behind_the_padding(
    recipe: ModuleType, sample: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """RoBERTa's positions begin after that of padding: of 50 it uses 48."""
    tokenizer = AutoTokenizer.from_pretrained(sample[0])
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = RobertaConfig(vocab_size=VOCABULARY, max_position_embeddings=50, pad_token_id=1, **sizes)
    RobertaForMaskedLM(config).save_pretrained(tmp_path / "base")
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(1)
    tokenizer.save_pretrained(tmp_path / "base")
    long = [{"text": f"word {at} " * 40, "label": at % 2} for at in range(4)]
    words = ["--model_name_or_path", str(tmp_path / "base"), "--dataset_name", rows_of(tmp_path, "long", long)]
    recipe.main(
        [*SMALL, *QUIET[:4], *words, "--task", "text-classification", "--max_steps", "1"]
        + ["--output_dir", str(tmp_path / "out")]
    )
    assert "--max_length 1024 is reduced to 48" in caplog.text
    with pytest.raises(UserError, match="--max_length 49: the model has 48 positions; give at most that"):
        recipe.main(
            [
                *SMALL,
                *words,
                "--task",
                "text-classification",
                "--max_length",
                "49",
                "--output_dir",
                str(tmp_path / "b"),
            ]
        )


@pytest.mark.parametrize(
    ("task", "rows", "says"),
    [
        ("text-classification", [{"sentence": "a", "label": 0}], "no column 'text' among sentence, label; text-class"),
        ("text-classification", [{"text": "a", "label": 0}, {"text": "", "label": 1}], "row 2 has no 'text'"),
        ("text-classification", [{"text": "a", "label": 1}, {"text": "b", "label": 1}], "every training row is of"),
        ("text-classification", [{"text": "a", "label": 0.5}], "labels are whole numbers or names, not float"),
        ("token-classification", [{"tokens": ["a", "b"], "label": ["x"]}, {"tokens": ["a"], "label": ["y"]}],
         "row 1 has 2 tokens and 1 labels"),
        ("token-classification", [{"tokens": ["a"], "label": ["x"]}, {"tokens": ["a"], "label": [None]}],
         "row 2 has no label"),
        ("embedding", [{"anchor": "a", "answer": "b"}], "no column 'positive' among anchor, answer"),
        (None, [{"text": "a", "label": 0}], "is trained on masked-lm, by its architectures; give --task text"),
    ],
)  # fmt: skip
def test_unusable_rows_are_one_line(
    recipe: ModuleType, base: Path, tmp_path: Path, task: str | None, rows: list[dict[str, Any]], says: str
) -> None:
    words = ["--model_name_or_path", str(base), "--dataset_name", rows_of(tmp_path, "bad", rows)]
    words += ["--task", task] if task else []
    with pytest.raises(UserError, match=says) as refused:
        recipe.main([*SMALL, *QUIET, *words, "--output_dir", str(tmp_path / "out")])
    assert "\n" not in str(refused.value)


def test_positives_count_as_a_rows_length() -> None:
    from datasets import Dataset

    from ckpt_ft.workloads.sample_sizes import row_lengths

    assert row_lengths(Dataset.from_dict({"input_ids": [[1], [1, 2]], POSITIVES: [[1, 2, 3], [1]]})) == [3, 2]
