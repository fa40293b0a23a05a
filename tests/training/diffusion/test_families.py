"""Each family of diffusion transformers follows its pipeline: equal training inputs under any policy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.training_utils import compute_loss_weighting_for_sd3
from tiny_transformers import KINDS, make_tiny_transformer

from ckpt_ft.checkpointing.parity import check_parity
from ckpt_ft.errors import UserError
from ckpt_ft.training.diffusion.arguments import TransformerArguments
from ckpt_ft.training.diffusion.denoiser import prepare
from ckpt_ft.training.diffusion.families import FAMILIES, Family
from ckpt_ft.training.diffusion.workload import FlowMatching, weighted_loss
from ckpt_ft.workloads.workload import Batch

CPU = torch.device("cpu")
TOKENS = 8
POLICIES = ["full", "every:2", "segments:2", "save:attention+matmul", "pointwise", "full,offload"]


@pytest.fixture(scope="module", params=list(KINDS))
def pipeline(request: pytest.FixtureRequest) -> Any:
    return make_tiny_transformer(request.param)


@pytest.fixture(scope="module")
def family(pipeline: Any) -> Family:
    return FAMILIES[type(pipeline).__name__]


@pytest.fixture
def batch(pipeline: Any, family: Family) -> Batch:
    """Returns two images and captions as the recipe passes them to the transformer."""
    torch.manual_seed(0)
    pixels = torch.rand(2, 3, 32, 32) * 2 - 1
    with torch.no_grad():
        encoded = family.encode(pipeline, ["a red circle", "a large star on black"], TOKENS, CPU)
        flow = flow_of(pipeline, family)
        return flow({"moments": family.moments(pipeline.vae, pixels), **encoded})


def flow_of(pipeline: Any, family: Family, **asked: Any) -> FlowMatching:
    times = FlowMatchEulerDiscreteScheduler(shift=3.0)
    return FlowMatching(family, pipeline.transformer.config, pipeline.vae, times, TransformerArguments(**asked))


@pytest.mark.parametrize("rank", [None, 2], ids=["full", "lora"])
def test_policies_keep_the_gradients_of_transformers(pipeline: Any, batch: Batch, rank: int | None) -> None:
    """Bit-equal (`pointwise`: to 1e-6), for all weights and for adapters with dropout."""
    model = make_tiny_transformer(kind_of(pipeline)).transformer
    args = TransformerArguments(rank=rank, lora_dropout=0.2 if rank else 0.0)
    for parameter in prepare(model, args, torch.float32).parameters():
        if rank and parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)  # an adapter starts at zero
    for policy in POLICIES:
        parity = check_parity(model, batch, policy, loss=weighted_loss)
        assert parity.ok, (policy, parity)


def kind_of(pipeline: Any) -> str:
    return next(kind for kind, name in PIPELINES.items() if name == type(pipeline).__name__)


@pytest.mark.filterwarnings("ignore:__array__ implementation")  # warnings of diffusers' DPM solver
def test_pipeline_calls_the_transformer_as_training_does(pipeline: Any, family: Family, batch: Batch) -> None:
    """Arguments and shapes are the same; values too, for equal latents, prompt and time."""
    seen: list[dict[str, Any]] = []
    transformer = pipeline.transformer
    hook = transformer.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append({**({"hidden_states": args[0]} if args else {}), **kwargs}),
        with_kwargs=True,
    )
    try:
        prompts = family.encode(pipeline, ["a red circle"], TOKENS, CPU)
        pipeline.set_progress_bar_config(disable=True)
        arguments = {**prompts, "height": 32, "width": 32, "num_inference_steps": 1}
        family.draw(pipeline, torch.no_grad, 1.0, {**arguments, "generator": torch.Generator().manual_seed(0)})
    finally:
        hook.remove()
    drawn = {name: value for name, value in seen[0].items() if value is not None and name != "return_dict"}
    with torch.no_grad():
        latents = torch.zeros(1, *flow_shape(pipeline, family))
        # one of the samplers does not start at pure noise
        sigma = drawn["timestep"] / 1000 if family.name == "Sana" else torch.ones(1)
        ours = family.inputs(transformer.config, latents, sigma, prompts, 1.0)
    for name, value in ours.items():
        if name in drawn:
            theirs = drawn.pop(name)
            if name == "hidden_states":
                assert value.shape == theirs.shape
            elif isinstance(value, torch.Tensor):
                torch.testing.assert_close(value, theirs.float().reshape(value.shape).to(value), rtol=0, atol=0)
            else:
                assert value == theirs
        else:
            assert (name, value.all()) == ("encoder_hidden_states_mask", True)  # the pipeline omits a mask of ones
    assert set(drawn) <= {"joint_attention_kwargs", "attention_kwargs"}


def flow_shape(pipeline: Any, family: Family) -> tuple[int, ...]:
    with torch.no_grad():
        pixels = torch.zeros(1, 3, 32, 32)
        return tuple(family.latents(pipeline.vae, family.moments(pipeline.vae, pixels)).shape[1:])


def test_correct_prediction_recovers_the_image(pipeline: Any, family: Family, batch: Batch) -> None:
    """Latents at time s, minus s times the direction, are the image's; the loss of a correct prediction is zero."""
    flow, latents = flow_of(pipeline, family), torch.randn(2, *flow_shape(pipeline, family))
    noise, sigmas = torch.randn_like(latents), torch.tensor([0.25, 0.9])
    made = flow.batch(latents, noise, sigmas, prompts_of(pipeline, family))
    shown, target = made["inputs"]["hidden_states"], made["target"]
    back = shown - sigmas.view(2, *[1] * (shown.dim() - 1)) * target
    torch.testing.assert_close(back, family.pack(latents))
    assert weighted_loss(lambda **inputs: (target,), made) == 0.0
    off = weighted_loss(lambda **inputs: (target + 0.5,), made)
    assert off == pytest.approx(0.25)


def prompts_of(pipeline: Any, family: Family) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        return family.encode(pipeline, ["a red circle", ""], TOKENS, CPU)


@pytest.mark.parametrize(("scheme", "mean"), [("none", 0.676), ("logit_normal", 0.713), ("mode", 0.709)])
def test_times_follow_diffusers_densities_and_the_schedulers_shift(scheme: str, mean: float) -> None:
    draw = Draw()
    row = SimpleNamespace(latents=lambda vae, moments: moments, inputs=draw, pack=lambda latents: latents)
    args = TransformerArguments(weighting_scheme=scheme)
    flow = FlowMatching(row, None, None, FlowMatchEulerDiscreteScheduler(shift=3.0), args)  # type: ignore[arg-type]
    torch.manual_seed(0)
    flow({"moments": torch.zeros(4000, 1, 1, 1)})
    assert draw.sigmas.mean().item() == pytest.approx(mean, abs=0.02)
    assert draw.sigmas.min() > 0
    assert draw.sigmas.max() <= 1


@pytest.mark.parametrize("scheme", ["sigma_sqrt", "cosmap"])
def test_loss_weights_equal_diffusers(scheme: str) -> None:
    row = SimpleNamespace(inputs=Draw(), pack=lambda latents: latents)
    args = TransformerArguments(weighting_scheme=scheme)
    flow = FlowMatching(row, None, None, FlowMatchEulerDiscreteScheduler(), args)  # type: ignore[arg-type]
    sigmas = torch.tensor([0.1, 0.5, 1.0])
    made = flow.batch(torch.zeros(3, 1, 1, 1), torch.ones(3, 1, 1, 1), sigmas, {})
    assert torch.equal(made["weight"], compute_loss_weighting_for_sd3(scheme, sigmas))
    expected = (made["weight"] * torch.tensor([1.0, 1.0, 1.0])).mean()
    assert weighted_loss(lambda **inputs: (torch.zeros(3, 1, 1, 1),), made | {"inputs": {}}) == expected


class Draw:
    """An `inputs` that stores the times."""

    sigmas: torch.Tensor

    def __call__(self, config: Any, noisy: Any, sigmas: torch.Tensor, prompts: Any, guidance: float) -> dict[str, Any]:
        self.sigmas = sigmas
        return {"hidden_states": noisy}


PIPELINES = dict(zip(KINDS, ["FluxPipeline", "Flux2KleinPipeline", "StableDiffusion3Pipeline", "QwenImagePipeline",
                             "SanaPipeline"], strict=True))  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"load_in_4bit": True}, "add --rank for QLoRA"),
        ({"rank": 2, "load_in_4bit": True}, "needs bitsandbytes"),
        ({"max_sequence_length": 0}, "--max_sequence_length 0"),
        ({"logit_std": 0.0}, "--logit_std"),
        ({"logit_mean": float("nan")}, "--logit_mean nan: it should be a finite number"),
        ({"mode_scale": 1.8}, "--mode_scale 1.8: it should be less than or equal to 1.75"),
        ({"rank": 0}, "--rank 0"),
    ],
)
def test_bad_transformer_flags_are_refused(flags: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=words):
        TransformerArguments(**flags)
