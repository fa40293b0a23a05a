"""What every test runs under: no network, one thread, caches of its own, and no GPU tests where there is no GPU."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from recipe_scripts import forget_process
from torch.utils._python_dispatch import _get_current_dispatch_mode


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--overwrite-golden", action="store_true", help="take what is printed now as what should be")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden(name, text)`: `text` is what golden/`name` beside the test holds (see --overwrite-golden)."""

    def check(name: str, text: str) -> None:
        path = request.path.parent / "golden" / name
        if request.config.getoption("--overwrite-golden"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert text == path.read_text(encoding="utf-8")

    return check


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "browser" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)


@pytest.fixture(autouse=True)
def _same_start() -> Iterator[None]:
    """One thread and one seed, so that a test's numbers do not depend on those before it; nor does its time."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    assert _get_current_dispatch_mode() is None, "every operator of the tests to come would pass through it"


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each run is a process of its own as far as accelerate knows, on one thread of the CPU."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    forget_process()
    yield
    forget_process()


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache that holds nothing yet, for tests of what is cached; the others share one."""
    monkeypatch.setenv("CKPT_FT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="session", autouse=True)
def _caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Samples, plans, tokenized data and compiled kernels of this run, shared by its workers, thrown away with it.

    Inductor's own cache does not tell kernels for other CPU settings (ATEN_CPU_CAPABILITY) apart.
    """
    root = tmp_path_factory.getbasetemp()
    root = root.parent if os.environ.get("PYTEST_XDIST_WORKER") else root
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(root / "cache"))  # other libraries' too
        patch.setenv("CKPT_FT_CACHE", str(root / "cache" / "ckpt_ft"))
        patch.setenv("HF_DATASETS_CACHE", str(root / "datasets"))
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(root / "inductor"))
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_collection_after_training() -> Iterator[None]:
    """Accelerate collects garbage after each `Trainer.train`, which takes half a second where so much is imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("accelerate.utils.memory.gc", SimpleNamespace(collect=lambda: 0))
        yield


@pytest.fixture(scope="module")
def quick_collections() -> Iterator[None]:
    """For files whose tests collect garbage often: Python's collector leaves out what was there before them."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def sample(_caches: None) -> tuple[Path, Path]:
    """The built-in language-model sample: its model directory and its jsonl file."""
    from ckpt_ft.training.samples.language import make_docstrings

    model, corpus = make_docstrings()
    return Path(model), Path(corpus)
