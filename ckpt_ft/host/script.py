"""A person's training script, the question that `ckpt-ft dry-run` asks about it, and the answers.

The question is answered by a process of its own (dry.py). This file imports no torch, so that process starts at once.
"""

from __future__ import annotations

import os
import pickle
import random
import runpy
import shlex
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy

from ckpt_ft.errors import UserError, one_line
from ckpt_ft.memory.gpus import GPU
from ckpt_ft.spec.launch import Launch

from .kept_files import KEPT, put_back

if TYPE_CHECKING:
    from ckpt_ft.memory.record.trace import StepTrace

RandomStates = tuple[Any, Any, Any]  # of Python, NumPy and torch
AS_IT_IS = ""  # the policy of a script that is left as it is
OTHERWISE = ("pointwise", "save:attention", "full", "full,head", "full,head,offload")
OUTPUT = "output"  # the file of what the script prints
_HERE = Path(__file__).parents[2]


@dataclass(frozen=True)
class Script:
    """A script as `python` runs it: a file, or with `is_module` a module as after `python -m`."""

    name: str
    args: tuple[str, ...] = ()
    is_module: bool = False

    @classmethod
    def of(cls, words: Sequence[str], module: str) -> Script:
        """The script of a command line: its name and arguments, or with a `module` the arguments alone.

        Raises:
            UserError: there is none, or an unknown option stands in its place.
        """
        if module:
            return cls(module, tuple(words), True)
        if not words:
            raise UserError("which script? ckpt-ft dry-run or run [OPTIONS] train.py ARGS..., or -m MODULE ARGS...")
        if words[0].startswith("-"):
            raise UserError(f"{words[0]}: no such option; --help lists them, and the script's own follow its name")
        return cls(words[0], tuple(words[1:]))

    def check(self) -> None:
        """Raises UserError if there is no such file, or Python cannot read it."""
        if self.is_module:
            return
        if not Path(self.name).is_file():
            what = "a folder" if Path(self.name).is_dir() else "no such script"
            raise UserError(f"{self.name}: {what}; give a Python file, or -m and a module, then its arguments")
        try:
            compile(Path(self.name).read_bytes(), self.name, "exec", dont_inherit=True)
        except SyntaxError as error:
            where = "" if error.lineno is None else f" in line {error.lineno}"
            raise UserError(f"{self.name}: no Python{where}: {error.msg}") from error
        except (OSError, ValueError) as error:
            raise UserError(f"{self.name}: cannot be read ({one_line(error)})") from error

    @property
    def words(self) -> list[str]:
        """The words of the command line, as after `python`."""
        return [*(["-m"] if self.is_module else []), self.name, *self.args]

    def run(self) -> None:
        """Run the script as `__main__`."""
        if self.is_module:
            sys.path[0:0] = [os.getcwd()]
            sys.argv = [self.name, *self.args]
            try:
                runpy.run_module(self.name, run_name="__main__", alter_sys=True)
            except ImportError as error:
                if "runpy" in traceback.extract_tb(error.__traceback__)[-1].filename:  # and not in the module
                    raise UserError(f"-m {self.name}: {one_line(error)}") from error
                raise
            return
        sys.path[0:0] = [str(Path(self.name).resolve().parent)]
        sys.argv = [self.name, *self.args]
        runpy.run_path(self.name, run_name="__main__")


def random_states() -> RandomStates:
    """The states of the random numbers of a process's host: without a seed, other ones in each process."""
    import torch

    return random.getstate(), numpy.random.get_state(), torch.get_rng_state().numpy()


def set_random_states(states: RandomStates | None) -> None:
    """Draw from here on what a process draws whose `random_states` these were; if None, the numbers of seed 0."""
    import torch

    if states is None:
        random.seed(0)
        numpy.random.seed(0)
        torch.manual_seed(0)
        return
    of_python, of_numpy, of_torch = states
    random.setstate(of_python)
    numpy.random.set_state(of_numpy)
    torch.set_rng_state(torch.from_numpy(of_torch))


@dataclass(frozen=True)
class Answer:
    """What one policy gives.

    Attributes:
        model: the class of the model that the script trains.
        trace: of the step with the highest peak; None if there is an `error`.
        step, steps: the number of that step, and how many were looked at.
        batches: for each micro-batch of that step, the shapes of the tensors that the model was given.
    """

    policy: str
    model: str = ""
    trace: StepTrace | None = None
    step: int = 0
    steps: int = 0
    batches: list[dict[str, tuple[int, ...]]] = field(default_factory=list)
    error: str = ""


@dataclass(frozen=True)
class Question:
    """A script, the card it shall see (None: the CPU), the policies to apply and how many steps to look at.

    capacity: bytes; if the first policy's step reserves more, `otherwise` are asked for, too.
    longest: give the script the longest rows of its dataset first.
    randomness: where a script that sets no seed begins to draw; by default the same in each dry run.
    launch: the script is one rank of several, started by `accelerate launch` with the options `launcher`.
    computes: compute steps with their numbers if they are small and on the CPU; otherwise they have none.
    """

    script: Script
    gpu: GPU | None
    policies: tuple[str, ...] = (AS_IT_IS,)
    steps: int = 3
    capacity: int | None = None
    otherwise: tuple[str, ...] = ()
    longest: bool = False
    randomness: RandomStates | None = None
    launch: Launch | None = None
    launcher: tuple[str, ...] = ()
    computes: bool = True


def ask(question: Question) -> list[Answer]:
    """Run the script of `question` in a process of its own.

    Raises:
        UserError: the script ends before a training step. The message has its last words.
    """
    question.script.check()
    with tempfile.TemporaryDirectory(prefix="ckpt_ft-") as folder:
        asked, output = Path(folder, "question"), Path(folder, OUTPUT)
        asked.write_bytes(pickle.dumps(question))
        start = f"import sys; sys.path.append({str(_HERE)!r}); from ckpt_ft.host.dry import main; main({str(asked)!r})"
        environment = {
            "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": "",
            "WANDB_MODE": "disabled", "COMET_MODE": "DISABLED", "CLEARML_OFFLINE_MODE": "1",
            "TRACKIO_MODE": "disabled",
        }  # fmt: skip
        if question.gpu is not None:
            environment["PYTORCH_JIT"] = "0"  # what it compiles asks fakes for their device past us
        with output.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", start], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env={**os.environ, **environment},
            )  # fmt: skip
            try:
                import ckpt_ft.planning.estimate  # noqa: F401 (meanwhile: what reads the answers)

                code = process.wait()
            except BaseException:
                process.terminate()
                process.wait()
                raise
            finally:
                for left in Path(folder).glob(f"{KEPT}*"):  # of a process that was killed
                    put_back(left)
        answers: list[Answer] = [pickle.loads(path.read_bytes()) for path in sorted(Path(folder).glob("answer-*"))]
        if not answers or os.environ.get("CKPT_FT_TRACEBACK") == "1":
            sys.stderr.write(output.read_text(errors="replace"))
    if not answers:
        raise UserError(f"{question.script.name}: its process ended with exit code {code} before a training step")
    return answers


def run_command(script: Script, policy: str, launcher: Sequence[str] = ()) -> str:
    """The command that runs a script with a policy, on several processes with options of `accelerate launch`."""
    start = ["accelerate", "launch", "-q", *launcher, "-m", "ckpt_ft.run"] if launcher else ["ckpt-ft", "run"]
    return shlex.join([*start, *(["--policy", policy] if policy else []), *script.words])
