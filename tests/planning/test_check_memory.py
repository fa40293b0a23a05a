"""The command `ckpt-ft check` refuses a model or batch that cannot fit before it loads weights."""

from __future__ import annotations

from dataclasses import replace
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


def test_check_without_memory_for_the_batch_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes of the step come exactly from its trace; a check holds the gradients twice."""
    path = write_config(tmp_path, CONFIG)
    settings, cpu = TrainingSpec.of(seq_length=8), check.torch.device("cpu")
    workload = check.load(settings.edit(model=path), "cpu")
    card = replace(workload, device=check.find_gpu("a100-80gb"), make_optimizer=None)
    needed = card.trace(64).peak_allocated + 4 * PARAMETERS
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=needed))
    assert check._check_batch("m", workload, 64, cpu) == []
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=needed - 1))
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda **kwargs: None)
    monkeypatch.setattr(check, "_with_weights", lambda *args: pytest.fail("it was loaded"))
    with pytest.raises(UserError, match="a check of batch 64 takes about .* check a smaller batch"):
        check.check_model(settings.edit(model=path, policy="full", batch_size=64), 0)


def test_model_that_cannot_be_traced_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_config(tmp_path, CONFIG)

    def untraceable(*args: object, **kwargs: object) -> None:
        raise NotImplementedError("aten.odd\nhas no fake kernel")

    monkeypatch.setattr(check.Workload, "trace", untraceable)
    parity = check.check_model(TrainingSpec.of(path, policy="full", batch_size=1, seq_length=8), 0)
    assert parity.ok
    assert (
        "note: a step cannot be traced, so whether it fits is not known: aten.odd has no fake kernel" in parity.notes
    )
