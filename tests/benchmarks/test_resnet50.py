"""The published ResNet-50 figures: peaks within 5 %, and the ratios of the largest batches."""

from __future__ import annotations

import pytest

from benchmarks.experiments import case_study


@pytest.mark.parametrize("policy", ["none", "stages:3+4", "stages", "full"])
def test_published_peaks(policy: str) -> None:
    trace = case_study.predicted(policy, 32)
    published = case_study.PUBLISHED[policy]
    assert trace.peak_allocated / 1e6 == pytest.approx(published.peak_mb, rel=0.05)
    assert 1000 * trace.seconds == pytest.approx(published.milliseconds, rel=0.2)


def test_published_peak_with_amp() -> None:
    assert case_study.predicted_amp().peak_allocated / 1e6 == pytest.approx(1630.90, rel=0.005)


@pytest.mark.slow
def test_largest_batches_have_the_published_ratios() -> None:
    """The case study has 177, 205 and at least 256 images."""

    def largest(policy: str) -> int:
        return case_study.largest_batch(
            lambda size: case_study.predicted(policy, size), case_study.CAPACITY, case_study.SEARCHED
        )

    none = largest("none")
    assert none == pytest.approx(177, rel=0.05)
    assert largest("stages:3+4") / none == pytest.approx(205 / 177, rel=0.05)
    assert largest("full") == 256


def test_search_finds_the_largest_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak of the step is known: 3 bytes per image and 100 bytes, plus up to 7 that are not linear."""

    class Trace:
        def __init__(self, size: int) -> None:
            self.size, self.peak_allocated = size, 100 + 3 * size

    monkeypatch.setattr(case_study, "fits", lambda trace, capacity: trace.peak_allocated + trace.size % 8 <= capacity)
    for capacity in (103, 200, 1000, 3000, 50_000):
        most = max((n for n in range(1, 400) if 100 + 3 * n + n % 8 <= capacity), default=0)
        found = case_study.largest_batch(Trace, capacity, 399)  # type: ignore[arg-type]
        assert found == most or abs(found - most) <= 8
        assert found == 0 or 100 + 3 * found + found % 8 <= capacity
