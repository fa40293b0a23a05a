"""Fine-tune a causal language model: all weights, LoRA or QLoRA, under an activation-checkpointing policy.

    accelerate launch -q recipes/llm.py
        the built-in model on the built-in sample, offline, in about a minute on a CPU

    accelerate launch -q recipes/llm.py --config recipes/llm/qwen2.5_0.5b_full.yaml --ac_policy save:attention+matmul
        a published model; flags on the command line override the file

    accelerate launch -q recipes/llm.py --model_name_or_path MODEL --dataset_name my.jsonl --use_peft --ac_policy full
        LoRA on rows of 'messages', of 'prompt' and 'completion', or of 'text'

Flags: LanguageModelArguments, DataArguments, TextACArguments, and RunArguments, which has every flag of
transformers.TrainingArguments and --overwrite_output_dir.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from transformers import Trainer

from ckpt_ft.errors import run
from ckpt_ft.training.arguments import TextACArguments
from ckpt_ft.training.callback import ACCallback
from ckpt_ft.training.fit import fit_length, parallelism_of
from ckpt_ft.training.models import LanguageModelArguments, load_model, load_tokenizer, within_positions
from ckpt_ft.training.run_arguments import RunArguments, parse_args
from ckpt_ft.training.samples.language import make_reference
from ckpt_ft.training.text import DataArguments, collator_of, encode_rows, load_rows
from ckpt_ft.training.trainer import evaluate, start, train, with_sample, write_model_card
from ckpt_ft.validation import library_reads
from ckpt_ft.workloads.from_trainer import precision_of

# The defaults if no model is given.
BUILT_IN = {
    "output_dir": "out/llm",
    "max_length": 128,
    "packing": True,
    "max_steps": 100,
    "per_device_train_batch_size": 8,
    "learning_rate": 3e-3,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 5,
    "logging_steps": 10,
}


def parse(argv: Sequence[str] | None) -> tuple[LanguageModelArguments, DataArguments, TextACArguments, RunArguments]:
    """Returns the four groups of flags, checked against each other before anything is loaded or written."""
    groups = (LanguageModelArguments, DataArguments, TextACArguments, RunArguments)
    return parse_args(groups, argv, builtin=BUILT_IN, unless="model_name_or_path", description=__doc__)


def main(argv: Sequence[str] | None = None) -> None:
    model_args, data_args, ac_args, training_args = parse(argv)
    directory = start(training_args, ac_args, packing=data_args.packing)

    # 1. Model and tokenizer
    model_args, data_args = with_sample(model_args, data_args, training_args, make_reference)
    tokenizer = load_tokenizer(model_args)
    data_args = replace(data_args, max_length=within_positions(model_args, data_args.max_length))

    # 2. Data: one process tokenizes, the others read its cache
    with training_args.main_process_first(desc="tokenizing"):
        train_rows, eval_rows = load_rows(data_args, evaluate=training_args.do_eval, seed=training_args.seed)
        train_dataset = encode_rows(train_rows, tokenizer, data_args)
        eval_dataset = None if eval_rows is None else encode_rows(eval_rows, tokenizer, data_args)

    model = load_model(model_args, data_args.max_length, precision_of(training_args))

    # 3. Training: --find_max_length finds the length of the sequences; one callback plans what --ac_policy auto and
    # --find_max_batch_size leave open, applies the policy and reports memory
    collate = partial(collator_of, model, tokenizer, data_args.packing, parallelism_of(training_args))
    with library_reads("no Trainer can be made of these flags"):
        trainer = Trainer(
            model=model,
            args=training_args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=tokenizer,
            data_collator=collate(1 if ac_args.find_max_length else data_args.max_length),
        )
    if ac_args.find_max_length:
        ac_args, length = fit_length(trainer, ac_args, data_args.max_length)
        data_args = replace(data_args, max_length=length)
        trainer.data_collator = collate(length)
        with training_args.main_process_first(desc="tokenizing"):
            trainer.train_dataset = encode_rows(train_rows, tokenizer, data_args)
            trainer.eval_dataset = None if eval_rows is None else encode_rows(eval_rows, tokenizer, data_args)
    memory = ACCallback(ac_args).attach(trainer)
    train(trainer, memory, directory)
    evaluate(trainer)
    write_model_card(trainer)


if __name__ == "__main__":
    run(main)
