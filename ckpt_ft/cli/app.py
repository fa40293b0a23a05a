"""`ckpt-ft app`: the questions of the command line in a browser, for people who have installed nothing.

A visitor's question becomes a `ckpt-ft` command, which runs in a process of its own, in an empty directory,
with limits on its time and memory, and without the server's tokens. It reads the model's configuration, never its code
or weights. So an answer here is the answer of the command line, and its errors are the same single lines.
"""

from __future__ import annotations

import html
import os
import re
import signal
import subprocess
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import Annotated, Any

import typer

from ckpt_ft.errors import UserError
from ckpt_ft.memory.gpus import GPUS, find_gpu
from ckpt_ft.policy import Policy
from ckpt_ft.spec.defaults import LORA_R, SEQ_LENGTH

QUESTIONS = {  # the command, and the fields of `Question` that it reads
    "Does it fit?": ("estimate", ("model", "cards", "method", "policy", "tokens", "batch", "gpus")),
    "Which policy and batch are fastest?": ("plan", ("model", "cards", "method", "tokens", "gpus")),
    "How long a sequence fits?": ("max-length", ("model", "cards", "method", "policy", "batch", "gpus")),
    "Which cards train it?": ("where", ("model", "cards", "method", "policy", "tokens", "gpus", "prices")),
    "What does my card train?": ("where", ("cards",)),
}
METHODS = {"full": [], "LoRA": ["--lora", str(LORA_R)], "QLoRA": ["--lora", str(LORA_R), "--load-in-4bit"]}
POLICIES = ("auto", "none", "pointwise", "pointwise,head", "full", "full,head", "save:attention+matmul")
MOST_TOKENS, MOST_BATCH, MOST_GPUS, MOST_CARDS = 131_072, 64, 8, 6
LIMIT = 300  # seconds of an answer
_MEMORY = 12 * 2**30  # bytes of address space of each process that answers
_REMEMBERED = 64  # answers; a page has some hundred KB
_VISITS, _WINDOW = 12, 300.0  # questions of a visitor in that many seconds
_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH")  # of the server's owner
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)
_COMMAND = re.compile(r"(?:[A-Z_]+=\S+ )*(?:ckpt-ft recipe|accelerate launch) .+")
_VERDICT = re.compile(r"(fits|does not fit|pick:|error:|[\w-]+: the largest that trains)")


@dataclass(frozen=True)
class Question:
    """What a visitor asks; the fields are the page's inputs."""

    asked: str
    model: str
    cards: tuple[str, ...]
    method: str = "full"
    policy: str = "auto"
    tokens: int = SEQ_LENGTH
    batch: int = 1
    gpus: int = 1
    prices: str = ""

    def words(self) -> list[str]:
        """The words after `ckpt-ft` that ask this.

        Raises:
            UserError: an input that no visitor can choose on the page, or an unknown card or policy.
        """
        command, fields = QUESTIONS.get(self.asked, ("", ()))
        model, policy = self.model.strip(), self.policy.strip()
        if not command or self.method not in METHODS:
            raise UserError(f"question '{self.asked}' about '{self.method}': choose from the lists")
        if "model" in fields and not _NAME.fullmatch(model):
            raise UserError(f"model '{model[:60]}': give a name on the Hub, such as Qwen/Qwen2.5-0.5B")
        for name, value, most in (
            ("tokens", self.tokens, MOST_TOKENS), ("batch", self.batch, MOST_BATCH), ("GPUs", self.gpus, MOST_GPUS)
        ):  # fmt: skip
            if not 1 <= value <= most:
                raise UserError(f"{name} {value}: give 1 to {most}")
        cards = list(dict.fromkeys(find_gpu(card).name for card in self.cards[: MOST_CARDS + 1]))
        if len(cards) > MOST_CARDS or not (cards or "prices" in fields):
            raise UserError(f"{len(cards)} cards: choose 1 to {MOST_CARDS}")
        if len(cards) > 1 and command in ("plan", "max-length"):
            raise UserError(f"{self.asked} is asked of one card at a time; choose one of {', '.join(cards)}")
        words = [command, *([model] if "model" in fields else []), *(["--device", ",".join(cards)] if cards else [])]
        if "method" in fields:
            words += ["--method", self.method] if command == "where" else METHODS[self.method]
        if "policy" in fields and policy != "auto":
            words += ["--policy", str(Policy.parse(policy[:100]))]
        if "tokens" in fields and self.tokens != SEQ_LENGTH:  # models without sequences refuse the flag
            words += ["--seq-length", str(self.tokens)]
        if "batch" in fields and self.batch > 1:
            words += ["--batch-size", str(self.batch)]
        if "gpus" in fields and self.gpus > 1:
            several = ["--launch", "fsdp2", "--processes"] if command == "estimate" else ["--gpus"]
            words += [*several, str(self.gpus)]
        if "prices" in fields and self.prices.strip():
            words += ["--price", self.prices.replace(" ", "")]
        return words

    @classmethod
    def of(cls, address: Mapping[str, str]) -> Question:
        """The question that the query of a page's address keeps; FIRST where it names nothing, or nonsense."""
        given: dict[str, Any] = {name: text for name, text in address.items() if name in FIRST.__dataclass_fields__}
        with suppress(ValueError):
            given |= {name: int(given[name]) for name in ("tokens", "batch", "gpus") if name in given}
            given |= {"cards": tuple(filter(GPUS.get, given["cards"].split(",")))} if "cards" in given else {}
            if given.get("asked", FIRST.asked) in QUESTIONS and given.get("method", FIRST.method) in METHODS:
                return replace(FIRST, **given)
        return FIRST


FIRST = Question("Does it fit?", "Qwen/Qwen2.5-0.5B", ("rtx-4090",), "LoRA")  # that of a new page


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

    limit: float = LIMIT
    answers: OrderedDict[tuple[str, ...], Answer] = field(default_factory=OrderedDict)
    visits: dict[str, deque[float]] = field(default_factory=dict)
    running: Lock = field(default_factory=Lock)  # one question runs at a time; known answers do not wait for it

    def answer(self, words: list[str], visitor: str) -> Iterator[str | Answer]:
        """What runs, about once a second, then the answer.

        Raises:
            UserError: too many questions, or the command's own line.
        """
        key = tuple(words)
        found = self.answers.get(key)
        if found is None:
            self._count(visitor)
            while not self.running.acquire(timeout=1):
                yield "waiting for another visitor's answer"
            try:
                for step in run(words, self.limit):
                    if isinstance(step, str):
                        yield step
                    else:
                        found = self.answers[key] = step
            finally:
                self.running.release()
            while len(self.answers) > _REMEMBERED:
                self.answers.popitem(last=False)
        assert found is not None
        yield found

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
        page, out, err = (Path(folder, name) for name in ("page.html", "out", "err"))
        empty = Path(folder, "empty")
        empty.mkdir()
        pages = words[0] == "where" or (words[0] == "estimate" and "," not in words[words.index("--device") + 1])
        files = ["--html", str(page)] if pages else []
        environment = {key: value for key, value in os.environ.items() if key not in _TOKENS}
        paths = str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")
        environment |= {
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
                    raise UserError(
                        f"no answer in {limit:.0f} s: ask about fewer cards or a shorter sequence, or install ckpt_ft"
                    )
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
_KEEP = f"""(...values) => {{
  const named = {[*FIRST.__dataclass_fields__]}.map((name, at) => [name, values[at]]);
  history.replaceState(null, "", "?" + new URLSearchParams(named));
}}"""


def launch(host: str = "127.0.0.1", port: int = 7860, open_browser: bool = False) -> None:
    """Serve the page at `host`:`port` until Ctrl-C."""
    page = make_page()
    theme = _gradio().themes.Default(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"])
    page.queue(max_size=20, default_concurrency_limit=20)
    page.launch(
        server_name=host, server_port=port, inbrowser=open_browser, theme=theme, css=_STYLE, js=_SCRIPT,
        max_file_size=1024, footer_links=[], ssr_mode=False,
    )  # fmt: skip


def _gradio() -> Any:
    try:
        import gradio
    except ImportError as error:
        raise UserError("ckpt-ft app needs gradio: pip install 'ckpt_ft[app]'") from error
    return gradio


def make_page() -> Any:
    """The page, which `launch` serves."""
    gr = _gradio()
    from ckpt_ft.workloads.model_config import known_models

    visitors = Visitors()

    def shown(text: str, **changes: str) -> Any:
        """Puts `text` into a code box, which is hidden while it is empty."""
        return gr.Code(text, visible=bool(text), **changes)

    def ask(
        asked: str, model: str, cards: list[str], method: str, policy: str, tokens: float, batch: float, gpus: float,
        prices: str, request: Any,
    ) -> Iterator[tuple[Any, ...]]:  # fmt: skip
        try:
            numbers = int(tokens), int(batch), int(gpus)
            words = Question(
                asked, str(model or ""), tuple(cards or ()), method, str(policy), *numbers, prices
            ).words()
            typed = f"ckpt-ft {' '.join(words)}"
            for step in visitors.answer(words, request.client.host if request.client else ""):
                if isinstance(step, str):
                    yield _line(step, "running"), shown(""), "", "", shown(typed)
                else:
                    said = _line(step.verdict, "verdict")
                    label = "these would fit" if step.verdict.startswith("does not fit") else "train it so"
                    yield said, shown(step.commands, label=label), _frame(step.page), _printed(step.text), shown(typed)
        except (UserError, TypeError, ValueError) as error:
            yield _line(str(error), "verdict wrong"), shown(""), "", "", shown("")

    def follow(asked: str) -> list[Any]:
        """Shows the fields of the question alone."""
        return [gr.update(visible=name in QUESTIONS[asked][1]) for name in fields]

    def read(request: Any) -> list[Any]:
        """Puts the question of the address into the fields."""
        question = Question.of(request.query_params)
        values = {**vars(question), "cards": [*question.cards]}
        shown = QUESTIONS[question.asked][1]
        return [question.asked, *(gr.update(value=values[name], visible=name in shown) for name in fields)]

    ask.__annotations__["request"] = read.__annotations__["request"] = gr.Request  # gradio looks for it
    with gr.Blocks(title="ckpt_ft: does it fit?", analytics_enabled=False) as page:
        gr.Markdown(
            "# Does it fit?\nPredicts the memory and the time of a fine-tuning step before you rent a card. Only the "
            "model's configuration is read: no weights, no GPU, and no code of the model."
        )
        with gr.Row():
            with gr.Column():
                asked = gr.Dropdown([*QUESTIONS], value=FIRST.asked, label="question")
                model = gr.Dropdown(
                    sorted(known_models(), key=str.lower), value=FIRST.model, allow_custom_value=True,
                    label="model", info="or any other name on the Hub",
                )  # fmt: skip
                cards = gr.Dropdown(
                    sorted(GPUS), value=[*FIRST.cards], multiselect=True, max_choices=MOST_CARDS, label="cards",
                    info="several are compared; none with 'Which cards' looks at the common ones",
                )  # fmt: skip
                method = gr.Radio([*METHODS], value=FIRST.method, label="method")
            with gr.Column():
                policy = gr.Dropdown(
                    [*POLICIES], value=FIRST.policy, allow_custom_value=True, label="checkpointing policy",
                    info="auto is the best of several; for a single step, none",
                )  # fmt: skip
                tokens = gr.Slider(128, 32_768, FIRST.tokens, step=128, label="tokens of a sequence")
                batch = gr.Slider(1, MOST_BATCH, FIRST.batch, step=1, label="samples on a card at once")
                gpus = gr.Slider(1, MOST_GPUS, FIRST.gpus, step=1, label="cards that share the run")
                prices = gr.Textbox("", label="dollars an hour", placeholder="rtx-4090=0.4,h100=2.5", visible=False)
        button = gr.Button("Ask", variant="primary")
        verdict = gr.HTML(elem_id="verdict")
        looks = {"language": "shell", "wrap_lines": True, "show_line_numbers": False, "visible": False}
        commands = gr.Code(label="train it so", **looks)
        frame = gr.HTML(elem_id="page")
        text = gr.HTML()
        typed = gr.Code(label="the same on your machine", **looks)
        fields = dict(zip([*FIRST.__dataclass_fields__][1:],
                          (model, cards, method, policy, tokens, batch, gpus, prices), strict=True))  # fmt: skip
        inputs = [asked, *fields.values()]
        outputs = [verdict, commands, frame, text, typed]
        hidden = {"api_visibility": "private", "show_progress": "hidden"}
        page.load(read, None, inputs, **hidden)
        asked.input(follow, asked, inputs[1:], **hidden)
        button.click(ask, inputs, outputs, **hidden)
        button.click(None, inputs, js=_KEEP)
    return page


def _line(text: str, kind: str) -> str:
    return f'<p class="{kind}">{html.escape(text)}</p>'


def _printed(text: str) -> str:
    return f'<pre class="printed">{html.escape(text)}</pre>'


def _frame(page: str) -> str:
    """The page in a frame that reaches nothing outside of it."""
    if not page:
        return ""
    return f'<iframe title="the step" sandbox="allow-scripts" srcdoc="{html.escape(page)}"></iframe>'


def app(
    host: Annotated[str, typer.Option("--host", help="the address to serve; 0.0.0.0 for every one")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=1, max=65535)] = 7860,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="open it in a browser")] = True,
) -> None:
    """Serve a page that answers these questions in a browser. It needs gradio: pip install 'ckpt_ft[app]'."""
    launch(host, port, browser)
