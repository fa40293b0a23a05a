"""The published ResNet-50 figures: peaks within 5 %, and the ratios of the largest batches."""

from __future__ import annotations

import pytest

from benchmarks.experiments import case_study, common


@pytest.mark.parametrize("policy", ["none", "stages:3+4", "stages", "full"])
def test_published_peaks(policy: str) -> None:
    trace = case_study.predicted(policy, 32)
    _, megabytes, milliseconds, _ = common.PUBLISHED["resnet"][policy]
    assert trace.peak_allocated / 1e6 == pytest.approx(megabytes, rel=0.05)
    assert 1000 * trace.seconds == pytest.approx(milliseconds, rel=0.2)


def test_published_peak_with_amp() -> None:
    assert case_study.predicted_amp().peak_allocated / 1e6 == pytest.approx(1630.90, rel=0.005)


@pytest.mark.slow
def test_largest_batches_have_the_published_ratios() -> None:
    """The case study has 177, 205 and at least 256 images."""

    none = case_study.largest_batch("none")
    assert none == pytest.approx(177, rel=0.05)
    assert case_study.largest_batch("stages:3+4") / none == pytest.approx(205 / 177, rel=0.05)
    assert case_study.largest_batch("full") == 256
