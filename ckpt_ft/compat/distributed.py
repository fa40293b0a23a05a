"""torch.distributed, FSDP2 and DTensor, and DeepSpeed."""

from . import Table

__getattr__ = Table(
    __name__,
    "torch 2.11 to 2.14",
    """
local_tensor: torch.distributed.tensor.DTensor()._local_tensor
LOCAL_TENSOR: torch.distributed.tensor.DTensor()._local_tensor
    a DTensor's shard, to be read and replaced below autograd
AsyncCollectiveTensor: torch.distributed._functional_collectives.AsyncCollectiveTensor
    a collective's result before it is waited for
fsdp_group: torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState()._fsdp_param_group
grouped_modules: torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState()._modules
fsdp_precision: torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState()._mp_policy
    what FSDP2 gathers together, when it drops it, and the dtype of outputs
join_config: torch.nn.parallel.DistributedDataParallel()._join_config
    whether some ranks may end earlier than others
IGNORED_BY_DDP: torch.nn.parallel.DistributedDataParallel()._ddp_params_and_buffers_to_ignore
    DDP would broadcast weights that wait in host memory
world_of: torch.distributed.distributed_c10d()._world
WORLD: torch.distributed.distributed_c10d()._world
unregister_group: torch._C._distributed_c10d._unregister_process_group
set_global_rank: torch._C._distributed_c10d._set_global_rank
clear_sharding_cache: torch.distributed.tensor.debug._clear_sharding_prop_cache
    a trace makes process groups of its own, also in a distributed run, which keeps its groups
flatten: torch.distributed.device_mesh.DeviceMesh()._flatten
    FSDP2 shards over two dimensions of a mesh as one
fsdp_states: torch.distributed._composable_state._module_state_mapping
keys: torch.distributed._composable.contract STATE_KEY REGISTRY_KEY
before_forward: torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState()._pre_forward_hook_handle
after_forward: torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState()._post_forward_hook_handle
forward_prefetch: torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState()._states_to_forward_prefetch
backward_prefetch: torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState()._states_to_backward_prefetch
reshards_by_default: torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState()._auto_reshard_after_forward
place_of: torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam()._module_info
    a sharded model is traced by sharding it again in the same way
fsdp_param: torch.distributed.fsdp._fully_shard._fsdp_param FSDPParam ExtensionsData ShardedState.SHARDED
shard_of: torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam()._sharded_param_data
EXTENSIONS: torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam()._extensions_data
    copies to and from the host, and gathers in 8 bits
rings: torch.distributed.tensor.experimental._context_parallel._attention set_rotate_method
ring_options: torch.distributed.tensor.experimental._context_parallel._attention._cp_options rotate_method
rings_backward: torch.distributed.tensor.experimental._context_parallel._attention._templated_ring_attention_backward
    context parallelism with attention of the CPU, which torch does not share between ranks
""",
)
