"""Train a language model on a rule-based reward (GRPO) with TRL: all weights, LoRA or QLoRA, under a policy.

    accelerate launch -q recipes/grpo.py
        the built-in model learns to add two digits from right and wrong answers, offline, in a minute on a CPU

    accelerate launch -q recipes/grpo.py --model_name_or_path MODEL --dataset_name my.jsonl --use_peft --ac_policy full
        LoRA on rows of 'prompt' (a text or a conversation) and 'answer', the number that a completion should end with

Flags: ModelArguments, SplitArguments, ACArguments, and GRPOArguments, which has every flag of trl.GRPOConfig (and so
of transformers.TrainingArguments) and --overwrite_output_dir. The memory report has a row for the generation of
completions, which the policy does not change.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import AutoModelForCausalLM
from trl import GRPOTrainer

from ckpt_ft.errors import run
from ckpt_ft.training.arguments import ACArguments
from ckpt_ft.training.callback import ACCallback
from ckpt_ft.training.flags import SplitArguments
from ckpt_ft.training.models import ModelArguments, adapter_config, load_pretrained, load_tokenizer
from ckpt_ft.training.preferences import GRPOArguments, check_problems, right_number
from ckpt_ft.training.run_arguments import parse_args
from ckpt_ft.training.samples.language import make_sums
from ckpt_ft.training.text import load_rows
from ckpt_ft.training.trainer import evaluate, start, train, with_sample, write_model_card
from ckpt_ft.validation import library_reads

# The defaults if no model is given.
BUILT_IN = {
    "output_dir": "out/grpo",
    "max_steps": 150,
    "per_device_train_batch_size": 128,
    "num_generations": 16,
    "max_completion_length": 1,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "cosine",
    "logging_steps": 10,
    "bf16": False,
}


def parse(argv: Sequence[str] | None) -> tuple[ModelArguments, SplitArguments, ACArguments, GRPOArguments]:
    """Returns the four groups of flags, checked against each other before anything is loaded or written."""
    groups = (ModelArguments, SplitArguments, ACArguments, GRPOArguments)
    return parse_args(groups, argv, builtin=BUILT_IN, unless="model_name_or_path", description=__doc__)


def main(argv: Sequence[str] | None = None) -> None:
    model_args, data_args, ac_args, training_args = parse(argv)
    directory = start(training_args, ac_args)

    # 1. Model, tokenizer and problems with their answers
    model_args, data_args = with_sample(model_args, data_args, training_args, make_sums)
    tokenizer = load_tokenizer(model_args)
    with training_args.main_process_first(desc="loading the problems"):
        train_rows, eval_rows = load_rows(data_args, evaluate=training_args.do_eval, seed=training_args.seed)
    check_problems(train_rows, str(data_args.dataset_name))
    model = load_pretrained(model_args, AutoModelForCausalLM)

    # 2. TRL's trainer generates completions, and the reward is 1 for those that end with the right number
    with library_reads("TRL cannot train with these flags and problems"):
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=right_number,
            args=training_args,
            train_dataset=train_rows,
            eval_dataset=eval_rows,
            processing_class=tokenizer,
            peft_config=adapter_config(model_args, task_type="CAUSAL_LM") if model_args.adapts else None,
        )

    # 3. Training: apply the policy, and report the memory of the steps and of the generation between them
    memory = ACCallback(ac_args).attach(trainer)
    train(trainer, memory, directory)
    evaluate(trainer)
    write_model_card(trainer)


if __name__ == "__main__":
    run(main)
