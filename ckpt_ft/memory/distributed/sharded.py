"""A model that `fully_shard` has sharded already: the same wrapping once more, on fakes and in a group of their own.

So a model is traced as it stands, whoever wrapped it: accelerate when training began, or a loop of one's own. What
FSDP2 was told is read off its states (torch/distributed/fsdp/_fully_shard: FSDPState, FSDPParamGroup).
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed._composable_state import _get_module_state, _module_state_mapping
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard

from ckpt_ft.errors import UserError
from ckpt_ft.spec.launch import Launch


def sharding_of(model: nn.Module) -> Sharding | None:
    """How `model` is sharded; None if it is not."""
    return Sharding(model) if any(isinstance(module, FSDPModule) for module in model.modules()) else None


def shard_again(model: nn.Module) -> None:
    """Let go of the weights that FSDP2 has gathered and kept, in an evaluation, say; the next forward gathers them."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


class Sharding:
    """What `fully_shard` did to `model`, children before parents. Weights that are gathered are sharded again.

    Raises:
        UserError: a part of it is not modelled.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        shard_again(model)
        found = [module for module in model.modules() if isinstance(module, FSDPModule)]
        states: dict[int, Any] = {id(state): state for state in map(_get_module_state, found)}
        self.units = [_Unit(state) for state in reversed(states.values())]
        meshes = {unit.mesh for unit in self.units} - {None}
        if len(meshes) != 1:
            raise UserError("a model sharded over several meshes is not modelled; use one for all of it")
        self.shape, self.names = meshes.pop()  # type: ignore[misc]

    def within(self, launch: Launch | None) -> Launch:
        """`launch`, or what the model's mesh tells of one.

        Raises:
            UserError: it is one of other processes, or shares nothing.
        """
        processes = math.prod(self.shape)
        launch = launch or Launch("fsdp2", processes)
        if launch.strategy != "fsdp2" or launch.processes != processes:
            raise UserError(f"launch '{launch}': the model is sharded already, over {processes} processes")
        return launch

    def take_off(self) -> None:
        """Leave the modules as they were before, with the parameters that they have now."""
        for unit in self.units:
            for handle in unit.hooks:
                handle.remove()
            for module in unit.modules:
                module.__class__ = type(module).__mro__[2]  # FSDP's class of its own, FSDPModule, the module's
                _module_state_mapping.pop(module)
                del module.__dict__[STATE_KEY], module.__dict__[REGISTRY_KEY]

    def put_on(self, mesh: DeviceMesh) -> list[Tensor]:
        """Shard the parameters that the modules have now over `mesh`, of the same shape as the one before.

        Returns what communication holds from then on: nothing.
        """
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
    """One call of `fully_shard`: modules whose parameters are gathered together."""

    def __init__(self, state: Any) -> None:
        self.modules: list[nn.Module] = list(state._modules)
        self.hooks = (state._pre_forward_hook_handle, state._post_forward_hook_handle)
        self.prefetched = [
            [other._modules[0] for other in others]
            for others in (state._states_to_forward_prefetch, state._states_to_backward_prefetch)
        ]
        self.options: dict[str, Any] = {"mp_policy": state._mp_policy, "reshard_after_forward": None}
        self.mesh: tuple[tuple[int, ...], tuple[str, ...] | None] | None = None
        self.parameters: list[tuple[nn.Module, str, Any]] = []  # whose, its name there, along which dimension
        group = state._fsdp_param_group
        if group is None:  # children have sharded all there is
            return
        if isinstance(group.offload_policy, CPUOffloadPolicy):
            raise UserError("FSDP2 with parameters on the host is not modelled")
        if any(parameter.is_dtensor for parameter in group.fsdp_params):
            raise UserError("FSDP2 beside tensor parallelism is not modelled")
        self.mesh = tuple(group.mesh_info.mesh.shape), group.mesh_info.mesh.mesh_dim_names
        for parameter in group.fsdp_params:
            place = parameter._module_info
            self.parameters.append((place.module, place.param_name, parameter.fsdp_placement))
        if not state._auto_reshard_after_forward:
            self.options["reshard_after_forward"] = _resharding(group)


def _resharding(group: Any) -> bool | int:
    after = group.post_forward_mesh_info
    if after is None or after == group.mesh_info:
        return after is not None
    return int(after.shard_mesh_size)
