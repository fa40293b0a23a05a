"""Autograd's hooks, nodes and state."""

from . import Table

__getattr__ = Table(
    __name__,
    "torch 2.11 to 2.14",
    """
push_hooks: torch._C._autograd._push_saved_tensors_default_hooks
pop_hooks: torch._C._autograd._pop_saved_tensors_default_hooks
set_grad: torch._C._set_grad_enabled
    once for each module: the public contexts take 1 us more
top_hooks: torch._C._autograd._top_saved_tensors_default_hooks
    autograd calls the innermost hooks only, so that they call the outer ones
make_saved_tensor: torch._C._autograd._make_saved_tensor >=2.12
    saves a tensor as a node does; before, by a node of our own, which takes 20 us more
current_node: torch._C._current_autograd_node
    the node that backward runs
graph_task: torch._C._current_graph_task_id
    tells one backward from another; -1 outside
engine: torch.autograd.Variable._execution_engine queue_callback
    called at the end of the running backward
input_metadata: torch.autograd.graph.Node()._input_metadata
    the dtype of the gradients of a graph
transform_level: torch._C._functorch.maybe_current_level
transforms: torch._C._functorch.get_interpreter_stack
TransformType: torch._C._functorch.TransformType Vmap
    whether torch.func transforms the call, and torch.vmap is among the transforms
node_number: torch.autograd.graph.Node()._sequence_nr
next_node_number: torch._C._autograd._get_sequence_nr
    the module in whose forward a node was made
stop_profiler: torch._C._autograd._disable_profiler_legacy
    allocations inside of a CPU kernel; torch.profiler sees the same, but takes milliseconds to start
""",
)
