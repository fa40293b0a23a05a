"""The policy `tile`: an MLP in pieces has the numbers of the whole, one piece's memory, and fp32 gradient sums."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaMLP

from ckpt_ft.checkpointing.apply import apply_policy
from ckpt_ft.checkpointing.parity import check_parity
from ckpt_ft.checkpointing.tile import Tiled
from ckpt_ft.errors import UserError, WorkFailed
from ckpt_ft.memory.fake.step import trace_step
from ckpt_ft.policy import Policy
from ckpt_ft.units import MIB

_SIZES = {
    "vocab_size": 99, "hidden_size": 16, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


def _llama(**more: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**_SIZES, use_cache=False, **more)).train()


def _lora() -> nn.Module:
    return get_peft_model(_llama(), LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.2))


def _gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    ids = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=99, n_embd=16, n_layer=2, n_head=2, n_positions=64, **ids)).train()


def _batch() -> dict[str, Tensor]:
    ids = torch.arange(2 * 21).view(2, 21) % 99
    return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize(
    "policy", ["tile:4", "tile", "full,tile:4,head", "save:attention,tile:3", "pointwise,tile:4", "segments:2,tile:4"]
)
def test_tile_keeps_the_numbers(policy: str) -> None:
    assert check_parity(_llama(), _batch(), policy).ok


def test_tile_splits_experts_by_token() -> None:
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(**_SIZES, num_local_experts=4, use_cache=False)).train()
    assert check_parity(model, _batch(), "full,tile:4").ok
    applied = apply_policy(model, "tile:4")
    assert sum(isinstance(stand_in, Tiled) for engine in applied.engines for stand_in in engine.stand_ins) == 2
    applied.remove()
    model.config.output_router_logits = True
    with pytest.raises(UserError, match="collects its router's logits .* set output_router_logits to false"):
        apply_policy(model, "tile:4")


@pytest.mark.parametrize("make", [_lora, _gpt2])
def test_second_run_of_each_piece_has_the_same_dropout(make: Any) -> None:
    """Pieces draw other numbers than the whole MLP, so verification compares their two runs."""
    model = make()
    apply_policy(model, "full,tile:4", verify="always")
    for _ in range(2):
        model(**_batch()).loss.backward()


class Stateful(LlamaMLP):
    """Reads a scale that is set around forward, and keeps the state that a test asks for."""

    scale, keeps = 1.0, ""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x) * self.scale
        if self.keeps == "an attribute":
            self.last = out.detach()
        if self.keeps == "a buffer":
            self.seen.add_(1)
        return out


def _stateful(keeps: str = "") -> LlamaForCausalLM:
    model = _llama()
    for layer in model.model.layers:
        layer.mlp.__class__, layer.mlp.keeps = Stateful, keeps
        layer.mlp.register_buffer("seen", torch.zeros(()))
    return model


@pytest.mark.parametrize("policy", ["tile:4", "full,tile:4"])
def test_second_run_has_the_values_set_around_forward(policy: str) -> None:
    """Also in steps that are not verified."""

    def train(policy: str) -> list[Tensor]:
        model = _stateful()
        apply_policy(model, policy, verify="never")
        mlps = [layer.mlp for layer in model.model.layers]
        for mlp in mlps:
            mlp.scale = 0.5
        loss = model(**_batch()).loss
        for mlp in mlps:
            mlp.scale = 2.0
        loss.backward()
        return [p.grad for p in model.parameters()]

    for found, expected in zip(train(policy), train("none"), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)

    model = _stateful()
    apply_policy(model, policy, verify="never")
    loss = model(**_batch()).loss
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(2)
    with pytest.raises(UserError, match="'.*up_proj.weight' was written in place"):
        loss.backward()


def test_checkpointed_block_computes_each_piece_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """In forward and for the piece's own backward. The block's second run needs no output of its MLP."""
    rows: list[int] = []
    forward = LlamaMLP.forward

    def counted(self: LlamaMLP, hidden: Tensor) -> Tensor:
        rows.append(hidden.shape[1])
        return forward(self, hidden)

    monkeypatch.setattr(LlamaMLP, "forward", counted)
    model = _llama()
    apply_policy(model, "full,tile:4", verify="never")
    model(**_batch()).loss.backward()
    assert sorted(n for n in rows if n > 2) == [9] * 2 * 2 + [11] * 3 * 2 * 2  # without the check's 1 and 2 tokens


@pytest.mark.parametrize("keeps", ["an attribute", "a buffer"])
def test_mlp_with_state_is_refused(keeps: str) -> None:
    model = _stateful(keeps)
    apply_policy(model, "tile:4")
    with pytest.raises(UserError, match="a Stateful writes (an attribute|'seen' of Stateful) in its forward, and"):
        model(**_batch())


def test_mlp_with_an_inner_hook_runs_whole() -> None:
    model, seen = _llama(), []
    apply_policy(model, "tile:4")
    model.model.layers[0].mlp.act_fn.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    with pytest.warns(UserWarning, match="a layer of a LlamaMLP has a hook .*which would see pieces; it runs whole"):
        model(**_batch())
    assert seen == [(2, 21, 48)]


def test_half_precision_gradients_of_pieces_are_summed_in_fp32() -> None:
    torch.manual_seed(0)
    rows = torch.randn(1, 512, 16)

    def gradient(dtype: torch.dtype, pieces: int) -> Tensor:
        torch.manual_seed(1)
        mlp = LlamaMLP(LlamaConfig(**_SIZES)).to(dtype)
        if pieces > 1:
            Tiled(mlp, pieces)
        mlp(rows.to(dtype)).float().square().sum().backward()
        return mlp.down_proj.weight.grad.double()

    true, whole, tiled = gradient(torch.float64, 1), gradient(torch.bfloat16, 1), gradient(torch.bfloat16, 64)
    assert (tiled - true).norm() < 1.2 * (whole - true).norm()


def test_autocast_casts_the_weights_of_all_pieces_once() -> None:
    model = _llama()
    with torch.autocast("cpu", torch.bfloat16):
        plain = model(**_batch()).loss
    plain.backward()
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    apply_policy(model, "full,tile:4")
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**_batch()).loss
    loss.backward()
    assert loss.item() == pytest.approx(plain.item(), rel=1e-3)
    for name, p in model.named_parameters():
        assert (p.grad - before[name]).norm() <= 2**-6 * before[name].norm(), name


class _Operator(nn.Module):
    """An MLP on its own tensor, as in Liger-Kernel's benchmark of tiled MLPs."""

    def __init__(self, batch: int, tokens: int, hidden: int, intermediate: int) -> None:
        super().__init__()
        sizes = {"hidden_size": hidden, "intermediate_size": intermediate}
        self.mlp = LlamaMLP(LlamaConfig(**{**_SIZES, **sizes}))
        self.x = nn.Parameter(torch.empty(batch, tokens, hidden))


@pytest.mark.parametrize(
    ("pieces", "tokens", "published"),
    [(1, 1024, 144.25), (1, 16384, 1344.25), (4, 1024, 90.25), (4, 4096, 168.25), (4, 16384, 480.25)],
)
def test_forward_has_the_published_bytes(pieces: int, tokens: int, published: float) -> None:
    """Liger-Kernel 0.6.3, benchmark/data, tiled_swiglu on an RTX 4090: plain PyTorch and DeepSpeed's TiledMLP.

    Every published figure includes the same additional 8 MiB.
    """
    with torch.device("meta"):
        operator = _Operator(2, tokens, 2048, 4096).to(torch.bfloat16)
    if pieces > 1:
        Tiled(operator.mlp, pieces)

    def step(model: nn.Module, _: object) -> None:
        model.out = model.mlp(model.x)
        model.out = None

    trace = trace_step(operator, step, device="rtx-4090")
    assert trace.peak_allocated / MIB == pytest.approx(published - 8.125, abs=0.25)


def test_model_without_an_mlp_module_is_refused() -> None:
    small = {key: _SIZES[key] for key in ("vocab_size", "hidden_size", "intermediate_size")}
    model = BertForMaskedLM(BertConfig(**small, num_hidden_layers=2, num_attention_heads=2))
    with pytest.raises(UserError, match=r"blocks of BertForMaskedLM \(BertLayer\) have no MLP that is one module"):
        apply_policy(model, "tile")


class _Shifting(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.roll(-1, dims=1))


def test_mlp_that_mixes_tokens_is_refused_in_the_first_step() -> None:
    model = _llama()
    model.model.layers[1].mlp.__class__ = _Shifting
    apply_policy(model, "tile:4")
    with pytest.raises(WorkFailed, match="a _Shifting at a token depends on other tokens"):
        model(**_batch())


def test_one_piece_and_evaluation_run_whole() -> None:
    model = _llama()
    expected = model(**_batch()).logits
    applied = apply_policy(model, "tile:1")
    assert torch.equal(model(**_batch()).logits, expected)
    with torch.no_grad():
        assert torch.equal(model(**_batch()).logits, expected)
    assert "LlamaMLP" in applied.explain()
    applied.remove()
    assert "forward" not in vars(model.model.layers[0].mlp)


def test_policy_tile_round_trips_as_text() -> None:
    for text in ("tile", "tile:8", "full,head,tile", "offload,tile:2"):
        policy = Policy.parse(text)
        assert str(policy) == text
        assert Policy.parse(json.loads(json.dumps(policy.to_dict()))) == policy
    for text, says in (
        ("tile:0", "'tile' needs a whole number of at least 1 after it"),
        ("tile@language", "'tile' applies to the whole model"),
        ("tile:2,tile:4", "tiles 2 and 4 contradict each other"),
        ("save:matmul,tile", "'tile' recomputes the matmuls of each MLP, and save:matmul keeps them"),
    ):
        with pytest.raises(UserError, match=says):
            Policy.parse(text)


def _rank(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    gradients = []
    for policy in ("full", "full,tile:4"):
        model = _llama()
        apply_policy(model, policy, verify="always")
        for block in model.model.layers:
            fully_shard(block)
        fully_shard(model)
        model(**_batch()).loss.backward()
        gradients.append({name: p.grad.full_tensor() for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert (gradients[1][name] - gradient).norm() <= 1e-6 * gradient.norm(), name
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
def test_tile_with_sharded_weights_on_two_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", os.path.dirname(__file__) + os.pathsep + os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    mp.spawn(_rank, args=(str(tmp_path / "store"),), nprocs=2)
