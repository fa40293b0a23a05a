"""The table of GPUs: names people type, figures that must hang together, and the device at hand."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch

from ckpt_ft.errors import UserError
from ckpt_ft.memory.gpus import GPU, GPUS, current_gpu, find_gpu, match_device
from ckpt_ft.units import GIB, MIB


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("t4", "t4"),
        ("Tesla T4", "t4"),
        ("a100", "a100-40gb"),
        ("A100_80GB", "a100-80gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("v100", "v100-16gb"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("rtx3090", "rtx-3090"),
        ("5090", "rtx-5090"),
        ("NVIDIA H100 80GB HBM3", "h100"),
    ],
)
def test_names_as_people_type_them(typed, name):
    assert find_gpu(typed).name == name


def test_an_unknown_name_gets_the_closest_and_the_list():
    with pytest.raises(UserError, match=r"no GPU 'a1000'; did you mean a100-40gb or a100-80gb\? \(t4, v100-16gb"):
        find_gpu("a1000")
    with pytest.raises(UserError, match=r"no GPU 'mainframe' \(t4, "):
        find_gpu("mainframe")


def test_t4_is_the_card_of_the_published_runs():
    t4 = find_gpu("t4")
    assert abs(t4.memory - 14912 * MIB) < 8 * MIB
    assert t4.matmul_rate("float16") == pytest.approx(24e12, rel=0.01)
    assert t4.matmul_rate("float32") == t4.matmul_rate("bfloat16") == pytest.approx(4.3e12, rel=0.01)


@pytest.mark.parametrize("gpu", GPUS.values(), ids=lambda gpu: gpu.name)
def test_figures_hang_together(gpu):
    assert 0.9 * gpu.memory < gpu.usable < gpu.memory
    assert gpu.bf16 in (0, gpu.fp16)
    assert (gpu.bf16 > 0) == (gpu.tf32 > 0) == (gpu.arch >= (8, 0))
    assert (gpu.fp8 > 0) == (gpu.arch >= (8, 9))
    assert gpu.matmul_rate("float16") > gpu.matmul_rate("float32")
    assert gpu.matmul_rate("float32", tf32=True) >= gpu.matmul_rate("float32")
    assert all(0 < share <= 1 for share in (gpu.efficiency, gpu.efficiency_fp32, gpu.bandwidth_efficiency))


def test_a_gpu_survives_json():
    gpu = find_gpu("h200")
    assert GPU(**json.loads(json.dumps(dataclasses.asdict(gpu)))) == gpu
    assert hash(gpu) == hash(find_gpu("H200"))


def device(name, arch, sms, gib):
    return SimpleNamespace(
        name=name, major=arch[0], minor=arch[1], multi_processor_count=sms, total_memory=int(gib * GIB)
    )


def test_a_device_in_the_table_reports_its_own_memory():
    found = match_device(device("NVIDIA A100-SXM4-80GB", (8, 0), 108, 79.15))
    assert found == dataclasses.replace(find_gpu("a100-80gb"), memory=int(79.15 * GIB))


def test_a_device_outside_the_table_is_scaled_from_the_nearest():
    found = match_device(device("NVIDIA H100 PCIe", (9, 0), 114, 79.1))
    assert (found.name, found.sms) == ("NVIDIA H100 PCIe", 114)
    assert found.fp16 == pytest.approx(find_gpu("h100").fp16 * 114 / 132)
    assert match_device(device("NVIDIA A40", (8, 6), 84, 44.4)).fp16 == pytest.approx(
        find_gpu("rtx-3090").fp16 * 84 / 82
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_no_device_at_hand():
    assert current_gpu() is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_device_at_hand():
    found = current_gpu()
    assert found is not None
    assert found.memory == torch.cuda.get_device_properties(0).total_memory
