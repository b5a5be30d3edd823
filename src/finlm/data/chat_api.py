"""A model behind an OpenAI-compatible chat completions endpoint, asked with patience.

429, 5xx, silence, a lost connection and a broken body are tried again, after a pause that doubles and is drawn at
random below its limit, or as long as Retry-After says. What the server refuses for good raises UserError at once, or
Refused when it is about this request only. The key is sent and never written: not to a file, not to an error message.
No streaming, no tools, no cache.
"""

from __future__ import annotations

import json
import os
import random
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from http.client import HTTPException
from typing import Any

from finlm.base.errors import UserError
from finlm.recipe.schema_self_qa import SelfQA

_LONGEST_PAUSE = 60.0
_LONGEST_RETRY_AFTER = 600.0
_REPLY_BYTES = 16 * 2**20
Messages = Sequence[dict[str, str]]


class Refused(Exception):
    """The server will not answer this request, whatever the patience."""


class NoAnswer(Exception):
    """Every attempt failed; the last failure is the message."""


@dataclass(frozen=True)
class Reply:
    """What a model said. Tokens are None where the server does not count them."""

    text: str
    finish_reason: str | None
    prompt_tokens: int | None
    completion_tokens: int | None


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirected POST would become a GET, and carry the key to another host."""

    def redirect_request(self, *_: Any) -> None:
        """None makes urllib raise the redirect as an HTTPError."""


class Endpoint:
    """One model at one address; its methods may be called from many threads."""

    def __init__(self, settings: SelfQA) -> None:
        assert settings.endpoint is not None
        self.url = settings.endpoint.rstrip("/") + "/chat/completions"
        self.model = settings.model
        self.timeout = settings.timeout_seconds
        self.attempts = settings.attempts
        self.retries = 0  # requests sent again
        self.stopped = threading.Event()  # ends pauses
        self._key = _key(settings.api_key_env)
        self._opener = urllib.request.build_opener(_NoRedirect)
        self._gap = 60 / settings.requests_per_minute if settings.requests_per_minute else 0.0
        self._next = 0.0
        self._lock = threading.Lock()

    def ask(self, messages: Messages, temperature: float, max_tokens: int) -> Reply:
        """The model's reply. Raises Refused, NoAnswer, and UserError where no request can succeed."""
        request = {
            "model": self.model,
            "messages": list(messages),
            "temperature": temperature,
            "max_tokens": max_tokens,
        }
        body = json.dumps(request, ensure_ascii=False).encode()
        failure = ""
        for attempt in range(self.attempts):
            self._wait_for_turn()
            wanted: float | None = None
            try:
                return _read(self._post(body))
            except urllib.error.HTTPError as error:
                failure = self._judged(error)
                wanted = _retry_after(error)
            except (OSError, HTTPException, ValueError) as error:  # URLError and timeouts are OSErrors
                failure = f"{type(error).__name__}: {getattr(error, 'reason', error)}"
            if attempt + 1 < self.attempts:
                limit = min(_LONGEST_PAUSE, 2.0**attempt)
                if self.stopped.wait(random.uniform(limit / 2, limit) if wanted is None else wanted):
                    break
                with self._lock:
                    self.retries += 1
        raise NoAnswer(failure)

    def _post(self, body: bytes) -> bytes:
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        request = urllib.request.Request(self.url, body, headers)
        with self._opener.open(request, timeout=self.timeout) as response:
            return bytes(response.read(_REPLY_BYTES))

    def _judged(self, error: urllib.error.HTTPError) -> str:
        """What happened, in words, when another attempt may help. Raises Refused or UserError when none will."""
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
                f"{self.url} is not a chat completions endpoint, or has no model {self.model}",
                evidence=words,
                fix="correct self_qa.endpoint (it ends before /chat/completions, usually in /v1) or self_qa.model",
            ) from None
        if error.code in (408, 409, 425, 429) or error.code >= 500:
            return words
        raise Refused(words) from None

    def _wait_for_turn(self) -> None:
        """Keep requests apart by the rate limit, in the order they come. Raises NoAnswer once stopped."""
        with self._lock:
            turn = max(self._next, time.monotonic())
            self._next = turn + self._gap
        if self.stopped.wait(max(0.0, turn - time.monotonic())):
            raise NoAnswer("stopped")


def _key(variable: str | None) -> str | None:
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


def _read(body: bytes) -> Reply:
    """A reply from the server's JSON. Raises ValueError for anything else, which is tried again."""
    try:
        document: Any = json.loads(body)
        choice = document["choices"][0]
        text, usage = choice["message"].get("content"), document.get("usage") or {}
        finish = choice.get("finish_reason")
        tokens = [usage.get("prompt_tokens"), usage.get("completion_tokens")]
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        start = body[:120].decode(errors="replace")
        raise ValueError(f"not a chat completion ({type(error).__name__} {error}): {start!r}") from None
    if text is not None and not isinstance(text, str):
        raise ValueError(f"not a chat completion: content is a {type(text).__name__}")
    counted = [count if isinstance(count, int) else None for count in tokens]
    return Reply(text or "", finish, counted[0], counted[1])


def _retry_after(error: urllib.error.HTTPError) -> float | None:
    """Seconds that the server asks for, at most ten minutes; None when it does not."""
    value = error.headers.get("Retry-After", "").strip()
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, TypeError):
            return None
    return min(max(seconds, 0.0), _LONGEST_RETRY_AFTER)
