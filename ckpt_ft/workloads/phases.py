"""Phases of a run besides the training step: evaluation and generation of text.

Generation runs the library's own code (`GenerationMixin.generate`), but only on a few tokens, and an evaluation runs
the model on one or two batches. In place of the others a trace allocates what they would have left on the device: a KV
cache, or predictions. Loading and saving of weights need no phase: a checkpoint has no more on the card than a step,
and a weight that is whole for a moment (FSDP2, ZeRO-3, quantised as it is loaded) is whole in a step, too.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import Mock, patch

import torch
from torch import nn

from ckpt_ft.checkpointing.kv_cache import given_cache
from ckpt_ft.compat.libraries import logps_of, shared_state
from ckpt_ft.compat.patches import patched
from ckpt_ft.compat.tensors import tree_leaves
from ckpt_ft.errors import UserError
from ckpt_ft.memory.gpus import gpu_of
from ckpt_ft.spec.training_spec import DataSpec

from .adapters import without_adapters
from .from_trainer import shallow_copy
from .workload import Batch, Step, Workload

Phase = Callable[[Workload, int], Step]
Measure = Callable[[str, bool], AbstractContextManager[Any]]  # (phase, whether it is between steps)


class PhaseRecorder:
    """Measures what a live trainer evaluates and generates between its steps; `measure` opens each measurement."""

    def __init__(self, trainer: Any, measure: Measure) -> None:
        self.trainer, self._measure = trainer, measure
        self._evaluating = False
        self._rollouts = (0, 0, 0)  # sequences, tokens of the prompts and of the answers
        for name, wrap in (
            ("evaluation_loop", self._around_eval),
            ("_generate_and_score_completions", self._around_generation),
        ):
            if hasattr(trainer, name):
                own = getattr(trainer, name)
                setattr(trainer, name, functools.wraps(own)(partial(wrap, own)))

    def phases(self) -> dict[str, Phase]:
        """The generation that was seen, for a workload."""
        return {"generation": generation(self.trainer, lambda *_: self._rollouts)} if self._rollouts[0] else {}

    def _around_eval(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._evaluating = True
        try:
            with self._measure("evaluation", True):
                return own(*args, **kwargs)
        finally:
            self._evaluating = False

    def _around_generation(self, own: Callable[..., Any], inputs: Any) -> Any:
        if self._evaluating:
            return own(inputs)
        with self._measure("generation", False):
            out = own(inputs)
        sequences, prompt = out["prompt_ids"].shape
        self._rollouts = max(self._rollouts, (sequences, prompt, out["completion_ids"].shape[1]))
        return out


def _micro_batches_per_generation(trainer: Any) -> int:
    """The number of micro-batches that one generation serves, for a trainer that generates its training data."""
    return int(trainer.args.steps_per_generation * trainer.num_iterations)


def generation(
    trainer: Any,
    sizes: Callable[[Workload, int], tuple[int, int, int]],
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    vllm_share: float = 0.0,
) -> Phase:
    """The phase in which TRL's GRPO or RLOO trainer generates what it trains on, and scores it.

    If completions are generated more often than the weights are updated, gradients are on the device.

    Args:
        sizes: (workload, samples) -> sequences, tokens of each prompt, and of each answer. Every answer has the
            greatest length.
        vllm_share: the share of the card that vLLM takes while it generates, if it sleeps during the steps; else 0.
    """

    def phase(workload: Workload, samples: int) -> Step:
        sequences, prompt, answer = sizes(workload, samples)

        def step(model: Any, optimizer: Any) -> None:
            model.train()
            if _micro_batches_per_generation(trainer) < workload.accumulation:
                workload.loss_of(model, workload.make_batch(samples, None)).backward()
            forward = workload.in_precision(model.forward)
            with around(), torch.no_grad(), patch.object(model, "forward", forward):
                gpu = gpu_of(workload.device)
                if trainer.use_vllm and gpu is not None:
                    torch.empty(int(vllm_share * gpu.memory), dtype=torch.uint8)
                if not trainer.use_vllm:
                    ids = torch.ones(sequences, prompt, dtype=torch.long)
                    mask = torch.ones_like(ids)
                    generate(model, trainer.generation_config, answer, input_ids=ids, attention_mask=mask)
                _score(shallow_copy(trainer), model, sequences, prompt, answer)

        return step

    return phase


def _score(trainer: Any, model: Any, sequences: int, prompt: int, answer: int) -> None:
    """The log-probabilities of the answers by the model and its reference, in parts of a micro-batch.

    `_generate_and_score_completions` of trl/trainer/{grpo,rloo}_trainer.py says which of them are computed.
    """
    ids = torch.ones(sequences, prompt + answer, dtype=torch.long)
    rows = trainer.args.per_device_train_batch_size
    given = ids[: 2 * rows], torch.ones_like(ids)[: 2 * rows], answer, rows  # all parts are alike
    aligned = trainer.args.gradient_accumulation_steps % _micro_batches_per_generation(trainer) == 0
    corrects = trainer.use_vllm and getattr(trainer, "vllm_importance_sampling_correction", True)
    kept = []
    if not hasattr(trainer, "loss_type") or not aligned or corrects:  # RLOO has no loss_type
        kept.append(logps_of(trainer)(model, *given)[0])
    if trainer.beta:
        base = model.disable_adapter() if trainer.ref_model is None else nullcontext()
        with base:
            kept.append(logps_of(trainer)(trainer.ref_model or model, *given)[0])


@torch.no_grad()
def generate(model: Any, settings: Any, tokens: int, **inputs: Any) -> torch.Tensor:
    """Generates the first of `tokens` and the last two, when the KV cache is largest; returns all sequences."""
    settings = copy.deepcopy(settings)
    if (settings.num_beams or 1) > 1:
        raise UserError(f"num_beams {settings.num_beams}: the KV cache of a beam search is not predicted")
    settings.return_dict_in_generate, settings.max_length = True, None
    last = min(2, tokens - 1)  # the scores of one token are alive while the next one is computed
    encodes, given = model.config.is_encoder_decoder, inputs[model.main_input_name]
    if encodes:
        inputs["encoder_outputs"] = model.get_encoder()(given, attention_mask=inputs.get("attention_mask"))
    sampled = _sample(model, settings, 1, **inputs)
    kept = {name: sampled[name] for name in (given_cache(sampled),) if name}
    prompt = 1 if encodes else given.shape[1]
    if last:
        length = 1 if encodes and kept else prompt + tokens - last  # without a cache, all tokens are computed again
        for cache in kept.values():
            _fill(cache, prompt + tokens - last - 1)
        first = settings.decoder_start_token_id or 0
        one = torch.full(
            (1, 1), first if encodes else 1, device=given.device
        )  # expanded: the prompt alone is in memory
        ids, mask = (one.expand(given.shape[0], length) for _ in range(2))
        named = {"decoder_input_ids": ids} if encodes else {"input_ids": ids, "attention_mask": mask}
        _sample(model, settings, last, **{**inputs, **named, **kept})
    return torch.ones(given.shape[0], prompt + tokens, dtype=torch.long, device=given.device)


def _sample(model: Any, settings: Any, tokens: int, **inputs: Any) -> Any:
    """Generates tokens. Their values are not known, so a patch decides when all sequences have ended."""
    settings.max_new_tokens = tokens
    with patched(goes_on=Mock(side_effect=[True] * tokens + [False])):
        return type(model).generate(model, **inputs, generation_config=settings)


def _fill(cache: Any, tokens: int) -> None:
    """Grows a cache of keys and values to `tokens`, or to the window of a sliding layer."""
    for layer in getattr(cache, "self_attention_cache", cache).layers:
        if getattr(layer, "keys", None) is not None and layer.keys.dim() == 4:
            kept = min(tokens, layer.sliding_window - 1) if getattr(layer, "is_sliding", False) else tokens
            for name in ("keys", "values"):
                held = getattr(layer, name)
                setattr(layer, name, held.new_empty(*held.shape[:2], kept, held.shape[3]))
                if hasattr(layer, "cumulative_length"):
                    layer.cumulative_length = tokens


def evaluation_of(data: DataSpec) -> Phase:
    """The evaluation that a spec describes: of the loss, or one that keeps the logits of `data.eval_samples` rows."""
    return partial(_with_logits if data.eval_samples else _loss_of, data)


def _loss_of(data: DataSpec, workload: Workload, samples: int) -> Step:
    """An evaluation of the loss alone, whose batches leave no tensors behind."""
    batch = workload.make_batch(data.eval_batch_size, None)

    def step(model: nn.Module, optimizer: Any) -> None:
        model.eval()
        with torch.no_grad():
            workload.loss_of(model, batch).detach().mean()

    return step


def _with_logits(data: DataSpec, workload: Workload, samples: int) -> Step:
    """An evaluation as a Trainer with `compute_metrics` makes it: outputs and labels stay on the device.

    Each batch concatenates them anew (`EvalLoopContainer` in transformers/trainer_pt_utils.py), so the last one before
    they go to the host has the peak. The model runs on the first batch and on that one; what the batches in between
    leave is allocated.
    """
    from transformers.utils import find_labels

    rows, model = data.eval_batch_size, without_adapters(workload.model)
    kept = min(data.eval_samples, rows * (data.eval_accumulation_steps or data.eval_samples))
    last = (kept - 1) % rows + 1
    batches = [workload.make_batch(size, None) for size in ([rows, last] if kept > rows else [last])]
    left_out = {"loss", *getattr(model.config, "keys_to_ignore_at_inference", ())}
    processes = 1 if workload.launch is None else workload.launch.processes

    def predicted(model: Any, batch: Batch) -> list[torch.Tensor]:
        outputs = workload.in_precision(model)(**batch)
        found = [value for name, value in outputs.items() if name not in left_out]
        found += [batch[name] for name in find_labels(type(without_adapters(model))) if name in batch]
        tensors = [leaf for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor) and leaf.dim()]
        return [torch.cat([tensor] * processes) for tensor in tensors] if processes > 1 else tensors

    def step(model: nn.Module, optimizer: Any) -> None:
        model.eval()
        with torch.no_grad():
            before = predicted(model, batches[0])
            if len(batches) > 1:
                before = [tensor.new_empty(processes * (kept - last), *tensor.shape[1:]) for tensor in before]
                new = predicted(model, batches[1])
                before = [torch.cat(both) for both in zip(before, new, strict=True)]
        model.train()

    return step


@contextmanager
def separate_accelerate_state(states: dict[Any, dict[str, Any]]) -> Iterator[None]:
    """Replaces accelerate's process-wide state by `states`; afterwards restores that of the user's own run."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    kinds = (PartialState, AcceleratorState, GradientState)
    with ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(patch.dict(shared_state(kind), states.get(kind, {}), clear=True))
        try:
            yield
        finally:
            states.update({kind: dict(shared_state(kind)) for kind in kinds})
