"""The inside of torch.compile: dynamo, the partitioner, Inductor."""

from . import Table

__getattr__ = Table(
    __name__,
    "torch 2.11 to 2.14",
    """
uncompiled: torch._disable_dynamo
    as torch.compiler.disable, without the seconds that importing dynamo takes
comptime: torch._dynamo.comptime.comptime
    warns once while a function is compiled
functorch_config: torch._functorch.config activation_memory_budget
    the budget of the partitioner
dynamo_config: torch._dynamo.config patch recompile_limit
inductor_config: torch._inductor.config patch force_disable_caches graph_partition compile_threads
    what is compiled again, and where it is cached
dynamo_utils: torch._dynamo.utils counters get_optimize_ddp_mode
    what was compiled, and where graphs break
exc: torch._dynamo.exc FailOnRecompileLimitHit TorchDynamoException
    why something cannot be compiled
trace_rules: torch._dynamo.trace_rules add get_torch_obj_rule_map get_legacy_mod_inlinelist
make_handlers: torch._dynamo.variables.torch.TorchInGraphFunctionVariable._get_handlers
    the tables of torch's functions must not hold what a trace puts in their place, and leave the tracker out
OptimizedModule: torch._dynamo.OptimizedModule
    whether a module runs compiled
DDPOptimizer: torch._dynamo.backends.distributed.DDPOptimizer compile_fn
    splits graphs at DDP's buckets
compile_fx: torch._inductor.compile_fx compile_fx compile_fx_inner GraphLowering
    graphs are lowered and scheduled, not compiled
DeviceProperties: torch._inductor.runtime.hints.DeviceProperties
    what Inductor asks of a card
make_scheduler: torch._inductor.graph.GraphLowering()._update_scheduler
lines: torch._inductor.codegen.wrapper AllocateLine FreeIfNotReusedLine FreeLine KernelCallLine MultiOutputLine
ir: torch._inductor.ir FallbackKernel ExternKernel NoneAsConstantBuffer ShapeAsConstantBuffer
V: torch._inductor.virtualized.V
    a compiled graph is a list of lines of wrapper code: allocate, reuse, call, free
graph_break: torch._dynamo.graph_break
    where transformers reads positions, which a stand-in of flash attention does not
""",
)
