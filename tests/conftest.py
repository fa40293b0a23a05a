"""Settings of all tests: no network, one thread, separate caches, and no GPU tests without a GPU."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background processes, and theirs, ignore it
gc.disable()  # while everything is imported, where each collection takes a third of a second
# ruff: noqa: E402

import pytest
import torch
from recipe_scripts import forget_process
from torch.utils._python_dispatch import _get_current_dispatch_mode

# After a FakeTensorMode, the first backward of a CUDA build starts a thread, and forked ranks cannot run a backward.
torch.zeros((), requires_grad=True).backward()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--overwrite-golden", action="store_true", help="write what is printed as the expected output")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden(name, text)` asserts that the file golden/`name` beside the test has `text` (see --overwrite-golden)."""

    def check(name: str, text: str) -> None:
        path = request.path.parent / "golden" / name
        if request.config.getoption("--overwrite-golden"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert text == path.read_text(encoding="utf-8")

    return check


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name != "test_compat.py")  # it names why others will fail
    for item in items:
        if "browser" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)
    if not torch.cuda.is_available():
        if find_spec("optimi"):
            import optimi

            optimi.utils.HAS_TRITON = False  # with Triton, it takes kernels for a GPU on a CPU, too
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)


def pytest_collection_finish() -> None:
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _quick_collections() -> None:
    """Python's collector, which traces and tests call often, skips objects that exist before the tests of a file."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _fixed_start() -> Iterator[None]:
    """One thread and one seed, so that numbers and time of a test do not depend on earlier tests."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    assert _get_current_dispatch_mode() is None, "every operator of the tests to come would pass through it"


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes accelerate treat each run as a new process on one CPU thread."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    forget_process()
    yield
    forget_process()


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, for tests of caching; other tests share one."""
    monkeypatch.setenv("CKPT_FT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="session", autouse=True)
def _caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Samples, plans, tokenized data and compiled kernels of this test run, shared by its workers and deleted
    afterwards.

    Inductor's own cache does not distinguish kernels for other CPU settings (ATEN_CPU_CAPABILITY).
    """
    root = tmp_path_factory.getbasetemp()
    root = root.parent if os.environ.get("PYTEST_XDIST_WORKER") else root
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(root / "cache"))  # other libraries' caches too
        patch.setenv("CKPT_FT_CACHE", str(root / "cache" / "ckpt_ft"))
        patch.setenv("HF_DATASETS_CACHE", str(root / "datasets"))
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(root / "inductor"))
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_collection_after_training() -> Iterator[None]:
    """accelerate collects garbage after each `Trainer.train`, which takes half a second with this many imports."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("accelerate.utils.memory.gc", SimpleNamespace(collect=lambda: 0))
        yield


@pytest.fixture(scope="session")
def sample(_caches: None) -> tuple[Path, Path]:
    """The built-in sample for language models: its model directory and its jsonl file."""
    from ckpt_ft.training.samples.language import make_reference

    model, corpus = make_reference()
    return Path(model), Path(corpus)
