"""`tile`: runs the MLP of each block on pieces of the tokens, and recomputes each piece in backward.

The intermediate tensors of an MLP are several times as wide as its input and are the peak of a checkpointed step on a
long sequence. In pieces, those of one piece exist at a time (ALST's TiledMLP, Bekman et al. 2025, arXiv:2506.13996;
deepspeed.runtime.sequence_parallel.ulysses_sp). Each piece is a checkpoint of its own. Half-precision gradients of the
weights add up over the pieces in fp32.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ckpt_ft.compat.modules import parameters_of
from ckpt_ft.compat.tensors import no_modes
from ckpt_ft.errors import UserError, WorkFailed

from . import rng
from .autocast import AutocastState
from .blocks import linear_widths, submodules
from .chunks import InChunks, Weights, hooked
from .dropped_tensors import same
from .fingerprint import can_hash
from .module_contents import modules_in
from .standin import Installed, Treated, warn_once

# Modules whose output at a token depends on other tokens.
_MIXING = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm,
    nn.RNNBase,
)  # fmt: skip
_TOLERANCE = 1e-2  # relative; of half precision


class Tiled(InChunks):
    """Replaces the forward of an MLP.

    Args:
        pieces: the number of pieces of a micro-batch; 0 for pieces with as many tokens as the input is wide.
    """

    def __init__(self, module: nn.Module, pieces: int) -> None:
        super().__init__(module)
        self.pieces = pieces
        self.checked = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.idle("tile"):
            return self.forward(*args, **kwargs)
        hidden, *others = (*args, *kwargs.values()) or (None,)
        kind = type(self.module).__name__
        if others or not isinstance(hidden, torch.Tensor) or hidden.ndim < 2:
            warn_once(f"policy 'tile': a {kind} is given more than hidden states; it runs whole")
            return self.forward(*args, **kwargs)
        tokens, width = hidden.shape[:-1].numel(), hidden.shape[-1]
        pieces = self.pieces or -(-tokens // width)
        if min(pieces, tokens) < 2:
            return self.forward(*args, **kwargs)
        if reason := hooked(inner for inner in modules_in(self.module) if inner is not self.module):
            warn_once(
                f"policy 'tile': a layer of a {kind} has a hook ({reason}), which would see pieces; it runs whole"
            )
            return self.forward(*args, **kwargs)
        if not self.checked and can_hash():
            self._check(hidden)
        return self._in_pieces(hidden, -(-tokens // pieces))

    def _in_pieces(self, hidden: torch.Tensor, size: int) -> torch.Tensor:
        """The output of the MLP for `hidden` (..., width), computed for `size` tokens of the batch at a time."""
        pieces = hidden.reshape(1, -1, hidden.shape[-1]).split(size, dim=1)  # contiguous
        gathered = _GatheredOnce(self.module, len(pieces))
        weights = None if gathered.parameters else Weights(self.module, AutocastState.now(hidden.device.type))

        def run(piece: torch.Tensor) -> torch.Tensor:
            gathered.begin_piece()
            return self.unhooked.run(piece, {} if weights is None else weights.of_chunk())

        outputs = self.run_chunks("tile", run, ((piece,) for piece in pieces))
        if weights is not None:
            weights.drop_copies()
        return torch.cat(outputs, dim=1).view(hidden.shape)

    def _check(self, hidden: torch.Tensor) -> None:
        """Raise if the output at a token depends on the token after it, or is no tensor like the input."""
        self.checked = True
        kind, drawn = type(self.module).__name__, rng.snapshot(hidden.device, host=True)
        # a checkpoint around it counts what is saved, and keeps routing decisions by their order
        unseen = torch.autograd.graph.saved_tensors_hooks(same, same)
        with torch.no_grad(), no_modes(), unseen:
            rows = hidden.detach().reshape(1, -1, hidden.shape[-1])
            one, two = self.run_chunks("tile", self.forward, [(rows[:, :count].clone(),) for count in (1, 2)])
            random = rng.snapshot(hidden.device, host=True) != drawn
        drawn.restore()
        if not isinstance(one, torch.Tensor) or one.shape != rows[:, :1].shape:
            raise WorkFailed(f"policy 'tile': the output of a {kind} is no tensor like its input; leave 'tile' out")
        if not (random or bool(torch.allclose(two[:, :1], one, _TOLERANCE, _TOLERANCE * float(one.abs().max())))):
            raise WorkFailed(
                f"policy 'tile': the output of a {kind} at a token depends on other tokens; leave 'tile' out"
            )


class _GatheredOnce:
    """Keeps the weights that ZeRO-3 has gathered until the last piece of a pass, forward or backward, has run.

    DeepSpeed gathers the weights of a layer before it runs, and releases them after it unless `ds_active_sub_modules`
    has another user.
    """

    def __init__(self, module: nn.Module, pieces: int) -> None:
        self.parameters: list[Any] = [p for p in module.parameters() if hasattr(p, "ds_id")]
        self.pieces, self.begun = pieces, 0

    def begin_piece(self) -> None:
        self.begun += 1
        for p in self.parameters:
            users = p.ds_active_sub_modules
            (users.add if self.begun % self.pieces else users.discard)(id(self))


def install(model: nn.Module, blocks: Mapping[str, nn.Module], pieces: int) -> Installed:
    """Run the MLPs of `blocks` in pieces.

    Raises:
        UserError: no block has an MLP that treats each token alone, or a loss needs the router of a whole one.
    """
    found = {id(mlp): mlp for mlp in _mlps(blocks)}
    if getattr(getattr(model, "config", None), "output_router_logits", False):
        raise UserError(
            f"policy 'tile': {type(model).__name__} collects its router's logits (output_router_logits) from whole "
            "MLPs; leave 'tile' out, or set output_router_logits to false"
        )
    if not found:
        kinds = ", ".join(dict.fromkeys(type(block).__name__ for block in blocks.values()))
        raise UserError(
            f"policy 'tile': the blocks of {type(model).__name__} ({kinds}) have no MLP that is one module and treats "
            "each token alone; leave 'tile' out"
        )
    counts = Counter(type(mlp).__name__ for mlp in found.values())
    kept = f"its input, in {pieces} pieces" if pieces else "its input, in pieces as long as it is wide"
    rows = [Treated(kind, count, "everything inside", kept) for kind, count in counts.items()]
    return Installed("tile", [Tiled(mlp, pieces) for mlp in found.values()], rows)


def _mlps(blocks: Mapping[str, nn.Module]) -> Iterable[nn.Module]:
    for name, block in blocks.items():
        for mlp in submodules(name, block, "mlp").values():
            inside = list(modules_in(mlp))
            if not any(isinstance(module, _MIXING) for module in inside) and _returns_its_width(inside):
                yield mlp


def _returns_its_width(inside: list[nn.Module]) -> bool:
    """Whether a linear layer puts out what the first one takes in: BERT's two halves of an MLP do not.

    Stacked weights of experts are those of whole MLPs.
    """
    if any(p is not None and p.ndim == 3 for module in inside for p in parameters_of(module).values()):
        return True
    shapes = [shape for module in inside if (shape := linear_widths(module)) is not None]
    return bool(shapes) and any(out == shapes[0][0] for _, out in shapes[1:])
