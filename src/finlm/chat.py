"""`finlm chat`: a conversation with a model in the terminal, its answers shown as they are written.

Lines come from a terminal or a pipe, answers go to stdout, everything else to stderr: `finlm chat RUN < questions.txt`
gives one answer a question. Ctrl-C ends an answer, what was said of it stays in the conversation; at the prompt, twice
Ctrl-C or Ctrl-D ends the chat. Text of the model is shown as it is, except that control characters cannot reach the
terminal.
"""

from __future__ import annotations

import sys
from pathlib import Path
from unicodedata import category

from finlm.base import screen
from finlm.base.errors import UserError
from finlm.train.generate import Talker
from finlm.train.opened import open_model

HELP = "/reset begins a new conversation, /exit ends the chat, Ctrl-C ends an answer"
_DIRECTIONS = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"  # Unicode's embeddings, overrides, isolates


def run(
    checkpoint: Path,
    system: str | None = None,
    temperature: float = 0.7,
    top_p: float = 0.9,
    max_tokens: int = 512,
    seed: int = 0,
) -> int:
    """Talk until the input ends; the process's exit code. Raises UserError for a model that cannot chat."""
    opened = open_model(checkpoint)
    talker = Talker(opened, seed)
    screen.say(f"{opened.name}, {opened.context:,} tokens of context. {HELP}.")
    begin = [{"role": "system", "content": system}] if system else []
    messages, interrupted = list(begin), False
    while True:
        try:
            line = _read()
        except KeyboardInterrupt:
            if interrupted:
                return 130
            interrupted = True
            screen.say("\n(once more to leave)")
            continue
        interrupted = False
        if line is None or line in ("/exit", "/quit"):
            return 0
        if line == "/reset":
            messages = list(begin)
            screen.say("(a new conversation)")
        elif line.startswith("/"):
            screen.say(HELP)
        elif line:
            messages.append({"role": "user", "content": line})
            try:
                messages.append(
                    {"role": "assistant", "content": _answer(talker, messages, (temperature, top_p), max_tokens)}
                )
            except UserError as error:  # no room left, say; the conversation can be begun anew
                messages.pop()
                screen.fail(error)
                if not sys.stdin.isatty():
                    return error.exit_code


def _read() -> str | None:
    """The next line without blanks around it; None at the end of the input."""
    if sys.stdin.isatty():
        screen.console().print("› ", style="bold cyan", end="")
    try:
        line = sys.stdin.readline()
    except UnicodeDecodeError as error:
        raise UserError(
            "the input is not UTF-8", evidence=str(error), fix="convert it: iconv -f GB18030 -t UTF-8 questions.txt"
        ) from None
    return line.strip() if line else None


def _answer(talker: Talker, messages: list[dict[str, str]], sampling: tuple[float, float], max_tokens: int) -> str:
    """Show an answer while it is written; what was shown, also when it was interrupted."""
    said, stream = "", talker.stream(messages, *sampling, max_tokens)
    try:
        for piece in stream:
            said += piece
            sys.stdout.write(_harmless(piece))
            sys.stdout.flush()
        if talker.reply and talker.reply.finish_reason == "length":
            screen.say(" … (cut off by --tokens or the context)")
    except KeyboardInterrupt:
        stream.close()  # type: ignore[attr-defined]
        screen.say(" … (interrupted)")
    sys.stdout.write("\n")
    sys.stdout.flush()
    return said


def _harmless(text: str) -> str:
    """Without what would steer the terminal: control characters, and those that reverse the direction of writing."""
    return "".join(
        character
        for character in text
        if character in "\n\t" or (category(character) not in ("Cc", "Cs") and character not in _DIRECTIONS)
    )
