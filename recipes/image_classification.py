"""Fine-tune an image classifier (ViT, ResNet, ConvNeXt, Swin ...), all weights or LoRA, under a checkpointing policy.

    accelerate launch -q recipes/image_classification.py
        a small ResNet on drawn shapes, offline, in about a minute on a CPU

    accelerate launch -q recipes/image_classification.py --config recipes/vision/resnet50.yaml --dataset_name FOLDER
        a published model on FOLDER/class/*.jpg; flags on the command line override the file

    accelerate launch -q recipes/image_classification.py --model_name_or_path MODEL --dataset_name HUB_ID --use_peft
        LoRA; the head, and BatchNorm if the model has any, are trained and saved along with the adapters

Flags: ModelArguments, VisionArguments, ACArguments, and RunArguments, which has every flag of
transformers.TrainingArguments and --overwrite_output_dir.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from transformers import Trainer

from ckpt_ft.errors import run
from ckpt_ft.training.arguments import ACArguments
from ckpt_ft.training.callback import ACCallback
from ckpt_ft.training.classification import (
    ImageRows,
    VisionArguments,
    check_batch_norm,
    collate,
    load_classifier,
    load_images,
    load_processor,
    new_crops_each_epoch,
    own_resolution,
    position_arguments,
)
from ckpt_ft.training.labels import accuracy, most_likely_class
from ckpt_ft.training.models import ModelArguments
from ckpt_ft.training.run_arguments import RunArguments, parse_args
from ckpt_ft.training.trainer import evaluate, start, train, write_model_card
from ckpt_ft.validation import library_reads

# The defaults if no model is given.
BUILT_IN = {
    "output_dir": "out/image_classification",
    "num_train_epochs": 8,
    "per_device_train_batch_size": 32,
    "per_device_eval_batch_size": 64,
    "learning_rate": 3e-3,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 20,
    "min_crop": 0.7,
    "eval_strategy": "epoch",
    "logging_steps": 20,
}


def parse(argv: Sequence[str] | None) -> tuple[ModelArguments, VisionArguments, ACArguments, RunArguments]:
    """Returns the four groups of flags, checked against each other before anything is loaded or written."""
    groups = (ModelArguments, VisionArguments, ACArguments, RunArguments)
    return parse_args(groups, argv, builtin=BUILT_IN, unless="model_name_or_path", description=__doc__)


def main(argv: Sequence[str] | None = None) -> None:
    model_args, data_args, ac_args, training_args = parse(argv)
    directory = start(training_args, ac_args, metrics=("loss", "accuracy"))

    # 1. Data: rows and class names
    with training_args.main_process_first(desc="reading images"):
        train_rows, eval_rows, names = load_images(data_args, evaluate=training_args.do_eval, seed=training_args.seed)

    # 2. Model: one output per class
    processor = load_processor(model_args)
    model = load_classifier(model_args, names)

    # 3. Image transforms: random crops in training, the processor's own resizing in evaluation
    train_dataset = ImageRows(
        train_rows,
        processor,
        data_args.resolution or own_resolution(processor),
        min_crop=data_args.min_crop if data_args.augment else None,
        seed=training_args.seed,
    )
    eval_dataset = None if eval_rows is None else ImageRows(eval_rows, processor, data_args.resolution)

    collator = partial(collate, **position_arguments(model, data_args.resolution))

    # 4. Training: one callback plans what --ac_policy auto and --find_max_batch_size leave open, applies the policy
    # and reports memory
    with library_reads("no Trainer can be made of these flags"):
        trainer = Trainer(
            model=model,
            args=training_args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processor,
            data_collator=collator,
            compute_metrics=accuracy,
            preprocess_logits_for_metrics=most_likely_class,
            callbacks=[new_crops_each_epoch(train_dataset)],
        )
    # This loss is a mean over a micro-batch. A Trainer that sees a forward with any arguments (ResNet) takes it for a
    # sum over an accumulated batch, and its gradients would be as many times too large.
    trainer.model_accepts_loss_kwargs = False
    memory = ACCallback(ac_args).attach(trainer)
    trainer.args = check_batch_norm(model, trainer.args, len(train_rows))  # for the chosen batch size
    train(trainer, memory, directory)
    evaluate(trainer)
    write_model_card(trainer)


if __name__ == "__main__":
    run(main)
