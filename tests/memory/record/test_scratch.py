"""Memory inside kernels, and sums that autograd makes in place: the tracker compared with PyTorch's own record.

The models have convolutions over time, depthwise and transposed ones, attention and LSTMs.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from test_tracker import profiled_peak, tracked
from torch import Tensor, nn
from trace_models import Loss, adamw, real_trace, step_events, training_step
from transformers import (
    ConvNextConfig,
    ConvNextForImageClassification,
    HubertConfig,
    HubertForCTC,
    MambaConfig,
    MambaForCausalLM,
    ParakeetForRNNT,
    ParakeetRNNTConfig,
    SegformerConfig,
    SegformerForSemanticSegmentation,
    VitsConfig,
    VitsModel,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from ckpt_ft.checkpointing.apply import apply_policy
from ckpt_ft.memory.fake.step import trace_step
from ckpt_ft.memory.record.cpu_kernels import observed
from ckpt_ft.memory.record.tracker import Tracker

IDS = torch.arange(64).view(2, 32) % 50 + 3
IMAGES, CLASSES = torch.randn(2, 3, 64, 64), torch.tensor([1, 2])


@pytest.fixture(autouse=True)
def no_garbage_collection() -> Iterator[None]:
    """Python frees reference cycles at any time, for example in only one of two compared steps."""
    gc.disable()
    yield
    gc.enable()


def hubert() -> tuple[nn.Module, Loss]:
    """Its first layer is wide and its batch short, so that the convolutions decide the peak."""
    config = HubertConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, conv_dim=(48, 48, 48),
        conv_stride=(5, 2, 2), conv_kernel=(10, 3, 3), num_feat_extract_layers=3, num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=2, vocab_size=20, layerdrop=0.0, mask_time_prob=0.0, hidden_dropout=0.0,
        attention_dropout=0.0, activation_dropout=0.0, feat_proj_dropout=0.0,
    )  # fmt: skip
    sound, text = torch.randn(2, 1600), torch.arange(1, 9).view(2, 4)
    return HubertForCTC(config), lambda model: model(sound, labels=text).loss


def convnext() -> tuple[nn.Module, Loss]:
    config = ConvNextConfig(hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 2, 1], num_labels=5, image_size=64)
    return ConvNextForImageClassification(config), lambda model: model(IMAGES, labels=CLASSES).loss


def segformer() -> tuple[nn.Module, Loss]:
    config = SegformerConfig(
        hidden_sizes=[16, 16, 32, 32], depths=[1, 1, 1, 1], num_attention_heads=[1, 1, 2, 2], decoder_hidden_size=16,
        num_labels=5, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, drop_path_rate=0.0,
    )  # fmt: skip
    return SegformerForSemanticSegmentation(config), lambda model: model(IMAGES).logits.pow(2).mean()


def vits() -> tuple[nn.Module, Loss]:
    config = VitsConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, ffn_dim=32, flow_size=16, spectrogram_bins=65,
        upsample_initial_channel=16, upsample_rates=[8, 8, 2, 2], resblock_kernel_sizes=[3, 7], layerdrop=0.0,
        resblock_dilation_sizes=[[1, 3], [1, 3]], posterior_encoder_num_wavenet_layers=2, prior_encoder_num_flows=2,
        duration_predictor_filter_channels=16, depth_separable_num_layers=2, duration_predictor_num_flows=2,
    )  # fmt: skip

    def loss(model: nn.Module) -> Tensor:
        torch.manual_seed(0)  # the length of the speech is random
        return model(IDS[:, :12] % 38).waveform.pow(2).mean()

    return VitsModel(config), loss


def whisper() -> tuple[nn.Module, Loss]:
    config = WhisperConfig(
        vocab_size=99, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, use_cache=False,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_source_positions=60, num_mel_bins=20,
        decoder_start_token_id=1, pad_token_id=0, bos_token_id=1, eos_token_id=2, begin_suppress_tokens=None,
    )  # fmt: skip
    sound = torch.randn(2, 20, 120)
    return WhisperForConditionalGeneration(config), lambda model: model(sound, labels=IDS[:, :16]).loss


def rnn_transducer() -> tuple[nn.Module, Loss]:
    encoder = {
        "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64, "layerdrop": 0.0,
        "conv_kernel_size": 9, "subsampling_conv_channels": 16,
    }  # fmt: skip
    config = ParakeetRNNTConfig(vocab_size=99, blank_token_id=98, decoder_hidden_size=32, encoder_config=encoder)
    sound, mask = torch.randn(2, 160, 80), torch.ones(2, 160, dtype=torch.long)

    def loss(model: nn.Module) -> Tensor:
        return model(sound, mask, decoder_input_ids=IDS[:, :8]).logits.pow(2).mean()

    return ParakeetForRNNT(config), loss


def mamba() -> tuple[nn.Module, Loss]:
    """Its scan in Python sums 31 gradients of one tensor."""
    config = MambaConfig(vocab_size=99, hidden_size=32, num_hidden_layers=2, state_size=8, use_cache=False)
    return MambaForCausalLM(config), lambda model: model(input_ids=IDS, labels=IDS).loss


@pytest.mark.parametrize("policy", ["none", "full"])
@pytest.mark.parametrize("make", [hubert, convnext, segformer, vits, whisper, rnn_transducer, mamba])
def test_peak_with_scratch_equals_the_profilers(make: Callable[[], tuple[nn.Module, Loss]], policy: str) -> None:
    """Recomputed models have no dropout: the random state that a checkpoint saves belongs to no operator."""
    torch.manual_seed(0)
    model, loss = make()
    if policy != "none":
        apply_policy(model.train(), policy)
    step, optimizer = training_step(loss), torch.optim.AdamW(model.train().parameters(), lr=0.0)
    trace = tracked(model, step, optimizer)
    measured = profiled_peak(lambda: step(model, optimizer))
    assert trace.peak_allocated - trace.replay.allocated[trace.start - 1] == pytest.approx(measured, rel=5e-3)


@pytest.mark.parametrize("make", [convnext, whisper, segformer])
def test_fake_step_has_the_same_scratch(make: Callable[[], tuple[nn.Module, Loss]]) -> None:
    model, loss = make()
    step = training_step(loss)
    fake, real = trace_step(model.train(), step, make_optimizer=adamw, device="cpu"), real_trace(model, step)
    assert step_events(fake) == step_events(real)
    assert any(s.nbytes > 10_000 and s.op == "aten.convolution.default" for s in real.storages)


def test_lstm_saves_a_workspace_for_backward() -> None:
    """PyTorch's fake kernel allocates a workspace of 0 bytes; the real one has bytes and is read in backward."""
    model, sound = nn.LSTM(48, 32, num_layers=2, bidirectional=True, batch_first=True), torch.randn(2, 40, 48)
    step = training_step(lambda model: model(sound)[0].pow(2).mean())
    fake, real = trace_step(model, step, make_optimizer=adamw, device="cpu"), real_trace(model, step)
    assert step_events(fake) == step_events(real)
    optimizer = adamw(model)
    step(model, optimizer)
    measured = profiled_peak(lambda: step(model, optimizer))
    assert fake.peak_allocated - fake.replay.allocated[fake.start - 1] == pytest.approx(measured, rel=5e-3)


def test_lstm_on_a_gpu_saves_its_gates() -> None:
    model, sound = nn.LSTM(48, 32), torch.randn(40, 2, 48)
    step = training_step(lambda model: model(sound)[0].pow(2).mean())
    trace = trace_step(model, step, make_optimizer=adamw, device="a100-40gb")
    assert any("cuDNN's reserve" in note for note in trace.notes)
    assert any(s.nbytes == 5 * 40 * 2 * 32 * 4 and s.op == "aten.mkldnn_rnn_layer.default" for s in trace.storages)


def test_scratch_of_a_call_is_observed() -> None:
    def call() -> Tensor:
        scratch = torch.empty(1000)
        out = torch.empty(100)
        del scratch
        return out

    out, nbytes = observed(call)
    assert (out.nbytes, nbytes) == (400, 4000)
    with torch.profiler.profile(profile_memory=True):
        assert observed(call)[1] == 0  # only one profiler can be active


def test_gradients_are_summed_in_place_unless_shared() -> None:
    model = nn.Linear(4, 1000, bias=False)

    def trace(*functions: Callable[[Tensor], Tensor]) -> list[int]:
        def step(model: nn.Module, optimizer: object) -> None:
            h = model(torch.ones(8, 4)) * 1
            torch.stack([function(h).sum() for function in functions]).sum().backward()

        real = tracked(model, step, adamw(model), steps=1)
        fake = trace_step(model, step, device="cpu", warmup_steps=0)
        measured, predicted = (
            [s.nbytes for s in trace.storages if s.op == "aten.add.Tensor" and s.phase == "backward"]
            for trace in (real, fake)
        )
        assert measured == predicted
        return measured

    def sin_plus_cos(h: Tensor) -> Tensor:
        return h.sin() + h.cos()

    assert trace(torch.sin, torch.cos, torch.exp) == []
    assert trace(lambda h: sin_plus_cos(h[0, :0])) == []  # it has no bytes and no storage to follow
    assert trace(lambda h: h, lambda h: h.view(-1)) == [8 * 1000 * 4]  # its gradient is expanded from one number


def test_sparse_gradients_are_summed() -> None:
    table = nn.Embedding(10, 4, sparse=True)
    with Tracker(table):
        (table(IDS % 10).sum() + table(IDS % 7).sum()).backward()
    assert table.weight.grad.is_sparse


def test_sparse_gradient_consists_of_indices_and_values() -> None:
    table = nn.Embedding(10, 4, sparse=True)
    with Tracker(table) as tracker:
        tracker.start_step()
        table(IDS % 10).sum().backward()
    trace = tracker.trace()
    live = {storage.nbytes: storage.category for storage, _ in trace.live_at(len(trace.events) - 1)}
    assert live[8 * 64] == live[4 * 64 * 4] == "gradients"


INDICES = torch.arange(64).view(16, 4) % 32


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.gather(1, INDICES),
        lambda x: x.topk(4)[0],
        lambda x: x.cummax(1)[0],
        lambda x: x.take(INDICES),
        lambda x: x[INDICES[0], INDICES[1]],
    ],
    ids=["gather", "topk", "cummax", "take", "index"],
)
def test_gradient_of_gather_is_scattered_into_one_tensor_of_zeros(function: Callable[[Tensor], Tensor]) -> None:
    """A preference loss gathers from its logits; the gradient of that has the size of the logits, once."""
    model = nn.Linear(2, 4096, bias=False)
    rows = torch.ones(64, 2)

    def step(model: nn.Module, optimizer: object) -> None:
        function(model(rows).view(16, -1)).sum().backward()
        model.weight.grad = None

    trace = tracked(model, step, adamw(model))
    measured = profiled_peak(lambda: step(model, None))
    assert trace.peak_allocated - trace.replay.allocated[trace.start - 1] == pytest.approx(measured, rel=0.01)
    assert step_events(trace_step(model, step, device="cpu")) == step_events(trace)
