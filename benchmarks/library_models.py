"""Small configurations and inputs of classes that the general rules of `verify_libraries.py` do not build.

Of diffusers: settings of the class, and the arguments of its forward, with two samples where the class allows it. Of
transformers: settings that replace those of the rule. Of timm: one small model of each file, with settings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import ones, randint, randn, tensor, zeros

Inputs = Callable[[], dict[str, Any]]


def _cat(*dicts: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {key: value for each in dicts for key, value in each.items()} | more


TIMES = tensor([3, 4])
FLOAT_TIMES = tensor([0.3, 0.4])
MASK = ones(2, 6, dtype=torch.bool)
HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}
UNET = {"block_out_channels": (8, 16), "norm_num_groups": 4, "cross_attention_dim": 32, "attention_head_dim": 4}
UNET_BLOCKS = {
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}
UNET_3D = {
    "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
    "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
}
KL = {"block_out_channels": (8, 16), "norm_num_groups": 4, "layers_per_block": 2}
WAN = _cat(
    HEADS, patch_size=(1, 2, 2), in_channels=4, out_channels=4, text_dim=32, freq_dim=16, ffn_dim=64, num_layers=2
)


def _image(channels: int = 4, side: int = 8) -> torch.Tensor:
    return randn(2, channels, side, side)


def _video(channels: int = 4, frames: int = 5, side: int = 8) -> torch.Tensor:
    return randn(2, channels, frames, side, side)


def _text(width: int = 32) -> torch.Tensor:
    return randn(2, 6, width)


def _unet(**more: Any) -> dict[str, Any]:
    return _cat({"sample": _image(), "timestep": TIMES, "encoder_hidden_states": _text()}, more)


def _dit(latents: torch.Tensor, **more: Any) -> dict[str, Any]:
    return _cat({"hidden_states": latents, "timestep": TIMES, "encoder_hidden_states": _text()}, more)


def _flux(**more: Any) -> dict[str, Any]:
    ids = {"img_ids": torch.arange(48).view(16, 3) % 4, "txt_ids": zeros(6, 3)}
    return _dit(randn(2, 16, 4), **ids) | {"timestep": FLOAT_TIMES} | more


def _pixels(frames: int = 0, side: int = 16) -> Inputs:
    return lambda: {"sample": _video(3, frames, side) if frames else _image(3, side)}


# fmt: off
DIFFUSERS: dict[str, tuple[dict[str, Any], Inputs]] = {
    # U-Nets and their ControlNets
    "UNet2DConditionModel": (_cat(UNET, UNET_BLOCKS), _unet),
    "UNet2DModel": (
        {
            "block_out_channels": (8, 16), "norm_num_groups": 4, "attention_head_dim": 4,
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        },
        lambda: {"sample": _image(3), "timestep": TIMES},
    ),
    "UNet3DConditionModel": (_cat(UNET, UNET_3D), lambda: _unet(sample=_video())),
    "I2VGenXLUNet": (
        _cat(UNET, UNET_3D),
        lambda: _unet(sample=_video(), fps=tensor([8, 8]), image_latents=_video(), image_embeddings=randn(2, 32)),
    ),
    "UNetSpatioTemporalConditionModel": (
        {
            "block_out_channels": (32, 64), "cross_attention_dim": 32, "num_attention_heads": (2, 4), "num_frames": 2,
            "projection_class_embeddings_input_dim": 96, "addition_time_embed_dim": 32,
            "down_block_types": ("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
            "up_block_types": ("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
        },
        lambda: _unet(sample=randn(2, 2, 8, 8, 8), encoder_hidden_states=randn(2, 1, 32), added_time_ids=randn(2, 3)),
    ),
    "UNetControlNetXSModel": (
        dict(
            sample_size=8, block_out_channels=(8, 16), norm_num_groups=4, cross_attention_dim=32,
            num_attention_heads=2, ctrl_block_out_channels=(4, 8), ctrl_num_attention_heads=2,
            ctrl_max_norm_num_groups=2, ctrl_conditioning_embedding_out_channels=(4, 8), **UNET_BLOCKS,
        ),
        lambda: _unet(controlnet_cond=_image(3, 16)),
    ),
    "ControlNetModel": (
        _cat(UNET, down_block_types=UNET_BLOCKS["down_block_types"], conditioning_embedding_out_channels=(4, 8)),
        lambda: _unet(controlnet_cond=_image(3, 16)),
    ),
    "ControlNetUnionModel": (
        _cat(
            UNET, down_block_types=UNET_BLOCKS["down_block_types"], conditioning_embedding_out_channels=(4, 8),
            addition_time_embed_dim=8, projection_class_embeddings_input_dim=48, num_trans_channel=8, num_trans_head=2,
            num_proj_channel=8, num_trans_layer=2,
        ),
        lambda: _unet(
            controlnet_cond=[_image(3, 16)], control_type=tensor([[1.0, 0, 0, 0, 0, 0]] * 2), control_type_idx=[0]
        ),
    ),
    "AudioLDM2UNet2DConditionModel": (
        _cat(UNET, UNET_BLOCKS, cross_attention_dim=((32, 32), (32, 32))),
        lambda: _unet(encoder_hidden_states_1=_text()),
    ),
    "DreamLiteUNetModel": (
        _cat(
            UNET, down_block_types=("DreamLiteCrossAttnNoSelfAttnDownBlock2D", "DreamLiteCrossAttnDownBlock2D"),
            up_block_types=("DreamLiteCrossAttnUpBlock2D", "DreamLiteUpBlock2D"),
        ),
        _unet,
    ),
    "Kandinsky3UNet": (
        {
            "time_embedding_dim": 16, "groups": 4, "attention_head_dim": 4, "layers_per_block": 2,
            "block_out_channels": (8, 16, 16, 16), "cross_attention_dim": 32, "encoder_hid_dim": 32,
        },
        lambda: _unet(encoder_attention_mask=ones(2, 6)),
    ),
    "StableCascadeUNet": (
        {
            "in_channels": 4, "out_channels": 4, "timestep_ratio_embedding_dim": 8, "conditioning_dim": 16,
            "block_out_channels": (16, 16), "num_attention_heads": (2, 2), "down_num_layers_per_block": (2, 2),
            "up_num_layers_per_block": (2, 2), "clip_text_pooled_in_channels": 16,
        },
        lambda: {"sample": _image(), "timestep_ratio": FLOAT_TIMES, "clip_text_pooled": randn(2, 1, 16)},
    ),
    "UVit2DModel": (
        {
            "hidden_size": 32, "cond_embed_dim": 32, "micro_cond_encode_dim": 16, "micro_cond_embed_dim": 80,
            "encoder_hidden_size": 32, "vocab_size": 32, "codebook_size": 24, "in_channels": 32,
            "block_out_channels": 32, "num_res_blocks": 2, "block_num_heads": 2, "num_hidden_layers": 2,
            "num_attention_heads": 2, "intermediate_size": 64, "sample_size": 8,
        },
        lambda: {
            "input_ids": randint(0, 24, (2, 8, 8)), "encoder_hidden_states": _text(), "pooled_text_emb": randn(2, 32),
            "micro_conds": randn(2, 5),
        },
    ),
    # transformers of images
    "AuraFlowTransformer2DModel": (
        _cat(
            HEADS, sample_size=8, num_mmdit_layers=2, num_single_dit_layers=2, joint_attention_dim=32,
            caption_projection_dim=32, pos_embed_max_size=16,
        ),
        lambda: _dit(_image()),
    ),
    "BriaFiboTransformer2DModel": (
        _cat(
            HEADS, in_channels=4, num_layers=2, num_single_layers=2, joint_attention_dim=32, text_encoder_dim=16,
            axes_dims_rope=[4, 4, 8],
        ),
        lambda: _flux(text_encoder_layers=[_text(16) for _ in range(4)]),
    ),
    "ChromaTransformer2DModel": (
        _cat(
            HEADS, in_channels=4, num_layers=2, num_single_layers=2, joint_attention_dim=32, axes_dims_rope=(4, 4, 8),
            approximator_num_channels=16, approximator_hidden_dim=32, approximator_layers=2,
        ),
        lambda: _flux(attention_mask=ones(2, 22)),
    ),
    "FluxControlNetModel": (
        _cat(
            HEADS, in_channels=4, num_layers=2, num_single_layers=2, joint_attention_dim=32, pooled_projection_dim=32,
            axes_dims_rope=[4, 4, 8],
        ),
        lambda: _flux(pooled_projections=randn(2, 32), controlnet_cond=randn(2, 16, 4)),
    ),
    "SD3ControlNetModel": (
        _cat(
            HEADS, sample_size=8, in_channels=4, out_channels=4, num_layers=2, joint_attention_dim=32,
            caption_projection_dim=32, pooled_projection_dim=32, pos_embed_max_size=16,
        ),
        lambda: _dit(_image(), pooled_projections=randn(2, 32), controlnet_cond=_image()),
    ),
    "SanaControlNetModel": (
        _cat(
            HEADS, in_channels=4, out_channels=4, num_layers=2, num_cross_attention_heads=2,
            cross_attention_head_dim=16, cross_attention_dim=32, caption_channels=32, sample_size=8,
        ),
        lambda: _dit(_image(), controlnet_cond=_image()),
    ),
    "QwenImageControlNetModel": (
        _cat(HEADS, in_channels=16, out_channels=4, num_layers=2, joint_attention_dim=32, axes_dims_rope=(4, 4, 8)),
        lambda: (
            _dit(
                randn(2, 16, 16), controlnet_cond=randn(2, 16, 16), encoder_hidden_states_mask=MASK,
                img_shapes=[[(1, 4, 4)]] * 2,
            )
            | {"timestep": FLOAT_TIMES}
        ),
    ),
    "HunyuanDiT2DModel": (
        _cat(
            HEADS, in_channels=4, patch_size=2, sample_size=8, hidden_size=32, num_layers=2, cross_attention_dim=32,
            cross_attention_dim_t5=32, pooled_projection_dim=16, text_len=6, text_len_t5=6,
            use_style_cond_and_image_meta_size=False,
        ),
        lambda: _dit(
            _image(), text_embedding_mask=MASK, encoder_hidden_states_t5=_text(), text_embedding_mask_t5=MASK,
            timestep=FLOAT_TIMES, image_rotary_emb=(randn(16, 16), randn(16, 16)),
        ),
    ),
    "HunyuanDiT2DControlNetModel": (
        _cat(
            HEADS, in_channels=4, patch_size=2, sample_size=8, hidden_size=32, transformer_num_layers=4,
            cross_attention_dim=32, cross_attention_dim_t5=32, pooled_projection_dim=16, text_len=6, text_len_t5=6,
            use_style_cond_and_image_meta_size=False,
        ),
        lambda: _dit(
            _image(), text_embedding_mask=MASK, encoder_hidden_states_t5=_text(), text_embedding_mask_t5=MASK,
            timestep=FLOAT_TIMES, image_rotary_emb=(randn(16, 16), randn(16, 16)), controlnet_cond=_image(),
        ),
    ),
    "HunyuanImageTransformer2DModel": (
        _cat(
            HEADS, in_channels=4, out_channels=4, num_layers=2, num_single_layers=2, num_refiner_layers=1,
            text_embed_dim=32, rope_axes_dim=(8, 8),
        ),
        lambda: _dit(_image(), encoder_attention_mask=MASK, timestep=FLOAT_TIMES),
    ),
    "ErnieImageTransformer2DModel": (
        {
            "hidden_size": 32, "num_attention_heads": 2, "num_layers": 2, "ffn_hidden_size": 64, "in_channels": 4,
            "out_channels": 4, "text_in_dim": 32, "rope_axes_dim": (4, 4, 8),
        },
        lambda: {"hidden_states": _image(), "timestep": TIMES, "text_bth": _text(), "text_lens": tensor([6, 5])},
    ),
    "GlmImageTransformer2DModel": (
        _cat(
            HEADS, in_channels=4, out_channels=4, num_layers=2, text_embed_dim=32, time_embed_dim=16, condition_dim=16,
            prior_vq_quantizer_codebook_size=32,
        ),
        lambda: _dit(
            _image(), prior_token_id=randint(0, 32, (2, 16)), prior_token_drop=tensor([False, True]),
            target_size=torch.full((2, 2), 8.0), crop_coords=zeros(2, 2),
        ),
    ),
    "HiDreamImageTransformer2DModel": (
        _cat(
            HEADS, patch_size=2, in_channels=4, num_layers=2, num_single_layers=2, caption_channels=[32, 32],
            text_emb_dim=16, axes_dims_rope=(8, 4, 4), max_resolution=(8, 8), llama_layers=[0, 1, 1, 0],
        ),
        lambda: {
            "hidden_states": _image(), "timesteps": TIMES, "encoder_hidden_states_t5": _text(),
            "encoder_hidden_states_llama3": randn(2, 2, 6, 32), "pooled_embeds": randn(2, 16),
        },
    ),
    "PRXTransformer2DModel": (
        {"in_channels": 4, "context_in_dim": 32, "hidden_size": 32, "num_heads": 2, "depth": 2, "axes_dim": [8, 8]},
        lambda: _dit(_image()),
    ),
    "Transformer2DModel": (
        _cat(HEADS, in_channels=8, num_layers=2, norm_num_groups=4, cross_attention_dim=32),
        lambda: {"hidden_states": _image(8), "encoder_hidden_states": _text()},
    ),
    "DreamLiteTransformer2DModel": (
        _cat(HEADS, in_channels=8, num_layers=2, norm_num_groups=4, cross_attention_dim=32),
        lambda: {"hidden_states": _image(8), "encoder_hidden_states": _text()},
    ),
    "PriorTransformer": (
        _cat(HEADS, num_layers=2, embedding_dim=32, num_embeddings=6),
        lambda: _dit(randn(2, 32), proj_embedding=randn(2, 32)),
    ),
    "OmniGenTransformer2DModel": (
        {
            "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 64,
            "num_layers": 2, "vocab_size": 64, "pad_token_id": 0, "max_position_embeddings": 64,
            "pos_embed_max_size": 16, "time_step_dim": 16,
            "rope_scaling": {"long_factor": [1.0] * 8, "short_factor": [1.0] * 8},
        },
        lambda: {
            "hidden_states": _image(), "timestep": FLOAT_TIMES, "input_ids": randint(1, 64, (2, 6)),
            "input_img_latents": [], "input_image_sizes": {}, "attention_mask": ones(2, 23, 23),
            "position_ids": torch.arange(23)[None].repeat(2, 1),
        },
    ),
    "Krea2Transformer2DModel": (
        {
            "in_channels": 4, "num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2,
            "num_key_value_heads": 1, "intermediate_size": 64, "timestep_embed_dim": 16, "text_hidden_dim": 32,
            "num_text_layers": 2, "text_num_attention_heads": 2, "text_num_key_value_heads": 2,
            "text_intermediate_size": 64, "num_layerwise_text_blocks": 2, "num_refiner_text_blocks": 2,
            "axes_dims_rope": (4, 4, 8),
        },
        lambda: {
            "hidden_states": randn(2, 16, 4), "encoder_hidden_states": randn(2, 6, 2, 32), "timestep": FLOAT_TIMES,
            "position_ids": torch.arange(66).view(22, 3) % 4,
        },
    ),
    "ZImageTransformer2DModel": (
        {
            "in_channels": 4, "dim": 32, "n_layers": 2, "n_refiner_layers": 2, "n_heads": 2, "n_kv_heads": 2,
            "cap_feat_dim": 32, "axes_dims": [4, 4, 8], "axes_lens": [64, 32, 32],
        },
        lambda: {
            "x": [randn(4, 1, 8, 8) for _ in range(2)], "t": FLOAT_TIMES,
            "cap_feats": [randn(6, 32) for _ in range(2)],
        },
    ),
    "Ideogram4Transformer2DModel": (
        {
            "in_channels": 4, "num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2,
            "intermediate_size": 64, "adaln_dim": 16, "llm_features_dim": 32, "mrope_section": (2, 1, 1),
        },
        lambda: {
            "hidden_states": randn(2, 22, 4), "timestep": FLOAT_TIMES, "encoder_hidden_states": randn(2, 22, 32),
            "position_ids": (torch.arange(66).view(22, 3) % 4).repeat(2, 1, 1),
            "segment_ids": ones(2, 22, dtype=torch.long), "indicator": tensor([[3] * 6 + [2] * 16] * 2),
        },
    ),
    # transformers of video and audio
    "AceStepTransformer1DModel": (
        {
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
            "num_key_value_heads": 1, "head_dim": 16, "in_channels": 12, "audio_acoustic_hidden_dim": 4,
            "sliding_window": 4,
        },
        lambda: (
            _dit(randn(2, 16, 4), timestep_r=FLOAT_TIMES, context_latents=randn(2, 16, 8)) | {"timestep": FLOAT_TIMES}
        ),
    ),
    "AceStepConditionEncoder": (
        {
            "hidden_size": 32, "intermediate_size": 64, "text_hidden_dim": 32, "timbre_hidden_dim": 4,
            "num_lyric_encoder_hidden_layers": 2, "num_timbre_encoder_hidden_layers": 2, "num_attention_heads": 2,
            "num_key_value_heads": 1, "head_dim": 16,
        },
        lambda: {
            "text_hidden_states": _text(), "text_attention_mask": MASK, "lyric_hidden_states": _text(),
            "lyric_attention_mask": MASK, "refer_audio_acoustic_hidden_states_packed": randn(2, 8, 4),
            "refer_audio_order_mask": tensor([0, 1]),
        },
    ),
    "AnimaTextConditioner": (
        {
            "source_dim": 32, "target_dim": 32, "model_dim": 32, "num_layers": 2, "num_attention_heads": 2,
            "target_vocab_size": 64, "min_sequence_length": 8,
        },
        lambda: {"source_hidden_states": _text(), "target_input_ids": randint(0, 64, (2, 6))},
    ),
    "AnyFlowTransformer3DModel": (
        WAN,
        lambda: _dit(randn(2, 5, 4, 8, 8), timestep=randn(2, 5), r_timestep=randn(2, 5)),
    ),
    "CogVideoXTransformer3DModel": (
        _cat(
            HEADS, in_channels=4, out_channels=4, time_embed_dim=16, text_embed_dim=32, num_layers=2, sample_width=8,
            sample_height=8, sample_frames=5, max_text_seq_length=6,
        ),
        lambda: _dit(randn(2, 2, 4, 8, 8)),
    ),
    "ConsisIDTransformer3DModel": (
        _cat(
            HEADS, in_channels=4, out_channels=4, time_embed_dim=16, text_embed_dim=32, num_layers=2, sample_width=8,
            sample_height=8, sample_frames=5, max_text_seq_length=6,
        ),
        lambda: _dit(randn(2, 2, 4, 8, 8)),
    ),
    "CosmosTransformer3DModel": (
        _cat(
            HEADS, in_channels=4, out_channels=4, num_layers=2, text_embed_dim=32, adaln_lora_dim=8,
            max_size=(8, 16, 16), concat_padding_mask=False,
        ),
        lambda: _dit(_video()),
    ),
    "EasyAnimateTransformer3DModel": (
        _cat(
            HEADS, in_channels=4, out_channels=4, patch_size=2, sample_width=8, sample_height=8, num_layers=2,
            mmdit_layers=2, time_embed_dim=16, text_embed_dim=32,
        ),
        lambda: _dit(_video()),
    ),
    "HunyuanVideoTransformer3DModel": (
        _cat(
            HEADS, in_channels=4, out_channels=4, num_layers=2, num_single_layers=2, num_refiner_layers=1,
            text_embed_dim=32, pooled_projection_dim=32, rope_axes_dim=(4, 4, 8),
        ),
        lambda: _dit(
            _video(), encoder_attention_mask=MASK, pooled_projections=randn(2, 32), guidance=tensor([1.0, 2.0])
        ),
    ),
    "HunyuanVideo15Transformer3DModel": (
        _cat(
            HEADS, in_channels=4, out_channels=4, num_layers=2, num_refiner_layers=1, text_embed_dim=32,
            text_embed_2_dim=32, image_embed_dim=32, rope_axes_dim=(4, 4, 8), target_size=8,
        ),
        lambda: _dit(
            _video(), encoder_attention_mask=MASK, encoder_hidden_states_2=_text(), encoder_attention_mask_2=MASK,
            image_embeds=_text(), timestep=FLOAT_TIMES,
        ),
    ),
    "HeliosTransformer3DModel": (
        _cat(WAN, rope_dim=(4, 6, 6), has_multi_term_memory_patch=False),
        lambda: _dit(_video()),
    ),
    "JoyImageEditTransformer3DModel": (
        {
            "in_channels": 4, "hidden_size": 32, "num_attention_heads": 2, "text_dim": 32, "num_layers": 2,
            "rope_dim_list": [4, 4, 8],
        },
        lambda: _dit(_video()),
    ),
    "Kandinsky5Transformer3DModel": (
        {
            "in_text_dim": 32, "in_text_dim2": 16, "time_dim": 16, "model_dim": 32, "ff_dim": 64, "num_text_blocks": 2,
            "num_visual_blocks": 2, "axes_dims": (4, 4, 8),
        },
        lambda: {
            "hidden_states": randn(1, 5, 8, 8, 4), "encoder_hidden_states": randn(1, 6, 32), "timestep": tensor([3.0]),
            "pooled_projections": randn(1, 16), "visual_rope_pos": [torch.arange(n) for n in (5, 4, 4)],
            "text_rope_pos": torch.arange(6),
        },
    ),
    "LTXVideoTransformer3DModel": (
        _cat(HEADS, in_channels=4, out_channels=4, cross_attention_dim=32, num_layers=2, caption_channels=32),
        lambda: _dit(randn(2, 32, 4), encoder_attention_mask=MASK, num_frames=2, height=4, width=4),
    ),
    "LTX2VideoTransformer3DModel": (
        _cat(
            HEADS, in_channels=4, out_channels=4, cross_attention_dim=32, audio_in_channels=4, audio_out_channels=4,
            audio_num_attention_heads=2, audio_attention_head_dim=8, audio_cross_attention_dim=16, num_layers=2,
            caption_channels=16,
        ),
        lambda: _dit(
            randn(2, 32, 4), audio_hidden_states=randn(2, 4, 4), encoder_hidden_states=_text(16),
            audio_encoder_hidden_states=_text(16), encoder_attention_mask=MASK, audio_encoder_attention_mask=MASK,
            num_frames=2, height=4, width=4, audio_num_frames=4, timestep=TIMES[:, None].repeat(1, 32),
            audio_timestep=TIMES[:, None].repeat(1, 4),
        ),
    ),
    "LatteTransformer3DModel": (
        _cat(
            HEADS, in_channels=4, out_channels=8, num_layers=2, cross_attention_dim=32, sample_size=8, patch_size=2,
            caption_channels=32, video_length=5, norm_type="ada_norm_single", activation_fn="gelu-approximate",
        ),
        lambda: _dit(_video()),
    ),
    "LongCatAudioDiTTransformer": (
        {"dit_dim": 32, "dit_depth": 2, "dit_heads": 2, "dit_text_dim": 32, "latent_dim": 4},
        lambda: _dit(randn(2, 16, 4), encoder_attention_mask=MASK) | {"timestep": FLOAT_TIMES},
    ),
    "MiniMaxMusic3Transformer1DModel": (
        _cat(
            HEADS, in_channels=4, condition_dim=32, num_layers=2, ff_inner_dim=64, rotary_dim=8,
            fourier_embedding_dim=16,
        ),
        lambda: _dit(randn(2, 4, 16), encoder_hidden_states=randn(2, 16, 32)) | {"timestep": FLOAT_TIMES},
    ),
    "MiniMaxMusic3RVQDepthDecoder": (
        {
            "hidden_size": 32, "num_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
            "audio_vocab_size": 32, "num_codebooks": 4,
        },
        lambda: {"inputs_embeds": randn(2, 4, 32)},
    ),
    "QwenImage21Transformer2DModel": (
        _cat(HEADS, in_channels=4, out_channels=4, num_layers=2, context_in_dim=32, axes_dims_rope=(4, 4, 8)),
        lambda: (
            _dit(
                randn(2, 16, 4), img_shapes=[[(1, 4, 4)]] * 2, img_mask=(torch.arange(10) >= 6).repeat(2, 1),
                encoder_hidden_states_mask=MASK,
            )
            | {"timestep": FLOAT_TIMES}
        ),
    ),
    "StableAudioDiTModel": (
        _cat(
            HEADS, sample_size=16, in_channels=4, num_layers=2, num_key_value_attention_heads=1, out_channels=4,
            cross_attention_dim=32, time_proj_dim=16, global_states_input_dim=32, cross_attention_input_dim=32,
        ),
        lambda: _dit(
            randn(2, 4, 16), global_hidden_states=randn(2, 1, 32), rotary_embedding=(randn(17, 8), randn(17, 8))
        ),
    ),
    "StableAudio3DiTModel": (
        {
            "io_channels": 4, "embed_dim": 32, "depth": 2, "num_heads": 2, "cond_token_dim": 32, "global_cond_dim": 32,
            "local_add_cond_dim": 5, "timestep_features_dim": 16, "num_memory_tokens": 4,
        },
        lambda: _dit(randn(2, 4, 16), global_hidden_states=randn(2, 32)) | {"timestep": FLOAT_TIMES},
    ),
    "T5FilmDecoder": (
        {
            "input_dims": 8, "targets_length": 16, "d_model": 32, "num_layers": 2, "num_heads": 2, "d_kv": 16,
            "d_ff": 64,
        },
        lambda: {
            "encodings_and_masks": [(_text(), MASK)], "decoder_input_tokens": randn(2, 16, 8),
            "decoder_noise_time": FLOAT_TIMES,
        },
    ),
    "TransformerTemporalModel": (
        _cat(HEADS, in_channels=32, num_layers=2, cross_attention_dim=None, norm_num_groups=4),
        lambda: {"hidden_states": randn(10, 32, 4, 4), "num_frames": 5},
    ),
    "WanVACETransformer3DModel": (
        _cat(WAN, num_layers=4, vace_layers=[0, 2], vace_in_channels=8),
        lambda: _dit(_video(), control_hidden_states=_video(8)),
    ),
    # autoencoders
    "AutoencoderKL": (
        _cat(KL, down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2), _pixels(),
    ),
    "AsymmetricAutoencoderKL": (
        {
            "norm_num_groups": 4, "down_block_types": ("DownEncoderBlock2D",) * 2,
            "up_block_types": ("UpDecoderBlock2D",) * 2, "down_block_out_channels": (8, 16),
            "up_block_out_channels": (8, 16), "layers_per_down_block": 2, "layers_per_up_block": 2,
        },
        lambda: {"sample": _image(3, 16), "mask": ones(2, 1, 16, 16)},
    ),
    "AutoencoderKLTemporalDecoder": (
        {"block_out_channels": (32, 64), "layers_per_block": 2, "down_block_types": ("DownEncoderBlock2D",) * 2},
        lambda: {"sample": _image(3, 16), "num_frames": 2},
    ),
    "VQModel": (
        _cat(KL, down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2), _pixels(),
    ),
    "AutoencoderDC": (
        {
            "latent_channels": 4, "attention_head_dim": 4, "encoder_block_types": ("ResBlock", "EfficientViTBlock"),
            "decoder_block_types": ("ResBlock", "EfficientViTBlock"), "encoder_block_out_channels": (8, 16),
            "decoder_block_out_channels": (8, 16), "encoder_layers_per_block": (2, 2),
            "decoder_layers_per_block": (2, 2), "encoder_qkv_multiscales": ((), (5,)),
            "decoder_qkv_multiscales": ((), (5,)),
        },
        _pixels(),
    ),
    "AutoencoderKLCosmos": (
        {
            "latent_channels": 4, "encoder_block_out_channels": (8, 16), "decode_block_out_channels": (8, 16),
            "attention_resolutions": (8,), "resolution": 16, "patch_size": 2, "spatial_compression_ratio": 4,
            "temporal_compression_ratio": 4, "latents_mean": [0.0] * 4, "latents_std": [1.0] * 4,
        },
        _pixels(9, 32),
    ),
    "AutoencoderKLHunyuanImage": (
        {
            "in_channels": 3, "out_channels": 3, "latent_channels": 4, "block_out_channels": (32, 64),
            "layers_per_block": 2, "spatial_compression_ratio": 2, "sample_size": 16,
        },
        _pixels(),
    ),
    "AutoencoderKLHunyuanImageRefiner": (
        {
            "latent_channels": 4, "block_out_channels": (16, 16, 32), "spatial_compression_ratio": 4,
            "temporal_compression_ratio": 2,
        },
        _pixels(5),
    ),
    "AutoencoderKLHunyuanVideo15": (
        {
            "latent_channels": 4, "block_out_channels": (16, 16, 32), "spatial_compression_ratio": 4,
            "temporal_compression_ratio": 2,
        },
        lambda: {"sample": randn(1, 3, 5, 16, 16)},
    ),
    "AutoencoderKLKVAE": ({"channels": 32, "z_channels": 4, "ch_mult": (1, 2)}, _pixels()),
    "AutoencoderKLKVAEVideo": ({"ch": 32, "z_channels": 4, "ch_mult": (1, 2)}, _pixels(5)),
    "AutoencoderKLLTXVideo": (
        {
            "latent_channels": 4, "block_out_channels": (8, 16), "down_block_types": ("LTXVideoDownBlock3D",) * 2,
            "decoder_block_out_channels": (8, 16), "layers_per_block": (2, 2, 2),
            "decoder_layers_per_block": (2, 2, 2), "spatio_temporal_scaling": (True, False),
            "decoder_spatio_temporal_scaling": (True, False), "decoder_inject_noise": (False, False, False),
            "downsample_type": ("conv", "conv"), "upsample_residual": (False, False), "upsample_factor": (1, 1),
            "patch_size": 2,
        },
        _pixels(5),
    ),
    "AutoencoderKLMagvit": (
        {
            "latent_channels": 4, "block_out_channels": [8, 16], "norm_num_groups": 4,
            "down_block_types": ["SpatialDownBlock3D", "SpatialTemporalDownBlock3D"],
            "up_block_types": ["SpatialUpBlock3D", "SpatialTemporalUpBlock3D"],
        },
        _pixels(5),
    ),
    "AutoencoderKLMochi": (
        {
            "latent_channels": 4, "encoder_block_out_channels": (32, 32, 32, 32),
            "decoder_block_out_channels": (32, 32, 32, 32), "layers_per_block": (2, 2, 2, 2, 2),
            "latents_mean": [0.0] * 4, "latents_std": [1.0] * 4,
        },
        _pixels(6, 8),
    ),
    "AutoencoderKLQwenImage": (
        {
            "base_dim": 8, "z_dim": 4, "dim_mult": [1, 2], "temperal_downsample": [True], "latents_mean": [0.0] * 4,
            "latents_std": [1.0] * 4,
        },
        _pixels(5),
    ),
    "AutoencoderKLWan": (
        {
            "base_dim": 8, "z_dim": 4, "dim_mult": [1, 2], "temperal_downsample": [True], "latents_mean": [0.0] * 4,
            "latents_std": [1.0] * 4, "scale_factor_temporal": 2, "scale_factor_spatial": 2,
        },
        _pixels(5),
    ),
    "AutoencoderOobleck": (
        {
            "encoder_hidden_size": 8, "downsampling_ratios": [2, 4], "channel_multiples": [1, 2],
            "decoder_channels": 8, "decoder_input_channels": 4,
        },
        lambda: {"sample": randn(2, 2, 64)},
    ),
    "AutoencoderSAME": (
        {
            "patch_size": 4, "encoder_channels": 16, "encoder_c_mults": (2,), "encoder_strides": (4,),
            "encoder_transformer_depths": (2,), "latent_dim": 8, "dim_heads": 16,
        },
        lambda: {"sample": randn(2, 2, 64)},
    ),
    "AutoencoderVidTok": ({"ch": 32, "ch_mult": [1, 2], "num_res_blocks": 2}, _pixels(5)),
    "ConsistencyDecoderVAE": (
        {
            "encoder_block_out_channels": (8, 16), "encoder_down_block_types": ("DownEncoderBlock2D",) * 2,
            "encoder_norm_num_groups": 4, "decoder_block_out_channels": (8, 16),
            "decoder_down_block_types": ("ResnetDownsampleBlock2D",) * 2,
            "decoder_up_block_types": ("ResnetUpsampleBlock2D",) * 2, "decoder_norm_num_groups": 4,
            "decoder_layers_per_block": 2,
        },
        _pixels(),
    ),
    "T2IAdapter": ({"channels": [8, 16, 16, 16]}, lambda: {"x": _image(3, 64)}),
}

# The smallest model of each file of timm and of some families that share a file; settings if it is still large.
VIT = {"embed_dim": 32, "depth": 2, "num_heads": 2}
STAGES = {"embed_dim": 16, "depths": (1, 1, 2, 1), "num_heads": (1, 2, 2, 2)}
TIMM: dict[str, dict[str, Any]] = (
    {
        key: {}
        for key in (
            "bat_resnext26ts", "botnet26t_256", "coat_lite_tiny", "coatnet_pico_rw_224", "convnext_atto",
            "cpubone_nano", "crossvit_9_240", "csatv2", "cs3darknet_focus_s", "cspnext_tiny", "densenet121", "dla46_c",
            "dpn48b", "ecaresnext26t_32x4d", "edgenext_xx_small", "efficientformer_l1", "efficientformerv2_s0",
            "efficientnet_b0", "efficientvim_m1", "efficientvit_b0", "efficientvit_m0", "ese_vovnet19b_slim_dw",
            "fasternet_t0", "fastvit_t8", "fbnetc_100", "fbnetv3_b", "gcresnext26ts", "gcvit_xxtiny", "gernet_s",
            "ghostnet_050", "halonet26t", "hardcorenas_a", "hgnetv2_b0", "hrnet_w18_small", "iformer_t",
            "inception_next_atto", "caformer_s18", "focalnet_tiny_srf", "gmlp_ti16_224", "mixer_s32_224",
            "mvitv2_tiny", "resmlp_12_224", "lambda_resnet26t", "lcnet_035", "lcnetv2_small", "legacy_seresnet18",
            "legacy_xception", "levit_128s", "lowformer_b0", "mambaout_femto", "maxvit_pico_rw_256", "mixnet_s",
            "mnasnet_small", "mobilenetv1_100", "mobilenetv2_035", "mobilenetv3_small_050", "mobilenetv4_conv_small",
            "mobileone_s0", "mobilevit_xxs", "mobilevitv2_050", "nest_tiny", "nextvit_small", "nf_resnet26",
            "pit_ti_224", "poolformer_s12", "pvt_v2_b0", "rdnet_tiny", "regnetx_002", "regnety_002", "repghostnet_050",
            "repvgg_a0", "repvit_m0_9", "res2net50_14w_8s", "resnest14d", "resnet10t", "resnetv2_18", "rexnet_100",
            "rexnetr_100", "sebotnet33ts_256", "selecsls42b", "semnasnet_050", "sequencer2d_s", "shvit_s1",
            "skresnet18", "spnasnet_100", "starnet_s050", "swiftformer_xs", "tf_efficientnetv2_b0", "tinynet_e",
            "tiny_vit_5m_224", "tresnet_m", "visformer_tiny", "xception41",
        )
    }
    | dict.fromkeys(
        (
            "beit_base_patch16_224", "cait_xxs24_224", "convit_tiny", "deit_tiny_patch16_224",
            "deit3_small_patch16_224", "deit_tiny_distilled_patch16_224", "eva02_tiny_patch14_224",
            "vit_tiny_patch16_224", "vit_relpos_small_patch16_224", "samvit_base_patch16_224", "xcit_nano_12_p8_224",
            "aimv2_large_patch14_224", "vit_srelpos_small_patch16_224", "naflexvit_base_patch16_gap", "qwen3_vit_88m",
            "gemma4_vit_167m", "deepseek_vit_412m", "vit_tiny_r_s16_p8_224",
        ),
        VIT,
    )
    | {
        "davit_tiny": {"depths": (1, 1, 2, 1), "embed_dims": (16, 32, 32, 32), "num_heads": (1, 2, 2, 2)},
        "hiera_tiny_224": {"embed_dim": 16, "stages": (1, 1, 2, 1)},
        "sam2_hiera_tiny": {"embed_dim": 16, "num_heads": 1, "stages": (1, 1, 2, 1), "global_att_blocks": (3,)},
        "swin_tiny_patch4_window7_224": STAGES, "swin_s3_tiny_224": STAGES, "swinv2_tiny_window8_256": STAGES,
        "swinv2_cr_tiny_224": STAGES,
        "tnt_s_patch16_224": {"embed_dim": 32, "depth": 2, "num_heads_inner": 2, "num_heads_outer": 2},
        "twins_svt_small": {"embed_dims": (16, 32, 32, 32), "depths": (1, 1, 2, 2), "num_heads": (1, 2, 2, 2)},
        "twins_pcpvt_small": {"embed_dims": (16, 32, 32, 32), "depths": (1, 1, 2, 1), "num_heads": (1, 2, 2, 2)},
    }
)

# Settings in place of those that the rule of `shrunk` makes.
WAVES = {"conv_dim": (16, 16, 16), "conv_stride": (5, 2, 2), "conv_kernel": (10, 3, 3), "num_feat_extract_layers": 3}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_expand": 2, "mamba_n_groups": 1}
LATENT_HEADS = {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "head_dim": 8, "num_key_value_heads": 4}
TRANSFORMERS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        (
            "data2vec-audio", "hubert", "unispeech", "unispeech-sat", "wav2vec2", "wav2vec2-conformer", "wavlm", "sew",
            "sew-d",
        ),
        WAVES,
    ),
    **dict.fromkeys(("bamba", "granitemoehybrid"), MAMBA),
    "falcon_h1": MAMBA | {"mamba_d_ssm": 64},
    **dict.fromkeys(("axk1", "deepseek_v3", "deepseek_v32"), LATENT_HEADS),
    **{key: {"decoder_start_token_id": 0} for key in ("t5", "longt5", "switch_transformers")},
    **{key: {"head_dim": 8} for key in ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral")},
    **{key: {"window_size": 2, "patch_size": 2} for key in ("swin", "donut-swin")},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "gemma4_text": {"vocab_size_per_layer_input": 99},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "laguna": {"num_attention_heads_per_layer": [4, 4]},
    "layoutlmv3": {"coordinate_size": 6, "shape_size": 4, "visual_embed": False},
    "led": {"attention_window": 8, "max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lilt": {"hidden_size": 48},
    "markuplm": {"max_xpath_tag_unit_embeddings": 256, "max_xpath_subs_unit_embeddings": 1024},
    "mobilebert": {"intra_bottleneck_size": 32, "embedding_size": 32},
    "nemotron": {"num_key_value_heads": 4},
    "reformer": {
        "is_decoder": True, "axial_pos_embds_dim": (16, 16), "axial_pos_shape": (4, 4),
        "attn_layers": ["local", "lsh"],
    },
    "wav2vec2-bert": {"feature_projection_input_dim": 80},
    "xlnet": {"d_model": 32, "n_head": 4, "d_head": 8},
    "xmod": {"default_language": "en_XX"},
}
