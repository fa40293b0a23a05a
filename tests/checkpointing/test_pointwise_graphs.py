"""`pointwise` on random graphs: cheap and expensive modules, shared inputs, views, in-place writes, many consumers."""

from __future__ import annotations

import copy
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from ckpt_ft.checkpointing.pointwise import install as pointwise

WIDTH = 6
MODULES = {
    "layer_norm": lambda: nn.LayerNorm(WIDTH),
    "rms_norm": lambda: nn.RMSNorm(WIDTH),
    "batch_norm": lambda: nn.BatchNorm1d(WIDTH),
    "silu": nn.SiLU,
    "gelu": nn.GELU,
    "relu": nn.ReLU,
    "relu_inplace": lambda: nn.ReLU(inplace=True),
    "tanh": nn.Tanh,
    "dropout": lambda: nn.Dropout(0.3),
    "dropout_off": lambda: nn.Dropout(0.0),
    "identity": nn.Identity,
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "frozen": lambda: nn.Linear(WIDTH, WIDTH).requires_grad_(False),
}
UNTREATED = ("linear", "frozen", "identity", "dropout_off")
FUNCTIONS: dict[str, Any] = {
    "add": lambda a, b: a + b,
    "multiply": lambda a, b: a * b,
    "flip": lambda a, b: a.flip(0),
    "view": lambda a, b: a.view(2, -1, WIDTH)[1].repeat(2, 1),
    "transpose": lambda a, b: a.t().contiguous().t(),
    "detach": lambda a, b: a.detach(),
    "add_": lambda a, b: (a * 1).add_(b),
    "matmul": lambda a, b: a @ (b.t() @ a) * 0.1,
}
# In-place writes to a node's value. If plain autograd refuses the graph, nothing is compared.
EDITS: dict[str, Any] = {
    "mul_": lambda a: a.mul_(0.5),
    "sigmoid_": lambda a: a.sigmoid_(),
    "slice_": lambda a: a[:2].add_(1),
}

node = st.one_of(
    st.tuples(st.sampled_from(sorted(MODULES)), st.integers(0, 99), st.integers(0, 3)),
    st.tuples(st.sampled_from(sorted(FUNCTIONS)), st.integers(0, 99), st.integers(0, 99)),
    st.tuples(st.sampled_from(sorted(EDITS)), st.integers(0, 99), st.just(0)),
)


class Graph(nn.Module):
    """Each node reads one or two earlier values, counted from the newest; several nodes may use one module."""

    def __init__(self, nodes: list[tuple[str, int, int]]) -> None:
        super().__init__()
        self.nodes = nodes
        self.layers = nn.ModuleDict()
        for kind, _, second in nodes:
            if kind in MODULES and f"{kind}{second}" not in self.layers:
                self.layers[f"{kind}{second}"] = MODULES[kind]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = [x * 1.0]
        for kind, first, second in self.nodes:
            a = values[-1 - first % len(values)]
            if kind in MODULES:
                values.append(self.layers[f"{kind}{second}"](a))
            elif kind in FUNCTIONS:
                values.append(FUNCTIONS[kind](a, values[-1 - second % len(values)]))
            else:
                EDITS[kind](a)
        return torch.stack(values).sum(0)


def run(model: nn.Module, x: torch.Tensor) -> tuple[list[torch.Tensor | None], list[torch.Tensor]]:
    torch.manual_seed(1)
    leaf = x.clone().requires_grad_()
    output = model(leaf)
    output.square().mean().backward()
    return [leaf.grad, *(p.grad for p in model.parameters())], [
        output.detach(),
        *model.buffers(),
        torch.get_rng_state(),
    ]


@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.lists(node, min_size=2, max_size=14))
def test_pointwise_on_random_graphs_keeps_the_gradients(nodes: list[tuple[str, int, int]]) -> None:
    torch.manual_seed(0)
    plain = Graph(nodes)
    treated = copy.deepcopy(plain)
    if not any(kind in MODULES and kind not in UNTREATED for kind, _, _ in nodes):
        return
    pointwise.install(treated, {"": treated})
    x = torch.randn(4, WIDTH)
    try:
        gradients, rest = run(plain, x)
    except RuntimeError:  # an in-place write that autograd or a view forbids
        return
    ours, ours_rest = run(treated, x)
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(gradients, ours, strict=True))
    assert all(a.equal(b) for a, b in zip(rest, ours_rest, strict=True))
