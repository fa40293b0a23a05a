"""Cost of verification: CPU time of forward and backward with and without it.

    python benchmarks/verify_cost.py [--repeats 4]
    python benchmarks/verify_cost.py --cards a100-80gb h100 rtx-4090    # predicted for GPUs, under `full`

On a GPU the hashes read saved tensors twice, once in each run of a block, at the bandwidth of elementwise kernels.

A Llama of 4 layers, 512 wide, on 4 x 256 tokens, in one thread. Verified and other steps take turns, and the fastest
of each is printed, so that a busy machine affects both equally.
"""

from __future__ import annotations

import argparse
import time

import torch
import transformers

from ckpt_ft import apply_policy
from ckpt_ft.memory.gpus import find_gpu
from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.units import format_bytes
from ckpt_ft.workloads.load import load

MODELS = (("Qwen/Qwen2.5-0.5B", 4, 1024), ("meta-llama/Llama-3.2-1B", 4, 1024), ("meta-llama/Llama-3.1-8B", 1, 4096))
POLICIES = ("full", "save:attention+matmul", "segments:2", "pointwise", "full,offload")


def llama() -> torch.nn.Module:
    """The model."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=512, intermediate_size=1408, num_hidden_layers=4, num_attention_heads=8, vocab_size=1000
    )
    return transformers.AutoModelForCausalLM.from_config(config).train()


def measure(policy: str, repeats: int, device: str = "cpu") -> dict[str, float]:
    """Returns the seconds of a step by `verify=`, "never" and "always": of CPU time, or on a GPU with its kernels."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    ids = torch.randint(0, 1000, (4, 256), device=device)
    models = {verify: llama().to(device) for verify in ("never", "always")}
    seconds: dict[str, list[float]] = {verify: [] for verify in models}
    for verify, model in models.items():
        apply_policy(model, policy, verify=verify)
    for repeat in range(repeats + 1):
        for verify, model in models.items():
            model.zero_grad()
            start = clock()  # on a GPU the step before has ended
            model(input_ids=ids, labels=ids).loss.backward()
            if device != "cpu":
                torch.cuda.synchronize()
            if repeat:  # the first is warm-up
                seconds[verify].append(clock() - start)
    return {verify: min(found) for verify, found in seconds.items()}


def predict(name: str, batch: int, length: int, card: str) -> tuple[int, float, float]:
    """Returns the bytes that a plain step saves, the seconds of the step under `full`, and those of the hashes."""
    gpu = find_gpu(card)
    spec = TrainingSpec.of(name, dtype="bfloat16", seq_length=length, attn_implementation="flash_attention_2")
    workload = load(spec, gpu)
    saved = sum(workload.trace(batch).module_activations().values())
    apply_policy(workload.model, "full")
    return saved, workload.trace(batch).seconds, 2 * saved / (gpu.bandwidth * gpu.bandwidth_efficiency)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--cards", nargs="*", default=[])
    args = parser.parse_args()
    for name, batch, length in MODELS if args.cards else ():
        for card in args.cards:
            saved, step, more = predict(name, batch, length, card)
            print(f"| {name}, {batch} x {length} | {card} | {format_bytes(saved)} | {step:.3f} | {more / step:+.1%} |")
    if args.cards:
        return
    torch.set_num_threads(1)
    print("| policy | step, s | verified, s | more |\n|---|---|---|---|")
    for policy in POLICIES:
        never, always = measure(policy, args.repeats).values()
        print(f"| {policy} | {never:.2f} | {always:.2f} | {always / never - 1:+.0%} |", flush=True)


if __name__ == "__main__":
    main()
