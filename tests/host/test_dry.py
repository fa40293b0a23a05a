"""`ckpt-ft dry-run` against the same scripts, run live on the CPU."""

from __future__ import annotations

import errno
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import forked_python
import pytest
from typer.testing import CliRunner

from ckpt_ft.cli.dry_run import several
from ckpt_ft.cli.main import app
from ckpt_ft.errors import UserError
from ckpt_ft.host.generation import generate_longest
from ckpt_ft.host.script import AS_IT_IS, Answer, Question, Script, ask
from ckpt_ft.host.weightless import load_no_weights
from ckpt_ft.memory.gpus import find_gpu
from ckpt_ft.planning.estimate import estimate
from ckpt_ft.spec.command import recipe_command
from ckpt_ft.spec.training_spec import TrainingSpec

HERE = Path(__file__).parent
SCRIPTS = HERE / "scripts"


def dry(
    name: str, *args: str, device: str = "", policies: tuple[str, ...] = (AS_IT_IS,), computes: bool = False
) -> list[Answer]:
    """The answers of a dry run, by default without numbers on the CPU, too."""
    gpu = find_gpu(device) if device else None
    return ask(Question(Script(str(SCRIPTS / name), args), gpu, policies, computes=computes))


@pytest.fixture(autouse=True)
def _forked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripts' processes do not import the libraries again, except in tests of the command and of torch.jit."""
    if request.node.name not in ("test_the_command", "test_what_torch_jit_compiles"):
        monkeypatch.setattr(subprocess, "Popen", forked_python.Popen)


def live(name: str, *args: str, steps: int = 3) -> int:
    """The highest peak of a script's steps, in bytes."""
    ran = forked_python.run(
        [sys.executable, str(HERE / "live_peak.py"), str(steps), str(SCRIPTS / name), *args],
        {**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert ran.returncode == 0, ran.stderr
    return int(ran.stdout.split("peak ")[1])


def written(folder: Path, text: str) -> str:
    """The path of a script that has this text."""
    script = folder / "script.py"
    script.write_text(text)
    return str(script)


def peak(answer: Answer) -> int:
    assert answer.trace is not None, answer.error
    return answer.trace.peak_allocated


def test_a_plain_loop_and_its_files(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("kept")
    (answer,) = dry("plain.py", str(log))
    assert peak(answer) == pytest.approx(live("plain.py", str(tmp_path / "other")), rel=0.002)
    assert (answer.model, answer.batches) == ("Sequential", [{"input 0": (16, 64)}])
    assert log.read_text() == "kept"
    assert not Path(f"{log}.pt").exists()


@pytest.mark.parametrize(("device", "computes"), [("", True), ("", False), ("t4", False)])
def test_a_script_that_saves_after_each_step(tmp_path: Path, device: str, computes: bool) -> None:
    """The step after the first save is looked at, too; files that torch writes are taken back."""
    script = written(
        tmp_path,
        "import sys, torch\ndevice = 'cuda' if torch.cuda.is_available() else 'cpu'\n"
        "model = torch.nn.Linear(100, 100).to(device)\noptimizer = torch.optim.Adam(model.parameters())\n"
        "for _ in range(4):\n    torch.save({'model': model.state_dict()}, sys.argv[1])\n"
        "    torch.cuda.random.get_rng_state_all() if torch.cuda.is_available() else None\n"
        "    model(torch.ones(4096, 100, device=device)).square().sum().backward()\n"
        "    optimizer.step()\n    optimizer.zero_grad()\n",
    )
    saved = tmp_path / "saved.pt"
    saved.write_text("kept")
    (answer,) = dry(script, str(saved), device=device, computes=computes)
    assert answer.step == 2, answer.error
    assert device or peak(answer) == live(script, str(tmp_path / "live.pt"))
    assert saved.read_text() == "kept"


def test_a_trainer_under_three_policies(tmp_path: Path) -> None:
    plain, full, pointwise = dry("trainer.py", str(tmp_path / "out"), policies=(AS_IT_IS, "full", "pointwise"))
    assert peak(plain) == pytest.approx(live("trainer.py", str(tmp_path / "live")), rel=0.002)
    assert peak(full) < peak(pointwise) < peak(plain)
    assert len(plain.batches) == 2  # micro-batches
    assert not (tmp_path / "out").exists()


def test_a_model_whose_parts_are_called_one_by_one(tmp_path: Path) -> None:
    """As in a LightningModule, whose own forward is never called: a policy covers all parts."""
    script = written(
        tmp_path,
        "import torch\nfrom torch import nn\n"
        "block = lambda: nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU())\n"
        "model = nn.Module()\nmodel.encoder = nn.Linear(8, 64)\n"
        "model.decoder = nn.Sequential(*[block() for _ in range(6)])\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "for _ in range(3):\n"
        "    model.decoder(model.encoder(torch.ones(2048, 8))).sum().backward()\n"
        "    optimizer.step()\n    optimizer.zero_grad()\n",
    )
    plain, full = dry(script, policies=(AS_IT_IS, "full"))
    assert plain.model == "Module"
    assert peak(full) < 0.6 * peak(plain)


def test_an_evaluation_in_inference_mode_comes_first(tmp_path: Path) -> None:
    script = written(
        tmp_path,
        "import torch\nmodel = torch.nn.Linear(64, 64).to('cuda' if torch.cuda.is_available() else 'cpu')\n"
        "rows, made = torch.randn(512, 64).to(model.weight.device), []\n"
        "with torch.inference_mode():\n    made.append(model(rows).argmax(-1).cpu())\n"
        "    assert not torch.is_grad_enabled()\n"
        "    with torch.inference_mode(False):\n        assert torch.is_grad_enabled()\n"
        "optimizer = torch.optim.AdamW(model.parameters())\n"
        "for _ in range(3):\n    model(rows).sum().backward()\n    optimizer.step()\n    optimizer.zero_grad()\n",
    )
    (answer,) = dry(script)
    assert peak(answer) == live(script)
    (answer,) = dry(script, device="t4")
    assert peak(answer) > 8 << 20  # with a workspace of cuBLAS


def test_optimizers_that_step_in_hooks_of_their_weights(tmp_path: Path) -> None:
    """Each gradient is freed in backward. On the CPU a weight becomes a fake after it has got its hook."""
    script = written(
        tmp_path,
        "import torch\nmodel = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)])\n"
        "optimizers = {weight: torch.optim.AdamW([weight]) for weight in model.parameters()}\n"
        "def step(weight):\n    optimizers[weight].step()\n    optimizers[weight].zero_grad()\n"
        "for weight in model.parameters():\n    weight.register_post_accumulate_grad_hook(step)\n"
        "for _ in range(3):\n    model(torch.ones(16, 256)).sum().backward()\n",
    )
    (answer,) = dry(script)
    assert peak(answer) == live(script)


def test_sparse_gradients_keep_their_rows(tmp_path: Path) -> None:
    """SparseAdam makes tensors of the rows that the step has read, which fakes of sparse tensors forget."""
    script = written(
        tmp_path,
        "import torch\nmodel = torch.nn.Embedding(5000, 64, sparse=True)\n"
        "optimizer = torch.optim.SparseAdam(model.parameters())\n"
        "for _ in range(3):\n"
        "    model(torch.randperm(5000)[:2048]).square().mean().backward()\n"
        "    optimizer.step()\n    optimizer.zero_grad()\n",
    )
    (answer,) = dry(script)
    assert peak(answer) == live(script)
    assert "the indices of a sparse tensor are taken to be all different: the worst case" in answer.trace.notes


@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_the_sparse_matrix_of_a_graph(tmp_path: Path, layout: str) -> None:
    script = written(
        tmp_path,
        "import torch\nplaces = torch.randint(0, 4000, (2, 1 << 20))\n"
        "values = torch.ones(1 << 20)\n"
        "graph = torch.sparse_coo_tensor(places, values, (4000, 4000), check_invariants=True).coalesce()\n"
        f"graph = graph.to_sparse_{layout}() if {layout != 'coo'} else graph\n"
        "where = 'cuda' if torch.cuda.is_available() else 'cpu'\n"
        "model, graph = torch.nn.Linear(8, 8).to(where), graph.to(where)\n"
        "assert graph.device.type == where\n"
        "rows, optimizer = torch.ones(4000, 8).to(where), torch.optim.Adam(model.parameters())\n"
        "for _ in range(3):\n"
        "    torch.sparse.mm(graph, model(rows)).sum().backward()\n"
        "    optimizer.step()\n    optimizer.zero_grad()\n",
    )
    (answer,) = dry(script)
    assert peak(answer) == live(script)
    (on_card,) = dry(script, device="t4")
    assert 8 << 20 < peak(on_card) - peak(answer) < 20 << 20  # workspaces of cuBLAS


def test_torch_without_a_seed(tmp_path: Path) -> None:
    """Each process begins elsewhere; a dry run, at the same place each time."""
    script = written(
        tmp_path,
        "import torch\nmodel = torch.nn.Linear(64, 64)\noptimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "rows = torch.ones(int(torch.randint(16, 1 << 16, ())), 64)\n"
        "for _ in range(3):\n    model(rows).sum().backward()\n    optimizer.step()\n",
    )
    (answer,) = dry(script)
    assert peak(answer) == live(script)


def test_what_a_script_reads_for_its_plots_is_not_of_the_step(tmp_path: Path) -> None:
    script = written(
        tmp_path,
        "import torch\nmodel = torch.nn.Linear(64, 64)\noptimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "rows = torch.ones(4096, 64)\n"
        "for _ in range(3):\n"
        "    out = model(rows)\n    out.square().mean().backward()\n"
        "    optimizer.step()\n    optimizer.zero_grad()\n    plotted = out.argmax(1).numpy()\n",
    )
    (answer,) = dry(script)
    assert peak(answer) == live(script)


def test_a_graph_for_tensorboard_is_not_drawn(tmp_path: Path) -> None:
    script = written(
        tmp_path,
        "import torch\nfrom torch.utils.tensorboard import SummaryWriter\n"
        "where = 'cuda' if torch.cuda.is_available() else 'cpu'\nmodel = torch.nn.Linear(64, 64).to(where)\n"
        f"writer = SummaryWriter({str(tmp_path / 'log')!r})\nwriter.add_graph(model, torch.ones(2, 64).to(where))\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "for _ in range(3):\n"
        "    model(torch.ones(256, 64).to(where)).sum().backward()\n"
        "    optimizer.step()\n    writer.add_scalar('a', 1)\n",
    )
    for device in ("", "t4"):
        (answer,) = dry(script, device=device)
        assert peak(answer) > 2 * 256 * 64 * 4
    assert not (tmp_path / "log").exists()


def test_packed_rows_of_an_lstm(tmp_path: Path) -> None:
    """Their lengths are known, so that each step packs, the second one with the states of Adam."""
    script = written(
        tmp_path,
        "import torch\nfrom torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence\n"
        "model = torch.nn.LSTM(32, 64, 2, batch_first=True, bidirectional=True)\n"
        "optimizer = torch.optim.Adam(model.parameters())\n"
        "for _ in range(3):\n"
        "    x = torch.randn(16, 20, 32)\n"
        "    x = pack_padded_sequence(x, torch.arange(5, 21), batch_first=True, enforce_sorted=False)\n"
        "    pad_packed_sequence(model(x)[0], batch_first=True)[0].square().mean().backward()\n"
        "    optimizer.step()\n    optimizer.zero_grad()\n",
    )
    (answer,) = dry(script)
    assert peak(answer) == live(script)


def test_an_error_in_the_second_step_is_no_answer(tmp_path: Path) -> None:
    """A first step alone lacks the states of the optimizer."""
    script = written(
        tmp_path,
        "import torch\nmodel = torch.nn.Linear(64, 64)\noptimizer = torch.optim.Adam(model.parameters())\n"
        "for step in range(3):\n"
        "    if step:\n        raise RuntimeError('out of rows')\n"
        "    model(torch.ones(16, 64)).sum().backward()\n    optimizer.step()\n    optimizer.zero_grad()\n",
    )
    (answer,) = dry(script)
    assert answer.error.endswith("script.py: in step 2, line 6 raised RuntimeError: out of rows")


def test_a_recipe_on_a_card_is_what_estimate_says(sample: tuple[Path, Path], tmp_path: Path) -> None:
    """recipes/llm.py with the flags that its own command prints, on rows of full length."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": "word " * 400}) + "\n" for _ in range(16)))
    spec = TrainingSpec.of(str(sample[0]), batch_size=4, seq_length=128, mixed_precision="fp16", policy="full")
    _, _, recipe, *words = shlex.split(recipe_command(spec, "causal-lm"))
    words[words.index("DATASET")] = str(rows)
    script = Script(str(HERE.parents[1] / f"recipes/{recipe}.py"), (*words, "--output_dir", str(tmp_path / "out")))
    (answer,) = ask(Question(script, find_gpu("t4")))
    assert answer.batches[0]["input_ids"] == (4, 128), answer.error
    expected = estimate(spec.edit(device="t4"))
    assert peak(answer) == pytest.approx(expected.peak_allocated, rel=1e-3)
    assert answer.trace.peak_reserved == pytest.approx(expected.peak_reserved, rel=1e-3)


def test_weights_that_are_changed_by_hand() -> None:
    (answer,) = dry("by_hand.py")
    assert peak(answer) == pytest.approx(live("by_hand.py"), rel=0.01)


def test_a_script_that_sees_a_card(tmp_path: Path) -> None:
    """GradScaler and fp16 autocast: the halves of a T4 are in the step, and cuBLAS's workspace."""
    (answer,) = dry("plain.py", str(tmp_path / "log"), device="t4")
    assert answer.trace is not None, answer.error
    assert answer.trace.seconds is not None
    halves = [op for op in answer.trace.ops if op.dtype == "float16"]
    assert halves
    assert answer.trace.peak_reserved % (2 << 20) == 0


def test_classes_of_tensors_on_a_card(tmp_path: Path) -> None:
    """Older scripts name the device by the class of a tensor."""
    script = written(
        tmp_path,
        "import numpy\nimport torch\n"
        "make = torch.cuda.FloatTensor if torch.cuda.is_available() else torch.FloatTensor\n"
        "model = torch.nn.Linear(8, 1).cuda()\noptimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "for _ in range(3):\n"
        "    made, given = make(4, 8).fill_(1.0), torch.arange(32).view(4, 8).type(make) + make(numpy.zeros((4, 8)))\n"
        "    assert made.type() == given.type() == 'torch.cuda.FloatTensor', made.type()\n"
        "    assert given.type(torch.LongTensor).device.type == 'cpu'\n"
        "    model(made + given).sum().backward()\n"
        "    optimizer.step()\n",
    )
    (answer,) = ask(Question(Script(script), find_gpu("t4")))
    assert answer.trace is not None, answer.error
    assert answer.batches == [{"input 0": (4, 8)}]


def test_a_script_that_does_not_use_its_card(tmp_path: Path) -> None:
    script = written(
        tmp_path,
        "import torch\nmodel = torch.nn.Linear(2, 1)\noptimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "model(torch.zeros(1, 2))",
    )
    (answer,) = ask(Question(Script(script), find_gpu("t4")))
    assert "its model is on the CPU, though the script sees a card" in answer.error


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("print('no model here')", "ended without a training step"),
        ("raise SystemExit('give --data')", "ended without a training step (give --data)"),
        ("print('error: no such data')\nraise SystemExit(2)", "ended without a training step (error: no such data)"),
        ("import nowhere_to_be_found", "needs the package nowhere_to_be_found, which is not installed"),
        ("x = 1\nraise ValueError('bad data')", "line 2 raised ValueError: bad data"),
        (
            "import torch\nmodel = torch.nn.Linear(2, 1)\noptimizer = torch.optim.LBFGS(model.parameters())\n"
            "model(torch.zeros(1, 2))",
            "LBFGS decides by the loss how often it runs the model",
        ),
    ],
)
def test_refused_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    (answer,) = ask(Question(Script(written(tmp_path, text)), None))
    assert said in answer.error
    assert "\n" not in answer.error


def test_a_killed_dry_run_leaves_files_as_they_were(tmp_path: Path) -> None:
    log, script = tmp_path / "log", tmp_path / "script.py"
    log.write_text("kept")
    script.write_text(
        f"import os, signal\nos.makedirs({str(tmp_path / 'made' / 'inside')!r})\nopen({str(log)!r}, 'w').close()\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    with pytest.raises(UserError, match="ended with exit code -9 before a training step"):
        ask(Question(Script(str(script)), None))
    assert log.read_text() == "kept"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "script.py"]


def test_a_step_that_depends_on_values(tmp_path: Path) -> None:
    script = written(
        tmp_path,
        "import torch\n"
        "model = torch.nn.Linear(8, 8)\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "for _ in range(3):\n"
        "    out = model(torch.randn(4, 8))\n"
        "    out[torch.nonzero(out > 0)[:, 0]].sum().backward()\n"
        "    optimizer.step()\n",
    )
    (computed,) = dry(script, computes=True)
    assert peak(computed) == live(script)
    assert not computed.trace.notes
    (answer,) = dry(script)
    assert answer.trace is not None, answer.error
    assert "a mask whose size decides a shape is taken as full: the worst case" in answer.trace.notes
    assert peak(answer) > peak(computed)


def test_small_steps_on_the_cpu_are_computed(sample: tuple[Path, Path], tmp_path: Path) -> None:
    """Weights of a checkpoint that decide how many rows there are, and files that a step too large has written."""
    log = tmp_path / "log"
    script = written(
        tmp_path,
        "import sys, torch\nfrom transformers import AutoModelForCausalLM\n"
        f"model = AutoModelForCausalLM.from_pretrained({str(sample[0])!r}).train()\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "for _ in range(3):\n"
        "    logits = model(torch.arange(512).remainder(64).view(8, 64)).logits\n"
        "    logits[logits > 0].square().mean().backward()\n"
        "    optimizer.step()\n    optimizer.zero_grad()\n"
        f"    open({str(log)!r}, 'a').write('step')\n"
        "    large = torch.ones(8192, int(sys.argv[1]))\n    large.T @ large\n",
    )
    (computed,), (faked,) = dry(script, "8", computes=True), dry(script, "8")
    assert peak(computed) == live(script, "8") < peak(faked)
    log.unlink()
    (large,), (faked,) = dry(script, "2048", computes=True), dry(script, "2048")
    assert peak(large) == peak(faked)
    assert not log.exists()


def test_fakes_written_into_small_tensors_with_numbers(tmp_path: Path) -> None:
    """What a script makes by `torch.zeros` and fills with parts of outputs, and numbers that it collects."""
    script = written(
        tmp_path,
        "import torch\nmodel = torch.nn.Linear(64, 1)\noptimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "for _ in range(3):\n"
        "    scores, found = torch.zeros(4), []\n"
        "    for place in range(4):\n"
        "        scores[place] = model(torch.ones(64)).squeeze()\n"
        "        found.append([model(torch.ones(64)).detach()])\n"
        "    (scores.softmax(0).sum() + torch.tensor(found, dtype=torch.float).sum()).backward()\n"
        "    optimizer.step()\n    optimizer.zero_grad()\n",
    )
    (answer,) = dry(script)
    assert peak(answer) == live(script)


def test_the_command(tmp_path: Path) -> None:
    words = ["dry-run", "--device", "t4", "--json", str(SCRIPTS / "by_hand.py")]
    ran = CliRunner().invoke(app, words)
    assert ran.exit_code == 0, ran.output
    found = json.loads(ran.stdout)
    assert found["model"] == "by_hand.py: Linear"
    assert found["headroom"] > 10 << 30


def test_several_models_with_an_optimizer_each(tmp_path: Path) -> None:
    """The step that is the highest does not call the first model."""
    script = written(
        tmp_path,
        "import torch\nmodels = [torch.nn.Linear(64, width) for width in (8, 4096)]\n"
        "optimizers = [torch.optim.Adam(model.parameters()) for model in models]\n"
        "for _ in range(3):\n"
        "    for model, optimizer in zip(models, optimizers):\n"
        "        model(torch.ones(256, 64)).sum().backward()\n        optimizer.step()\n",
    )
    ran = CliRunner().invoke(app, ["dry-run", "--device", "cpu", "--json", script])
    assert ran.exit_code == 0, ran.output
    assert json.loads(ran.stdout)["peak_allocated"] > 4 * 4 * 64 * 4096


def test_packages_that_cannot_be_imported_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torchvision of another torch makes transformers fail at import; a plain script does not need either."""
    for package in ("transformers", "diffusers", "diffusers.models.modeling_utils"):
        monkeypatch.setitem(sys.modules, package, None)
    load_no_weights(lambda model: None)
    generate_longest(print)


def test_no_such_script() -> None:
    with pytest.raises(UserError, match="no such script"):
        dry("nowhere.py")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "which script?"),
        (["--polcy", "full", "plain.py"], "--polcy: no such option"),
        (["--policy", "fulll", __file__], "fulll"),
        (["--device", "t44", __file__], "t44"),
        (["-m", "nowhere.at_all"], "-m nowhere.at_all: Error while finding module"),
    ],
)
def test_refused_commands(words: list[str], said: str) -> None:
    ended = CliRunner().invoke(app, ["dry-run", *words])
    assert isinstance(ended.exception, UserError)
    with pytest.raises(UserError, match=said):
        raise ended.exception


@pytest.mark.parametrize(
    ("given", "policies"),
    [
        (["none,full,pointwise"], ["none", "full", "pointwise"]),
        (["full,head"], ["full,head"]),
        (["none,save:attention,head"], ["none", "save:attention,head"]),
        (["full,pointwise"], ["full,pointwise"]),
        (["none", "save:attention,head"], ["none", "save:attention,head"]),
    ],
)
def test_several_policies(given: list[str], policies: list[str]) -> None:
    assert list(several(given)) == policies


@pytest.mark.parametrize("device", ["", "t4"])
def test_layers_whose_sizes_are_found_by_a_first_batch(tmp_path: Path, device: str) -> None:
    script = written(
        tmp_path,
        "import torch\nfrom torch import nn\nwhere = 'cuda' if torch.cuda.is_available() else 'cpu'\n"
        "model = nn.Sequential(nn.LazyConv2d(8, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(10)).to(where)\n"
        "model(torch.randn(2, 3, 8, 8, device=where))\nassert model[-1].weight.device.type == where\n"
        "optimizer = torch.optim.Adam(model.parameters())\n"
        "for _ in range(3):\n"
        "    model(torch.randn(64, 3, 8, 8, device=where)).square().mean().backward()\n"
        "    optimizer.step()\n    optimizer.zero_grad()\n",
    )
    (answer,) = dry(script, device=device)
    if device:
        assert peak(answer) == 9116672  # with a workspace of cuBLAS
    else:
        assert peak(answer) == live(script)


def test_the_device_of_a_context(tmp_path: Path) -> None:
    script = written(
        tmp_path,
        "import torch\nwhere = 'cuda' if torch.cuda.is_available() else 'cpu'\n"
        "with torch.device(where):\n"
        "    made = [torch.tensor([1.0]), torch.as_tensor([1.0]), torch.ones(2), torch.as_tensor(torch.ones(2))]\n"
        "with torch.device('meta'):\n    made_on_meta = torch.tensor([1.0])\nassert made_on_meta.is_meta\n"
        "torch.set_default_device(where)\n"
        "number = 0 if where == 'cuda' else 'cpu'\n"
        "made += [torch.tensor([1.0]), torch.tensor([1.0], device=number), torch.zeros(2, device=number)]\n"
        "made += [torch.nn.Linear(2, 2).to(number).weight, torch.ones(2, device='cpu').to(number)]\n"
        "assert {one.device.type for one in made} == {where}\n"
        "model = torch.nn.DataParallel(torch.nn.Linear(64, 64))\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "for _ in range(3):\n    model(torch.ones(512, 64, device='cpu')).sum().backward()\n    optimizer.step()\n",
    )
    for device in ("", "t4"):
        (answer,) = dry(script, device=device)
        assert peak(answer) > 512 * 64 * 4


def test_what_torch_jit_compiles(tmp_path: Path) -> None:
    """On the CPU it is compiled, as in a live run; for a card its ops are counted one by one."""
    script = written(
        tmp_path,
        "import torch, torch.distributed.optim\n"  # which compiles code that calls torch.tensor
        "@torch.jit.script\ndef gelu(x: torch.Tensor) -> torch.Tensor:\n"
        "    return x * 0.5 * (1.0 + torch.tanh(0.79788 * (x + 0.044715 * x * x * x)))\n"
        "class Model(torch.jit.ScriptModule):\n"
        "    def __init__(self):\n        super().__init__()\n        self.layer = torch.nn.Linear(64, 256)\n"
        "    @torch.jit.script_method\n    def forward(self, x):\n        return torch.relu(self.layer(x)) * 2\n"
        "model = Model().to('cuda' if torch.cuda.is_available() else 'cpu')\n"
        "optimizer = torch.optim.AdamW(model.parameters())\n"
        "for _ in range(4):\n"
        "    gelu(model(torch.ones(512, 64).to(model.layer.weight.device))).square().mean().backward()\n"
        "    optimizer.step()\n    optimizer.zero_grad()\n",
    )
    (answer,) = dry(script, computes=True)
    assert peak(answer) == live(script)
    ran = CliRunner().invoke(app, ["dry-run", "--device", "t4", "--json", script])
    assert ran.exit_code == 0, ran.output
    assert "torch.jit is left out: what it fuses is counted op by op" in json.loads(ran.stdout)["notes"]


FILES_OF_A_RUN = """
import os, shutil, torch
from pathlib import Path

model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
torch.save(model.state_dict(), "weights.pt")
Path("log.txt").open("a").write("more")
os.rename("notes.txt", "notes.bak")
Path("notes.bak").write_text("changed")
Path("notes.txt").write_text("new")
os.remove("old.txt")
shutil.rmtree("out")
os.makedirs("out/new")
Path("out/file").write_text("changed")
for number in range(2):
    Path("part").write_text(str(number))
    os.replace("part", "state.txt")
os.remove("latest")
os.symlink("out", "latest")
os.rename("folder", "moved")
Path("moved/in").write_text("changed")
os.rmdir("empty")
shutil.move("one/file", "two")
os.link("two", "second")
Path("second").write_text("changed")
os.truncate("cut.txt", 1)
"""

STEPS = "for step in range(2):\n    model(torch.ones(4, 8)).sum().backward()\n    optimizer.step()\n"


@pytest.mark.parametrize(
    ("end", "linked"), [(STEPS, True), (STEPS, False), ("1 / 0", True)], ids=["", "copied", "failed"]
)
def test_files_that_a_script_writes_moves_or_removes_are_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, linked: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "log"))  # a cache, which log.txt is not in
    if not linked:
        link = os.link

        def within(path: str, other: str, **given: bool) -> None:
            if "kept-" in str(other):
                raise OSError(errno.EXDEV, "another file system")
            link(path, other, **given)

        monkeypatch.setattr(os, "link", within)
    for folder in ("out/deep", "folder", "empty", "one"):
        (tmp_path / folder).mkdir(parents=True)
    for name in (
        "weights.pt", "log.txt", "notes.txt", "old.txt", "out/file", "out/deep/file", "state.txt", "folder/in",
        "one/file", "cut.txt",
    ):  # fmt: skip
        (tmp_path / name).write_text(f"precious {name}")
    (tmp_path / "latest").symlink_to("log.txt")
    script = written(tmp_path, FILES_OF_A_RUN + end)

    def there() -> dict[Path, str]:
        return {
            path: os.readlink(path) if path.is_symlink() else path.read_text() if path.is_file() else ""
            for path in tmp_path.rglob("*")
        }

    before = there()
    (answer,) = dry(script)
    assert (answer.trace is None) == (end == "1 / 0"), answer.error
    assert there() == before
