"""`ckpt-ft app`: the questions of the command line in a browser, for people who have installed nothing.

A visitor's words become a `ckpt-ft` command, which runs in a process of its own, in an empty directory, with limits on
its time and memory, and without the server's tokens. Words choose among our commands and flags (`words.py`) and never
become an option or a path. The command reads the model's configuration, never its code or weights.
"""

from __future__ import annotations

import html
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from ckpt_ft.errors import UserError

from .words import FILES, hear

EXAMPLES = (
    "Qwen2.5-0.5B lora rtx-4090",
    "llama 8b qlora 24gb",
    "bert-base-uncased text classification t4",
    "sdxl lora 12gb",
    "longest context qwen3-0.6b 3060",
    "which policy gpt2 t4",
    "which gpu for qwen3 8b",
    "what can I train with 24 GB of VRAM?",
)
MOST = {"seq_length": 131_072, "batch_size": 64, "resolution": 4096, "num_labels": 100_000, "processes": 8, "cards": 8}
LIMIT = 300  # seconds of an answer
_LONGEST = 200  # characters of a question
_MEMORY = 12 * 2**30  # bytes of address space of each process that answers
_REMEMBERED = 64  # answers; a page has some hundred KB
_VISITS, _WINDOW = 12, 300.0  # questions of a visitor in that many seconds
_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH")  # of the server's owner
_WORD = re.compile(r"[A-Za-z0-9][\w.:'-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)  # one with a slash is a name on the Hub
_WITH_PAGE = ("estimate", "plan", "where")
_COMMAND = re.compile(r"(?:[A-Z_]+=\S+ )*(?:ckpt-ft recipe|accelerate launch) .+")
_VERDICT = re.compile(r"(fits|does not fit|pick:|error:|[\w-]+: the largest that trains)")


def line_of(asked: str) -> list[str]:
    """Returns the words after `ckpt-ft` that answer what a visitor types.

    Raises:
        UserError: a word could be an option or a file, a number is too large, or something is not understood.
    """
    asked = re.sub(r"(?<=\d),(?=\d{3}\b)", "", asked)  # 8,192 tokens
    words = re.sub(r"[?,]", " ", asked).split()
    if not words or len(asked) > _LONGEST:
        raise UserError(f"name a model, a card and a method in at most {_LONGEST} characters: {EXAMPLES[0]}")
    for word in words:
        if not _WORD.fullmatch(word) or word.endswith(FILES):
            raise UserError(f"'{word[:60]}': ask in plain words, with the name of a model on the Hub, not of a file")
    heard = hear(words, files=False)
    if unknown := (*heard.rest, *heard.ignored):
        raise UserError(f"not understood: {' '.join(unknown)}; leave it out")
    several = re.match(r"(\d+)x ", str(heard.flags.get("device")))
    asked_for = {**heard.flags, "cards": several[1] if several else 1}
    for name, most in MOST.items():
        if not 1 <= int(asked_for.get(name, 1)) <= most:
            raise UserError(f"{name.replace('_', ' ')} {asked_for[name]}: give 1 to {most}")
    command = heard.command or ("estimate" if heard.model else "where")
    return [command, *([heard.model] if heard.model else []), *heard.options()]


@dataclass(frozen=True)
class Answer:
    """What the command printed, and its page; "" if it makes none."""

    text: str
    page: str = ""

    @property
    def verdict(self) -> str:
        """The line that answers the question."""
        lines = self.text.splitlines() or [""]
        return next((line for line in lines if _VERDICT.match(line)), lines[0])

    @property
    def commands(self) -> str:
        """The commands that train so, the first one first."""
        return "\n\n".join(_COMMAND.findall(self.text))


@dataclass
class Visitors:
    """Answers questions, each once, and keeps a visitor from asking more than `_VISITS` in `_WINDOW` seconds."""

    answers: dict[str, Answer] = field(default_factory=dict)
    visits: dict[str, deque[float]] = field(default_factory=dict)

    def answer(self, words: list[str], visitor: str) -> Iterator[str | Answer]:
        """What runs, about once a second, then the answer.

        Raises:
            UserError: too many questions, or the command's own line.
        """
        key = shlex.join(words)
        if key not in self.answers:
            self._count(visitor)
            for step in run(words):
                if isinstance(step, Answer):
                    self.answers[key] = step
                yield step
            while len(self.answers) > _REMEMBERED:
                del self.answers[next(iter(self.answers))]
        else:
            yield self.answers[key]

    def _count(self, visitor: str) -> None:
        now = time.monotonic()
        self.visits = {name: times for name, times in self.visits.items() if times[-1] > now - _WINDOW}
        times = self.visits.setdefault(visitor, deque(maxlen=_VISITS))
        if len(times) == _VISITS and times[0] > now - _WINDOW:
            wait = times[0] + _WINDOW - now
            raise UserError(f"{_VISITS} questions in {_WINDOW:.0f} s: ask again in {wait:.0f} s, or install ckpt_ft")
        times.append(now)


def run(words: list[str], limit: float = LIMIT) -> Iterator[str | Answer]:
    """Run `ckpt-ft` with these words; yields what it is doing about once a second, then the answer.

    Raises:
        UserError: the command's error line, or that it took too long.
    """
    with TemporaryDirectory() as folder:
        page, out, err, empty = (Path(folder, name) for name in ("page.html", "out", "err", "empty"))
        empty.mkdir()
        files = ["--html", str(page)] if words[0] in _WITH_PAGE else []
        paths = str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")
        environment = {key: value for key, value in os.environ.items() if key not in _TOKENS} | {
            "CKPT_FT_CACHE": str(Path(folder, "cache")), "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
            "PYTHONIOENCODING": "utf-8", "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        }  # fmt: skip
        begun = time.monotonic()
        with out.open("w") as printed, err.open("w") as said:
            process = subprocess.Popen(
                [sys.executable, "-m", "ckpt_ft.cli", *words, *files],
                cwd=empty, env=environment, stdout=printed, stderr=said, start_new_session=True,
            )  # fmt: skip
        try:
            if sys.platform == "linux":
                import resource

                resource.prlimit(process.pid, resource.RLIMIT_AS, (_MEMORY, _MEMORY))
            while process.poll() is None:
                passed = time.monotonic() - begun
                if passed > limit:
                    raise UserError(f"no answer in {limit:.0f} s: ask about a shorter sequence, or install ckpt_ft")
                yield f"{passed:.0f} s: {re.sub(r'^[0-9]+ s: ', '', _last_line(err)) or 'starting'}"
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=1)
        finally:  # the visitor may have left
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if process.returncode:
            line = _last_line(err)
            raise UserError(line.removeprefix("error: ") if line.startswith("error: ") else "this cannot be answered")
        yield Answer(out.read_text("utf-8"), page.read_text("utf-8") if page.is_file() else "")


def _last_line(file: Path) -> str:
    return next(iter(file.read_text("utf-8", errors="replace").splitlines()[-1:]), "")


_STYLE = """
.gradio-container { width: 100% !important; min-width: 0; max-width: 1200px !important; margin: 0 auto; }
.gradio-container > .main, .gradio-container .wrap, .gradio-container .contain { min-width: 0; max-width: 100%; }
@media (max-width: 600px) { .gradio-container > .main { padding: 8px !important; } }
#page iframe { width: 100%; height: 900px; border: 0; }
.verdict { font-size: 1.3rem; font-weight: 600; overflow-wrap: anywhere; }
.wrong { color: #b3261e; }
.dark .wrong { color: #ff8f85; }
.printed { overflow-x: auto; font-size: 0.8rem; margin: 0; padding: 12px; background: var(--block-background-fill); }
"""
# A page of ours tells its height; the message of any other frame is passed over.
_SCRIPT = """() => addEventListener("message", ({source, data}) => {
  const frame = document.querySelector("#page iframe"), height = Math.min(data.height, 9999);
  if (frame && source === frame.contentWindow && height > 0) frame.style.height = `${height}px`;
})"""
# The address keeps the question, so that it can be sent to others.
_KEEP = 'asked => { history.replaceState(null, "", "?" + new URLSearchParams({q: asked})); return asked; }'


def app(
    host: Annotated[str, typer.Option("--host", help="the address to serve; 0.0.0.0 for every one")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=1, max=65535)] = 7860,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="open it in a browser")] = True,
) -> None:
    """Serve a page that answers these questions in a browser. It needs gradio: pip install 'ckpt_ft[app]'."""
    try:
        import gradio as gr
    except ImportError as error:
        raise UserError("ckpt-ft app needs gradio: pip install 'ckpt_ft[app]'") from error
    page = make_page(gr).queue(max_size=20)
    theme = gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"])
    page.launch(
        server_name=host, server_port=port, inbrowser=browser, theme=theme, css=_STYLE, js=_SCRIPT, max_file_size=1024,
        footer_links=[], ssr_mode=False,
    )  # fmt: skip


def make_page(gr: Any) -> Any:
    """The page, of gradio's parts; questions are answered one after another."""
    visitors = Visitors()

    def shown(line: str, kind: str, typed: str = "", answer: Answer = Answer("")) -> tuple[Any, ...]:
        """The values of `outputs`; code boxes are hidden while they are empty."""
        frame = f'<iframe title="the step" sandbox="allow-scripts" srcdoc="{html.escape(answer.page)}"></iframe>'
        return (
            f'<p class="{kind}">{html.escape(line)}</p>',
            gr.Code(answer.commands, visible=bool(answer.commands)),
            frame if answer.page else "",
            f'<pre class="printed">{html.escape(answer.text)}</pre>' if answer.text else "",
            gr.Code(typed, visible=bool(typed)),
        )

    def ask(asked: str, request: Any) -> Iterator[tuple[Any, ...]]:
        try:
            words = line_of(asked)
            typed = shlex.join(["ckpt-ft", *words])
            for step in visitors.answer(words, request.client.host if request.client else ""):
                if isinstance(step, str):
                    yield shown(step, "running", typed)
                else:
                    yield shown(step.verdict, "verdict", typed, step)
        except UserError as error:
            yield shown(str(error), "verdict wrong")

    def read(request: Any) -> str:
        """The question that the address keeps."""
        return request.query_params.get("q", EXAMPLES[0])[:_LONGEST]

    ask.__annotations__["request"] = read.__annotations__["request"] = gr.Request  # gradio looks for it
    with gr.Blocks(title="ckpt_ft: does it fit?", analytics_enabled=False) as page:
        gr.Markdown(
            "# Does it fit?\nPredicts the memory and the time of a fine-tuning step before you rent a card. Only the "
            "model's configuration is read: no weights, no GPU, and no code of the model."
        )
        question = gr.Textbox(EXAMPLES[0], label="a model, a method, a card, in any words", max_length=_LONGEST)
        gr.Examples([*EXAMPLES], question)
        button = gr.Button("Ask", variant="primary")
        looks = {"language": "shell", "wrap_lines": True, "show_line_numbers": False, "visible": False}
        verdict = gr.HTML(elem_id="verdict")
        commands = gr.Code(label="commands that train so", **looks)
        outputs = [
            verdict, commands, gr.HTML(elem_id="page"), gr.HTML(), gr.Code(label="the same on your machine", **looks)
        ]  # fmt: skip
        page.load(read, None, question, api_visibility="private", show_progress="hidden")
        gr.on(
            [button.click, question.submit], ask, question, outputs, js=_KEEP, api_visibility="private",
            show_progress="minimal",
        )  # fmt: skip
    return page
