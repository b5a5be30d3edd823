"""Chat with a model in the terminal, its answers shown as they are written: `finlm chat`.

`finlm chat RUN < questions.txt` gives one answer a question. Ctrl-C ends an answer, of which the written part stays in
the conversation; at the prompt, Ctrl-C twice or Ctrl-D ends the chat. Tools go into the template; a call is shown as
the model writes it, and the line "/tool TEXT" is the tool's answer.

Keys and values of the conversation are kept between turns, as far as the token ids begin alike. Sampling is temperature
and nucleus (Holtzman et al. 2020). One conversation at a time: evals/answering.py batches.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any
from unicodedata import category

import torch
from jinja2 import TemplateError

from finlm.base import screen
from finlm.base.errors import UserError
from finlm.inference.open import Opened, open_model
from finlm.selfqa.endpoint import Conversation, Refused, Reply

HELP = "/reset begins a new conversation, /exit ends the chat, Ctrl-C ends an answer"
TOOL_HELP = "/tool TEXT gives the model what the tool that it has called answers"
_DIRECTIONS = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"  # Unicode's embeddings, overrides, isolates


def run(
    checkpoint: Path,
    system: str | None = None,
    sampling: tuple[float, float] = (0.7, 0.9),
    max_tokens: int = 512,
    seed: int = 0,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> int:
    """Chat in the terminal until the input ends and return the exit code: 0, or 130 after a second Ctrl-C.

    `checkpoint` is any path that open_model() takes, `sampling` (temperature, top_p), `max_tokens` of an answer,
    `tools` what the model may call, in the form of OpenAI's API. Prints answers to stdout, all else to stderr. An error
    of an answer is printed; if the input is no terminal, it ends the chat with its exit code. Raises UserError for a
    model that cannot be opened, cannot chat, or not with tools, and for input that is not UTF-8.
    """
    opened = open_model(checkpoint)
    talker = Talker(opened, seed, tools)
    screen.say(f"{opened.name}, {opened.context:,} tokens of context. {HELP}.")
    if tools:
        screen.say(TOOL_HELP)
    begin = [{"role": "system", "content": system}] if system else []
    messages, interrupted = list(begin), False
    while True:
        try:
            line = _read_line()
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
        elif line.startswith("/") and not (tools and line.startswith("/tool ")):
            screen.say(TOOL_HELP if tools else HELP)
        elif line:
            is_result = bool(tools) and line.startswith("/tool ")
            said = line.removeprefix("/tool ") if is_result else line
            messages.append({"role": "tool" if is_result else "user", "content": said})
            try:
                messages.append({"role": "assistant", "content": _print_answer(talker, messages, sampling, max_tokens)})
            except UserError as error:  # no room left, say; the conversation can be begun anew
                messages.pop()
                screen.print_error(error)
                if not sys.stdin.isatty():
                    return error.exit_code


def _read_line() -> str | None:
    """Prompt on a terminal; return stdin's next line, stripped, None at its end. Raises UserError unless UTF-8."""
    if sys.stdin.isatty():
        screen.console().print("› ", style="bold cyan", end="")
    try:
        line = sys.stdin.readline()
    except UnicodeDecodeError as error:
        raise UserError(
            "the input is not UTF-8", evidence=str(error), fix="convert it: iconv -f GB18030 -t UTF-8 questions.txt"
        ) from None
    return line.strip() if line else None


def _print_answer(
    talker: Talker, messages: list[dict[str, str]], sampling: tuple[float, float], max_tokens: int
) -> str:
    """Print an answer while it is written and return it, or what there is at Ctrl-C. UserError as Talker.stream()."""
    shown, stream = "", talker.stream(messages, *sampling, max_tokens)
    try:
        for piece in stream:
            shown += piece
            screen.write(_strip_controls(piece))
        if talker.reply and talker.reply.finish_reason == "length":
            screen.say(" … (cut off by --tokens or the context)")
    except KeyboardInterrupt:
        stream.close()  # type: ignore[attr-defined]
        screen.say(" … (interrupted)")
    screen.write("\n")
    return shown


def _strip_controls(text: str) -> str:
    """Return the text without characters that steer the terminal or reverse the direction of writing."""
    return "".join(
        character
        for character in text
        if character in "\n\t" or (category(character) not in ("Cc", "Cs") and character not in _DIRECTIONS)
    )


class Talker:
    """Answers the messages of conversations; keeps keys and values and the random generator between answers.

    `reply` is the last answer: its finish_reason is "stop" when the model ended by itself, "length" when it was cut
    off. `reused_tokens` counts the tokens of the last prompt that were not computed again.
    """

    def __init__(self, opened: Opened, seed: int = 0, tools: Sequence[Mapping[str, Any]] | None = None) -> None:
        """Begin without a conversation; `seed` seeds the drawing of tokens.

        Raises UserError for a model without a chat template, or with one that writes no tools if `tools` are given.
        """
        if not opened.tokenizer.chat_template:
            raise UserError(
                f"{opened.name} has no chat template: it continues text and has not learnt to answer",
                fix="use `finlm sample` with it, or train it further with a recipe of stage sft",
            )
        if tools and "tool" not in opened.tokenizer.chat_template:
            raise UserError(
                f"the chat template of {opened.name} writes no tools: the model would not see them",
                fix="leave out --tools, or train with a template that writes them (chat.template)",
            )
        self.opened, self.tools = opened, tools
        self.reply: Reply | None = None
        self.reused_tokens = 0
        self._random = torch.Generator(opened.device).manual_seed(seed)
        self._cache: Any = None
        self._seen: list[int] = []  # whose keys and values are in the cache

    def ask(self, messages: Conversation, temperature: float, max_tokens: int) -> Reply:
        """Return the whole answer, as stream() with top_p 1, and set self.reply. Raises UserError as stream()."""
        for _ in self.stream(messages, temperature, 1.0, max_tokens):
            pass
        assert self.reply is not None
        return self.reply

    def stream(self, messages: Conversation, temperature: float, top_p: float, max_tokens: int) -> Iterator[str]:
        """Yield the answer to the last message in pieces of whole characters; set self.reply at the end.

        self.reply is None until then, also after a stream that was not read to its end. Raises UserError, at the first
        piece, when the conversation leaves no room in the model's context, or its template does not take it.
        """
        tokenizer = self.opened.tokenizer
        try:
            text = tokenizer.apply_chat_template(
                list(messages), tools=self.tools and list(self.tools), tokenize=False, add_generation_prompt=True
            )
        except TemplateError as error:
            raise UserError(
                f"the chat template of {self.opened.name} does not take this conversation",
                evidence=str(error),
                fix="leave out the system prompt, and let user and assistant take turns",
            ) from None
        prompt: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        room = min(max_tokens, self.opened.context - len(prompt))
        if room < 1:
            raise UserError(
                f"the conversation has {len(prompt):,} tokens, the model's context {self.opened.context:,}",
                fix="start a new one (/reset in the chat)",
            )
        written, shown, reason = list[int](), "", "length"
        self.reply = None
        for token in self._sample_tokens(prompt, temperature, top_p):
            if token in self.opened.eos_ids:
                reason = "stop"
                break
            written.append(token)
            text = self._decode(written)
            # An unfinished character of several byte tokens shows as U+FFFD until its last byte is there.
            if not text.endswith("\ufffd") and len(text) > len(shown):
                yield text[len(shown) :]
                shown = text
            if len(written) == room:
                break
        text = self._decode(written)
        if len(text) > len(shown):
            yield text[len(shown) :]
        self.reply = Reply(text, reason, len(prompt), len(written))

    def _decode(self, written: list[int]) -> str:
        """Return the decoded ids, without special tokens unless there are tools: a special token may begin a call."""
        return str(self.opened.tokenizer.decode(written, skip_special_tokens=not self.tools))

    def _sample_tokens(self, prompt: list[int], temperature: float, top_p: float) -> Iterator[int]:
        """Yield sampled ids after the prompt without end; reuse the cache as far as ids are equal, and extend it."""
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompt[:-1], self._seen, strict=False)))
        self._cut_cache(common)
        self.reused_tokens = len(self._seen)
        ids = prompt[len(self._seen) :]
        while True:
            logits = self._compute_logits(ids)
            token = self._draw_token(logits, temperature, top_p)
            yield token
            ids = [token]

    def _cut_cache(self, length: int) -> None:
        """Drop what is cached behind the first `length` tokens, or all where the cache cannot be cut."""
        if self._cache is None or length == len(self._seen):
            return
        layers = getattr(self._cache, "layers", ())
        # A sliding window forgets its beginning, and layers of linear attention keep no keys that could be cut.
        slides = bool(getattr(self.opened.model.config, "sliding_window", None))
        if not length or any(getattr(layer, "keys", None) is None for layer in layers) or slides:
            self._cache, self._seen = None, []
            return
        for layer in layers:
            layer.keys, layer.values = layer.keys[:, :, :length], layer.values[:, :, :length]
        del self._seen[length:]

    def _compute_logits(self, ids: list[int]) -> torch.Tensor:
        """Run the model on `ids`, which follow _seen; add them to cache and _seen; return fp32 logits [vocabulary]."""
        inputs = torch.tensor([ids], device=self.opened.device)
        cache, self._cache = self._cache, None  # an interrupt while it grows leaves it unusable
        seen, self._seen = self._seen, []
        with torch.inference_mode():
            out = self.opened.model(inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        self._cache, self._seen = out.past_key_values, seen + ids
        return out.logits[0, -1].float()  # type: ignore[no-any-return]

    def _draw_token(self, logits: torch.Tensor, temperature: float, top_p: float) -> int:
        """Draw an id from the nucleus `top_p` of logits [vocabulary]; return the likeliest at temperature <= 0."""
        if temperature <= 0:
            return int(logits.argmax())
        warm = (logits - logits.max()) / temperature  # at most 0: a small temperature would reach infinity
        ordered, places = torch.sort(torch.softmax(warm, dim=-1), descending=True)
        before = ordered.cumsum(0) - ordered
        ordered[before >= top_p] = 0  # the first always stays
        return int(places[torch.multinomial(ordered, 1, generator=self._random)])


class LocalModel:
    """A model on this machine that `finlm self-qa` asks when no endpoint is named; `fingerprint` tells models apart."""

    def __init__(self, path: Path, seed: int) -> None:
        """Load the model, on a GPU if any; `seed` seeds the drawing of tokens.

        Raises UserError when the path does not exist, or holds no whole model with a chat template; RuntimeError when
        a checkpoint's weights do not fit the model.
        """
        if not path.exists():
            raise UserError(
                f"self_qa.model: there is no {path}",
                evidence="without self_qa.endpoint it names a directory on this machine",
                fix="give runs/<run> or a model directory, or set self_qa.endpoint to an OpenAI-compatible address",
            )
        opened = open_model(path)
        self.fingerprint = opened.fingerprint
        self._talker = Talker(opened, seed)

    def ask(self, messages: Conversation, temperature: float, max_tokens: int) -> Reply:
        """Return the model's reply, as Talker.ask(). Raises Refused if the messages do not fit context or template."""
        try:
            return self._talker.ask(messages, temperature, max_tokens)
        except UserError as error:
            raise Refused(error.problem) from None
