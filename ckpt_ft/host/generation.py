"""A script's `generate`: tokens are not known, so the longest answer is generated, by its first and last tokens."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from ckpt_ft.compat.tensors import FakeTensor


def generate_longest(note: Callable[[str], None]) -> None:
    """Replace `generate` of transformers' models in this process; `note` is told how many tokens an answer has."""
    try:
        from transformers import GenerationMixin
        from transformers.generation import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

        from ckpt_ft.workloads.phases import generate
    except ImportError:  # missing, or broken on this machine: no script uses it
        return

    own = GenerationMixin.generate

    def longest(model: Any, inputs: Any = None, generation_config: Any = None, **given: Any) -> Any:
        if GenerationMixin.generate is not longest or type(next(model.parameters())) is not FakeTensor:
            return own(model, inputs, generation_config, **given)  # called by `generate` below, or with numbers
        settings = copy.deepcopy(generation_config or model.generation_config)
        given = settings.update(**given)
        for name in (
            "logits_processor",
            "stopping_criteria",
            "streamer",
            "synced_gpus",
            "custom_generate",
            "tokenizer",
        ):
            given.pop(name, None)
        if inputs is not None:
            given[model.main_input_name] = inputs
        prompt = 1 if model.config.is_encoder_decoder else given[model.main_input_name].shape[1]
        tokens = settings.max_new_tokens or max((settings.max_length or 20) - prompt, 1)
        note(f"text is generated: every answer is taken to have {tokens} tokens, the most that the script allows")
        asked = settings.return_dict_in_generate
        GenerationMixin.generate = own
        try:
            sequences = generate(model, settings, tokens, **given)
        finally:
            GenerationMixin.generate = longest
        kind = GenerateEncoderDecoderOutput if model.config.is_encoder_decoder else GenerateDecoderOnlyOutput
        return kind(sequences=sequences) if asked else sequences

    GenerationMixin.generate = longest
