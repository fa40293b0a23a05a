"""`python live_peak.py STEPS SCRIPT ARGS...`: runs a script on the CPU and prints the highest peak of its first steps.

As in a dry run, the first step counts only if there is no other, and a script without a seed draws the same numbers.
"""

from __future__ import annotations

import gc
import os
import sys

import torch
from torch import nn

from ckpt_ft.host.script import Question, Script, set_random_states
from ckpt_ft.host.training_loop import TrainingLoop, modules_alive, whole_model
from ckpt_ft.memory.record.tracker import Tracker

steps, script = int(sys.argv[1]), Script(sys.argv[2], tuple(sys.argv[3:]))
peaks: list[int] = []
tracker = Tracker()


def begins(model: nn.Module) -> None:
    gc.collect()
    gc.disable()
    modules = modules_alive()
    whole = whole_model(model, modules)
    own = set(whole.modules())
    tracker.__enter__()
    tracker.add_model(whole)
    tracker.add_beside(one for one in modules if one not in own)
    tracker.start_step()


def next_step(batches: object) -> None:
    peaks.append(tracker.trace("cpu").peak_allocated)
    if len(peaks) == steps:
        ended()
    gc.collect(1)
    tracker.start_step()


def ended() -> None:
    print("peak", max(peaks[1:] or peaks), flush=True)
    os._exit(0)


torch.set_num_threads(1)
loop = TrainingLoop(begins, next_step)
loop.watch()
set_random_states(Question(script, None).randomness)
script.run()
if loop.stepped:
    next_step(loop.batches)
ended()
