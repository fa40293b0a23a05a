"""The table of GPUs: the names that users type, consistent figures, and the GPU of this machine."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch
from pydantic import TypeAdapter

from ckpt_ft.errors import UserError
from ckpt_ft.memory.gpus import GPU, GPUS, current_gpu, find_gpu, match_device
from ckpt_ft.units import GIB, MIB

AMD = {"mi250", "mi300x", "mi325x", "mi355x"}


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
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA GeForce RTX 3060", "rtx-3060"),
        ("4060 ti", "rtx-4060-ti-16gb"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "rtx-4090-laptop"),
        ("4070-laptop", "rtx-4070-laptop"),
        ("NVIDIA RTX A6000", "a6000"),
        ("RTX A4000", "a4000"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("Quadro RTX 8000", "quadro-rtx-8000"),
        ("NVIDIA TITAN RTX", "titan-rtx"),
        ("Tesla P100-PCIE-16GB", "p100"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000"),
        ("NVIDIA A40", "a40"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA B300 SXM6 AC", "b300"),
        ("AMD Instinct MI300X", "mi300x"),
        ("MI250", "mi250"),
        ("NVIDIA GeForce RTX 3060 12GB", "rtx-3060"),
        ("RTX 3060 (12 GB)", "rtx-3060"),
        ("RTX 3080 10GB", "rtx-3080"),
        ("NVIDIA GeForce RTX 3080 12GB", "rtx-3080-12gb"),
        ("NVIDIA GeForce RTX 4060 Ti", "rtx-4060-ti-16gb"),
        ("RTX 4060 Ti 8GB", "rtx-4060-ti-8gb"),
        ("NVIDIA RTX A2000 12GB", "a2000"),
        ("GPU 0: NVIDIA GeForce RTX 3090 (UUID: GPU-12ab)", "rtx-3090"),
        ("Tesla T4, 15360MiB", "t4"),
        ("T4 GPU", "t4"),
        ("A100 GPU", "a100-40gb"),
        ("G4 GPU", "rtx-pro-6000"),
        ("Colab T4", "t4"),
        ("Kaggle P100", "p100"),
        ("V100 32GB", "v100-32gb"),
        ("NVIDIA GeForce GTX 1080 Ti", "gtx-1080-ti"),
        ("GTX 1060 6GB", "gtx-1060"),
        ("A6000 Ada", "rtx-6000-ada"),
    ],
)
def test_gpu_is_found_by_the_names_that_users_type(typed, name):
    assert find_gpu(typed).name == name


def test_size_alone_is_a_card_without_seconds() -> None:
    card = find_gpu("8GB")
    assert (card.memory, card.sized, card.arch) == (8 * 10**9, True, find_gpu("rtx-4090").arch)
    with pytest.raises(UserError, match="the CUDA context alone takes"):
        find_gpu("0.1GiB")
    other = find_gpu("RTX 3060 8GB")
    assert (other.memory, other.name, other.fp32) == (8 * GIB, "rtx-3060 with 8.00 GiB", find_gpu("rtx-3060").fp32)
    with pytest.raises(UserError, match="only cards that run CUDA or ROCm"):
        find_gpu("Apple M3 Max")


def test_about_a_hundred_gpus_are_found_by_name():
    assert len(GPUS) >= 95
    assert len({gpu.name for gpu in GPUS.values()}) == len(GPUS)
    for name in GPUS:
        for typed in (name, name.upper(), name.replace("-", " "), f"NVIDIA {name}"):
            assert find_gpu(typed).name == name


@pytest.mark.parametrize(
    ("name", "gib", "gbs", "fp32", "half"),
    [
        ("rtx-3080", 9.78, 760, 29.8, 59.5),
        ("a5000", 23.68, 768, 27.8, 111.1),
        ("a10", 22.06, 600, 31.2, 125),
        ("a40", 44.56, 696, 37.4, 149.7),
        ("rtx-4070", 11.72, 504, 29.1, 58.3),
        ("rtx-4500-ada", 23.52, 432, 39.6, 158.5),
        ("rtx-2080", 7.79, 448, 10.1, 40.3),
        ("l20", 44.39, 864, 59.8, 119.5),
        ("gh200", 94.50, 4000, 67, 989),
        ("rtx-5080", 15.47, 960, 56.3, 112.6),
        ("h20", 95.00, 4000, 44, 148),
        ("b300", 267.90, 7670, 80, 2250),
        ("mi300x", 191.98, 5300, 163.4, 1300),
    ],
)
def test_figures_equal_the_datasheets(name, gib, gbs, fp32, half):
    """Tensor-core rates of variants are computed; their datasheets state them too."""
    gpu = find_gpu(name)
    assert gpu.memory == pytest.approx(gib * GIB, rel=1e-9)
    assert (gpu.bandwidth, gpu.fp32) == (pytest.approx(gbs * 1e9), pytest.approx(fp32 * 1e12))
    assert gpu.fp16 == pytest.approx(half * 1e12, rel=0.01)


@pytest.mark.parametrize("name", [name for name in GPUS if name.startswith("rtx-")])
def test_fp32_of_a_geforce_implies_a_plausible_clock(name):
    """An SM has 128 lanes (Turing 64), with two operations per cycle."""
    gpu = find_gpu(name)
    lanes = 64 if gpu.arch == (7, 5) else 128
    assert 1.4e9 < gpu.fp32 / (gpu.sms * lanes * 2) < 2.7e9


def test_unknown_gpu_is_answered_with_the_closest_name():
    with pytest.raises(UserError, match=r"no GPU 'a1000'; did you mean a100-40gb.*\? \(`ckpt-ft gpus` lists them"):
        find_gpu("a1000")
    with pytest.raises(
        UserError, match=r"no GPU 'mainframe' \(`ckpt-ft gpus` lists them; for another card: --device 24GB"
    ):
        find_gpu("mainframe")


def test_t4_has_the_figures_of_the_published_runs():
    t4 = find_gpu("t4")
    assert abs(t4.memory - 14912 * MIB) < 8 * MIB
    assert t4.matmul_rate("float16") == pytest.approx(24e12, rel=0.01)
    assert t4.matmul_rate("float32") == t4.matmul_rate("bfloat16") == pytest.approx(4.37e12, rel=0.01)


@pytest.mark.parametrize("gpu", GPUS.values(), ids=lambda gpu: gpu.name)
def test_figures_are_consistent(gpu):
    assert 0.9 * gpu.memory < gpu.usable < gpu.memory
    assert gpu.bf16 in (0, gpu.fp16)
    if gpu.name in AMD:
        assert "AMD" in gpu.note
    else:
        assert (gpu.bf16 > 0) == (gpu.tf32 > 0) == (gpu.arch >= (8, 0))
        assert (gpu.fp8 > 0) == (gpu.arch >= (8, 9))
    assert gpu.matmul_rate("float16") > gpu.matmul_rate("float32")
    assert gpu.matmul_rate("float32", tf32=True) >= gpu.matmul_rate("float32")
    assert all(0 < share <= 1 for share in (gpu.efficiency, gpu.efficiency_fp32, gpu.bandwidth_efficiency))


def test_gpu_round_trips_through_json():
    gpu = find_gpu("h200")
    assert TypeAdapter(GPU).validate_json(json.dumps(dataclasses.asdict(gpu))) == gpu
    assert hash(gpu) == hash(find_gpu("H200"))


def device(name, arch, sms, gib):
    return SimpleNamespace(
        name=name, major=arch[0], minor=arch[1], multi_processor_count=sms, total_memory=int(gib * GIB)
    )


def test_device_in_the_table_keeps_its_own_memory():
    found = match_device(device("NVIDIA A100-SXM4-80GB", (8, 0), 108, 79.15))
    assert found == dataclasses.replace(find_gpu("a100-80gb"), memory=int(79.15 * GIB))


def test_device_outside_the_table_is_scaled_from_the_nearest():
    found = match_device(device("NVIDIA H100 of one's own", (9, 0), 130, 79.1))
    assert (found.name, found.sms) == ("NVIDIA H100 of one's own", 130)
    assert found.fp16 == pytest.approx(find_gpu("h100").fp16 * 130 / 132)
    assert match_device(device("NVIDIA A41", (8, 6), 83, 44.4)).fp16 == pytest.approx(
        find_gpu("rtx-3090").fp16 * 83 / 82
    )


def test_device_is_matched_with_a_gpu_of_its_vendor():
    """AMD's and NVIDIA's architecture versions overlap."""
    assert match_device(device("AMD Instinct MI308X", (9, 4), 80, 191.98)).fp16 == pytest.approx(
        find_gpu("mi300x").fp16 * 80 / 304
    )
    assert match_device(device("NVIDIA H100 of one's own", (9, 0), 100, 79.1)).fp8 > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_machine_without_a_gpu():
    assert current_gpu() is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_of_this_machine():
    found = current_gpu()
    assert found is not None
    assert found.memory == torch.cuda.get_device_properties(0).total_memory
