"""The signatures of signatures.yaml, and the lines of logs that match them.

A pattern's level says what it can be: `cause` (names what went wrong), `symptom` (a consequence that may still be all
there is), `echo` (another rank died of something), `hint` (a warning that matters only when nothing moves after it),
`unknown` (an error no signature names).

`python -m finlm.diagnose.signatures` writes docs/troubleshooting.md and its Chinese twin from head.<lang>.txt and
signatures.yaml, `--check` says whether they are current.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from finlm.base import screen
from finlm.diagnose import lines
from finlm.diagnose.read import Hit, Log, Prefilter, rarity

Matches = dict[str, list[tuple[Hit, re.Match[str]]]]  # lines that match, by regular expression

SIGNATURES = Path(__file__).with_name("signatures.yaml")
PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")
IGNORED = re.compile(r"Exception ignored in|--- Logging error ---|Error in sys\.excepthook|Exception in thread")


def read_yaml(path: Path) -> Any:
    """A YAML file read with PyYAML, which is ten times as fast, where it is installed, else with ruamel.yaml."""
    text = path.read_text(encoding="utf-8")
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError:
        from ruamel.yaml import YAML

        return YAML(typ="safe", pure=True).load(text)
    return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


@dataclass(frozen=True)
class Pattern:
    """One regular expression of a signature and the conditions under which a match counts."""

    cause: str
    regex: re.Pattern[str]
    level: str
    all: tuple[str, ...] = ()
    none: tuple[str, ...] = ()
    lacks: str | None = None
    hosted: bool = False
    last: int | None = None
    lasting: bool = False
    source: bool = False
    library: bool = False
    framed: bool = False
    says: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Wording:
    """The texts of a cause by language."""

    title: dict[str, str]
    explain: dict[str, str]
    fix: dict[str, list[str]]
    confirm: dict[str, str]


@dataclass(frozen=True)
class Signature:
    """A cause: its texts and its patterns."""

    id: str
    text: Wording
    unsure: Wording  # when only symptoms are seen
    patterns: tuple[Pattern, ...]
    facts: tuple[str, ...]
    doctor: str | None
    threads: tuple[str, ...]
    waits: bool = False


class Signatures:
    """All signatures, and the search for any of their words."""

    def __init__(self, path: Path = SIGNATURES) -> None:
        self.all = {entry["id"]: _signature(entry) for entry in read_yaml(path)}
        self.by_literal: dict[str, list[str]] = {}
        self.compiled: dict[str, re.Pattern[str]] = {}
        for signature in self.all.values():
            for pattern in signature.patterns:
                for regex in (pattern.regex.pattern, *pattern.all, *pattern.none, *filter(None, [pattern.lacks])):
                    self._add(regex)
        for mark in (IGNORED.pattern, *lines.MARKS):
            self._add(mark)
        self.prefilter = Prefilter(set(self.by_literal))

    def _add(self, regex: str) -> None:
        if regex not in self.compiled:
            self.compiled[regex] = re.compile(regex)
            for literal in literals(regex):
                self.by_literal.setdefault(literal, []).append(regex)

    def matches(self, logs: Sequence[Log]) -> Matches:
        """The hits of every regular expression, in reading order."""
        found: Matches = {}
        for log in logs:
            for hit in log.hits:
                wanted = {regex for word in self.prefilter.words(hit.text) for regex in self.by_literal[word]}
                for regex in wanted:
                    match = self.compiled[regex].search(hit.text)
                    if match:
                        found.setdefault(regex, []).append((hit, match))
        return found


def _signature(entry: Mapping[str, Any]) -> Signature:
    patterns = []
    for item in entry["patterns"]:
        rule: Mapping[str, Any] = {"match": item} if isinstance(item, str) else item
        patterns.append(
            Pattern(
                cause=entry["id"],
                regex=re.compile(rule["match"]),
                level=rule.get("level", entry.get("level", "cause")),
                all=tuple(rule.get("all", ())),
                none=(*rule.get("none", ()), *entry.get("none", ())),
                lacks=rule.get("lacks"),
                hosted=rule.get("hosted", False),
                last=rule.get("last"),
                lasting=rule.get("lasting", False),
                source=rule.get("source", False),
                library=bool(rule.get("library")),
                framed=rule.get("library") == "framed",
                says=tuple(rule.get("says", {}).items()),
            )
        )
    text = Wording(entry["title"], entry["explain"], entry["fix"], entry["confirm"])
    return Signature(
        id=entry["id"],
        text=text,
        unsure=replace(text, **entry.get("unsure", {})),
        patterns=tuple(patterns),
        facts=tuple(entry.get("facts", ())),
        doctor=entry.get("doctor"),
        threads=tuple(entry.get("threads", ())),
        waits=entry.get("waits", False),
    )


def literals(regex: str) -> list[str]:
    """Runs of plain characters one of which is in every line that matches; the choice that is rarest in logs.

    Raises ValueError when there is none of four characters: such an expression cannot be searched for in large logs.
    """
    best = _literals(regex)
    if min(rarity(literal)[0] for literal in best) == -100:
        raise ValueError(f"{regex!r} has no four plain bytes in a row that every match contains")
    return best


def _literals(regex: str) -> list[str]:
    """For each top-level alternative its rarest run, or those of a group that must match."""
    found: list[str] = []
    choices: list[list[str]] = [[""]]
    i = 0
    while i <= len(regex):
        char = regex[i : i + 1]
        if char in ("", "|"):
            found += max(choices, key=lambda choice: min(rarity(run)[0] for run in choice))
            choices = [[""]]
        elif char == "(":
            end = _closing(regex, i)
            inner = re.sub(r"^\?(?::|P<\w+>)", "", regex[i + 1 : end])
            if not inner.startswith("?") and regex[end + 1 : end + 2] not in ("?", "*", "{"):
                choices.append(_literals(inner))
            choices.append([""])
            i = end
        elif char == "[":
            i = regex.index("]", i + 2)
            choices.append([""])
        elif char in "*?{":
            choices[-1] = [choices[-1][0][:-1]]
            choices.append([""])
            i = regex.index("}", i) if char == "{" else i
        elif (char == "\\" and regex[i + 1].isalnum()) or char in ".^$+":
            i += char == "\\"
            choices.append([""])
        else:
            i += char == "\\"
            choices[-1] = [choices[-1][0] + regex[i]]
        i += 1
    return found


def _closing(regex: str, start: int) -> int:
    """Index of the parenthesis that closes the one at start."""
    depth, i = 0, start
    while True:
        if regex[i] == "\\":
            i += 1
        elif regex[i] == "[":
            i = regex.index("]", i + 2)
        else:
            depth += (regex[i] == "(") - (regex[i] == ")")
            if not depth:
                return i
        i += 1


DOCS = Path(__file__).resolve().parents[3] / "docs"
PAGES = {"en": DOCS / "troubleshooting.md", "zh": DOCS / "troubleshooting.zh-CN.md"}

_WORDS = {
    "en": {"causes": "Causes", "fix": "Fix", "confirm": "Confirm", "doctor": "Doctor check", "threads": "Threads"},
    "zh": {"causes": "原因", "fix": "处理", "confirm": "确认", "doctor": "doctor 检查项", "threads": "参考"},
}


def page(lang: str) -> str:
    """The whole page in one language."""
    words = _WORDS[lang]
    entries = [entry for entry in Signatures().all.values() if entry.id != "unknown"]
    lines = [Path(__file__).with_name(f"head.{lang}.txt").read_text("utf-8"), f"## {words['causes']}", ""]
    lines += [f"- [{entry.text.title[lang]}](#{entry.id})" for entry in entries]
    for entry in entries:
        lines += ["", f'<a id="{entry.id}"></a>', "", f"### {entry.text.title[lang]}", "", f"`{entry.id}`", ""]
        lines += [_name_placeholders(entry.text.explain[lang]), "", f"**{words['fix']}**", ""]
        lines += [f"{i}. {_name_placeholders(step)}" for i, step in enumerate(entry.text.fix[lang], 1)]
        lines += ["", f"**{words['confirm']}**: {_name_placeholders(entry.text.confirm[lang])}"]
        if entry.doctor:
            lines += ["", f"**{words['doctor']}**: `{entry.doctor}`"]
        lines += ["", f"**{words['threads']}**: " + ", ".join(f"<{url}>" for url in entry.threads)]
    return "\n".join(lines) + "\n"


def _name_placeholders(text: str) -> str:
    """On the page there is no log, so what a log would lend shows as its name; <words> are no HTML."""
    plain = PLACEHOLDER.sub(r"‹\1›", text)
    return re.sub(r"(`[^`]*`)|<(?=[A-Za-z/])", lambda found: found[1] or r"\<", plain)


def main(argv: Sequence[str] | None = None) -> int:
    """Write or check both pages; 1 when --check finds a stale one."""
    pages = {path: page(lang) for lang, path in PAGES.items()}
    return screen.write_pages(pages, argv, "python -m finlm.diagnose.signatures")


if __name__ == "__main__":
    sys.exit(main())
