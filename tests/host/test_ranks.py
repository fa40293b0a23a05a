"""`ckpt-ft dry-run --launch`: one rank of several, against live ranks on the CPU and against `estimate`."""

from __future__ import annotations

import json
import os
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import forked_python
import pytest
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from forked_ranks import run_ranks
from typer.testing import CliRunner

from ckpt_ft.cli.main import app
from ckpt_ft.errors import UserError
from ckpt_ft.host.script import AS_IT_IS, Answer, Question, Script, ask, run_command
from ckpt_ft.memory.gpus import find_gpu
from ckpt_ft.planning.estimate import estimate
from ckpt_ft.spec.command import launch_words, recipe_command
from ckpt_ft.spec.flags import fields_of
from ckpt_ft.spec.launch import Launch
from ckpt_ft.spec.training_spec import TrainingSpec

HERE = Path(__file__).parent
SCRIPTS = HERE / "scripts"


@pytest.fixture(autouse=True)
def _forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripts' processes do not import the libraries again."""
    monkeypatch.setattr(subprocess, "Popen", forked_python.Popen)


def dry(script: Script, launch: Launch, device: str = "", policies: tuple[str, ...] = (AS_IT_IS,)) -> list[Answer]:
    gpu = find_gpu(device) if device else None
    return ask(Question(script, gpu, policies, launch=launch, launcher=tuple(launch_words(launch))))


def peak(answer: Answer) -> int:
    assert answer.trace is not None, answer.error
    return answer.trace.peak_allocated


def live_rank(rank: int, out: str, *words: str) -> None:
    sys.stdout = Path(out, str(rank)).open("w")  # noqa: SIM115 (the process ends in the script)
    os.environ["ACCELERATE_USE_CPU"] = "1"
    sys.argv = ["live_peak.py", "3", *words]
    runpy.run_path(str(HERE / "live_peak.py"), run_name="__main__")


@pytest.mark.parametrize(
    ("launch", "words"),
    [
        ("ddp", ["ranks.py", "ddp"]),
        ("ddp", ["ranks.py", "ddp", "find_unused_parameters"]),
        ("ddp", ["ranks.py", "ddp", "gradient_as_bucket_view"]),
        ("ddp", ["accelerated.py"]),
        ("fsdp2", ["ranks.py", "fsdp2"]),
        ("fsdp2", ["ranks.py", "fsdp2", "meta"]),
    ],
)
def test_a_rank_has_the_peak_of_live_ranks(launch: str, words: list[str], tmp_path: Path) -> None:
    script = Script(str(SCRIPTS / words[0]), tuple(words[1:]))
    (answer,) = dry(script, Launch("ddp", 2))  # torchrun's environment; the script says how it shards
    run_ranks(live_rank, str(tmp_path), script.name, *script.args)
    live = int((tmp_path / "0").read_text().split("peak ")[1])
    assert peak(answer) == pytest.approx(live, rel=1e-5)  # with find_unused_parameters DDP has a map of them
    assert answer.batches[0]  # the sampler gives rank 0 its share, in batches of the script's size
    assert answer.trace is not None
    assert answer.trace.launch is not None
    assert answer.trace.launch.strategy == launch


@pytest.mark.parametrize("launch", ["ddp", "fsdp2"])
def test_a_recipe_on_several_cards_is_what_estimate_says(
    launch: str, sample: tuple[Path, Path], tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": "word " * 400}) + "\n" for _ in range(64)))
    several = fields_of({"launch": launch, "processes": 4, "mixed_precision": "bf16"})
    spec = TrainingSpec.of(str(sample[0]), batch_size=4, seq_length=128, policy="full,head", **several)
    words = shlex.split(recipe_command(spec, "causal-lm").partition(")")[2].removeprefix('"'))
    words[words.index("DATASET")] = str(rows)
    script = Script(str(HERE.parents[1] / "recipes/llm.py"), (*words, "--output_dir", str(tmp_path / "out")))
    assert spec.launch.launch is not None
    (answer,) = dry(script, spec.launch.launch, "h100")
    expected = estimate(spec.edit(device="h100"))
    assert peak(answer) == pytest.approx(expected.peak_allocated, rel=1e-3)
    assert answer.trace is not None
    assert answer.trace.peak_reserved == pytest.approx(expected.peak_reserved, rel=1e-3)
    assert answer.trace.seconds == pytest.approx(expected.seconds, rel=0.1)
    assert answer.steps == 3  # what all ranks agree on after a step does not end the run


def test_shards_on_a_card_that_are_made_on_meta() -> None:
    script = Script(str(SCRIPTS / "ranks.py"), ("fsdp2", "meta"))
    two, eight = (dry(script, Launch("fsdp2", ranks), "h100")[0] for ranks in (2, 8))
    assert two.trace is not None, two.error
    assert eight.trace is not None, eight.error
    shards = sum(two.trace.at_peak[kind] - eight.trace.at_peak[kind] for kind in ("parameters", "optimizer"))
    weights = 4 * (2 * 256 * 1024 + 1024 + 256) + 64 * 256 + 256 * 14 + 11  # 4 bytes, with two states of AdamW
    assert shards == pytest.approx(3 * 4 * weights * (1 / 2 - 1 / 8), rel=0.01)
    assert {op.stream for op in two.trace.ops} > {""}  # FSDP2 gathers on streams of its own


def test_ranks_of_a_card_under_policies_and_their_command(tmp_path: Path) -> None:
    script = str(SCRIPTS / "accelerated.py")
    config = tmp_path / "fsdp2.yaml"
    config.write_text(
        "distributed_type: FSDP\nnum_processes: 2\nmixed_precision: bf16\n"
        "fsdp_config:\n  fsdp_version: 2\n  fsdp_offload_params: true\n"
    )
    words = ["dry-run", "--launch", str(config), "--device", "l4", "--policy", "none,full", script]
    ended = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    assert ended.exception is None, ended.exception
    assert "each GPU of fsdp2, all in host memory, on 2 GPUs" in " ".join(ended.stdout.split())
    none, full = (line.split() for line in ended.stdout.splitlines() if line.startswith("l4"))
    assert float(full[5]) < float(none[5])
    command = shlex.split(next(line for line in ended.stdout.splitlines() if line.startswith("fastest")))
    start = command.index("accelerate")
    assert command[start : start + 3] == ["accelerate", "launch", "-q"]
    given = _validate_launch_command(launch_command_parser().parse_args(command[start + 2 :]))[0]
    assert (given.num_processes, given.use_fsdp, given.mixed_precision) == (2, True, "bf16")
    assert (given.module, given.training_script) == (True, "ckpt_ft.run")
    assert given.training_script_args == ["--policy", "none", script]


def test_the_command_of_a_launch_by_name() -> None:
    launch = Launch("fsdp2", 16, mixed_precision="bf16")
    words = shlex.split(run_command(Script("train.py", ("--lr", "1")), "full", launch_words(launch)))
    given = _validate_launch_command(launch_command_parser().parse_args(words[2:]))[0]
    assert (given.num_processes, given.num_machines, given.use_fsdp, given.fsdp_version) == (16, 2, True, "2")
    assert given.training_script_args == ["--policy", "full", "train.py", "--lr", "1"]


def test_numbers_that_ranks_agree_on_are_known(tmp_path: Path) -> None:
    """A script asks all ranks whether to stop; none of them wants to."""
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\nfrom accelerate import Accelerator\nimport torch.distributed as dist\n"
        "from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook\n"
        "accelerator = Accelerator()\nmodel = torch.nn.Linear(64, 64)\n"
        "model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))\n"
        "assert dist.get_world_size() == accelerator.num_processes == 8\n"
        "assert torch.cuda.device_count() == 8 and accelerator.device == torch.device('cuda', 0)\n"
        "assert dist.new_group([0, 1], backend='gloo').size() == 2\n"
        "model.register_comm_hook(None, fp16_compress_hook)\nfor _ in range(3):\n"
        "    accelerator.backward(model(torch.ones(8, 64, device='cuda')).sum())\n"
        "    optimizer.step()\n    optimizer.zero_grad()\n"
        "    stop = torch.tensor(0.0, device='cuda')\n    dist.all_reduce(stop)\n"
        "    if stop.item():\n        break\n"
    )
    (answer,) = dry(Script(str(script)), Launch("ddp", 8), "t4")
    assert answer.steps == 3, answer.error
    assert answer.trace is not None
    assert "DDP's communication hook is left out: gradients are reduced as they are" in answer.trace.notes


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--launch", "fdsp", "--processes", "2"], "--launch fdsp: neither a strategy"),
        (["--launch", "fsdp2"], "on how many GPUs. give --processes"),
        (["--launch", "fsdp2", "--processes", "1"], "of one process; leave it out"),
        (["--processes", "2"], "--processes 2: for several GPUs give --launch too"),
        (["--launch", "zero3", "--processes", "2"], "knows ddp and fsdp2, and this is zero3; .* `ckpt-ft estimate"),
        (["--launch", "nowhere.yaml"], "nowhere.yaml: No such file"),
        (["--launch", "ddp", "--processes", "2"], "wraps no model in DDP or FSDP2, .* leave --launch out"),
    ],
)  # fmt: skip
def test_refused_launches(words: list[str], said: str, tmp_path: Path) -> None:
    ended = CliRunner().invoke(
        app, ["dry-run", "--device", "t4", *words, str(SCRIPTS / "plain.py"), f"{tmp_path}/log"]
    )
    assert isinstance(ended.exception, UserError)
    with pytest.raises(UserError, match=said):
        raise ended.exception


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("distributed_type: FSDP\nfsdp_config: {fsdp_version: 1}\n", "FSDP 1 is not known"),
        ("distributed_type: 'NO'\n", "accelerate starts one process; set distributed_type"),
    ],
)
def test_refused_configurations(config: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "launch.yaml"
    file.write_text(f"{config}num_processes: 2\n")
    words = ["--launch", str(file), "--device", "t4", str(SCRIPTS / "accelerated.py")]
    ended = CliRunner().invoke(app, ["dry-run", *words])
    assert isinstance(ended.exception, UserError)
    with pytest.raises(UserError, match=said):
        raise ended.exception
