"""Every launch configuration is read by accelerate's own loader and has the content that its name states."""

from __future__ import annotations

from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import DistributedType

CONFIGS = Path(__file__).parents[1] / "accelerate_configs"
EXPECTED = {
    "cpu": (DistributedType.NO, True),
    "single_gpu": (DistributedType.NO, False),
    "multi_gpu": (DistributedType.MULTI_GPU, False),
    "fsdp2": (DistributedType.FSDP, False),
    "fsdp2_two_nodes": (DistributedType.FSDP, False),
    "deepspeed_zero2": (DistributedType.DEEPSPEED, False),
    "deepspeed_zero3": (DistributedType.DEEPSPEED, False),
    "fsdp2_offload": (DistributedType.FSDP, False),
    "deepspeed_zero2_offload": (DistributedType.DEEPSPEED, False),
    "deepspeed_zero3_offload": (DistributedType.DEEPSPEED, False),
    "context_parallel": (DistributedType.FSDP, False),
    "tensor_parallel": (DistributedType.MULTI_GPU, False),
    "ulysses": (DistributedType.DEEPSPEED, False),
}


def test_accelerate_configs_are_complete() -> None:
    assert {path.stem for path in CONFIGS.glob("*")} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_accelerate_reads_the_configuration(name: str) -> None:
    config = load_config_from_file(str(CONFIGS / f"{name}.yaml"))
    assert (config.distributed_type, config.use_cpu) == EXPECTED[name]
    assert config.num_machines == (2 if name == "fsdp2_two_nodes" else 1)


def test_configurations_shard_as_named_without_checkpointing() -> None:
    fsdp = load_config_from_file(str(CONFIGS / "fsdp2.yaml")).fsdp_config
    assert fsdp["fsdp_version"] == 2
    assert fsdp["fsdp_activation_checkpointing"] is False
    for stage in (2, 3):
        config = load_config_from_file(str(CONFIGS / f"deepspeed_zero{stage}.yaml"))
        assert config.deepspeed_config["zero_stage"] == stage
