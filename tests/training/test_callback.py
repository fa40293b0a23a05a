"""ACCallback in ordinary scripts: a plain Trainer, TRL's SFTTrainer, and refusals."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from accelerate.state import AcceleratorState
from datasets import Dataset
from torch.utils._python_dispatch import _get_current_dispatch_mode
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from versions import is_older

from ckpt_ft.checkpointing.apply import applied_policy, apply_policy
from ckpt_ft.checkpointing.verify import VerificationError
from ckpt_ft.errors import UserError, WorkFailed
from ckpt_ft.memory.gpus import find_gpu
from ckpt_ft.planning.plan import plan
from ckpt_ft.policy import Policy
from ckpt_ft.standins.optimizers import LAYOUTS
from ckpt_ft.training.arguments import ACArguments
from ckpt_ft.training.callback import ACCallback
from ckpt_ft.training.session import FALLBACK_POLICIES, Session, advise_on_oom, cheaper_policies
from ckpt_ft.workloads.workload import Workload

ROWS = Dataset.from_list([{"input_ids": [1 + (i * 7 + j) % 60 for j in range(12)]} for i in range(16)]).map(
    lambda row: {"labels": row["input_ids"]}
)

# TRL's configs enable the library's checkpointing; transformers 5.23 renamed the argument.
_OWN = "activation" if hasattr(TrainingArguments, "activation_checkpointing") else "gradient"
OFF = {f"{_OWN}_checkpointing": False}
TRAINS_ON_CPU = pytest.mark.skipif(is_older("trl", "1.16"), reason="the fused head of older TRLs needs a GPU")


def tiny() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2,
            num_key_value_heads=2, attention_dropout=0.1,
        )
    )  # fmt: skip


def arguments(out: Path, **kwargs: Any) -> TrainingArguments:
    fields = {"max_steps": 3, "logging_steps": 1, "per_device_train_batch_size": 4, "save_strategy": "no"}
    return TrainingArguments(str(out), use_cpu=True, disable_tqdm=True, **(fields | kwargs))


def losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_policy_in_a_trainer_script_takes_three_lines(tmp_path: Path) -> None:
    plain = Trainer(model=tiny(), args=arguments(tmp_path / "plain"), train_dataset=ROWS)
    plain.train()

    from ckpt_ft.training.callback import ACCallback

    trainer = Trainer(model=tiny(), args=arguments(tmp_path / "policy"), train_dataset=ROWS)
    callback = ACCallback("full").attach(trainer)
    trainer.train()

    assert len(losses(trainer)) == 3
    assert losses(trainer) == losses(plain)
    assert callback.report is not None
    assert trainer.model.state_dict().keys() == plain.model.state_dict().keys()
    assert not any("forward" in vars(module) for module in trainer.model.modules())  # the policy is removed again


def test_trackers_get_the_figures_of_the_report(tmp_path: Path) -> None:
    sent: list[dict[str, float]] = []

    class Tracker(TrainerCallback):
        def on_log(self, *args: Any, logs: dict[str, float], **kwargs: Any) -> None:
            sent.append(dict(logs))

    peaks = {}
    for policy in ("none", "full"):
        sent.clear()
        trainer = Trainer(model=tiny(), args=arguments(tmp_path / policy), train_dataset=ROWS, callbacks=[Tracker()])
        report = ACCallback(ACArguments(ac_policy=policy, ac_report="json")).attach(trainer)
        trainer.train()
        assert report.report is not None
        (rank,) = report.report.ranks
        logged = [entry["memory/backward_gib"] for entry in sent if "loss" in entry]
        assert max(logged) * 2**30 == rank.peaks["backward"]["allocated"]
        assert "memory/backward_gib" not in sent[-1]  # the final summary is no step
        peaks[policy] = rank.peaks["forward"]["allocated"]
        assert [path.name for path in (tmp_path / policy).glob("memory_report.*")] == ["memory_report.json"]
    assert peaks["full"] < 0.8 * peaks["none"]


def test_blocks_are_rerun_during_training_only(tmp_path: Path) -> None:
    model = tiny()
    trainer = Trainer(model=model, args=arguments(tmp_path), train_dataset=ROWS)
    ACCallback(ACArguments(ac_policy="every:2", ac_report="none")).attach(trainer)
    count = Mock(return_value=None)  # the policy would restore a variable of ours for the second run
    for layer in model.model.layers:
        layer.input_layernorm.register_forward_pre_hook(count)
    trainer.train()
    assert count.call_count == 3 * (3 + 2)  # three steps; the first and third of three blocks run twice
    count.reset_mock()
    trainer.evaluate(ROWS.select(range(4)))
    assert count.call_count == 3


def test_parity_check_runs_first_and_does_not_change_training(tmp_path: Path, capsys: Any) -> None:
    plain = Trainer(model=tiny(), args=arguments(tmp_path / "plain"), train_dataset=ROWS)
    plain.train()
    model = tiny().eval()  # as from_pretrained returns it
    modes = []
    model.register_forward_pre_hook(lambda module, args: modes.append(module.training))
    trainer = Trainer(model=model, args=arguments(tmp_path / "checked"), train_dataset=ROWS)
    ACCallback(ACArguments(ac_policy="full", ac_check=True, ac_report="none")).attach(trainer)
    trainer.train()
    assert losses(trainer) == losses(plain)
    assert "parity of policy full" in capsys.readouterr().out
    assert len(modes) > 3
    assert all(modes)  # else dropout is not checked


class Scaled(torch.nn.Module):
    """Reads a scale from the environment, which no policy restores; the trainer sets it around forward."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x * float(os.environ["SCALE"]))


def test_failed_verification_leaves_weights_and_forwards_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCALE", "1.0")

    class Scaling(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            os.environ["SCALE"] = "0.5"
            loss = super().compute_loss(*args, **kwargs)
            os.environ["SCALE"] = "1.0"
            return loss

    model = tiny()
    for layer in model.model.layers:
        layer.mlp.down_proj = Scaled(layer.mlp.down_proj)
    before = [p.detach().clone() for p in model.parameters()]
    trainer = Scaling(model=model, args=arguments(tmp_path), train_dataset=ROWS)
    ACCallback(ACArguments(ac_policy="full", ac_report="none")).attach(trainer)
    with pytest.raises(VerificationError):
        trainer.train()
    assert all(map(torch.equal, model.parameters(), before))
    assert not any("forward" in vars(module) for module in model.modules())


def test_failed_parity_check_stops_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckpt_ft.checkpointing import parity

    row = parity.Row("loss", "1", "2", 1.0, same=False)
    monkeypatch.setattr("ckpt_ft.training.session.check_parity", lambda *args, **kwargs: parity.Parity("full", [row]))
    trainer = Trainer(model=tiny(), args=arguments(tmp_path), train_dataset=ROWS)
    ACCallback(ACArguments(ac_policy="full", ac_check=True)).attach(trainer)
    with pytest.raises(WorkFailed, match="policy full changes the numbers of a step"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_parity_check_is_refused_under_deepspeed(tmp_path: Path) -> None:
    trainer = Trainer(model=tiny(), args=arguments(tmp_path), train_dataset=ROWS)
    ACCallback(ACArguments(ac_policy="full", ac_check=True)).attach(trainer)
    trainer.args.deepspeed_plugin = object()
    with pytest.raises(UserError, match="drop --ac_check, and run `ckpt-ft check MODEL --policy full` in one process"):
        trainer.train()
    assert trainer.state.global_step == 0


@pytest.mark.parametrize(
    ("flag", "attached"),
    [
        ("gradient_checkpointing", True),
        pytest.param("gradient_checkpointing", False, marks=pytest.mark.slow),
        pytest.param("activation_checkpointing", True, marks=pytest.mark.slow),
        ("activation_checkpointing", False),
    ],
)
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing:FutureWarning")
def test_policy_replaces_the_librarys_checkpointing(
    tmp_path: Path, flag: str, attached: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """TRL's configs enable it by default."""
    if flag not in TrainingArguments.__dataclass_fields__:
        pytest.skip("transformers 5.23 brought the new name")
    plain = Trainer(model=tiny(), args=arguments(tmp_path), train_dataset=ROWS)
    plain.train()
    args, model = arguments(tmp_path, **{flag: True}), tiny()
    count = Mock(return_value=None)
    for layer in model.model.layers:
        layer.input_layernorm.register_forward_pre_hook(count)
    callback = ACCallback(ACArguments(ac_policy="every:2", ac_report="none"))
    trainer = Trainer(model=model, args=args, train_dataset=ROWS, callbacks=[] if attached else [callback])
    if attached:
        callback.attach(trainer)
    trainer.train()
    assert losses(trainer) == losses(plain)
    assert count.call_count == 3 * (3 + 2)  # the first and third of three blocks are re-run, in three steps
    assert getattr(args, flag)  # the user's arguments are unchanged
    assert f"policy 'every:2' replaces {_OWN}_checkpointing, which is switched off" in caplog.text


def test_checkpointing_of_fsdp_is_refused() -> None:
    plugin = SimpleNamespace(activation_checkpointing=True)
    memory = Session(ACArguments(ac_policy="full"), SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin)))  # type: ignore[arg-type]
    with pytest.raises(UserError, match="set fsdp_activation_checkpointing to false"):
        memory.apply(tiny())


def test_budget_is_enforced_without_a_report(tmp_path: Path) -> None:
    settings = ACArguments(ac_policy="auto", ac_budget="100KiB", ac_report="none")
    trainer = Trainer(model=tiny(), args=arguments(tmp_path), train_dataset=ROWS)
    callback = ACCallback(settings)
    callback.session.policy = Policy.parse("full")  # as after a plan
    callback.attach(trainer)
    with (
        pytest.raises(WorkFailed, match=r"of the limit of 100\.0 KiB set for this run"),
        advise_on_oom(callback.session),
    ):
        trainer.train()
    trainer = Trainer(model=tiny(), args=arguments(tmp_path), train_dataset=ROWS)
    callback = ACCallback(replace(settings, ac_budget="1GiB"))
    callback.session.policy = Policy.parse("full")
    callback.attach(trainer)
    trainer.train()
    assert callback.report is None
    assert not list(tmp_path.glob("memory_report.*"))


def test_measured_steps_do_not_uncompile_a_function(tmp_path: Path) -> None:
    """Under a dispatch mode torch.compile gives up a function for good, unless it is told to run it eagerly."""
    compiled: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        compiled.append(1)
        return graph.forward

    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    scale = torch.compile(doubled, backend=backend, fullgraph=True)  # torchao's optimizers compile their step this way
    model = tiny()
    model.model.norm.register_forward_hook(lambda module, args, output: scale(output))
    trainer = Trainer(model=model, args=arguments(tmp_path), train_dataset=ROWS)
    callback = ACCallback(ACArguments(ac_report="json")).attach(trainer)
    trainer.train()
    assert callback.report is not None
    assert callback.report.ranks[0].predicted is not None, callback.report.notes
    assert compiled == []  # all three steps were measured
    scale(torch.ones(1, 16))
    assert compiled == [1]


class RaisesInSecondStep(TrainerCallback):
    """Raises in forward, in backward, or between steps, in the second step."""

    def __init__(self, model: torch.nn.Module, where: str, error: BaseException) -> None:
        self.model, self.where, self.error = model, where, error

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step != 1:
            return
        if self.where == "step":
            raise self.error
        if self.where == "forward":
            self.handle = self.model.model.norm.register_forward_pre_hook(self.fail)
        else:
            self.handle = self.model.model.norm.weight.register_hook(self.fail)

    def fail(self, *args: Any) -> None:
        self.handle.remove()
        raise self.error


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("forward", RuntimeError("broken")),
        pytest.param("forward", KeyboardInterrupt(), marks=pytest.mark.slow),
        pytest.param("backward", RuntimeError("broken"), marks=pytest.mark.slow),
        ("backward", KeyboardInterrupt()),
        ("step", RuntimeError("broken")),
        pytest.param("step", KeyboardInterrupt(), marks=pytest.mark.slow),
    ],
)
def test_error_in_a_measured_step_removes_all_hooks(tmp_path: Path, where: str, error: BaseException) -> None:
    model = tiny()
    breaks = RaisesInSecondStep(model, where, error)
    trainer = Trainer(model=model, args=arguments(tmp_path), train_dataset=ROWS, callbacks=[breaks])
    callback = ACCallback(ACArguments(ac_policy="full", ac_report="json")).attach(trainer)
    with pytest.raises(type(error)):
        trainer.train()
    assert _get_current_dispatch_mode() is None
    assert not any("forward" in vars(module) for module in model.modules())
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert callback.session.peak_holders()  # used for suggestions
    callback.close()
    breaks.where = "never"
    breaks.on_step_begin = lambda *args, **kwargs: None  # type: ignore[method-assign]
    trainer.train()
    assert callback.report is not None


def test_out_of_memory_in_a_loop_is_explained_and_keeps_the_users_policy(tmp_path: Path) -> None:
    from accelerate import Accelerator

    model = tiny()
    ids = torch.arange(24).reshape(2, 12)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    memory = Session(ACArguments(ac_policy="full"), Accelerator(cpu=True))
    memory.apply(model)

    def run_out() -> None:
        with advise_on_oom(memory), memory.measure(model, optimizer, 3):
            out = model(input_ids=ids, labels=ids)
            raise torch.OutOfMemoryError(f"at {out.loss.shape}")

    with pytest.raises(WorkFailed, match=r"(?s)What held the peak:\n.* KiB  activations .*What needs less memory"):
        run_out()
    assert not any("forward" in vars(module) for module in model.modules())

    mine = apply_policy(model, "every:2")
    with advise_on_oom(memory), memory.measure(model, optimizer, 1):
        model(input_ids=ids, labels=ids).loss.backward()
        memory.step()
    seen: list[str] = []

    def step(model: Any, optimizer: Any) -> None:
        seen.append(str(applied_policy(model).policy))
        model(input_ids=ids, labels=ids).loss.backward()

    assert (
        memory.write_report(str(tmp_path), workload=lambda: Workload.of_loop(model, lambda size: step, device="cpu"))
        is not None
    )
    assert seen == ["full", "full"]  # the measured steps
    assert applied_policy(model) is mine
    mine.remove()
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.slow
def test_auto_plans_from_the_attached_trainer(tmp_path: Path) -> None:
    """Training has the planned bytes, and its data come in the same order as in plain training."""
    plain = Trainer(model=tiny(), args=arguments(tmp_path / "plain"), train_dataset=ROWS)
    plain.train()
    peaks, policies = {}, set()
    for budget in ("4MiB", "260KiB"):
        settings = ACArguments(ac_policy="auto", ac_budget=budget, ac_report="json")
        trainer = Trainer(model=tiny(), args=arguments(tmp_path / budget), train_dataset=ROWS)
        callback = ACCallback(settings).attach(trainer)
        trainer.train()
        assert losses(trainer) == pytest.approx(losses(plain), rel=1e-6)
        assert callback.report is not None
        peaks[budget] = max(p["allocated"] for p in callback.report.ranks[0].peaks.values())
        policies.add(str(callback.policy))
    assert peaks["260KiB"] <= 260 * 1024 < peaks["4MiB"]
    assert len(policies) == 2


def test_auto_without_a_budget_or_attach_is_refused(tmp_path: Path) -> None:
    trainer = Trainer(model=tiny(), args=arguments(tmp_path), train_dataset=ROWS)
    with pytest.raises(UserError, match="a plan for the CPU needs a budget, such as 600MiB"):
        ACCallback("auto").attach(trainer)
    given = Trainer(model=tiny(), args=arguments(tmp_path), train_dataset=ROWS, callbacks=[ACCallback("auto")])
    with pytest.raises(UserError, match=r"plans from the trainer .* then ACCallback\('auto'\)\.attach\(trainer\)"):
        given.train()


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        (ACArguments(ac_policy="auto", ac_budget="1GiB"), "policy 'auto'"),
        (ACArguments(find_max_batch_size=True, ac_budget="1GiB"), "--find_max_batch_size"),
        (ACArguments(ac_policy="full", ac_check=True), "--ac_check"),
    ],
)
def test_settings_that_read_rows_refuse_streamed_datasets(settings: ACArguments, flag: str, tmp_path: Path) -> None:
    rows = ROWS.to_iterable_dataset()
    trainer = Trainer(model=tiny(), args=arguments(tmp_path, max_steps=1), train_dataset=rows)
    looks = f"{flag} looks at rows of the training data, and a IterableDataset has none"

    def train() -> None:
        ACCallback(settings).attach(trainer)
        trainer.train()

    with pytest.raises(UserError, match=looks):
        train()


def test_cheaper_policies_save_less() -> None:
    assert cheaper_policies(None) == list(FALLBACK_POLICIES[1:])
    assert cheaper_policies(ACArguments(ac_policy="full").policy) == ["full,head", "full,offload,head"]
    assert cheaper_policies(ACArguments(ac_policy="every:2").policy)[0] == "full"
    assert cheaper_policies(ACArguments(ac_policy="every:2,head").policy) == ["full,head", "full,offload,head"]
    assert cheaper_policies(ACArguments(ac_policy="full,offload").policy) == ["full,offload,head"]
    assert cheaper_policies(ACArguments(ac_policy="save:matmul").policy)[0] == "full"
    assert cheaper_policies(ACArguments(ac_policy="pointwise,head").policy) == ["full,head", "full,offload,head"]
    assert cheaper_policies(ACArguments(ac_policy="full,pointwise").policy)[0] == "full"
    assert cheaper_policies(ACArguments(ac_policy="full,offload,head").policy) == []
    for policy in FALLBACK_POLICIES:
        assert str(ACArguments(ac_policy=policy).policy) == policy


@TRAINS_ON_CPU
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing:FutureWarning")  # warning about TRL's default
def test_policy_in_an_sft_trainer_takes_three_lines(tmp_path: Path, sample: tuple[Path, Path]) -> None:
    trl = pytest.importorskip("trl")
    from peft import LoraConfig

    rows = Dataset.from_list([{"prompt": "What is a list? ", "completion": "A sequence."}] * 8)

    def train(name: str, policy: str | None) -> list[float]:
        fields = {"max_steps": 2, "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}
        config = trl.SFTConfig(str(tmp_path / name), **({} if policy else OFF), bf16=False, **fields)
        lora = LoraConfig(r=2, lora_dropout=0.1, target_modules="all-linear", task_type="CAUSAL_LM")
        torch.manual_seed(0)
        trainer = trl.SFTTrainer(str(sample[0]), args=config, train_dataset=rows, peft_config=lora)
        if policy is not None:
            ACCallback(policy).attach(trainer)
        trainer.train()
        return losses(trainer)

    plain = train("plain", None)
    assert len(plain) == 2
    assert train("policy", "save:attention+matmul") == plain


@TRAINS_ON_CPU
@pytest.mark.parametrize("kind", ["SFT", "DPO"])
def test_auto_plans_with_the_loss_of_trl(
    kind: str, tmp_path: Path, sample: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    trl = pytest.importorskip("trl")
    monkeypatch.setattr("ckpt_ft.training.fit.plan", partial(plan, policies=["none", "full"]))
    question = "What is a list? "
    rows = {
        "SFT": {"prompt": question, "completion": "A sequence."},
        "DPO": {"prompt": question, "chosen": "A sequence.", "rejected": "A number."},
    }
    fields = {"max_steps": 1, "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}
    args = getattr(trl, f"{kind}Config")(str(tmp_path), **OFF, bf16=False, **fields)
    make = getattr(trl, f"{kind}Trainer")
    trainer = make(str(sample[0]), args=args, train_dataset=Dataset.from_list([rows[kind]] * 8))
    callback = ACCallback(ACArguments(ac_policy="auto", ac_budget="4GiB", ac_report="json")).attach(trainer)
    assert not any(trainer._metrics["train"].values())
    assert callback.policy is not None
    assert not callback.policy.auto
    trainer.train()
    assert len(losses(trainer)) == 1


@TRAINS_ON_CPU
def test_peak_of_a_grpo_trainer_is_predicted(tmp_path: Path, sample: tuple[Path, Path]) -> None:
    """Its reference model is on the device but not in the loss, and batches contain what the model generates."""
    trl = pytest.importorskip("trl")
    fields = {"max_steps": 2, "save_strategy": "no", "disable_tqdm": True, "use_cpu": True, "report_to": []}
    sizes = {"per_device_train_batch_size": 2, "num_generations": 2, "max_completion_length": 8, "beta": 0.1}
    args = trl.GRPOConfig(str(tmp_path), **OFF, bf16=False, **fields, **sizes)

    def lengths(completions: list[str], **_: Any) -> list[float]:
        return [float(len(text)) + number for number, text in enumerate(completions)]

    def make() -> Any:
        rows = Dataset.from_list([{"prompt": "What is a list? "}, {"prompt": "def"}] * 4)
        return trl.GRPOTrainer(str(sample[0]), lengths, args=args, train_dataset=rows)

    with pytest.raises(UserError, match="GRPOTrainer makes its batches while it trains"):
        ACCallback(ACArguments(ac_policy="auto", ac_budget="4GiB")).attach(make())
    trainer = make()
    callback = ACCallback(ACArguments(ac_policy="full", ac_report="json")).attach(trainer)
    trainer.train()
    rank = json.loads((tmp_path / "memory_report.json").read_text())["ranks"][0]
    weights = sum(p.nbytes for p in trainer.model.parameters())
    # its own weights, the reference, gradients, Adam's two moments
    assert rank["peaks"]["optimizer"]["allocated"] >= 5 * weights
    for phase in ("forward", "backward", "optimizer"):
        assert rank["predicted"]["peaks"][phase] == pytest.approx(rank["peaks"][phase]["allocated"], rel=1e-3), phase
    assert callback.applied is None


def predicted_and_measured(out: Path, **kwargs: Any) -> tuple[int, int]:
    """Returns the predicted and measured peak bytes of a Trainer's step with the arguments `kwargs`."""
    trainer = Trainer(model=tiny(), args=arguments(out, **kwargs), train_dataset=ROWS)
    callback = ACCallback(ACArguments(ac_report="json")).attach(trainer)
    trainer.train()
    assert callback.report is not None
    rank = callback.report.ranks[0]
    assert rank.predicted is not None, callback.report.notes
    return rank.predicted.allocated, max(peak["allocated"] for peak in rank.peaks.values())


def test_micro_batches_of_different_lengths_are_predicted_separately(tmp_path: Path) -> None:
    """The longest comes first, when there are no gradients; two of that length would need 21 KiB more."""
    model = tiny()
    rows = Dataset.from_list([{"input_ids": [5] * n, "labels": [5] * n} for n in (48, 12, 48, 12, 48, 12)])
    args = arguments(
        tmp_path, per_device_train_batch_size=1, gradient_accumulation_steps=2, train_sampling_strategy="sequential"
    )
    trainer = Trainer(model=model, args=args, train_dataset=rows)
    callback = ACCallback(ACArguments(ac_report="json")).attach(trainer)
    trainer.train()
    assert callback.report is not None
    (rank,) = callback.report.ranks
    assert rank.predicted is not None
    assert rank.predicted.allocated == pytest.approx(rank.peak(), abs=64)
    assert Workload.from_trainer(trainer).trace(1).peak_allocated > 1.02 * rank.peak()  # with two long ones


@pytest.mark.parametrize("optim", ["adagrad", "rmsprop", "adafactor"])
def test_optimizer_is_predicted_with_its_constructor_arguments(tmp_path: Path, optim: str) -> None:
    predicted, measured = predicted_and_measured(tmp_path, optim=optim)
    assert predicted == pytest.approx(measured, abs=64)


@pytest.mark.filterwarnings("ignore")  # warnings of those libraries
@pytest.mark.parametrize(
    "optim",
    [
        "adamw_8bit", "lion_8bit", "ademamix_8bit", "adamw_torch_4bit", "lomo", "stable_adamw", "grokadamw",
        "galore_adamw_layerwise", "apollo_adamw", "apollo_adamw_layerwise",
    ],
)  # fmt: skip
def test_optimizers_of_other_libraries_are_predicted(tmp_path: Path, optim: str) -> None:
    """They keep constructor arguments outside their groups, step in backward, or hold the model."""
    predicted, measured = predicted_and_measured(tmp_path, optim=optim, optim_target_modules=["mlp"])
    assert predicted == pytest.approx(measured, rel=2e-3)


def test_optimizer_with_unknown_constructor_arguments_is_predicted(tmp_path: Path) -> None:
    """Its constructor requires a learning rate, and it keeps a number outside its groups and a dict by parameter."""

    class Momentum(torch.optim.Optimizer):
        def __init__(self, params: Any, lr: float, /, copies: int) -> None:
            super().__init__(params, {"lr": lr})
            self.copies = copies
            self.scales = {p: 1.0 for group in self.param_groups for p in group["params"]}

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
                state = self.state[p]
                for name in range(self.copies):
                    state.setdefault(name, torch.zeros_like(p)).add_(p.grad)
                p.sub_(state[0], alpha=self.param_groups[0]["lr"] * self.scales[p])

    model = tiny()
    optimizer = Momentum(model.parameters(), 1e-3, copies=3)
    trainer = Trainer(model=model, args=arguments(tmp_path), train_dataset=ROWS, optimizers=(optimizer, None))
    callback = ACCallback(ACArguments(ac_report="json")).attach(trainer)
    trainer.train()
    assert callback.report is not None
    rank = callback.report.ranks[0]
    assert rank.predicted is not None, callback.report.notes
    assert rank.predicted.allocated == pytest.approx(max(p["allocated"] for p in rank.peaks.values()), abs=64)
    assert not any(
        type(value).__name__ == "FakeTensor" for state in optimizer.state.values() for value in state.values()
    )


class GrokAdamW(torch.optim.Optimizer):
    """Keeps its states in its groups on the host, as grokadamw's `_update_group` does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            states = group.setdefault("state", {})
            for p in (p for p in group["params"] if p.grad is not None):
                state = states.setdefault(p, {name: torch.zeros_like(p, device="cpu") for name in "abc"})
                for value in state.values():
                    value.add_(p.grad)


@pytest.mark.parametrize("rows", ["equal", "unlike"])
def test_optimizer_states_in_the_groups_are_counted(tmp_path: Path, rows: str) -> None:
    model, data = tiny(), ROWS
    if rows == "unlike":
        data = Dataset.from_list([{"input_ids": [5] * n, "labels": [5] * n} for n in (12, 40, 9, 31) * 4])
    args = arguments(
        tmp_path, per_device_train_batch_size=1, per_device_eval_batch_size=1, eval_strategy="steps", eval_steps=2
    )
    optimizer = GrokAdamW(model.parameters())
    trainer = Trainer(model=model, args=args, train_dataset=data, eval_dataset=data, optimizers=(optimizer, None))
    callback = ACCallback(ACArguments(ac_report="json")).attach(trainer)
    trainer.train()
    assert callback.report is not None
    (rank,) = callback.report.ranks
    assert rank.predicted is not None, callback.report.notes
    states = 3 * sum(4 * p.numel() for p in model.parameters())
    assert rank.at_peak["optimizer"] == states
    for phase, predicted in rank.predicted.peaks.items():
        assert predicted == pytest.approx(rank.peaks[phase]["allocated"], rel=2e-3), phase


def test_predicted_phases_are_those_of_the_predicted_step(tmp_path: Path) -> None:
    """The first step has the highest peak, as GaLore's, which decomposes gradients; later steps start with states."""

    class AllocatesAtStart(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 1e-3})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for p in (p for group in self.param_groups for p in group["params"] if not self.state[p]):
                self.state[p]["kept"] = torch.zeros_like(p)
                _decomposed = p.new_zeros(2**20)

    model = tiny()
    trainer = Trainer(
        model=model,
        args=arguments(tmp_path),
        train_dataset=ROWS,
        optimizers=(AllocatesAtStart(model.parameters()), None),
    )
    callback = ACCallback(ACArguments(ac_report="md")).attach(trainer)
    trainer.train()
    assert callback.report is not None
    (rank,) = callback.report.ranks
    assert rank.predicted is not None, callback.report.notes
    assert rank.predicted.peaks["forward"] == pytest.approx(rank.fullest["forward"], abs=64)
    later = rank.fullest["forward"] + sum(4 * p.numel() for p in model.parameters())
    assert rank.peaks["forward"]["allocated"] == pytest.approx(later, abs=64)
    assert "others rose higher in other steps" in (tmp_path / "memory_report.md").read_text()


@pytest.mark.parametrize("steps", [3, 9])
def test_steps_of_a_schedule_free_optimizer_continue_in_the_trace(tmp_path: Path, steps: int) -> None:
    """RAdam computes its denominators from the sixth step on."""

    class ScheduleFree(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 1e-3, "k": 0})

        def train(self) -> None: ...

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                _made = [p + 1 for p in group["params"]] if group["k"] >= 5 else []
                group["k"] += 1

    model = tiny()
    optimizer, args = ScheduleFree(model.parameters()), arguments(tmp_path, max_steps=steps)
    trainer = Trainer(model=model, args=args, train_dataset=ROWS, optimizers=(optimizer, None))
    later = Workload.from_trainer(trainer).trace(4).peaks["optimizer"]
    callback = ACCallback(ACArguments(ac_report="json")).attach(trainer)
    trainer.train()
    assert callback.report is not None
    (rank,) = callback.report.ranks
    assert rank.predicted is not None, callback.report.notes
    weights = sum(4 * p.numel() for p in model.parameters())
    assert rank.predicted.peaks["optimizer"] == pytest.approx(rank.peaks["optimizer"]["allocated"], abs=64)
    assert later == pytest.approx(rank.predicted.peaks["optimizer"] + (weights if steps == 3 else 0), rel=5e-3)


def test_optimizer_states_on_the_host_are_not_on_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    optimizer = GrokAdamW(model.parameters())
    trainer = Trainer(model=model, args=arguments(tmp_path), train_dataset=ROWS, optimizers=(optimizer, None))
    on_cpu = Workload.from_trainer(trainer).trace(1)
    monkeypatch.setattr("ckpt_ft.workloads.from_trainer.current_gpu", lambda *index: find_gpu("a100-80gb"))
    on_card = Workload.from_trainer(trainer).trace(1)
    assert on_cpu.at_peak["optimizer"] == 3 * sum(4 * p.numel() for p in model.parameters())
    assert on_card.at_peak.get("optimizer", 0) == 0
    largest = max(4 * p.numel() for p in model.parameters())
    assert on_card.peaks["optimizer"] >= sum(8 * p.numel() for p in model.parameters()) + 5 * largest


def test_torchao_optimizer_has_its_layout(tmp_path: Path) -> None:
    kind = type("AdamW8bit", (torch.optim.AdamW,), {"__module__": "torchao.optim.adam"})
    model = tiny()
    trainer = Trainer(
        model=model, args=arguments(tmp_path), train_dataset=ROWS, optimizers=(kind(model.parameters()), None)
    )
    made = Workload.from_trainer(trainer).make_optimizer(model)
    assert made.layout is LAYOUTS["ao_adamw_8bit"]


@pytest.mark.filterwarnings("ignore")  # warnings of torch's own imports
def test_compiled_loss_of_a_trainer_is_traced_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1).float(), labels.flatten())

    monkeypatch.setattr("ckpt_ft.workloads.from_trainer.current_gpu", lambda *index: find_gpu("a100-80gb"))
    traces = []
    for function in (loss, torch.compile(loss)):
        trainer = Trainer(model=tiny(), args=arguments(tmp_path), train_dataset=ROWS, compute_loss_func=function)
        traces.append(Workload.from_trainer(trainer).trace(1))
    fused = [{op.name for op in trace.ops if op.name.startswith("triton_")} for trace in traces]
    assert not fused[0]
    assert len(fused[1]) >= 2  # at least one in forward and one in backward


def test_gradients_held_by_the_loss_count_after_backward(tmp_path: Path) -> None:
    """DoRA of GPT-2 creates transposed weights in forward; only the loss's graph holds them and their gradients."""

    class Transposed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(512, 12))

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = input_ids.float() @ torch.nn.Parameter(self.weight.detach().T) @ self.weight
            return {"loss": logits.square().mean()}

    trainer = Trainer(model=Transposed(), args=arguments(tmp_path, optim="sgd"), train_dataset=ROWS)
    callback = ACCallback(ACArguments(ac_report="json")).attach(trainer)
    trainer.train()
    assert callback.report is not None
    (rank,) = callback.report.ranks
    assert rank.predicted is not None, callback.report.notes
    assert rank.peaks["optimizer"]["allocated"] > 3 * 4 * 512 * 12  # weight, gradient, and the gradient of the copy
    assert rank.predicted.peaks["optimizer"] == pytest.approx(rank.peaks["optimizer"]["allocated"], abs=512)


def test_failed_trace_is_a_note(tmp_path: Path) -> None:
    def broken() -> Workload:
        raise KeyError(140059639035008)

    session = Session(ACArguments())
    predicted, _, notes = session._predict(broken)
    assert predicted is None
    assert notes == [f"no prediction: the step cannot be traced: {__name__}.broken raised KeyError: 140059639035008"]


def test_unmodelled_setting_skips_the_prediction_only(tmp_path: Path) -> None:
    args = arguments(tmp_path, torch_compile=True, torch_compile_backend="eager")
    trainer = Trainer(model=tiny(), args=args, train_dataset=ROWS)
    callback = ACCallback(ACArguments(ac_report="json")).attach(trainer)
    trainer.train()
    assert trainer.state.global_step == trainer.state.max_steps > 0
    assert callback.report is not None
    assert callback.report.ranks[0].predicted is None
    said = "no prediction: torch_compile_backend: eager: a step is compiled by Inductor"
    assert said in callback.report.notes
    with pytest.raises(UserError, match="^torch_compile_backend: eager"):
        Workload.from_trainer(trainer)


@pytest.mark.parametrize(
    ("launched", "expected"),
    [
        ({}, "whole"),
        ({"USE_REGIONAL_COMPILATION": "1"}, "regional"),
        ({"MODE": "reduce-overhead"}, "compiled with mode reduce-overhead: Inductor's default mode"),
        ({"USE_DYNAMIC": "1"}, "whole"),
        ({"BACKEND": "aot_eager"}, "compiled by AOT_EAGER, and only Inductor's"),
    ],
)
def test_dynamo_settings_of_a_launch_are_predicted_or_refused(
    launched: dict[str, str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`accelerate launch --dynamo_backend inductor` sets environment variables and no Trainer argument."""
    for name, value in {"BACKEND": "inductor", **launched}.items():
        monkeypatch.setenv(f"ACCELERATE_DYNAMO_{name}", value)
    monkeypatch.setattr(AcceleratorState, "_shared_state", {})
    trainer = Trainer(model=tiny(), args=arguments(tmp_path), train_dataset=ROWS)
    if len(expected) < 10:
        assert Workload.from_trainer(trainer).compile == expected
    else:
        with pytest.raises(UserError, match=expected):
            Workload.from_trainer(trainer)


@pytest.mark.filterwarnings("ignore")  # of torch.compile's imports
def test_smoothed_labels_of_a_compiled_language_model_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Trainer shifts them by the class of its model; of a copy with compiled regions it finds the class."""
    monkeypatch.setattr(AcceleratorState, "_shared_state", {})
    args = arguments(tmp_path, torch_compile=True, label_smoothing_factor=0.1)
    trainer = Trainer(model=tiny(), args=args, train_dataset=ROWS)
    compiled = torch.compile(trainer.model)
    assert type(trainer.accelerator.unwrap_model(compiled)).__name__ == "OptimizedModule"  # as in compute_loss
    for refused in (lambda: Workload.from_trainer(trainer), lambda: ACCallback("full").attach(trainer)):
        with pytest.raises(UserError, match="^label_smoothing_factor with torch_compile: the Trainer does not shift"):
            refused()
    trainer.accelerator.state.dynamo_plugin.use_regional_compilation = True
    assert Workload.from_trainer(trainer).compile == "regional"


@pytest.mark.filterwarnings("ignore")
def test_auto_with_an_unsupported_backend_plans_eager_steps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    args = arguments(tmp_path, torch_compile=True, torch_compile_backend="eager")
    trainer = Trainer(model=tiny(), args=args, train_dataset=ROWS)
    callback = ACCallback(ACArguments(ac_policy="auto", ac_budget="1GiB", ac_report="none")).attach(trainer)
    assert callback.session.fitted is not None
    assert (
        "policy 'auto': the plan is of a run without torch_compile_backend: eager: a step is compiled" in caplog.text
    )
