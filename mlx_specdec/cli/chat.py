"""The chat command: a conversation in the terminal, with commands that begin with a slash."""

from __future__ import annotations

import contextlib
import json
import secrets
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import system
from ..errors import OptionError, OutputError, PromptError, SpecdecError
from . import interrupts, render
from .flags import SpecialTokens, command, flag
from .generate import BYTE_ORDER_MARK, completed
from .loading import TextFlags, count_or_auto, load_drafting

if TYPE_CHECKING:
    from ..core.options import Options
    from ..engine.pair import Pair
    from ..results import Result

BLOCK = '"""'
EXIT_WORDS = ("exit", "quit", "bye")
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
        if name in EXIT_WORDS:
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
