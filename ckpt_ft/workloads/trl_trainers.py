"""The step of TRL's trainers: their own losses, collators and reference models, on a model without weights.

TRL's trainer is built around the model on the meta device, so that its own code decides what a step computes: the
fused LM head, padding-free batches, the reference model or the disabled adapters. Only what needs weights, data or a
device is replaced while it is built. Rows have the requested length, and every token but the first counts in the loss.
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from ckpt_ft.errors import UserError
from ckpt_ft.memory.fake.patches import quiet
from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.validation import library_reads, require_package
from ckpt_ft.workloads.adapters import without_adapters

from .from_trainer import loss_of
from .workload import Batch, Forward, Step, Workload

NAMES = {"sft": "SFT", "dpo": "DPO", "kto": "KTO", "reward": "Reward", "grpo": "GRPO", "rloo": "RLOO"}
ONLINE = ("grpo", "rloo")  # they generate what they train on
_TOKEN = "a"


def trainer_step(workload: Workload, spec: TrainingSpec) -> Workload:
    """Returns `workload` with the step of the TRL trainer that `spec` names.

    Raises:
        UserError: TRL is not installed, or refuses the settings.
    """
    if workload.kind != ("text classifier" if spec.trainer.trainer == "reward" else "language model"):
        raise UserError(f"trainer {spec.trainer.trainer}: {spec.model.name} is a {workload.kind}")
    require_package("trl", f"--trainer {spec.trainer.trainer}")
    states: dict[Any, dict[str, Any]] = {}
    asked = f"--trainer {spec.trainer.trainer}: TRL refuses these settings"
    with library_reads(asked), _accelerate_apart(states), quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with redirect_stdout(sys.stderr):  # DeepSpeed, which TRL and accelerate import, writes to stdout
            trainer = _build(workload.model, spec)
    trainer.current_gradient_accumulation_steps = spec.data.accumulation  # set where training begins
    own_loss = loss_of(trainer)

    def compute_loss(model: Forward, batch: Batch) -> torch.Tensor:
        with _accelerate_apart(states):
            return own_loss(model, dict(batch))

    reference = getattr(trainer, "ref_model", None)
    online = spec.trainer.trainer in ONLINE
    return replace(
        workload,
        model=trainer.model,
        make_batch=_batches(trainer, spec),
        compute_loss=compute_loss,
        phases={**workload.phases, **({"generation": _generation(trainer, states)} if online else {})},
        auxiliary_models=(*workload.auxiliary_models, *([] if reference is None else [reference])),
        notes=(*workload.notes, f"the step is that of TRL's {type(trainer).__name__}; every token counts in its loss"),
    )


def as_reward_model(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a model's configuration as TRL's RewardTrainer loads it: with one output in place of a vocabulary."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as CLASSES

    kind = config.get("model_type", "")
    if kind not in CLASSES:
        raise UserError(f"--trainer reward: transformers has no sequence classifier of type '{kind}'")
    return {**config, "architectures": [CLASSES[kind]], "num_labels": 1}


def _build(model: Any, spec: TrainingSpec) -> Any:
    """TRL's trainer around `model`, whose adapters are already in it."""
    import trl
    from datasets import Dataset

    name = NAMES[spec.trainer.trainer]
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
        rows = Dataset.from_list(_rows(spec, 2, spec.data.tokens))
        return kind(args=args, train_dataset=rows, **given)


def _arguments(spec: TrainingSpec) -> dict[str, Any]:
    """The fields of the trainer's configuration; the workload itself applies precision and checkpointing."""
    own = trainer_args(spec)
    length: dict[str, Any] = {"max_length": spec.data.tokens}
    if spec.trainer.trainer == "sft":
        packed = spec.data.rows == "packed"
        own = {"packing": packed, **own}
        length = {"max_length": None} if own.get("padding_free") and not packed else length
    return {
        "per_device_train_batch_size": max(spec.data.batch_size, 2),
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


def _batches(trainer: Any, spec: TrainingSpec) -> Callable[[int, int | None], Batch]:
    rollouts = lru_cache(maxsize=1)(partial(_rollouts, trainer))  # micro-batches are parts of one generation

    def make_batch(samples: int, length: int | None) -> Batch:
        tokens = spec.data.tokens if length is None else length
        uneven = length is not None or spec.data.rows == "padded"
        if spec.trainer.trainer in ONLINE:
            whole = rollouts(samples * trainer.args.steps_per_generation, tokens)
            return {name: value[:samples] if value.dim() else value for name, value in whole.items()}
        rows = _rows(spec, samples, tokens, uneven, trainer)
        return dict(trainer.data_collator(rows))

    return make_batch


def _rows(spec: TrainingSpec, samples: int, tokens: int, uneven: bool = False, trainer: Any = None) -> list[Any]:
    """Rows as the trainer's collator takes them. uneven: all but the first have one token less."""
    kind = spec.trainer.trainer
    packed = spec.data.rows == "packed" and getattr(trainer, "padding_free", False)
    rows: list[dict[str, Any]] = []
    for number in range(samples):
        row = [1] * (tokens - 1 if uneven and number else tokens)
        prompt, answer = row[:1], row[1:]
        if kind == "sft":
            parts = {"seq_lengths": [len(row) // 2, len(row) - len(row) // 2]} if packed else {}
            rows.append({"input_ids": row, "labels": row, **parts})
        elif kind == "dpo":
            rows.append({"prompt_ids": prompt, "chosen_ids": answer, "rejected_ids": answer})
        elif kind == "kto":
            rows.append({"prompt_ids": prompt, "completion_ids": answer, "label": number % 2 == 0})
        elif kind == "reward":
            rows.append({"chosen_ids": row, "rejected_ids": row})
        else:
            rows.append({"prompt": _TOKEN})
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
    old = trainer.args.gradient_accumulation_steps % _generates_every(trainer) != 0
    scores = [*(["ref_per_token_logps"] if trainer.beta else []), *(["old_per_token_logps"] if old else [])]
    return {**batch, **{name: torch.zeros(samples, completion) for name in scores}}


def _generates_every(trainer: Any) -> int:
    """Micro-batches from one generation to the next."""
    return int(trainer.args.steps_per_generation * trainer.num_iterations)


def _generation(trainer: Any, states: dict[Any, dict[str, Any]]) -> Callable[[Workload, int], Step]:
    """The trainer's generation of completions: the prompts, and the last tokens, when the KV cache is largest.

    Every sequence reaches the greatest length. If completions are generated more often than the weights are updated,
    gradients are on the device.
    """

    def phase(workload: Workload, samples: int) -> Step:
        rows = workload.make_batch(samples, None)
        sequences, prompt = samples * trainer.args.steps_per_generation, rows["prompt_ids"].shape[1]
        ids = torch.ones(sequences, prompt, dtype=torch.long)
        completion = rows["completion_ids"].shape[1]
        last = min(2, completion - 1)  # the scores of one token are alive while the next one is computed
        whole = torch.ones(sequences, prompt + completion - last, dtype=torch.long)
        settings = copy.deepcopy(trainer.generation_config)
        settings.return_dict_in_generate = True

        def step(model: Any, optimizer: Any) -> None:
            model.train()
            if _generates_every(trainer) < workload.accumulation:
                workload.loss_of(model, workload.make_batch(samples, None)).backward()
            with _accelerate_apart(states), torch.no_grad(), _in_precision(workload, model):
                cache = _generate(
                    model, settings, 1, input_ids=ids, attention_mask=torch.ones_like(ids)
                ).past_key_values
                if last:
                    _fill(cache, whole.shape[1] - 1)
                    mask = torch.ones_like(whole)
                    _generate(model, settings, last, input_ids=whole, attention_mask=mask, past_key_values=cache)

        return step

    return phase


@contextmanager
def _in_precision(workload: Workload, model: Any) -> Iterator[None]:
    """The model's forward in the workload's precision, as accelerate wraps it."""
    with patch.object(model, "forward", workload.in_precision(model.forward)):
        yield


def _generate(model: Any, settings: Any, tokens: int, **inputs: Any) -> Any:
    """Generates tokens; whether all sequences have ended cannot be read from tokens without values."""
    from transformers import GenerationMixin

    settings.max_new_tokens = tokens
    with patch.object(GenerationMixin, "_has_unfinished_sequences", side_effect=[True] * tokens + [False]):
        return model.generate(**inputs, generation_config=settings)


def _fill(cache: Any, tokens: int) -> None:
    """Grows a cache of keys and values to `tokens`, or to the window of a sliding layer."""
    for layer in cache.layers:
        if getattr(layer, "keys", None) is not None and layer.keys.dim() == 4:
            kept = min(tokens, layer.sliding_window - 1) if getattr(layer, "is_sliding", False) else tokens
            for name in ("keys", "values"):
                held = getattr(layer, name)
                setattr(layer, name, held.new_empty(*held.shape[:2], kept, held.shape[3]))
                if hasattr(layer, "cumulative_length"):
                    layer.cumulative_length = tokens


def _no_reward(completions: list[Any], **kwargs: Any) -> list[float]:
    return [0.0] * len(completions)


def _tokenizer() -> Any:
    """A tokenizer with two words, as TRL asks for one."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<end>": 0, _TOKEN: 1}, unk_token="<end>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="<end>")


@contextmanager
def _accelerate_apart(states: dict[Any, dict[str, Any]]) -> Iterator[None]:
    """Gives accelerate the process-wide states in `states`; the ones of the user's own run come back afterwards."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    kinds = (PartialState, AcceleratorState, GradientState)
    with ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(patch.dict(kind._shared_state, states.get(kind, {}), clear=True))
        try:
            yield
        finally:
            states.update({kind: dict(kind._shared_state) for kind in kinds})
