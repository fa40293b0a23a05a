"""Parts of the diffusion recipe: loss weights, noise, dropped prompts, adapters."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from diffusers import DDPMScheduler
from diffusers.training_utils import EMAModel
from tiny_unets import make_tiny_pipeline

from ckpt_ft.errors import UserError
from ckpt_ft.training.diffusion.arguments import DiffusionModelArguments
from ckpt_ft.training.diffusion.denoiser import TRAINED, load_trained, prepare, register_checkpoint_hooks
from ckpt_ft.training.diffusion.encoders import Encoders, family_of, load_denoiser
from ckpt_ft.training.diffusion.families import UNET
from ckpt_ft.training.diffusion.loop import averaged
from ckpt_ft.training.diffusion.workload import Denoising, drop_prompts, weighted_loss


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> DiffusionModelArguments:
    path = tmp_path_factory.mktemp("sd2")
    make_tiny_pipeline("sd2", 0, (16,)).save_pretrained(path)
    return DiffusionModelArguments(pretrained_model_name_or_path=str(path))


def denoising(scheduler: DDPMScheduler, **flags: float) -> Denoising:
    """Returns an objective that takes its latents directly from the moments."""
    family: Any = replace(UNET, latents=lambda vae, moments: moments)
    return Denoising(family, None, None, scheduler, DiffusionModelArguments(**flags))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["epsilon", "v_prediction"])
def test_correct_prediction_recovers_the_latents(kind: str) -> None:
    """The clean latents follow from the noisy ones and a correct prediction, by each parametrisation's formula."""
    scheduler = DDPMScheduler(prediction_type=kind)
    latents = torch.randn(6, 4, 8, 8)
    batch = denoising(scheduler)({"moments": latents, "prompt_embeds": torch.zeros(6, 3, 2)})
    inputs, target = batch["inputs"], batch["target"]
    alpha = scheduler.alphas_cumprod[inputs["timestep"]].view(-1, 1, 1, 1)
    if kind == "epsilon":
        rebuilt = (inputs["sample"] - (1 - alpha).sqrt() * target) / alpha.sqrt()
        close = inputs["timestep"] < 800  # later times divide by almost zero
        torch.testing.assert_close(rebuilt[close], latents[close], atol=1e-3, rtol=1e-3)
    else:
        rebuilt = alpha.sqrt() * inputs["sample"] - (1 - alpha).sqrt() * target
        torch.testing.assert_close(rebuilt, latents, atol=1e-5, rtol=1e-5)


def test_noise_offset_is_constant_over_an_image() -> None:
    means = []
    for offset in (0.0, 1.0):
        torch.manual_seed(0)
        made = denoising(DDPMScheduler(), noise_offset=offset)
        target = made({"moments": torch.zeros(64, 4, 16, 16), "prompt_embeds": torch.zeros(1)})["target"]
        means.append(target.mean(dim=(2, 3)).std())
    assert means[0] < 0.08  # 1 / 16
    assert 0.85 < means[1] < 1.15


def test_min_snr_weights_equal_the_papers() -> None:
    """The weights follow the paper's table, from the schedule's signal-to-noise ratios."""
    times = torch.tensor([1, 300, 700, 990])
    prediction, latents, noise = torch.randn(3, 4, 2, 3, 3)
    prompts = {"prompt_embeds": torch.zeros(1)}
    for kind, extra in (("epsilon", 0), ("v_prediction", 1)):
        scheduler = DDPMScheduler(prediction_type=kind)
        alpha = scheduler.alphas_cumprod[times]
        snr = alpha / (1 - alpha)
        batch = denoising(scheduler, snr_gamma=5.0).batch(latents, noise, times, prompts)
        errors = (prediction - batch["target"]).square().mean(dim=(1, 2, 3))
        expected = (errors * torch.minimum(snr, torch.full_like(snr, 5.0)) / (snr + extra)).mean()
        torch.testing.assert_close(weighted_loss(lambda **inputs: (prediction,), batch), expected)
        plain = weighted_loss(
            lambda **inputs: (prediction.half(),), denoising(scheduler).batch(latents, noise, times, prompts)
        )
        assert plain.dtype == torch.float32
        torch.testing.assert_close(plain, errors.mean(), atol=1e-2, rtol=1e-2)


def test_share_of_dropped_prompts() -> None:
    encoded = {
        "prompt_embeds": torch.ones(4000, 3, 2),
        "pooled_prompt_embeds": torch.ones(4000, 5),
        "moments": torch.ones(1),
    }
    empty = {"prompt_embeds": torch.zeros(1, 3, 2), "pooled_prompt_embeds": torch.zeros(1, 5)}
    drop_prompts(encoded, empty, 0.25)
    dropped = encoded["prompt_embeds"].amax(dim=(1, 2)) == 0
    assert 0.22 < dropped.float().mean() < 0.28
    assert torch.equal(dropped, encoded["pooled_prompt_embeds"].amax(dim=1) == 0)
    state = torch.random.get_rng_state()
    drop_prompts(encoded, empty, 0.0)
    assert torch.equal(state, torch.random.get_rng_state())


def trained_of(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


@pytest.mark.parametrize("rank", [None, 2])
def test_saved_weights_load_again(tiny: DiffusionModelArguments, tmp_path: Path, rank: int | None) -> None:
    args = copy.copy(tiny)
    args.rank, args.lora_alpha = rank, None if rank is None else 7
    unets = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        unet = prepare(load_denoiser(args, UNET, torch.float32), args, torch.float32)
        for parameter in trained_of(unet):
            torch.nn.init.normal_(parameter)
        unets.append(unet)
    lora, saving = rank is not None, Accelerator(cpu=True)
    saving.prepare(unets[0])
    register_checkpoint_hooks(saving, UNET, lora)
    saving.save_state(str(tmp_path))
    load_trained(unets[1], UNET, tmp_path, lora)
    pairs = zip(unets[0].parameters(), unets[1].parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert (tmp_path / TRAINED).exists() is lora  # the whole weights are in diffusers' format
    if lora:
        args.rank = 3
        other = prepare(load_denoiser(args, UNET, torch.float32), args, torch.float32)
        with pytest.raises(RuntimeError, match="size mismatch"):
            load_trained(other, UNET, tmp_path, lora)
        args.train_text_encoder = True
        with pytest.raises(RuntimeError, match="its adapters are of other layers than those of this TextAndUNet"):
            load_trained(prepare(load_denoiser(args, UNET, torch.float32), args, torch.float32), UNET, tmp_path, lora)


def test_lora_trains_adapters_only(tiny: DiffusionModelArguments) -> None:
    args = copy.copy(tiny)
    args.rank = 2
    unet = load_denoiser(args, UNET, torch.float32)
    layers = sum(name.endswith(("to_q", "to_k", "to_v", "to_out.0")) for name, _ in unet.named_modules())
    parameters = trained_of(prepare(unet, args, torch.bfloat16))
    assert len(parameters) == 2 * layers
    assert {parameter.dtype for parameter in parameters} == {torch.float32}
    assert unet.conv_in.weight.dtype == torch.bfloat16


def test_averaged_weights_are_replaced_again(tiny: DiffusionModelArguments) -> None:
    parameters = [torch.nn.Parameter(torch.ones(3))]
    ema = EMAModel(parameters)
    with torch.no_grad():
        parameters[0].fill_(5.0)
    with averaged(ema, parameters):
        assert parameters[0].tolist() == [1, 1, 1]
    assert parameters[0].tolist() == [5, 5, 5]
    with averaged(None, parameters):
        assert parameters[0].tolist() == [5, 5, 5]


def test_unsupported_pipelines_are_refused(tiny: DiffusionModelArguments, tmp_path: Path) -> None:
    def args(path: Path) -> DiffusionModelArguments:
        return DiffusionModelArguments(pretrained_model_name_or_path=str(path))

    with pytest.raises(UserError, match="no usable model_index.json"):
        family_of(args(tmp_path))
    make_tiny_pipeline("sd1", 0, (16,)).save_pretrained(tmp_path / "odd")
    (tmp_path / "odd" / "vae" / "config.json").unlink()
    with pytest.raises(UserError, match="no usable vae"):
        Encoders(args(tmp_path / "odd"), UNET, torch.device("cpu"), torch.float32)
    changed = copy.copy(tiny)
    changed.prediction_type = "epsilon"
    for flags, kind in ((tiny, "v_prediction"), (changed, "epsilon")):
        scheduler = Encoders(flags, UNET, torch.device("cpu"), torch.float32).scheduler
        assert scheduler.config.prediction_type == kind
