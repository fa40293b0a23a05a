"""Fine-tune a text encoder (BERT, RoBERTa, DeBERTa ...), all weights or LoRA, under a checkpointing policy.

    accelerate launch -q recipes/text.py
        a small BERT that tells topics of Python's reference apart, offline, in about a minute on a CPU

    accelerate launch -q recipes/text.py --task text-classification --model_name_or_path MODEL --dataset_name my.jsonl
        a classifier of rows of 'text' and 'label'; token-classification has rows of 'tokens' and 'label'

    accelerate launch -q recipes/text.py --task embedding --model_name_or_path MODEL --dataset_name pairs.jsonl
        embeddings of rows of 'anchor' and 'positive' with sentence-transformers' in-batch loss; reranker has rows of
        'query', 'passage' and 'label'

Flags: ModelArguments, TextTaskArguments, ACArguments, and RunArguments, which has every flag of
transformers.TrainingArguments and --overwrite_output_dir.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from transformers import Trainer

from ckpt_ft.errors import run
from ckpt_ft.training.arguments import ACArguments
from ckpt_ft.training.callback import ACCallback
from ckpt_ft.training.flags import changed
from ckpt_ft.training.models import ModelArguments, load_tokenizer, within_positions
from ckpt_ft.training.run_arguments import RunArguments, parse_args
from ckpt_ft.training.samples.language import make_labelled_reference
from ckpt_ft.training.text_tasks import (
    PairTrainer,
    TextTaskArguments,
    collator_of,
    encode_texts,
    load_labelled_texts,
    load_text_model,
    metrics_of,
    task_of,
)
from ckpt_ft.training.trainer import evaluate, start, train, with_sample, write_model_card
from ckpt_ft.validation import library_reads
from ckpt_ft.workloads.adapters import without_adapters
from ckpt_ft.workloads.model_config import position_limit
from ckpt_ft.workloads.transformers_models import POSITIVES

# The defaults if no model is given.
BUILT_IN = {
    "output_dir": "out/text",
    "max_length": 64,
    "max_steps": 150,
    "per_device_train_batch_size": 32,
    "per_device_eval_batch_size": 64,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 10,
    "test_split_size": 0.1,
    "eval_strategy": "epoch",
    "logging_steps": 10,
}


def parse(argv: Sequence[str] | None) -> tuple[ModelArguments, TextTaskArguments, ACArguments, RunArguments]:
    """Returns the four groups of flags, checked against each other before anything is loaded or written."""
    groups = (ModelArguments, TextTaskArguments, ACArguments, RunArguments)
    return parse_args(groups, argv, builtin=BUILT_IN, unless="model_name_or_path", description=__doc__)


def main(argv: Sequence[str] | None = None) -> None:
    model_args, data_args, ac_args, training_args = parse(argv)
    task = task_of(model_args, data_args)
    pairs = task == "embedding"
    if pairs:  # a Trainer takes the names of labels from the model's forward, which has none
        training_args = changed(training_args, label_names=[POSITIVES], prediction_loss_only=True)
    metrics = ("loss",) if pairs else ("loss", "accuracy")
    directory = start(training_args, ac_args, metrics=metrics)

    # 1. Rows and names of classes
    model_args, data_args = with_sample(model_args, data_args, training_args, make_labelled_reference)
    with training_args.main_process_first(desc="reading rows"):
        train_rows, eval_rows, names = load_labelled_texts(
            data_args, task, evaluate=training_args.do_eval, seed=training_args.seed
        )

    # 2. Tokenizer and model, with a new head for the task
    tokenizer = load_tokenizer(model_args)
    model = load_text_model(model_args, task, names, tokenizer)
    limit = position_limit(without_adapters(model))
    data_args = replace(data_args, max_length=within_positions(model_args, data_args.max_length, limit))

    # 3. Sequences: one process tokenizes, the others read its cache
    with training_args.main_process_first(desc="tokenizing"):
        train_dataset = encode_texts(train_rows, tokenizer, task, data_args)
        eval_dataset = None if eval_rows is None else encode_texts(eval_rows, tokenizer, task, data_args)

    # 4. Training: one callback plans what --ac_policy auto and --find_max_batch_size leave open, applies the policy
    # and reports memory
    with library_reads("no Trainer can be made of these flags"):
        trainer = (PairTrainer if pairs else Trainer)(
            model=model,
            args=training_args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=tokenizer,
            data_collator=collator_of(task, tokenizer),
            **metrics_of(task),
        )
    # These losses are means over a micro-batch. A Trainer that sees a forward with any arguments takes them for sums
    # over an accumulated batch, and its gradients would be as many times too large.
    trainer.model_accepts_loss_kwargs = False
    memory = ACCallback(ac_args).attach(trainer)
    train(trainer, memory, directory)
    evaluate(trainer)
    write_model_card(trainer)


if __name__ == "__main__":
    run(main)
