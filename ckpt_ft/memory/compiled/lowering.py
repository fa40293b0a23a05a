"""Steps under torch.compile: its front end, partitioner, lowering and scheduler run; no kernel is compiled.

Dynamo and AOTAutograd trace the model's frames on fake tensors. For a GPU the graphs are lowered as on that card:
their fake tensors say "cuda", and what Inductor asks of the card is answered from gpus.py. What Inductor would
measure on the card is assumed: matmuls are not padded (`pad_mm`) and no kernel is replaced by autotuning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from ckpt_ft.memory.gpus import GPU
from ckpt_ft.memory.record.step_context import StepContext
from ckpt_ft.memory.record.tracker import Tracker

from ..fake.faked_model import Fakes

_CUDA = torch.device("cuda", 0)


def is_compiled(model: nn.Module) -> bool:
    """Whether `torch.compile` was called for the model or a module of it."""
    from torch._dynamo import OptimizedModule

    return any(m._compiled_call_impl is not None or isinstance(m, OptimizedModule) for m in model.modules())


def prepare() -> None:
    """Builds dynamo's tables of torch's functions, which must not hold those that a trace patches."""
    from torch._dynamo import trace_rules
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    trace_rules.get_torch_obj_rule_map()
    TorchInGraphFunctionVariable._get_handlers()


@contextmanager
def followed(model: nn.Module, context: StepContext) -> Iterator[None]:
    """Tells `context` of the modules that run: those outside of compiled regions, and each region as a whole."""
    from torch._dynamo import OptimizedModule

    context.by_global_hooks = False
    with ExitStack() as stack:
        inside: set[int] = set()
        for module in model.modules():
            if id(module) in inside:
                continue
            if isinstance(module, OptimizedModule) or module._compiled_call_impl is not None:
                inside.update(map(id, module.modules()))
            if module._compiled_call_impl is not None:
                run = _located(module, context, module._compiled_call_impl)
                stack.enter_context(patch.object(module, "_compiled_call_impl", run))
            else:
                stack.callback(module.register_forward_pre_hook(context.enter_module).remove)
                stack.callback(module.register_forward_hook(context.leave_module, always_call=True).remove)
        yield


def _located(module: nn.Module, context: StepContext, compiled: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        context.enter_module(module, args)
        try:
            return compiled(*args, **kwargs)
        finally:
            context.leave_module(module, args, None)

    return run


@contextmanager
def compiled_steps(model: nn.Module, tracker: Tracker, fakes: Fakes, gpu: GPU | None) -> Iterator[None]:
    """What `torch.compile` compiles from here on is lowered, scheduled and replayed into the tracker's record."""
    from torch._inductor import compile_fx, config, graph

    from .graph import read

    lower, compile_all, lowering = compile_fx.compile_fx_inner, compile_fx.compile_fx, graph.GraphLowering

    def without_modes(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():  # a backward is lowered while it runs
            return lower(*args, **kwargs)

    def compile_graph(*args: Any, **kwargs: Any) -> Any:
        return compile_all(*args, **{**kwargs, "inner_compile": without_modes})

    def lowered(gm: Any, example_inputs: Any, **kwargs: Any) -> Any:
        if gpu is not None:
            _move_to_card(gm, example_inputs)
        return lowering(gm, example_inputs=example_inputs, **kwargs)

    def to_module(graph: Any) -> Any:
        return SimpleNamespace(call=read(graph, tracker, fakes), runner=None)

    torch._dynamo.reset()
    with ExitStack() as stack:
        stack.callback(torch._dynamo.reset)
        stack.enter_context(followed(model, tracker.context))
        stack.enter_context(config.patch(force_disable_caches=True, graph_partition=False, compile_threads=1))
        stack.enter_context(torch._functorch.config.patch(enable_autograd_cache=False))
        stack.enter_context(torch._dynamo.config.patch(automatic_dynamic_shapes=False, suppress_errors=False))
        stack.enter_context(patch.object(compile_fx, "compile_fx", compile_graph))
        stack.enter_context(patch.object(compile_fx, "get_input_idxs_to_check", lambda *args: ()))
        stack.enter_context(patch.object(compile_fx, "GraphLowering", lowered))
        stack.enter_context(patch.object(lowering, "compile_to_module", to_module))
        if gpu is not None:
            stack.enter_context(_card(gpu))
        yield


def _move_to_card(gm: Any, inputs: Any) -> None:
    """The graph's fake tensors, and the devices among its arguments, become the card's."""

    def move(tensor: Tensor) -> Tensor:
        tensor.fake_device = _CUDA
        return tensor

    for node in gm.graph.nodes:
        tree_map_only(Tensor, move, node.meta.get("val"))
        node.args, node.kwargs = tree_map_only(torch.device, lambda device: _CUDA, (node.args, node.kwargs))
    tree_map_only(Tensor, move, list(inputs))


@contextmanager
def _card(gpu: GPU) -> Iterator[None]:
    """Answers what Inductor asks of the card."""
    from torch._inductor import compile_fx, scheduler
    from torch._inductor.runtime.hints import DeviceProperties

    major, minor = gpu.arch
    threads = {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536}.get(gpu.arch, 2048)
    known = DeviceProperties(
        type="cuda",
        index=0,
        multi_processor_count=gpu.sms,
        cc=10 * major + minor,
        major=major,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=threads,
        warp_size=32,
    )
    properties = SimpleNamespace(
        name=gpu.name,
        major=major,
        minor=minor,
        multi_processor_count=gpu.sms,
        total_memory=gpu.memory,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=threads,
        warp_size=32,
        gcnArchName="",
        shared_memory_per_block=48 * 2**10,
        shared_memory_per_block_optin=99 * 2**10,
    )
    answers: dict[str, Callable[..., Any]] = {
        "get_device_properties": lambda *args: properties,
        "get_device_capability": lambda *args: gpu.arch,
        "current_device": lambda *args: 0,
        "is_bf16_supported": lambda *args, **kwargs: major >= 8,
    }
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(patch.object(torch.cuda, name, answer))
        stack.enter_context(patch.object(DeviceProperties, "create", classmethod(lambda cls, device: known)))
        stack.enter_context(patch.object(scheduler, "has_triton", lambda *args: True))
        stack.enter_context(patch.object(torch.utils._triton, "triton_hash_with_backend", lambda: ""))
        stack.enter_context(patch.object(compile_fx, "maybe_disable_comprehensive_padding", lambda inputs: ExitStack()))
        yield
