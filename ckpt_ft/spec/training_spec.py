"""TrainingSpec: the description of a training run as one value.

All user settings are read into it once, from the command line, a YAML file, a recipe or a live Trainer. Estimates,
plans and printed commands are made from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Annotated, Any, Literal, get_args

from annotated_types import Ge, Interval

from ckpt_ft.errors import UserError, did_you_mean
from ckpt_ft.spec.launch import Launch

from .defaults import IMAGE_SIZE, LORA_R, SEQ_LENGTH
from .fields import (
    Declared,
    Part,
    Switch,
    bytes_of_text,
    declared_in,
    names_of_text,
    refuse,
    setting,
    size_of_text,
    text_of_bytes,
)
from .optimizers import OFFLOADING, OPTIMIZERS, OptimizerName, check_offloading
from .settings import keys_of

MOST = 2**24  # tokens, pixels, ...: larger numbers are typos, and would overflow byte counts
MOST_SIDE = 2**13  # pixels: a blank image of that size is created
MOST_SAMPLES = 2**40
Count = Annotated[int, Interval(ge=1, le=MOST)]
CountOrNone = Annotated[int, Interval(ge=0, le=MOST)]  # 0 for none
Dtype = Literal["float32", "bfloat16", "float16"]
DTYPES = ("float32", "bfloat16", "float16")
Task = Literal[
    "", "causal-lm", "masked-lm", "seq2seq", "text-classification", "token-classification",
    "question-answering", "embedding", "reranker", "speech", "audio-classification",
    "image-classification", "image-segmentation", "image-text-to-text", "contrastive",
]  # fmt: skip
TASK_NAMES: tuple[str, ...] = get_args(Task)[1:]
HUB_TASKS = {  # names of the Hub, of auto classes and of PEFT -> ours
    **dict.fromkeys(("text-generation", "clm"), "causal-lm"),
    **dict.fromkeys(("fill-mask", "mlm"), "masked-lm"),
    **dict.fromkeys(("sequence-classification", "seq-cls", "sentiment-analysis"), "text-classification"),
    **dict.fromkeys(
        ("sentiment", "classification", "classifier", "text-classifier", "classify"), "text-classification"
    ),
    **dict.fromkeys(("ner", "token-cls", "named-entity-recognition"), "token-classification"),
    **dict.fromkeys(("qa", "question-ans"), "question-answering"),
    **dict.fromkeys(("sentence-similarity", "feature-extraction", "embeddings", "embedder"), "embedding"),
    **dict.fromkeys(("sentence-transformer", "sentence-transformers"), "embedding"),
    **dict.fromkeys(("text-ranking", "reranking", "cross-encoder", "rerank"), "reranker"),
    **dict.fromkeys(("seq-2-seq-lm", "text2text-generation", "summarization", "translation"), "seq2seq"),
    **dict.fromkeys(("automatic-speech-recognition", "asr", "speech-recognition", "speech-to-text"), "speech"),
    **dict.fromkeys(("semantic-segmentation", "segmentation"), "image-segmentation"),
    **dict.fromkeys(("visual-question-answering", "vqa", "image-to-text"), "image-text-to-text"),
    "zero-shot-image-classification": "contrastive",
}
_SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
LIGER_LOSSES = ("cross_entropy", "fused_linear_cross_entropy")


@dataclass(frozen=True)
class ModelSpec(Part):
    """The model to train, and which of its parts."""

    name: str = setting("", "Hub id, local directory or config file", key="model", flag=None)
    task: Task = setting(
        "",
        "causal-lm, text-classification, embedding, ...; default: as the model's `architectures` say",
        read=lambda text: HUB_TASKS.get(name := text.lower().replace("_", "-"), name),
    )
    num_labels: CountOrNone = setting(
        0, "labels of a classifier; 0 for as many as its configuration has", rule="a number, or 0 for the model's own"
    )
    frozen: tuple[str, ...] = setting(
        (),
        "comma-separated parts that are not trained, e.g. vision_tower,embed_tokens; !REGEX: all but what it finds",
        flag="freeze",
        flag_type=str,
        read=names_of_text,
        write=",".join,
    )
    train_towers: Literal["", "language", "vision", "both"] = setting(
        "", "train only these towers and freeze the others: language, vision or both; default: the whole model"
    )
    rope_scaling: Literal["", "none", "linear", "dynamic", "yarn"] = setting(
        "", "sequences longer than the model's rotary positions: linear, dynamic or yarn scales them, none does not"
    )
    router_aux_loss_coef: Annotated[float, Interval(ge=0, lt=float("inf"))] | None = setting(
        None,
        "weight of the auxiliary router loss of a mixture of experts, which keeps router logits; 0 for none",
        label="router aux loss coef",
        rule="a weight, or 0 for no such loss",
        default_text="as the model's configuration says; with --trainer TRL's",
    )


@dataclass(frozen=True)
class DataSpec(Part):
    """The shapes of a micro-batch, and the number of micro-batches per step."""

    batch_size: Annotated[int, Interval(ge=1, le=MOST_SAMPLES)] = setting(
        1, "samples on the device at once", rule="a batch has at least 1 sample, and no more than memory has bytes"
    )
    seq_length: Annotated[int, Interval(ge=2, le=MOST)] | None = setting(
        None,
        "tokens of a sequence (language models)",
        label="sequence length",
        rule="a sequence has at least 2 tokens",
        default_text="1024, or fewer if the model has fewer positions; 32 in a check",
    )
    default_seq_length: Annotated[int, Interval(ge=2, le=MOST)] = setting(
        SEQ_LENGTH,
        "tokens of a sequence if `seq_length` is None",
        label="sequence length",
        rule="a sequence has at least 2 tokens",
        flag=None,
    )
    eval_batch_size: CountOrNone = setting(
        0, "samples of an evaluation batch, whose loss is computed between steps; 0 for no evaluation",
        rule="a number of samples, or 0 for no evaluation",
    )  # fmt: skip
    eval_samples: CountOrNone = setting(
        0, "samples of an evaluation with compute_metrics, which keeps their logits; 0 for the loss alone",
        rule="a number of samples, or 0 for the loss alone", implies={"eval_batch_size": 8},
    )  # fmt: skip
    eval_accumulation_steps: CountOrNone = setting(
        0, "with --eval-samples: batches after which the logits go to the host; 0 for none before the end",
        rule="a number of batches, or 0 for all of them", needs="eval_batch_size",
    )  # fmt: skip
    accumulation: Count = setting(1, "micro-batches of an optimizer step", rule="a step has at least 1 micro-batch")
    rows: Literal["alike", "padded", "packed"] = setting(
        "alike",
        "rows of a micro-batch of text: all of the same length, padded to it, or two packed into each sequence",
        flag=None,
        switches=(
            Switch("packing", "packed", "pack rows into full sequences; attention stays within each row"),
            Switch("padding", "padded", "rows of different lengths, padded to --seq-length"),
        ),
    )
    resolution: CountOrNone = setting(
        0, "side of an image in pixels; 0 for the model's own", rule="a number of pixels, or 0 for the model's own"
    )
    buckets: str = setting(
        "", "images of several sizes: 'height,width;height,width', or auto", flag="aspect_ratio_buckets"
    )
    encode_each_step: bool = setting(
        False, "encode images and prompts in each step: a pipeline's VAE and text encoders are on the device"
    )
    frames: CountOrNone = setting(0, "frames of a video; 0 for 49", rule="a number of them, or 0 for 49")
    audio_seconds: CountOrNone = setting(
        0, "seconds of sound in a sample; 0 for 10", rule="a number of them, or 0 for 10"
    )
    images: CountOrNone = setting(
        0,
        "images in each row of text (vision-language models)",
        rule="a number of them in each row, or 0 for text alone",
    )
    image_size: tuple[int, int] = setting(
        IMAGE_SIZE,
        "width x height of each image in pixels, e.g. 640x480",
        flag_type=str,
        read=size_of_text,
        write="{0[0]}x{0[1]}".format,
        default_text="1024x1024",
        implies={"images": 1},
    )
    max_pixels: Annotated[int, Ge(0)] = setting(
        0,
        "pixels of an image at most, for processors with such a limit",
        rule="a number, or 0 for the processor's own",
    )
    longest_side: Annotated[int, Ge(0)] = setting(
        0,
        "longest side of an image in pixels, for processors that scale by it",
        rule="a number, or 0 for the processor's own",
    )

    def problems(self) -> dict[str, object]:
        wide, high = self.image_size
        message = f"image size {wide}x{high}: each side has 1 to {MOST_SIDE} pixels"
        return {message: not all(1 <= side <= MOST_SIDE for side in self.image_size)}

    @property
    def tokens(self) -> int:
        """Tokens of a sequence: as requested, or the default."""
        return self.default_seq_length if self.seq_length is None else self.seq_length

    @property
    def length_is_open(self) -> bool:
        """Whether no length was requested, so that it can shrink to the model's number of positions."""
        return self.tokens == SEQ_LENGTH and self.seq_length is None


_NO_BLOCK_SCALES = "NVFP4 and MXFP8 are not predicted: what their layers keep depends on the library; take fp8"


@dataclass(frozen=True)
class PrecisionSpec(Part):
    """The dtype of the weights, and autocast. The command line has other defaults for known models (cli/params.py)."""

    dtype: Dtype = setting(
        "float32",
        "dtype of the weights: float32, bfloat16, float16, or auto for that of the checkpoint",
        read=lambda text: _SHORT_DTYPES.get(text.lower(), text),
        default_text="as the model is published",
    )
    mixed_precision: Literal["no", "bf16", "fp16", "fp8"] = setting(
        "no",
        "autocast: no, bf16, fp16, or fp8: bf16 and torchao's linear layers with 8-bit matrix products",
        switches=(
            Switch("bf16", "bf16", "the same as --mixed-precision bf16"),
            Switch("fp16", "fp16", "the same as --mixed-precision fp16"),
        ),
        rule=_NO_BLOCK_SCALES,
    )
    ends_dtype: Literal["", "float32", "bfloat16", "float16"] = setting(
        "", "dtype of embeddings, norms and head, if it is another: axolotl trains whole models with float32 there"
    )
    float32_trained: bool = setting(False, "trained weights in float32, beside frozen ones, as in LLaMA-Factory")


@dataclass(frozen=True)
class AdapterSpec(Part):
    """Adapters that are trained instead of the weights."""

    lora_r: CountOrNone = setting(
        0,
        "LoRA rank; 0 trains all weights",
        label="LoRA rank",
        rule="it is at least 1 (0 trains all weights)",
        typed="lora",
        also=("lora_r",),
        switches=(Switch("use_peft", LORA_R, f"LoRA, of rank {LORA_R} unless --lora gives another", weak=True),),
    )
    lora_targets: tuple[str, ...] = setting(
        (),
        "comma-separated names of the modules that get an adapter, a regular expression, or none beside "
        "--lora-target-parameters; default: all linear layers, with --trainer those that PEFT chooses",
        flag_type=str,
        read=names_of_text,
        needs="lora_r",
        write=",".join,
    )
    lora_modules_to_save: tuple[str, ...] = setting(
        (),
        "comma-separated names of modules that are fully trained, next to the adapters",
        flag_type=str,
        read=names_of_text,
        needs="lora_r",
        write=",".join,
    )
    lora_target_parameters: tuple[str, ...] = setting(
        (),
        "comma-separated names of parameters that get an adapter, such as experts'",
        flag_type=str,
        read=names_of_text,
        needs="lora_r",
        write=",".join,
    )
    lora_dropout: Annotated[float, Interval(ge=0, lt=1)] | None = setting(
        None,
        "dropout in front of the adapters",
        label="LoRA dropout",
        rule="a share from 0 up to, but not including, 1",
        default_text="0.05 as in the recipes, and 0 in diffusion models",
        needs="lora_r",
    )
    use_dora: bool = setting(False, "DoRA in place of LoRA", flag="dora", needs="lora_r")
    peft: Mapping[str, Any] | None = setting(None, "a configuration of PEFT, as adapter_config.json has it", flag=None)
    peft_config: str = setting("", "an adapter_config.json of any PEFT method, or the directory that contains it")
    train_text_encoder: bool = setting(False, "with LoRA: adapters on a U-Net's text encoders, too", needs="lora_r")

    def problems(self) -> dict[str, object]:
        what = "DoRA" if self.use_dora else f"LoRA dropout {self.lora_dropout}"
        return {
            f"{what} and LoRA target parameters: PEFT adapts parameters by plain LoRA alone; drop one": (
                self.lora_target_parameters and (self.lora_dropout or self.use_dora)
            ),
            "LoRA by rank and a configuration of PEFT are two adapters: give one of them": (
                self.peft is not None and self.lora_r
            ),
        }

    @property
    def trains(self) -> bool:
        """Whether adapters are trained instead of the weights."""
        return bool(self.lora_r) or self.peft is not None

    @property
    def method(self) -> str:
        """The adapters in words: "LoRA of rank 16"; "" for none."""
        stated = self.peft or {"r": self.lora_r, "use_dora": self.use_dora}
        kind = "DoRA" if stated.get("use_dora") else str(stated.get("peft_type", "LORA")).replace("LORA", "LoRA")
        rank = f" of rank {stated['r']}" if stated.get("r") else ""
        return kind + rank if self.trains else ""


@dataclass(frozen=True)
class QuantisationSpec(Part):
    """Frozen weights in 4 or 8 bits, as in bitsandbytes."""

    load_in_4bit: bool = setting(False, f"frozen weights in 4 bits (NF4), under LoRA of rank {LORA_R} by default")
    double_quant: bool = setting(False, "with 4 bits: the scales of the weights in 8 bits", needs="load_in_4bit")
    quant_storage: Literal["uint8", "float32", "bfloat16", "float16"] = setting(
        "uint8",
        "with 4 bits: the dtype in which the weights are stored; FSDP2 shards only floating-point ones",
        needs="load_in_4bit",
    )
    load_in_8bit: bool = setting(False, "the same in 8 bits (LLM.int8)")
    prepare_kbit: bool = setting(
        False,
        "with 4 or 8 bits: embeddings, norms and head in float32, as peft.prepare_model_for_kbit_training leaves them",
    )
    quantize_moe_experts: bool = setting(
        False,
        "with 4 bits: also pack experts in 3-D parameters, as axolotl does; transformers does not",
        needs="load_in_4bit",
    )
    packed: Mapping[str, Any] | None = setting(
        None, "the quantization_config of a checkpoint that another library than bitsandbytes has packed", flag=None
    )

    def problems(self) -> dict[str, object]:
        return {
            "weights in 4 bits and in 8 bits: choose one of them": self.load_in_4bit and self.load_in_8bit,
            "k-bit preparation is of a model that is loaded in 4 bits (or 8): ask for both, or leave it out": (
                self.prepare_kbit and not self.bits
            ),
        }

    @property
    def bits(self) -> int:
        """Bits of a frozen weight: 4 or 8; 0 without quantisation."""
        return 4 if self.load_in_4bit else 8 if self.load_in_8bit else 0


@dataclass(frozen=True)
class OptimizerSpec(Part):
    """The optimizer and its options."""

    name: OptimizerName = setting(
        "adamw_fused",
        "adamw_fused, adamw, adamw_8bit, adafactor, sgd, none, or any name of transformers' `optim`",
        key="optimizer",
        read=lambda text: OPTIMIZERS.get(text.lower(), text),
    )
    max_grad_norm: Annotated[float, Interval(ge=0, lt=float("inf"))] = setting(
        1.0,
        "clip gradients to this norm; 0 for no clipping",
        label="gradients clipped to",
        rule="a norm, or 0 for no clipping",
        write="{:g}".format,
    )
    optim_target_modules: str = setting(
        "", "GaLore and APOLLO: linear layers whose gradients are projected, by names or patterns; default: all"
    )
    optim_rank: Count = setting(128, "GaLore and APOLLO: the rank that gradients are projected to")
    ema: bool = setting(False, "a moving average of the trained weights, in float32 on the device")


@dataclass(frozen=True)
class KernelSpec(Part):
    """The kernels that run the model."""

    attn_implementation: Literal[
        "", "sdpa", "eager", "flex_attention", "flash_attention_2", "flash_attention_3",
        "kernels-community/flash-attn2", "kernels-community/flash-attn3", "kernels-community/vllm-flash-attn3"
    ] = setting(
        "",
        "sdpa, eager, flex_attention, flash_attention_2 (or _3, or the Hub's); default: the model's own choice",
        label="attention implementation",
    )  # fmt: skip
    experts_implementation: Literal["", "grouped_mm", "batched_mm", "eager"] = setting(
        "", "grouped_mm, batched_mm or eager (a loop over the experts); default: transformers' own, grouped_mm"
    )
    compile: Literal["", "whole", "regional"] = setting(
        "",
        "torch.compile: the whole model, or regional for each of its blocks; default: nothing is compiled",
        switches=(Switch("torch_compile", "whole", "the same as --compile whole"),),
    )
    use_liger_kernel: bool = setting(
        False, "Liger's fused kernels for norms, MLPs, rotary positions and the loss", flag="liger"
    )
    liger_kernel_config: str = setting(
        "",
        "with --liger: kernels on or off as JSON, e.g. '{\"rope\": false}'; default: those of the model's family",
        needs="use_liger_kernel",
    )
    cut_cross_entropy: bool = setting(False, "Apple's cut cross entropy for the loss of a language model")

    def problems(self) -> dict[str, object]:
        loss = [name for name in LIGER_LOSSES if self.liger_kernels.get(name)]
        return {
            f"cut cross entropy and Liger's {''.join(loss[:1])}: two losses; turn one of them off": (
                self.cut_cross_entropy and loss
            )
        }

    @property
    def liger_kernels(self) -> dict[str, bool]:
        """The kernels of Liger that are asked for, on or off; the family's defaults hold for others.

        Raises:
            UserError: the configuration is no JSON object of switches.
        """
        found = dict(keys_of(self.liger_kernel_config, "Liger kernel config"))
        if not all(isinstance(value, bool) for value in found.values()):
            raise UserError(f"""Liger kernel config {self.liger_kernel_config}: give JSON, '{{"rope": false}}' say""")
        if self.cut_cross_entropy or "cross_entropy" in found:
            found.setdefault("fused_linear_cross_entropy", False)
        return found


@dataclass(frozen=True)
class TrainerSpec(Part):
    """The trainer of TRL that runs the step."""

    trainer: Literal["", "sft", "dpo", "kto", "reward", "grpo", "rloo"] = setting(
        "", "TRL's trainer of the step: sft, dpo, kto, reward, grpo or rloo; default: transformers' Trainer"
    )
    trainer_args: str = setting("", "with --trainer: fields of its configuration as JSON, e.g. '{\"beta\": 0.1}'")
    float32_logits: bool = setting(False, "with --trainer dpo or kto: LLaMA-Factory's loss of logits in float32")

    def problems(self) -> dict[str, object]:
        idle = self.trainer_args and not self.trainer
        return {
            f"trainer args {self.trainer_args}: of which trainer? give --trainer sft, for example": idle,
            "float32 logits: give --trainer dpo or kto": self.float32_logits and self.trainer not in ("dpo", "kto"),
        }


@dataclass(frozen=True)
class LaunchSpec(Part):
    """The distributed launch of the training processes."""

    launch: Launch | None = setting(None, "several processes; None for one", flag=None)
    launches: tuple[Launch, ...] = setting((), "launches that a plan chooses from", flag=None)
    asked: tuple[str, ...] = setting((), "the flags that asked for it, for the commands that are printed", flag=None)


@dataclass(frozen=True)
class HostSpec(Part):
    """The device, its memory and its allocator.

    `device` is a GPU's name in `memory/gpus.py`, a size, or "cpu"; "" for the GPU at hand.
    """

    device: str = setting(
        "",
        "a GPU by any of its names, 2xh100, 'rtx-4090 48GB', a size (8GB), cpu, or here (`ckpt-ft calibrate`); "
        "default: the GPU at hand, or a100-80gb",
        also=("gpu", "card", "vram"),
    )
    budget: Annotated[int, Interval(ge=0, le=2**62)] | None = setting(
        None,
        "memory that the process may take, e.g. 24GiB; default: all of the device's",
        also=("budget", "capacity"),
        flag_type=str,
        read=bytes_of_text("--budget"),
        write=text_of_bytes,
    )
    host_memory: Annotated[int, Interval(ge=0, le=2**62)] | None = setting(
        None,
        "host memory that the process may take, e.g. 64GiB: swapped weights and offloaded tensors must fit in it",
        flag_type=str,
        read=bytes_of_text("--host-memory"),
        write=text_of_bytes,
    )
    strict: bool = setting(
        False, "refuse settings of a file that are not modelled, instead of naming them in the answer"
    )
    left_out: tuple[str, ...] = setting(
        (), "settings of a file that the answer is without, and what each moves", flag=None
    )
    alloc_conf: str = setting("", "options of the caching allocator, as in PYTORCH_CUDA_ALLOC_CONF")


@dataclass(frozen=True)
class TrainingSpec:
    """The description of a training run.

    Raises:
        UserError: a field is invalid when its part is created, or fields contradict each other.
    """

    policy: str = "none"
    model: ModelSpec = field(default_factory=ModelSpec)
    data: DataSpec = field(default_factory=DataSpec)
    precision: PrecisionSpec = field(default_factory=PrecisionSpec)
    adapter: AdapterSpec = field(default_factory=AdapterSpec)
    quantisation: QuantisationSpec = field(default_factory=QuantisationSpec)
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    kernels: KernelSpec = field(default_factory=KernelSpec)
    trainer: TrainerSpec = field(default_factory=TrainerSpec)
    launch: LaunchSpec = field(default_factory=LaunchSpec)
    host: HostSpec = field(default_factory=HostSpec)

    def __post_init__(self) -> None:
        launches = [launch for launch in (self.launch.launch, *self.launch.launches) if launch is not None]
        kernels, bits, fp8 = self.kernels, self.quantisation.bits, self.precision.mixed_precision == "fp8"
        others = {
            "8-bit weights": self.quantisation.load_in_8bit,
            "processes other than ddp's and fsdp2's": bool(launches) and not any(one.compiles for one in launches),
            "fused kernels of other libraries": kernels.use_liger_kernel or kernels.cut_cross_entropy,
        }
        beside = next((name for name, asked in others.items() if asked), "")
        odd = next((one for one in launches if one.stage or one.tp > 1), None)
        apart = "" if odd is None else odd.strategy if odd.tp == 1 else f"{odd.strategy} with --tp {odd.tp}"
        refuse({
            f"{bits}-bit weights cannot be trained themselves: give a LoRA rank too, 16 for example": (
                bits and not self.adapter.trains
            ),
            f"mixed precision fp8 and {bits}-bit weights: torchao's fp8 takes linear layers that are not packed; "
            "take bf16": bits and fp8,
            f"--compile {kernels.compile} and {beside}: a compiled step is not predicted with them": (
                kernels.compile and beside
            ),
            f"mixed precision fp8 and {apart}: torchao's fp8 is predicted for one process, ddp and fsdp2": (
                fp8 and apart
            ),
            "adafactor does not run under FSDP2: transformers' keeps factors that are no DTensors; take another "
            "optimizer, or --launch ddp or zero1": (
                self.optimizer.name == "adafactor" and any(launch.strategy == "fsdp2" for launch in launches)
            ),
        })  # fmt: skip
        for what in (what for what, name in OFFLOADING.items() if name == self.optimizer.name):
            fp16 = self.precision.mixed_precision == "fp16"
            check_offloading(what, self.optimizer.max_grad_norm or 0.0, fp16, self.data.accumulation, bool(launches))

    @classmethod
    def of(cls, model: str = "", **given: Any) -> TrainingSpec:
        """A spec with the given fields and defaults for all others: `TrainingSpec.of("gpt2", lora_r=16)`.

        Raises:
            UserError: an unknown field, or an invalid value.
        """
        return cls().edit(model=model, **given)

    def edit(self, **changes: Any) -> TrainingSpec:
        """Returns this spec with some fields changed: `spec.edit(optimizer="adamw_8bit", lora_r=16)`.

        Raises:
            UserError: an unknown field, an invalid value, or incompatible fields.
        """
        known = declared()
        policy = str(changes.pop("policy", self.policy))
        changed: dict[str, dict[str, Any]] = {}
        for key, value in changes.items():
            if key not in known:
                raise UserError(f"no setting '{key}'{did_you_mean(key, known)} ({', '.join(known)})")
            changed.setdefault(known[key].part, {})[known[key].name] = value
        parts: dict[str, Any] = {part: replace(getattr(self, part), **values) for part, values in changed.items()}
        return replace(self, policy=policy, **parts)

    def get(self, key: str) -> Any:
        """The value of a field by its name."""
        if key == "policy":
            return self.policy
        return getattr(getattr(self, declared()[key].part), declared()[key].name)

    @property
    def title(self) -> str:
        """The model's name for the head of an answer, with its task and its method."""
        task = self.trainer.trainer or self.model.task.removeprefix("causal-lm")
        bits = f"{self.quantisation.bits} bits" if self.quantisation.bits else ""
        name = f"{self.model.name} as {task}" if task else self.model.name
        return ", ".join(filter(None, (name, self.adapter.method, bits)))


PARTS: dict[str, Any] = {own.name: own.default_factory for own in fields(TrainingSpec) if own.name != "policy"}


@lru_cache(maxsize=1)
def declared() -> dict[str, Declared]:
    """Every field of a spec by its name, except `policy`."""
    return {own.key: own for attribute, part in PARTS.items() for own in declared_in(part, attribute)}
