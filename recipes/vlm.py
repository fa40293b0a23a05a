"""Fine-tune a vision-language model: all weights or LoRA, in one tower or both, under one policy or one per tower.

    accelerate launch -q recipes/vlm.py
        the built-in model on drawn shapes, offline, in about two minutes on a CPU

    accelerate launch -q recipes/vlm.py --config recipes/vlm/qwen2.5_vl_7b_lora_24gb.yaml --dataset_name data.jsonl
        a published model; flags on the command line override the file

    accelerate launch -q recipes/vlm.py --model_name_or_path MODEL --dataset_name data.jsonl --use_peft \\
        --train_towers both --ac_policy full@language,pointwise@vision
        LoRA in both towers, on rows of 'messages' and 'images', with a separate policy for each tower

Flags: VisionLanguageModelArguments, VisionLanguageArguments, ACArguments, and RunArguments, which has every flag of
transformers.TrainingArguments and --overwrite_output_dir.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import Trainer

from ckpt_ft.errors import run
from ckpt_ft.training.arguments import ACArguments
from ckpt_ft.training.callback import ACCallback
from ckpt_ft.training.conversations import ImageLoader, VisionLanguageArguments, load_conversations
from ckpt_ft.training.run_arguments import RunArguments, parse_args
from ckpt_ft.training.samples.language import make_questions
from ckpt_ft.training.trainer import evaluate, start, train, with_sample, write_model_card
from ckpt_ft.training.vision_language import (
    VisionLanguageModelArguments,
    check_all_have_images,
    collator_of,
    encode_conversations,
    load_model,
    load_processor,
)
from ckpt_ft.validation import library_reads

# The defaults if no model is given.
BUILT_IN = {
    "output_dir": "out/vlm",
    "train_towers": "both",
    "test_split_size": 0.05,
    "max_steps": 400,
    "per_device_train_batch_size": 16,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 20,
    "eval_strategy": "steps",
    "eval_steps": 200,
    "logging_steps": 50,
}


def parse(
    argv: Sequence[str] | None,
) -> tuple[VisionLanguageModelArguments, VisionLanguageArguments, ACArguments, RunArguments]:
    """Returns the four groups of flags, checked against each other before anything is loaded or written."""
    groups = (VisionLanguageModelArguments, VisionLanguageArguments, ACArguments, RunArguments)
    model_args, data_args, ac_args, training_args = parse_args(
        groups, argv, builtin=BUILT_IN, unless="model_name_or_path", description=__doc__
    )
    training_args.remove_unused_columns = False  # a row's transform loads its images from other columns
    return model_args, data_args, ac_args, training_args


def main(argv: Sequence[str] | None = None) -> None:
    model_args, data_args, ac_args, training_args = parse(argv)
    directory = start(training_args, ac_args)

    # 1. Model and processor
    model_args, data_args = with_sample(model_args, data_args, training_args, make_questions)
    processor = load_processor(model_args, data_args)
    model = load_model(model_args, data_args.max_length)
    collator = collator_of(model, processor.tokenizer.pad_token_id)

    # 2. Data: one process reads all images and tokenizes, the others read its cache
    with training_args.main_process_first(desc="reading the images"):
        train_rows, eval_rows, folder = load_conversations(
            data_args, evaluate=training_args.do_eval, seed=training_args.seed
        )
        images = ImageLoader(folder)
        train_dataset = encode_conversations(train_rows, processor, images, data_args)
        check_all_have_images(train_dataset, model_args.train_towers)
        eval_dataset = None if eval_rows is None else encode_conversations(eval_rows, processor, images, data_args)

    # 3. Training: one callback plans what --ac_policy auto and --find_max_batch_size leave open, applies the policy
    # and reports memory
    with library_reads("no Trainer can be made of these flags"):
        trainer = Trainer(
            model=model,
            args=training_args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processor,
            data_collator=collator,
        )
    memory = ACCallback(ac_args).attach(trainer)
    train(trainer, memory, directory)
    evaluate(trainer)
    write_model_card(trainer)


if __name__ == "__main__":
    run(main)
