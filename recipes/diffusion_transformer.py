"""Fine-tune the transformer of a FLUX, Stable Diffusion 3, Qwen-Image or Sana pipeline: all weights, LoRA or QLoRA.

    accelerate launch -q recipes/diffusion_transformer.py
        a tiny FLUX on drawn shapes, offline, on a CPU; it writes sampled images to
        out/diffusion_transformer/samples.png

    accelerate launch -q recipes/diffusion_transformer.py --config recipes/diffusion_transformer/flux_lora_24gb.yaml
        a published one; --train_data_dir DIR trains it on a folder of images with captions; flags on the command line
        override the file

Flags: TransformerArguments, ImageArguments, LoopArguments (named as in diffusers' scripts) and ACArguments.
"""

from __future__ import annotations

from collections.abc import Sequence

from accelerate.utils.memory import clear_device_cache

from ckpt_ft import errors
from ckpt_ft.training.arguments import ACArguments
from ckpt_ft.training.diffusion.arguments import LoopArguments, TransformerArguments
from ckpt_ft.training.diffusion.denoiser import prepare
from ckpt_ft.training.diffusion.encoders import load_denoiser
from ckpt_ft.training.diffusion.loop import Run
from ckpt_ft.training.diffusion.workload import diffusion_workload, load_data
from ckpt_ft.training.images import ImageArguments
from ckpt_ft.training.run_arguments import parse_args
from ckpt_ft.training.samples.drawings import LEARNED_PROMPTS
from ckpt_ft.training.samples.pipelines import tiny_transformer_dir

# The defaults if no pipeline is given.
BUILT_IN = {
    "output_dir": "out/diffusion_transformer",
    "resolution": 32,
    "max_sequence_length": 12,
    "weighting_scheme": "logit_normal",
    "train_batch_size": 16,
    "max_train_steps": 1800,
    "learning_rate": 1.5e-3,
    "lr_scheduler": "cosine",
    "lr_warmup_steps": 50,
    "proportion_empty_prompts": 0.1,
    "use_ema": True,
    "validation_steps": 600,
    "validation_inference_steps": 20,
    "validation_guidance_scale": 3.0,
    "validation_prompt": LEARNED_PROMPTS,
}


def main(argv: Sequence[str] | None = None) -> None:
    groups = (TransformerArguments, ImageArguments, LoopArguments, ACArguments)
    run = Run(*parse_args(
        groups, argv, builtin=BUILT_IN, unless="pretrained_model_name_or_path", description=__doc__,
    ))  # fmt: skip
    accelerator = run.start(tiny_transformer_dir)

    # 1. Encode images and captions once; then the VAE and the text encoders leave the device.
    data = load_data(run.model_args, run.image_args, run.args, accelerator)
    clear_device_cache(garbage_collection=True)

    # 2. Load the transformer and apply the policy, after resolving --ac_policy auto and --find_max_batch_size
    transformer = prepare(load_denoiser(run.model_args, data.family, data.dtype), run.model_args, data.dtype)
    run.fit(diffusion_workload(transformer, run.args, accelerator, data))

    # 3. Make the optimizer, resume, run the loop; save adapters or a pipeline, samples, and the memory report
    run.train(data)


if __name__ == "__main__":
    errors.run(main)
