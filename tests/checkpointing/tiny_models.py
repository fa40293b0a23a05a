"""Tiny models of many architectures with random weights, and the inputs of one training step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

Case = tuple[nn.Module, dict[str, Any]]

_IDS = torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(1))
_LABELS = _IDS.masked_fill(torch.arange(12) < 2, -100)
_PIXELS = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(2))
_SIZES: dict[str, Any] = {
    "vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_GQA = {"num_key_value_heads": 2}
_TEXT = {"input_ids": _IDS, "labels": _LABELS}
_VIT = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "image_size": 32}
# a KV cache changes the layout of keys and values, and checkpointed blocks have none: last bits differ on some CPUs
_SEQ2SEQ = {"vocab_size": 99, "d_model": 32, "decoder_start_token_id": 0, "use_cache": False}


def _model(auto: Any, config: str, inputs: dict[str, Any], **sizes: Any) -> Callable[[], Case]:
    def build() -> Case:
        return auto.from_config(getattr(hf, config)(**sizes)), dict(inputs)

    return build


def _causal(config: str, **sizes: Any) -> Callable[[], Case]:
    return _model(hf.AutoModelForCausalLM, config, _TEXT, **{**_SIZES, "use_cache": False, **sizes})


def _masked(config: str, **sizes: Any) -> Callable[[], Case]:
    return _model(hf.AutoModelForMaskedLM, config, _TEXT, **{**_SIZES, **sizes})


def _image(config: str, **sizes: Any) -> Callable[[], Case]:
    inputs = {"pixel_values": _PIXELS, "labels": torch.tensor([0, 1])}
    return _model(hf.AutoModelForImageClassification, config, inputs, **sizes)


LANGUAGE = {
    "llama": _causal("LlamaConfig", **_GQA),
    "mistral": _causal("MistralConfig", **_GQA),
    "qwen2": _causal("Qwen2Config", attention_dropout=0.1, **_GQA),
    "qwen3": _causal("Qwen3Config", head_dim=8, **_GQA),
    "gemma": _causal("GemmaConfig", head_dim=8, **_GQA),
    "gemma2": _causal("Gemma2Config", head_dim=8, **_GQA),
    "gemma3": _causal("Gemma3TextConfig", head_dim=8, **_GQA),
    "phi": _causal("PhiConfig"),
    "phi3": _causal("Phi3Config", **_GQA),
    "gpt2": _causal("GPT2Config", n_embd=32, n_head=4, n_layer=2, n_inner=48),
    "gpt_neox": _causal("GPTNeoXConfig"),
    "opt": _causal("OPTConfig", ffn_dim=48, word_embed_proj_dim=32),
    "bloom": _causal("BloomConfig", n_layer=2, n_head=4),
    "falcon": _causal("FalconConfig"),
    "cohere": _causal("CohereConfig", **_GQA),
    "granite": _causal("GraniteConfig", logits_scaling=3.0, **_GQA),
    "olmo2": _causal("Olmo2Config", **_GQA),
    "glm": _causal("GlmConfig", head_dim=8, **_GQA),
    "mixtral": _causal("MixtralConfig", num_local_experts=4, **_GQA),
    "bert": _masked("BertConfig"),
    "roberta": _masked("RobertaConfig"),
    "distilbert": _masked("DistilBertConfig", dim=32, n_layers=2, n_heads=4, hidden_dim=48),
    "modernbert": _masked("ModernBertConfig", cls_token_id=1, sep_token_id=2),
    "deberta": _masked("DebertaV2Config"),
    "albert": _masked("AlbertConfig", embedding_size=32),
    "t5": _model(
        hf.AutoModelForSeq2SeqLM, "T5Config", _TEXT, d_kv=8, d_ff=48, num_layers=2, num_heads=4,
        feed_forward_proj="gated-gelu", **_SEQ2SEQ,
    ),
    "bart": _model(
        hf.AutoModelForSeq2SeqLM, "BartConfig", _TEXT, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, **_SEQ2SEQ,
    ),
}  # fmt: skip

VISION = {
    "vit": _image("ViTConfig", intermediate_size=48, patch_size=8, hidden_dropout_prob=0.1, **_VIT),
    "dinov2": _image("Dinov2Config", patch_size=8, **_VIT),
    "swin": _image(
        "SwinConfig", image_size=32, patch_size=2, embed_dim=16, depths=[1, 1], num_heads=[2, 2], window_size=4
    ),
    "convnext": _image("ConvNextConfig", hidden_sizes=[8, 16], depths=[1, 1], num_stages=2),
    "resnet": _image("ResNetConfig", embedding_size=8, hidden_sizes=[16, 32], depths=[2, 2]),
    "resnet_basic": _image(
        "ResNetConfig", embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], layer_type="basic"
    ),
    "regnet": _image("RegNetConfig", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], groups_width=4),
    "mobilenet": _image("MobileNetV2Config", image_size=32),
}  # fmt: skip


def _unet() -> Case:
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=16, block_out_channels=(32, 64), down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), cross_attention_dim=32, attention_head_dim=8,
        norm_num_groups=8, layers_per_block=1, dropout=0.1,
    )  # fmt: skip
    inputs = {
        "sample": torch.randn(2, 4, 16, 16),
        "timestep": torch.tensor([3, 4]),
        "encoder_hidden_states": torch.randn(2, 5, 32),
    }
    return model.train(), inputs


def _dit() -> Case:
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        num_attention_heads=4, attention_head_dim=8, in_channels=4, num_layers=2, sample_size=8, norm_num_groups=8,
        dropout=0.1,
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(2, 4, 8, 8),
        "timestep": torch.tensor([3, 4]),
        "class_labels": torch.tensor([1, 2]),
    }
    return model.train(), inputs


DIFFUSION: dict[str, Callable[[], Case]] = {"unet": _unet, "dit": _dit}


def build(name: str) -> Case:
    """Returns a model in training mode and the inputs of a step, equal at every call."""
    torch.manual_seed(0)
    model, inputs = {**LANGUAGE, **VISION, **DIFFUSION}[name]()
    return model.train(), inputs


def loss_of(output: Any) -> torch.Tensor:
    """Returns the model's loss, or the mean square of its first output."""
    loss = getattr(output, "loss", None)
    return output[0].float().pow(2).mean() if loss is None else loss


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns gradients by parameter name."""
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


class OperatorCounts(TorchDispatchMode):
    """Counts the calls of each operator."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))
