"""A VAE for the drawn shapes, made in seconds: its encoder is written by hand, only its decoder is trained.

The encoder's two strided convolutions gather 4 x 4 patches and project them on their principal components; every
residual branch is closed and every non-linearity on the way biased into its linear range. Latents have 1/4 of the
image's side and `LATENT_CHANNELS` channels of unit variance. An `AutoencoderKL` like any other to those who load it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from ckpt_ft.training.images.shapes import drawings

if TYPE_CHECKING:
    from diffusers import AutoencoderKL

RESOLUTION = 32
LATENT_CHANNELS = 8
_WIDTHS = (16, 32, 32)  # channels of the levels
_CARRIER, _BIAS = 30.0, 10.0  # see _linear_range


def tiny_vae(decoder_steps: int) -> AutoencoderKL:
    """The VAE in eval mode; `decoder_steps` of 0 leaves its decoder random. Draws from torch's global RNG."""
    from diffusers import AutoencoderKL

    levels = len(_WIDTHS)
    vae = AutoencoderKL(
        block_out_channels=_WIDTHS,
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=LATENT_CHANNELS,  # one signal per group, see _linear_range
        sample_size=RESOLUTION,
        scaling_factor=1.0,
        mid_block_add_attention=False,
    )
    images = torch.from_numpy(np.stack([np.asarray(drawing.image(RESOLUTION)) for drawing in drawings()]))
    images = images.permute(0, 3, 1, 2).float() / 127.5 - 1
    _set_encoder(vae, *_principal_components(images))
    if decoder_steps:
        _train_decoder(vae, images, decoder_steps)
    return vae.eval()


def _gather(images: Tensor) -> Tensor:
    """(B, C, H, W) -> (B, 4C, H/2, W/2): channel C * k + c is channel c of the k-th pixel of each 2 x 2 patch."""
    batch, channels, height, width = images.shape
    patches = images.view(batch, channels, height // 2, 2, width // 2, 2).permute(0, 3, 5, 1, 2, 4)
    return patches.reshape(batch, 4 * channels, height // 2, width // 2)


def _principal_components(images: Tensor) -> tuple[Tensor, Tensor]:
    """Whitening projection (LATENT_CHANNELS, 48) of the 4 x 4 RGB patches of `images`, and their mean (48)."""
    patches = _gather(_gather(images)).permute(0, 2, 3, 1).reshape(-1, 48)
    variances, directions = torch.linalg.eigh(torch.cov(patches.T))
    largest = slice(-LATENT_CHANNELS, None)
    return (directions[:, largest] / variances[largest].sqrt()).T, patches.mean(0)


@torch.no_grad()
def _set_encoder(vae: AutoencoderKL, projection: Tensor, mean: Tensor) -> None:
    """Make the encoder compute `projection @ (patch - mean)`: residual branches closed, convolutions set."""
    encoder = vae.encoder
    for module in encoder.modules():
        if type(module).__name__ == "ResnetBlock2D":
            nn.init.zeros_(module.conv2.weight)
            nn.init.zeros_(module.conv2.bias)
            if module.conv_shortcut is not None:
                nn.init.dirac_(module.conv_shortcut.weight)
                nn.init.zeros_(module.conv_shortcut.bias)
    first, second = (block.downsamplers[0].conv for block in encoder.down_blocks[:2])
    for conv in (encoder.conv_in, first, second, encoder.conv_out, vae.quant_conv):
        nn.init.zeros_(conv.weight)
        nn.init.zeros_(conv.bias)
    rgb = range(3)
    encoder.conv_in.weight[rgb, rgb, 1, 1] = 1.0
    for pixel in range(4):  # the downsamplers pad on the right and below: taps (0..1, 0..1) are the 2 x 2 patch
        row, column = divmod(pixel, 2)
        first.weight[[3 * pixel + c for c in rgb], rgb, row, column] = 1.0
        part = projection[:, 12 * pixel : 12 * pixel + 12]
        second.weight[0::4, :12, row, column], second.weight[3::4, :12, row, column] = part, -part
    second.bias[0::4], second.bias[3::4] = -projection @ mean, projection @ mean
    _linear_range(encoder.conv_norm_out, second.bias)
    latents = torch.arange(LATENT_CHANNELS)
    encoder.conv_out.weight[latents, 4 * latents, 1, 1] = 1.0
    encoder.conv_out.bias[latents] = -_BIAS
    encoder.conv_out.bias[LATENT_CHANNELS:] = -6.0  # log variance: a standard deviation of 0.05 in every latent
    nn.init.dirac_(vae.quant_conv.weight)


@torch.no_grad()
def _linear_range(norm: nn.GroupNorm, bias: Tensor) -> None:
    """Carry one signal per group of four channels through GroupNorm and SiLU unchanged, but for an offset of `_BIAS`.

    A group is (signal, +_CARRIER, -_CARRIER, -signal): its mean is zero, its deviation that of the carrier, which is
    far larger than the signal, so the norm only scales. Its affine part scales back and adds `_BIAS`, from where on
    SiLU is close to the identity.
    """
    bias[1::4], bias[2::4] = _CARRIER, -_CARRIER
    norm.weight.fill_(_CARRIER / 2**0.5)
    norm.bias.fill_(_BIAS)


def _train_decoder(vae: AutoencoderKL, images: Tensor, steps: int) -> None:
    """Teach the decoder to undo the encoder: mean squared plus half the absolute error of the pixels."""
    with torch.no_grad():
        moments = torch.cat([vae.encode(part).latent_dist.parameters for part in images.split(256)])
    mean, log_variance = moments.chunk(2, dim=1)
    parameters = [*vae.decoder.parameters(), *vae.post_quant_conv.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for _ in range(steps):
        chosen = torch.randint(0, len(images), (32,))
        latents = mean[chosen] + (0.5 * log_variance[chosen]).exp() * torch.randn_like(mean[chosen])
        decoded = vae.decode(latents).sample
        loss = functional.mse_loss(decoded, images[chosen]) + 0.5 * functional.l1_loss(decoded, images[chosen])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
