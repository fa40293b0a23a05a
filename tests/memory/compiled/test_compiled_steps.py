"""Steps under torch.compile: as many bytes as PyTorch records where the C++ backend compiles them for this CPU."""

from __future__ import annotations

import ast
import itertools
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import peft
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import compile_regions
from diffusers.models.resnet import ResnetBlock2D
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._inductor.graph import GraphLowering
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.profiler import ProfilerActivity, profile
from trace_models import adamw, language_model, training_step, vit
from versions import is_older

from ckpt_ft import apply_policy, trace_step
from ckpt_ft.errors import UserError
from ckpt_ft.memory.fake.compiled import graph
from ckpt_ft.memory.fake.compiled.lowering import compiling
from ckpt_ft.memory.record.trace import StepTrace
from ckpt_ft.spec.launch import Launch
from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.standins.quantised_layers import PACKINGS, PackedLinear, replace_linears, to_int8, to_nf4
from ckpt_ft.workloads.workload import Workload

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's own imports
MARK = 7_777_777  # bytes, of nothing else


def steady_peak(step, model: nn.Module) -> int:
    """Bytes above what is resident in a third step, by the profiler's memory events."""
    optimizer = adamw(model)
    step(model, optimizer)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        step(model, optimizer)
        torch.empty(MARK, dtype=torch.uint8)
        step(model, optimizer)
    held = before = peak = 0
    events = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        before = held if event.nbytes() == -MARK else before
        peak = held if event.nbytes() == -MARK else max(peak, held)
    return peak - before


class UnetBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ResnetBlock2D(in_channels=32, temb_channels=None, groups=8) for _ in range(2))

    def forward(self, hidden):
        for block in self.blocks:
            hidden = block(hidden, None)
        return hidden


def unet_block():
    images = torch.randn(4, 32, 16, 16)
    return UnetBlock().train(), lambda model: model(images).pow(2).mean()


def lora():
    model, loss = language_model(shape=(4, 128), num_hidden_layers=2)
    config = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    return peft.get_peft_model(model, config), loss


MODELS = {
    "llama": lambda: language_model(shape=(4, 128), num_hidden_layers=2),
    "gpt2": lambda: language_model("gpt2", (4, 128), n_embd=64, n_layer=2, n_head=4),
    "vit": lambda: vit(8, num_hidden_layers=2),
    "unet": unet_block,
    "lora": lora,
}


Events = list[tuple[str, str, Any]]  # of buffers: "new" with its bytes, "view" with what it is a view of, "free"
SYMBOL = re.compile(r"\w+_size|s\d+")  # a size of an input, and a dimension of it


def generated_code(model: nn.Module, step) -> list[str]:
    """The code that Inductor writes for each graph; no kernel is compiled, and the graphs run eagerly."""
    codes: list[str] = []

    def to_module(graph: GraphLowering) -> SimpleNamespace:
        codes.append(graph.codegen()[0].value)
        return SimpleNamespace(call=lambda args: list(graph.orig_gm(*args)), runner=None)

    torch._dynamo.reset()
    # Dynamo numbers inputs as it meets them. Before a module with a hook, as in a trace, it meets arguments first.
    hook = register_module_forward_pre_hook(lambda *args: None)
    with (
        mock.patch.object(GraphLowering, "compile_to_module", to_module),
        torch._inductor.config.patch(force_disable_caches=True),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        step(model, adamw(model))
    hook.remove()
    torch._dynamo.reset()
    return codes


def events_of_code(code: str) -> Events:
    """What a graph's generated code does with its buffers, in order; bytes are unknown where a library allocates."""
    called = (node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.FunctionDef) and node.name == "call")
    events: Events = []
    owner: dict[str, str] = {}
    for line in next(called).body:
        match line:
            case ast.Delete(targets):
                events += [("free", target.id, None) for target in targets]
            case ast.Assign([ast.Name(name)], ast.Call(ast.Name("empty_strided_cpu"), [shape, stride, dtype])):
                sizes = zip(ast.literal_eval(shape), ast.literal_eval(stride), strict=True)
                count = 1 + sum((size - 1) * step for size, step in sizes)
                events.append(("new", name, count * getattr(torch, dtype.attr).itemsize))
            case ast.Assign([ast.Name(name)], ast.Name(old)) | ast.Assign(
                [ast.Name(name)], ast.Call(ast.Name("reinterpret_tensor"), [ast.Name(old), *_])
            ):
                owner[name] = owner.get(old, old)
                events.append(("view", name, owner[name]))
            case ast.Assign([ast.Name(name)], _) if not SYMBOL.fullmatch(name):
                events.append(("new", name, None))
    return events


class Followed(dict[str, Any]):
    """The buffers of a graph that is replayed, and what happens to them."""

    def __init__(self, inputs: Any) -> None:
        super().__init__(inputs)
        self.events: Events = []
        tensors = [(name, value) for name, value in self.items() if isinstance(value, torch.Tensor)]
        self.owner = {StorageWeakRef(value.untyped_storage()): name for name, value in tensors}

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        if not isinstance(value, torch.Tensor):  # several results
            self.events.append(("new", name, None))
            return
        storage = StorageWeakRef(value.untyped_storage())
        kind = "view" if storage in self.owner else "new"
        owner = self.owner.setdefault(storage, name)
        self.events.append((kind, name, owner if kind == "view" else value.untyped_storage().nbytes()))

    def pop(self, name: str, *default: Any) -> Any:
        self.events.append(("free", name, None))
        return super().pop(name, *default)


def in_order(events: Events) -> Events:
    """Views and deaths between two allocations are sorted: Inductor takes the names of what dies from a set."""
    runs = itertools.groupby(events, lambda event: event[0] == "new")
    return [event for allocates, run in runs for event in (run if allocates else sorted(run))]


def traced_with_buffers(model: nn.Module, step, launch: Launch | None = None) -> tuple[StepTrace, list[Events]]:
    """A trace for this CPU, and what its graphs do with their buffers in one step."""
    replayed: list[Events] = []

    def follow(inputs: Any) -> Followed:
        buffers = Followed(inputs)
        replayed.append(buffers.events)
        return buffers

    with mock.patch.object(graph, "Buffers", follow):
        trace = trace_step(model, step, make_optimizer=adamw, device="cpu", launch=launch)
    first, second = replayed[: len(replayed) // 2], replayed[len(replayed) // 2 :]
    assert first == second
    return trace, first


def made_inside(events: Events) -> Events:
    """The events of buffers that the graph itself makes; the names of its inputs are left out."""
    mine = [event for event in events if event[1].startswith("buf")]
    return [(kind, name, of if not isinstance(of, str) or of.startswith("buf") else "") for kind, name, of in mine]


def assert_buffers_are_the_codes(codes: list[str], replayed: list[Events], inputs: bool = True) -> None:
    """The buffers have the code's names and sizes; they are made, reused and freed between the same allocations.

    inputs: compare the graph's inputs, too.
    """
    assert len(replayed) == len(codes) > 0
    for code, events in zip(codes, replayed, strict=True):
        expected, events = (
            in_order(found if inputs else made_inside(found)) for found in (events_of_code(code), events)
        )
        known = [size is not None or kind != "new" for kind, _, size in expected]
        assert len(events) == len(expected)
        assert [event if k else (*event[:2], None) for event, k in zip(events, known, strict=True)] == expected


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["none", "full", "save:matmul"])
@pytest.mark.parametrize("kind", MODELS)
def test_peak_and_buffers_are_the_compiled_steps(kind: str, policy: str) -> None:
    torch._dynamo.reset()
    model, loss = MODELS[kind]()
    apply_policy(model, policy)
    model.compile()
    step = training_step(loss)
    trace, replayed = traced_with_buffers(model, step)
    assert_buffers_are_the_codes(generated_code(model, step), replayed)
    predicted = trace.peak_allocated - trace.replay.allocated[trace.start - 1]
    recorded = steady_peak(step, model)
    print(f"{kind}, {policy}: {predicted} predicted, {recorded} recorded")
    assert predicted == pytest.approx(recorded, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["none", "full"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_peak_of_the_longest_batch_is_that_of_the_graph_with_dynamic_shapes(kind: str, policy: str) -> None:
    """torch.compile compiles a second length with dynamic shapes; the trace compiles the longest with static ones."""
    torch._dynamo.reset()
    model, loss = MODELS[kind]()
    apply_policy(model, policy)
    model.compile()
    step, shorter = training_step(loss), torch.randint(0, 500, (4, 96))
    trace = trace_step(model, step, make_optimizer=adamw, device="cpu")
    predicted = trace.peak_allocated - trace.replay.allocated[trace.start - 1]
    counters.clear()
    training_step(lambda model: model(input_ids=shorter, labels=shorter).loss)(model, adamw(model))
    graphs = counters["stats"]["unique_graphs"]  # two for gpt2, which logs before its loss
    recorded = steady_peak(step, model)
    assert counters["stats"]["unique_graphs"] == 2 * graphs > 0
    print(f"{kind}, {policy}: {predicted} predicted, {recorded} recorded with dynamic shapes")
    assert predicted == pytest.approx(recorded, rel=0.02)


class Feedforward(nn.Module):
    """gelu and the norm are fused, and neither's input is kept beside its output."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(256, 512), nn.Linear(512, 256), nn.LayerNorm(256)

    def forward(self, hidden):
        return self.norm(hidden + self.down(nn.functional.gelu(self.up(hidden)))).sum()


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Feedforward()])

    def forward(self, hidden):
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


@pytest.mark.slow  # it compiles; the fifteen steps below are compared so, too
def test_buffers_are_those_of_the_generated_code() -> None:
    model, hidden = Stack(), torch.randn(64, 256)
    model.compile()
    step = training_step(lambda model: model(hidden))
    _, replayed = traced_with_buffers(model, step)
    assert_buffers_are_the_codes(generated_code(model, step), replayed)
    counts = [sum(kind == "new" for kind, *_ in events) for events in replayed]
    assert min(counts) >= 5


def test_a_card_runs_fused_kernels_and_nothing_is_compiled_for_it() -> None:
    model, hidden = Stack(), torch.randn(64, 256)
    model.compile()
    trace = trace_step(model, training_step(lambda model: model(hidden)), make_optimizer=adamw, device="a100-40gb")
    forward = [op for op in trace.ops if op.phase == "forward" and op.kernels]
    names = [op.name for op in forward]
    assert names[:3] == ["aten.addmm.default", "triton_poi_fused_gelu_0", "aten.addmm.default"]
    assert forward[1].nbytes == 2 * 64 * 512 * 4  # it reads one buffer and writes one
    assert (forward[0].module, forward[2].module) == ("blocks.0.up", "blocks.0.down")
    kept = [storage.nbytes for storage in trace.storages if storage.op == "triton_poi_fused_gelu_0"]
    assert kept == [64 * 512 * 4] * 2  # in both steps
    assert len({op.name for op in trace.ops if "norm_backward" in op.name}) == 3
    assert trace.seconds > 0
    fused = {op.name for op in trace.ops if op.name.startswith("triton_")}
    assert any(f"compiled: 2 graphs with {len(fused)} different fused kernels" in note for note in trace.notes)
    assert model._compiled_call_impl is not None


def test_what_is_compiled_is_compiled_again_after_a_trace() -> None:
    """The model's own code and another function's; the trace does not run it."""
    from torch._inductor import compile_fx

    compiled, whole = [], compile_fx.compile_fx

    def counted(graph: torch.fx.GraphModule, inputs: object, **options: object) -> object:
        compiled.append(graph)
        return graph.forward

    torch._dynamo.reset()
    model, hidden = Feedforward(), torch.randn(64, 256)
    double = torch.compile(lambda values: 2 * values)
    model.compile()
    with mock.patch.object(compile_fx, "compile_fx", counted):
        before = model(hidden), double(hidden)
        assert len(compiled) == 2
        for _ in range(2):
            with mock.patch.object(compile_fx, "compile_fx", whole):
                trace = trace_step(model, lambda model, optimizer: model(hidden).backward(), device="a100-40gb")
            assert any("compiled: 2 graphs" in note for note in trace.notes)
        after = model(hidden), double(hidden)
    assert len(compiled) == 4
    assert all(map(torch.equal, before, after))


def kernels(model: nn.Module, loss) -> list[tuple[str, str]]:
    trace = trace_step(model, training_step(loss), make_optimizer=adamw, device="a100-40gb", warmup_steps=0)
    return [(op.name, op.phase) for op in trace.ops if op.kernels]


def test_functions_that_are_compiled_alone_are_traced_compiled() -> None:
    hidden = torch.randn(64, 256)
    eager, whole, forward, block = Stack(), Stack(), Stack(), Stack()
    whole.compile()
    forward.forward = torch.compile(forward.forward)
    block.blocks[0].forward = torch.compile(block.blocks[0].forward)

    def loss(model: nn.Module) -> torch.Tensor:
        return model(hidden)

    expected = kernels(whole, loss)
    assert any(name.startswith("triton_") for name, _ in expected)
    for model, function in ((forward, loss), (block, loss), (eager, torch.compile(loss))):
        assert kernels(model, function) == expected
    with torch.compiler.set_stance("force_eager"):
        plain = kernels(Stack(), loss)
        assert kernels(forward, loss) == kernels(whole, loss) == plain
    square = torch.compile(lambda value: (value * value).sin().sum())
    decorated = kernels(Stack(), lambda model: square(model(hidden)))
    assert sum(name.startswith("triton_") for name, _ in decorated) == 2  # one in each half

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        loss(model).backward()
        optimizer.step()
        with torch.no_grad():
            square(model(hidden))

    trace = trace_step(Stack(), step, make_optimizer=adamw, device="a100-40gb", warmup_steps=0)
    assert sum(op.name.startswith("triton_") for op in trace.ops) == 1  # a metric after the update is no optimizer


def test_a_step_that_forces_eager_is_the_eager_step() -> None:
    def loss(model: nn.Module) -> torch.Tensor:
        with torch.compiler.set_stance("force_eager"):
            return model(hidden)

    model, hidden = Feedforward(), torch.randn(64, 256)
    plain = kernels(Feedforward(), lambda model: model(hidden))
    model.compile()
    assert kernels(model, loss) == plain


def test_flex_attention_that_a_step_calls_itself_is_one_line() -> None:
    def loss(model: nn.Module) -> torch.Tensor:
        query = model.up(hidden).view(1, 4, 128, 128)
        return flex_attention(query, query, query).sum()

    hidden = torch.randn(128, 256)
    with pytest.raises(UserError, match="the step calls flex_attention of torch itself, which is not traced; call"):
        trace_step(Feedforward(), training_step(loss), make_optimizer=adamw, device="h100")


def test_a_compiled_optimizer_is_refused() -> None:
    model, hidden = Feedforward(), torch.randn(64, 256)
    update = torch.compile(lambda optimizer: optimizer.step())

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(hidden).backward()
        update(optimizer)

    with pytest.raises(UserError, match="the optimizer's step is compiled, which is not predicted: compile the model"):
        trace_step(model, step, make_optimizer=adamw, device="a100-40gb")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mode": "reduce-overhead"}, "torch.compile with triton.cudagraphs: CUDA graphs keep tensors"),
        ({"mode": "max-autotune-no-cudagraphs"}, "torch.compile with max_autotune: the kernels are chosen"),
        ({"options": {"max_autotune_gemm": True}}, "torch.compile with max_autotune_gemm: the kernels are chosen"),
        ({"backend": "eager"}, "torch.compile hands no graph of the model to Inductor"),
        ({"dynamic": True}, "^torch.compile with dynamic shapes"),
    ],
)
def test_what_is_not_predicted_is_one_line(options: dict[str, object], says: str) -> None:
    model, hidden = Feedforward(), torch.randn(64, 256)
    model.compile(**options)
    with pytest.raises(UserError, match=says):
        trace_step(model, lambda model, optimizer: model(hidden).backward(), device="a100-40gb")


@pytest.mark.parametrize("name", ["triton.cudagraphs", "max_autotune"])
def test_settings_of_the_whole_process_are_refused_in_one_line(name: str) -> None:
    model, hidden = Feedforward(), torch.randn(64, 256)
    model.compile()
    with torch._inductor.config.patch({name: True}), pytest.raises(UserError, match=f"torch.compile with {name}: "):
        trace_step(model, lambda model, optimizer: model(hidden).backward(), device="a100-40gb")


def test_kernels_under_a_policy_have_the_names_of_their_modules() -> None:
    model, loss = unet_block()
    apply_policy(model, "full")
    model.compile()
    trace = trace_step(model, training_step(loss), make_optimizer=adamw, device="a100-40gb", warmup_steps=0)
    named = {op.module for op in trace.ops if op.name.startswith("triton")}
    assert {"blocks.0.norm1", "blocks.1.norm2"} <= named <= {name for name, _ in model.named_modules()}


class Untraceable(Feedforward):
    def forward(self, hidden):
        torch._dynamo.graph_break()
        return super().forward(hidden)


def test_a_model_that_cannot_be_traced_is_refused_by_name(capfd: pytest.CaptureFixture[str]) -> None:
    model, hidden = Untraceable(), torch.randn(64, 256)
    model.compile(fullgraph=True)
    with pytest.raises(UserError, match="torch.compile cannot compile forward .*test_compiled_steps.py:.*graph_break"):
        trace_step(model, lambda model, optimizer: model(hidden).backward(), device="a100-40gb")
    assert "W1" not in capfd.readouterr().err  # no line of torch's log


def test_blocks_compiled_under_autocast() -> None:
    """The graphs are those of the compiled blocks: a mode of the trace inside autocast would break them."""
    model, loss = language_model(num_hidden_layers=2)
    traces = []
    for compiled in (False, True):
        for block in model.model.layers if compiled else ():
            block.compile()

        def step(model: nn.Module, optimizer: object) -> None:
            with torch.autocast("cuda", torch.bfloat16):
                loss(model).backward()

        traces.append(trace_step(model, step, device="h100", warmup_steps=0))
    assert any("compiled: 2 graphs" in note for note in traces[1].notes)
    assert len(traces[1].ops) < len(traces[0].ops) / 2
    assert sum(op.name.startswith("triton") for op in traces[1].ops) >= 8


def test_blocks_compiled_under_fsdp2() -> None:
    """FSDP2 gathers and reduces as around eager blocks, and alike blocks under a policy are compiled once."""
    launch, traces = Launch("fsdp2", 2, mixed_precision="bf16"), []
    for compiled in (False, True):
        model, loss = language_model(shape=(8, 16384))
        apply_policy(model, "save:matmul")
        for block in model.model.layers if compiled else ():
            block.compile()
        step = training_step(loss)
        traces.append(trace_step(model, step, make_optimizer=adamw, device="h100", launch=launch, warmup_steps=0))
    sent = [[op.name for op in trace.ops if op.wire] for trace in traces]
    assert sent[1] == sent[0]
    # accelerate gathers embedding and head apart since 1.14; the head is not released before its backward
    gathers = 8 if is_older("accelerate", "1.14") else 9
    assert sent[1].count("c10d._allgather_base_.default") == gathers
    trace = traces[1]
    assert any("compiled: 2 graphs" in note for note in trace.notes)
    backward = [op.name for op in trace.ops if op.phase == "backward"]
    # Three of them run again; the partitioner of torch 2.11 keeps what attention returns.
    runs = 3 if is_older("torch", "2.12") else 6
    assert sum("attention" in name and "triton" not in name for name in backward) == runs
    # A kernel of a norm's backward sums the gradient of its weight over 64 tokens at a time, in fp32.
    kernels = [storage for storage in trace.storages if storage.op.startswith("triton_per")]
    assert sum(storage.nbytes == 4 * 64 * 8 * 16384 // 64 for storage in kernels) == 2 * 3
    # No attention mask is built, as on real tensors: it would have a byte for each pair of tokens.
    assert max(storage.nbytes for storage in trace.storages) == 4 * 500 * 8 * 16384


def test_flash_attention_on_a_single_row_breaks_the_graph_and_a_checkpoint_then_runs_eagerly() -> None:
    traces = []
    for compiled in (False, True):
        model, loss = language_model(shape=(1, 64), num_hidden_layers=2)
        model.config._attn_implementation = "flash_attention_2"
        apply_policy(model.bfloat16(), "full")
        for block in model.model.layers if compiled else ():
            block.compile()
        traces.append(trace_step(model, training_step(loss), make_optimizer=adamw, device="h100", warmup_steps=0))
    eager, compiled = traces
    if not is_older("torch", "2.12"):  # of which the eager step makes two copies more
        assert [op.name for op in compiled.ops if op.kernels] == [op.name for op in eager.ops if op.kernels]
    assert compiled.peak_allocated == eager.peak_allocated
    assert any("compiles nothing here" in note for note in compiled.notes)
    assert any("single row" in note for note in compiled.notes)


def test_model_compiled_after_a_trace_has_its_gradients() -> None:
    """Kernels that a trace registers are gone after it, and torch.compile does not look for them."""
    model, loss = language_model(num_hidden_layers=1)
    with compiling(model, "regional"):
        trace_step(model, training_step(loss), make_optimizer=adamw, device="a100-40gb")
    torch._dynamo.reset()
    live, loss = language_model(num_hidden_layers=1)
    live.config.attention_dropout = 0.1
    loss(torch.compile(live, backend="aot_eager")).backward()
    assert [name for name, parameter in live.named_parameters() if parameter.grad is None] == []


def test_blocks_that_torch_compile_would_run_eagerly_are_refused() -> None:
    """Under `pointwise` each block has modules of its own, which dynamo takes for another version of one function."""
    model, loss = language_model(num_hidden_layers=2)
    apply_policy(model, "pointwise")
    with (
        torch._dynamo.config.patch(recompile_limit=1),
        compiling(model, "regional"),
        pytest.raises(UserError, match="torch.compile compiles 1 versions of a function and runs the others eagerly"),
    ):
        trace_step(model, training_step(loss), make_optimizer=adamw, device="a100-40gb")
    assert all(module._compiled_call_impl is None for module in model.modules())


def test_other_launches_are_refused() -> None:
    model = Feedforward()
    model.compile()
    with pytest.raises(UserError, match="launch 'zero2.*': a compiled step is predicted for one process, ddp"):
        trace_step(model, lambda model, optimizer: None, device="a100-40gb", launch=Launch("zero2", 2))
    with pytest.raises(UserError, match="--compile whole and processes other than ddp's and fsdp2's"):
        TrainingSpec.of("m", compile="whole", launch=Launch("ddp", 2, tp=2))
    some = (Launch("ddp", 2), Launch("fsdp2", 2, cp=2))  # a plan leaves out those that are not predicted
    assert TrainingSpec.of("m", compile="whole", launches=some).launch.launches == some
    with pytest.raises(UserError, match="--compile whole and 8-bit weights"):
        TrainingSpec.of("m", compile="whole", load_in_8bit=True, lora_r=8)
    TrainingSpec.of("m", compile="whole", load_in_4bit=True, lora_r=8)


class Packable(nn.Module):
    """The norm is trained, so the gradients of both linear layers' inputs are needed."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(256), nn.Linear(256, 512), nn.Linear(512, 256)

    def forward(self, hidden):
        return self.down(nn.functional.gelu(self.up(self.norm(hidden)))).sum()


def test_a_compiled_4_bit_layer_is_one_operator_forward_and_unpacks_again_backward() -> None:
    """bitsandbytes calls gemm_4bit, which unpacks inside, and dequantises in backward; neither breaks the graph."""
    model, hidden = Packable(), torch.randn(64, 256)
    to_nf4(model, torch.float32, nested=True)
    model.norm.requires_grad_(True)
    model.compile()
    step = training_step(lambda model: model(hidden))
    trace = trace_step(model, step, make_optimizer=adamw, device="a100-40gb", warmup_steps=0)
    assert not any("breaks" in note for note in trace.notes)
    forward, backward = (
        [op.name for op in trace.ops if op.phase == phase and op.kernels and not op.name.startswith("triton")]
        for phase in ("forward", "backward")
    )
    scales, weight = "ckpt_ft.dequantize_absmax.default", "ckpt_ft.dequantize_nf4.default"
    assert forward[:-1] == [scales, "aten.add_.Tensor", weight, "aten.addmm.default"] * 2
    assert backward == [scales, scales, weight, "aten.mm.default", weight, "aten.mm.default"]
    begins = next(at for at, name in trace.marks if name == "backward")
    kept = [nbytes for storage, nbytes in trace.live_at(begins - 1) if storage.category == "activations"]
    # gelu's input; the norm's mean and deviation, the loss and its gradient take a block of 512 bytes each
    assert sorted(kept) == [512] * 4 + [64 * 512 * 4]


@pytest.mark.parametrize(
    ("pack", "launch"),
    [
        (to_int8, None),
        (lambda model: model.set_submodule("up", gptq(model.up)), None),
        (lambda model: to_nf4(model, torch.float32), Launch("fsdp2", 2)),
    ],
)
def test_packed_layers_that_break_the_graph_are_refused_compiled(pack, launch: Launch | None) -> None:
    model = Packable()
    pack(model)
    model.compile()
    with pytest.raises(UserError, match="torch.compile and (Int8|Packed|NF4)Linear: of layers .* without FSDP2"):
        trace_step(model, lambda model, optimizer: None, device="a100-40gb", launch=launch)


def gptq(linear: nn.Linear) -> PackedLinear:
    return PackedLinear(linear, PACKINGS["gptq"], 4, 128)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["none", "full"])
@pytest.mark.parametrize("what", ["whole", "regional"])
def test_peak_and_buffers_are_those_of_bitsandbytes(what: str, policy: str) -> None:
    import bitsandbytes

    def packed(linear: nn.Linear) -> nn.Module:
        layer = bitsandbytes.nn.Linear4bit(
            linear.in_features, linear.out_features, linear.bias is not None, compute_dtype=torch.float32
        )
        layer.weight = bitsandbytes.nn.Params4bit(linear.weight.data, quant_type="nf4", module=layer)
        return layer.to("cpu")

    torch._dynamo.reset()
    model, loss = language_model(shape=(4, 128), num_hidden_layers=2)
    replace_linears(model, packed, None)
    model.is_loaded_in_4bit = True
    model = peft.get_peft_model(model.requires_grad_(False), peft.LoraConfig(r=8, target_modules="all-linear"))
    apply_policy(model, policy)
    with compiling(model, what):
        step = training_step(loss)
        trace, replayed = traced_with_buffers(model, step)
        assert_buffers_are_the_codes(generated_code(model, step), replayed, inputs=False)
        assert not any("breaks" in note for note in trace.notes)
        predicted = trace.peak_allocated - trace.replay.allocated[trace.start - 1]
        recorded = steady_peak(step, model)
    print(f"4-bit {what}, {policy}: {predicted} predicted, {recorded} recorded")
    assert predicted == pytest.approx(recorded, rel=0.02)


@pytest.mark.skipif(is_older("accelerate", "1.15"), reason="a copy calls the original model's forward")
@pytest.mark.parametrize("policy", ["full", "every:2,pointwise"])
def test_a_policy_leaves_regions_compiled_that_accelerate_compiles_in_a_copy_of_the_model(policy: str) -> None:
    def backend(graph: torch.fx.GraphModule, inputs: object) -> Any:
        graphs.append(graph)
        return aot_autograd(fw_compiler=lambda graph, inputs: graph)(graph, inputs)

    results = []
    for chosen in ("none", policy):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, loss = language_model(num_hidden_layers=2)
        model.config.attention_dropout = 0.1
        apply_policy(model, chosen)
        graphs: list[torch.fx.GraphModule] = []
        compiled = compile_regions(model, backend=backend)
        value = loss(compiled)
        value.backward()
        assert len(graphs) >= 5  # the blocks, and what is not in a block
        results.append([value.detach(), torch.get_rng_state(), *(p.grad for p in model.parameters())])
    assert all(map(torch.equal, *results))
    torch._dynamo.reset()


def test_a_whole_model_is_compiled_with_its_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate wraps `forward` before it compiles: the outputs are cast to fp32 inside of the graph."""
    monkeypatch.setattr(AcceleratorState, "_shared_state", {})
    torch._dynamo.reset()
    model, hidden = Feedforward(), torch.randn(64, 256)

    def loss(forward: Any) -> torch.Tensor:
        return forward(hidden)

    workload = Workload(model, lambda *size: {}, lambda forward, batch: loss(forward), adamw, "cpu", torch.bfloat16)
    predicted = replace(workload, compile="whole").trace()
    on_card = replace(workload, compile="whole", device="h100").trace()
    Accelerator(mixed_precision="bf16", cpu=True).prepare_model(model)
    model.compile()
    run = trace_step(model, training_step(loss), make_optimizer=adamw, device="cpu")
    forward, expected = (
        [op.name for op in trace.ops if op.kernels and op.phase == "forward"] for trace in (predicted, run)
    )
    assert forward == expected
    assert predicted.peak_allocated == run.peak_allocated
    assert not any(op.name == "aten._to_copy.default" for op in on_card.ops)
