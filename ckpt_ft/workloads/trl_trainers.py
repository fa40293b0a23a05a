"""The step of TRL's trainers: their own losses, collators and reference models, on a model without weights.

TRL's trainer is built around the model on the meta device. So TRL's own code decides what a step computes: whether it
has a fused LM head, padding-free batches, a reference model or disabled adapters. While the trainer is built, its code
that needs weights, data or a device is patched. Rows have the requested length, and every token but the first counts
in the loss.
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, redirect_stdout
from dataclasses import replace
from functools import lru_cache, partial
from math import gcd
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from ckpt_ft.errors import UserError
from ckpt_ft.memory.fake.patches import quiet
from ckpt_ft.spec.defaults import ONLINE
from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.validation import library_reads, require_package
from ckpt_ft.workloads.adapters import without_adapters

from .from_trainer import loss_of
from .phases import Phase, evaluation_of, generation, separate_accelerate_state
from .workload import Batch, Forward, Workload

TRL_TRAINERS = {"sft": "SFT", "dpo": "DPO", "kto": "KTO", "reward": "Reward", "grpo": "GRPO", "rloo": "RLOO"}
_TOKEN = "a"


def trainer_step(workload: Workload, spec: TrainingSpec) -> Workload:
    """Returns `workload` with the step of the TRL trainer that `spec` names.

    Raises:
        UserError: TRL is not installed, or refuses the settings.
    """
    trained = ("text-classification",) if spec.trainer.trainer == "reward" else ("causal-lm", "image-text-to-text")
    if workload.kind not in trained:
        raise UserError(
            f"trainer {spec.trainer.trainer} trains {' and '.join(trained)}; of {spec.model.name}, {workload.kind} is"
            " estimated"
        )
    if spec.data.eval_samples:
        raise UserError("eval samples: of an evaluation by TRL's trainers only the loss is predicted; leave it out")
    require_package("trl", f"--trainer {spec.trainer.trainer}")
    states: dict[Any, dict[str, Any]] = {}
    asked = f"--trainer {spec.trainer.trainer}: TRL refuses these settings"
    with (
        # it refuses an adapter of the head
        library_reads(asked, lora_targets=tuple(name for name in spec.adapter.lora_targets if name != "lm_head")),
        separate_accelerate_state(states), quiet(), warnings.catch_warnings(),
    ):  # fmt: skip
        warnings.simplefilter("ignore")
        with redirect_stdout(sys.stderr):  # DeepSpeed, which TRL and accelerate import, writes to stdout
            trainer = _build(workload.model, spec)
    trainer.use_vllm = vllm_share(spec) is not None
    trainer.current_gradient_accumulation_steps = spec.data.accumulation  # set where training begins
    if workload.autocast is not None and not (workload.launch is not None and workload.launch.stage):
        device = "cpu" if workload.device == "cpu" else "cuda"  # the reference runs under it, too
        trainer.accelerator.autocast = partial(torch.autocast, device, workload.autocast)
    own_loss = partial(_loss_of_logits, trainer) if spec.trainer.float32_logits else loss_of(trainer)

    def compute_loss(model: Forward, batch: Batch) -> torch.Tensor:
        with separate_accelerate_state(states):
            return own_loss(model, dict(batch))

    reference = getattr(trainer, "ref_model", None)
    library = "LLaMA-Factory" if spec.trainer.float32_logits else "TRL"
    online = spec.trainer.trainer in ONLINE
    phases = {"generation": _generation(trainer, spec, states)} if online else {}
    if spec.data.eval_batch_size and not online:
        phases["evaluation"] = evaluation_of(spec.data)
    return replace(
        workload,
        model=trainer.model,
        make_batch=_batches(trainer, spec),
        compute_loss=compute_loss,
        phases=phases,
        auxiliary_models=(*workload.auxiliary_models, *([] if reference is None else [reference])),
        notes=(
            *workload.notes,
            f"the step is that of {library}'s {type(trainer).__name__}; every token counts in its loss",
        ),
    )


def _loss_of_logits(trainer: Any, model: Forward, batch: Batch) -> torch.Tensor:
    """The loss of LLaMA-Factory's trainers of preferences: they keep whole logits, in float32, for their metrics.

    Source: LLaMA-Factory, get_batch_loss_metrics of train/dpo/trainer.py and train/kto/trainer.py.
    """

    def scored(model: Forward, kind: str = "") -> tuple[torch.Tensor, torch.Tensor]:
        ids = batch[f"{kind}input_ids"]
        logits = model(input_ids=ids, attention_mask=batch[f"{kind}attention_mask"], use_cache=False).logits.float()
        each = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
        return logits, (each * batch[f"{kind}completion_mask"][:, 1:]).sum(-1)

    def all_scored(model: Forward) -> tuple[torch.Tensor, torch.Tensor]:
        logits, scores = scored(model)
        if "KL_input_ids" in batch:
            with torch.no_grad():
                scored(model, "KL_")
        return (logits.clone() if "label" in batch else logits), scores  # KTO sorts them by their label

    logits, scores = all_scored(model)
    if not trainer.precompute_ref_logps:
        adapted = trainer.ref_model is None
        with torch.no_grad(), trainer.model.disable_adapter() if adapted else nullcontext():
            of_reference = all_scored(model if adapted else trainer.ref_model)[1]
        scores = scores - of_reference
    signs = batch["label"] * 2 - 1 if "label" in batch else torch.tensor([1, -1]).repeat_interleave(len(scores) // 2)
    logits.mean()
    return -torch.nn.functional.logsigmoid(trainer.beta * scores * signs).mean()


def _build(model: Any, spec: TrainingSpec) -> Any:
    """TRL's trainer around `model`, whose adapters are already in it."""
    import trl
    from datasets import Dataset

    name = TRL_TRAINERS[spec.trainer.trainer]
    kind = getattr(trl, f"{name}Trainer")
    module: Any = sys.modules[kind.__module__]
    base = without_adapters(model)
    given: dict[str, Any] = {"model": base, "processing_class": _tokenizer()}
    if base is not model:
        from peft import LoraConfig

        given["peft_config"] = LoraConfig()  # its place is taken by the adapters in `model`
    if spec.trainer.trainer in ONLINE:
        given["reward_funcs"] = _no_reward
    replaced: dict[str, Callable[..., Any]] = {
        "get_peft_model": lambda *args, **kwargs: model,
        "create_model_from_path": lambda *args, **kwargs: copy.deepcopy(base),
        "hash_module": lambda module: "",
    }
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        for attribute, stand_in in replaced.items():
            if hasattr(module, attribute):
                stack.enter_context(patch.object(module, attribute, stand_in))
        for method in ("_prepare_dataset", "_precompute_ref_logps"):
            if hasattr(kind, method):
                stack.enter_context(patch.object(kind, method, lambda self, dataset, *args, **kwargs: dataset))
        stack.enter_context(patch.object(nn.Module, "to", lambda module, *args, **kwargs: module))
        if spec.quantisation.bits:  # TRL casts the adapters of such models to bfloat16
            stack.enter_context(patch.object(base, "is_loaded_in_4bit", True, create=True))
        args = getattr(trl, f"{name}Config")(output_dir=folder, **_arguments(spec))
        return kind(args=args, train_dataset=Dataset.from_list(_rows(spec, 2, spec.data.tokens)), **given)


def _arguments(spec: TrainingSpec) -> dict[str, Any]:
    """The fields of the trainer's configuration; the workload itself applies precision and checkpointing."""
    own = {name: value for name, value in trainer_args(spec).items() if name != "use_vllm"}  # it would start vLLM
    if "num_generations" in own:  # of all processes; a process of its own has a part of each group
        sequences = spec.data.batch_size * own.get("steps_per_generation", spec.data.accumulation)
        own["num_generations"] = gcd(own["num_generations"], own.get("generation_batch_size", sequences))
    length: dict[str, Any] = {"max_length": spec.data.tokens}
    if spec.trainer.trainer == "sft":
        packed = spec.data.rows == "packed"
        own = {"packing": packed, **own}
        length = {"max_length": None} if own.get("padding_free") and not packed else length
    return {
        "per_device_train_batch_size": max(spec.data.batch_size, 1 if spec.trainer.trainer in ONLINE else 2),
        "gradient_accumulation_steps": spec.data.accumulation,
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "gradient_checkpointing": False,
        **({} if spec.trainer.trainer in ONLINE else length),
        **own,
    }


def trainer_args(spec: TrainingSpec) -> dict[str, Any]:
    """The fields of the trainer's configuration that `--trainer-args` gives.

    Raises:
        UserError: it is no JSON object.
    """
    try:
        given = json.loads(spec.trainer.trainer_args or "{}")
    except ValueError:
        given = None
    if not isinstance(given, dict):
        raise UserError(f"""--trainer-args {spec.trainer.trainer_args}: give JSON, '{{"beta": 0.1}}' for example""")
    return given


def vllm_share(spec: TrainingSpec) -> tuple[float, bool] | None:
    """The share of the card that a vLLM in the trainer's process takes, and whether it sleeps during the steps.

    The defaults are those of trl/trainer/grpo_config.py. A vLLM server has cards of its own: its share is 0.

    Returns:
        None if the trainer generates by itself.

    Raises:
        UserError: the share is no share.
    """
    args = trainer_args(spec)
    if spec.trainer.trainer not in ONLINE or not args.get("use_vllm"):
        return None
    if args.get("vllm_mode", "colocate") != "colocate":
        return 0.0, False
    share = args.get("vllm_gpu_memory_utilization", 0.3)
    if not isinstance(share, (int, float)) or not 0 < share < 1:
        raise UserError(f"vllm_gpu_memory_utilization {share}: give a share of the card above 0 and below 1")
    return float(share), bool(args.get("vllm_enable_sleep_mode"))


def _batches(trainer: Any, spec: TrainingSpec) -> Callable[[int, int | None], Batch]:
    rollouts = lru_cache(maxsize=1)(partial(_rollouts, trainer))  # micro-batches are parts of one generation

    def make_batch(samples: int, length: int | None) -> Batch:
        tokens = spec.data.tokens if length is None else length
        uneven = length is not None or spec.data.rows == "padded"
        if spec.trainer.trainer in ONLINE:
            whole = rollouts(samples * trainer.args.steps_per_generation, tokens)
            return {name: value[:samples] if value.dim() else value for name, value in whole.items()}
        return dict(trainer.data_collator(_rows(spec, samples, tokens, uneven, trainer)))

    return make_batch


def _rows(spec: TrainingSpec, samples: int, tokens: int, uneven: bool = False, trainer: Any = None) -> list[Any]:
    """Rows as the trainer's collator takes them. uneven: all but the first have one token less."""
    packed = spec.data.rows == "packed" and getattr(trainer, "padding_free", False)
    kind = spec.trainer.trainer
    rows: list[dict[str, Any]] = []
    for number in range(samples):
        row = [1] * (tokens - 1 if uneven and number else tokens)
        prompt, answer, half = row[:1], row[1:], len(row) // 2
        columns: dict[str, dict[str, Any]] = {
            "sft": {"input_ids": row, "labels": row, **({"seq_lengths": [half, len(row) - half]} if packed else {})},
            "dpo": {"prompt_ids": prompt, "chosen_ids": answer, "rejected_ids": answer},
            "kto": {"prompt_ids": prompt, "completion_ids": answer, "label": number % 2 == 0},
            "reward": {"chosen_ids": row, "rejected_ids": row},
        }
        rows.append(columns.get(kind, {"prompt": _TOKEN}))
    if getattr(trainer, "calculate_KL", False):
        rows = [{**row, "KL_completion_ids": row["completion_ids"]} for row in rows]
    if getattr(trainer, "precompute_ref_logps", False):
        names = ("ref_chosen_logps", "ref_rejected_logps") if kind == "dpo" else ("ref_logps", "ref_KL_logps")
        rows = [{**row, **dict.fromkeys(names, 0.0)} for row in rows]
    return rows


def _rollouts(trainer: Any, samples: int, tokens: int) -> Batch:
    """A batch of completions of the greatest length, as the trainer keeps them after it has scored them."""
    completion = min(trainer.max_completion_length, tokens - 1)
    sizes = {"prompt": tokens - completion, "completion": completion}
    batch: Batch = {}
    for name, size in sizes.items():
        batch[f"{name}_ids"] = torch.ones(samples, size, dtype=torch.long)
        batch[f"{name}_mask"] = torch.ones(samples, size, dtype=torch.long)
    batch["advantages"] = torch.zeros(samples)
    if not hasattr(trainer, "loss_type"):  # RLOO scores whole sequences
        return {**batch, "old_logps": torch.zeros(samples)}
    batch["num_items_in_batch"] = torch.tensor(samples * completion)
    corrects = trainer.use_vllm and trainer.vllm_importance_sampling_correction
    between = trainer.args.gradient_accumulation_steps % (trainer.args.steps_per_generation * trainer.num_iterations)
    scores = [*(["ref_per_token_logps"] if trainer.beta else []), *(["importance_sampling_ratio"] if corrects else [])]
    scores += ["old_per_token_logps"] if between or corrects else []
    return {**batch, **{name: torch.zeros(samples, completion) for name in scores}}


def _generation(trainer: Any, spec: TrainingSpec, states: dict[Any, dict[str, Any]]) -> Phase:
    """The trainer's generation of completions, each of the greatest length."""

    def sizes(workload: Workload, samples: int) -> tuple[int, int, int]:
        rows = workload.make_batch(samples, None)
        sequences = samples * trainer.args.steps_per_generation
        return sequences, rows["prompt_ids"].shape[1], rows["completion_ids"].shape[1]

    share, sleeps = vllm_share(spec) or (0.0, False)
    return generation(trainer, sizes, partial(separate_accelerate_state, states), share if sleeps else 0.0)


def _no_reward(completions: list[Any], **kwargs: Any) -> list[float]:
    return [0.0] * len(completions)


def _tokenizer() -> Any:
    """A tokenizer with two words, as TRL asks for one."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<end>": 0, _TOKEN: 1}, unk_token="<end>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="<end>")
