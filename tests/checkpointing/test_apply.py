"""apply_policy: covered blocks, recomputed operators, removal, copies, accumulation, generation, compile, errors."""

from __future__ import annotations

import copy
import inspect
import pickle
import time
import warnings
from collections import Counter

import pytest
import torch
from language_models import batch, differing, make, numbers
from tiny_models import OperatorCounts
from torch import nn

from ckpt_ft import apply_policy
from ckpt_ft.checkpointing.apply import applied_policy
from ckpt_ft.errors import UserError
from ckpt_ft.memory.fake.faked_model import restored

LAYERS = 4
ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu.default"


def calls(model: nn.Module) -> Counter[str]:
    with OperatorCounts() as count:
        model(**batch()).loss.backward()
    return count.calls


def test_layers_with_biases_are_kept_by_save_matmul() -> None:
    """Their operator is addmm."""

    def products(policy: str) -> int:
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.GELU()) for _ in range(3)]
        model = nn.Sequential(*blocks)
        apply_policy(model, policy)
        with OperatorCounts() as count:
            model(torch.randn(4, 8, requires_grad=True)).sum().backward()
        return count.calls["aten.addmm.default"]

    assert [products(policy) for policy in ("none", "save:matmul", "full")] == [6, 6, 12]


@pytest.mark.parametrize(
    ("policy", "attention", "matmuls"),
    [  # A Llama block has 7 matmuls, the head 1. A second run stops after its last saved tensor, before down_proj.
        ("none", LAYERS, 7 * LAYERS + 1),
        ("full", 2 * LAYERS, 13 * LAYERS + 1),
        ("save:attention", LAYERS, 13 * LAYERS + 1),
        ("save:attention+matmul", LAYERS, 7 * LAYERS + 1),
        ("save:matmul/2", 2 * LAYERS, 10 * LAYERS + 1),
        ("save:aten.mm", 2 * LAYERS, 7 * LAYERS + 1),
        ("every:2", LAYERS * 3 // 2, 7 * LAYERS + 6 * LAYERS // 2 + 1),
        ("first:1", LAYERS + 1, 7 * LAYERS + 6 + 1),
        ("segments:1", 2 * LAYERS, 14 * LAYERS - 1 + 1),
        ("segments:2", 2 * LAYERS, 14 * LAYERS - 2 + 1),
        ("modules:attention", 2 * LAYERS, 10 * LAYERS + 1),
        ("modules:mlp", LAYERS, 9 * LAYERS + 1),
    ],
)
def test_recomputed_operators_are_counted_exactly(policy: str, attention: int, matmuls: int) -> None:
    model = make("llama")
    backward = calls(model)["aten.mm.default"] - (7 * LAYERS + 1)  # matmuls of backward itself
    apply_policy(model, policy)
    counted = calls(model)
    assert counted[ATTENTION] == attention
    assert counted["aten.mm.default"] - backward == matmuls


def test_applied_policy_prints_as_one_line() -> None:
    applied = apply_policy(make("llama"), "every:2")
    assert repr(applied) == "AppliedPolicy('every:2' on LlamaForCausalLM: 2 of 4 blocks are re-run)"


def test_covered_and_uncovered_blocks() -> None:
    model = make("llama")
    assert apply_policy(model, "every:2").covered == ["model.layers.0", "model.layers.2"]
    assert apply_policy(model, "first:3").uncovered == ["model.layers.3"]
    applied = apply_policy(model, "modules:mlp")
    assert applied.covered == [f"model.layers.{i}.mlp" for i in range(LAYERS)]
    assert applied.uncovered == []
    assert applied_policy(model) is applied


def test_remove_restores_the_model_exactly() -> None:
    model = make("llama")
    switch = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    switch({"use_reentrant": False})
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    hooks = {name: len(module._forward_pre_hooks) for name, module in model.named_modules()}
    applied = apply_policy(model, "save:attention")
    assert not model.model.layers[0].gradient_checkpointing
    applied.remove()
    applied.remove()  # a second call does nothing
    assert model.model.layers[0].gradient_checkpointing
    assert {name: dict(module.__dict__) for name, module in model.named_modules()} == before
    assert {name: len(module._forward_pre_hooks) for name, module in model.named_modules()} == hooks


def test_second_policy_replaces_the_first() -> None:
    model = make("llama")
    apply_policy(model, "full")
    apply_policy(model, "every:2")
    assert calls(model)[ATTENTION] == LAYERS * 3 // 2
    apply_policy(model, "none")
    assert calls(model)[ATTENTION] == LAYERS


def test_error_leaves_the_model_without_a_policy() -> None:
    model = make("llama")
    with pytest.raises(UserError, match="no stages"):
        apply_policy(model, "stages")
    assert applied_policy(model) is None
    assert calls(model)[ATTENTION] == LAYERS


@pytest.mark.parametrize("policy", ["full", "segments:2", "save:attention+matmul"])
def test_copies_and_pickles_are_independent(policy: str) -> None:
    model = make("llama")
    before = numbers(model)
    apply_policy(model, policy)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            twin.lm_head.weight.add_(1)  # if the copy ran the original's modules, these would be equal
        assert differing(numbers(model), before) == []
        assert "gradient model.layers.0.mlp.up_proj.weight" in differing(numbers(twin), before)
        applied_policy(twin).remove()
        assert calls(model)[ATTENTION] == (LAYERS if policy.startswith("save") else 2 * LAYERS)


def test_signature_of_forward_is_kept() -> None:
    model = make("llama")
    before = inspect.signature(model.model.layers[0].forward)
    apply_policy(model, "full")
    assert inspect.signature(model.model.layers[0].forward) == before


@pytest.mark.filterwarnings("ignore:policy .* no operator of:UserWarning")  # with dropout, attention is not fused
@pytest.mark.parametrize("policy", ["full", "segments:2", "save:attention+matmul", "modules:attention"])
def test_autocast_and_accumulation(policy: str) -> None:
    def run(model: nn.Module) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                model(**batch()).loss.backward()
        return {name: p.grad for name, p in model.named_parameters()}

    plain, model = run(make("llama", "dropout")), make("llama", "dropout")
    apply_policy(model, policy)
    assert differing(run(model), plain) == []


@pytest.mark.parametrize("policy", ["full", "segments:2", "save:attention+matmul"])
def test_retain_graph_and_gradient_of_gradient(policy: str) -> None:
    def run(model: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(0)
        loss = model(**batch()).loss
        weights = [p for name, p in model.named_parameters() if "up_proj" in name]
        first = torch.autograd.grad(loss, weights, retain_graph=True)
        second = torch.autograd.grad(loss, weights)
        return [*first, *second]

    plain, model = run(make("llama")), make("llama")
    apply_policy(model, policy)
    assert all(torch.equal(a, b) for a, b in zip(run(model), plain, strict=True))


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
def test_kv_cache_is_off_in_training_only() -> None:
    model = make("llama")
    apply_policy(model, "full")
    assert model(**batch()).past_key_values is None
    assert model(**batch(), use_cache=True).past_key_values is None
    ids = batch()["input_ids"]
    model.eval()
    kept = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    plain = make("llama").eval().generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert torch.equal(kept, plain)
    with torch.no_grad():
        assert model(ids).past_key_values.get_seq_length() == ids.shape[1]
    assert model(ids).past_key_values.get_seq_length() == ids.shape[1]  # eval mode with gradients is decoding
    cache = model(ids).past_key_values
    assert model.train()(ids, past_key_values=cache).past_key_values is cache  # a given one stays


def test_eval_mode_with_gradients_is_checkpointed() -> None:
    model = make("bert").eval()
    plain = numbers(model)
    apply_policy(model, "full")
    assert differing(numbers(model), plain) == []
    assert calls(model)[ATTENTION] == 2 * LAYERS


def test_policies_of_a_decoder_in_eval_mode() -> None:
    """With gradients and a KV cache, blocks are not re-run and `head` does nothing; `pointwise` works."""
    plain = make("llama").eval()
    expected, uncached = numbers(plain), {**batch(), "use_cache": False}
    seen = {}
    for policy in ("none", "full", "head", "pointwise"):
        model = make("llama").eval()
        apply_policy(model, policy)
        assert differing(numbers(model), expected) == []
        assert model(**batch()).logits is not None
        counted = []
        for given in (batch(), uncached):
            with OperatorCounts() as count:
                model(**given).loss.backward()
            counted.append((count.calls[ATTENTION], count.calls["aten.rsqrt.default"]))
        seen[policy] = counted
    norms = 2 * LAYERS + 1
    once = (LAYERS, norms)
    assert seen["none"] == seen["head"] == [once, once]
    assert seen["full"] == [once, (2 * LAYERS, norms + 2 * LAYERS)]
    assert seen["pointwise"] == [(LAYERS, 2 * norms)] * 2


def test_no_operator_is_added_without_gradients() -> None:
    model = make("llama").eval()
    apply_policy(model, "save:attention+matmul")
    with torch.no_grad(), OperatorCounts() as count:
        model(batch()["input_ids"])
    assert count.calls[ATTENTION] == LAYERS


def test_operator_group_that_never_runs_is_one_warning() -> None:
    model = make("llama")
    apply_policy(model, "save:conv+matmul")
    with pytest.warns(UserWarning, match="no operator of 'conv' ran"):
        model(**batch())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(**batch())


def test_warning_names_eager_attention() -> None:
    model = make("llama")
    model.set_attn_implementation("eager")
    apply_policy(model, "save:attention")
    with pytest.warns(UserWarning, match="attn_implementation 'eager'"):
        model(**batch())


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        ("stages", "LlamaForCausalLM has no stages"),
        ("auto", "chooses a policy for a budget"),
        ("save:aten.baddbm", "did you mean"),
        ("save:aten.mm.x", "has no overload 'x'"),
        ("save:aten.add_", "writes into its input"),
        ("save:aten.view", "gives a view of its input"),
        ("save:aten.select.int", "gives a view of its input"),
        ("save:aten.split", "gives a view of its input"),
        ("save:aten._unsafe_view", "gives a view of its input"),
    ],
)
def test_invalid_policy_is_refused(policy: str, says: str) -> None:
    with pytest.raises(UserError, match=None) as error:
        apply_policy(make("llama"), policy)
    assert says in str(error.value)


def test_model_without_blocks_is_refused() -> None:
    with pytest.raises(UserError, match="Linear holds no repeated blocks"):
        apply_policy(nn.Linear(2, 2), "full")
    with pytest.raises(UserError, match="no attention submodule"):
        apply_policy(make("mamba"), "modules:attention")


def test_blocks_in_attributes_are_given_by_name() -> None:
    """Gradients are the same, and each named block runs again."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.b1, self.b2 = (nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
            self.head = nn.Linear(8, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.b2(self.b1(x)))

    model, x = Two(), torch.randn(4, 8)
    model(x).sum().backward()
    plain = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with pytest.raises(UserError, match=r"Two has no module 'b3'"):
        apply_policy(model, "full", blocks=["b1", "b3"])
    with pytest.raises(UserError, match=r"'b1\.0' lies inside another"):
        apply_policy(model, "full", blocks=["b1", "b1.0"])
    assert apply_policy(model, "full", blocks=["b1", "b2"]).covered == ["b1", "b2"]
    model(x).sum().backward()
    assert all(torch.equal(p.grad, was) for p, was in zip(model.parameters(), plain, strict=True))


def test_blocks_in_a_dict_with_numbers_as_keys_are_found() -> None:
    """torchtitan's pipeline stages have such dicts. Dicts with other keys, such as PEFT's, are no block lists."""
    model = nn.Module()
    model.layers = nn.ModuleDict({key: nn.TransformerEncoderLayer(8, 2, 8) for key in ("4", "5", "7")})
    assert apply_policy(model, "full").covered == ["layers.4", "layers.5", "layers.7"]
    model.layers = nn.ModuleDict({key: nn.TransformerEncoderLayer(8, 2, 8) for key in ("a", "b")})
    with pytest.raises(UserError, match="Module holds no repeated blocks"):
        apply_policy(model, "full")


def test_segments_of_a_plain_stack_of_layers() -> None:
    stack = nn.Sequential(*(nn.Linear(8, 8) for _ in range(8)))
    x = torch.randn(4, 8, requires_grad=True)
    with OperatorCounts() as plain:
        stack(x).sum().backward()
    assert apply_policy(stack, "segments:2").covered == [str(i) for i in range(8)]
    with OperatorCounts() as count:
        stack(x).sum().backward()
    # in each segment of four, no operator saves the last layer's output, so three layers are re-run
    assert count.calls["aten.addmm.default"] - plain.calls["aten.addmm.default"] == 2 * 3


def test_warning_hook_is_removed_again_after_a_trace() -> None:
    """A trace of a launch restores all hooks of the model, including one that removed itself after its warning."""
    model = make("llama")
    apply_policy(model, "save:conv")
    hooks = list(model._forward_pre_hooks.values())
    with restored(model), pytest.warns(UserWarning, match="no operator of 'conv'"):
        model(**batch()).loss.backward()
    model(**batch()).loss.backward()
    assert list(model._forward_pre_hooks.values()) == hooks  # the remaining ones switch the KV cache off


def test_compile_budget_is_set_and_restored() -> None:
    import torch._functorch.config as config

    model = make("llama")
    before = config.activation_memory_budget
    applied = apply_policy(model, "budget:0.3")
    assert config.activation_memory_budget == 0.3
    assert "under torch.compile only" in applied.explain()
    applied.remove()
    assert config.activation_memory_budget == before


def test_policy_on_llama_70b_takes_less_than_a_second() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    start = time.perf_counter()
    assert len(apply_policy(model, "save:attention+matmul").covered) == 80
    assert time.perf_counter() - start < 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own warning when its compiler is imported
@pytest.mark.parametrize("policy", ["full", "save:attention+matmul", "segments:2"])
def test_compiled_step_under_a_policy(policy: str) -> None:
    plain, model = numbers(make("llama")), make("llama")
    apply_policy(model, policy)
    compiled = numbers(torch.compile(model))
    for name, value in plain.items():
        if name.startswith("gradient"):
            torch.testing.assert_close(compiled[name.replace("gradient ", "gradient _orig_mod.")], value)


@pytest.mark.filterwarnings("ignore")  # torch's own warnings about its compiler and the graph break
def test_block_with_a_graph_break_may_write_a_saved_output() -> None:
    """torch.compile runs the checkpoint of such a block eagerly, where PyTorch's own contexts refuse the write."""

    class Block(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = torch.mm(x, self.weight)
            torch._dynamo.graph_break()
            out /= 2
            return torch.relu(torch.mm(out, self.weight)).sin()

    def gradients(policy: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(Block(8, 8), Block(8, 8))
        apply_policy(model, policy, blocks=["0", "1"])
        for block in model:
            block.compile(backend="eager")
        model(torch.ones(2, 8)).sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    for kept, plain in zip(gradients("save:matmul"), gradients("none"), strict=True):
        assert kept is plain is None or torch.equal(kept, plain)


@pytest.mark.parametrize("policy", ["full", "pointwise", "offload", "head"])
def test_data_parallel_replica_is_refused(policy: str) -> None:
    """torch.nn.parallel.replicate copies the attributes of each module, including the original's replaced forward."""
    model = make("llama")
    applied = apply_policy(model, policy)
    with pytest.raises(UserError, match=r"nn.DataParallel's replicas .* one process for each GPU"):
        model._replicate_for_data_parallel()
    with pytest.raises(UserError, match="nn.DataParallel"):
        copy.deepcopy(model)._replicate_for_data_parallel()
    applied.remove()
    assert model._replicate_for_data_parallel()._is_replica
