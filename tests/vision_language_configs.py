"""Tiny configurations of vision-language models, one per family."""

from __future__ import annotations

TEXT = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 512, "head_dim": 8,
}  # fmt: skip
ROPE = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10_000.0}
SIGHT = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
GRID = {"depth": 1, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_heads": 2}
QWEN2 = {
    "model_type": "qwen2_vl", "image_token_id": 7, "video_token_id": 8, "vision_start_token_id": 9,
    "text_config": {**TEXT, "rope_parameters": ROPE},
    "vision_config": {**GRID, "embed_dim": 16, "hidden_size": 16, "mlp_ratio": 2},
}  # fmt: skip
QWEN25 = {
    **QWEN2, "model_type": "qwen2_5_vl",
    "vision_config": {**GRID, "hidden_size": 16, "out_hidden_size": 16, "intermediate_size": 32, "window_size": 56},
}  # fmt: skip
QWEN3 = {
    **QWEN2, "model_type": "qwen3_vl",
    "vision_config": {
        **GRID, "hidden_size": 16, "out_hidden_size": 16, "intermediate_size": 32, "patch_size": 16,
        "deepstack_visual_indexes": [0], "num_position_embeddings": 16,
    },
}  # fmt: skip
GEMMA = {
    "model_type": "gemma3", "image_token_index": 7, "mm_tokens_per_image": 4,
    "text_config": {"model_type": "gemma3_text", **TEXT},
    "vision_config": {"model_type": "siglip_vision_model", **SIGHT, "image_size": 32, "patch_size": 8},
}  # fmt: skip
LLAVA = {
    "model_type": "llava", "image_token_index": 7, "vision_feature_layer": -1,
    "vision_feature_select_strategy": "default", "text_config": {"model_type": "llama", **TEXT},
    "vision_config": {"model_type": "clip_vision_model", **SIGHT, "image_size": 32, "patch_size": 8},
}  # fmt: skip
IDEFICS3 = {
    "model_type": "idefics3", "image_token_id": 7, "scale_factor": 2, "text_config": {"model_type": "llama", **TEXT},
    "vision_config": {"model_type": "idefics3_vision", **SIGHT, "image_size": 32, "patch_size": 8},
}  # fmt: skip
INTERN = {
    "model_type": "internvl", "image_token_id": 7, "image_seq_length": 4,
    "text_config": {"model_type": "llama", **TEXT},
    "vision_config": {
        "model_type": "internvl_vision", **SIGHT, "image_size": [32, 32], "patch_size": [8, 8],
    },
}  # fmt: skip
LLAVA_NEXT = {**LLAVA, "model_type": "llava_next", "image_grid_pinpoints": [[32, 32], [32, 64]]}
ONEVISION = {
    **LLAVA_NEXT, "model_type": "llava_onevision", "vision_feature_select_strategy": "full",
    "text_config": {"model_type": "qwen2", **TEXT},
    "vision_config": {"model_type": "siglip_vision_model", **SIGHT, "image_size": 32, "patch_size": 8},
}  # fmt: skip
IDEFICS2 = {
    "model_type": "idefics2", "image_token_id": 7, "text_config": {"model_type": "mistral", **TEXT},
    "perceiver_config": {
        "resampler_n_latents": 4, "resampler_depth": 1, "resampler_n_heads": 2, "resampler_head_dim": 8,
        "num_key_value_heads": 1, "hidden_size": 16,
    },
    "vision_config": {"model_type": "idefics2_vision", **SIGHT, "image_size": 32, "patch_size": 8},
}  # fmt: skip
MISTRAL3 = {
    "model_type": "mistral3", "image_token_index": 7, "spatial_merge_size": 2,
    "text_config": {"model_type": "mistral", **TEXT},
    "vision_config": {"model_type": "pixtral", **SIGHT, "image_size": 64, "patch_size": 8, "head_dim": 8},
}  # fmt: skip
AYA = {
    "model_type": "aya_vision", "image_token_index": 7, "downsample_factor": 2, "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full", "text_config": {"model_type": "cohere2", **TEXT, "eos_token_id": 2},
    "vision_config": {"model_type": "siglip_vision_model", **SIGHT, "image_size": 32, "patch_size": 8},
}  # fmt: skip
GLM = {
    "model_type": "glm4v", "image_token_id": 7, "image_start_token_id": 10, "image_end_token_id": 11,
    "video_start_token_id": 12, "video_end_token_id": 13,
    "text_config": {
        **TEXT, "head_dim": 16, "pad_token_id": 0, "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5},
    },
    "vision_config": {
        "depth": 1, "hidden_size": 16, "out_hidden_size": 16, "intermediate_size": 32, "num_heads": 2,
        "image_size": 56, "patch_size": 14,
    },
}  # fmt: skip
MLLAMA = {
    "model_type": "mllama", "image_token_index": 7,
    "text_config": {
        **TEXT, "cross_attention_layers": [1], "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "pad_token_id": 0,
    },
    "vision_config": {
        "hidden_size": 16, "attention_heads": 2, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_global_layers": 1, "image_size": 28, "patch_size": 14, "intermediate_layers_indices": [0],
        "vision_output_dim": 32,
    },
}  # fmt: skip
# Class, configuration, and tokens of an image of 100 x 60 pixels, computed by hand from the processor's rules.
SEEING = {
    "qwen2_vl": ("Qwen2VLForConditionalGeneration", QWEN2, 8),  # 56 x 112 pixels: 4 x 8 patches, merged 2 x 2
    "qwen2_5_vl": ("Qwen2_5_VLForConditionalGeneration", QWEN25, 8),
    "qwen3_vl": ("Qwen3VLForConditionalGeneration", QWEN3, 6),  # 64 x 96: 4 x 6 patches
    "gemma3": ("Gemma3ForConditionalGeneration", GEMMA, 4),  # for any image
    "llava": ("LlavaForConditionalGeneration", LLAVA, 16),  # 32 x 32 pixels in patches of 8 x 8
    # 128 x 77 pixels in tiles of 32: 4 x 3 tiles and the whole image, of 2 x 2 tokens each
    "idefics3": ("Idefics3ForConditionalGeneration", IDEFICS3, 13 * 4),
    "smolvlm": ("SmolVLMForConditionalGeneration", {**IDEFICS3, "model_type": "smolvlm"}, 13 * 4),
    "internvl": ("InternVLForConditionalGeneration", INTERN, 7 * 4),  # 3 x 2 tiles and the whole image
    "aya_vision": ("AyaVisionForConditionalGeneration", AYA, 7 * 4),
    "idefics2": ("Idefics2ForConditionalGeneration", IDEFICS2, 4),  # the latents of its resampler
    # for several images: the whole image and a newline token
    "llava_onevision": ("LlavaOnevisionForConditionalGeneration", ONEVISION, 17),
    "mllama": ("MllamaForConditionalGeneration", MLLAMA, 1),  # image features go to cross-attention, not into the text
}
