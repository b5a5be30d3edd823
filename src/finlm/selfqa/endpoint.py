"""Build Self-QA's prompts, judge the replies, and ask a model behind an OpenAI-compatible chat endpoint.

429, 5xx, silence, a lost connection and a broken body are retried, after a pause that doubles and is drawn at random
below its limit, or as long as Retry-After says. What the server refuses for good raises UserError at once, or Refused
when it is about this request only. The key is sent and never written: not to a file, not to an error message.

Prompts and rules are pure functions. No streaming, no tools, no cache.
"""

from __future__ import annotations

import json
import os
import random
import re
import threading
import time
import tomllib
import unicodedata
import urllib.error
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from http.client import HTTPException
from pathlib import Path
from typing import Any, TypeVar

from finlm.base.errors import UserError
from finlm.base.processes import send
from finlm.recipe.schema_data import SelfQA

VERSION = 1  # of the prompts: another one is another data set

_PROMPTS = tomllib.loads(Path(__file__).with_name("prompts.toml").read_text(encoding="utf-8"))
UNANSWERABLE: dict[str, str] = {language: row["unanswerable"] for language, row in _PROMPTS.items()}
_THOUGHT = re.compile(r"<think>.*?(</think>|$)", re.DOTALL)
_NUMBERING = re.compile(
    r"^\s*(?:[-*•#>]+|[（(]?\d{1,2}\s*[.、)）．:：]|(?:问题|第|Q(?:uestion)?)\s*\d{1,2}\s*[题问]?\s*[.、:：)）]?)\s*",
    re.IGNORECASE,
)
_ASKS = re.compile(
    r"[?？]|^(?:请|简述|说明|解释|分析|列举|比较|概述|describe|explain|compare|list|name|state)", re.IGNORECASE
)
_REFERS = re.compile(
    r"本文|该文|此文|文中|文章(?:中|里|内|提)|上文|上述|前述|以上(?:内容|材料|信息)|根据(?:材料|资料|文本|提供的)"
    r"|(?:材料|资料|段落|文本)(?:中|里|内|所|提|显示|指出)"
    r"|(?:the|this|above|given|provided) (?:text|passage|article|document|material|paragraph)",
    re.IGNORECASE,
)
_POINTS = re.compile(
    r"^(?:该|此|其(?!他)|它|他|她|这|那|上述)|本(?:公司|集团|企业|基金|报告|次)"
    r"|\b(?:this|that) (?:company|firm|fund|bond|stock|report)\b|^(?:it|he|she|they)\b",
    re.IGNORECASE,
)
_REFUSES = re.compile(
    r"作为(?:一个|一名)?(?:AI|人工智能|语言模型|大模型)|我(?:无法|不能)(?:回答|提供)|抱歉"
    r"|as an AI|I (?:cannot|can't|am unable)",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"\d+(?:[,，]\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?")
_SHORTEST, _LONGEST = 6, 200  # characters of a question


def question_prompt(passage: str, count: int, language: str) -> str:
    """Return the prompt of stage 1, which asks for `count` questions about a passage, in the language zh or en."""
    return str(_PROMPTS[language]["questions"].format(passage=passage, count=count))


def answer_prompt(passage: str, question: str, language: str) -> str:
    """Return the prompt of stage 2, which asks for the answer that the passage gives to a question."""
    row = _PROMPTS[language]
    return str(row["answer"].format(passage=passage, question=question, unanswerable=row["unanswerable"]))


def strip_thoughts(reply: str) -> str:
    """Return a reply without the <think> parts that reasoning models put before it, and without space around it."""
    return _THOUGHT.sub("", reply).strip()


def split_questions(reply: str) -> list[str]:
    """Return the questions of a model's raw reply, [] if none: the strings of a JSON list, else its lines."""
    text = strip_thoughts(reply)
    text = re.sub(r"^```\w*\n|\n```$", "", text)
    if text.startswith("["):
        try:
            strings = json.loads(text)
        except ValueError:
            strings = None
        if isinstance(strings, list) and all(isinstance(item, str) for item in strings):
            return [item.strip() for item in strings if item.strip()]
    lines = (_NUMBERING.sub("", line).strip().strip("*").strip() for line in text.splitlines())
    return [line for line in lines if line]


def normalise_question(text: str) -> str:
    """Return the letters and digits of a text in uniform width and case, to recognise repeated questions."""
    # What stands between two digits stays, but for commas: 1.5 is not 15, nor January to February (1-2月) December.
    flat = unicodedata.normalize("NFKC", text).casefold().replace(",", "")
    return re.sub(r"((?<=\d)[\W_]+(?=\d))|[\W_]+", r"\1", flat)


def question_reason(question: str) -> str | None:
    """Return in words why a question is dropped before it is answered; None if it is kept."""
    if not _SHORTEST <= len(question) <= _LONGEST:
        return "question length"
    if not _ASKS.search(question):
        return "not a question"
    if _REFERS.search(question):
        return "question refers to the passage"
    if _POINTS.search(question):
        return "question points at something unnamed"
    return None


def answer_reason(passage: str, question: str, answer: str, finish: str | None, settings: SelfQA) -> str | None:
    """Return in words why an answer with this finish_reason is dropped; None if it is kept."""
    unanswerable = UNANSWERABLE[settings.language]
    if finish == "length":
        return "answer cut off"
    if unanswerable in answer[: len(unanswerable) + 20]:
        return "passage does not answer"
    if _REFUSES.search(answer[:80]):
        return "refusal"
    if len(answer) < settings.min_answer_characters:
        return "answer length"
    if normalise_question(answer) == normalise_question(question):
        return "answer repeats the question"
    if _REFERS.search(answer):
        return "answer refers to the passage"
    if _is_loop(answer):
        return "answer repeats itself"
    if settings.grounded_numbers and not set(_numbers(answer)) <= set(_numbers(passage)) | set(_numbers(question)):
        return "number not in the passage"
    return None


def _numbers(text: str) -> Iterator[str]:
    """Yield every number of a text but a line's numbering, without commas and needless zeros: 1,234.50 is 1234.5."""
    flat = unicodedata.normalize("NFKC", text)
    flat = re.sub(r"(?m)^\s*\(?\d{1,2}[.、)](?!\d)", "", flat)
    for number in _NUMBER.findall(flat):
        whole, point, part = number.replace(",", "").partition(".")
        part = part.rstrip("0")
        yield (whole.lstrip("0") or "0") + (point + part if part else "")


def _is_loop(text: str, width: int = 8) -> bool:
    """Return whether over half of the n-grams of `width` characters repeat earlier ones; False for short texts."""
    count = len(text) - width + 1
    return count > 4 * width and len({text[at : at + width] for at in range(count)}) < count / 2


_LONGEST_PAUSE = 60.0
_LONGEST_RETRY_AFTER = 600.0
Conversation = Sequence[dict[str, str]]


class Refused(Exception):
    """The error that the server will never answer this request."""


class NoAnswer(Exception):
    """The error that every attempt failed; its message is the last failure."""


@dataclass(frozen=True)
class Reply:
    """A model's reply; tokens are None if the server does not count them."""

    text: str
    finish_reason: str | None
    prompt_tokens: int | None
    completion_tokens: int | None
    thoughts: str = ""  # that the server takes out of the text


class Endpoint:
    """A chat model at an address, with its rate limit and its count of retries; threads may share it."""

    def __init__(self, settings: SelfQA) -> None:
        """Prepare requests by the recipe's settings. Raises UserError when the key's variable is not set."""
        assert settings.endpoint is not None
        self.url = settings.endpoint.rstrip("/") + "/chat/completions"
        self.settings = settings
        self.retries = 0  # requests sent again
        self.stopped = threading.Event()  # ends pauses
        self._key = _read_key(settings.api_key_env)
        self._gap = 60 / settings.requests_per_minute if settings.requests_per_minute else 0.0
        self._next = 0.0
        self._lock = threading.Lock()

    def ask(self, messages: Conversation, temperature: float, max_tokens: int) -> Reply:
        """Send the messages and return the model's reply, with retries and within the rate limit.

        Blocks through pauses and timeouts. Raises Refused when the server will not answer this request, NoAnswer when
        every attempt failed or `stopped` is set, and UserError if no request can succeed.
        """
        request = {"messages": list(messages), "temperature": temperature, "max_tokens": max_tokens}
        body = json.dumps({"model": self.settings.model, **request}, ensure_ascii=False).encode()
        attempts, failure = self.settings.attempts, ""
        for attempt in range(attempts):
            self._wait_for_turn()
            wanted: float | None = None
            try:
                return _parse_reply(send(self.url, body, self._key, self.settings.timeout_seconds))
            except urllib.error.HTTPError as error:
                failure = self._explain_failure(error)
                wanted = _retry_after(error)
            except (OSError, HTTPException, ValueError) as error:  # URLError and timeouts are OSErrors
                failure = f"{type(error).__name__}: {getattr(error, 'reason', error)}"
            if attempt + 1 < attempts:
                limit = min(_LONGEST_PAUSE, 2.0**attempt)
                if self.stopped.wait(random.uniform(limit / 2, limit) if wanted is None else wanted):
                    break
                with self._lock:
                    self.retries += 1
        raise NoAnswer(failure)

    def _explain_failure(self, error: urllib.error.HTTPError) -> str:
        """Return what failed, without the key, if another attempt may mend it; else raise UserError or Refused."""
        try:
            said = error.read(2000).decode(errors="replace").strip()
        except (OSError, HTTPException):
            said = ""
        if self._key:
            said = said.replace(self._key, "***")
        words = f"HTTP {error.code} {error.reason}: {said[:300]}".rstrip(": ")
        if error.code in (401, 403):
            raise UserError(
                f"{self.url} does not accept the key",
                evidence=words,
                fix="name the environment variable of the key in self_qa.api_key_env and export it"
                if self._key is None
                else "correct the key in the environment variable that self_qa.api_key_env names",
            ) from None
        if error.code in (404, 405) or 300 <= error.code < 400:
            raise UserError(
                f"{self.url} is not a chat completions endpoint, or has no model {self.settings.model}",
                evidence=words,
                fix="correct self_qa.endpoint (it ends before /chat/completions, usually in /v1) or self_qa.model",
            ) from None
        if error.code in (408, 409, 425, 429) or error.code >= 500:
            return words
        raise Refused(words) from None

    def _wait_for_turn(self) -> None:
        """Wait until the rate limit lets the next request go, in order. Raises NoAnswer once `stopped` is set."""
        with self._lock:
            turn = max(self._next, time.monotonic())
            self._next = turn + self._gap
        if self.stopped.wait(max(0.0, turn - time.monotonic())):
            raise NoAnswer("stopped")


Task = TypeVar("Task")
Result = TypeVar("Result")


def ask_in_parallel(
    ask: Callable[[Task], Result],
    tasks: Iterable[Task],
    workers: int,
    may_start: Callable[[], bool],
    stop: Callable[[], object],
) -> Generator[list[Result], None, None]:
    """Yield lists of the results of ask(task), some of them empty, as tasks end; run `workers` at a time in threads.

    Starts no task while may_start() is false; ends when none is running then. Raises a task's error after the results
    that ended with it. On an error, or when the iterator is closed early, calls stop(), waits for the running tasks and
    drops their results. Close the iterator when you leave it early.
    """
    waiting = iter(tasks)
    under_way: set[Future[Result]] = set()
    with ThreadPoolExecutor(workers) as pool:
        try:
            while True:
                while len(under_way) < workers and may_start():
                    try:
                        under_way.add(pool.submit(ask, next(waiting)))
                    except StopIteration:
                        break
                if not under_way:
                    return
                ended, under_way = wait(under_way, return_when=FIRST_COMPLETED)
                yield [future.result() for future in ended if future.exception() is None]
                for future in ended:
                    future.result()
        except BaseException:
            stop()
            raise  # after the running tasks: leaving the pool waits for them


def _read_key(variable: str | None) -> str | None:
    """Return the key in the named environment variable, None for None. Raises UserError if it is not set."""
    if variable is None:
        return None
    value = os.environ.get(variable, "").strip()
    if not value:
        raise UserError(
            f"the environment variable {variable} is not set",
            evidence="self_qa.api_key_env names it as the endpoint's key",
            fix=f"export {variable}=..., or take self_qa.api_key_env out for an endpoint without keys",
        )
    return value


def _parse_reply(body: bytes) -> Reply:
    """Return the Reply in the server's JSON. Raises ValueError for anything else, which is retried."""
    try:
        document: Any = json.loads(body)
        choice = document["choices"][0]
        message, usage = choice["message"], document.get("usage") or {}
        text, thoughts = message.get("content"), message.get("reasoning_content") or message.get("reasoning")
        finish = choice.get("finish_reason")
        tokens = [usage.get("prompt_tokens"), usage.get("completion_tokens")]
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        start = body[:120].decode(errors="replace")
        raise ValueError(f"not a chat completion ({type(error).__name__} {error}): {start!r}") from None
    if text is not None and not isinstance(text, str):
        raise ValueError(f"not a chat completion: content is a {type(text).__name__}")
    counted = [count if isinstance(count, int) else None for count in tokens]
    return Reply(text or "", finish, counted[0], counted[1], thoughts if isinstance(thoughts, str) else "")


def _retry_after(error: urllib.error.HTTPError) -> float | None:
    """Return the seconds of the Retry-After header, which may be a date, from 0 to 600; None without a valid header."""
    value = error.headers.get("Retry-After", "").strip()
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, TypeError):
            return None
    return min(max(seconds, 0.0), _LONGEST_RETRY_AFTER)
