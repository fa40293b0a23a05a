"""`--trainer` of an estimate gives the step of TRL's trainer, as ACCallback measures it on the CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig

from ckpt_ft.checkpointing.apply import apply_policy
from ckpt_ft.cli import main as cli
from ckpt_ft.cli.estimate import print_figures
from ckpt_ft.errors import UserError
from ckpt_ft.memory.gpus import gpu_of
from ckpt_ft.planning.results import Estimate
from ckpt_ft.spec.defaults import ONLINE, TRL_BATCH
from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.training.callback import ACCallback
from ckpt_ft.workloads.load import load
from ckpt_ft.workloads.trl_trainers import TRL_TRAINERS, _arguments, _no_reward, _tokenizer

trl = pytest.importorskip("trl")
pytestmark = [pytest.mark.filterwarnings("ignore")]
ROWS, TOKENS = 3, 24


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4}
    LlamaConfig(vocab_size=700, architectures=["LlamaForCausalLM"], **sizes).save_pretrained(folder)
    return folder


def text(tokens: int) -> str:
    return " ".join(["a"] * tokens)


ROW: dict[str, dict[str, Any]] = {  # TRL appends the end token to the answer
    "sft": {"text": text(TOKENS - 1)},
    "dpo": {"prompt": text(1), "chosen": " " + text(TOKENS - 2), "rejected": " " + text(TOKENS - 2)},
    "kto": {"prompt": text(1), "completion": " " + text(TOKENS - 2), "label": True},
    "reward": {"chosen": text(TOKENS - 1), "rejected": text(TOKENS - 1)},
    **{kind: {"prompt": text(8)} for kind in ONLINE},
}


def measured(kind: str, config: Path, out: Path, lora: bool = False, policy: str | None = None, **options: Any) -> int:
    """Returns the peak of a live trainer's steps, in bytes."""
    made: Any = AutoConfig.from_pretrained(config)
    if kind == "reward":
        made.num_labels = 1
        model: Any = AutoModelForSequenceClassification.from_config(made)
    else:
        model = AutoModelForCausalLM.from_config(made)
    model.save_pretrained(out / "start")
    model = type(model).from_pretrained(out / "start")
    args = getattr(trl, f"{TRL_TRAINERS[kind]}Config")(
        str(out), max_steps=1 + options.get("steps_per_generation", 1),
        per_device_train_batch_size=ROWS, use_cpu=True, report_to="none", save_strategy="no",
        logging_strategy="no", disable_tqdm=True, gradient_checkpointing=False, optim="adamw_torch_fused",
        **({"bf16": False} | ({} if kind in ONLINE else {"max_length": TOKENS}) | options),
    )  # fmt: skip
    rows = 64 * ROWS if kind in ONLINE else 2 * ROWS
    given: dict[str, Any] = {"reward_funcs": _no_reward} if kind in ONLINE else {}
    if lora:
        from peft import LoraConfig

        given["peft_config"] = LoraConfig(
            r=4,
            task_type="SEQ_CLS" if kind == "reward" else "CAUSAL_LM",
            target_modules=["q_proj"] if made.model_type == "mixtral" else None,
        )
    trainer = getattr(trl, f"{TRL_TRAINERS[kind]}Trainer")(
        model, args=args, train_dataset=Dataset.from_list([ROW[kind]] * rows), processing_class=_tokenizer(),
        **given,
    )  # fmt: skip
    ACCallback(policy).attach(trainer)
    trainer.train()
    report = json.loads((out / "memory_report.json").read_text())["ranks"][0]
    return max(phase["allocated"] for phase in report["peaks"].values())


def predicted(kind: str, config: Path, policy: str = "none", **fields: Any) -> int:
    """Returns the higher of the peaks of the step and of the generation between steps."""
    spec = TrainingSpec.of(str(config), trainer=kind, batch_size=ROWS, seq_length=TOKENS, **fields)
    workload = load(spec, "cpu")
    apply_policy(workload.model, policy)
    phases = workload.trace_phases(ROWS).values()
    return max(trace.peak_allocated for trace in (workload.trace(ROWS), *phases))


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("kind", [kind for kind in TRL_TRAINERS if kind not in ONLINE])
def test_estimate_equals_the_trainers_step(kind: str, lora: bool, config: Path, tmp_path: Path) -> None:
    expected = measured(kind, config, tmp_path, lora)
    fields = {"lora_r": 4, "lora_dropout": 0.0} if lora else {}
    assert predicted(kind, config, **fields) == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize(
    ("kind", "live", "fields"),
    [
        ("sft", {"packing": True}, {"rows": "packed"}),
        ("sft", {"packing": True, "packing_strategy": "wrapped"}, {"rows": "packed"}),
        ("sft", {"padding_free": True, "max_length": None}, {}),
        ("sft", {"loss_type": "dft"}, {}),
        ("sft", {"bf16": True}, {"mixed_precision": "bf16"}),
        ("dpo", {"precompute_ref_log_probs": True}, {}),
        ("dpo", {"loss_type": ["ipo"]}, {}),
        ("kto", {"precompute_ref_log_probs": True}, {}),
        ("kto", {"loss_type": "apo_zero_unpaired"}, {}),
        ("reward", {"center_rewards_coefficient": 0.01}, {}),
    ],
)
def test_trainer_settings_change_the_estimate_as_the_step(
    kind: str, live: dict[str, Any], fields: dict[str, Any], config: Path, tmp_path: Path
) -> None:
    expected = measured(kind, config, tmp_path, **live)
    args = {key: value for key, value in live.items() if key not in ("packing", "max_length", "bf16")}
    assert predicted(kind, config, trainer_args=json.dumps(args), **fields) == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize(
    ("kind", "options", "lora"),
    [
        ("grpo", {}, False),
        ("grpo", {"beta": 0.1}, False),
        ("grpo", {"beta": 0.1}, True),
        ("grpo", {"steps_per_generation": 64}, False),
        pytest.param("rloo", {"steps_per_generation": 64}, False, marks=pytest.mark.slow),
    ],
)
def test_estimate_of_generation(kind: str, options: dict[str, Any], lora: bool, config: Path, tmp_path: Path) -> None:
    """With 64 steps per generation, the KV caches of 192 sequences are the peak.

    The prediction includes the rollouts of the previous step, 74 KB here, which existed before the measured step.
    """
    if "steps_per_generation" in options:
        wide = {**LlamaConfig.from_pretrained(config).to_dict(), "hidden_size": 256, "head_dim": 64}
        config = tmp_path / "wide"
        LlamaConfig(**wide).save_pretrained(config)
    options = {"num_generations": 3, "max_completion_length": TOKENS - 8, **options}
    expected = measured(kind, config, tmp_path, lora, **options)
    fields = {"lora_r": 4, "lora_dropout": 0.0} if lora else {}
    close = 3e-3 if "steps_per_generation" in options else 2e-3
    assert predicted(kind, config, trainer_args=json.dumps(options), **fields) == pytest.approx(expected, rel=close)


def test_default_grpo_batch_has_complete_groups(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """TRL divides a batch into groups of 8 by default, so the default batch of 1 becomes 8."""
    args = json.dumps({"max_completion_length": 8})
    words = ["estimate", str(config), "--trainer", "grpo", "--seq-length", "16", "--trainer-args", args, "--json"]
    monkeypatch.setattr(sys, "argv", ["ckpt-ft", *words, "--dtype", "bfloat16"])
    assert cli._main() == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["batch_size"] == TRL_BATCH
    assert "batches of 8 samples" in said.err
    print_figures(Estimate.from_json(said.out.encode(), "the answer"))
    assert "seconds per step without generation" in capsys.readouterr().out


def test_vllm_share_counts_in_training_unless_it_sleeps(config: Path) -> None:
    """A vLLM that sleeps frees its share except during generation; a vLLM server has its own GPU."""
    card = gpu_of("t4")
    assert card is not None
    options = {"num_generations": 2, "use_vllm": True, "vllm_gpu_memory_utilization": 0.4, "max_completion_length": 8}
    share = int(0.4 * card.memory)
    for more, context, generation in (
        ({}, card.context + share, 0),
        ({"vllm_enable_sleep_mode": True}, card.context, share),
        ({"vllm_mode": "server"}, card.context, 0),
    ):
        args = json.dumps({**options, **more})
        spec = TrainingSpec.of(str(config), trainer="grpo", trainer_args=args, batch_size=2, seq_length=16)
        workload = load(spec, card)
        found = gpu_of(workload.device)
        assert found is not None
        assert found.context == context
        peak = workload.trace_phases(2)["generation"].peak_allocated
        assert generation < peak < generation + 2**25
        assert any("vLLM takes 40% of the card" in note for note in workload.notes) == (
            more != {"vllm_mode": "server"}
        )
    broken = json.dumps({**options, "vllm_gpu_memory_utilization": 1.5})
    with pytest.raises(UserError, match="vllm_gpu_memory_utilization 1.5: give a share"):
        load(TrainingSpec.of(str(config), trainer="grpo", trainer_args=broken, batch_size=2, seq_length=16), card)


@pytest.mark.parametrize(("kind", "lora"), [("sft", False), ("sft", True), ("dpo", False)])
def test_auxiliary_loss_of_routers(kind: str, lora: bool, tmp_path: Path) -> None:
    """TRL adds it to every mixture of experts unless its coefficient is 0, also with adapters; not DPO's reference."""
    from transformers import MixtralConfig

    sizes = {"hidden_size": 64, "intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4}
    MixtralConfig(
        vocab_size=32, num_local_experts=64, num_key_value_heads=4, architectures=["MixtralForCausalLM"], **sizes
    ).save_pretrained(tmp_path)
    fields = {"lora_r": 4, "lora_dropout": 0.0, "lora_targets": ("q_proj",)} if lora else {}
    found = {}
    for coefficient in (0.0, 0.01):
        found[coefficient] = predicted(kind, tmp_path, router_aux_loss_coef=coefficient, **fields)
        live = measured(kind, tmp_path, tmp_path / str(coefficient), lora, router_aux_loss_coef=coefficient)
        assert found[coefficient] == pytest.approx(live, rel=1e-5)
    assert found[0.01] > found[0.0]


def test_adapters_on_4bit_weights_are_bfloat16(config: Path) -> None:
    """TRL casts them and lets PEFT choose the layers: query and value projections."""
    spec = TrainingSpec.of(str(config), trainer="sft", batch_size=1, seq_length=8, lora_r=4, load_in_4bit=True)
    trained = {name: p for name, p in load(spec, "cpu").model.named_parameters() if p.requires_grad}
    assert {name.split(".")[-4] for name in trained} == {"q_proj", "v_proj"}
    assert {str(p.dtype) for p in trained.values()} == {"torch.bfloat16"}


def test_accelerate_state_of_the_user_is_restored(config: Path) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, PartialState

    Accelerator(cpu=True)
    before = [dict(kind._shared_state) for kind in (PartialState, AcceleratorState)]
    predicted("sft", config)
    assert [dict(kind._shared_state) for kind in (PartialState, AcceleratorState)] == before


def test_invalid_trainer_settings_are_refused(config: Path) -> None:
    for fields, says in (
        ({"trainer": "sft", "trainer_args": "beta"}, "give JSON"),
        ({"trainer": "sft", "trainer_args": '{"beta": 1}'}, "TRL refuses these settings: TypeError"),
        ({"trainer": "sft", "trainer_args": '{"loss_type": "hinge"}'}, "Invalid `loss_type` hinge"),
    ):
        with pytest.raises(UserError, match=says):
            load(TrainingSpec.of(str(config), seq_length=8, **fields), "cpu")
    with pytest.raises(UserError, match="of which trainer"):
        TrainingSpec.of(str(config), trainer_args="{}")


def test_part_of_a_group_of_completions_is_on_each_gpu(config: Path) -> None:
    """TRL wants whole groups from all processes together, whose number a file does not say."""
    spec = TrainingSpec.of(
        str(config), trainer="grpo", batch_size=16, accumulation=4, seq_length=TOKENS,
        trainer_args='{"num_generations": 14, "max_completion_length": 8}',
    )  # fmt: skip
    assert _arguments(spec)["num_generations"] == 2
    assert load(spec, "cpu").make_batch(2, None)["completion_ids"].shape == (2, 8)
