"""The command `ckpt-ft check` refuses a model that cannot fit before it loads weights."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from model_configs import write_config

from ckpt_ft.errors import UserError
from ckpt_ft.planning import check
from ckpt_ft.spec.training_spec import TrainingSpec

CONFIG = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
CONFIG |= {"num_attention_heads": 2, "vocab_size": 64, "architectures": ["LlamaForCausalLM"]}
PARAMETERS = 2 * 64 * 16 + 2 * (4 * 16 * 16 + 3 * 16 * 32 + 2 * 16) + 16


@pytest.mark.parametrize("spare", [0, -1])
def test_check_without_memory_for_weights_and_two_gradients_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spare: int
) -> None:
    path = write_config(tmp_path, CONFIG)
    free = SimpleNamespace(available=3 * 4 * PARAMETERS + spare)
    monkeypatch.setattr("psutil.virtual_memory", lambda: free)
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda **kwargs: None)
    monkeypatch.setattr(check, "_with_weights", lambda *args: pytest.fail("it was loaded"))
    if spare < 0:
        with pytest.raises(UserError, match="a check needs .* for weights and gradients alone"):
            check.check_model(TrainingSpec.of(path, policy="full", batch_size=1, seq_length=8), 0)
    else:
        check._check_room("m", check.load(TrainingSpec.of(path, seq_length=8), "cpu").model, check.torch.device("cpu"))
