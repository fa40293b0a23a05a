"""ACCallback in a run of sentence-transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from transformers import AutoTokenizer, BertConfig, BertModel

from ckpt_ft import ACCallback
from ckpt_ft.training.arguments import ACArguments

PAIRS = Dataset.from_dict({"anchor": ["def f(x):", "return x", "class A:", "import os"] * 2, "positive": ["a"] * 8})


def embedder(folder: Path, tokenizer: Path) -> SentenceTransformer:
    """A tiny encoder with dropout and mean pooling."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
    BertModel(BertConfig(vocab_size=2048, max_position_embeddings=64, **shape)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
    return SentenceTransformer(str(folder), device="cpu")


@pytest.mark.filterwarnings("ignore")
def test_policy_keeps_the_losses_of_pairs_and_the_peak_is_predicted(tmp_path: Path, sample: tuple[Path, Path]) -> None:
    def trained(callback: ACCallback | None) -> Any:
        model = embedder(tmp_path / "model", sample[0])
        args = SentenceTransformerTrainingArguments(
            str(tmp_path / "out"), max_steps=3, per_device_train_batch_size=4, logging_steps=1, report_to="none",
            save_strategy="no", disable_tqdm=True, use_cpu=True,
        )  # fmt: skip
        trainer = SentenceTransformerTrainer(
            model, args, train_dataset=PAIRS, loss=MultipleNegativesRankingLoss(model)
        )
        if callback is not None:
            callback.attach(trainer)
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    callback = ACCallback(ACArguments(ac_policy="full", ac_report="json"))
    plain = trained(None)
    assert len(plain) == 3
    assert trained(callback) == plain
    assert callback.report is not None
    rank = callback.report.ranks[0]
    assert rank.predicted is not None, callback.report.notes
    assert rank.predicted.allocated == pytest.approx(rank.peak(), rel=2e-3)
