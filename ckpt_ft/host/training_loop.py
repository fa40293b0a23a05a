"""Finds the training step of a script that runs in this process.

The script is not changed and needs no import of ours. Its model is the first module that is called, from outside of
other modules, in training mode and with gradients, and that holds a parameter of an optimizer. A step ends with
`Optimizer.step()`; the next one begins at the next call of a module. In a script without an optimizer, which changes
its weights by hand, a step ends with `backward()`. No trainer or library is treated as a special case.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ckpt_ft.compat.modules import children_of
from ckpt_ft.compat.tensors import FakeTensor, tree_leaves

Batches = list[dict[str, tuple[int, ...]]]


def before_saving(call: Callable[[], None]) -> None:
    """Call `call` wherever the script saves tensors. To be called before other libraries import their savers.

    Tensors without data are not saved. The file of others is announced to `KeptFiles`: these savers are not Python.
    """
    import safetensors.torch

    of_safetensors = [(safetensors.torch, name) for name in ("save", "save_file", "save_model")]

    def before(save: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(save)
        def saved(*args: Any, **kwargs: Any) -> Any:
            call()
            given = [one.state_dict() if isinstance(one, nn.Module) else one for one in (*args, *kwargs.values())]
            if any(type(leaf) is FakeTensor for leaf in tree_leaves(given)):
                return None
            for path in (one for one in given if isinstance(one, (str, os.PathLike))):
                sys.audit("open", os.fspath(path), "w", os.O_WRONLY)
            return save(*args, **kwargs)

        return saved

    for owner, name in [(torch, "save"), *of_safetensors]:
        setattr(owner, name, before(getattr(owner, name)))


def modules_alive() -> list[nn.Module]:
    """All modules of this process."""
    return [found for found in gc.get_objects() if issubclass(type(found), nn.Module)]


def whole_model(module: nn.Module, alive: Iterable[nn.Module]) -> nn.Module:
    """The outermost of the modules around `module`: a step may call a model's parts one by one, as Lightning's do."""
    parents = {id(part): one for one in alive for part in children_of(one).values()}
    while (parent := parents.pop(id(module), None)) is not None:
        module = parent
    return module


class TrainingLoop:
    """Watches the process for the training step of a script.

    Args:
        begins: called with the model before the first forward of its first step.
        next_step: called with the `batches` of the step that has ended, before the first call of a module after it.

    Attributes:
        by_hand: whether a backward was run without an optimizer; the next step is then the first that is looked at.
        stepped: whether `Optimizer.step()` was called and no module since.
        optimizers: those that were constructed, in order.
        batches: the shapes of the tensors that the model was given, one dict for each micro-batch of this step;
            without those of an evaluation.
    """

    def __init__(self, begins: Callable[[nn.Module], None], next_step: Callable[[Batches], None]) -> None:
        self.begins, self.next_step = begins, next_step
        self.optimizers: list[Optimizer] = []
        self.model: nn.Module | None = None
        self.batches: Batches = []
        self.stepped = False
        self.by_hand = False
        self._depth = 0
        self._thread = threading.get_ident()

    def watch(self) -> None:
        """Begin; the script has not constructed an optimizer yet."""
        made, call, backward, optimizers = Optimizer.__init__, nn.Module.__call__, Tensor.backward, self.optimizers

        self._call = call

        def constructed(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            made(optimizer, *args, **kwargs)
            optimizers.append(optimizer)

        def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._depth or threading.get_ident() != self._thread:
                return call(module, *args, **kwargs)
            self._arrive(module, args, kwargs)
            self._depth += 1
            try:
                return call(module, *args, **kwargs)
            finally:
                self._depth -= 1

        def went_back(tensor: Tensor, *args: Any, **kwargs: Any) -> None:
            self.by_hand = self.by_hand or not optimizers
            backward(tensor, *args, **kwargs)
            self.stepped = self.stepped or (not optimizers and self.model is not None)

        Optimizer.__init__, nn.Module.__call__ = constructed, called  # type: ignore[method-assign,assignment]
        Tensor.backward = went_back  # type: ignore[method-assign,assignment]
        register_optimizer_step_post_hook(self._step_ends)

    def release(self) -> None:
        """Look at calls of modules no longer."""
        nn.Module.__call__ = self._call  # type: ignore[method-assign]

    @property
    def parameters(self) -> Iterator[Tensor]:
        """The parameters of all optimizers."""
        return (one for optimizer in self.optimizers for group in optimizer.param_groups for one in group["params"])

    def _step_ends(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.stepped = self.model is not None

    def _arrive(self, module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        if self.model is None:
            if not (module.training and torch.is_grad_enabled() and self._is_trained(module)):
                return
            self.model = module
            self.begins(module)
        elif self.stepped:
            self.stepped = False
            ended, self.batches = self.batches, []
            self.next_step(ended)
        if module is self.model and module.training:
            named = {**{f"input {at}": value for at, value in enumerate(args)}, **kwargs}
            self.batches.append({name: tuple(v.shape) for name, v in named.items() if isinstance(v, Tensor)})

    def _is_trained(self, module: nn.Module) -> bool:
        if self.by_hand and not self.optimizers:
            return any(parameter.requires_grad for parameter in module.parameters())
        return not set(map(id, self.parameters)).isdisjoint(map(id, module.parameters()))
