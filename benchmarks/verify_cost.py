"""What a verified step costs: CPU time of forward and backward, verified and not, and the memory at the peak.

    python benchmarks/verify_cost.py [--repeats 4]

A Llama of 4 layers, 512 wide, on 8 x 256 tokens, in one thread. Verified and other steps take turns, and the fastest
of each is printed, so that a busy machine disturbs both alike.
"""

from __future__ import annotations

import argparse
import time

import torch
import transformers

from ckpt_ft import apply_policy

POLICIES = ("full", "save:attention+matmul", "segments:2", "pointwise", "full,offload")


def llama() -> torch.nn.Module:
    """The model."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=512, intermediate_size=1408, num_hidden_layers=4, num_attention_heads=8, vocab_size=1000
    )
    return transformers.AutoModelForCausalLM.from_config(config).train()


def measure(policy: str, repeats: int) -> tuple[dict[str, float], dict[str, int]]:
    """Seconds, and bytes allocated in total at the peak beyond those at the start, of "never" and "always"."""
    ids = torch.randint(0, 1000, (8, 256))
    models = {verify: llama() for verify in ("never", "always")}
    seconds: dict[str, list[float]] = {verify: [] for verify in models}
    peaks: dict[str, int] = {}
    for verify, model in models.items():
        apply_policy(model, policy, verify=verify)
    for repeat in range(repeats + 2):
        for verify, model in models.items():
            model.zero_grad()
            start = time.process_time()
            if repeat == 1:
                with torch.profiler.profile(profile_memory=True) as profile:
                    model(input_ids=ids, labels=ids).loss.backward()
                peaks[verify] = peak(profile)
            else:
                model(input_ids=ids, labels=ids).loss.backward()
            if repeat > 1:
                seconds[verify].append(time.process_time() - start)
    return {verify: min(found) for verify, found in seconds.items()}, peaks


def peak(profile: torch.profiler.profile) -> int:
    """The highest sum of the profile's allocations and frees."""
    now = highest = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda found: found.start_ns()):
        if event.name() == "[memory]":
            now += event.nbytes()
            highest = max(highest, now)
    return highest


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=4)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("| policy | step, s | verified, s | more | peak, MiB | verified, MiB |\n|---|---|---|---|---|---|")
    for policy in POLICIES:
        seconds, peaks = measure(policy, args.repeats)
        never, always = seconds["never"], seconds["always"]
        print(
            f"| {policy} | {never:.2f} | {always:.2f} | {always / never - 1:+.0%} | {peaks['never'] / 2**20:.2f} | "
            f"{peaks['always'] / 2**20:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
