"""The commands that print completions in the terminal: generate one, or chat with commands that
begin with a slash."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import stat
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import system
from ..core.options import Options
from ..errors import OptionError, OutputError, PromptError, SpecdecError
from . import interrupts, render
from .flags import Constraints, Flags, Json, SpecialTokens, command, flag
from .loading import SHIPPED_PROMPT, TextFlags, count_or_auto, load_drafting

if TYPE_CHECKING:
    from ..engine.generate import Run
    from ..engine.pair import Pair
    from ..engine.prompt_cache import PromptCache
    from ..results import Result

BYTE_ORDER_MARK = "\ufeff"
PIPE_SECONDS = 5.0
"""Seconds to wait for the first byte from standard input if no prompt is named."""
TURNS = 3
"""How often plain and speculative decoding are timed, alternately, after one warm-up each."""
BLOCK = 3 * '"'
LONGEST_ANSWER = 2_048
"""Default for the largest number of tokens in an answer. It is smaller than the context of nearly
all models, and ends the answer of a model that repeats itself."""
HELP = f"""\
/system TEXT      start a new conversation with this system message
/reset            start a new conversation
/save FILE        write the conversation as JSON
/load FILE        continue a saved conversation
/speculate WHAT   on, off, or the number of draft tokens in a round; answers stay the same
/drafts           turn marks of accepted draft tokens on or off
/stats            print the statistics of the last answer
/help             print this list
/exit             end the chat; so do /quit, /bye, the word exit alone, and Ctrl-D
A message may have several lines: end a line with \\, or put the lines between {BLOCK} and {BLOCK}.
Ctrl-C stops an answer, but not the chat."""


class PromptFlags(Flags, panel="Prompt"):
    prompt_words: str | None = flag(
        "The prompt; - reads standard input. Without a prompt, a pipe on standard input is read.",
        argument=True,
        metavar="PROMPT",
    )
    prompt: str | None = flag("The prompt, as a flag.", None, "-p")
    prompt_file: Path | None = flag("A file that holds the prompt.", metavar="FILE")
    prompt_cache_dir: Path | None = flag(
        "The directory of a prefix cache on disk. If an earlier prompt began in the same way, its "
        "beginning is not prefilled again. With --max-tokens 0, the prompt is only prefilled.",
        metavar="DIR",
    )


class GenerateFlags(SpecialTokens, Constraints, TextFlags):
    """Flags that change the completion."""


class Output(Json):
    show_drafts: bool = flag("Mark the accepted draft tokens in the completion.")
    verbose: bool = flag("Print the chosen draft length, and the reason.")
    quiet: bool = flag("Print the completion only, without statistics, progress and notes.")


@command(
    'mlx-specdec generate "translate English to French: I am cold."',
    'mlx-specdec generate "def f(x):" --model weights/py-llama --proposer ngram',
)
def generate(prompt: PromptFlags, flags: GenerateFlags, output: Output) -> None:
    """Generate a completion of a prompt.

    Without arguments, the shipped translator translates a sample sentence, and says how much faster
    than plain decoding it was."""
    options = flags.options()
    text = read_prompt(prompt)
    demo = text is None and flags.model is None
    if demo:
        text = SHIPPED_PROMPT
    if text is None:
        raise PromptError("no prompt: give one as an argument, with --prompt-file, or - for stdin")
    if not text.strip():
        raise PromptError("the prompt is empty: give some text")
    pair, options = load_drafting(flags, options)
    from ..engine.pair import with_history
    from ..engine.prompt_cache import Store
    from ..engine.request import missing_prefix

    if demo:
        render.note(f"prompt: {text}")
    elif prefix := missing_prefix(pair, text, options):
        render.note(f'"{prefix}" was put before the prompt, as the target\'s config.json asks')
    lines = sum(1 for line in text.splitlines() if line.strip())
    if lines > 1 and pair.target.kind == "encoder-decoder":
        render.tell(
            f"warning: the {lines} lines of the prompt are read as one text; mlx-specdec batch "
            "FILE -o - makes a text of each line"
        )
    directory = prompt.prompt_cache_dir
    cached = None if directory is None else Store(directory=directory).open(pair)
    if cached is not None:
        pair = with_history(pair, cached.sequences)
    printer = None if output.json else render.TextPrinter(sys.stdout, output.show_drafts)
    if output.show_drafts and not (output.quiet or output.json):
        print(render.legend(sys.stdout), file=sys.stderr)
    run = completed(pair, text, options, cached, printer)
    result = run.result()
    if output.json:
        payload = {**result.as_dict(), "draft_length": run.reason}
        render.write(sys.stdout, render.as_json(payload))
    else:
        render.note(render.cut(result, options.max_tokens))
        render.note(render.summary(result))
    if cached is not None:
        cached.close()
    if output.verbose:
        print(render.lengths(run.reason, result), file=sys.stderr)
    if result.finish_reason == "interrupted":
        raise KeyboardInterrupt
    if demo and result.tokens and not (output.quiet or output.json or options.regular):
        print_speedup(pair, text, options)


def read_prompt(flags: PromptFlags) -> str | None:
    """Read the prompt from an argument, a flag, a file or standard input, which "-" names. If a
    file ends with a line break, the prompt does not contain it.

    Returns:
        The prompt, or None if there is none.
    Raises:
        OptionError: If more than one prompt is given.
        PromptError: If the prompt cannot be read, or is not UTF-8 text."""
    named = flags.prompt_words, flags.prompt, flags.prompt_file
    sources = [source for source in named if source is not None]
    if len(sources) > 1:
        raise OptionError("more than one prompt: give an argument, --prompt or --prompt-file")
    source: str | Path | None = sources[0] if sources else _piped()
    if isinstance(source, Path):
        return system.read_text(source, PromptError).removesuffix("\n")
    try:
        if source == "-":
            source = sys.stdin.read().removeprefix(BYTE_ORDER_MARK).removesuffix("\n")
            if not source.strip():
                raise PromptError("standard input is empty: give a prompt there, or as an argument")
        # Bytes that are not UTF-8 became lone surrogates, which fail here.
        (source or "").encode("utf-8")
    except OSError as problem:
        raise PromptError(f"cannot read standard input: {problem.strerror}") from None
    except UnicodeError:
        raise PromptError("the prompt is not UTF-8 text") from None
    return source


def _piped() -> str | None:
    """Return "-" if standard input is a file, or a pipe from which data come in time; else None."""
    try:
        number = sys.stdin.fileno()
        mode = os.fstat(number).st_mode
    except (OSError, ValueError):
        return None
    if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        return None
    if select.select([number], [], [], PIPE_SECONDS)[0]:
        return "-"
    render.tell("nothing came on standard input, which is left alone: - waits for it")
    return None


def completed(
    pair: Pair,
    prompt: str | Sequence[int],
    options: Options,
    cache: PromptCache | None,
    printer: render.TextPrinter | None,
    interrupted: Callable[[], None] = lambda: None,
) -> Run:
    """Generate a completion and print its text as soon as it is known. Return the finished run.

    Args:
        printer: Prints the text and what there is to say about it. None prints nothing.
        interrupted: Called after Ctrl-C, which ends the completion early."""
    from ..engine.generate import stream_generate
    from ..engine.request import special_texts

    show = (lambda step: None) if printer is None else printer.show
    with render.progress("prefilling the prompt") as report:
        timed = printer is None
        run = stream_generate(pair, prompt, options, progress=report, timed=timed, cache=cache)
        try:
            with render.slowly("prefilling the prompt"):
                run.prefill()
            for step in run:
                show(step)
        except KeyboardInterrupt:
            interrupted()
    show(run.interrupt())
    if printer is not None:
        printer.finish()
        if sentence := render.ending(run.result(), special_texts(pair)):
            render.tell(sentence)
    return run


def print_speedup(pair: Pair, prompt: str, options: Options) -> None:
    """Measure the prompt with and without speculation, and print the speedup in one line."""
    from ..measure.figures import benchmark
    from ..text.prompts import Prompt

    prompts, proposers = [Prompt((prompt,))], [options.proposer or "auto"]
    measured = [pair], options, prompts, proposers, [options.num_draft]
    found, _ = benchmark(*measured, repeats=TURNS)
    if found is None or found.interrupted:
        raise KeyboardInterrupt
    plain, fast = found.methods
    same = "the same text" if fast.compared and not fast.differences else "another text"
    program = "./scripts/run.sh" if Path(sys.argv[0]).name == "main.py" else "mlx-specdec generate"
    hint = f'next: {program} --show-drafts "Where is the station?", or mlx-specdec --help'
    if system.device_name() == "cpu" and system.blas_is_slow():
        hint = f"what is missing is a fast BLAS: {system.install('fast-cpu')}"
    render.tell(
        f"timed again, {TURNS} times each: {fast.speed_up:.2f} times as fast as plain decoding "
        f"({fast.tokens_per_second:.0f} against {plain.tokens_per_second:.0f} tokens/s), {same}; "
        f"{hint}"
    )


class Answers(SpecialTokens, TextFlags):
    max_tokens: int = flag("The largest number of tokens of an answer.", LONGEST_ANSWER, "-m")
    seed: int | None = flag(  # type: ignore[assignment]
        "The seed, which decides the answers above temperature 0.", show_default="random"
    )
    show_drafts: bool = flag("Mark the accepted draft tokens in the answers.", panel="Output")
    quiet: bool = flag("Print the answers only.", panel="Output")


@command("mlx-specdec chat", "mlx-specdec chat --model auto")
def chat(flags: Answers) -> None:
    """Hold a conversation in the terminal.

    The default model is the shipped translator, which answers English sentences in French. /help
    lists the commands of the chat."""
    pair, options = load_drafting(flags, flags.options(), history=True)
    if flags.seed is None:
        options = replace(options, seed=secrets.randbits(32))
    conversation = ChatSession(pair, options, show_drafts=flags.show_drafts)
    interrupts.end_at_the_second("stopping when this pass has ended; Ctrl-C again ends the chat")
    render.note(f"{conversation.way}; /help lists the commands, Ctrl-D ends")
    while (message := _read()) is not None:
        try:
            if message.startswith("/"):
                if not conversation.obey(message):
                    return
            elif message.strip() == "exit":
                return
            elif message.strip():
                conversation.answer(message)
        except SpecdecError as problem:
            # An error does not end the chat.
            render.error(str(problem))


class ChatSession:
    """A chat: the messages so far, and the settings of the next answer."""

    def __init__(self, pair: Pair, options: Options, *, show_drafts: bool) -> None:
        from ..engine.prompt_cache import Store
        from ..engine.request import chat_format

        self._pair = pair
        self._cache = Store().open(pair)
        self._options = options
        self._shows_drafts = show_drafts
        # The messages begin with the system prompt.
        self._format = chat_format(pair, replace(options, system_prompt=None))
        self._remembers = self._format.way != "single user message"
        self._messages: list[dict[str, Any]] = []
        self._last: Result | None = None
        self._start_anew(options.system_prompt)
        self.way = f"chatting with {pair.name}"
        if not self._remembers:
            self.way += ", which answers each message by itself"
        if pair.task_prefix and options.chat_template:
            self.way += f', with "{pair.task_prefix}" before it'
        if pair.task_prefix == "translate English to French: ":
            self.way += "; say something in English, such as: Where is the station?"

    def answer(self, message: str) -> None:
        """Print the answer to a message. Raises PromptError if the conversation is too long."""
        messages = [*self._messages, {"role": "user", "content": message}]
        read = messages if self._remembers else messages[-1:]
        ids = self._format.ids(read)
        longest = self._pair.target.max_length
        if longest is not None and len(ids) >= longest:
            raise PromptError(
                f"the conversation has {len(ids)} tokens and the model takes {longest}: /reset "
                "begins a new one"
            )
        plain = replace(self._options, system_prompt=None, chat_template_config={})
        printer = render.TextPrinter(sys.stdout, self._shows_drafts)
        run = completed(self._pair, ids, plain, self._cache, printer, interrupts.go_on)
        self._last = run.result()
        self._messages = [*messages, {"role": "assistant", "content": self._last.text}]
        full = longest is not None and len(ids) + len(self._last.tokens) >= longest
        if self._last.finish_reason == "length" and full:
            render.tell(f"the model takes {longest} tokens: /reset begins a new conversation")
        else:
            render.note(render.cut(self._last, self._options.max_tokens))

    def obey(self, message: str) -> bool:
        """Run a command, and return False if it ends the chat. Raises SpecdecError if it is
        wrong."""
        name, _, rest = message[1:].partition(" ")
        commands: dict[str, Callable[[str], None]] = {
            "system": self._start_anew,
            "reset": lambda rest: self._start_anew(self._options.system_prompt),
            "save": self._save,
            "load": self._load,
            "speculate": self._speculate,
            "drafts": self._mark,
            "stats": lambda rest: render.tell(
                "nothing was said yet" if self._last is None else render.summary(self._last)
            ),
            "help": lambda rest: render.tell(HELP),
        }
        if name in ("exit", "quit", "bye"):
            return False
        if name not in commands:
            raise OptionError(f"there is no command /{name}: /help lists them")
        commands[name](rest.strip())
        return True

    def _start_anew(self, system: str | None) -> None:
        if system and not self._remembers:
            raise OptionError("this model takes no message of the system")
        self._messages = [{"role": "system", "content": system}] if system else []

    def _save(self, name: str) -> None:
        if not name:
            raise OptionError("say where: /save FILE")
        file = Path(name)
        if file.exists() and not file.is_file():
            raise OutputError(f"{name} is no regular file: /save another one")
        try:
            with system.replacing(file, make_parents=False) as stream:
                stream.write(render.as_json({"messages": self._messages}).encode())
        except OSError as problem:
            raise OutputError(f"cannot write {name}: {problem.strerror}") from None
        render.tell(f"{len(self._messages)} messages are in {name}")

    def _load(self, name: str) -> None:
        from ..text.messages import messages_of

        text = system.read_text(Path(name), PromptError)
        try:
            self._messages = messages_of(json.loads(text)["messages"])
        except (ValueError, TypeError, KeyError, RecursionError):
            raise PromptError(f"{name} is no conversation that /save has written") from None
        render.tell(f"{len(self._messages)} messages were read from {name}")

    def _speculate(self, what: str) -> None:
        if what in ("on", "off"):
            self._options = replace(self._options, regular=what == "off")
        else:
            count = count_or_auto("/speculate", what)
            self._options = replace(self._options, regular=False, num_draft=count)

    def _mark(self, rest: str) -> None:
        self._shows_drafts = not self._shows_drafts
        if self._shows_drafts:
            print(render.legend(sys.stdout), file=sys.stderr)
        else:
            render.tell("drafts are not marked")


def _read() -> str | None:
    """Read a message of one or several lines. Return None at the end of the input."""
    terminal = sys.stdin.isatty()
    if terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (editing and history of lines)
    lines: list[str] = []
    in_block = False
    interrupts.go_on()  # an interrupt that came late in an answer has nothing left to stop
    while True:
        try:
            line = input(("... " if lines else "> ") if terminal else "")
            line = line.removeprefix(BYTE_ORDER_MARK)
        except EOFError:
            return "\n".join(lines) if lines else None
        except KeyboardInterrupt:
            interrupts.go_on()
            print()
            lines, in_block = [], False
            continue
        except UnicodeDecodeError:
            raise PromptError("standard input is not UTF-8 text") from None
        in_block ^= line.count(BLOCK) % 2 == 1
        goes_on = in_block or line.endswith("\\")
        lines.append(line.removesuffix("\\") if goes_on and not in_block else line)
        if not goes_on:
            return "\n".join(lines).replace(BLOCK, "").strip("\n")
