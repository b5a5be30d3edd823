"""Turn rows of the usual instruction formats into messages, and messages into text with the stretches of the assistant.

Rows are recognised by their keys (FORMATS), each by itself, so that files may mix formats. Templates are Jinja with the
functions of Hugging Face's and the tag {% generation %} around what the assistant writes. A template without that tag
(most models' own) is rendered twice a turn, without and with the answer; the difference is the answer. Where a template
writes earlier turns otherwise than the last (Qwen3's empty reasoning) or begins an answer for the model (R1's <think>),
letters that stand for the answers find them. The end of the answer's turn belongs to it: what is not learnt there, the
model never writes. Calls of tools are learnt, their results are not.

There is no clock (strftime_now): a dialogue is the same tokens on any day.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from finlm.base.errors import UserError

Message = dict[str, Any]  # role and content, both text; of the assistant also tool_calls
Function = Mapping[str, Any]
Tools = Sequence[Function] | None  # as OpenAI's API has them: {type: function, function: {name, parameters, ...}}
Spans = list[tuple[int, int]]  # [start, end) in characters of the text
OPEN, CLOSE = "\ue0f0", "\ue0f1"  # private-use characters around what the assistant says, removed after rendering

_KNOWN = tomllib.loads(Path(__file__).with_name("templates.toml").read_text(encoding="utf-8"))
TEMPLATES: dict[str, str] = {name: row["source"] for name, row in _KNOWN.items()}
NEEDED = {name: tuple(row["needs"]) for name, row in _KNOWN.items() if "needs" in row}
SWALLOWED = "the template leaves out some of what the assistant says"
_LETTER = 0xE100  # the first private-use character that stands for a message
PROBE = ({"role": "user", "content": "?"}, {"role": "assistant", "content": "!"})
# Part of the template, so that whoever renders it for use begins as the training did.
_WITH_SYSTEM = (
    "{{% if messages[0]['role'] != 'system' %}}"
    "{{% set messages = [{{'role': 'system', 'content': {text}}}] + messages %}}{{% endif %}}"
)


class Refused(ValueError):
    """Raised for a row that cannot be used, with the reason; the row counts as broken."""


class LeftOut(Refused):
    """Raised for a valid row that the recipe has no use for, such as one that is too long, with the reason."""


class Template:
    """A compiled chat template with the begin and end tokens that it writes."""

    def __init__(self, source: str, bos_token: str, eos_token: str) -> None:
        """Compile the Jinja source. Raises UserError when it is not valid Jinja."""
        self.source = source
        self.tokens = {"bos_token": bos_token, "eos_token": eos_token}
        try:
            self._compiled = _environment().from_string(source)
        except TemplateSyntaxError as error:
            raise UserError(f"the chat template is not valid Jinja: line {error.lineno}: {error.message}") from None
        self._marks = "endgeneration" in source

    def render(
        self, messages: Sequence[Message], *, generation: bool = False, tools: Tools = None
    ) -> tuple[str, Spans]:
        """Return (text, [start, end) spans of what the assistant says in it, in order).

        With `generation` the text ends ready for an answer. Raises Refused with the reason if the template does not
        accept the messages or leaves out an answer.
        """
        said = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        if (tools or any("tool_calls" in message for message in messages)) and "tool" not in self.source:
            raise Refused("the template writes no calls of tools; chat.template: model or a file may")
        if self._marks:
            text, spans = _remove_marks(self._text(messages, generation, tools))
        else:
            text = self._text(messages, generation, tools)
            for place in said:
                _refuse_omissions(messages[place], text)
            spans = [self._span(messages, place, text, tools) for place in said]
        if len(spans) != len(said):
            raise Refused(SWALLOWED)
        for place, (first, last) in zip(said, spans, strict=True):
            _refuse_omissions(messages[place], text[first:last])
        return text, spans

    def _span(self, messages: Sequence[Message], place: int, text: str, tools: Tools) -> tuple[int, int]:
        """Return (start, end) in `text` of the assistant's message number `place`; Refused if earlier turns change."""
        before = self._text(messages[:place], True, tools)
        # Llama-shaped templates write a line break after the end of turn, which nobody generates.
        whole = self._text(messages[: place + 1], False, tools).rstrip()
        if whole.startswith(before) and text.startswith(whole):
            return len(before), len(whole)
        if any("tool_calls" in message for message in messages):  # letters stand for what is said alone
            raise Refused("the template changes earlier turns when one is added")
        letters = [message | {"content": chr(_LETTER + n)} for n, message in enumerate(messages)]
        shown = [new if new["role"] == "assistant" else old for new, old in zip(letters, messages, strict=True)]
        pattern, letter = self._text(shown, False, tools).rstrip(), chr(_LETTER + place)
        turn = self._text(shown[: place + 1], False, tools).rstrip().rpartition(letter)[2]  # what ends it
        begin, end = pattern.partition(letter)[0], messages[place]["content"].strip() + turn
        for n, message in enumerate(messages[:place]):
            begin = begin.replace(chr(_LETTER + n), message["content"].strip())
        if not text.startswith(begin + end):
            raise Refused("the template changes earlier turns when one is added")
        return len(begin), len(begin + end)

    def _text(self, messages: Sequence[Message], generation: bool, tools: Tools) -> str:
        """Return the messages rendered with the template. Raises Refused with the template's error."""
        try:
            values = {"messages": list(messages), "add_generation_prompt": generation, "tools": tools}
            return str(self._compiled.render(documents=None, **values, **self.tokens))
        except (TemplateError, TypeError) as error:
            raise Refused(f"template: {error}") from None


def _refuse_omissions(message: Message, text: str) -> None:
    """Raise Refused if the text lacks some of the message's content, blanks apart, or the name of a tool it calls."""
    content = message["content"]
    if any(call["function"]["name"] not in text for call in message.get("tool_calls", ())):
        raise Refused("the template leaves out a call of a tool")
    if "".join(content.split()) not in "".join(text.split()):
        reasoning = " (its reasoning; the template deepseek-r1 keeps it)" if "</think>" in content else ""
        raise Refused(SWALLOWED + reasoning)


def find_source(name: str, of_tokenizer: str | None, system: str | None) -> str:
    """Return the source of the template `name`; with `system` it puts that prompt before messages that begin with none.

    `of_tokenizer` is the tokenizer's, if any. Raises UserError for a template that does not exist or is not UTF-8.
    """
    source = read_template(name, of_tokenizer)
    return _WITH_SYSTEM.format(text=json.dumps(system, ensure_ascii=False)) + source if system else source


def read_template(name: str, of_tokenizer: str | None) -> str:
    """Return the source of a known template, of the tokenizer (`name` is model: `of_tokenizer`), or of the file `name`.

    Raises UserError if there is none, or the file is not UTF-8.
    """
    if name == "model":
        if of_tokenizer is None:
            raise UserError(
                "chat.template is model, but the tokenizer brings no chat template",
                fix=f"choose one of {', '.join(TEMPLATES)}, or a Jinja file",
            )
        return of_tokenizer
    if name in TEMPLATES:
        return TEMPLATES[name]
    path = Path(name).expanduser()
    if not path.is_file():
        raise UserError(
            f"chat.template: there is no template {name}",
            evidence=f"known: {', '.join(TEMPLATES)}, model; and no file {path}",
            fix="choose one of them, or give a Jinja file",
        )
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"chat.template: cannot read {path}", evidence=str(error), fix="save it as UTF-8") from None


def _remove_marks(text: str) -> tuple[str, Spans]:
    """Return (text without its marks, [(start, end)] in it of the stretches that were between marks)."""
    spans: Spans = []
    parts, length = [], 0
    for number, part in enumerate(text.split(OPEN)):
        inside, mark, after = part.partition(CLOSE)
        if number and mark:
            spans.append((length, length + len(inside)))
        parts.append(inside + after)
        length += len(inside) + len(after)
    return "".join(parts), spans


class _Generation(Extension):
    """{% generation %}...{% endgeneration %}: puts marks around what the assistant says."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        """Return the tag's node, as Jinja asks of an extension; reads the parser on to behind endgeneration."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        """Return the tag's rendered content between the marks."""
        return f"{OPEN}{caller()}{CLOSE}"


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    """Return the Jinja sandbox with the functions that chat templates expect; cached."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = lambda value, **named: json.dumps(value, ensure_ascii=False, **named)
    environment.globals["raise_exception"] = _raise
    return environment


def _raise(message: str) -> None:
    """Raise TemplateError; this is raise_exception in chat templates."""
    raise TemplateError(message)


PAIRS = (
    ("instruction", "response"),
    ("instruction", "output"),
    ("prompt", "response"),
    ("prompt", "completion"),
    ("question", "answer"),
    ("query", "response"),
    ("input", "output"),
    ("input", "target"),  # Firefly and BELLE
)
PASSAGES = ("input", "context")
FORMATS = (  # for people
    "{messages: [{role, content}, ...]}, with tool_calls, the role tool and tools beside them where there are some",
    "{conversations: [{from, value}, ...]}",
    "{conversation: [{human, assistant}, ...]}",
    "{instruction, output or response}, with input or context, history and system where there are some",
    "{prompt, response or completion}, {question, answer}, {query, response}, {input, output or target}",
    "{text}: a document, for mixtures with pretraining text",
)
_TURNS = ("messages", "conversations", "conversation")
_BESIDE = (*_TURNS, "text", *PASSAGES, "history", "system", "tools")
KNOWN = tuple(dict.fromkeys((*(name for names in PAIRS for name in names), *_BESIDE)))
ROLES = {
    **dict.fromkeys(("system",), "system"),
    **dict.fromkeys(("user", "human", "Human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "bot", "chatgpt", "Assistant", "model"), "assistant"),
}
_RESULTS = ("tool", "observation", "function_response", "ipython")  # roles of what a tool answers
_OF_TOOLS = "calls of tools are followed by their results, and these by the assistant"
_CALLS = "function_call"  # role of a call as text, in LLaMA-Factory's form of ShareGPT


def read_messages(row: Any) -> list[Message] | str:
    """Return the row's messages, or its text as a str if it is a document. Raises Refused for anything else."""
    if not isinstance(row, dict):
        raise Refused("not an object")
    if isinstance(row.get("messages"), list):
        messages = _messages_of_turns(row["messages"], "role", "content")
    elif isinstance(row.get("conversations"), list):
        messages = _messages_of_turns(row["conversations"], "from", "value")
    elif isinstance(row.get("conversation"), list):
        messages = [message for pair in row["conversation"] for message in _messages_of_pair(pair)]
    else:
        pair = next((names for names in PAIRS if all(isinstance(row.get(name), str) for name in names)), None)
        if pair is None and isinstance(row.get("text"), str):
            return str(row["text"])
        if pair is None:
            raise Refused(_explain_missing(row))
        messages = [*question_turn(row, pair[0]), {"role": "assistant", "content": row[pair[1]]}]
    return with_system(row, messages)


def question_turn(row: Mapping[str, Any], name: str) -> list[Message]:
    """Return the row's history and the user's turn: text under `name`, input, context. Refused for other than text."""
    texts = []
    for key in dict.fromkeys((name, *PASSAGES)):
        text = row.get(key)
        if text is not None and not isinstance(text, str):
            raise Refused(f"{key} is not text")
        if text and text.strip():
            texts.append(text)
    return [*_history(row.get("history")), {"role": "user", "content": "\n".join(texts)}]


def name_keys(row: Mapping[str, Any]) -> str:
    """Return the first eight keys of a row that have a value, sorted, as text for messages."""
    return ", ".join(sorted(str(name) for name, value in row.items() if value is not None)[:8]) or "none"


@lru_cache(maxsize=4096)
def suggest_key(names: tuple[str, ...], known: tuple[str, ...] = KNOWN) -> str:
    """Return a question about keys in `names` that are one letter off a known key that the row lacks, or ""; cached."""
    pairs = [(name, near) for name in names for near in known if near not in names and _is_near(str(name), near)]
    return f"is {', '.join(f'{name} meant to be {near}' for name, near in pairs[:2])}?" if pairs else ""


def _explain_missing(row: Mapping[str, Any]) -> str:
    """Return as text why a row is in none of FORMATS, with the keys that it has."""
    begun = next((name for name, _ in PAIRS if isinstance(row.get(name), str)), None)
    answers = [answer for name, answer in PAIRS if name == begun]
    for name, kind in (*((name, "a list") for name in _TURNS), *((name, "text") for name in (*answers, "text"))):
        if name in row:
            return f"{name} is not {kind}"
    missing = f"no {' or '.join(answers)} beside {begun}" if begun else "no messages under any known key"
    return f"{missing}, only {name_keys(row)}"


def _is_near(name: str, known: str) -> bool:
    """Return whether `name`, whatever its case, is `known` but for one letter more, less or changed, or two swapped."""
    name = name.casefold()
    same = next((n for n, pair in enumerate(zip(name, known, strict=False)) if pair[0] != pair[1]), None)
    same = min(len(name), len(known)) if same is None else same
    rest, other = name[same:], known[same:]
    return other in (rest, rest[1:]) or rest == other[1:] or rest[1:] == other[1:] or rest[:2][::-1] + rest[2:] == other


def with_system(row: Mapping[str, Any], messages: list[Message]) -> list[Message]:
    """Return the messages, behind the row's system prompt if it has one and the messages begin with none."""
    system = row.get("system")
    if isinstance(system, str) and system and messages and messages[0]["role"] != "system":
        return [{"role": "system", "content": system}, *messages]
    return messages


def check_messages(messages: list[Message], control: tuple[str, ...]) -> list[Message]:
    """Return the messages unchanged. Raises Refused if out of order or empty, LeftOut for a token of `control`."""
    turns = messages[1:] if messages and messages[0]["role"] == "system" else messages
    if not turns:
        raise Refused("no turns")
    due: tuple[str, ...] = ("user",)
    for message in turns:
        role, after = message["role"], "tool" if "tool_calls" in message else "user"
        if role not in due:
            raise Refused(_OF_TOOLS if "tool" in (role, *due) else "turns are not user, assistant, user, assistant")
        due = {"user": ("assistant",), "assistant": (after,), "tool": ("tool", "assistant")}[role]
    if turns[-1]["role"] != "assistant":
        raise Refused(f"the last turn is the {turns[-1]['role']}'s")
    for message in messages:
        text, calls = message["content"], message.get("tool_calls")
        if message["role"] in ("user", "assistant") and not text.strip() and not calls:
            raise Refused(f"empty {message['role']} turn")
        if any(token in text + json.dumps(calls, ensure_ascii=False) for token in (*control, OPEN, CLOSE)):
            raise LeftOut("control token in the text")
    return messages


def read_tools(row: Any) -> Tools:
    """Return the row's tools in OpenAI's form, None without. Refused if no list of functions, or the JSON of one."""
    value = row.get("tools") if isinstance(row, dict) else None
    if not value:
        return None
    value = _from_json(value, "tools")
    tools = [tool if isinstance(tool, dict) and "function" in tool else {"function": tool} for tool in value]
    for tool in tools:
        if not (isinstance(tool["function"], dict) and isinstance(tool["function"].get("name"), str)):
            raise Refused("tools is not a list of functions with names")
    return [{"type": "function", **tool} for tool in tools]


def _read_calls(value: Any) -> list[Function]:
    """Return the tool calls of a turn as OpenAI's API has them, arguments as objects. Raises Refused for others."""
    calls: list[Function] = []
    for item in _from_json(value, "tool_calls"):
        function = item.get("function", item) if isinstance(item, dict) else None
        if not (isinstance(function, dict) and isinstance(function.get("name"), str)):
            raise Refused("a call of a tool has no name")
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            arguments = next(iter(_from_json(arguments, "the arguments of a call")), {})
        if not isinstance(arguments, dict):
            raise Refused("the arguments of a call are no object")
        known = {"id": item["id"]} if isinstance(item.get("id"), str) else {}
        calls.append(known | {"type": "function", "function": {"name": function["name"], "arguments": arguments}})
    return calls


def _from_json(value: Any, what: str) -> list[Any]:
    """Return a value or JSON text as a list, an object as a list of one. Raises Refused, about `what`, for others."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise Refused(f"{what} is not JSON") from None
    value = [value] if isinstance(value, dict) else value
    if not isinstance(value, list):
        raise Refused(f"{what} is not a list")
    return value


def _messages_of_turns(items: list[Any], who: str, what: str) -> list[Message]:
    """Return turns with the keys `who` (role) and `what` (text) as messages; Refused for any turn of another form."""
    messages = []
    for item in items:
        if not isinstance(item, dict):
            raise Refused("a turn is not an object")
        role, content = item.get(who, item.get("role")), item.get(what, item.get("content"))
        calls = item.get("tool_calls") or (content if role == _CALLS else None)
        if calls and ROLES.get(str(role)) in ("assistant", None) and role not in _RESULTS:
            said = content if isinstance(content, str) and role != _CALLS else ""
            messages.append({"role": "assistant", "content": said, "tool_calls": _read_calls(calls)})
            continue
        if isinstance(role, str) and role in _RESULTS and isinstance(content, str):
            known = {key: item[key] for key in ("name", "tool_call_id") if isinstance(item.get(key), str)}
            messages.append({"role": "tool", "content": content} | known)
            continue
        if role is None or content is None:
            more = [question] if (question := suggest_key(tuple(item), (who, what))) else []
            missing = f"a turn without {who if role is None else what}: it has {name_keys(item)}"
            raise Refused("; ".join((missing, *more)))
        if not isinstance(role, str) or role not in ROLES:
            raise Refused(f"role {str(role)[:40]}: turns are the system's, the user's, the assistant's or a tool's")
        if not isinstance(content, str):
            raise Refused(f"the {what} of a turn is not text")
        messages.append({"role": ROLES[role], "content": content})
    return messages


def _messages_of_pair(pair: Any) -> Iterator[Message]:
    """Yield the two messages of a pair {human, assistant}. Raises Refused if one of them is not text."""
    if not (isinstance(pair, dict) and all(isinstance(pair.get(who), str) for who in ("human", "assistant"))):
        raise Refused("human or assistant is not text")
    yield {"role": "user", "content": pair["human"]}
    yield {"role": "assistant", "content": pair["assistant"]}


def _history(history: Any) -> Iterator[Message]:
    """Yield the messages of Alpaca's earlier turns, [[question, answer], ...]. Raises Refused for another form."""
    for pair in history if isinstance(history, list) else [history] if history else ():
        if not (isinstance(pair, (list, tuple)) and len(pair) == 2 and all(isinstance(text, str) for text in pair)):
            raise Refused("history is not a list of question and answer")
        yield {"role": "user", "content": pair[0]}
        yield {"role": "assistant", "content": pair[1]}
