"""Train a language model on preferences (DPO) with TRL: all weights, LoRA or QLoRA, under a checkpointing policy.

    accelerate launch -q recipes/dpo.py
        the built-in model on built-in preferences, offline, in about two minutes on a CPU

    accelerate launch -q recipes/dpo.py --model_name_or_path MODEL --dataset_name my.jsonl --use_peft --ac_policy full
        LoRA on rows of 'prompt', 'chosen' and 'rejected', texts or conversations

    accelerate launch -q recipes/dpo.py --config recipes/dpo/qwen2.5_1.5b_lora.yaml --ac_policy auto --ac_budget 16GiB
        LoRA under a policy that is planned for a budget, which includes the memory of the reference model

Flags: ModelArguments, SplitArguments, ACArguments, and DPOArguments, which has every flag of trl.DPOConfig (and so of
transformers.TrainingArguments) and --overwrite_output_dir.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import AutoModelForCausalLM
from trl import DPOTrainer

from ckpt_ft.errors import run
from ckpt_ft.training.arguments import ACArguments
from ckpt_ft.training.callback import ACCallback
from ckpt_ft.training.flags import SplitArguments, changed
from ckpt_ft.training.models import ModelArguments, adapter_config, load_pretrained, load_tokenizer, within_positions
from ckpt_ft.training.preferences import DPOArguments, check_preferences
from ckpt_ft.training.run_arguments import parse_args
from ckpt_ft.training.samples.language import make_preferences
from ckpt_ft.training.text import load_rows
from ckpt_ft.training.trainer import evaluate, start, train, with_sample, write_model_card
from ckpt_ft.validation import library_reads

# The defaults if no model is given.
BUILT_IN = {
    "output_dir": "out/dpo",
    "max_length": 128,
    "max_steps": 60,
    "per_device_train_batch_size": 8,
    "learning_rate": 3e-4,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 5,
    "logging_steps": 10,
    "bf16": False,
}


def parse(argv: Sequence[str] | None) -> tuple[ModelArguments, SplitArguments, ACArguments, DPOArguments]:
    """Returns the four groups of flags, checked against each other before anything is loaded or written."""
    groups = (ModelArguments, SplitArguments, ACArguments, DPOArguments)
    return parse_args(groups, argv, builtin=BUILT_IN, unless="model_name_or_path", description=__doc__)


def main(argv: Sequence[str] | None = None) -> None:
    model_args, data_args, ac_args, training_args = parse(argv)
    directory = start(training_args, ac_args)

    # 1. Model, tokenizer and preferences
    model_args, data_args = with_sample(model_args, data_args, training_args, make_preferences)
    tokenizer = load_tokenizer(model_args)
    if training_args.max_length is not None:
        training_args = changed(training_args, max_length=within_positions(model_args, training_args.max_length))
    with training_args.main_process_first(desc="loading the preferences"):
        train_rows, eval_rows = load_rows(data_args, evaluate=training_args.do_eval, seed=training_args.seed)
    check_preferences(train_rows, str(data_args.dataset_name))
    model = load_pretrained(model_args, AutoModelForCausalLM, training_args.max_length or 0)

    # 2. TRL's trainer tokenizes, and creates the reference: a copy of the model, or the model without its adapters
    with library_reads("TRL cannot train with these flags and preferences"):
        trainer = DPOTrainer(
            model=model,
            args=training_args,
            train_dataset=train_rows,
            eval_dataset=eval_rows,
            processing_class=tokenizer,
            peft_config=adapter_config(model_args, task_type="CAUSAL_LM") if model_args.adapts else None,
        )

    # 3. Training: apply the policy, plan what --ac_policy auto and --find_max_batch_size leave open, report memory
    memory = ACCallback(ac_args).attach(trainer)
    train(trainer, memory, directory)
    evaluate(trainer)
    write_model_card(trainer)


if __name__ == "__main__":
    run(main)
