"""The changes that docs/diffusion.md shows for other diffusers scripts: one line per model in the backward pass."""

from __future__ import annotations

import copy

import pytest
import torch
from diffusers import ControlNetModel
from tiny_unets import make_tiny_pipeline
from torch import Tensor, nn

from ckpt_ft import apply_policy


class Saved:
    """Counts the bytes of the distinct storages that autograd saves."""

    def __init__(self) -> None:
        self.storages: dict[int, int] = {}

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self.storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    def __enter__(self) -> Saved:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, lambda tensor: tensor)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)

    @property
    def bytes(self) -> int:
        return sum(self.storages.values())


@pytest.fixture(scope="module")
def pipeline() -> object:
    return make_tiny_pipeline("sd1", 0, (16, 32))


@pytest.mark.parametrize("policy", ["full", "pointwise"])
def test_policy_in_a_controlnet_script(pipeline: object, policy: str) -> None:
    """The ControlNet is trained and the U-Net frozen; gradients pass the second half of the U-Net."""
    torch.manual_seed(0)
    unet = copy.deepcopy(pipeline.unet).requires_grad_(False)  # type: ignore[attr-defined]
    controlnet = ControlNetModel.from_unet(unet, conditioning_channels=3).train()
    for convolution in controlnet.controlnet_down_blocks:
        nn.init.normal_(convolution.weight, std=0.1)  # they start at zero and would pass no gradient
    latents, times = torch.randn(2, 8, 8, 8), torch.tensor([10, 500])
    words, picture = torch.randn(2, 12, 64), torch.rand(2, 3, 64, 64)
    trained = [parameter for parameter in controlnet.parameters() if parameter.requires_grad]

    def step() -> tuple[list[Tensor], int]:
        with Saved() as saved:
            down, middle = controlnet(latents, times, words, picture, return_dict=False)
            noise = unet(
                latents, times, words, down_block_additional_residuals=down, mid_block_additional_residual=middle
            ).sample
        gradients = torch.autograd.grad(noise.square().mean(), trained, allow_unused=True)
        return [gradient for gradient in gradients if gradient is not None], saved.bytes

    plain, kept = step()
    apply_policy(controlnet, policy)
    apply_policy(unet, policy)
    ours, less = step()
    compare(plain, ours, policy)
    assert less < kept


@pytest.mark.parametrize("policy", ["full", "pointwise"])
def test_policy_in_a_textual_inversion_script(pipeline: object, policy: str) -> None:
    """One embedding row is trained; gradients pass the whole frozen U-Net and the text encoder."""
    torch.manual_seed(0)
    unet = copy.deepcopy(pipeline.unet).requires_grad_(False).train()  # type: ignore[attr-defined]
    text_encoder = copy.deepcopy(pipeline.text_encoder).requires_grad_(False).train()  # type: ignore[attr-defined]
    embedding = text_encoder.get_input_embeddings().weight.requires_grad_(True)
    ids = pipeline.tokenizer(["a red circle"] * 2, padding="max_length", return_tensors="pt").input_ids  # type: ignore[attr-defined]
    latents, times = torch.randn(2, 8, 8, 8), torch.tensor([10, 500])

    def step() -> tuple[list[Tensor], int]:
        with Saved() as saved:
            noise = unet(latents, times, text_encoder(ids)[0]).sample
        return list(torch.autograd.grad(noise.square().mean(), [embedding])), saved.bytes

    plain, kept = step()
    apply_policy(unet, policy)
    apply_policy(text_encoder, policy)
    ours, less = step()
    compare(plain, ours, policy)
    assert less < kept


def compare(plain: list[Tensor], ours: list[Tensor], policy: str) -> None:
    """Asserts bitwise equality, or 1e-6 of the maximum under `pointwise`."""
    assert len(plain) == len(ours) > 0
    for one, two in zip(plain, ours, strict=True):
        assert one.abs().max() > 0 or torch.equal(one, two)
        if policy == "pointwise":
            torch.testing.assert_close(two, one, rtol=1e-5, atol=1e-6 * one.abs().max().item())
        else:
            assert torch.equal(one, two)
