"""Settings: how a model that is loaded by name is trained, as the options of `ckpt-ft` say it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ckpt_ft.errors import UserError, meant
from ckpt_ft.memory.allocator.settings import AllocatorSettings
from ckpt_ft.spec.launch import Launch

from .defaults import SEQ_LENGTH, TRAINED_TOWERS

DTYPES = ("float32", "bfloat16", "float16")
MIXED_PRECISION = ("no", "bf16", "fp16")
IMAGE_SIZE = (1024, 1024)
_MOST = 2**24  # tokens, pixels, ...: larger ones are slips of the hand, and overflow what counts bytes
_MOST_SIDE = 2**13  # pixels: a blank image of that size is really made
OPTIMIZERS = ("adamw", "adamw_fused", "adamw_8bit", "adafactor", "prodigy", "sgd", "none")
ATTENTION = ("", "sdpa", "eager", "flash_attention_2", "flex_attention")
ROWS = ("alike", "padded", "packed")
TOWERS = ("", *TRAINED_TOWERS)


@dataclass(frozen=True)
class Settings:
    """How the model is trained.

    Attributes:
        dtype: of the weights: float32, bfloat16 or float16.
        mixed_precision: autocast: no, bf16 or fp16.
        optimizer: one of `OPTIMIZERS`.
        lora_r: LoRA rank; 0 trains all weights.
        use_dora: DoRA in place of LoRA.
        peft: a configuration of PEFT, as `adapter_config.json` holds it, in place of LoRA's own settings.
        frozen: parts that are not trained: of parameters that have one of these in their name.
        rows: of a micro-batch of text: "alike" (all of `seq_length` tokens), "padded" (one is, the others have padding
            and so there is a mask) or "packed" (two in each sequence, told apart by their positions).
        lora_targets: module names that get an adapter; () for every linear layer of the blocks.
        seq_length: tokens of a sequence (language models), those that stand for images among them.
        resolution: pixels of an image's side; 0 for the model's own.
        buckets: aspect-ratio buckets, "height,width;height,width" or "auto"; "" where all images are square.
        train_text_encoder: LoRA on a U-Net's text encoders too; prompts are then encoded in each step.
        encode_each_step: images and prompts are encoded in each step, so that VAE and text encoders are on the device.
        frames: of a video; 0 for 49 of them.
        audio_seconds: of sound in a sample; 0 for 10.
        images: in every row of text, for models that see; 0 for text alone.
        image_size: (width, height) of each in pixels, before the model's own processor.
        max_pixels, longest_side: the processor's budget for an image; 0 for its own.
        train_towers: language, vision or both are trained, the others frozen; "" for the whole model.
        accumulation: micro-batches of a step.
        max_grad_norm: gradients are clipped to it; 0 for no clipping.
        attn_implementation: sdpa, eager, flash_attention_2 or flex_attention; "" for what the model prefers.
        load_in_4bit: frozen weights in 4 bits, as bitsandbytes keeps them (NF4).
        double_quant: their scales in 8 bits.
        quant_storage: the dtype that they are held as; FSDP2 shards none but floating ones.
        load_in_8bit: frozen weights in 8 bits, as bitsandbytes keeps them (LLM.int8).
        ema: a moving average of what is trained, in float32 on the device, as diffusers' EMAModel keeps it.
        launch: on how many processes; None for one.
        launches: to choose from, in a plan.
        alloc_conf: options of the caching allocator, as in PYTORCH_CUDA_ALLOC_CONF.
        prepare_kbit: embeddings, norms and head of a 4-bit model in float32, as peft.prepare_model_for_kbit_training
            leaves them; else as they are loaded.
        lora_dropout: in front of the adapters; None for the recipes' own: `LORA_DROPOUT`, none in diffusion models.
        given: fields that were asked for by name; a model without sequences is refused where "seq_length" is one.
    """

    dtype: str = "float32"
    mixed_precision: str = "no"
    optimizer: str = "adamw_fused"
    lora_r: int = 0
    lora_targets: tuple[str, ...] = ()
    seq_length: int = SEQ_LENGTH
    resolution: int = 0
    buckets: str = ""
    train_text_encoder: bool = False
    encode_each_step: bool = False
    frames: int = 0
    accumulation: int = 1
    max_grad_norm: float = 1.0
    attn_implementation: str = ""
    load_in_4bit: bool = False
    launch: Launch | None = None
    launches: tuple[Launch, ...] = ()
    alloc_conf: str = ""
    prepare_kbit: bool = False
    lora_dropout: float | None = None
    use_dora: bool = False
    peft: Mapping[str, Any] | None = None
    frozen: tuple[str, ...] = ()
    rows: str = "alike"
    double_quant: bool = False
    quant_storage: str = "uint8"
    load_in_8bit: bool = False
    ema: bool = False
    audio_seconds: int = 0
    images: int = 0
    image_size: tuple[int, int] = IMAGE_SIZE
    max_pixels: int = 0
    longest_side: int = 0
    train_towers: str = ""
    given: frozenset[str] = frozenset()

    @property
    def length_is_open(self) -> bool:
        """Whether no sequence length was asked for, so that the model's own limit is taken where it is shorter."""
        return self.seq_length == SEQ_LENGTH and "seq_length" not in self.given

    @property
    def adapts(self) -> bool:
        """Whether adapters are trained, in place of the weights."""
        return bool(self.lora_r) or self.peft is not None

    @property
    def quantised(self) -> bool:
        """Whether the frozen weights are in 4 or 8 bits."""
        return self.load_in_4bit or self.load_in_8bit

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("mixed precision", self.mixed_precision, MIXED_PRECISION)
        _one_of("optimizer", self.optimizer, OPTIMIZERS)
        _one_of("attention implementation", self.attn_implementation, ATTENTION)
        _one_of("rows", self.rows, ROWS)
        _one_of("train towers", self.train_towers, TOWERS)
        AllocatorSettings.parse(self.alloc_conf)
        for name in ("seq_length", "resolution", "frames", "accumulation", "lora_r", "images", "audio_seconds"):
            if getattr(self, name) > _MOST:
                raise UserError(f"{name.replace('_', ' ')} {getattr(self, name)}: at most {_MOST}")
        if self.seq_length < 2:
            raise UserError(f"sequence length {self.seq_length}: a sequence has at least 2 tokens")
        if self.lora_r < 0:
            raise UserError(f"LoRA rank {self.lora_r}: it is at least 1 (0 trains all weights)")
        if self.resolution < 0:
            raise UserError(f"resolution {self.resolution}: a number of pixels, or 0 for the model's own")
        if self.accumulation < 1:
            raise UserError(f"accumulation {self.accumulation}: a step has at least 1 micro-batch")
        if not 0 <= self.max_grad_norm < float("inf"):
            raise UserError(f"gradients clipped to {self.max_grad_norm}: a norm, or 0 for no clipping")
        if self.frames < 0:
            raise UserError(f"frames {self.frames}: a number of them, or 0 for 49")
        if self.audio_seconds < 0:
            raise UserError(f"audio seconds {self.audio_seconds}: a number of them, or 0 for 10")
        for name in ("max_pixels", "longest_side"):
            if getattr(self, name) < 0:
                raise UserError(
                    f"{name.replace('_', ' ')} {getattr(self, name)}: a number, or 0 for the processor's own"
                )
        if self.images < 0:
            raise UserError(f"images {self.images}: a number of them in each row, or 0 for text alone")
        if not all(1 <= side <= _MOST_SIDE for side in self.image_size):
            wide, high = self.image_size
            raise UserError(f"image size {wide}x{high}: each side has 1 to {_MOST_SIDE} pixels")
        self._check_quantisation()
        if self.lora_dropout is not None and not 0 <= self.lora_dropout < 1:
            raise UserError(f"LoRA dropout {self.lora_dropout}: a share from 0 up to, but not including, 1")

        if self.train_text_encoder and not self.lora_r:
            raise UserError("text encoders are trained by LoRA: give a rank too, 16 for example")
        if self.use_dora and not self.lora_r:
            raise UserError("DoRA is a kind of LoRA: give a rank too, 16 for example")
        if self.peft is not None and self.lora_r:
            raise UserError("LoRA by rank and a configuration of PEFT are two adapters: give one of them")

    def _check_quantisation(self) -> None:
        if self.load_in_4bit and self.load_in_8bit:
            raise UserError("weights in 4 bits and in 8 bits: ask for one of them")
        if self.quantised and not self.adapts:
            bits = 4 if self.load_in_4bit else 8
            raise UserError(f"{bits}-bit weights cannot be trained themselves: give a LoRA rank too, 16 for example")
        if self.prepare_kbit and not self.quantised:
            raise UserError(
                "k-bit preparation is of a model that is loaded in 4 bits (or 8): ask for both, or leave it out"
            )
        _one_of("quant storage", self.quant_storage, ("uint8", *DTYPES))
        if self.quant_storage != "uint8" and not self.load_in_4bit:
            raise UserError(
                f"quant storage {self.quant_storage}: it is of weights in 4 bits: ask for both, or leave it out"
            )
        if self.double_quant and not self.load_in_4bit:
            raise UserError("double quantisation is of weights in 4 bits: ask for both, or leave it out")


def _one_of(what: str, given: str, allowed: Collection[str]) -> None:
    if given not in allowed:
        raise UserError(f"{what} '{given}'{meant(given, allowed)} ({', '.join(filter(None, allowed))})")
