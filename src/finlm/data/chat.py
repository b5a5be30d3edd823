"""Chat templates: messages to text, with the stretches of text that the assistant said.

One engine for all: Jinja in its sandbox, the options and functions that Hugging Face's chat templates expect, and the
tag {% generation %} around what the assistant writes. A template without that tag (most models' own) is rendered twice
a turn, without and with the answer; the difference is the answer. The end of the answer's turn belongs to the answer:
what is not learnt there, the model never writes. There is no clock (strftime_now): a dialogue is the same tokens on any
day, and Llama-3.2's template writes the date that it has for this case.

Messages are [{"role": system | user | assistant, "content": text}]; nothing here tokenises.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from finlm.base.errors import UserError

Message = dict[str, str]
Spans = list[tuple[int, int]]  # [start, end) in characters of the text
OPEN, CLOSE = "\ue0f0", "\ue0f1"  # private-use characters around what the assistant says, removed after rendering

TEMPLATES = {
    # The released XuanYuan chat models: FastChat's ADD_COLON_TWO with " " and "</s>" (conversation.py).
    "xuanyuan": (
        "{{ bos_token }}{% for message in messages %}"
        "{% if message.role == 'system' %}{{ message.content }} "
        "{% elif message.role == 'user' %}Human: {{ message.content }} "
        "{% else %}Assistant:{% generation %} {{ message.content }}{{ eos_token }}{% endgeneration %}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
    ),
    # The project's released training code: another form than its models' (dataset.py).
    "llm-code": (
        "{{ bos_token }}{% for message in messages %}"
        "{% if message.role == 'system' %}{{ message.content }}\n"
        "{% elif message.role == 'user' %}Human: {{ message.content }}\n"
        "{% else %}Assistant: {% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}Assistant: {% endif %}"
    ),
    # HuggingFaceH4's zephyr models and alignment-handbook's recipes.
    "zephyr": (
        "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>{{ '\n' }}"
        "{% if message.role == 'assistant' %}"
        "{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}{{ '\n' }}"
        "{% else %}{{ message.content }}{{ eos_token }}{{ '\n' }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>{{ '\n' }}{% endif %}"
    ),
    "chatml": (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n"
        "{% if message.role == 'assistant' %}"
        "{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}{{ '\n' }}"
        "{% else %}{{ message.content }}<|im_end|>{{ '\n' }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "llama2": (
        "{% set state = namespace(system='') %}{% for message in messages %}"
        "{% if message.role == 'system' %}{% set state.system = '<<SYS>>\n' + message.content + '\n<</SYS>>\n\n' %}"
        "{% elif message.role == 'user' %}{{ bos_token }}[INST] {{ state.system }}{{ message.content }} [/INST]"
        "{% set state.system = '' %}"
        "{% else %}{% generation %} {{ message.content }} {{ eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
    ),
    "llama3": (
        "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
        "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|eot_id|>{% endgeneration %}"
        "{% else %}{{ message.content }}<|eot_id|>{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    ),
}
NEEDED = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
}
PROBE = ({"role": "user", "content": "?"}, {"role": "assistant", "content": "!"})
# Part of the template, so that whoever renders it for use begins as the training did.
_WITH_SYSTEM = (
    "{{% if messages[0]['role'] != 'system' %}}"
    "{{% set messages = [{{'role': 'system', 'content': {text}}}] + messages %}}{{% endif %}}"
)


class Refused(ValueError):
    """A dialogue that the template does not take, with the reason."""


class Template:
    """A chat template with the tokens it writes."""

    def __init__(self, source: str, bos_token: str, eos_token: str) -> None:
        self.source = source
        self.tokens = {"bos_token": bos_token, "eos_token": eos_token}
        try:
            self._compiled = _environment().from_string(source)
        except TemplateSyntaxError as error:
            raise UserError(f"the chat template is not valid Jinja: line {error.lineno}: {error.message}") from None
        self._marks = "endgeneration" in source

    def render(self, messages: Sequence[Message], *, generation: bool = False) -> tuple[str, Spans]:
        """(text, the assistant's stretches of it). With generation the text ends where the assistant begins.

        Raises Refused with the reason for messages that the template does not take.
        """
        if self._marks:
            return _unmarked(self._text(messages, generation))
        text = self._text(messages, generation)
        spans = []
        for place, message in enumerate(messages):
            if message["role"] == "assistant":
                before = self._text(messages[:place], True)
                whole = self._text(messages[: place + 1], False)
                if not (whole.startswith(before) and text.startswith(whole.rstrip())):
                    raise Refused("the template changes earlier turns when one is added")
                # Llama-shaped templates write a line break after the end of turn, which nobody generates.
                spans.append((len(before), len(whole.rstrip())))
        return text, spans

    def _text(self, messages: Sequence[Message], generation: bool) -> str:
        try:
            text: str = self._compiled.render(
                messages=list(messages), add_generation_prompt=generation, tools=None, documents=None, **self.tokens
            )
            return text
        except (TemplateError, TypeError) as error:
            raise Refused(f"template: {error}") from None


def source_of(name: str, own: str | None, system: str | None) -> str:
    """The Jinja source of chat.template and chat.system; `own` is the tokenizer's. Raises UserError."""
    source = _named(name, own)
    return _WITH_SYSTEM.format(text=json.dumps(system, ensure_ascii=False)) + source if system else source


def _named(name: str, own: str | None) -> str:
    if name == "model":
        if own is None:
            raise UserError(
                "chat.template is model, but the tokenizer brings no chat template",
                fix=f"choose one of {', '.join(TEMPLATES)}, or a Jinja file",
            )
        return own
    if name in TEMPLATES:
        return TEMPLATES[name]
    path = Path(name).expanduser()
    if not path.is_file():
        raise UserError(
            f"chat.template: there is no template {name}",
            evidence=f"known: {', '.join(TEMPLATES)}, model; and no file {path}",
            fix="choose one of them, or give a Jinja file",
        )
    return path.read_text(encoding="utf-8")


def _unmarked(text: str) -> tuple[str, Spans]:
    """The text without its marks, and the stretches they were around."""
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
    """{% generation %}...{% endgeneration %}: marks around what the assistant says."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        return f"{OPEN}{caller()}{CLOSE}"


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = lambda value, **named: json.dumps(value, ensure_ascii=False, **named)
    environment.globals["raise_exception"] = _raise
    return environment


def _raise(message: str) -> None:
    raise TemplateError(message)
