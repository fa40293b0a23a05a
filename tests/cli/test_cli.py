"""The command `ckpt-ft`: answers for local and known models; bad input is one line with exit code 2."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from model_configs import write_config

import ckpt_ft
from ckpt_ft.cli import main as cli
from ckpt_ft.memory import gpus
from ckpt_ft.memory.gpus import find_gpu
from ckpt_ft.units import GIB, MIB, format_bytes

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 99, "max_position_embeddings": 2048,
}  # fmt: skip


# the embeddings have nearly all parameters
WIDE = {**LLAMA, "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 40000}


@pytest.fixture
def config(tmp_path: Path) -> str:
    return write_config(tmp_path, LLAMA)


class Answer:
    """What a command printed, and its exit code."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def run_cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*argv: str) -> Answer:
        monkeypatch.setattr(sys, "argv", ["ckpt-ft", *argv])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        printed = capsys.readouterr()
        return Answer(int(stop.value.code or 0), printed.out, printed.err)

    return run


def test_estimate_of_a_tiny_llama_counts_every_byte(run_cli: Any, config: str) -> None:
    answer = run_cli(
        "estimate", config, "--device", "cpu", "--seq-length", "32", "--optimizer", "adamw_fused", "--json"
    )
    result = json.loads(answer.out)
    weights = 99 * 32 * 2 + 4 * (4 * 32 * 32 + 3 * 32 * 64 + 2 * 32) + 32
    assert answer.code == 0
    assert result["at_peak"]["parameters"] == 4 * weights
    assert result["peaks"]["optimizer"] >= 4 * 4 * weights  # weights, gradients, two moments
    assert result["peak_allocated"] == sum(result["at_peak"].values()) == max(result["peaks"].values())
    assert result["peak_reserved"] == result["peak_allocated"]
    assert result["seconds"] is None


def test_policies_lower_the_peak_of_a_long_sequence(run_cli: Any, config: str) -> None:
    def peak(policy: str) -> int:
        argv = ("--device", "t4", "--batch-size", "64", "--seq-length", "64", "--policy", policy, "--json")
        return int(json.loads(run_cli("estimate", config, *argv).out)["peak_allocated"])

    assert peak("none") > peak("save:attention+matmul") > peak("full")


def test_estimate_says_whether_it_fits(run_cli: Any, config: str) -> None:
    fits = run_cli("estimate", config, "--device", "t4", "--seq-length", "64")
    assert "fits," in fits.out
    assert "of 14.56 GiB" in fits.out
    assert "What holds the peak" in fits.out
    assert "model.layers.*." in fits.out
    assert "all else" in fits.out
    assert "does not fit" in run_cli("estimate", config, "--device", "t4", "--capacity", "100MiB").out


def test_estimate_counts_image_tokens(run_cli: Any, tmp_path: Path) -> None:
    text = {**LLAMA, "model_type": "llama", "head_dim": 16}
    tower = {"model_type": "clip_vision_model", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    seeing = {
        "model_type": "llava", "architectures": ["LlavaForConditionalGeneration"], "image_token_index": 3,
        "text_config": text, "vision_config": {**tower, "intermediate_size": 32, "image_size": 64, "patch_size": 8},
    }  # fmt: skip
    path = tmp_path / "seeing.json"
    path.write_text(json.dumps(seeing))
    answer = run_cli("estimate", str(path), "--images", "2", "--image-size", "80x60", "--device", "cpu")
    assert answer.code == 0
    assert "seq length 1154, images 2, image tokens 128, on cpu" in " ".join(answer.out.split())
    assert "rows are text alone" not in answer.out


def test_version(run_cli: Any) -> None:
    answer = run_cli("--version")
    assert (answer.code, answer.out) == (0, f"{ckpt_ft.__version__}\n")


def test_no_command_prints_the_help(run_cli: Any) -> None:
    answer = run_cli()
    assert (answer.code, answer.err) == (0, "")
    assert "estimate" in answer.out
    assert "Recipes: " in run_cli("recipe", "--help").out


def test_flags_have_the_names_of_trl_and_axolotl(run_cli: Any, config: str) -> None:
    """Asks one question with our flags, with TRL's and with axolotl's."""
    ours = ("--seq-length", "16", "--batch-size", "2", "--lora", "4", "--dtype", "bfloat16", "--optimizer", "adamw")
    trl = ("--max_length", "16", "--per_device_train_batch_size", "2", "--lora_r", "4", "--torch_dtype", "bfloat16")
    others = ("--sequence_len=16", "--micro_batch_size=2", "--lora-r=4", "--dtype=bfloat16", "--optim=adamw")
    answers = [run_cli("estimate", config, *argv, "--json") for argv in (ours, (*trl, "--optim", "adamw"), others)]
    assert len({answer.out for answer in answers}) == 1
    assert json.loads(answers[0].out)["batch_size"] == 2


def test_peft_config_equals_its_flags_and_is_in_the_command(run_cli: Any, config: str, tmp_path: Path) -> None:
    commands = []

    def asked(*argv: str) -> Any:
        found = json.loads(run_cli("estimate", config, "--seq-length", "16", "--json", *argv).out)
        commands.append(found.pop("command"))
        return found

    saved = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "lora_dropout": 0.05, "target_modules": "all-linear"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(saved))
    by_rank = asked("--lora", "4")
    assert asked("--peft-config", str(tmp_path)) == by_rank
    assert asked("--use_peft", "--lora_r", "4", "--lora-dropout", "0.05") == by_rank
    assert "--use_peft" in commands[0]
    assert f"--peft_config {tmp_path} " in commands[1]
    assert "--lora_r 4 --lora_dropout 0.05" in commands[2]
    four = asked("--gradient_accumulation_steps", "4")
    assert "--gradient_accumulation_steps 4" in commands[3]
    assert (four["accumulation"], four["seconds"] > 2 * asked()["seconds"]) == (4, True)


def test_default_gpu_and_user_described_gpu(run_cli: Any, config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "current_gpu", lambda: None)

    def asked(*argv: str) -> Any:
        return json.loads(run_cli("estimate", config, "--seq-length", "16", "--json", *argv).out)

    own = asked("--device", "RTX 4090 20GB")
    assert (own["device"], own["capacity"]) == ("rtx-4090 with 20.00 GiB", 20 * GIB)
    assert own["context"] == asked("--device", "rtx-4090")["context"] != asked()["context"]
    assert asked()["device"] == "a100-80gb"
    monkeypatch.setattr(gpus, "current_gpu", lambda: find_gpu("l4"))
    assert asked()["device"] == "l4"


def test_number_without_unit_is_gib_with_a_note(run_cli: Any, config: str) -> None:
    answer = run_cli("estimate", config, "--seq-length", "16", "--json", "--capacity", "24")
    assert json.loads(answer.out)["capacity"] == 24 * GIB
    assert answer.err == "note: --budget 24 is taken as 24 GiB\n"


SHORT = ("--device", "t4", "--seq-length", "64")


@pytest.mark.parametrize(
    ("asked", "capacity", "says"),
    [
        (("--batch-size", "64"), "190MiB", ["--policy full"]),  # changes the policy only
        pytest.param(
            ("--batch-size", "512"),
            "200MiB",
            ["--policy full", "--batch-size", "--accumulation"],
            marks=pytest.mark.slow,
        ),
        (("--batch-size", "2"), "250MiB", ["--batch-size 1", "--optimizer adamw_8bit"]),
    ],
)
def test_suggestion_fits(run_cli: Any, config: str, asked: tuple[str, ...], capacity: str, says: list[str]) -> None:
    """The first suggestion, typed as flags, fits and has the memory and time that the suggestion states."""
    if "adamw_8bit" in says[-1]:
        Path(config).write_text(json.dumps(WIDE))
    typed = ("estimate", config, *SHORT, *asked, "--capacity", capacity, "--json")
    answer = json.loads(run_cli(*typed).out)
    assert answer["headroom"] < 0
    ways = answer["answer"]["ways"]
    assert ways[0]["command"].startswith(f"ckpt-ft recipe llm --model_name_or_path {config} --ac_policy ")
    assert [way["slower"] for way in ways] == sorted(way["slower"] for way in ways)
    for part in says:
        assert part in ways[0]["change"]
    suggested = json.loads(run_cli(*typed, *shlex.split(ways[0]["change"])).out)
    assert (suggested["peak_reserved"], suggested["headroom"] >= 0) == (ways[0]["reserved"], True)
    samples = [taken["batch_size"] * taken["accumulation"] for taken in (suggested, answer)]
    slower = suggested["seconds"] / samples[0] / (answer["seconds"] / samples[1]) - 1
    assert ways[0]["slower"] == pytest.approx(slower, abs=1e-4)


def test_suggestions_for_an_8bit_step_replace_8bit_loading(run_cli: Any, config: str) -> None:
    """Suggestions that use 4 bits drop --load-in-8bit, also in the complete command."""
    Path(config).write_text(json.dumps({**WIDE, "tie_word_embeddings": True}))
    answer = run_cli("estimate", config, *SHORT, "--load-in-8bit", "--lora", "4", "--capacity", "140MiB")
    assert (answer.code, answer.err) == (0, "")
    assert "does not fit" in answer.out
    found = json.loads(
        run_cli("estimate", config, *SHORT, "--load-in-8bit", "--lora", "4", "--capacity", "140MiB", "--json").out
    )["answer"]
    for way in found["ways"]:
        assert "without --load-in-8bit" in way["change"] or "4bit" not in way["change"]
        assert "--load_in_8bit" not in way["command"]


def test_step_that_fits_ends_with_its_training_command(run_cli: Any) -> None:
    answer = run_cli(
        "estimate", "qwen2.5-0.5b-instruct", "--device", "rtx-4090", "--policy", "full", "--seq-length", "16"
    )
    assert answer.out.splitlines()[-1] == (
        "train it: ckpt-ft recipe llm --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --ac_policy full "
        "--max_length 16 --per_device_train_batch_size 1 --dtype bfloat16 --optim adamw_torch_fused "
        "--dataset_name DATASET"
    )


BERT = ("google-bert/bert-base-uncased", "--seq-length", "16", "--device", "rtx-3060")


def test_encoder_is_answered_as_its_architecture_says(run_cli: Any) -> None:
    """The head of each answer names the task, and one note says how to ask for a classifier."""
    said = run_cli("estimate", *BERT).out
    assert said.startswith("google-bert/bert-base-uncased as masked-lm: policy none, batch 1, seq length 16")
    assert " ".join(said.split()).count("--task text-classification for a classifier (or token-classification") == 1
    assert "train it" not in said


def test_asked_task_is_in_the_head_of_every_answer(run_cli: Any) -> None:
    words = (*BERT, "--task", "token-classification", "--num-labels", "9")
    found = json.loads(run_cli("estimate", *words, "--json").out)
    assert found["model"] == "google-bert/bert-base-uncased as token-classification"
    pooler, head = 768 * 768 + 768, 768 * 9 + 9
    assert found["at_peak"]["parameters"] == pytest.approx(4 * (109_482_240 - pooler + head), rel=0.004)
    assert run_cli("max-batch", *words, "--max-batch-size", "8").out.startswith(f"{found['model']} under 'none'")
    placed = run_cli("where", *words, "--method", "full", "--gpus", "1", "--jobs", "1", "--json").out
    assert json.loads(placed)["model"] == found["model"]


def test_packed_weights_get_lora_and_the_head_says_how_they_are_trained(run_cli: Any, config: str) -> None:
    answer = run_cli("estimate", config, "--seq-length", "16", "--4bit", "--dpo")
    assert "as dpo, LoRA of rank 16, 4 bits: policy none" in answer.out.replace(" \n", " ").replace("\n", " ")
    assert "packed weights are frozen: LoRA of rank 16 trains; --lora changes it" in answer.err
    hub_name = run_cli("estimate", *BERT, "--task", "sequence-classification", "--json").out
    assert json.loads(hub_name)["model"] == "google-bert/bert-base-uncased as text-classification"


def test_if_nothing_fits_the_smallest_need_is_printed(run_cli: Any, config: str) -> None:
    Path(config).write_text(json.dumps(WIDE))
    page = str(Path(config).with_name("estimate.html"))
    answer = run_cli("estimate", config, *SHORT, "--batch-size", "2", "--capacity", "140MiB", "--html", page)
    assert "nothing that was tried fits: the leanest needs" in answer.out
    # sharding would save little: weights, gradients and optimizer state are the smaller part
    assert "--launch fsdp2" not in answer.out
    assert f"more to choose from: ckpt-ft plan {config} --seq-length 64 --device t4 --budget 140MiB\n" in answer.out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argv", "capacity"),
    [
        (("meta-llama/Llama-3.1-8B", "--lora", "16", "--dtype", "bfloat16", "--policy", "full"), 24 * GIB),
        (
            ("stabilityai/stable-diffusion-xl-base-1.0", "--lora", "16", "--dtype", "float16", "--policy", "full"),
            16 * GIB,
        ),
        (("microsoft/resnet-50", "--device", "t4", "--batch-size", "32", "--optimizer", "sgd"), 14912 * MIB),
    ],
)
def test_known_models_are_answered_offline(run_cli: Any, argv: tuple[str, ...], capacity: int) -> None:
    pytest.importorskip("diffusers")
    answer = run_cli("estimate", *argv, "--capacity", str(capacity), "--json")
    assert answer.code == 0
    assert json.loads(answer.out)["headroom"] > 0


def test_explain_shows_bytes_per_block(run_cli: Any, config: str) -> None:
    answer = run_cli("explain", config, "--policy", "save:attention", "--seq-length", "32", "--device", "cpu")
    assert answer.code == 0
    assert "LlamaDecoderLayer" in answer.out
    assert "4 of 4 blocks are re-run" in answer.out
    # A block keeps its input and attention's output (32 tokens x 32 features in fp32 each) and the log-sum-exp.
    assert f"{(2 * 32 * 32 * 4 + 4 * 32 * 4) / 1024:.1f} KiB" in answer.out


def test_check_of_a_saved_model(run_cli: Any, tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    LlamaForCausalLM(LlamaConfig(**LLAMA)).save_pretrained(tmp_path)
    answer = run_cli("check", str(tmp_path), "--policy", "save:attention", "--seq-length", "8")
    assert answer.code == 0
    assert answer.out.count("same") == 5


def test_check_fails_with_exit_code_1(run_cli: Any, config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckpt_ft.checkpointing import recompute, rng

    # This recomputation does not restore the random state, which `check` must report.
    monkeypatch.setattr(rng.Snapshot, "restore", lambda self: None)
    monkeypatch.setattr(recompute.rng.Snapshot, "__eq__", lambda self, other: True)
    Path(config).write_text(json.dumps({**LLAMA, "attention_dropout": 0.5}))
    answer = run_cli("check", config, "--policy", "full", "--seq-length", "8")
    assert answer.code == 1
    assert "DIFFERS" in answer.out
    assert "dropout without RNG" in answer.out


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("estimate", "CONFIG", "--policy", "ful"), "did you mean 'full'"),
        (("estimate", "CONFIG", "--policy", "stages"), "has no stages"),
        (("estimate", "CONFIG", "--policy", "full\nerror: none\x1b[2J"), "full\\nerror: none\\x1b[2J"),
        (("estimate", "CONFIG", "--device", "t5"), "no GPU 't5'"),
        (("estimate", "CONFIG", "--device", "t4 1MB"), "the CUDA context alone takes"),
        (("estimate", "CONFIG", "--packing", "--padding"), "--packing and --padding: give one of them"),
        (("estimate", "CONFIG", "--peft-config", "CONFIG"), "no configuration of PEFT: it names no peft_type"),
        (("estimate", "CONFIG", "--peft-config", "/nowhere.json"), "--peft-config /nowhere.json: No such file"),
        (("estimate", "CONFIG", "--double-quant"), "double quant: it has no effect without load in 4bit"),
        (("estimate", "CONFIG", "--freeze", "vision"), "frozen part 'vision': no parameter has it in its name"),
        (("estimate", "CONFIG", "--freeze", "model,lm_head"), "frozen parts model, lm_head: nothing is left to train"),
        (("estimate", "CONFIG", "--bf16", "--fp16"), "--bf16 and --fp16: give one of them"),
        (("estimate", "CONFIG", "--batch-size", "0"), "batch size 0: a batch has at least 1 sample"),
        (("estimate", "CONFIG", "--batch-size", "x"), "'--batch-size'"),
        (("estimate", "CONFIG", "--bath-size", "1"), "No such option"),
        (("estimate", "gpt2", "--seq-length", "4096"), "sequence length 4096: gpt2 has 1024 positions"),
        (("estimate", "CONFIG", "--seq-length", "0"), "at least 2 tokens"),
        (("estimate", "CONFIG", "--dtype", "fp17"), "dtype 'fp17'"),
        (("estimate", "CONFIG", "--optimizer", "adam"), "did you mean 'adamw'"),
        (("estimate", "CONFIG", "--lora", "-1"), "at least 1"),
        (("estimate", "CONFIG", "--lora", "4", "--lora-targets", "nope"), "LoRA targets nope"),
        (("estimate", "CONFIG", "--lora-targets", "q_proj"), "lora targets: it has no effect without LoRA rank"),
        (("estimate", "CONFIG", "--resolution", "512"), "resolution 512: the batches of"),
        (("estimate", "CONFIG", "--image-size", "5x"), "--image-size 5x: give width and height in pixels"),
        (("estimate", "CONFIG", "--image-size", "640x480"), "1 images: LlamaForCausalLM takes no images"),
        (("estimate", "CONFIG", "--audio-seconds", "5"), "audio seconds 5: the batches of"),
        (
            ("estimate", "stable-diffusion-v1-5", "--seq-length", "1024", "--dtype", "float32"),
            "sequence length 1024: the batches of stable-diffusion-v1-5/stable-diffusion-v1-5, of kind "
            "'diffusion U-Net', hold no sequences",
        ),
        (("check", "resnet-50", "--seq-length", "32"), "sequence length 32: the batches of microsoft/resnet-50"),
        (("estimate", "CONFIG", "--policy", "budget:0.5"), "acts under torch.compile alone"),
        (("plan", "CONFIG", "--max-batch-size", "-1"), "--max-batch-size"),
        (("plan", "CONFIG", "--jobs", "-1"), "--jobs"),
        (("plan", "CONFIG", "--jobs", "99999"), "--jobs"),
        (("check", "CONFIG", "--policy", "full", "--seed", "9" * 30), "--seed"),
        (
            ("estimate", "CONFIG", "--device", "t4", "--html", "a", "--perfetto", "./a"),
            "--html and --perfetto: each needs",
        ),
        (("estimate", "CONFIG", "--perfetto", "/dev/null"), "--perfetto /dev/null: cannot be written (it is a device"),
        (("estimate", "CONFIG", "--launch", "ddp", "--processes", "99999999999"), "1048576 in all at most"),
        (("plan", "CONFIG", "--output", "/proc/nowhere/plan.json"), "--output /proc/nowhere/plan.json: cannot be"),
        (("estimate", "CONFIG", "--capacity", "9" * 5000), "is not an amount of memory"),
        (("estimate", "CONFIG", "--lora", "4", "--prepare-kbit"), "loaded in 4 bits (or 8): ask for both"),
        (("estimate", "CONFIG", "--lora", "4", "--lora-dropout", "1"), "LoRA dropout 1.0: a share from 0 up to"),
        (("estimate", "CONFIG", "--capacity", "lots"), "'lots' is not an amount of memory"),
        (("estimate", "no/such-model"), "no model 'no/such-model'"),
        (("estimate", ""), "error: no model is named: give"),
        (("max-batch", "CONFIG", "--policy", "auto"), "error: policy 'auto': `ckpt-ft plan`"),
        (("plan", "CONFIG", "--gpus", "0"), "error: 0 GPUs: a launch is for at least 2"),
        (("explain", "DIRECTORY"), "no config.json"),
        (("report", "DIRECTORY"), "recipes write memory_report.json"),
        (("check", "CONFIG", "--policy", "auto"), "chooses a policy for a budget"),
        (("nothing",), "no command 'nothing' (estimate MODEL: does it fit?"),
    ],
)
def test_bad_input_is_one_line(run_cli: Any, config: str, tmp_path: Path, argv: tuple[str, ...], says: str) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    answer = run_cli(*(config if part == "CONFIG" else str(empty) if part == "DIRECTORY" else part for part in argv))
    assert answer.code == 2
    assert says in answer.err
    assert answer.err.startswith("error: ")
    assert answer.err.count("\n") == 1
    assert answer.out == ""


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"model_type": "no_such_type"}', "{}", '{"_class_name": "NoSuchModel"}']
)
def test_broken_config_is_one_line(run_cli: Any, tmp_path: Path, content: str) -> None:
    pytest.importorskip("diffusers")
    path = tmp_path / "config.json"
    path.write_text(content)
    answer = run_cli("estimate", str(path))
    assert answer.code == 2
    assert answer.err.count("\n") == 1


FILES = {"--html": ".html", "--snapshot": ".pickle", "--perfetto": ".json"}


def test_estimate_writes_page_snapshot_and_perfetto_file(run_cli: Any, config: str, tmp_path: Path) -> None:
    files = {flag: tmp_path / f"step{suffix}" for flag, suffix in FILES.items()}
    flags = [word for flag, path in files.items() for word in (flag, str(path))]
    answer = run_cli("estimate", config, "--device", "t4", "--seq-length", "32", "--policy", "full", *flags)
    assert answer.code == 0
    assert "under full</title>" in files["--html"].read_text()
    counted = [event for event in json.loads(files["--perfetto"].read_text())["traceEvents"] if event["ph"] == "C"]
    peak = max(event["args"]["bytes"] for event in counted if event["name"] == "allocated")
    assert f"peak allocated {format_bytes(peak)}" in " ".join(answer.out.split())
    assert files["--snapshot"].stat().st_size > 1000


def test_perfetto_file_of_a_cpu_step_is_refused(run_cli: Any, config: str, tmp_path: Path) -> None:
    answer = run_cli("estimate", config, "--device", "cpu", "--perfetto", str(tmp_path / "step.json"))
    assert (answer.code, len(answer.err.splitlines())) == (2, 1)
    assert "a CPU's speed is not modelled; give a GPU by --device" in answer.err
