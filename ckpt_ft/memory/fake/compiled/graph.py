"""CompiledGraph: what one graph that Inductor has scheduled allocates, frees and runs, replayed into the record.

Inductor's wrapper code is a list of lines: allocate a buffer, reuse one, call a kernel, free a buffer
(torch/_inductor/codegen/wrapper.py). `read` turns these lines into steps on fake tensors instead of Python source. A
fused kernel is one op that reads and writes its buffers. Kernels from libraries (matmuls, attention, convolutions)
are the ATen ops that they are in an eager step, with the same rules.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial, reduce
from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ckpt_ft.compat.compiler import V, ir, lines, make_scheduler
from ckpt_ft.compat.tensors import OpOverload, schema_of, tree_map, tree_map_only
from ckpt_ft.errors import UserError
from ckpt_ft.memory.cost.op_work import Work, footprint, measure
from ckpt_ft.memory.record.tracker import Tracker
from ckpt_ft.standins.quantised_layers import IN_PARTS

from ..dispatcher import FakeOps
from ..faked_model import CPU, Fakes

_OPS = torch.ops.higher_order
# What a checkpoint calls an op by that may draw random numbers: in its first run, and in its second.
_WITH_RANDOM_STATE = type(_OPS.run_and_save_rng_state), type(_OPS.run_with_rng_state)
_STATE = 5056  # bytes of the state of the CPU's generator
Buffers = dict[str, Any]  # fake tensors by Inductor's names
Step = Callable[["CompiledGraph", Buffers], None]
_CALLS = (lines.KernelCallLine, lines.ExternKernelOutLine, lines.ExternKernelAllocLine)
_SUMS = re.compile(r"(\w+) = (workspace_\d+\[.*)")  # partial sums of a norm's weights, added up
_BETWEEN = ("forward", "__self__", "__dict__", "_modules")  # a policy's stand-ins, and the methods that they call
_KEY = re.compile(r"(?:\._modules)?\['?([^'\]]*)'?\]")  # of a module in a list or dictionary


class CompiledGraph:
    """Half a compiled region, forward or backward: called like its code, with a list of inputs that it empties."""

    def __init__(self, tracker: Tracker, fakes: Fakes, inputs: list[str]) -> None:
        self.tracker, self.fakes, self.inputs = tracker, fakes, inputs
        self.steps: list[Step] = []
        self.outputs: list[Callable[[Buffers], Any]] = []
        self.on_card = False
        self._module = ""
        self._begun: int | None = None  # events before the allocations for the kernel that comes next

    def __call__(self, args: list[Any]) -> list[Any]:
        ops = self.tracker.dispatcher
        assert isinstance(ops, FakeOps)
        buffers = Buffers(zip(self.inputs, ops.faked(args), strict=True))  # real ones that the step closes over
        args.clear()
        context = self.tracker.context
        context.locate()
        self._module = context.module()
        for step in self.steps:
            step(self, buffers)
            context.inner = ""
        return [output(buffers) for output in self.outputs]

    # -- what steps do ----------------------------------------------------------------------------------------------

    def allocate(self, view: View, count: int, op: str, module: str) -> Tensor:
        """A new buffer of `count` elements, seen as `view`."""
        flat = self.fakes.new((count,), (1,), view.dtype)
        context, recorder = self.tracker.context, self.tracker.recorder
        if self._begun is None:
            self._begun = len(recorder.events)
        category = "activations" if context.phase == "forward" or context.recomputing else "temporary"
        recorder.follow(flat, category, op, self.within(module))
        return view.of(self.fakes, flat)

    def random_state(self) -> Tensor:
        """The state of the random generator, which lies on the host."""
        state = self.fakes.new((_STATE,), (1,), torch.uint8)
        recorder = self.tracker.recorder
        if self.on_card:
            recorder.ignore(state)
        else:
            recorder.follow(state, "activations", "get_rng_state")
        return state

    def launch(self, name: str, work: Work, module: str) -> None:
        recorder = self.tracker.recorder
        at = len(recorder.events) if self._begun is None else self._begun
        recorder.add_op(name, work, self.within(module), at, recorder.stream, 0, "")
        self._begun = None

    def within(self, module: str) -> str:
        """The qualified name of a module of the compiled region."""
        if not module or not self._module or module.startswith(self._module):
            return module or self._module
        return f"{self._module}.{module}"


class View:
    """Shape, strides, offset and dtype of a tensor on a buffer."""

    def __init__(self, node: Any) -> None:
        layout = node.get_layout()
        self.shape, self.stride = _ints(layout.size), _ints(layout.stride)
        self.offset, self.dtype = _ints([layout.offset])[0], layout.dtype

    def of(self, fakes: Fakes, buffer: Tensor) -> Tensor:
        return fakes.view(buffer, self.shape, self.stride, self.offset, self.dtype)


def _ints(values: Any) -> tuple[int, ...]:
    return tuple(V.graph.sizevars.optimization_hint(value) for value in values)


# -- reading a schedule -----------------------------------------------------------------------------------------------


def read(graph: Any, tracker: Tracker, fakes: Fakes) -> CompiledGraph:
    """The events of a graph that was lowered: Inductor fuses, schedules and plans its buffers; nothing is compiled."""
    graph.init_wrapper_code()
    make_scheduler(graph)()
    wrapper, running = graph.wrapper_code, {}
    write = wrapper.writeline

    def writeline(line: Any) -> None:
        running[id(line)] = graph.scheduler.current_node
        write(line)

    wrapper.writeline = writeline
    wrapper.push_codegened_graph(graph)
    graph.scheduler.codegen()
    wrapper.run_wrapper_ir_passes(graph.is_inference)
    made = CompiledGraph(tracker, fakes, list(graph.graph_input_names))
    made.on_card = "cuda" in graph.device_types
    written = list(wrapper.lines)
    for at, line in enumerate(written):
        made.steps.extend(_steps(line, running.get(id(line)), written[at:], made))
    made.outputs = [_output(out, fakes) for out in graph.graph_outputs]
    wrapper.pop_codegened_graph()
    return made


def _steps(line: Any, scheduled: Any, rest: list[Any], made: CompiledGraph) -> Iterator[Step]:
    fakes = made.fakes
    if isinstance(line, lines.AllocateLine):
        node = line.node
        view, module = View(node), _module(node)
        count = _ints([V.graph.get_allocation_storage_size(node)])[0]
        op = next(_name(later) for later in rest if isinstance(later, _CALLS))
        yield _sets(node.get_name(), lambda graph, buffers: graph.allocate(view, count, op, module))
    elif isinstance(line, lines.ReuseLine):
        old, view, dies = line.node.get_name(), View(line.reused_as), line.delete_old
        yield _sets(
            line.reused_as.get_name(),
            lambda graph, buffers: view.of(fakes, buffers.pop(old) if dies else buffers[old]),
        )
    elif isinstance(line, lines.ReinterpretLine):
        base: Any = line.layout
        view, base = View(base.view), base.view.get_name()
        yield _sets(line.reused_as.get_name(), lambda graph, buffers: view.of(fakes, buffers[base]))
    elif isinstance(line, (lines.FreeIfNotReusedLine, lines.FreeLine)):
        if not getattr(line, "is_reused", False):
            freed = line.node.get_name()
            yield lambda graph, buffers: buffers.pop(freed, None)
    elif isinstance(line, lines.KernelCallLine):
        yield _kernel(line, scheduled)
    elif isinstance(line, lines.MultiOutputLine):
        source, path = line.arg_name, [index for _, index in line.indices]
        yield _sets(line.result_name, lambda graph, buffers: reduce(getitem, path, buffers[source]))
    elif isinstance(getattr(line, "node", None), ir.FallbackKernel):
        yield _fallback(line.node, fakes)
    elif isinstance(getattr(line, "node", None), ir.ExternKernel):
        yield _extern(line.node, fakes)
    elif isinstance(line, str) and (sums := _SUMS.fullmatch(line)):
        result, expression = sums.groups()
        yield _sets(result, lambda graph, buffers: eval(expression, {"torch": torch}, buffers))


def _sets(name: str, make: Callable[[CompiledGraph, Buffers], Any]) -> Step:
    """A step that puts what `make` returns into the buffers under `name`."""

    def step(graph: CompiledGraph, buffers: Buffers) -> None:
        buffers[name] = make(graph, buffers)

    return step


def _name(line: Any) -> str:
    if isinstance(line, lines.KernelCallLine):
        return str(line.kernel_name)
    origin = _origin(line.node)
    return str(origin.target) if origin is not None else str(line.node.python_kernel_name)


def _kernel(line: Any, scheduled: Any) -> Step:
    name, module = line.kernel_name, _module(scheduled.node if scheduled.node is not None else scheduled)
    nbytes = scheduled.get_read_write_buffers_sizes()
    written = next((buffer.node for buffer in scheduled.get_outputs()), None)
    work = Work(0, int(nbytes), "" if written is None else str(written.get_dtype())[6:], 1)
    return lambda graph, buffers: graph.launch(name, work, module)


def _fallback(node: Any, fakes: Fakes) -> Step:
    """A library's kernel that allocates its results: the ATen op is called."""
    func = node.op_overload
    if not isinstance(func, (OpOverload, *_WITH_RANDOM_STATE)):
        raise UserError(f"the compiled step calls {func}, which is not modelled")
    given = [(value.get_name(), View(value)) for value in node.inputs]
    name, module = node.get_name(), _module(node)

    def call(graph: CompiledGraph, buffers: Buffers) -> None:
        graph.tracker.context.inner, graph._begun = graph.within(module), None
        inputs = [view.of(fakes, buffers[name]) for name, view in given]
        args, kwargs = node.unflatten_args(inputs, node.constant_args)
        args, kwargs = tree_map_only(torch.device, lambda device: CPU, (args, {**node.kwargs, **kwargs}))
        if isinstance(func, OpOverload):
            buffers[name] = IN_PARTS.get(func, func)(*args, **kwargs)
        elif isinstance(func, _WITH_RANDOM_STATE[0]):
            buffers[name] = graph.random_state(), args[0](*args[1:], **kwargs)
        else:
            buffers[name] = args[1](*args[2:], **kwargs)

    return call


def _extern(node: Any, fakes: Fakes) -> Step:
    """A library's kernel that writes into a buffer that was planned for it."""
    origin, name, module, view = _origin(node), node.get_name(), _module(node), View(node)
    allocates = not node.should_allocate()

    def call(graph: CompiledGraph, buffers: Buffers) -> None:
        if allocates and name not in buffers:
            count = 1 + sum((n - 1) * step for n, step in zip(view.shape, view.stride, strict=True))
            op = str(node.python_kernel_name) if origin is None else str(origin.target)
            buffers[name] = graph.allocate(view, count, op, module)
        if origin is None:
            nbytes = footprint(buffers[name]) * 2
            return graph.launch(str(node.python_kernel_name), Work(0, nbytes, str(view.dtype)[6:], 1), module)
        func: Any = origin.target
        args, kwargs = tree_map(partial(_like, fakes), (origin.args, origin.kwargs))
        graph.launch(str(func), measure(func, tuple(args), kwargs, buffers[name]), module)
        if (after := graph.tracker.dispatcher.handling(func).after) is not None:
            after(graph.tracker.recorder, func, tuple(args), kwargs, buffers[name])

    return call


def _like(fakes: Fakes, value: Any) -> Any:
    """A fake tensor in place of a node of the graph that is one."""
    made = value.meta.get("val") if isinstance(value, Node) else value
    return fakes.like(made) if isinstance(made, Tensor) else made


def _origin(node: Any) -> Node | None:
    """The ATen call that a library's kernel runs."""
    origins = filter(None, [node.get_origin_node(), *node.get_origins()])
    calls = [origin for origin in origins if isinstance(origin.target, OpOverload)]
    known = str(node.python_kernel_name or "").rpartition(".")[2]
    named = [call for call in calls if schema_of(call.target).name.endswith(f"::{known}")]
    return next(iter(named + calls), None)


def _output(out: Any, fakes: Fakes) -> Callable[[Buffers], Any]:
    if isinstance(out, ir.NoneAsConstantBuffer):
        return lambda buffers: None
    if isinstance(out, ir.ShapeAsConstantBuffer):
        value = int(out.expr)
        return lambda buffers: value
    if not hasattr(out, "get_name"):
        return lambda buffers: out
    name, view = out.get_name(), View(out)

    def tensor(buffers: Buffers) -> Tensor:
        given = buffers[name]
        same = given.shape == view.shape and given.stride() == view.stride and given.dtype == view.dtype
        return given if same and given.storage_offset() == view.offset else view.of(fakes, given)

    return tensor


def _module(node: Any) -> str:
    """The qualified name, within the compiled region, of the module whose forward made the node's last op."""
    origins = node.get_origins() if hasattr(node, "get_origins") else ()
    if not origins and hasattr(node, "get_nodes"):
        origins = [origin for part in node.get_nodes() if part.node is not None for origin in part.node.get_origins()]
    for origin in sorted(origins, reverse=True):
        if stack := origin.meta.get("nn_module_stack") or origin.meta.get("fwd_nn_module_stack"):
            path: str = list(stack.values())[-1][0].partition("]")[2]  # of "L['self']"
            return ".".join(part for part in _KEY.sub(r".\1", path).split(".") if part and part not in _BETWEEN)
    return ""
