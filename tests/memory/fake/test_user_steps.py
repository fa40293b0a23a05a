"""Steps that users write: inference, various optimizers and contexts, and direct calls of the device."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType

import pytest
import torch
from torch import nn
from trace_models import language_model, real_trace, step_events

from ckpt_ft.errors import UserError
from ckpt_ft.memory.fake.step import trace_step
from ckpt_ft.units import MIB

IDS = torch.arange(64).view(2, 32)
Step = Callable[[nn.Module, torch.optim.Optimizer], None]


def test_step_in_inference_mode_equals_the_step_without_gradients() -> None:
    """In inference mode, composite operators such as `.item()` reach the dispatch mode undecomposed.

    A view of a parameter shares its version counter.
    """

    def step(mode: Callable[[], AbstractContextManager[object]]) -> Step:
        def stepped(model: nn.Module, optimizer: object) -> None:
            with mode():
                logits = model(input_ids=IDS, use_cache=False).logits.float()
                (logits * model.lm_head.weight[None, :, 0] > 0).all().item()

        return stepped

    model, _ = language_model()
    inference = trace_step(model.eval(), step(torch.inference_mode), device="cpu")
    assert step_events(inference) == step_events(trace_step(model, step(torch.no_grad), device="cpu"))
    assert step_events(inference) == step_events(real_trace(model, step(torch.inference_mode)))


def test_save_on_cpu_moves_saved_tensors_off_the_device() -> None:
    """Of twelve layers' 4 MiB each, the step holds the last one and fetches one at a time."""

    def step(where: Callable[[], AbstractContextManager[object]]) -> Step:
        def stepped(model: nn.Module, optimizer: object) -> None:
            with where():
                out = model(torch.ones(1024, 1024, requires_grad=True))
            out.sum().backward()

        return stepped

    model = nn.Sequential(*(nn.Sigmoid() for _ in range(12)))
    wheres = nullcontext, torch.autograd.graph.save_on_cpu
    kept, saved = (trace_step(model, step(where), device="t4") for where in wheres)
    assert kept.peaks["backward"] - saved.peaks["backward"] == (12 - 2) * 4 * MIB
    assert saved.seconds_parts.copying > 20 * 4 * MIB / 16e9


def test_sparse_gradient_is_traced() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(IDS).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    embedding = nn.Embedding(1000, 64, sparse=True)
    trace = trace_step(embedding, step, make_optimizer=lambda model: torch.optim.SparseAdam(model.parameters()))
    assert trace.peak_allocated > 3 * 1000 * 64 * 4


def test_autocast_on_a_tensor_on_meta_is_refused() -> None:
    """Autocast inspects tensors before dispatch and ignores those on "meta"."""
    images = torch.zeros(2, 3, device="meta")

    def step(model: nn.Module, optimizer: object) -> None:
        with torch.autocast("cuda", torch.float16):
            model(images).sum().backward()

    with pytest.raises(UserError, match=r"a tensor of \(2, 3\) on 'meta', which autocast does not cast"):
        trace_step(nn.Linear(3, 8), step)


def test_group_offloading_is_refused_and_the_model_restored() -> None:
    """diffusers' group offloading assigns to the `.data` of parameters that its hooks hold."""
    from diffusers.models.embeddings import TimestepEmbedding

    class Embeddings(TimestepEmbedding):
        """It has a parameter that belongs to no block."""

        def __init__(self) -> None:
            super().__init__(4, 8)
            self.shift = nn.Parameter(torch.ones(8))

        def forward(self, sample: torch.Tensor) -> torch.Tensor:
            return super().forward(sample) + self.shift

    from diffusers.hooks import apply_group_offloading

    model = Embeddings()
    cpu = torch.device("cpu")
    apply_group_offloading(model, onload_device=cpu, offload_device=cpu, offload_type="leaf_level")
    before = {name: (value.data_ptr(), value.clone()) for name, value in model.state_dict().items()}
    with pytest.raises(UserError, match="group offloading and layerwise casting do, which is not modelled"):
        trace_step(model, lambda model, optimizer: model(torch.zeros(2, 4)).sum().backward())
    for name, value in model.state_dict().items():
        assert value.data_ptr() == before[name][0]
        assert torch.equal(value, before[name][1])
    model(torch.zeros(2, 4)).sum().backward()


def test_data_assigned_to_a_parameter_is_restored() -> None:
    model = nn.Linear(4, 4)
    held, before = model.weight, model.weight.detach().clone()

    def step(model: nn.Module, optimizer: object) -> None:
        held.data = held.data.to(torch.float16)
        model(torch.zeros(2, 4)).sum().backward()

    trace_step(model, step)
    assert held.device.type == "cpu"
    assert torch.equal(held, before)


@pytest.mark.filterwarnings("ignore")  # warnings of torch's own imports
def test_compiled_model_can_be_compiled_after_a_trace() -> None:
    """Under a dispatch mode torch.compile would give up a function for good, or refuse it (`fullgraph=True`)."""
    compiled: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
        compiled.append(1)
        return graph.forward

    linear = nn.Linear(4, 4)
    doubled = torch.compile(lambda x: linear(x) * 2, backend=backend, fullgraph=True)

    def step(model: nn.Module, optimizer: object) -> None:
        doubled(torch.zeros(2, 4)).sum().backward()

    with torch.compiler.set_stance("force_eager"):
        trace = trace_step(linear, step, device="cpu")
    assert trace.peaks["backward"] > 0
    assert compiled == []
    doubled(torch.zeros(2, 4))
    assert compiled == [1]
    with pytest.raises(UserError, match="hands no graph of the model to Inductor: other backends are not predicted"):
        trace_step(linear, step, device="cpu")
    compiled.clear()
    doubled(torch.zeros(2, 4))
    assert compiled == [1]  # a trace of compiled code resets torch's compiler


def test_attributes_are_restored_if_the_step_fails() -> None:
    """A forward may change attributes at its start and reset them at its end, as diffusers' LoRA scaling does."""

    class Scaled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.scale, self.scaling = 1.0, {"default": 1.0}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.scale, self.scaling["default"], self.other = 0.5, 0.5, x
            raise ValueError("in the middle")

    model = Scaled()
    with pytest.raises(ValueError, match="in the middle"):
        trace_step(model, lambda model, optimizer: model(torch.zeros(2, 4)))
    assert (model.scale, model.scaling) == (1.0, {"default": 1.0})
    assert not hasattr(model, "other")


def test_triton_kernels_are_counted_by_their_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, Triton has no driver; with one, its kernels refuse fake tensors."""

    class JITFunction:
        def run(self, *args: object, **kwargs: object) -> None:
            raise RuntimeError("0 active drivers ([]). There should only be one.")

    runtime = ModuleType("triton.runtime")
    runtime.JITFunction, runtime.Autotuner = JITFunction, type("Autotuner", (JITFunction,), {})  # type: ignore[attr-defined]
    for name, module in (("triton", ModuleType("triton")), ("triton.runtime", runtime)):
        monkeypatch.setitem(sys.modules, name, module)

    def step(model: nn.Module, optimizer: object) -> None:
        x = torch.ones(256, 1024)
        JITFunction().run(x, torch.empty_like(x), grid=(1,))

    trace = trace_step(nn.Linear(4, 4), step)
    assert trace.peaks["forward"] >= 2 * MIB
    assert any("Triton" in note for note in trace.notes)
    with pytest.raises(RuntimeError, match="active drivers"):
        JITFunction().run()


def test_optimizers_stepped_in_gradient_hooks_are_traced() -> None:
    """GaLore's layerwise optimizers and PyTorch's tutorial on optimizer steps in backward do this."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    optimizers = {p: torch.optim.Adam([p], foreach=False) for p in model.parameters()}

    def update(p: torch.Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)

    def step(model: nn.Module, optimizer: object) -> None:
        model(torch.ones(1, 64)).sum().backward()

    trace = trace_step(model, step, device="cpu")
    before = [p.clone() for p in model.parameters()]
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    assert not any(optimizer.state for optimizer in optimizers.values())
    states = sum(s.nbytes for s in trace.storages if s.category == "optimizer")
    assert states == 2 * (2 * 64 * 64 + 1) * 4
    step(model, None)
    assert step_events(trace) == step_events(real_trace(model, step))
