"""Rows of the usual instruction formats as messages: known by their keys, row by row, so that files may mix them.

messages (OpenAI, Hugging Face), conversations (ShareGPT: from/value), conversation (human/assistant pairs), and pairs
under the names in PAIRS, with the passage and the history that Alpaca and Dolly have beside the instruction. A row with
nothing but text is a document, for mixtures with pretraining text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from finlm.data.chat import CLOSE, OPEN, Message, Refused

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
ROLES = {
    **dict.fromkeys(("system",), "system"),
    **dict.fromkeys(("user", "human", "Human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "bot", "chatgpt", "Assistant", "model"), "assistant"),
}


def messages_of(row: Any) -> list[Message] | str:
    """The row's messages, or its text where it is a document. Raises Refused with the reason for anything else."""
    if not isinstance(row, dict):
        raise Refused("not an object")
    if isinstance(row.get("messages"), list):
        found = _turns(row["messages"], "role", "content")
    elif isinstance(row.get("conversations"), list):
        found = _turns(row["conversations"], "from", "value")
    elif isinstance(row.get("conversation"), list):
        found = [message for pair in row["conversation"] for message in _turn(pair, "human", "assistant")]
    else:
        pair = next((names for names in PAIRS if all(isinstance(row.get(name), str) for name in names)), None)
        if pair is None and isinstance(row.get("text"), str):
            return str(row["text"])
        if pair is None:
            raise Refused(f"no messages under any known key, only {', '.join(sorted(map(str, row))[:8])}")
        found = [*asked(row, pair[0]), {"role": "assistant", "content": row[pair[1]]}]
    return with_system(row, found)


def asked(row: Mapping[str, Any], name: str) -> list[Message]:
    """The user's turn whose text is under `name`, with the passage that belongs to it, behind the row's earlier turns.

    Raises Refused where one of them is not text.
    """
    texts = []
    for key in dict.fromkeys((name, *PASSAGES)):
        text = row.get(key)
        if text is not None and not isinstance(text, str):
            raise Refused(f"{key} is not text")
        if text and text.strip():
            texts.append(text)
    return [*_history(row.get("history")), {"role": "user", "content": "\n".join(texts)}]


def with_system(row: Mapping[str, Any], messages: list[Message]) -> list[Message]:
    """The messages behind the row's system prompt, where it has one and they bring none."""
    system = row.get("system")
    if isinstance(system, str) and system and messages and messages[0]["role"] != "system":
        return [{"role": "system", "content": system}, *messages]
    return messages


def checked(messages: list[Message], control: tuple[str, ...]) -> list[Message]:
    """The same messages. Raises Refused for turns out of order, an empty answer, or the text of a control token."""
    turns = messages[1:] if messages and messages[0]["role"] == "system" else messages
    if not turns:
        raise Refused("no turns")
    for place, message in enumerate(turns):
        if message["role"] != ("user", "assistant")[place % 2]:
            raise Refused("turns are not user, assistant, user, assistant")
    if turns[-1]["role"] != "assistant":
        raise Refused("the last turn is the user's")
    for message in messages:
        if message["role"] != "system" and not message["content"].strip():
            raise Refused(f"empty {message['role']} turn")
        if any(token in message["content"] for token in (*control, OPEN, CLOSE)):
            raise Refused("control token in the text")
    return messages


def _turns(items: list[Any], who: str, what: str) -> list[Message]:
    found = []
    for item in items:
        if not isinstance(item, dict):
            raise Refused("a turn is not an object")
        role, content = item.get(who, item.get("role")), item.get(what, item.get("content"))
        if not isinstance(role, str) or role not in ROLES:
            raise Refused(f"role {role}")
        if not isinstance(content, str):
            raise Refused("the content of a turn is not text")
        found.append({"role": ROLES[role], "content": content})
    return found


def _turn(row: Any, ask: str, answer: str) -> Iterator[Message]:
    if not (isinstance(row, dict) and isinstance(row.get(ask), str) and isinstance(row.get(answer), str)):
        raise Refused(f"{ask} or {answer} is not text")
    yield {"role": "user", "content": row[ask]}
    yield {"role": "assistant", "content": row[answer]}


def _history(history: Any) -> Iterator[Message]:
    """Alpaca's earlier turns, [[question, answer], ...]."""
    for pair in history if isinstance(history, list) else [history] if history else ():
        if not (isinstance(pair, (list, tuple)) and len(pair) == 2 and all(isinstance(text, str) for text in pair)):
            raise Refused("history is not a list of question and answer")
        yield {"role": "user", "content": pair[0]}
        yield {"role": "assistant", "content": pair[1]}
