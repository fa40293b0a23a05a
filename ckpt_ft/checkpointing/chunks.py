"""Shared by `head` and `tile`: runs a module on one chunk of tokens after another; backward recomputes each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from ckpt_ft.errors import UserError

from .autocast import AutocastState
from .module_contents import TABLES
from .recompute import Checkpointed, RegionCall, runs
from .standin import StandIn

_HOOKS = [name for name in TABLES if name.endswith("hooks")]
# their hooks gather and free weights, or shard the inputs and outputs of layers
_SHARDING = ("torch.distributed", "deepspeed", "transformers.integrations.tensor_parallel")
_HALF = (torch.bfloat16, torch.float16)


class InChunks(Checkpointed):
    """A module's forward in chunks of its input, each of which is one call of a checkpointed region."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module, None)
        self.inputs.written = set()  # chunks share memory, so none may be written to
        self.unhooked = Unhooked(self)

    def run_chunks(
        self, term: str, forward: Callable[..., torch.Tensor], chunks: Iterable[tuple[torch.Tensor, ...]]
    ) -> list[torch.Tensor]:
        """Run `forward`, which computes with the module, on each chunk.

        All chunks are saved for backward before the first one runs. If a checkpoint around the module saves nothing
        after them, its second run ends there and computes no chunk.

        The first chunk of a call may write state while it sets up a layer (`Linear8bitLt.state` of bitsandbytes).

        Raises:
            UserError: two chunks in a row wrote buffers or attributes of the module.
        """
        prepared = [(chunk, runs(self, chunk, {})) for chunk in chunks]
        calls = [(c[0], RegionCall(forward, c, self.inputs, chunk, {})) for chunk, c in prepared]
        outputs, before = [], ""
        for first, call in calls:
            first.contents = self.state.contents(self.module, ())  # the chunk before may have set up a layer
            outputs.append(call())
            written = first.state.written()
            if before and written:
                raise UserError(
                    f"policy '{term}': a {type(self.module).__name__} writes {written} in its forward, and would do "
                    f"so for each piece; leave '{term}' out"
                )
            before = written
        return outputs


def hooked(modules: Iterable[nn.Module]) -> str:
    """The name of a hook on one of the modules other than FSDP's, tensor parallelism's and DeepSpeed's, or ""."""
    for module in modules:
        for kind in _HOOKS:
            for hook in module.__dict__[kind].values():
                home = getattr(hook, "stands_for", None) or getattr(hook, "__module__", None) or ""
                if not home.startswith(_SHARDING):
                    return str(getattr(hook, "__qualname__", type(hook).__name__))
    return ""


class Unhooked(nn.Module):
    """A module whose call runs only a stand-in's original forward, for `torch.func.functional_call`."""

    def __init__(self, stand_in: StandIn) -> None:
        super().__init__()
        self.layer, self.stand_in = stand_in.module, stand_in

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.stand_in.forward(hidden)
        return output

    def run(self, hidden: torch.Tensor, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Run the forward; use `parameters` (by name) instead of the module's own if given."""
        if not parameters:
            return self.forward(hidden)
        inside = {f"layer.{name}": value for name, value in parameters.items()}
        output: torch.Tensor = functional_call(self, inside, (hidden,))
        return output


class Weights:
    """The parameters of a module that its chunks cannot use directly.

    A half-precision sum of hundreds of chunks' gradients would be less accurate than one matmul, so each gradient is
    added to an fp32 sum, which the parameter receives once. Autocast would cast fp32 weights for each chunk, or once
    with half-precision accumulation; here they are cast once in forward and once in backward.
    """

    def __init__(self, module: nn.Module, autocast: AutocastState) -> None:
        dtype = autocast.dtype
        self.shared: dict[str, _Shared] = {}
        for prefix, inner in module.named_modules():
            cast = autocast.enabled and type(inner).forward is nn.Linear.forward
            for key, p in inner.named_parameters(recurse=False):
                used_as = dtype if cast and p.dtype == torch.float32 else p.dtype
                if used_as != p.dtype or (p.requires_grad and p.dtype in _HALF):
                    self.shared[f"{prefix}.{key}".lstrip(".")] = _Shared(p, used_as)

    def of_chunk(self) -> dict[str, torch.Tensor]:
        return {name: shared.of_chunk() for name, shared in self.shared.items()}

    def drop_copies(self) -> None:
        """Free the half-precision copies, as autocast does on exit."""
        for shared in self.shared.values():
            shared.copy = None


class _Shared:
    """One parameter, the sum of its chunks' gradients, and its copy in the dtype of the computation."""

    def __init__(self, parameter: nn.Parameter, dtype: torch.dtype) -> None:
        self.parameter, self.dtype = parameter, dtype
        self.copy: torch.Tensor | None = None
        self.total: torch.Tensor | None = None
        self.begin = _Total.apply(parameter, self) if parameter.requires_grad else None

    def of_chunk(self) -> torch.Tensor:
        data = self.parameter.detach()  # read at each use: FSDP and ZeRO free it in between
        if self.dtype != data.dtype:
            if self.copy is None:
                self.copy = data.to(self.dtype)
            data = self.copy
        return data if self.begin is None else _Use.apply(self.begin, data, self)

    def add(self, gradient: torch.Tensor) -> None:
        self.total = gradient.float() if self.total is None else self.total.add_(gradient)


class _Total(torch.autograd.Function):
    """Returns an empty tensor that all chunks' weights depend on; its backward runs last and returns their sum."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, shared: _Shared) -> torch.Tensor:
        ctx.shared = shared
        return torch.empty(0, device=parameter.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        shared: _Shared = ctx.shared
        total, shared.total, shared.copy = shared.total, None, None
        return None if total is None else total.to(shared.parameter.dtype), None


class _Use(torch.autograd.Function):
    """Returns a parameter for one chunk; its backward adds the gradient to the shared sum."""

    @staticmethod
    def forward(ctx: Any, begin: torch.Tensor, data: torch.Tensor, shared: _Shared) -> torch.Tensor:
        ctx.shared = shared
        return data.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.shared.add(gradient)
        return torch.empty(0, device=gradient.device), None, None
