"""Writes configurations of models for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99, "max_position_embeddings": 2048,
}  # fmt: skip


def write_config(folder: Path, config: dict[str, Any]) -> str:
    """Writes `config` to config.json in `folder` and returns the file's path."""
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return str(path)
