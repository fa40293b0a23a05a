"""The tracker on real CPU tensors, compared with PyTorch's own record of allocations."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from trace_models import adamw, language_model, resnet, training_step, unet, vit

from ckpt_ft.memory.record.trace import StepTrace
from ckpt_ft.memory.record.tracker import Tracker


def tracked(model: nn.Module, step, optimizer=None, steps: int = 2, **options) -> StepTrace:
    optimizer = optimizer or adamw(model)
    with Tracker(model, optimizer, **options) as tracker:
        for _ in range(steps):
            tracker.start_step()
            step(model, optimizer)
    return tracker.trace()


def profiled_peak(call) -> int:
    """Returns the peak bytes during `call` above those before it, from the profiler's memory events."""
    gc.collect()  # what an earlier test left would be freed meanwhile
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        call()
    events = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


RESNET_50 = {"embedding_size": 64, "hidden_sizes": [256, 512, 1024, 2048], "depths": [3, 4, 6, 3]}
VIT_TINY = {"hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 768, "image_size": 224}


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("model_and_loss", "tolerance"),
    [
        (lambda: language_model(shape=(4, 128)), 1e-3),
        (lambda: unet(48, 32), 1e-3),
        (lambda: resnet(8, **RESNET_50), 1e-3),
        (lambda: vit(8, **VIT_TINY), 1e-3),
    ],
    ids=["lm", "unet", "resnet", "vit"],
)
def test_tracked_peak_equals_the_profilers(model_and_loss, tolerance: float, autocast: bool) -> None:
    model, loss = model_and_loss()
    step, optimizer = training_step(loss, autocast), adamw(model)
    trace = tracked(model, step, optimizer)
    resident = trace.replay.allocated[trace.start - 1]
    measured = profiled_peak(lambda: step(model, optimizer))
    assert trace.peak_allocated - resident == pytest.approx(measured, rel=tolerance)


def test_bytes_of_linear_layers_by_category_and_module() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    x = torch.randn(32, 8)
    parameters = (8 * 16 + 16 + 16 * 4 + 4) * 4

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(x).sum().backward()
        optimizer.step()

    trace = tracked(model, step, steps=1)
    by_category: dict[str, int] = {}
    for storage, nbytes in trace.live_at(len(trace.events) - 1):
        by_category[storage.category] = by_category.get(storage.category, 0) + nbytes
    scalars = 4 * 4  # Adam has one float step count per parameter
    assert by_category["parameters"] == by_category["gradients"] == parameters
    assert by_category["optimizer"] == 2 * parameters + scalars
    loss_and_its_gradient = 8
    assert trace.module_activations() == {"": x.nbytes + loss_and_its_gradient, "1": 32 * 16 * 4}
    backward = {op.module for op in trace.ops if op.phase == "backward" and op.name == "aten.mm.default"}
    assert backward == {"0", "2"}


def test_phases_follow_autograd_and_the_optimizer() -> None:
    model, loss = language_model()

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(2):
            loss(model).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    trace = tracked(model, step, steps=1)
    assert [name for _, name in trace.marks] == ["step", "forward", "backward", "forward", "backward", "optimizer"]
    assert {op.phase for op in trace.ops if "foreach_norm" in op.name or "linalg_vector_norm" in op.name} == {
        "optimizer"
    }
    assert trace.peaks["backward"] == trace.peak_allocated > trace.peaks["forward"] > trace.peaks["optimizer"] > 0


def test_work_between_backward_and_optimizer_counts_as_the_optimizers() -> None:
    """The loss is read and gradients clipped with gradients enabled; a forward without modules is still a forward."""
    model = nn.Linear(4, 4)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        loss = model(torch.ones(2, 4)).sum()
        loss.backward()
        (model.weight * 2).sum().backward()
        loss.item()
        for parameter in model.parameters():
            parameter.grad.detach().mul_(0.5)
        optimizer.step()

    trace = tracked(model, step, steps=1)
    assert [name for _, name in trace.marks] == ["step", "forward", "backward", "forward", "backward", "optimizer"]
    phases = {
        (op.name, op.phase) for op in trace.ops if op.name in ("aten.mul_.Tensor", "aten._local_scalar_dense.default")
    }
    assert {phase for _, phase in phases} == {"optimizer"}


def test_recomputation_counts_for_backward_and_its_module() -> None:
    model, loss = language_model()
    switch = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    switch({"use_reentrant": False})
    trace = tracked(model, training_step(loss), steps=1)
    recomputed = [op for op in trace.ops if op.phase == "backward" and op.name == "aten.silu.default"]
    assert [op.module for op in recomputed] == [f"model.layers.{i}.mlp.act_fn" for i in (2, 1, 0)]


def test_allocation_beyond_the_limit_raises_out_of_memory() -> None:
    model, loss = language_model()
    free = tracked(model, training_step(loss))
    tracked(model, training_step(loss), limit=free.peak_allocated)
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory. Tried to allocate"):
        tracked(model, training_step(loss), limit=free.peak_allocated - 1)


def test_resized_storage_is_freed_and_allocated_again() -> None:
    with Tracker() as tracker:
        tensor = torch.empty(10)
        tensor.resize_(100)
        assert tracker.recorder.allocated == 400
        del tensor
    assert tracker.trace().events == [0, ~0, 1, ~1]
    assert (tracker.recorder.allocated, tracker.recorder.peak) == (0, 400)


def test_restart_keeps_live_storages() -> None:
    model, loss = language_model()
    step, optimizer = training_step(loss), adamw(model)
    with Tracker(model, optimizer) as tracker:
        tracker.start_step()
        step(model, optimizer)
        first = tracker.trace()
        tracker.restart()
        tracker.start_step()
        step(model, optimizer)
    second = tracker.trace()
    assert second.replay.allocated[second.start - 1] == first.replay.allocated[-1]
    assert second.at_peak["optimizer"] == sum(s.nbytes for s in first.storages if s.category == "optimizer")


def test_module_that_raises_does_not_stay_in_the_context() -> None:
    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("no")

    model = nn.Sequential(nn.Linear(2, 2), Fails())
    with Tracker(model) as tracker:
        with pytest.raises(RuntimeError, match="no"):
            model(torch.ones(1, 2))
        after = torch.ones(4)
    assert [s.module for s in tracker.trace().storages if s.nbytes == after.nbytes and s.op][-1] == ""


def test_projectors_and_layerwise_optimizer_states_are_counted() -> None:
    """GaLore's and APOLLO's projectors are objects in the state; layerwise optimizers are one per parameter."""
    model = nn.Linear(8, 8, bias=False)
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    projector = SimpleNamespace(project=len, basis=torch.zeros(1000), pair=[torch.zeros(500)], rank=4)
    own.state[model.weight] = {"step": 1, "projector": projector}
    layerwise = SimpleNamespace(state={}, param_groups=[], optimizer_dict={model.weight: own})
    for optimizer in (own, layerwise, SimpleNamespace(optimizer=layerwise, param_groups=[])):
        with Tracker(model, optimizer) as tracker:
            tracker.start_step()
        assert tracker.trace().peak_allocated == 4 * (64 + 1000 + 500)
