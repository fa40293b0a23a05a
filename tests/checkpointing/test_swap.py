"""The policy `swap`: numbers stay the same; which blocks are on the device when, bytes in both memories, refusals."""

from __future__ import annotations

import copy
import os
import pickle
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from language_models import differing, make, numbers
from torch import nn
from torch.func import functional_call
from trace_models import adamw, real_trace

from ckpt_ft import apply_policy, trace_step
from ckpt_ft.checkpointing import offload
from ckpt_ft.checkpointing.apply import remove_policy
from ckpt_ft.checkpointing.swap import Arena
from ckpt_ft.checkpointing.verify import VerificationError
from ckpt_ft.errors import UserError
from ckpt_ft.policy import IN_HOST_MEMORY
from ckpt_ft.spec.launch import Launch
from ckpt_ft.standins.quantised_layers import to_nf4

WIDTH, ROWS = 8, 16


class Stack(nn.Module):
    """Frozen linear layers, each followed by a trained scale."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(blocks))
        self.requires_grad_(False)
        for block in self.blocks:
            block[1].weight.requires_grad_()  # type: ignore[index]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.pow(2).sum()


def blocks_on_device(model: Any) -> list[int]:
    """Returns the numbers of the blocks whose weights are on the device."""
    return [number for number, block in enumerate(model.blocks) if block[0].weight.untyped_storage().nbytes()]


@pytest.mark.parametrize("policy", [
    "swap:3", "full,swap:4", "segments:2,swap:4", "save:attention+matmul,swap:3", "modules:mlp,pointwise,swap:4",
    "full,offload,head,swap:3", "every:2,tile,swap:3",
])  # fmt: skip
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_swap_keeps_the_numbers(name: str, policy: str) -> None:
    model = make(name, "lora")
    plain = numbers(model)
    applied = apply_policy(model, policy, verify="always")
    for _ in range(2):  # the second step starts where the first one ended
        model.zero_grad()
        assert differing(numbers(model), plain) == []
    applied.remove()
    model.zero_grad()
    assert differing(numbers(model), plain) == []
    assert IN_HOST_MEMORY not in vars(model)


@pytest.mark.parametrize(("name", "policy"), [("unet", "stages,swap:3"), ("dit", "full,swap:4")])
def test_swap_keeps_the_numbers_of_diffusion_models(name: str, policy: str) -> None:
    from diffusers import DiTTransformer2DModel
    from peft import LoraConfig, get_peft_model
    from tiny_models import build, gradients

    model, inputs = build(name)
    if name == "dit":
        torch.manual_seed(0)
        model = DiTTransformer2DModel(
            num_attention_heads=4, attention_head_dim=8, in_channels=4, num_layers=5, sample_size=8, norm_num_groups=8
        ).train()
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False))
    found = []
    for verified in (None, "always"):
        if verified:
            apply_policy(model, policy, verify=verified)
        model.zero_grad()
        torch.manual_seed(1)
        model(**inputs).sample.pow(2).mean().backward()
        found.append(gradients(model))
    assert found[0].keys() == found[1].keys()
    assert all(found[0][key].equal(gradient) for key, gradient in found[1].items())


@pytest.mark.parametrize("policy", ["swap:4", "full,swap:4", "segments:2,swap:4"])
def test_two_swapped_blocks_are_on_the_device_at_a_time(policy: str) -> None:
    """Every second of 8 blocks is swapped; blocks 1, 3, 5 and 7 stay."""
    model, x = Stack(8), torch.randn(ROWS, WIDTH)
    apply_policy(model, policy)
    see = Mock(return_value=None)  # the policy would restore a list for the second run
    for block in model.blocks:
        block[0].register_forward_pre_hook(lambda *_: see([n for n in blocks_on_device(model) if n % 2 == 0]))
    for _ in range(2):
        see.reset_mock()
        assert blocks_on_device(model) == [0, 1, 3, 5, 7]
        loss = model(x)
        seen = [call.args[0] for call in see.call_args_list]
        assert seen == [[0, 2], [0, 2], [2, 4], [2, 4], [4, 6], [4, 6], [6], [6]]
        loss.backward()
    in_backward = [call.args[0] for call in see.call_args_list[8:]]
    if policy == "swap:4":
        assert in_backward == []
    elif policy == "full,swap:4":
        assert in_backward == [[6], [4, 6], [4, 6], [2, 4], [2, 4], [0, 2], [0, 2], [0]]
    else:  # blocks 4 to 7 run again, then 0 to 3, each segment in forward order
        assert in_backward == [[4, 6], [4, 6], [6], [6], [0, 2], [0, 2], [2, 4], [2, 4]]


def lora(blocks: int = 6, four_bits: bool = False) -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, num_hidden_layers=blocks, num_attention_heads=4, num_key_value_heads=2, intermediate_size=128,
        vocab_size=500, use_cache=False,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    if four_bits:
        to_nf4(model, torch.bfloat16)
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"])).train()


def step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    ids = torch.arange(128).view(2, 64)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("policy", ["swap:5", "full,swap:6"])
def test_fake_step_with_swap_equals_the_real_one(policy: str) -> None:
    """Event by event: copies in host memory, fetched weights and freed weights."""
    traces = []
    for real in (True, False):
        model = lora()
        apply_policy(model, policy, verify="never")
        traces.append(real_trace(model, step) if real else trace_step(model, step, make_optimizer=adamw, device="cpu"))
    events = [[(trace.storages[max(e, ~e)].nbytes, e >= 0) for e in trace.events[trace.start :]] for trace in traces]
    assert events[0] == events[1]
    assert traces[0].peak_allocated == traces[1].peak_allocated


def frozen(block: nn.Module) -> int:
    return sum(p.nbytes for p in block.parameters() if not p.requires_grad and p.dim() > 1)


@pytest.mark.parametrize("four_bits", [False, True])
def test_bytes_of_swap_in_both_memories(four_bits: bool) -> None:
    """N blocks are in host memory for the whole step; at its end, all but the first are there only."""
    model = lora(8, four_bits)
    block = frozen(model.base_model.model.model.layers[0])
    weights = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128
    assert block == (weights // 2 if four_bits else 4 * weights)
    plain = trace_step(model, step, make_optimizer=adamw, device="rtx-4090")
    apply_policy(model, "swap:6")
    trace = trace_step(model, step, make_optimizer=adamw, device="rtx-4090")
    assert (plain.peak_host, trace.peak_host) == (0, 6 * block)
    assert trace.at_host_peak == {"parameters": 6 * block}
    fetched = [s.place for s in trace.storages if s.op.startswith("aten.empty") and s.category == "parameters"]
    waiting = [storage.place for storage in trace.storages if storage.host]
    assert len(waiting) == len(set(waiting)) == 6 * 7
    assert set(fetched) == set(waiting)
    assert all(place.endswith(("base_layer", "_proj")) for place in waiting)
    assert plain.timeline()[-1]["parameters"] - trace.timeline()[-1]["parameters"] == 5 * block
    most = max(row["parameters"] for row in plain.timeline()) - max(row["parameters"] for row in trace.timeline())
    assert most == 4 * block  # two of the six at a time
    copied = sum(
        op.nbytes for op in trace.ops if op.name.startswith("aten.copy_") and op.kernels == 0 and op.at >= trace.start
    )
    assert copied == 2 * 5 * block  # the first is on the device when a step starts, the last when backward starts
    assert trace.seconds_parts.copying == pytest.approx(copied / trace._card.host_bandwidth)
    assert bytes_on_device(model) == 8 * block - 5 * block  # the trace restored the model


def bytes_on_device(model: Any) -> int:
    return sum(
        p.untyped_storage().nbytes()
        for layer in model.base_model.model.model.layers
        for p in layer.parameters()
        if not p.requires_grad and p.dim() > 1
    )


def test_swapped_model_is_saved_loaded_and_moved() -> None:
    model, x = Stack(6), torch.randn(ROWS, WIDTH)
    before = copy.deepcopy(model.state_dict())
    apply_policy(model, "full,swap:5")
    saved = model.state_dict()
    assert list(saved) == list(before)
    assert all(saved[key].equal(value) for key, value in before.items())
    plain = Stack(6)
    plain.load_state_dict({key: value + 1 for key, value in before.items()})
    model.load_state_dict(plain.state_dict())
    assert model(x).equal(plain(x))
    assert blocks_on_device(model.to(torch.float64)) == [5]  # the block that is not swapped
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    with torch.no_grad():
        assert model(x.double()).equal(plain.double()(x.double()))
        assert model(x.double()).equal(plain(x.double()))


def test_swapped_model_is_not_copied() -> None:
    model = Stack(6)
    apply_policy(model, "swap:5")
    with pytest.raises(UserError, match=r"a frozen weight that waits in host memory.*remove\(\) the policy for this"):
        copy.deepcopy(model)


def test_memory_mapped_weights_are_swapped(tmp_path: Path) -> None:
    """On a CPU `from_pretrained` memory-maps weights, whose storages cannot be resized."""
    from safetensors.torch import load_file, save_file

    model, x = Stack(4), torch.randn(ROWS, WIDTH)
    plain = model(x)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    model.load_state_dict(load_file(tmp_path / "model.safetensors"), assign=True)
    model.requires_grad_(False)
    for block in model.blocks:
        block[1].weight.requires_grad_()  # type: ignore[index]
    model.blocks[1][0].weight = nn.Parameter(  # type: ignore[index]
        torch.frombuffer(bytearray(model.blocks[1][0].weight.numpy().tobytes()), dtype=torch.float32).view(8, 8),  # type: ignore[index]
        requires_grad=False,
    )
    assert not model.blocks[1][0].weight.untyped_storage().resizable()  # type: ignore[index]
    apply_policy(model, "swap:4")
    assert blocks_on_device(model) == [0]
    assert model(x).equal(plain)


def test_adapters_are_not_merged_into_swapped_weights() -> None:
    model = lora()
    apply_policy(model, "swap:4")
    with pytest.raises(UserError, match=r"a frozen weight that waits in host memory.*remove\(\) the policy for this"):
        model.merge_adapter()


def test_reading_a_swapped_weight_is_an_error() -> None:
    """The storage of a swapped weight is empty, so that an operator would read foreign memory."""
    model, x = Stack(6), torch.randn(ROWS, WIDTH)
    apply_policy(model, "swap:6")
    model(x)
    weight = model.blocks[2][0].weight  # type: ignore[index]
    assert (weight.shape, weight.dtype, weight.requires_grad, weight.numel()) == ((8, 8), torch.float32, False, 64)
    reads: list[Callable[[], object]] = [
        weight.norm, weight.detach().norm, weight.data.clone, lambda: x @ weight, lambda: pickle.dumps(model),
        lambda: torch._foreach_norm(list(model.parameters())), lambda: torch.optim.swa_utils.AveragedModel(model)
        .update_parameters(model),
    ]  # fmt: skip
    assert "Waiting(shape=(8, 8))" in repr(weight)
    for read in reads:
        with pytest.raises(UserError, match="of a frozen weight that waits in host memory"):
            read()
    remove_policy(model)
    assert type(weight) is nn.Parameter
    assert torch.isfinite(torch.stack(torch._foreach_norm(list(model.parameters())))).all()


def test_write_into_a_frozen_weight_is_kept() -> None:
    """A forward may write an average of other weights."""

    def outputs(policy: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model, x = Stack(6), torch.randn(ROWS, WIDTH)
        apply_policy(model, policy)
        for block in model.blocks:
            block[0].register_forward_hook(lambda module, *_: module.weight.mul_(0.9).shape and None)
        return [model(x).detach() for _ in range(3)] + list(model.state_dict().values())

    assert all(map(torch.equal, outputs("swap:4"), outputs("none")))


def _replaced(model: Any) -> None:
    model.blocks[1][0].weight = nn.Parameter(torch.full((WIDTH, WIDTH), 0.1), requires_grad=False)


def _assigned(model: Any) -> None:
    for block in model.blocks:
        block[0].weight.data = torch.full((WIDTH, WIDTH), 0.1)


def _adapted(model: Any) -> None:
    for block in model.blocks:
        block[0] = nn.Sequential(block[0], nn.Linear(WIDTH, WIDTH))


def _reordered(model: Any) -> None:
    model.blocks = nn.ModuleList([model.blocks[number] for number in (2, 0, 3, 1)])


def _loaded(model: Any) -> None:
    values = {name: value.clone() * 1.5 for name, value in model.state_dict().items()}
    model.load_state_dict(values, assign=True)


@pytest.mark.parametrize("change", [_replaced, _assigned, _adapted, _reordered, _loaded])
@pytest.mark.parametrize("policy", ["swap:3", "full,swap:4"])
def test_changes_of_the_model_after_the_policy(policy: str, change: Callable[[Any], None]) -> None:
    """Another weight in a layer, an adapter around a layer, or blocks in another order."""
    found = []
    for applied in ("none", policy):
        torch.manual_seed(0)
        model, x = Stack(4), torch.randn(ROWS, WIDTH)
        apply_policy(model, applied)
        for step in range(4):
            if step == 2:
                change(model)
            model(x).backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None] + list(model.state_dict().values()))
    assert len(found[0]) == len(found[1])
    assert all(map(torch.equal, *found))


class Skips(nn.Module):
    """Returns its input in half of its calls."""

    def __init__(self, inner: nn.Module, number: int) -> None:
        super().__init__()
        self.inner, self.number = inner, number

    def forward(self, x: torch.Tensor) -> Any:
        return x if self.number % 2 else self.inner(x)


def test_blocks_that_return_their_input_or_no_tensor() -> None:
    grads = []
    for policy in ("none", "swap:4"):
        torch.manual_seed(0)
        model, x = Stack(4), torch.randn(ROWS, WIDTH, requires_grad=True)
        model.blocks = nn.ModuleList(Skips(block, number) for number, block in enumerate(model.blocks))
        apply_policy(model, policy)
        model(x).backward()
        grads.append(x.grad)
    assert torch.equal(grads[0], grads[1])
    model.blocks[0].forward = lambda x: iter([x])  # type: ignore[assignment]
    apply_policy(model, "swap:3")
    with pytest.raises(
        UserError, match="a Skips returns no tensor in a tuple, list, dict or dataclass.*: list_iterator"
    ):
        model(x)


def test_other_weights_of_the_user_are_respected() -> None:
    """An earlier state dict, a call with other weights, and a write through `.data`."""
    model, x = Stack(4), torch.randn(ROWS, WIDTH)
    values = model.state_dict()
    before = copy.deepcopy(values)
    apply_policy(model, "full,swap:4")
    assert all(values[name].equal(value) for name, value in before.items())
    other = {name: value * 2 for name, value in before.items()}
    plain = Stack(4)
    plain.load_state_dict(other)
    assert functional_call(model, other, (x,)).equal(plain(x))
    loss = model(x)
    remove_policy(model)
    loss.backward()  # the policy is removed
    apply_policy(model, "swap:4")
    model.blocks[0][0].weight.data.mul_(2)  # type: ignore[index]
    with pytest.raises(VerificationError, match="frozen weight 'blocks.0.0.weight', written through .data"):
        model(x)


def test_swap_refusals() -> None:
    with pytest.raises(UserError, match=re.escape("swap:2 saves nothing, because two of the swapped blocks are")):
        apply_policy(Stack(4), "swap:2")
    with pytest.raises(UserError, match="has 4 blocks with frozen weight matrices .of 4.*give at most swap:4"):
        apply_policy(Stack(4), "swap:5")
    with pytest.raises(UserError, match="Stack has 0 blocks with frozen .*train adapters"):
        apply_policy(Stack(4).requires_grad_(True), "swap:3")
    model = Stack(6)
    apply_policy(model, "swap:6")
    for launch in (Launch("fsdp2", 2), Launch("zero3", 2)):
        with pytest.raises(UserError, match="it places the weights; policy 'swap' goes with one"):
            trace_step(model, lambda model, _: model(torch.randn(2, WIDTH)).backward(), launch=launch)
    with pytest.raises(UserError, match="compiled code cannot wait for weights"):
        torch.compile(model, backend="eager")(torch.randn(2, WIDTH))
    model.blocks[3][0].weight.requires_grad_()  # type: ignore[index]
    with pytest.raises(UserError, match="is to be trained; freeze it again"):
        model(torch.randn(2, WIDTH))


def test_pageable_memory_is_used_with_one_warning_if_pinning_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinning fails on systems with a limit on locked memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    def refuses(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return torch.empty(*args[0], dtype=kwargs["dtype"])

    with FakeTensorMode():
        like = torch.empty(4)
    monkeypatch.setattr(torch, "empty_strided", refuses)
    with pytest.warns(UserWarning, match="no pinned host memory .CUDA error: out of memory.: pageable") as said:
        made = [offload.host_tensor(like) for _ in range(2)]
    assert len(said) == 1
    assert [host.is_pinned() for host in made] == [False, False]


def test_weights_share_pinned_buffers() -> None:
    """Pinned allocations are rounded up to a power of two, so weights are placed one after another in one buffer."""
    arena = Arena(700, torch.device("cpu"))
    weights = [torch.arange(50, dtype=torch.float32).view(5, 10).t(), torch.ones(60), torch.ones(3, dtype=torch.int8)]
    copies = [arena.copy(weight, weight) for weight in weights]
    assert [copied.equal(weight) for copied, weight in zip(copies, weights, strict=True)] == [True] * 3
    assert [copied.stride() for copied in copies] == [(1, 10), (1,), (1,)]
    assert [copied.storage_offset() * copied.itemsize for copied in copies] == [0, 208, 448]
    assert {copied.untyped_storage().nbytes() for copied in copies} == {700}


def test_trace_has_the_sizes_of_pinned_buffers() -> None:
    """Three weights of 400 bytes have buffers of 1024 and 512 bytes; the first weight is also on the device."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(10, 10), nn.LayerNorm(10)) for _ in range(3)))
    model.requires_grad_(False)
    for block in model:
        block[1].weight.requires_grad_()  # type: ignore[index]
    apply_policy(model, "swap:3")

    def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.empty(4, 10)).sum().backward()

    trace = trace_step(model, trained, device="rtx-4090")
    assert trace.peak_host == 1024 + 512
    assert trace.timeline()[-1]["parameters"] == 512 * (1 + 9)  # a weight, biases and norms


_ENDLESS = """
import torch
from test_swap import Stack
from ckpt_ft import apply_policy
model = Stack(4)
apply_policy(model, "swap:4,offload")
while True:
    model(torch.randn(2**16, 8)).backward()
    print("step", flush=True)
"""


def test_killed_run_leaves_no_process_or_shared_memory() -> None:
    """Pinned memory belongs to the process and is freed with it."""
    before = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    with subprocess.Popen(
        [sys.executable, "-c", _ENDLESS], cwd=Path(__file__).parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as run:  # fmt: skip
        assert run.stdout is not None
        assert run.stdout.readline() == "step\n"
        run.kill()
        run.communicate(timeout=60)
    assert run.returncode == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        os.killpg(run.pid, 0)
    left = set(os.listdir("/dev/shm")) - before if os.path.isdir("/dev/shm") else set()
    # other processes create segments too; torch's contain the pid
    assert not [name for name in left if str(run.pid) in name]


@pytest.mark.gpu
def test_swap_on_a_gpu() -> None:
    """Pinned memory, streams, and free bytes while all blocks run."""
    model = lora(12).cuda()
    plain, ids = copy.deepcopy(model), torch.arange(128, device="cuda").view(2, 64)
    before = torch.cuda.memory_allocated()
    apply_policy(model, "swap:12")
    block = frozen(plain.base_model.model.model.layers[0])
    assert before - torch.cuda.memory_allocated() == 11 * block
    assert all(host.is_pinned() for host in vars(model)[IN_HOST_MEMORY].values())
    for _ in range(3):
        for one in (plain, model):
            one.zero_grad()
            torch.manual_seed(1)
            one(input_ids=ids, labels=ids).loss.backward()
        torch.cuda.synchronize()
        for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert other.grad is None or torch.equal(mine.grad, other.grad)  # type: ignore[arg-type]


@pytest.mark.gpu
def test_swapped_weights_are_not_moved_to_the_gpu() -> None:
    model = lora(12)
    apply_policy(model, "swap:12")
    block = frozen(lora(1).base_model.model.model.layers[0])
    total = sum(p.nbytes for p in model.parameters())
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model.cuda()
    assert torch.cuda.max_memory_allocated() - before < total - 11 * block
    ids = torch.arange(128, device="cuda").view(2, 64)
    model(input_ids=ids, labels=ids).loss.backward()
