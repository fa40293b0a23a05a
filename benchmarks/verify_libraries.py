"""Runs tiny models of transformers under every policy with each step verified: none that is equal may raise.

    python benchmarks/verify_libraries.py [--models llama bert ...] [--policies full pointwise ...] [--steps 2]

Each model is made from its default configuration with few and narrow layers, in train mode with dropout. A model that
cannot be made so small, or that does not train from token ids alone, is skipped and named.
"""

from __future__ import annotations

import argparse
import warnings

import torch
import transformers

from ckpt_ft import apply_policy
from ckpt_ft.checkpointing.verify import VerificationError
from ckpt_ft.errors import UserError

POLICIES = ("full", "every:2", "segments:2", "save:attention+matmul", "modules:mlp", "pointwise", "head", "offload")
SMALL = {
    "hidden_size": 32, "d_model": 32, "n_embd": 32, "dim": 32, "intermediate_size": 64, "ffn_dim": 64, "d_ff": 64,
    "n_inner": 64, "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "num_attention_heads": 4,
    "n_head": 4, "n_heads": 4, "num_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "d_kv": 8, "vocab_size": 99,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "num_local_experts": 4,
    "num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
}  # fmt: skip


def names() -> list[str]:
    """The causal language models that the installed transformers knows."""
    return sorted(transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny(name: str) -> torch.nn.Module:
    """A small model of that type."""
    config = transformers.AutoConfig.for_model(name)
    for key, value in SMALL.items():
        if isinstance(getattr(config, key, None), int):
            setattr(config, key, value)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    if sum(p.numel() for p in model.parameters()) > 5_000_000:
        raise ValueError("not small")
    return model.train()


def main() -> None:
    """Run, print one line for each model, and fail if a step raised under a policy and trains without one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=None)
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    parser.add_argument("--steps", type=int, default=2)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    ids = torch.randint(3, 99, (2, 16))
    proved = skipped = 0
    raised = []
    for name in args.models or names():
        try:
            model = tiny(name)
            model(input_ids=ids, labels=ids).loss.backward()
        except Exception as error:  # of any library's kind: this model does not train so
            skipped += 1
            print(f"{name}: skipped ({type(error).__name__})")
            continue
        found = []
        for policy in args.policies:
            try:
                applied = apply_policy(model, policy, verify="always")
            except UserError:
                continue  # matches nothing here
            try:
                for _ in range(args.steps):
                    model(input_ids=ids, labels=ids).loss.backward()
                found.append(policy)
                proved += 1
            except (VerificationError, UserError, RuntimeError) as error:
                raised.append(f"{name} {policy}: {type(error).__name__}: {error}")
            applied.remove()
        print(f"{name}: {', '.join(found)}", flush=True)
    print(f"{proved} pairs of model and policy proved, {skipped} models skipped, {len(raised)} raised")
    if raised:
        raise SystemExit("\n".join(raised))


if __name__ == "__main__":
    main()
