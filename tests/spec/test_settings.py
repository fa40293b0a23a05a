"""The settings table knows every field of the installed libraries and refuses no field's default."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainingArguments
from versions import is_older

from benchmarks import settings as settings_page
from ckpt_ft.errors import UserError
from ckpt_ft.spec.flags import flags
from ckpt_ft.spec.optimizers import OPTIMIZERS
from ckpt_ft.spec.settings import (
    KEYS,
    KINDS,
    LIVE,
    MODELLED,
    REFUSED,
    entry_of,
    lines_of,
    read_settings,
    table,
)
from ckpt_ft.spec.trainer import check_live

PLUGINS = "accelerate.utils.dataclasses"
# Configuration class -> the sections of the settings table that list its fields.
CLASSES: dict[str, tuple[str, ...]] = {
    "transformers.TrainingArguments": ("transformers",),
    "transformers.Seq2SeqTrainingArguments": ("transformers",),
    "trl.SFTConfig": KINDS["trl"],
    "trl.DPOConfig": KINDS["dpo"],
    "trl.KTOConfig": KINDS["kto"],
    "trl.RewardConfig": KINDS["reward"],
    "trl.GRPOConfig": KINDS["grpo"],
    "trl.RLOOConfig": KINDS["rloo"],
    "trl.ModelConfig": KINDS["trl"],
    "trl.ScriptArguments": KINDS["trl"],
    f"{PLUGINS}.FullyShardedDataParallelPlugin": ("accelerate.fsdp",),
    f"{PLUGINS}.DeepSpeedPlugin": ("accelerate.deepspeed",),
    f"{PLUGINS}.TorchDynamoPlugin": ("accelerate.dynamo",),
    f"{PLUGINS}.AORecipeKwargs": ("accelerate.fp8",),
    f"{PLUGINS}.TERecipeKwargs": ("accelerate.fp8",),
    f"{PLUGINS}.MSAMPRecipeKwargs": ("accelerate.fp8",),
    "accelerate.parallelism_config.ParallelismConfig": ("accelerate.parallelism",),
    f"{PLUGINS}.TorchContextParallelConfig": ("accelerate.parallelism",),
    f"{PLUGINS}.DeepSpeedSequenceParallelConfig": ("accelerate.parallelism",),
    f"{PLUGINS}.GradientAccumulationPlugin": ("accelerate.accelerator",),
    f"{PLUGINS}.DistributedDataParallelKwargs": ("accelerate.accelerator",),
    f"{PLUGINS}.DataLoaderConfiguration": ("accelerate.accelerator",),
    "transformers.trainer_pt_utils.AcceleratorConfig": ("accelerate.accelerator",),
    "accelerate.commands.config.config_args.ClusterConfig": ("accelerate",),
    "ckpt_ft.training.arguments.TextACArguments": ("ckpt_ft",),
    "ckpt_ft.training.models.ModelArguments": KINDS["llm"],
    "ckpt_ft.training.text.DataArguments": KINDS["llm"],
    "ckpt_ft.training.run_arguments.RunArguments": KINDS["llm"],
    "ckpt_ft.training.vision_language.VisionLanguageArguments": KINDS["vlm"],
    "ckpt_ft.training.vision_language.VisionLanguageModelArguments": KINDS["vlm"],
    "ckpt_ft.training.classification.VisionArguments": KINDS["image_classification"],
    "ckpt_ft.training.diffusion.arguments.DiffusionModelArguments": KINDS["diffusion_unet"],
    "ckpt_ft.training.diffusion.arguments.LoopArguments": KINDS["diffusion_unet"],
    "ckpt_ft.training.images.ImageArguments": KINDS["diffusion_unet"],
    "ckpt_ft.training.diffusion.arguments.TransformerArguments": KINDS["diffusion_transformer"],
}
# Targets of modelled settings that are not flags; the readers convert them.
READ = {
    "dp_shard", "rotation", "float8_gather",
    "model", "dataset", "checkpointing", "every_n_layers", "evaluation", "eval_batch_size", "eval_accumulation_steps",
    "offload_optimizer",
    "tf32", "use_cpu", "use_8bit_adam", "use_muon", "use_adam_mini", "cache_latents", "center_crop", "random_flip",
    "with_prior_preservation",
    "adapter", "lora_target_linear", "fused_lora", "pure_bf16", "pure_fp16", "float32",
    "rl", "stage", "pref_loss", "reward_model", "process_reward_model", "num_labels", "activation_offloading",
    "tiled_mlp", "trained", "max_prompt_length", "use_galore", "use_apollo", "layerwise",
    "galore_rank", "galore_target", "apollo_rank", "apollo_target",
    "oft_block_size", "freeze_trainable_layers", "fsdp_options",
    "fsdp", "fsdp_config", "fsdp_version", "deepspeed", "finetuning_type", "quantization_bit", "no_checkpointing",
    "trainer_args", "liger_rope", "liger_rms_norm", "liger_layer_norm", "liger_glu_activation", "liger_cross_entropy",
    "liger_fused_linear_cross_entropy", "plugins", "fp8",
}  # fmt: skip
SOURCE = "run.yaml"


def fields_of(path: str) -> Iterator[tuple[str, Any]]:
    """Yields the name and default of each field of a class; nothing if the installed version lacks the class."""
    module, _, name = path.rpartition(".")
    kind = getattr(importlib.import_module(module), name, None)
    for own in dataclasses.fields(kind) if kind is not None else ():
        made = own.default_factory() if own.default_factory is not dataclasses.MISSING else None
        yield own.name, made if own.default is dataclasses.MISSING else own.default


@pytest.mark.parametrize("path", CLASSES)
def test_every_field_is_known_and_its_default_is_not_refused(path: str) -> None:
    pytest.importorskip(path.partition(".")[0])
    found = dict(fields_of(path))
    assert [name for name in found if entry_of(name, CLASSES[path]) is None] == []
    for name, default in found.items():
        entry = entry_of(name, CLASSES[path])
        assert entry is not None
        assert entry.kind == KEYS or entry.of(getattr(default, "value", default)).kind not in (LIVE, REFUSED), name


def test_settings_of_peft_and_of_bitsandbytes_are_fields_of_theirs() -> None:
    import transformers.utils.quantization_config as quantised
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    peft = {own.name for kind in PEFT_TYPE_TO_CONFIG_MAPPING.values() for own in dataclasses.fields(kind)}
    assert is_older("peft", "0.21") or table()["peft"].keys() - peft == set()  # the table has newer fields
    own = set(inspect.signature(quantised.BitsAndBytesConfig.__init__).parameters) - {"self", "kwargs"}
    assert own - table()["transformers.quantization_config"].keys() == set()


def test_every_key_of_deepspeed_is_known() -> None:
    pytest.importorskip("deepspeed")
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    own = {*DeepSpeedZeroConfig.model_fields} - {"stage3_gather_fp16_weights_on_model_save"}
    assert [name for name in own if entry_of(name, ("deepspeed.zero_optimization",)) is None] == []


@pytest.mark.parametrize(("release", "kind"), [("axolotl 0.19.0", "axolotl"), ("llamafactory 0.9.5", "llama_factory")])
def test_every_key_of_axolotl_and_llama_factory_is_known(release: str, kind: str) -> None:
    """released_keys.json: the fields of axolotl's AxolotlInputConfig and plugins and of LLaMA-Factory's arguments."""
    keys = json.loads(Path(__file__).with_name("released_keys.json").read_text(encoding="utf-8"))[release]
    assert len(keys) > 150
    assert [key for key in keys if entry_of(key, KINDS[kind]) is None] == []


@pytest.mark.skipif(is_older("transformers", "5.23") or is_older("trl", "1.16"), reason="the table has newer fields")
def test_every_entry_is_a_field_of_an_installed_or_listed_older_release() -> None:
    """Fields of older releases stay in the table because users' files still contain them."""
    older = {
        "transformers": {
            "warmup_ratio",
            "overwrite_output_dir",
            "logging_dir",
            "save_safetensors",
            "group_by_length",
            "evaluation_strategy",
        },
        "trl.kto": {"generate_during_eval"},
        "trl": {"max_seq_length", "max_prompt_length"},
        # an argument of the trainer, and settings of axolotl's
        "trl.rollouts": {"reward_funcs", "async_prefetch", "use_data_producer"},
    }
    for section in ("transformers", "trl.sft", "trl.dpo", "trl.kto", "trl.reward", "trl.rollouts"):
        known = {name for path, sections in CLASSES.items() if section in sections for name, _ in fields_of(path)}
        assert table()[section].keys() - known - older.get(section, set()) == set(), section


def test_every_optimizer_of_transformers_is_modelled_unless_for_tpus() -> None:
    from transformers.training_args import OptimizerNames

    others = {"adamw_torch_xla"}  # for TPUs
    assert {name.value for name in OptimizerNames} - OPTIMIZERS.keys() == others


def test_every_target_is_a_flag_or_has_a_reader() -> None:
    known = {*flags(), *READ}
    for section, entries in table().items():
        for name, entry in entries.items():
            for one in (entry, *entry.values.values()):
                assert one.text, (section, name)
                assert one.kind != MODELLED or one.text in known, (section, name, one.text)
                assert one.kind != KEYS or {*one.text.split(", ")} <= table().keys(), (section, name, one.text)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"torch_compile_mode": "max-autotune"}, "torch_compile_mode: max-autotune: a step is compiled by"),
        ({"learning_rat": 1}, "learning_rat: 1: no such setting is known; did you mean 'learning_rate'?"),
        ({"model_init_kwargs": {"tp_plan": "auto"}}, "model_init_kwargs.tp_plan: auto: it changes the model"),
        ({"model_init_kwargs": [1]}, "model_init_kwargs: [1]: give 'key: value' lines"),
        ({"optim_args": "rank=4"}, "optim_args: rank=4: arguments of an optimizer may change its states"),
    ],
)
def test_refused_setting_is_one_line(content: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError) as refused:
        read_settings(content, KINDS["trl"], SOURCE)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_what_is_not_modelled_is_left_out_with_a_reason_or_refused() -> None:
    left_out: dict[str, str] = {}
    content = {
        "learning_rat": 1, "torch_compile_mode": "max-autotune", "optim_args": "rank=4", "vllm_new_option": 3,
        "chat_template_of_mine": "x", "model_init_kwargs": {"tp_plan": "auto"}, "max_length": 8,
    }  # fmt: skip
    assert read_settings(content, KINDS["trl"], SOURCE, left_out=left_out) == {"seq_length": 8}
    assert left_out == {
        "learning_rat": "no such setting is known; did you mean 'learning_rate'?",
        "torch_compile_mode": "a step is compiled by Inductor in its default mode",
        "optim_args": "arguments of an optimizer may change its states",
        "model_init_kwargs.tp_plan": "it changes the model or where it lies",
    }
    assert lines_of({"a": "x", "b": "y", "c": "x"}) == ("a, c: x", "b: y")
    with pytest.raises(UserError, match="^run.yaml: megatron_lm_config: ...: Megatron-LM is another trainer"):
        read_settings({"megatron_lm_config": {"a": 1}}, ["accelerate"], SOURCE, left_out=left_out)


def test_default_of_the_library_is_what_is_predicted() -> None:
    pytest.importorskip("trl")
    left_out: dict[str, str] = {}
    defaults = {"generation_kwargs": None, "cache_implementation": "x", "use_transformers_paged": False}
    assert read_settings(defaults, KINDS["grpo"], SOURCE, left_out=left_out) == {}
    assert [*left_out] == ["cache_implementation"]


@pytest.mark.parametrize("off", [None, False, "false", "null", "", 0, [], {}])
def test_setting_that_is_off_is_not_refused(off: Any) -> None:
    names: Sequence[str] = (
        "full_determinism",
        "torch_compile_mode",
        "parallelism_config",
        "optim_args",
    )
    assert read_settings(dict.fromkeys(names, off), KINDS["trl"], SOURCE) == {}


def test_nested_keys_and_string_booleans_are_read() -> None:
    found = read_settings(
        {"model_init_kwargs": {"dtype": "bfloat16"}, "bf16": "false", "packing": True}, KINDS["trl"], SOURCE
    )
    assert found == {"dtype": "bfloat16", "bf16": False, "packing": True}
    assert read_settings({"flash_attention": True, "sdp_attention": False}, KINDS["axolotl"], SOURCE) == {
        "attn_implementation": "flash_attention_2"
    }


def test_live_check_refuses_settings_that_the_trace_does_not_run(tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", label_smoothing_factor=0.1)
    check_live(args)
    args.torch_compile, args.torch_compile_backend = True, "inductor"
    check_live(args)
    args.torch_compile_backend = "eager"
    with pytest.raises(UserError, match="^torch_compile_backend: eager: a step is compiled by Inductor"):
        check_live(args)
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", accelerator_config={"split_batches": True})
    with pytest.raises(UserError, match="^accelerator_config.split_batches: True: a batch is predicted"):
        check_live(args)


def test_eval_strategy_wins_over_do_eval_in_any_order() -> None:
    content = {"eval_strategy": "steps", "eval_on_start": False, "do_eval": False}
    for names in (list(content), list(reversed(content))):
        assert read_settings({name: content[name] for name in names}, KINDS["trl"], SOURCE) == {"evaluation": "steps"}


def test_settings_page_is_up_to_date() -> None:
    assert settings_page.PAGE.read_text(encoding="utf-8") == settings_page.page()
