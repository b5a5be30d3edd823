"""Matching and ranking: which cause explains a set of logs, and which lines are only its echoes.

A pattern's level says what it can be: `cause` (names what went wrong), `symptom` (a consequence that may still be all
there is), `echo` (another rank died of something), `hint` (a warning that matters only when nothing moves after it),
`unknown` (an error no signature names). Findings are ordered by level, then by time: the first failure over all hosts.
A hit after which training goes on is no failure. Python 3.8 and the standard library only, as in diagnose_read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from finlm.ops.diagnose_read import Hit, Log, clean
from finlm.ops.diagnose_signatures import IGNORED, Pattern, Signature, Signatures

if TYPE_CHECKING:
    from finlm.ops.diagnose_signatures import Matches

LEVELS = ("cause", "symptom", "echo", "unknown", "hint")
MAX_FINDINGS = 5
GOES_ON_STEPS = 3  # different progress lines after a hit that prove it harmless; a bar flushed late is one

DIED = re.compile(
    rb"exits with return code = -?[1-9]|exitcode\s*: -?[1-9]|exited with (?:exit )?code -?[1-9]|ChildFailedError|"
    rb"terminate called after|Fatal Python error|[Ss]egmentation fault|core dumped|srun: error|death signal|^Killed$|"
    rb"^(?:\S{0,40}\s)?(?:[a-z_]\w*\.)*[A-Z]\w*(?:Error|Exception): ",
    re.MULTILINE,
)
ENDED_WELL = re.compile(rb"exits successfully|train_runtime|Training completed|'status': 'finished'")
_WARNING = re.compile(r"^\[?W\d{3,4} |^\[W|\bWARNING\b|Warning: |thrown while requesting")
_GOES_ON = re.compile(
    r"\b(?:[Rr]etry|[Rr]etrying|[Tt]rying|[Ff]alling back|[Ss]kipping)\b"
)  # says itself what it does instead
_SENTENCE = re.compile(r"(?<=[.!?。])\s+|(?<=。)")
PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")


@dataclass
class Finding:
    """A cause found in logs. `fatal` = the run ended, or stood still, because of it."""

    cause: str
    fatal: bool
    title: str
    explanation: str
    evidence: str
    file: str
    line: int
    host: str
    rank: int | None
    fix: str
    confirm: str
    confidence: str
    doctor: str | None = None
    threads: tuple[str, ...] = ()
    facts: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The contract's keys first."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in vars(self).items()}


@dataclass
class _Candidate:
    signature: Signature
    pattern: Pattern
    hit: Hit
    match: re.Match[str]


def diagnose(logs: Sequence[Log], signatures: Signatures, lang: str = "en") -> list[Finding]:
    """What went wrong in the run these logs are of, the most probable first; empty when nothing did."""
    found = signatures.matches(logs)
    several = len(logs) > 1
    candidates: list[_Candidate] = []
    for signature in signatures.all.values():  # "unknown" is the last: what the others explain is not unknown
        explained = {(c.hit.source, c.hit.line) for c in candidates} if signature.id == "unknown" else set()
        counting = _counting(signature, found, logs)
        candidates += [c for c in counting if (c.hit.source, c.hit.line) not in explained]
    died = {c.hit.rank for c in candidates if c.signature.id == "unknown" and c.pattern.level == "symptom"} - {None}
    candidates.sort(key=lambda c: (LEVELS.index(_level(c, died)), *_order(c, several)))
    first: dict[str, _Candidate] = {}
    for candidate in candidates:
        first.setdefault(candidate.signature.id, candidate)
    kept = [c for c in first.values() if c.pattern.level not in ("hint", "unknown")] or list(first.values())
    if kept and kept[0].pattern.level == "cause":
        kept = [c for c in kept if c.signature.id != "unknown"]
    return [_finding(candidate, candidates, lang) for candidate in kept[:MAX_FINDINGS]]


def _level(candidate: _Candidate, died: Set[int | None]) -> str:
    """The pattern's, or an echo's where the rank waited for one of those that died of an exception of their own."""
    waited = candidate.signature.waits and candidate.hit.rank is not None and died - {candidate.hit.rank}
    return "echo" if waited else candidate.pattern.level


def _order(candidate: _Candidate, several: bool) -> tuple[float, int, int]:
    hit = candidate.hit
    moment = hit.time if several and hit.time is not None else float("inf")
    return moment, hit.line, -(candidate.match.end() - candidate.match.start())


def _lend(expressions: Sequence[str], hit: Hit, facts: dict[str, str]) -> None:
    """Add what the lines around a hit say, the hit's own line first."""
    lines = [hit.text, *(clean(line)[0] for line in re.split("[\r\n]", hit.around.decode("utf-8", errors="replace")))]
    for regex in expressions:
        matches = (re.search(regex, line) for line in lines)
        _add(next((match for match in matches if match), None), facts)


def _add(match: re.Match[str] | None, facts: dict[str, str]) -> None:
    """Add the named groups of a match that are not known yet."""
    for name, value in match.groupdict().items() if match else ():
        if value:
            facts.setdefault(name, value.strip())


def _counting(signature: Signature, found: Matches, logs: Sequence[Log]) -> Iterator[_Candidate]:
    """The hits of a signature that meet its conditions."""
    by_name = {log.name: log for log in logs}
    for pattern in signature.patterns:
        if any(regex not in found for regex in pattern.all) or any(regex in found for regex in pattern.none):
            continue
        having = {hit.host for hit, _ in found.get(pattern.lacks, ())} if pattern.lacks else set()
        for hit, match in found.get(pattern.regex.pattern, ()):
            log = by_name[hit.source]
            if pattern.lacks and (not having or not hit.host or hit.host in having):
                continue
            if pattern.hosted and not hit.host:
                continue
            if pattern.last is not None and not _near_end(hit, log, pattern.last):
                continue
            level = pattern.level if signature.id != "unknown" else "unknown"
            if pattern.lasting or not _harmless(hit, log, level):
                yield _Candidate(signature, pattern, hit, match)


def _near_end(hit: Hit, log: Log, lines: int) -> bool:
    """Whether at most so many lines with text follow a hit."""
    return len([line for line in log.rest(hit.last).splitlines() if line.strip()]) <= lines


def _harmless(hit: Hit, log: Log, level: str) -> bool:
    """Whether training went on, or ended well, after a hit; for a warning and a hint one step is enough."""
    steps, ended_well = log.steps_after(hit.last), log.is_followed_by(ENDED_WELL, hit.last)
    warning = bool(_WARNING.search(hit.text))
    if warning and level == "echo":
        return True  # connections close at the end of a healthy run too; a rank that failed also prints an error
    if level == "hint" or warning:
        return steps > 0 or ended_well
    if level == "unknown" and IGNORED.search(_lines_before(log, hit)):
        return True
    if log.is_followed_by(DIED, hit.last):
        return False
    enough = 2 if level == "unknown" or _GOES_ON.search(hit.text) else GOES_ON_STEPS
    return steps >= enough or (ended_well and (steps > 1 or level == "unknown"))  # the summary line counts as one


def _lines_before(log: Log, hit: Hit, lines: int = 25) -> str:
    """The text between the traceback's own start and the line before it."""
    ignored = [other for other in log.hits if hit.line - lines < other.line < hit.line and IGNORED.search(other.text)]
    return ignored[-1].text if ignored else ""


def _finding(candidate: _Candidate, candidates: Sequence[_Candidate], lang: str) -> Finding:
    signature, hit = candidate.signature, candidate.hit
    level = candidate.pattern.level if signature.id != "unknown" else "unknown"
    wordings = signature.text | (signature.unsure if level == "symptom" else {})
    text = {key: value.get(lang, value["en"]) for key, value in wordings.items()}
    own = [candidate, *(c for c in candidates if c.signature.id == signature.id)]
    facts: dict[str, str] = {}
    for match in (c.match for c in own):
        _add(match, facts)
    _lend(signature.facts, hit, facts)
    evidence = [hit.text.strip()[:400]]
    if level == "unknown":
        others = sorted({(c.hit.source, c.hit.line, c.hit.text.strip()[:400]) for c in own})
        evidence += [line for _, _, line in others if line not in evidence][:4]
    fix = [step for step in (_filled(step, facts) for step in text["fix"]) if step]
    return Finding(
        cause=signature.id,
        fatal=True,
        title=_filled(text["title"], facts) or text["title"],
        explanation=" ".join(filter(None, (_filled(s, facts) for s in _SENTENCE.split(text["explain"])))),
        evidence="\n".join(evidence),
        file=hit.source,
        line=hit.line,
        host=hit.host,
        rank=hit.rank,
        fix="\n".join(fix),
        confirm=_filled(text["confirm"], facts) or "",
        confidence={"cause": "high", "symptom": "medium"}.get(level, "low"),
        doctor=signature.doctor,
        threads=signature.threads,
        facts=facts,
    )


def _filled(sentence: str, facts: dict[str, str]) -> str:
    """A sentence with the numbers of the log; empty when it asks for one that the log does not give."""
    if any(name not in facts for name in PLACEHOLDER.findall(sentence)):
        return ""
    return PLACEHOLDER.sub(lambda match: facts[match[1]], sentence).strip()
