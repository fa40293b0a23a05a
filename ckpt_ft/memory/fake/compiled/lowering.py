"""Steps under torch.compile: its front end, partitioner, lowering and scheduler run; no kernel is compiled.

Dynamo and AOTAutograd trace the model's frames on fake tensors. For a GPU the graphs are lowered as on that card:
their fake tensors say "cuda", and what Inductor asks of the card is answered from gpus.py. What Inductor would
measure on the card is assumed: matmuls are not padded (`pad_mm`) and no kernel is replaced by autotuning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from operator import attrgetter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import Tensor, is_tensor, nn

from ckpt_ft.compat.modules import COMPILED_CALL, compiled_call
from ckpt_ft.compat.patches import patched
from ckpt_ft.compat.tensors import no_modes, tree_map_only
from ckpt_ft.errors import UserError, one_line
from ckpt_ft.memory.gpus import GPU
from ckpt_ft.memory.record.step_context import StepContext
from ckpt_ft.memory.record.tracker import Tracker

from ..faked_model import Fakes

if TYPE_CHECKING:
    from .graph import CompiledGraph

_CUDA = torch.device("cuda", 0)
_FUSED = ("triton_", "cpp_fused")  # Inductor's kernels, by name
_REFUSED = {
    "triton.cudagraphs": "CUDA graphs keep tensors in pools of their own, which are not predicted",
    **dict.fromkeys(("max_autotune", "max_autotune_gemm"), "the kernels are chosen by timing them on the card"),
}
_OPTIMIZER = "the optimizer's step is compiled, which is not predicted: compile the model or its blocks alone"


@contextmanager
def compiling(model: nn.Module, what: str) -> Iterator[None]:
    """Compiles the model as accelerate does: "whole", "regional" (each of its repeated blocks), or "" for nothing."""
    before = {module: compiled_call(module) for module in model.modules()}
    if what == "whole":
        model.compile()
    elif what == "regional":
        from accelerate.utils import compile_regions_deepspeed  # in place, as for FSDP2 in newer versions

        compile_regions_deepspeed(model)
    try:
        yield
    finally:
        for module, compiled in before.items():
            setattr(module, COMPILED_CALL, compiled)


def is_compiled(model: nn.Module) -> bool:
    from ckpt_ft.compat.compiler import OptimizedModule

    known = any(compiled_call(m) is not None or isinstance(m, OptimizedModule) for m in model.modules())
    return known and not _runs_eagerly()


def _runs_eagerly() -> bool:
    stance: Any = torch.compiler.set_stance("force_eager")
    with stance:  # sets the user's again
        return bool(stance.prev.stance == "force_eager")


class FoundCompiled(Exception):
    """A function that torch.compile compiles ran in a step that was traced as an eager one."""


@contextmanager
def eager_steps() -> Iterator[None]:
    """Compiled functions run eagerly: torch.compile gives them up under a dispatch mode.

    Raises:
        FoundCompiled: such a function ran, and nothing but this context made it run eagerly.
    """
    ran: set[bool] = set()

    def entered(callback: Any) -> None:  # by a function that would be compiled, or by one that is left out
        ran.add(callback not in (None, False))

    watched = nullcontext() if _runs_eagerly() else patched(compiled_frame=entered)
    with watched, torch.compiler.set_stance("force_eager"):
        yield
    if True in ran:
        raise FoundCompiled


def prepare() -> None:
    """Builds dynamo's tables of torch's functions, which must not hold those that a trace patches."""
    from ckpt_ft.compat.compiler import make_handlers, trace_rules

    trace_rules.get_torch_obj_rule_map()
    make_handlers()


@contextmanager
def followed(model: nn.Module, context: StepContext) -> Iterator[None]:
    """Tells `context` of each compiled module as a whole: its hooks are part of what is compiled."""
    context.hook = unless_traced
    with ExitStack() as stack:
        for module in model.modules():
            if compiled := compiled_call(module):
                run = partial(context.call_module, module, compiled)
                stack.enter_context(patch.object(module, COMPILED_CALL, run))
        yield


def unless_traced(hook: Callable[..., None]) -> Callable[..., None]:
    """`hook`, which torch.compile traces as a function that does nothing."""

    def run(*args: Any) -> None:
        if not torch.compiler.is_compiling():
            hook(*args)

    return run


@contextmanager
def compiled_steps(
    model: nn.Module, tracker: Tracker, fakes: Fakes, gpu: GPU | None, bucket: int = 0
) -> Iterator[Callable[[], None]]:
    """What `torch.compile` compiles from here on is lowered, scheduled and replayed into the tracker's record.

    Yields a function to call after the steps: it notes what was compiled.

    Args:
        bucket: bytes of DDP's buckets, at which dynamo splits the graphs; 0 without DDP.

    Raises:
        UserError: the model cannot be compiled, or is compiled in a way that is not predicted.
    """
    from ckpt_ft.compat.compiler import (
        DDPOptimizer,
        compile_fx,
        dynamo_config,
        dynamo_utils,
        exc,
        functorch_config,
        inductor_config,
        trace_rules,
    )

    from .graph import read

    lower, compile_all, lowering = compile_fx.compile_fx_inner, compile_fx.compile_fx, compile_fx.GraphLowering

    def without_modes(gm: Any, example_inputs: Any, **kwargs: Any) -> Any:
        if any(isinstance(value, torch.SymInt) for value in example_inputs):
            raise UserError("torch.compile with dynamic shapes: one shape is predicted; compile with dynamic=False")
        try:
            with no_modes():  # a backward is lowered while it runs
                return lower(gm, example_inputs, **kwargs)
        except UserError:
            raise
        except Exception as error:
            half = "backward" if kwargs.get("is_backward") else "forward"
            raise UserError(
                f"torch.compile cannot lower a {half} graph of {type(model).__name__}: {one_line(error, 200)}"
            ) from error

    def compile_graph(*args: Any, **kwargs: Any) -> Any:
        if tracker.context.stepping:
            raise UserError(_OPTIMIZER)
        patches = kwargs.get("config_patches") or {}
        for name, reason in _REFUSED.items():
            if patches.get(name, attrgetter(name)(inductor_config)):
                raise UserError(f"torch.compile with {name}: {reason}")
        compiler: Any = partial(compile_all, **{**kwargs, "inner_compile": without_modes})
        # as within DDP's forward (convert_frame.py)
        if bucket and dynamo_utils.get_optimize_ddp_mode() == "ddp_optimizer":
            compiler = DDPOptimizer(bucket, compiler).compile_fn
        return compiler(*args)

    def lowered(gm: Any, example_inputs: Any, **kwargs: Any) -> Any:
        if gpu is not None:
            _move_to_card(gm, example_inputs)
        return lowering(gm, example_inputs=example_inputs, **kwargs)

    def to_module(graph: Any) -> Any:
        made.append(read(graph, tracker, fakes))
        stack.callback(vars(made[-1]).clear)  # dynamo may keep the graph, which refers to the record
        return SimpleNamespace(call=made[-1], runner=None)

    made: list[CompiledGraph] = []
    trace_rules.get_legacy_mod_inlinelist().add(__file__)  # the hooks of `unless_traced` do not break a graph
    dynamo_utils.counters.clear()
    with ExitStack() as stack:
        torch.compiler.reset()  # what this process has compiled is compiled again when it runs next
        stack.callback(torch.compiler.reset)
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # of torch about itself
        stack.enter_context(followed(model, tracker.context))
        stack.enter_context(inductor_config.patch(force_disable_caches=True, graph_partition=False, compile_threads=1))
        stack.enter_context(functorch_config.patch(enable_autograd_cache=False))
        dynamo = {"automatic_dynamic_shapes": False, "suppress_errors": False, "fail_on_recompile_limit_hit": True}
        stack.enter_context(dynamo_config.patch(dynamo))
        inductor = {"compile_fx": compile_graph, "GraphLowering": lowered, "get_input_idxs_to_check": lambda *args: ()}
        stack.enter_context(patched(inductor=inductor, inductor_module=to_module))
        if gpu is not None:
            stack.enter_context(_card(gpu))
        try:
            yield lambda: _describe(made, tracker)
        except exc.FailOnRecompileLimitHit as error:
            raise UserError(
                f"torch.compile compiles {dynamo_config.recompile_limit} versions of a function and runs the "
                "others eagerly, and here it meets more (blocks of which a policy replaces inner modules are each "
                "another one, for example); take 'full', 'every:N' or 'save:', or compile the whole model"
            ) from error
        except exc.TorchDynamoException as error:
            inner = getattr(error, "inner_exception", error)
            if isinstance(inner, UserError):
                raise inner from None
            if tracker.context.stepping:
                raise UserError(_OPTIMIZER) from error
            last = (getattr(error, "real_stack", None) or [None])[-1]  # the innermost function
            where = type(model).__name__ if last is None else f"{last.name} ({last.filename}:{last.lineno})"
            raise UserError(f"torch.compile cannot compile {where}: {one_line(inner, 200)}") from error


def _describe(made: list[CompiledGraph], tracker: Tracker) -> None:
    from ckpt_ft.compat.compiler import dynamo_utils

    counters, recorder = dynamo_utils.counters, tracker.recorder
    breaks = counters["graph_break"]
    if not made and not breaks and counters["stats"]["unique_graphs"]:
        raise UserError("torch.compile hands no graph of the model to Inductor: other backends are not predicted")
    note, kernels = recorder.note, {op.name for op in recorder.ops if op.name.startswith(_FUSED)}
    if not made:
        why = "it gives up regions with a graph break" if breaks else "its code is called under disable or force_eager"
        note(f"torch.compile compiles nothing here, so the step runs eagerly: {why}")
    else:
        note(
            f"compiled: {len(made)} graphs with {len(kernels)} different fused kernels; the time to compile them in "
            "the first step is not counted, and later runs find them in Inductor's cache"
        )
        note("compiled with Inductor's defaults: no kernel is chosen by timing it, no operand of a matmul is padded")
        note("compiled with static shapes: graphs with dynamic ones, for a second length or dynamic=True, may differ")
    if breaks:
        reason = one_line(next(iter(breaks)).partition("Explanation: ")[2] or next(iter(breaks)), 120)
        note(f"torch.compile breaks the model's graph at {len(breaks)} places, the first: {reason}")


def _move_to_card(gm: Any, inputs: Any) -> None:
    """The graph's fake tensors, and the devices among its arguments, become the card's."""

    def move(tensor: Any) -> Any:
        tensor.fake_device = _CUDA
        return tensor

    for node in gm.graph.nodes:
        tree_map_only(Tensor, move, node.meta.get("val"))
        node.args, node.kwargs = tree_map_only(torch.device, lambda device: _CUDA, (node.args, node.kwargs))
    tree_map_only(Tensor, move, list(inputs))


@contextmanager
def _card(gpu: GPU) -> Iterator[None]:
    from ckpt_ft.compat.compiler import DeviceProperties

    major, minor = gpu.arch
    facts: dict[str, int] = {
        "major": major,
        "multi_processor_count": gpu.sms,
        "regs_per_multiprocessor": 65536,
        "max_threads_per_multi_processor": gpu.threads,
        "warp_size": 32,
    }
    known = DeviceProperties(type="cuda", index=0, cc=gpu.capability, **facts)
    properties = SimpleNamespace(
        **facts,
        name=gpu.name,
        minor=minor,
        total_memory=gpu.memory,
        gcnArchName="",
        shared_memory_per_block=48 * 2**10,
        shared_memory_per_block_optin=99 * 2**10,
    )
    answers: dict[str, Callable[..., Any]] = {
        "get_device_properties": lambda *args: properties,
        "get_device_capability": lambda *args: gpu.arch,
        "current_device": lambda *args: 0,
        "is_bf16_supported": lambda *args, **kwargs: major >= 8,
        "get_rng_state": lambda *args: torch.empty(16, dtype=torch.uint8),
        "set_rng_state": lambda *args: None,
    }

    def check_bfloat16(graph: Any) -> None:
        if major < 8 and any(value.dtype == torch.bfloat16 for value in graph.example_inputs if is_tensor(value)):
            raise UserError(f"torch.compile compiles no bfloat16 for {gpu.name}: it needs compute capability 8.0")

    with patched(
        on_card=answers,
        device_properties=classmethod(lambda cls, device: known),
        bfloat16_check=check_bfloat16,
        has_triton=lambda *args: True,
        triton_version=lambda: "",
        padding=lambda inputs: ExitStack(),
    ):
        yield
