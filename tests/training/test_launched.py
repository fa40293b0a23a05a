"""The launch of the current process, and refusals under several processes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate.utils import FullyShardedDataParallelPlugin
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.distributed import DistributedConfig
from versions import is_older

from ckpt_ft.checkpointing.apply import apply_policy
from ckpt_ft.errors import UserError
from ckpt_ft.spec.launch import Launch
from ckpt_ft.training import fit
from ckpt_ft.training.arguments import ACArguments
from ckpt_ft.training.fit import launch_of
from ckpt_ft.training.text import PadCollator
from ckpt_ft.workloads.from_trainer import precision_of
from ckpt_ft.workloads.workload import Workload

ROWS = [{"input_ids": [1] * 8, "labels": [1] * 8}]


@pytest.fixture
def second_of_four(monkeypatch: pytest.MonkeyPatch) -> None:
    state = SimpleNamespace(num_processes=4, process_index=1, is_main_process=False)
    monkeypatch.setattr(fit, "PartialState", lambda: state)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")


def arguments(tmp_path: Path, **more: Any) -> TrainingArguments:
    return TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], **more)


def accelerator(precision: str = "no", handler: Any = None, **plugins: Any) -> Any:
    """Returns the accelerator of one of four processes, as a Trainer creates it."""
    return SimpleNamespace(
        num_processes=4, mixed_precision=precision, ddp_handler=handler, parallelism_config=None,
        state=SimpleNamespace(**plugins),
    )  # fmt: skip


def test_one_process_is_no_launch(tmp_path: Path) -> None:
    assert launch_of(trainer(arguments(tmp_path), 16, 1, 32).accelerator, prepared=False) is None


@pytest.mark.usefixtures("second_of_four")
def test_settings_of_accelerate_launch_become_a_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = {"processes": 4, "machines": 2, "rank": 1}
    for asked, found in ((None, True), (False, False)):
        args = arguments(tmp_path, ddp_find_unused_parameters=asked)
        handler = trainer(args, 16, 1, 32).accelerator.ddp_handler
        assert launch_of(accelerator(handler=handler)) == Launch("ddp", find_unused_parameters=found, **where)
    for name, value in {
        "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "false", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "LlamaDecoderLayer",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    sharded = Launch(
        "fsdp2", mixed_precision="bf16", reshard_after_forward=False, wrap=("LlamaDecoderLayer",), **where
    )
    assert launch_of(accelerator("bf16", fsdp_plugin=FullyShardedDataParallelPlugin())) == sharded
    monkeypatch.setenv("FSDP_AUTO_WRAP_POLICY", "NO_WRAP")
    assert launch_of(accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())).wrap is None  # type: ignore[union-attr]
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "true")
    assert launch_of(accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())).offload_params  # type: ignore[union-attr]
    monkeypatch.setenv("FSDP_AUTO_WRAP_POLICY", "SIZE_BASED_WRAP")
    with pytest.raises(UserError, match="wraps modules by their size is not modelled"):
        launch_of(accelerator(fsdp_plugin=FullyShardedDataParallelPlugin()))


@pytest.mark.usefixtures("second_of_four")
def test_distributed_config_of_older_transformers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "parallel_plans", None)  # as transformers before 5.23
    model = SimpleNamespace(config=SimpleNamespace(distributed_config=DistributedConfig(tp_size=4)))
    with pytest.raises(UserError, match="what transformers divides is predicted from transformers 5.23 on"):
        launch_of(accelerator(), model=model)


@pytest.mark.skipif(is_older("transformers", "5.23"), reason="its DistributedConfig has other fields; it is refused")
@pytest.mark.usefixtures("second_of_four")
def test_distributed_config_of_a_model_becomes_a_launch() -> None:
    where = {"processes": 4, "machines": 2, "rank": 1}

    def launch(precision: str = "no", **config: Any) -> Launch | None:
        model = SimpleNamespace(config=SimpleNamespace(distributed_config=DistributedConfig(**config)))
        return launch_of(accelerator(precision), model=model)

    assert launch(fsdp_size=4, ep_size=2) == Launch("fsdp2", ep=2, **where)
    assert launch(tp_size=2, fsdp_size=2, ep_size=4) == Launch("fsdp2", tp=2, ep=4, **where)
    assert launch(tp_size=4) == launch(tp_size=4, tp_plan="auto") == Launch("ddp", tp=4, **where)
    half = launch("bf16", fsdp_size=2, dp_replicate_size=2, ep_size=2, fsdp_mixed_precision=True)
    assert half == Launch("fsdp2", mixed_precision="bf16", dp_replicate=2, ep=2, **where)
    for precision, other in (
        ("bf16", {}), ("no", {"fsdp_mixed_precision": True}), ("no", {"fsdp_cpu_offload": True}),
        ("no", {"ep_implementation": "all_reduce"}),
    ):  # fmt: skip
        with pytest.raises(UserError, match="ep_size are predicted, fsdp_mixed_precision under bf16, and no others"):
            launch(precision, fsdp_size=4, ep_size=2, **other)


@pytest.mark.usefixtures("second_of_four")
def test_deepspeed_launch_is_modelled_before_the_engine_exists() -> None:
    zero = {"stage": 2, "reduce_bucket_size": 1000, "offload_optimizer": {"device": "none"}}
    ours = accelerator(deepspeed_plugin=SimpleNamespace(zero_stage=2, deepspeed_config={"zero_optimization": zero}))
    ahead = launch_of(ours, prepared=False)
    assert ahead is not None
    assert (ahead.strategy, ahead.zero.reduce_bucket_size) == ("zero2", 1000)
    zero["offload_optimizer"] = {"device": "cpu"}
    assert launch_of(ours, prepared=False).zero.offload_optimizer  # type: ignore[union-attr]
    with pytest.raises(UserError, match="what DeepSpeed's engine has made of model and optimizer is not traced"):
        launch_of(ours)


def test_precision_of_the_launcher_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert precision_of(arguments(tmp_path)) == "no"
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert precision_of(arguments(tmp_path)) == "bf16"
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    with pytest.raises(UserError, match="mixed precision 'fp8' of the launch: no, bf16, fp16 are modelled"):
        precision_of(arguments(tmp_path))


@pytest.mark.slow
@pytest.mark.usefixtures("second_of_four")
def test_largest_batch_of_a_sharded_model_is_predicted_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No step runs before the model is sharded."""
    monkeypatch.setattr(fit, "found_by_main", lambda find: find())
    settings = ACArguments(ac_policy="full", ac_budget="3MiB", find_max_batch_size=True)
    args = arguments(tmp_path, per_device_train_batch_size=64)
    workload = Workload.from_trainer(trainer(args, 64, 2, 512))
    fitted = fit.fit(workload, args, settings, args.device, lambda: Launch("fsdp2", 4))
    assert fitted.largest is not None
    assert not fitted.largest.trials
    apply_policy(workload.model, "full")
    below, above = (fitted.workload.trace(fitted.largest.batch + more).peak_allocated for more in (0, 4))
    assert below <= 0.95 * 3 * 2**20 < above  # 5 % of a CPU's budget is left for the loop


def trainer(args: TrainingArguments, width: int, layers: int, vocabulary: int) -> Trainer:
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=width,
        num_hidden_layers=layers,
        num_attention_heads=2,
        vocab_size=vocabulary,
    )
    return Trainer(LlamaForCausalLM(config), args, train_dataset=ROWS, data_collator=PadCollator(0))
