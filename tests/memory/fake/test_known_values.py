"""Known integer values of a batch decide the traced operators as they decide the real ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from trace_models import adamw, language_model, real_trace, step_events
from transformers import AutoModelForMaskedLM, ModernBertConfig, Qwen2VLConfig, Qwen2VLForConditionalGeneration

from ckpt_ft.memory.fake.step import trace_step
from ckpt_ft.memory.record.trace import StepTrace

ROWS, LENGTH = 4, 64
IDS = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) % 50 + 3
ONES = torch.ones(ROWS, LENGTH, dtype=torch.long)
PADDED = (torch.arange(LENGTH) < torch.tensor([64, 40, 9, 30])[:, None]).long()
WHOLE = torch.arange(LENGTH).expand(ROWS, LENGTH)
PACKED = torch.cat([torch.arange(24), torch.arange(LENGTH - 24)]).expand(ROWS, LENGTH)


def step_with(**more: torch.Tensor) -> Any:
    labels = torch.where(more["attention_mask"].bool(), IDS, -100) if "attention_mask" in more else IDS

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(input_ids=IDS, labels=labels, **more).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@pytest.mark.parametrize(
    ("more", "masked"),
    [
        ({}, False),
        ({"attention_mask": ONES}, False),
        ({"attention_mask": PADDED}, True),
        ({"position_ids": WHOLE}, False),
        ({"position_ids": PACKED}, True),
    ],
    ids=["plain", "full mask", "padded", "positions", "packed"],
)
def test_padding_and_packing_create_masks(more: dict[str, torch.Tensor], masked: bool) -> None:
    model, _ = language_model("llama")
    fake = trace_step(model, step_with(**more), make_optimizer=adamw, device="cpu")
    real = real_trace(model, step_with(**more))
    assert step_events(fake) == step_events(real)
    assert fake.peak_allocated == real.peak_allocated
    assert fake.notes == []
    # On a GPU, a mask also excludes the flash kernel.
    step = step_with(**more)

    def half(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            step(model, optimizer)

    ops = {op.name for op in trace_step(model, half, make_optimizer=adamw, device="a100-80gb").ops}
    assert ("aten._scaled_dot_product_flash_attention.default" not in ops) is masked


def test_model_that_drops_padding_keeps_the_number_of_tokens() -> None:
    """With flash attention, ModernBERT computes on unpadded tokens; their number is that of the mask's ones."""
    seen: list[int] = []

    def step(model: nn.Module, optimizer: object) -> None:
        indices = PADDED.flatten().nonzero().flatten()
        rows = model(torch.zeros(ROWS * LENGTH, 8))[indices]
        lengths = PADDED.sum(-1, dtype=torch.int32)
        bounds = nn.functional.pad(lengths.cumsum(0), (1, 0)).tolist()
        seen.extend([len(rows), int(lengths.max()), *bounds])
        assert rows[PADDED.flatten()[indices].bool()].shape == (143, 8)
        assert torch.masked_select(torch.zeros(ROWS, LENGTH, 8), PADDED[..., None].bool()).shape == (143 * 8,)
        assert PADDED.unique().tolist() == [0, 1]
        assert torch.equal(PADDED, PADDED.clone())
        assert not torch.equal(PADDED, ONES)
        assert torch.bincount(PADDED.flatten()).tolist() == [113, 143]
        assert torch.repeat_interleave(lengths).shape == (143,)

    assert trace_step(nn.Linear(8, 8), step, warmup_steps=0).notes == []
    assert seen == [143, 64, 0, 64, 104, 113, 143]


def test_tolist_waits_for_the_device_once() -> None:
    """Qwen2.5-VL splits its patches into windows by such a list, in each block of its tower."""

    def step(model: nn.Module, optimizer: object) -> None:
        model(torch.zeros(4, 8)).sum().backward()
        bounds = torch.arange(0, 4001, 4)
        assert (bounds[1:] - bounds[:-1]).tolist() == [4] * 1000

    trace = trace_step(nn.Linear(8, 8), step, device="a100-80gb", warmup_steps=0)
    assert [op.name for op in trace.ops if op.name in ("event.await", "aten._local_scalar_dense.default")] == [
        "event.await"
    ]
    assert trace.seconds < 1e-3  # with a wait for each number it was 28 ms


def test_in_place_writes_update_or_drop_known_values() -> None:
    mine = torch.arange(6)

    def step(model: nn.Module, optimizer: object) -> None:
        numbers = mine.clone()
        view = numbers.view(2, 3)[1]
        view.mul_(10)
        assert numbers.tolist() == [0, 1, 2, 30, 40, 50]
        mine.add_(1)  # in the trace only
        assert mine.clone().tolist() == [1, 2, 3, 4, 5, 6]
        view.random_(100)  # from here on, no value of the storage is known
        assert numbers.nonzero().shape == (6, 1)
        assert torch.empty(4, dtype=torch.long).nonzero().shape == (4, 1)

    notes = trace_step(nn.Linear(2, 2), step, warmup_steps=0).notes
    assert notes == ["a mask whose size decides a shape is taken as full: the worst case"]
    assert mine.tolist() == [0, 1, 2, 3, 4, 5]


def test_masked_language_model_trace_equals_the_real_step() -> None:
    config = ModernBertConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        pad_token_id=0, cls_token_id=1, sep_token_id=2, sparse_prediction=True,
    )  # fmt: skip
    model = AutoModelForMaskedLM.from_config(config)

    def traces(more: dict[str, torch.Tensor]) -> tuple[StepTrace, StepTrace]:
        step = step_with(**more)
        return trace_step(model, step, make_optimizer=adamw, device="cpu"), real_trace(model, step)

    for more in ({"attention_mask": ONES}, {"attention_mask": PADDED}):  # the head runs on labelled tokens only
        fake, real = traces(more)
        assert step_events(fake) == step_events(real)


def test_constants_are_known_and_model_outputs_are_not() -> None:
    """A floating-point mask of ones is known too; Adam counts its steps in place, in a list."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        mask = torch.ones(2, 5)
        assert bool((mask.to(torch.bool).sum() == mask.numel()).item())
        counts = [torch.tensor(0.0), torch.tensor(4.0)]
        torch._foreach_add_(counts, 1)
        assert [count.item() for count in counts] == [1, 5]
        x = model(torch.ones(3, 4))
        counts[0].add_(x.sum().detach())
        assert counts[0].item() == 1.0  # as every unknown number
        assert x.isnan().sum() == 0
        assert not (x != x).any()  # as isnan() computes it

    assert trace_step(nn.Linear(4, 4), step, warmup_steps=0).notes == [
        "a number read from a tensor (.item()) is taken to be 1"
    ]


def test_assumed_tokens_per_expert_add_up() -> None:
    """Some routers split tokens by counts that they read from a tensor (JetMoE, DeepSeek's own code)."""

    def step(model: nn.Module, optimizer: object) -> None:
        _, experts = model(torch.ones(10, 8)).topk(2, dim=1)
        chosen = torch.zeros(10, 7).scatter(1, experts, 1)
        counts = chosen.long().sum(0).tolist()
        assert counts == [2, 3, 3, 3, 3, 3, 3]
        torch.ones(20, 8).split(counts)
        ordered = experts.flatten().sort()[0]  # as transformers finds the bounds of each expert's tokens
        bounds = torch.histc(ordered.float(), bins=7, min=0, max=6).cumsum(0, dtype=torch.int32)
        assert bounds.tolist() == [2, 5, 8, 11, 14, 17, 20]

    assert trace_step(nn.Linear(8, 7), step, warmup_steps=0).notes == [
        "indices fall evenly on their classes: experts see equal numbers of tokens"
    ]


def test_number_of_classes_is_the_size_of_the_dimension() -> None:
    """It is the size along the given dimension (here the first, of ten), or of the tensor if none is given."""

    def step(model: nn.Module, optimizer: object) -> None:
        scores = model(torch.ones(10, 8))
        assert (scores.argmax(0) == 3).nonzero().shape == (20, 1)
        assert (scores.topk(2, 0)[1] == 3).nonzero().shape == (40, 2)
        assert (scores.argmax().expand(4000) == 3).nonzero().shape == (2, 1)

    trace_step(nn.Linear(8, 200), step, warmup_steps=0)


def test_layer_drop_drops_no_layer() -> None:
    """The trace keeps layers that LayerDrop may drop, as in M2M-100 and speech models."""

    def step(model: nn.Module, optimizer: object) -> None:
        assert not torch.rand([]) < 0.05
        assert torch.rand([]) < 0.95

    assert trace_step(nn.Linear(4, 4), step, warmup_steps=0).notes == [
        "a random number is taken as 0.5: no layer is left out at random"
    ]


def test_values_of_the_image_grid_are_known() -> None:
    """Qwen2-VL computes positions from `image_grid_thw` and passes 0-dim tensors to torch.tensor()."""
    text = {
        "vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
        "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0},
    }  # fmt: skip
    vision = {"depth": 2, "embed_dim": 32, "num_heads": 4, "hidden_size": 32, "patch_size": 14, "mlp_ratio": 2}
    config = Qwen2VLConfig(
        text_config=text, vision_config=vision, image_token_id=98, video_token_id=97, vision_start_token_id=96,
        vision_end_token_id=95,
    )  # fmt: skip
    ids = torch.arange(32).view(2, 16) % 50 + 3
    ids[:, 2], ids[:, 3:7] = 96, 98
    batch = {
        "input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == 98).int(), "pixel_values": torch.randn(32, 3 * 2 * 14 * 14),
        "image_grid_thw": torch.tensor([[1, 4, 4], [1, 4, 4]]),
    }  # fmt: skip

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    model = Qwen2VLForConditionalGeneration(config).train()
    assert step_events(trace_step(model, step, make_optimizer=adamw, device="cpu")) == step_events(
        real_trace(model, step)
    )


def test_ctc_loss_saves_the_size_of_the_longest_target() -> None:
    targets, lengths, inputs = torch.arange(1, 13).view(2, 6) % 7 + 1, torch.tensor([3, 5]), torch.tensor([10, 10])

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        scores = model(torch.ones(10, 2, 4)).log_softmax(-1)
        nn.functional.ctc_loss(scores, targets, inputs, lengths).backward()
        optimizer.step()
        optimizer.zero_grad()

    model = nn.Linear(4, 9)
    fake, real = trace_step(model, step, make_optimizer=adamw, device="cpu"), real_trace(model, step)
    made = [[s.nbytes for s in trace.storages if "ctc" in s.op] for trace in (fake, real)]
    assert made[0] == made[1]
    assert 2 * 10 * (2 * 5 + 1) * 4 in made[0]
