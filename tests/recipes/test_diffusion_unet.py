"""recipes/diffusion_unet.py on tiny pipelines of every architecture, run in this process."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, StableDiffusionPipeline, StableDiffusionXLPipeline
from PIL import Image
from recipe_scripts import assert_same_weights, copy_checkpoint, load_recipe, losses_of, losses_on_two_ranks
from safetensors.torch import load_file
from tiny_unets import make_tiny_pipeline

from ckpt_ft.checkpointing.verify import VerificationError
from ckpt_ft.errors import Interrupted, UserError, WorkFailed, run
from ckpt_ft.planning.plan import plan
from ckpt_ft.training.arguments import ACArguments
from ckpt_ft.training.checkpoints import PIPELINE_LORA, last_complete_checkpoint
from ckpt_ft.training.diffusion.arguments import DiffusionModelArguments, LoopArguments
from ckpt_ft.training.diffusion.loop import read_losses
from ckpt_ft.training.diffusion.sampling import Validation
from ckpt_ft.training.images import ImageArguments
from ckpt_ft.training.run_arguments import parse_args
from ckpt_ft.training.session import Session

pytestmark = pytest.mark.usefixtures("one_process")

ROOT = Path(__file__).parents[2]
SMALL = ["--max_train_samples", "20", "--train_batch_size", "2", "--max_train_steps", "4", "--lr_warmup_steps", "1"]
QUIET = ["--ac_report", "none"]
RANDOM = [  # everything in a step that draws random numbers
    "--rank", "2", "--lora_dropout", "0.2", "--no_center_crop", "--random_flip", "--proportion_empty_prompts", "0.3",
    "--noise_offset", "0.1", "--snr_gamma", "5", "--use_ema", "--gradient_accumulation_steps", "2",
    "--lr_scheduler", "cosine",
]  # fmt: skip


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Directories of tiny pipelines, by kind; the VAE's decoder is random."""
    root = tmp_path_factory.mktemp("pipelines")
    for kind in ("sd1", "sd2", "sdxl"):
        make_tiny_pipeline(kind, 0, (16, 32)).save_pretrained(root / kind)
    return {kind: str(root / kind) for kind in ("sd1", "sd2", "sdxl")}


@pytest.fixture(scope="module")
def recipe() -> ModuleType:
    return load_recipe("diffusion_unet")


def train(recipe: ModuleType, base: str, out: Path, *flags: str, quiet: bool = True) -> list[float]:
    """Returns the losses of a run with output in `out`."""
    return losses_of(recipe, base, out, *SMALL, *(QUIET if quiet else []), *flags)


def draw(pipeline: DiffusionPipeline) -> np.ndarray:
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(0)
    return np.asarray(
        pipeline("a red circle", height=32, width=32, num_inference_steps=2, generator=generator).images[0]
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sd1", "sd2", "sdxl"])
def test_saved_unet_is_a_pipeline(recipe: ModuleType, tiny: dict[str, str], tmp_path: Path, kind: str) -> None:
    losses = train(recipe, tiny[kind], tmp_path / "out", "--learning_rate", "1e-3", "--checkpointing_steps", "4")
    assert len(losses) == 4
    classes = {"sd1": StableDiffusionPipeline, "sd2": StableDiffusionPipeline, "sdxl": StableDiffusionXLPipeline}
    trained = classes[kind].from_pretrained(tmp_path / "out")
    base = classes[kind].from_pretrained(tiny[kind])
    assert trained.unet.state_dict().keys() == base.unet.state_dict().keys()
    assert not torch.equal(trained.unet.conv_in.weight, base.unet.conv_in.weight)
    assert torch.equal(trained.vae.encoder.conv_in.weight, base.vae.encoder.conv_in.weight)
    assert draw(trained).shape == (32, 32, 3)
    assert (draw(trained) != draw(base)).any()
    # the checkpoint has the U-Net in diffusers' format
    unet = type(trained.unet).from_pretrained(tmp_path / "out" / "checkpoint-4", subfolder="unet")
    assert torch.equal(unet.conv_in.weight, trained.unet.conv_in.weight)


@pytest.mark.parametrize("kind", ["sd1", "sd2", "sdxl"])
def test_unet_lora_loads_in_pipelines(recipe: ModuleType, tiny: dict[str, str], tmp_path: Path, kind: str) -> None:
    flags = ["--rank", "2", "--lora_alpha", "8", "--learning_rate", "1e-2", "--checkpointing_steps", "4"]
    train(recipe, tiny[kind], tmp_path / "out", *flags)
    pipeline = DiffusionPipeline.from_pretrained(tiny[kind])
    plain = draw(pipeline)
    pipeline.load_lora_weights(tmp_path / "out", weight_name=PIPELINE_LORA)
    config = pipeline.unet.peft_config["default_0"]
    assert (config.r, config.lora_alpha) == (2, 8)
    assert (draw(pipeline) != plain).any()
    files = [
        path / "pytorch_lora_weights.safetensors" for path in (tmp_path / "out", tmp_path / "out" / "checkpoint-4")
    ]
    result, checkpoint = map(load_file, files)
    assert all(torch.equal(result[name], checkpoint[name]) for name in result)
    assert (
        sum(path.stat().st_size for path in (tmp_path / "out" / "checkpoint-4").iterdir()) < 300_000
    )  # it contains no frozen U-Net


@pytest.mark.parametrize(
    "flags", [pytest.param(["--use_ema"], id="cached", marks=pytest.mark.slow), pytest.param(RANDOM, id="random")]
)
def test_resumed_unet_has_equal_losses(
    recipe: ModuleType, tiny: dict[str, str], tmp_path: Path, flags: list[str]
) -> None:
    """Bit for bit, from within the first or a later epoch; the saved weights are equal too."""
    flags = [*flags, "--max_train_steps", "6", "--checkpointing_steps", "2", "--learning_rate", "1e-3"]
    flags += ["--max_train_samples", "7"]
    whole = train(recipe, tiny["sdxl"], tmp_path / "whole", *flags)
    for step in (2, 4):
        part = copy_checkpoint(tmp_path / "whole", step, tmp_path / f"from-{step}")
        assert train(recipe, tiny["sdxl"], part, *flags, "--resume_from_checkpoint", "latest") == whole
        results = sorted(path.relative_to(part) for path in part.glob("*.safetensors")) or [
            Path("unet/diffusion_pytorch_model.safetensors")
        ]
        for name in results:
            assert_same_weights(part / name, tmp_path / "whole" / name)


@pytest.mark.parametrize("policy", [pytest.param("full", marks=pytest.mark.slow), "save:conv+attention"])
def test_policy_keeps_losses_of_a_unet(recipe: ModuleType, tiny: dict[str, str], tmp_path: Path, policy: str) -> None:
    plain = train(recipe, tiny["sd2"], tmp_path / "plain", "--rank", "2", "--lora_dropout", "0.2")
    flags = ["--rank", "2", "--lora_dropout", "0.2", "--ac_policy", policy, "--ac_check"]
    assert train(recipe, tiny["sd2"], tmp_path / "policy", *flags) == plain


def test_verification_error_in_the_loop_names_the_block(
    recipe: ModuleType, tiny: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Activations read a number that differs in backward."""
    silu = torch.nn.SiLU.forward
    monkeypatch.setattr(
        torch.nn.SiLU, "forward", lambda self, x: silu(self, x) * (1 + (torch._C._current_graph_task_id() != -1))
    )
    with pytest.raises(VerificationError) as error:
        train(recipe, tiny["sd1"], tmp_path, "--ac_policy", "full")
    assert error.value.region == "down_blocks.0.resnets.0"
    assert (error.value.operator, error.value.differs) == ("MulBackward0", "values")


def test_out_of_memory_in_the_loop_ends_with_advice(
    recipe: ModuleType, tiny: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed run has the losses of an undisturbed one."""
    flags = ["--rank", "2", "--lora_dropout", "0.2", "--checkpointing_steps", "2"]
    plain = train(recipe, tiny["sd1"], tmp_path / "plain", *flags)
    monkeypatch.setattr("ckpt_ft.training.fit.plan", partial(plan, policies=["none", "full"]))
    step, calls = Session.step, []

    def fourth_fails(memory: Session) -> dict[str, float]:
        calls.append(memory)
        if len(calls) == 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return step(memory)

    monkeypatch.setattr(Session, "step", fourth_fails)
    with pytest.raises(WorkFailed, match=r"out of memory: CUDA out of memory(.|\n)*a smaller --ac_budget"):
        train(recipe, tiny["sd1"], tmp_path / "out", *flags, "--ac_policy", "auto", "--ac_budget", "1GiB")
    assert train(recipe, tiny["sd1"], tmp_path / "out", *flags, "--resume_from_checkpoint", "latest") == plain


@pytest.mark.slow
def test_largest_batch_within_a_budget(
    recipe: ModuleType, tiny: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Five samples fit with gradients, so eight are two micro-batches; trials keep the weights and random state."""
    flags = ["--train_batch_size", "8", "--find_max_batch_size", "--ac_budget", "10MiB"]
    found = train(recipe, tiny["sd1"], tmp_path / "found", *flags, "--max_train_steps", "1")
    said = capsys.readouterr().out
    assert "largest batch in 10.0 MiB: predicted 5, proved 5 (2 steps, 0 out of memory)" in said
    assert "micro-batch 4 (was 8) x 2 accumulation steps (was 1): the effective batch stays 8" in said
    flags = ["--train_batch_size", "4", "--gradient_accumulation_steps", "2", "--max_train_steps", "1"]
    assert train(recipe, tiny["sd1"], tmp_path / "plain", *flags) == found


def test_cached_latents_give_losses_of_uncached_ones(recipe: ModuleType, tiny: dict[str, str], tmp_path: Path) -> None:
    cached = train(recipe, tiny["sd1"], tmp_path / "cached")
    plain = train(recipe, tiny["sd1"], tmp_path / "plain", "--cache_latents", "false")
    assert plain == pytest.approx(cached, rel=1e-5)


def test_validation_report_and_trackers(recipe: ModuleType, tiny: dict[str, str], tmp_path: Path) -> None:
    prompts = ["a large red circle at the top left on white", "a small blue star at the right on black"]
    flags = ["--validation_prompt", *prompts, "--validation_steps", "2", "--validation_inference_steps", "2"]
    flags += ["--report_to", "tensorboard", "--ac_policy", "full", "--use_ema"]
    out = tmp_path / "out"
    losses = train(recipe, tiny["sd2"], out, *flags, quiet=False)
    plain = train(recipe, tiny["sd2"], tmp_path / "plain", "--use_ema")
    assert losses == plain  # neither validation nor measuring changes random draws of training
    assert sorted(path.name for path in (out / "samples").iterdir()) == [f"step-00000{n}.png" for n in (0, 2, 4)]
    with Image.open(out / "samples.png") as sheet, Image.open(out / "samples" / "step-000000.png") as row:
        assert sheet.height == 3 * row.height  # three validations
    report = json.loads((out / "memory_report.json").read_text())
    assert set(report["ranks"][0]["peaks"]) == {"forward", "backward", "optimizer"}
    assert report["provenance"]["policy"] == "full"
    assert report["ranks"][0]["predicted"]["allocated"] == pytest.approx(
        max(peak["allocated"] for peak in report["ranks"][0]["peaks"].values()), rel=0.05
    )
    assert (out / "memory_report.md").exists()
    assert list((out / "logs").rglob("events.out.tfevents*"))


@pytest.mark.slow
def test_failed_validation_is_a_warning(
    recipe: ModuleType,
    tiny: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(*args: object) -> None:
        raise ValueError("no such sampler")

    monkeypatch.setattr(Validation, "run", broken)
    flags = ["--rank", "2", "--validation_prompt", "a red circle", "--validation_steps", "2"]
    with caplog.at_level(logging.WARNING, "ckpt_ft"):
        assert len(train(recipe, tiny["sd1"], tmp_path, *flags)) == 4
    assert (tmp_path / "pytorch_lora_weights.safetensors").is_file()
    said = [record.message for record in caplog.records if record.name == "ckpt_ft.training.session"]
    assert said == ["validation failed; training is not affected: ValueError: no such sampler"] * 3


def test_yaml_file_and_image_folder(recipe: ModuleType, tiny: dict[str, str], tmp_path: Path) -> None:
    images = tmp_path / "images"
    images.mkdir()
    for number in range(4):
        Image.new("RGB", (50, 40), (60 * number, 0, 0)).save(images / f"{number}.png")
    rows = [{"file_name": f"{number}.png", "what": f"shade {number}"} for number in range(4)]
    (images / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = tmp_path / "run.yaml"
    config.write_text(f"train_data_dir: {images}\ncaption_column: what\nresolution: 40\nrank: 3\nmax_train_steps: 9\n")
    losses = train(recipe, tiny["sd1"], tmp_path / "out", "--config", str(config))
    assert len(losses) == 4  # the command line wins
    adapter = load_file(tmp_path / "out" / "pytorch_lora_weights.safetensors")
    assert min(next(value for name, value in adapter.items() if "lora" in name).shape) == 3


@pytest.mark.slow
def test_full_disk_in_the_unet_recipe(
    recipe: ModuleType, tiny: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writing the second checkpoint fails, and the run can continue from the first."""
    import accelerate.checkpointing

    out = tmp_path / "out"
    save = accelerate.checkpointing.save

    def full(state: object, place: Path, **kwargs: object) -> None:
        if "checkpoint-4" in str(place):
            raise OSError(28, "No space left on device")
        save(state, place, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(accelerate.checkpointing, "save", full)
        with pytest.raises(WorkFailed, match="No space left on device"):
            train(recipe, tiny["sd1"], out, "--checkpointing_steps", "2", "--rank", "2")
    assert last_complete_checkpoint(out) == str(out / "checkpoint-2")
    flags = ["--rank", "2", "--resume_from_checkpoint", "latest"]
    assert len(train(recipe, tiny["sd1"], out, *flags)) == 4


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--pretrained_model_name_or_path", "/nowhere"], "no usable model_index.json"),
        (["--rank", "0"], "--rank 0"),
        (["--resolution", "36"], "must be a multiple of "),
        (["--train_data_dir", "/nowhere"], "no such directory"),
        (["--resume_from_checkpoint", "latest"], "no complete checkpoint"),
        (["--ac_policy", "save:atention"], "did you mean 'attention'"),
        (["--mixed_precision", "fp16"], "--mixed_precision fp16 needs a GPU; on a CPU give bf16 or no"),
        (["--lerning_rate", "1"], "did you mean '--learning_rate'"),
    ],
)
def test_invalid_flags_of_the_unet_recipe_are_refused(
    recipe: ModuleType, tiny: dict[str, str], tmp_path: Path, flags: list[str], words: str
) -> None:
    out = tmp_path / "out"
    with pytest.raises(UserError, match=words):
        train(recipe, tiny["sd1"], out, *flags)
    assert not out.exists() or {path.name for path in out.iterdir()} <= {"_run.lock"}


def test_failed_first_step_of_the_loop_is_one_line(
    recipe: ModuleType, tiny: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: object, **kwargs: object) -> None:
        raise RuntimeError("mat1 and mat2\nmust agree")

    monkeypatch.setattr("ckpt_ft.training.diffusion.loop.optimizer_step", fails)
    with pytest.raises(UserError, match="the first step failed .*: RuntimeError: mat1 and mat2 must agree"):
        train(recipe, tiny["sd1"], tmp_path / "out", "--rank", "2")


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--rank", "0", "--rank 0: it should be greater than or equal to 1"),
        ("--instance_prompt", "a dog", "--instance_prompt belongs to --instance_data_dir"),
    ],
)
def test_exit_code_of_an_invalid_flag(
    recipe: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flag: str, value: str,
    message: str, tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.setattr("sys.argv", ["diffusion_unet.py", flag, value, "--output_dir", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as stopped:
        run(recipe.main)
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {message}")
    assert said.count("\n") == 1


CONFIGS = sorted((ROOT / "recipes" / "diffusion").glob("*.yaml"))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_unet_yaml_files_parse_and_contain_their_command(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())  # as if bitsandbytes were installed
    model, images, _, ac = parse_args(
        (DiffusionModelArguments, ImageArguments, LoopArguments, ACArguments), ["--config", str(config)]
    )
    assert model.pretrained_model_name_or_path is not None
    assert (model.rank is not None) is ("lora" in config.stem)
    assert images.cache_latents
    assert ac.policy is not None
    comment = " ".join(line.strip("# \\") for line in config.read_text().splitlines() if line.startswith("#"))
    assert f"accelerate launch -q --config_file accelerate_configs/single_gpu.yaml {SCRIPT}" in comment
    assert f"--config recipes/diffusion/{config.name}" in comment


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_is_deferred_to_the_end_of_the_loops_step(
    recipe: ModuleType, tiny: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """The run finishes its step and a checkpoint; a resumed run ends like an undisturbed one."""
    flags = ["--rank", "2", "--lora_dropout", "0.2", "--use_ema"]
    whole = train(recipe, tiny["sd1"], tmp_path / "whole", *flags)
    out, calls = tmp_path / "out", []

    def step(memory: Session) -> None:
        calls.append(memory)
        if len(calls) == 2:
            os.kill(os.getpid(), number)

    with monkeypatch.context() as patch:
        patch.setattr(Session, "step", step)
        with pytest.raises(
            Interrupted, match="checkpoint-2 is complete: the same command with --resume_from"
        ) as stopped:
            train(recipe, tiny["sd1"], out, *flags)
    assert stopped.value.number == number
    assert not (out / "pytorch_lora_weights.safetensors").exists()
    with pytest.raises(UserError, match="holds checkpoint-2 of an earlier run"):
        train(recipe, tiny["sd1"], out, *flags)
    assert train(recipe, tiny["sd1"], out, *flags, "--resume_from_checkpoint", "latest") == whole
    name = "pytorch_lora_weights.safetensors"
    assert_same_weights(out / name, tmp_path / "whole" / name)
    assert not list(out.rglob("custom_checkpoint*"))


SCRIPT = "recipes/diffusion_unet.py"
ONE_THREAD = (
    "import os, runpy, sys; os.cpu_count = lambda: 1; sys.argv = sys.argv[1:]; "
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)


def start(base: str, out: Path, *flags: str) -> subprocess.Popen[bytes]:
    """Starts the recipe in a new process, with the thread count of the runs in this one."""
    command = [sys.executable, "-c", ONE_THREAD, SCRIPT, "--pretrained_model_name_or_path", base, *SMALL, *QUIET]
    with (out.parent / f"{out.name}.log").open("ab") as log:
        return subprocess.Popen([*command, "--output_dir", str(out), *flags], cwd=ROOT, stdout=log, stderr=log)


def resume_flags(out: Path) -> list[str]:
    """Returns the flags after a kill; without a complete checkpoint the run starts again."""
    whole = last_complete_checkpoint(str(out)) is not None
    return ["--resume_from_checkpoint", "latest"] if whole else ["--overwrite_output_dir"]


def kill_until_done(base: str, out: Path, kills: int, flags: list[str], seed: int) -> None:
    """Kills the run `kills` times, after random numbers of steps and fractions of a second, then finishes it."""
    draw = random.Random(seed)
    for _ in range(kills):
        process = start(base, out, *flags, *resume_flags(out))
        before = max((line["step"] for line in read_losses(str(out))), default=0)
        until = draw.randint(1, 3)
        deadline = time.monotonic() + 300
        while process.poll() is None and time.monotonic() < deadline:
            steps = [line["step"] for line in read_losses(str(out))]
            if steps and (max(steps) - (before if max(steps) >= before else 0)) >= until:
                break
            time.sleep(0.005)
        time.sleep(draw.random() * 0.2)
        process.kill()
        process.wait()
    process = start(base, out, *flags, *resume_flags(out))
    assert process.wait(300) == 0, (out.parent / f"{out.name}.log").read_text()[-2000:]


@pytest.mark.slow
@pytest.mark.parametrize("kills", [1, 10])
def test_run_killed_at_any_moment_has_the_same_losses(
    recipe: ModuleType, tiny: dict[str, str], tmp_path: Path, kills: int
) -> None:
    """A run killed by signal 9 and resumed has the losses and weights of an undisturbed run."""
    flags = ["--max_train_steps", str(6 + 4 * (kills - 1)), "--checkpointing_steps", "1"]
    flags += ["--checkpoints_total_limit", "2", "--learning_rate", "1e-3", "--rank", "2", "--lora_dropout", "0.1"]
    whole = train(recipe, tiny["sd1"], tmp_path / "whole", *flags)
    kill_until_done(tiny["sd1"], tmp_path / "killed", kills, flags, seed=kills)
    assert [line["loss"] for line in read_losses(str(tmp_path / "killed"))] == whole
    name = "pytorch_lora_weights.safetensors"
    assert_same_weights(tmp_path / "killed" / name, tmp_path / "whole" / name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "flags"), [("sd2", []), ("sd1", ["--rank", "2"]), ("sdxl", ["--rank", "2", "--use_ema"]), ("sdxl", [])]
)
def test_two_processes_train_one_unet(tiny: dict[str, str], tmp_path: Path, kind: str, flags: list[str]) -> None:
    """They train one model on different rows and noise, report the memory of both ranks, and resume."""

    def launch(out: Path, *more: str) -> list[float]:
        # the hashes of a verified step are 1 % of such a small model with adapters
        common = [*SMALL, "--checkpointing_steps", "2", "--ac_policy", "full", "--ac_verify", "never"]
        return losses_on_two_ranks(SCRIPT, tiny[kind], out, *common, *flags, *more)

    whole = launch(tmp_path / "whole")
    assert len(whole) == 4
    report = json.loads((tmp_path / "whole" / "memory_report.json").read_text())
    assert [rank["rank"] for rank in report["ranks"]] == [0, 1]
    for rank in report["ranks"]:
        measured = max(figures["allocated"] for figures in rank["peaks"].values())
        assert rank["predicted"]["allocated"] == pytest.approx(measured, rel=5e-3)
    states = [tmp_path / "whole" / "checkpoint-2" / f"random_states_{rank}.pkl" for rank in (0, 1)]
    assert states[0].read_bytes() != states[1].read_bytes()
    part = copy_checkpoint(tmp_path / "whole", 2, tmp_path / "part")
    assert launch(part, "--resume_from_checkpoint", "latest", "--ac_report", "none") == whole
