"""Three runs of a recipe in one launch: undisturbed, stopped by a signal to rank 1 only, and resumed:
`accelerate launch ... stopped_rank.py recipes/llm.py OUT FLAGS`. Each rank writes its exit code to OUT/code-RANK.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

from accelerate import PartialState
from transformers import Trainer

from ckpt_ft.errors import run

_step = Trainer.training_step


def _signalled(self: Trainer, *args: Any, **kwargs: Any) -> Any:
    if self.state.global_step == 1 and PartialState().process_index == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    return _step(self, *args, **kwargs)


if __name__ == "__main__":
    script, out, *flags = sys.argv[1:]
    sys.argv = [script, *flags]  # the report names it
    main = runpy.run_path(script)["main"]
    main([*flags, "--output_dir", f"{out}/whole"])
    Trainer.training_step = _signalled  # type: ignore[method-assign]
    try:
        run(lambda: main([*flags, "--output_dir", f"{out}/stopped"]))
    except SystemExit as stopped:
        Path(out, f"code-{PartialState().process_index}").write_text(str(stopped.code))
    Trainer.training_step = _step  # type: ignore[method-assign]
    main([*flags, "--output_dir", f"{out}/stopped", "--resume_from_checkpoint", "latest"])
