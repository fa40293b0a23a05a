"""The ResNet-50 case study with benchmarks/resnet50.py: four strategies, largest batches, a training loop with AMP."""

from __future__ import annotations

from pathlib import Path

import torch

from .common import Case, Figure, Section, predict


def resnet(images: Path, quick: bool) -> Section:
    """The four strategies, largest batches and AMP loop of the case study."""
    import resnet50 as study  # type: ignore[import-not-found]
    import vision  # type: ignore[import-not-found]

    section = Section("The ResNet-50 case study")
    source = "ResNet-50 case study, T4"
    section.text(
        "The table is from `benchmarks/resnet50.py`; `docs/vision.md` describes the assumed loop and the remaining",
        "errors.",
    )
    strategies = list(study.PUBLISHED.items())[: 1 if quick else None]
    batch = 2 if quick else study.BATCH
    rows = []
    for policy, known in strategies:
        trace = study.predicted(policy, study.plain_step(batch))
        peak, ms = trace.peak_allocated / 1e6, 1e3 * trace.seconds
        section.figures += [
            Figure(source, f"{known.name}: peak", f"{known.peak_mb:.2f}", peak, known.peak_mb),
            Figure(
                source, f"{known.name}: ms per iteration", f"{known.milliseconds:.2f}", ms, known.milliseconds, "ms"
            ),
        ]
        measured = study.measured(policy)
        seen = [f"{measured.allocated / 1e6:.0f}", f"{1e3 * measured.seconds:.0f}"] if measured else []
        rows.append(
            [
                f"`{policy}`",
                f"{known.peak_mb:.2f}",
                f"{peak:.2f}",
                section.figures[-2].error,
                f"{known.milliseconds:.1f}",
                f"{ms:.1f}",
                section.figures[-1].error,
                *seen,
            ]
        )
    cuda = ["MB, measured on CUDA", "ms, measured"] if torch.cuda.is_available() else []
    section.table(
        ["policy", "published MB", "predicted MB (T4)", "error", "published ms", "predicted ms", "error", *cuda], rows
    )
    for policy, known in strategies:
        if known.largest_batch and not quick:
            most = vision.largest_batch(
                lambda n, p=policy: study.predicted(p, study.plain_step(n)), study.CAPACITY, study.SEARCHED
            )
            capped = "the search's cap, as published" if most == study.SEARCHED == known.largest_batch else ""
            section.figures.append(
                Figure(
                    source,
                    f"{known.name}: largest batch",
                    str(known.largest_batch),
                    most,
                    known.largest_batch,
                    "",
                    note=capped,
                )
            )
    with torch.device("meta"):
        model = study.resnet50(classes=10)
    job = Case(lambda: model, study.amp_step, study.adamw)
    amp = predict(job, "stages:3+4", study.GPU).peak_allocated / 1e6
    section.figures.append(
        Figure(source, "training loop with AMP, aggressive: peak", f"{study.AMP_PEAK_MB:.2f}", amp, study.AMP_PEAK_MB)
    )
    return section
