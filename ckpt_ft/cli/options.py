"""The options that several commands of `ckpt-ft` share, and what they mean."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ckpt_ft.errors import UserError
from ckpt_ft.policy import Policy
from ckpt_ft.spec.defaults import DEFAULT_GPU, LORA_R
from ckpt_ft.units import is_bare, parse_budget

Model = Annotated[str, typer.Argument(help="Hub id, local directory or config file")]
PolicyOption = Annotated[str, typer.Option("--policy", help="e.g. full, every:2, save:attention+matmul, pointwise")]
BatchSize = Annotated[int, typer.Option("--batch-size", help="samples on the device at once")]
Accumulation = Annotated[int, typer.Option("--accumulation", help="micro-batches of an optimizer step")]
MaxGradNorm = Annotated[float, typer.Option("--max-grad-norm", help="gradients are clipped to it; 0 for no clipping")]
SeqLength = Annotated[
    int | None, typer.Option("--seq-length", help="tokens of a sequence (language models); 1024, in a check 32")
]
Resolution = Annotated[int, typer.Option("--resolution", help="pixels of an image's side; 0 for the model's own")]
Buckets = Annotated[
    str, typer.Option("--aspect-ratio-buckets", help="images of several sizes: 'height,width;height,width', or auto")
]
TrainTextEncoder = Annotated[
    bool, typer.Option("--train-text-encoder", help="with LoRA: on a U-Net's text encoders too")
]
EncodeEachStep = Annotated[
    bool,
    typer.Option("--encode-each-step", help="nothing is cached: a pipeline's VAE and text encoders are on the device"),
]
Frames = Annotated[int, typer.Option("--frames", help="of a video; 0 for 49")]
AudioSeconds = Annotated[int, typer.Option("--audio-seconds", help="of a sample of sound; 0 for 10")]
Images = Annotated[int, typer.Option("--images", help="in each row of text, for models that see")]
ImageSize = Annotated[
    str, typer.Option("--image-size", help="of each, width x height in pixels, e.g. 640x480; 1024x1024")
]
MaxPixels = Annotated[int, typer.Option("--max-pixels", help="of an image, for processors with such a budget")]
LongestSide = Annotated[int, typer.Option("--longest-side", help="of an image in pixels, for those that go by it")]
TrainTowers = Annotated[
    str, typer.Option("--train-towers", help="language, vision or both: the others are frozen; else the whole model")
]
Device = Annotated[
    str, typer.Option("--device", help=f"a GPU by name, or cpu; by default the one at hand, or {DEFAULT_GPU}")
]
GpuMemory = Annotated[str, typer.Option("--gpu-memory", help="of a card that is in no table, with --gpu-like")]
GpuLike = Annotated[str, typer.Option("--gpu-like", help="the card that it is as fast as")]
Dtype = Annotated[str, typer.Option("--dtype", help="of the weights: float32, bfloat16 or float16")]
MixedPrecision = Annotated[str, typer.Option("--mixed-precision", help="autocast: no, bf16 or fp16")]
Bf16 = Annotated[bool, typer.Option("--bf16", help="the same as --mixed-precision bf16")]
Fp16 = Annotated[bool, typer.Option("--fp16", help="the same as --mixed-precision fp16")]
Optimizer = Annotated[
    str, typer.Option("--optimizer", help="adamw_fused, adamw, adamw_8bit, adafactor, prodigy, sgd or none")
]
UsePeft = Annotated[bool, typer.Option("--use-peft", help=f"LoRA, of rank {LORA_R} where --lora says no other")]
Lora = Annotated[int, typer.Option("--lora", "--lora-r", help="LoRA rank; 0 trains all weights")]
LoraTargets = Annotated[
    str, typer.Option("--lora-targets", help="comma-separated module names; by default all linear layers")
]
Attention = Annotated[
    str,
    typer.Option(
        "--attn-implementation", help="sdpa, eager, flash_attention_2 or flex_attention; by default the model's own"
    ),
]
FourBit = Annotated[bool, typer.Option("--load-in-4bit", help="frozen weights in 4 bits (NF4)")]
DoubleQuant = Annotated[bool, typer.Option("--double-quant", help="with 4 bits: their scales in 8 bits")]
QuantStorage = Annotated[
    str, typer.Option("--quant-storage", help="with 4 bits: the dtype they are held as; FSDP2 shards none but floats")
]
EightBit = Annotated[bool, typer.Option("--load-in-8bit", help="frozen weights in 8 bits (LLM.int8)")]
Dora = Annotated[bool, typer.Option("--dora", help="DoRA in place of LoRA")]
PeftConfig = Annotated[
    str, typer.Option("--peft-config", help="an adapter_config.json of any kind of PEFT, or the directory that has it")
]
Freeze = Annotated[
    str, typer.Option("--freeze", help="comma-separated parts that are not trained, e.g. vision_tower,embed_tokens")
]
Packing = Annotated[bool, typer.Option("--packing", help="rows packed into full sequences, attention within each row")]
Padding = Annotated[bool, typer.Option("--padding", help="rows of unlike length, padded to --seq-length")]
Ema = Annotated[bool, typer.Option("--ema", help="a moving average of what is trained, on the device")]
LaunchOption = Annotated[
    str,
    typer.Option(
        "--launch", help="several GPUs: ddp, fsdp2, zero1, zero2, zero3, or an accelerate configuration file"
    ),
]
Gpus = Annotated[
    int | None,
    typer.Option("--gpus", help="that there are: which launch is best (of --launch ddp,fsdp2, or others named)"),
]
Processes = Annotated[int, typer.Option("--processes", help="GPUs in all; by default the file's")]
Machines = Annotated[
    int, typer.Option("--machines", help="that they are on; by default the file's, or with 8 GPUs on each")
]
Link = Annotated[
    str, typer.Option("--link", help="bytes that a GPU sends in a second of a large collective, e.g. 25GB")
]
AllocConf = Annotated[str, typer.Option("--alloc-conf", help="as in PYTORCH_CUDA_ALLOC_CONF")]
ONE_LAUNCH = {"gpus": None}
ONE_PROCESS = {"launch": "", "processes": 0, "machines": 0, "link": "", "alloc_conf": "", **ONE_LAUNCH}
PrepareKbit = Annotated[
    bool,
    typer.Option(
        "--prepare-kbit", help="with 4 bits: peft's k-bit preparation, embeddings, norms and head in float32"
    ),
]
LoraDropout = Annotated[
    float | None,
    typer.Option("--lora-dropout", help="by default what the recipes take: 0.05, and 0 in diffusion models"),
]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON instead of a table")]


def parse_policy(text: str) -> Policy:
    """The policy of `--policy`.

    Raises:
        UserError: it is none, or one of torch.compile, which no command runs.
    """
    policy = Policy.parse(text)
    if policy.budget is not None:
        raise UserError(f"--policy {text}: budget: acts under torch.compile alone, in a recipe with --torch_compile")
    return policy


def memory(option: str, text: str) -> int | None:
    """Bytes of a card's memory, given as `option`; None where `text` is empty. A bare number is GiB, which is said."""
    if not text:
        return None
    if is_bare(text):
        print(f"note: {option} {text} is taken as {text} GiB", file=sys.stderr)
    return parse_budget(text)
