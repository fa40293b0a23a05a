"""Policies keep the bits of every kind of diffusers model in train and eval mode; blocks and stages found in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ckpt_ft import apply_policy
from ckpt_ft.checkpointing.blocks import find_blocks

diffusers = pytest.importorskip("diffusers")
Inputs = dict[str, Any]

UNET = {"sample_size": 8, "block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4}
CROSS = {**UNET, "cross_attention_dim": 8, "attention_head_dim": 4}
T = torch.tensor([3, 7])
POLICIES = [
    "full", "every:2", "segments:3", "modules:attention", "save:conv", "save:attention+matmul+conv", "stages",
    "stages:2", "save:attention,stages",
]  # fmt: skip


def r(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def latents(channels: int = 4) -> Inputs:
    return {"sample": r(2, channels, 8, 8), "timestep": T}


def sdxl() -> nn.Module:
    return diffusers.UNet2DConditionModel(
        **{**CROSS, "attention_head_dim": (2, 4)},
        use_linear_projection=True,
        transformer_layers_per_block=(1, 2),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        addition_embed_type="text_time",
        addition_time_embed_dim=4,
        projection_class_embeddings_input_dim=4 * 6 + 8,
    )


DIT = {
    "sample_size": 8, "num_layers": 3, "num_attention_heads": 2, "attention_head_dim": 4, "in_channels": 4,
    "out_channels": 8,
}  # fmt: skip
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Inputs]]] = {
    "unet2d": (
        lambda: diffusers.UNet2DModel(
            **UNET, down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            attention_head_dim=4, dropout=0.1,
        ),
        lambda: latents(3),
    ),
    "sd": (
        lambda: diffusers.UNet2DConditionModel(
            **{**CROSS, "layers_per_block": 2},
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        ),
        lambda: {**latents(), "encoder_hidden_states": r(2, 5, 8)},
    ),
    "sdxl": (
        sdxl,
        lambda: {
            **latents(),
            "encoder_hidden_states": r(2, 5, 8),
            "added_cond_kwargs": {"text_embeds": r(2, 8), "time_ids": r(2, 6)},
        },
    ),
    "unet3d": (
        lambda: diffusers.UNet3DConditionModel(
            **{**CROSS, "block_out_channels": (32, 64)},
            down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
            up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
        ),
        lambda: {"sample": r(2, 4, 2, 8, 8), "timestep": T, "encoder_hidden_states": r(2, 5, 8)},
    ),
    "controlnet": (
        lambda: diffusers.ControlNetModel(
            **{key: value for key, value in CROSS.items() if key != "sample_size"},
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            conditioning_embedding_out_channels=(4, 8),
        ),
        lambda: {**latents(), "encoder_hidden_states": r(2, 5, 8), "controlnet_cond": r(2, 3, 16, 16)},
    ),
    "controlnet xs": (  # its blocks get lists of residuals and pop from them
        lambda: diffusers.UNetControlNetXSModel(
            sample_size=8, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), block_out_channels=(8, 16), norm_num_groups=4,
            cross_attention_dim=8, num_attention_heads=2, ctrl_block_out_channels=(4, 8),
            ctrl_conditioning_embedding_out_channels=(4, 8), ctrl_max_norm_num_groups=4, ctrl_num_attention_heads=2,
        ),
        lambda: {**latents(), "encoder_hidden_states": r(2, 5, 8), "controlnet_cond": r(2, 3, 16, 16)},
    ),
    "video vae": (  # its blocks get dicts with the last frames and write into them
        lambda: diffusers.AutoencoderKLKVAEVideo(
            ch=32, ch_mult=(1, 1), num_res_blocks=1, z_channels=2, temporal_compress_times=2
        ),
        lambda: {"sample": r(1, 3, 5, 8, 8)},
    ),
    "vae": (
        lambda: diffusers.AutoencoderKL(
            block_out_channels=(8, 16), norm_num_groups=4, down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
        ),
        lambda: {"sample": r(2, 3, 8, 8)},
    ),
    "sd3": (
        lambda: diffusers.SD3Transformer2DModel(
            sample_size=8, num_layers=3, attention_head_dim=4, num_attention_heads=2, joint_attention_dim=8,
            caption_projection_dim=8, pooled_projection_dim=8, in_channels=4, out_channels=4,
        ),
        lambda: {
            "hidden_states": r(2, 4, 8, 8),
            "encoder_hidden_states": r(2, 5, 8),
            "pooled_projections": r(2, 8),
            "timestep": T,
        },
    ),
    "flux": (
        lambda: diffusers.FluxTransformer2DModel(
            patch_size=1, in_channels=4, num_layers=2, num_single_layers=2, attention_head_dim=8,
            num_attention_heads=2, joint_attention_dim=8, pooled_projection_dim=8, axes_dims_rope=(2, 2, 4),
        ),
        lambda: {
            "hidden_states": r(2, 16, 4),
            "encoder_hidden_states": r(2, 5, 8),
            "pooled_projections": r(2, 8),
            "timestep": T / 10,
            "img_ids": r(16, 3),
            "txt_ids": r(5, 3),
        },
    ),
    "pixart": (
        lambda: diffusers.PixArtTransformer2DModel(
            **DIT, cross_attention_dim=8, caption_channels=8, use_additional_conditions=False
        ),
        lambda: {
            "hidden_states": r(2, 4, 8, 8),
            "encoder_hidden_states": r(2, 5, 8),
            "timestep": T,
            "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        },
    ),
    "dit": (
        lambda: diffusers.DiTTransformer2DModel(**DIT),
        lambda: {"hidden_states": r(2, 4, 8, 8), "timestep": T, "class_labels": torch.tensor([1, 2])},
    ),
    "sana": (  # its MLP has another class name and is in `ff`
        lambda: diffusers.SanaTransformer2DModel(
            in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=4, num_layers=2,
            num_cross_attention_heads=2, cross_attention_head_dim=4, cross_attention_dim=8, caption_channels=8,
            sample_size=8,
        ),
        lambda: {"hidden_states": r(2, 4, 8, 8), "encoder_hidden_states": r(2, 5, 8), "timestep": T},
    ),
    "wan": (  # with an image embedding, whose MLP is a list like those of the blocks
        lambda: diffusers.WanTransformer3DModel(
            num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=8, freq_dim=16,
            ffn_dim=24, num_layers=2, rope_max_seq_len=32, image_dim=8, added_kv_proj_dim=24,
        ),
        lambda: {
            "hidden_states": r(2, 4, 2, 8, 8),
            "encoder_hidden_states": r(2, 5, 8),
            "encoder_hidden_states_image": r(2, 3, 8),
            "timestep": T,
        },
    ),
}  # fmt: skip
NO_ATTENTION_MODULE = {"video vae"}
SLOW = {"unet3d", "controlnet xs"}
STAGELESS = {"sd3", "flux", "pixart", "dit", "sana", "wan"}


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name][0]()


def numbers(model: nn.Module, inputs: Inputs) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    outputs = [x for x in tree_leaves(dict(model(**inputs))) if isinstance(x, torch.Tensor)]
    loss = torch.stack([x.square().mean() for x in outputs]).sum()
    loss.backward()
    return [loss.detach(), torch.get_rng_state(), *(p.grad for p in model.parameters() if p.grad is not None)]


# blocks of transformers have no convolution
@pytest.mark.filterwarnings("ignore:policy .* no operator of:UserWarning")
# ControlNet XS passes sums to its blocks
@pytest.mark.filterwarnings("ignore:policy .* no block was given:UserWarning")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in MODELS]
)
def test_policies_keep_the_bits_in_train_and_eval_mode(name: str) -> None:
    model, inputs = make(name), MODELS[name][1]()
    for mode in (True, False):
        model.train(mode)
        plain = numbers(model, inputs)
        for policy in POLICIES if mode else POLICIES[::4]:
            if ("stages" in policy and name in STAGELESS) or (
                policy == "modules:attention" and name in NO_ATTENTION_MODULE
            ):
                continue
            applied = apply_policy(model, policy)
            found = numbers(model, inputs)
            assert len(found) == len(plain)
            assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True)), (policy, mode)
            applied.remove()


def kinds(name: str) -> Counter[str]:
    return Counter(type(block).__name__ for block in find_blocks(make(name)).blocks.values())


def test_blocks_of_unets_include_resnets_and_samplers() -> None:
    assert kinds("sd") == {"ResnetBlock2D": 12, "BasicTransformerBlock": 6, "Downsample2D": 1, "Upsample2D": 1}
    assert kinds("sdxl") == {"ResnetBlock2D": 8, "BasicTransformerBlock": 8, "Downsample2D": 1, "Upsample2D": 1}
    assert kinds("unet2d") == {"ResnetBlock2D": 8, "Attention": 4, "Downsample2D": 1, "Upsample2D": 1}
    blocks = find_blocks(make("sd")).blocks
    assert {"mid_block.resnets.0", "down_blocks.0.downsamplers.0", "up_blocks.0.upsamplers.0"} <= blocks.keys()
    assert kinds("flux") == {"FluxTransformerBlock": 2, "FluxSingleTransformerBlock": 2}


def test_list_inside_an_mlp_is_no_list_of_blocks() -> None:
    assert kinds("wan") == {"WanTransformerBlock": 2}


@pytest.mark.parametrize("name", ["qwen image", "sana", "wan", "sd"])
def test_adapters_do_not_change_the_blocks(name: str) -> None:
    from peft import LoraConfig

    model = qwen_image() if name == "qwen image" else make(name)
    blocks = list(find_blocks(model).blocks)
    layers = [key for key, module in model.named_modules() if isinstance(module, nn.Linear)]
    model.add_adapter(LoraConfig(r=2, target_modules=layers))
    assert list(find_blocks(model).blocks) == blocks


def qwen_image() -> nn.Module:
    """Returns a model whose blocks contain lists with a linear layer in each: modulations and MLPs."""
    return diffusers.QwenImageTransformer2DModel(
        in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=8, axes_dims_rope=(8, 4, 4),
    )  # fmt: skip


def test_mlp_is_recognized_by_its_attribute_name() -> None:
    assert apply_policy(make("sana"), "modules:mlp").covered == ["transformer_blocks.0.ff", "transformer_blocks.1.ff"]


def test_warning_about_attention_of_a_model_without_attention_is_short() -> None:
    model, inputs = make("video vae").train(), MODELS["video vae"][1]()
    apply_policy(model, "save:attention+conv")
    with pytest.warns(UserWarning, match="no operator of 'attention' ran in any checkpointed region$"):
        numbers(model, inputs)


def test_stages_of_a_unet_are_its_levels_in_execution_order() -> None:
    assert [stage.name for stage in find_blocks(make("sd")).stages] == [
        "down_blocks.0",
        "down_blocks.1",
        "mid_block",
        "up_blocks.0",
        "up_blocks.1",
    ]
