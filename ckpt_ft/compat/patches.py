"""The places in torch and the libraries where the package puts something of its own, and `patched`, which does it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pkgutil import resolve_name
from typing import Any
from unittest.mock import patch

from . import Table

_PLACES = Table(
    __name__,
    "torch 2.11 to 2.14, transformers 5.16 to 5.24",
    """
is_fake_tensor: transformers.utils.import_utils.is_fake_tensor
    transformers builds attention masks for fake tensors that it skips for real ones
make_tensor: torch.tensor
    reads 0-dim tensors without dispatch, which fails on fakes
fakes_tolist: torch._subclasses.fake_tensor.FakeTensor.tolist
    copies to the host once for each number
on_cuda: torch.cuda empty_cache synchronize reset_peak_memory_stats
on_accelerator: torch.accelerator empty_cache synchronize reset_peak_memory_stats
    what a step asks of its device by Python functions is recorded
record_history: torch.cuda.memory._record_memory_history
    called by scripts that record their allocations; a dry run has none
init_gpu: torch._subclasses.fake_tensor.init_gpu_context
    allocates on the card before a fake is made there; the card of a dry run has no driver
make_autocast: torch.amp.autocast_mode.autocast.__init__
autocast_is_on: torch.is_autocast_enabled
autocast_dtype: torch.get_autocast_dtype
no_scaler: torch.cuda.amp.common.amp_definitely_not_available
    autocast of CUDA on fake tensors, which the dispatcher takes for the CPU's
save_on_cpu: torch.autograd.graph.save_on_cpu.__init__
    saved tensors go to pinned host memory, which a trace excludes
foreach_devices: torch.optim.optimizer._get_foreach_kernels_supported_devices
    optimizers default to foreach kernels on CUDA only
takes_grouped_mm: transformers.integrations.moe._can_use_grouped_mm
    asks the card, which fake tensors do not name
triton_kernel: triton.runtime.JITFunction.run
triton_autotuner: triton.runtime.Autotuner.run
    a kernel writes into tensors that its caller made
compiled_frame: torch._dynamo.eval_frame._callback_from_stance
    tells that a compiled function runs eagerly
inductor: torch._inductor.compile_fx compile_fx GraphLowering get_input_idxs_to_check
inductor_module: torch._inductor.graph.GraphLowering.compile_to_module
    graphs are lowered and scheduled as on the card, and replayed in place of being compiled
on_card: torch.cuda get_device_properties get_device_capability current_device is_bf16_supported get_rng_state
device_properties: torch._inductor.runtime.hints.DeviceProperties.create
bfloat16_check: torch._inductor.compile_fx._check_triton_bf16_support
has_triton: torch._inductor.scheduler.has_triton
triton_version: torch.utils._triton.triton_hash_with_backend
padding: torch._inductor.compile_fx.maybe_disable_comprehensive_padding
    what Inductor asks of the card
resize: torch.UntypedStorage.resize_
    FSDP2 and `swap` free and refill storages
wait_for_work: torch.distributed.Work.wait
    gloo copies out of a buffer of its own, which is not the step's
shapes_of_whole: torch.distributed.tensor._sharding_prop.ShardingPropagator._propagate_tensor_meta_non_cached
place_in_mesh: torch.distributed.device_mesh.DeviceMesh._compute_coordinate_on_dim
    operators that DTensor and DeviceMesh run for themselves are not the step's
unique_id: torch.distributed._meta_registrations.generate_unique_id
    draws a number from Python's generator, which would look as if blocks were drawn at random
collective_result: torch.distributed._functional_collectives._maybe_wrap_tensor
    on fakes, a collective would be waited for at once
fake_work: torch._C._distributed_c10d.FakeWork.wait
current_stream: torch.accelerator.current_stream
on_cpu: torch.cpu Stream Event current_stream stream current_device
    FSDP2's streams are followed
fsdp_sends: torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam.all_gather_inputs
fsdp_shards: torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam.to_sharded_dtensor
fsdp_local: torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam._sharded_local_tensor
    copies to and from the host, and gathers in 8 bits, which fakes leave out
ring: torch.distributed.tensor.experimental._context_parallel._attention._templated_ring_attention
ring_kernels: torch.distributed.tensor.experimental._context_parallel._attention.custom_ops
    context parallelism with attention of the CPU
redistribution_log: torch.distributed.tensor._redistribute.logger.disabled
    remarks on transformers' code
exchange_tokens: transformers.distributed.expert_parallel.all_to_all_single_autograd >=5.22
    a fake tensor that waits at its first use loses its gradient
linear: torch.nn.functional.linear
    as DeepSpeed replaces it
flex_device: torch.nn.attention.flex_attention._validate_device
    called first by flex_attention, which takes no fake tensors
trl_forward: trl.kernels.chunked_logprob._forward_kernel
trl_backward: trl.kernels.chunked_logprob._backward_kernel
trl_addmm: trl.kernels.chunked_logprob._addmm_fp32
trl_triton: trl.kernels.chunked_logprob.triton >=2
trl_kernels_run: trl.kernels.chunked_logprob._use_triton >=1.16
trl_uses_kernels: trl.trainer.utils._use_triton >=1.16
    TRL's fused head as it runs on a GPU; before 1.16 it always uses Triton
zero3_is_made: transformers.modeling_utils._is_ds_init_called
    ZeRO-3 would divide a model that is made
goes_on: transformers.GenerationMixin._has_unfinished_sequences
    generated tokens have no values, which would tell the end
""",
)
__getattr__ = _PLACES


@contextmanager
def patched(**new: Any) -> Iterator[None]:
    """Put something else in places of the table, for a while.

    Args:
        new: by the place's short name. For a dict, its entries. For a place with parts, those that it has, by name.
    """
    with ExitStack() as stack:
        for short, value in new.items():
            place = _PLACES.names[short]
            owner, _, name = place.path.rpartition(".")
            found = _PLACES(short)
            if place.parts:
                for part, own in value.items():
                    stack.enter_context(patch.object(found, part, own, create=True))
            elif isinstance(found, dict):
                stack.enter_context(patch.dict(found, value))
            else:
                stack.enter_context(patch.object(resolve_name(owner), name, value, create=bool(place.since)))
        yield
