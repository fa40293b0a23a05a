"""The published ResNet-50 figures: peaks within 5 %, and the ratios of the largest batches."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def resnet50() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        spec = importlib.util.spec_from_file_location("benchmark_resnet50", ROOT / "benchmarks" / "resnet50.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        patch.setitem(__import__("sys").modules, "benchmark_resnet50", module)
        spec.loader.exec_module(module)
        yield module


@pytest.mark.parametrize("policy", ["none", "stages:3+4", "stages", "full"])
def test_published_peaks(resnet50: ModuleType, policy: str) -> None:
    trace = resnet50.predicted(policy, resnet50.plain_step(32))
    published = resnet50.PUBLISHED[policy]
    assert trace.peak_allocated / 1e6 == pytest.approx(published.peak_mb, rel=0.05)
    assert 1000 * trace.seconds == pytest.approx(published.milliseconds, rel=0.2)


def test_published_peak_with_amp(resnet50: ModuleType) -> None:
    import torch

    from ckpt_ft import apply_policy

    with torch.device("meta"):
        model = resnet50.resnet50(classes=10)
    apply_policy(model, "aggressive")
    peak = resnet50.trace(model, resnet50.amp_step, "t4", resnet50.adamw).peak_allocated
    assert peak / 1e6 == pytest.approx(1630.90, rel=0.005)


@pytest.mark.slow
def test_largest_batches_have_the_published_ratios(resnet50: ModuleType) -> None:
    """The case study has 177, 205 and at least 256 images."""

    def largest(policy: str) -> int:
        found: int = resnet50.largest_batch(
            lambda size: resnet50.predicted(policy, resnet50.plain_step(size)), resnet50.CAPACITY, resnet50.SEARCHED
        )
        return found

    none = largest("none")
    assert none == pytest.approx(177, rel=0.05)
    assert largest("stages:3+4") / none == pytest.approx(205 / 177, rel=0.05)
    assert largest("full") == 256


def test_search_finds_the_largest_batch(resnet50: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak of the step is known: 3 bytes per image and 100 bytes, plus up to 7 that are not linear."""
    import vision  # type: ignore[import-not-found]

    class Trace:
        def __init__(self, size: int) -> None:
            self.size, self.peak_allocated = size, 100 + 3 * size

    monkeypatch.setattr(vision, "fits", lambda trace, capacity: trace.peak_allocated + trace.size % 8 <= capacity)
    for capacity in (103, 200, 1000, 3000, 50_000):
        most = max((n for n in range(1, 400) if 100 + 3 * n + n % 8 <= capacity), default=0)
        found = vision.largest_batch(Trace, capacity, 399)
        assert found == most or abs(found - most) <= 8
        assert found == 0 or 100 + 3 * found + found % 8 <= capacity
