"""FSDP2 in a trace: a model that `fully_shard` has already sharded, its copies to the host, and its 8-bit gathers.

A sharded model is traced by sharding it again in the same way, on fake tensors and in a separate process group. It
does not matter who sharded it: accelerate when training began, or a user's own loop. The configuration of FSDP2 is
read from its states (torch/distributed/fsdp/_fully_shard: FSDPState, FSDPParamGroup).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard

from ckpt_ft.compat.distributed import (
    EXTENSIONS,
    after_forward,
    backward_prefetch,
    before_forward,
    forward_prefetch,
    fsdp_group,
    fsdp_param,
    fsdp_precision,
    fsdp_states,
    grouped_modules,
    keys,
    place_of,
    reshards_by_default,
    shard_of,
)
from ckpt_ft.compat.patches import fsdp_local, patched
from ckpt_ft.errors import UserError
from ckpt_ft.memory.record.recorder import Recorder
from ckpt_ft.spec.launch import Launch
from ckpt_ft.standins.float8 import Float8Linear

_state_of: Any = fully_shard.state  # type: ignore[attr-defined]


def sharding_of(model: nn.Module) -> Sharding | None:
    """Returns how `model` is sharded; None if it is not."""
    return Sharding(model) if any(isinstance(module, FSDPModule) for module in model.modules()) else None


def shard_again(model: nn.Module) -> None:
    """Release weights that FSDP2 has gathered and not released, as after an evaluation."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


class Sharding:
    """Records how `fully_shard` has sharded `model`, children before parents. Releases gathered weights first.

    Raises:
        UserError: the model is sharded in a way that is not modelled.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        shard_again(model)
        found = [module for module in model.modules() if isinstance(module, FSDPModule)]
        states: dict[int, Any] = {id(state): state for state in map(_state_of, found)}
        self.units = [_Unit(state) for state in reversed(states.values())]
        meshes = {unit.mesh for unit in self.units} - {None}
        if len(meshes) != 1:
            raise UserError("a model sharded over several meshes is not modelled; use one for all of it")
        self.shape, self.names = meshes.pop()  # type: ignore[misc]

    def within(self, launch: Launch | None) -> Launch:
        """Returns `launch`, or if None, the launch that matches the model's mesh.

        Raises:
            UserError: `launch` has another number of processes, or another strategy.
        """
        processes = math.prod(self.shape)
        launch = launch or Launch("fsdp2", processes)
        if launch.strategy != "fsdp2" or launch.processes != processes:
            raise UserError(f"launch '{launch}': the model is sharded already, over {processes} processes")
        return launch

    def take_off(self) -> None:
        """Undo `fully_shard` on the modules; their current parameters stay."""
        for unit in self.units:
            for handle in unit.hooks:
                handle.remove()
            for module in unit.modules:
                module.__class__ = type(module).__mro__[2]  # removes FSDP's generated class and FSDPModule
                fsdp_states.pop(module)
                del module.__dict__[keys.STATE_KEY], module.__dict__[keys.REGISTRY_KEY]

    def put_on(self, mesh: DeviceMesh) -> list[Tensor]:
        """Shard the parameters over `mesh`, shaped like the original; communication holds no tensors: returns []."""
        placements = {id(getattr(owner, name)): to for unit in self.units for owner, name, to in unit.parameters}
        ignored = {parameter for parameter in self.model.parameters() if id(parameter) not in placements}
        for unit in self.units:
            fully_shard(
                unit.modules if len(unit.modules) > 1 else unit.modules[0],
                mesh=mesh,
                shard_placement_fn=lambda parameter: placements[id(parameter)],
                ignored_params=ignored,
                **unit.options,
            )
        for unit in self.units:
            first: Any = unit.modules[0]
            if unit.prefetched[0]:
                first.set_modules_to_forward_prefetch(unit.prefetched[0])
            if unit.prefetched[1]:
                first.set_modules_to_backward_prefetch(unit.prefetched[1])
        return []


class _Unit:
    """The modules of one call of `fully_shard`, whose parameters are gathered together."""

    def __init__(self, state: Any) -> None:
        self.modules: list[nn.Module] = list(grouped_modules(state))
        self.hooks = (before_forward(state), after_forward(state))
        self.prefetched = [
            [grouped_modules(other)[0] for other in others]
            for others in (forward_prefetch(state), backward_prefetch(state))
        ]
        self.options: dict[str, Any] = {"mp_policy": fsdp_precision(state), "reshard_after_forward": None}
        self.mesh: tuple[tuple[int, ...], tuple[str, ...] | None] | None = None
        self.parameters: list[tuple[nn.Module, str, Any]] = []  # module, name in it, placement
        group = fsdp_group(state)
        if group is None:  # its children have sharded all its parameters
            return
        if isinstance(group.offload_policy, CPUOffloadPolicy):
            self.options["offload_policy"] = IN_HOST_MEMORY
        if any(parameter.is_dtensor for parameter in group.fsdp_params):
            raise UserError("FSDP2 beside tensor parallelism is not modelled")
        self.mesh = tuple(group.mesh_info.mesh.shape), group.mesh_info.mesh.mesh_dim_names
        for parameter in group.fsdp_params:
            place = place_of(parameter)
            self.parameters.append((place.module, place.param_name, parameter.fsdp_placement))
        if not reshards_by_default(state):
            self.options["reshard_after_forward"] = _resharding(group)


def _resharding(group: Any) -> bool | int:
    after = group.post_forward_mesh_info
    if after is None or after == group.mesh_info:
        return after is not None
    return int(after.shard_mesh_size)


# -- parameters in host memory ----------------------------------------------------------------------------------------


IN_HOST_MEMORY = CPUOffloadPolicy(pin_memory=False)  # fake tensors cannot be pinned


def offloaded_parameters(model: nn.Module) -> Iterator[Tensor]:
    """This rank's shards of parameters that FSDP2 keeps in host memory."""
    for module in model.modules():
        group = fsdp_group(_state_of(module)) if isinstance(module, FSDPModule) else None
        if group is not None:
            yield from (shard_of(parameter) for parameter in group.fsdp_params if parameter.offload_to_cpu)


@contextmanager
def host_copies(recorder: Recorder, streams: Any) -> Iterator[None]:
    """Records FSDP2's copies between host and device, which fake tensors leave out: all of them are on the CPU.

    Offloaded parameters are copied to the device before each gather, and their gradients to the host, which waits for
    them at the end of backward (_fsdp_param.py: all_gather_inputs; _fsdp_collectives.py: foreach_reduce).
    """
    inputs, sharded = fsdp_param.FSDPParam.all_gather_inputs.fget, fsdp_param.FSDPParam.to_sharded_dtensor
    last_copied: list[Any] = []

    def gathered(parameter: Any) -> list[Tensor]:
        if not parameter.offload_to_cpu or parameter.sharded_state != fsdp_param.ShardedState.SHARDED:
            return inputs(parameter)
        here = recorder.on_device(shard_of(parameter))
        return [here.to(parameter.param_dtype or here.dtype)]

    def placed(parameter: Any, tensor: Tensor) -> Tensor:
        if parameter.offload_to_cpu and recorder.splits_host and not recorder.is_on_host(tensor):
            tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)
            for earlier in last_copied:  # the host waits for the last copy, before which all others end
                earlier.grad_offload_event = None
            last_copied[:] = [parameter]
            parameter.grad_offload_event = streams.current_stream().record_event()
        return sharded(parameter, tensor)

    with patched(fsdp_sends=property(gathered), fsdp_shards=placed):
        yield


@contextmanager
def gathers_in_8_bits(recorder: Recorder, fakes: Any) -> Iterator[None]:
    """FSDP2 gathers the weights of torchao's linear layers in 8 bits if they ask for it.

    torchao's weights do it by two methods (_fsdp_param.py: all_gather_inputs, init_unsharded_param). The weight that
    a layer then sees has the dtype of its gradient, and no memory but that of the 8-bit values.
    """
    local = fsdp_local.fget

    def extended(parameter: Any) -> Tensor:
        tensor, layer = local(parameter), place_of(parameter).module
        if not (isinstance(layer, Float8Linear) and layer.gathers and place_of(parameter).param_name == "weight"):
            return tensor

        def before(mesh: DeviceMesh) -> tuple[tuple[Tensor], tuple[Tensor]]:
            data, scale = layer.sent(tensor, mesh.get_group())
            return (data,), (scale,)

        def after(outputs: tuple[Tensor], scales: tuple[Tensor], dtype: torch.dtype, *, out: Any = None) -> Any:
            layer.gathered = outputs[0], scales[0]
            if out is None:
                whole = parameter.sharded_param
                out = fakes.new(whole.size(), whole.stride(), dtype)
                recorder.ignore(out)
                return out, outputs

        if not hasattr(parameter, EXTENSIONS):
            setattr(parameter, EXTENSIONS, fsdp_param.ExtensionsData())
        tensor.fsdp_pre_all_gather, tensor.fsdp_post_all_gather = before, after
        return tensor

    with patched(fsdp_local=property(extended)):
        yield
