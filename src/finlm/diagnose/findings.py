"""Rank what was matched in logs: which cause explains the ending, and which lines are only consequences of it.

Only the last launch of a log counts. Findings are ordered by the level of their pattern, then by time: the first
failure over all hosts. A hit after which training goes on is no failure. An exception that no signature explains comes
before a cause read from a line that is itself no error. A log that ends in an exception, or whose launcher reports a
death, always has a finding.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field, replace

from finlm.diagnose.lines import DERIVED, GOES_ON_AFTER, LAST_WORDS, Hit, Log, Raised, exceptions, program_lines
from finlm.diagnose.prefix import clean
from finlm.diagnose.read import TRAINER_ENDS, diverged, frame_before, is_of_library
from finlm.diagnose.signatures import (
    IGNORED,
    PLACEHOLDER,
    SENTENCE,
    Matches,
    Pattern,
    Program,
    Signature,
    Signatures,
    program_of,
)

LEVELS = ("cause", "symptom", "remark", "echo", "unknown", "hint")
MAX_FINDINGS = 5
GOES_ON_STEPS = 3  # different progress lines after a hit that prove it harmless; a bar flushed late is one

DIED = re.compile(
    rb"exits with return code = -?[1-9]|exitcode\s*: -?[1-9]|exited with (?:exit )?code -?[1-9]|ChildFailedError|"
    rb"terminate called after|Fatal Python error|[Ss]egmentation fault|core dumped|srun: error|death signal|^Killed$|"
    rb"^(?:\S{0,40}\s)?(?:[a-z_]\w*\.)*[A-Z]\w*(?:Error|Exception): ",
    re.MULTILINE,
)
FINISHED = re.compile(rb"`Trainer\.fit` stopped: `max_\w+=\d+` reached")  # Lightning, whose bar tells no steps apart
_SUCCESS = rb"exits successfully|Training completed|\*\*\* train metrics|Successfully (?:completed\.|assigned|pulled)"
ENDED_WELL = re.compile(
    b"|".join((_SUCCESS, b"'status': 'finished'|TrainOutput[(]", FINISHED.pattern, TRAINER_ENDS.encode()))
)
SERVES = re.compile(  # of a server: vLLM, SGLang; llama.cpp; ollama; TGI
    rb'"POST \S+ HTTP/[\d.]+" 200\b|[Aa]vg (?:prompt|generation) throughput: (?!0\.0 )|request: POST \S+ \S+ 200\b|'
    rb"\[GIN\].{0,40}\| 200 \||text_generation_router::server: \S+ Success"
)
_WARNING = re.compile(r"^\[?W\d{3,4} |^\[W|\bWARNING\b|Warning: |thrown while requesting")
# The line itself says what is done instead.
_GOES_ON = re.compile(
    r"\b(?:[Rr]etry|[Rr]etrying|[Tt]rying|[Ff]alling back|[Ss]kipping)\b|"
    r"Error while downloading from|Request error, please check"
)
_ERROR = re.compile(
    r"(?i)error|exception|fatal|abort|NCCL WARN|terminate|kill|assert|traceback|segmentation|not found|denied|"
    r"fail|timed? ?out|what\(\)|unable|cannot|refused|unreachable|mismatch|"
    r"^\[?[EF]\d{3}"
)
LAST_LINES = 4
NEAR_LINES = 40  # so far above an exception that no signature knows, an error line may be what led to it
# A slip of the program's own logic: no line outside its traceback led to it.
_SLIP = re.compile(
    r"^(?:KeyError|IndexError|AttributeError|TypeError|ZeroDivisionError|NameError|UnboundLocalError|RecursionError)\b"
)
CAUGHT_LINES = 10  # that many lines on, a new traceback of the same speaker shows that it had caught the last


@dataclass
class Finding:
    """A cause that logs show, with its evidence and fix. `fatal`: the run ended, or stood still, because of it.

    `evidence` and `fix` have several lines. `confidence` is high, medium or low. `doctor` is the check of
    `finlm doctor` that sees the cause before launch. `facts` are values from the log by name.
    `by_rule`: no signature knows the exception; a rule of endings.yaml took it for one of this cause.
    `kind`: how a run of unknown cause ended, as check_refused, if that is known.
    """

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
    by_rule: bool = False
    kind: str = ""


@dataclass
class _Candidate:
    """A hit that may be the cause: of which pattern, with the facts that the match gives and the match's length.

    `raised` is the exception if no signature matched its line.
    """

    signature: Signature
    pattern: Pattern
    hit: Hit
    facts: dict[str, str]
    length: int
    raised: Raised | None = None


_UNKNOWN = Pattern("unknown", "", "unknown")


def diagnose(
    logs: Sequence[Log], signatures: Signatures, lang: str = "en", program: Program | None = None
) -> list[Finding]:
    """Return what went wrong in the last launch of these logs, the most probable cause first; [] if nothing did.

    At most MAX_FINDINGS. `program` is the one in whose words a fix is written; None means the one that the logs name.
    """
    logs = [log.launch(-1) for log in logs]
    shown = [raised for log in logs for raised in exceptions(log)]
    candidates = _candidates(logs, signatures, shown)
    open_ends = [c.raised for c in candidates if c.raised and not c.raised.derived]
    ends = _Ends(shown, open_ends, candidates)
    died = {c.hit.rank for c in candidates if c.pattern.cause == "unknown" and c.pattern.level == "symptom"} - {None}
    several = len(logs) > 1
    levels = {id(c): LEVELS.index(_level(c, died, ends)) for c in candidates}
    candidates.sort(key=lambda c: (levels[id(c)], *_order(c, several)))
    first: dict[str, _Candidate] = {}
    for candidate in candidates:
        first.setdefault(_cause(candidate.signature), candidate)
    kept = [c for c in first.values() if c.pattern.level not in ("hint", "unknown")] or list(first.values())
    program = program or program_of(logs)
    findings = [_finding(candidate, candidates, program, lang) for candidate in kept[:MAX_FINDINGS]]
    for finding, candidate in zip(findings, kept, strict=False):
        if finding.confidence == "high" and (levels[id(candidate)] or not ends.explained_by(candidate)):
            finding.confidence = "medium"
    if findings and findings[0].confidence == "high":
        findings = [f for f, c in zip(findings, kept, strict=False) if c.pattern.cause != "unknown"]
    return findings


def _candidates(logs: Sequence[Log], signatures: Signatures, shown: Sequence[Raised]) -> list[_Candidate]:
    """Return the hits that count, those of signatures first. `shown` are the exceptions of these logs.

    Exceptions and error lines that no signature explains count unless training went on, as the cause that a rule names
    or as unknown. A single log that has no hit gives its last error lines.
    """
    matches = signatures.matches(logs)
    by_name = {log.name: log for log in logs}
    candidates: list[_Candidate] = []
    unknown = signatures.all["unknown"]
    for signature in signatures.all.values():
        if signature is not unknown:
            candidates += _counting(signature, matches, by_name)
    idle = [r for r in shown if r.is_idle and by_name[r.hit.source].rest(r.hit.offset).strip()]
    candidates = [c for c in candidates if not any(r.covers(c.hit) for r in idle)]
    explained = {(c.hit.source, c.hit.line) for c in candidates}
    rest = [c for c in _counting(unknown, matches, by_name) if (c.hit.source, c.hit.line) not in explained]
    raised_lines = {(r.hit.source, r.hit.line) for r in shown}
    texts = {c.hit.text for c in candidates}  # of a line that is repeated, only so many hits are kept
    rest = [c for c in rest if (c.hit.source, c.hit.line) not in raised_lines]
    rest = [_by_rule(c, [frame_before(c.hit)], "", signatures) for c in rest]
    for raised in shown:
        if raised in idle or raised.hit.text in texts or any(raised.covers(c.hit) for c in candidates):
            continue
        if _is_harmless(raised.hit, by_name[raised.hit.source], "unknown"):
            continue
        level = "unknown" if raised.derived else "symptom"
        pattern = replace(_UNKNOWN, level=level)
        facts = {"message": raised.hit.text.partition(": ")[2][:200] or raised.hit.text[:200]}
        unnamed = _Candidate(unknown, pattern, raised.hit, facts, len(raised.hit.text), raised)
        rest.append(unnamed if raised.derived else _by_rule(unnamed, raised.frames, raised.source, signatures))
    candidates += rest
    if not candidates and len(by_name) == 1:
        candidates = [_Candidate(unknown, _UNKNOWN, hit, {}, len(hit.text)) for hit in _last_words(logs[0])]
    for cause, hit, facts in filter(None, map(diverged, logs)):
        if not candidates or cause == "loss_nan":
            pattern = Pattern(cause, "", "symptom", lasting=True)
            candidates.append(_Candidate(signatures.all[cause], pattern, hit, facts, 0))
    return [c for c in candidates if not _is_superseded(c, candidates, by_name[c.hit.source])]


def _by_rule(candidate: _Candidate, frames: Sequence[str], source: str, signatures: Signatures) -> _Candidate:
    """Return the candidate with the cause of the first rule for endings that fits it, else unchanged.

    `frames` are those of its traceback, `source` is the last frame's line of code; both may be empty. What only reports
    another's death gets level "unknown".
    """
    if DERIVED.search(candidate.hit.text):
        return replace(candidate, pattern=replace(_UNKNOWN, level="unknown"))
    for ending in signatures.endings:
        facts = ending.facts(candidate.hit.text, frames, source)
        if facts is not None:
            pattern = replace(_UNKNOWN, level="symptom")
            return replace(candidate, signature=signatures.all[ending.cause], pattern=pattern, facts=facts)
    return candidate


def _last_words(log: Log) -> list[Hit]:
    """Return the error lines in the last lines of a log without other hits, unless the program goes on after them."""
    if log.last_match(ENDED_WELL) >= 0:
        return []
    said: list[Hit] = []
    for number, offset, text in program_lines(log)[-LAST_LINES:]:
        if LAST_WORDS.search(text) and not _WARNING.search(text) and not re.search(r"(?i)retry", text):
            said.append(Hit(log.name, number, offset, text, "", None, None, last=offset))
        elif GOES_ON_AFTER.search(text) or log.steps_after(offset - 1):
            said.clear()
    return said


def _is_superseded(candidate: _Candidate, candidates: Sequence[_Candidate], log: Log) -> bool:
    """Return whether training went on after a hit and later died of something else."""
    if candidate.pattern.lasting or log.steps_after(candidate.hit.last) < GOES_ON_STEPS:
        return False
    later = [
        c.hit
        for c in candidates
        if c.hit.source == log.name
        and c.hit.offset > candidate.hit.last
        and c.pattern.level in ("cause", "symptom")
        and not (c.raised and c.raised.derived)
    ]
    return any(log.steps_between(candidate.hit.last, hit.offset) >= GOES_ON_STEPS for hit in later)


@dataclass
class _Ends:
    """The exceptions in the end of the logs: all that are `shown`, and those among them that no signature knows."""

    shown: Sequence[Raised]
    unexplained: Sequence[Raised]
    candidates: Sequence[_Candidate]

    def after(self, hit: Hit) -> list[Raised]:
        """Return the unexplained exceptions that come after a hit in its log."""
        return [r for r in self.unexplained if r.hit.source == hit.source and r.hit.line > hit.line]

    def holds(self, hit: Hit) -> bool:
        """Return whether a hit is a line of an exception, or of its traceback or message."""
        return any(raised.covers(hit) for raised in self.shown)

    def known_after(self, candidate: _Candidate, levels: Sequence[str] = ("cause",)) -> list[Raised]:
        """Return the exceptions after a candidate's line that a signature of these levels knows as another cause."""
        hit = candidate.hit
        later = [r for r in self.shown if r.hit.source == hit.source and r.first > hit.line and not r.derived]
        other = [c for c in self.candidates if c.signature.id != candidate.signature.id and not c.raised]
        return [r for r in later if any(r.covers(c.hit) and c.pattern.level in levels for c in other)]

    def explained_by(self, candidate: _Candidate) -> bool:
        """Return whether the candidate explains the end of its log: no exception of another cause comes after it."""
        return not self.after(candidate.hit) and (self.holds(candidate.hit) or not self.known_after(candidate))

    def renamed(self, candidate: _Candidate) -> bool:
        """Return whether the exception is unknown, but one that its speaker raised while handling it is not."""
        if candidate.signature.id != "unknown" or candidate.raised is None:
            return False
        index = next(i for i, raised in enumerate(self.shown) if raised is candidate.raised)
        follower = next((r for r in self.shown[index + 1 :] if r.speaker == candidate.raised.speaker), None)
        named = [c for c in self.candidates if c.signature.id != "unknown"]
        return bool(follower and follower.chained and any(follower.covers(c.hit) for c in named))


def _level(candidate: _Candidate, died: Set[int | None], ends: _Ends) -> str:
    """Return the pattern's level, or a lower one.

    It is "echo" if the rank waited for others that died of an exception of their own, "remark" if the exception was
    caught, or if the line belongs to no exception and cannot have led to the one that follows it. `died` are the ranks
    with an exception that nothing explains.
    """
    hit, level = candidate.hit, candidate.pattern.level
    if candidate.signature.waits and hit.rank is not None and died - {hit.rank}:
        return "echo"
    if ends.renamed(candidate):
        return "remark"
    if candidate.signature.id == "unknown" or level not in ("cause", "symptom"):
        return level
    if ends.holds(hit):
        caught = any(r.covers(hit) and _is_outlived(r, ends.unexplained) for r in ends.shown)
        return "remark" if caught else level
    known, later = ends.known_after(candidate, ("cause", "symptom")), ends.after(hit)
    unrelated = later and not _may_lead_to(hit, later[0])
    aside = known and (_WARNING.search(hit.text) or _SLIP.search(known[0].hit.text) or ends.known_after(candidate))
    return "remark" if unrelated or aside else level


def _may_lead_to(hit: Hit, raised: Raised) -> bool:
    """Return whether a line outside of an exception's traceback may be what led to it: an error shortly before it."""
    is_error = _ERROR.search(hit.text) and not _WARNING.search(hit.text) and not _SLIP.search(raised.hit.text)
    return bool(is_error and raised.hit.line - hit.line <= NEAR_LINES)


def _is_outlived(caught: Raised, open_ends: Sequence[Raised]) -> bool:
    """Return whether the process went on after an exception until one of `open_ends` that does not follow from it."""
    later = [r for r in open_ends if r.speaker == caught.speaker and not r.chained]
    return any(r.first > caught.hit.line + CAUGHT_LINES for r in later)


def _order(candidate: _Candidate, several: bool) -> tuple[float, int, int]:
    """Return the key to sort candidates by: time, if `several` logs are read, then line, then longer matches first."""
    hit = candidate.hit
    moment = hit.time if several and hit.time is not None else float("inf")
    return moment, hit.line, -candidate.length


def _counting(signature: Signature, matches: Matches, by_name: dict[str, Log]) -> Iterator[_Candidate]:
    """Yield a candidate for each hit of a signature that meets its pattern's conditions and did harm (_is_harmless)."""
    for pattern in signature.patterns:
        if any(regex not in matches for regex in pattern.all) or any(regex in matches for regex in pattern.none):
            continue
        having = {hit.host for hit, _ in matches.get(pattern.lacks, ())} if pattern.lacks else set()
        for hit, match in matches.get(pattern.regex, ()):
            log = by_name[hit.source]
            if hit.kind and not (pattern.source and hit.kind == "source"):
                continue
            if pattern.lacks and (not having or not hit.host or hit.host in having):
                continue
            if (pattern.hosted and not hit.host) or (pattern.library and not is_of_library(hit, pattern.library)):
                continue
            if pattern.last is not None and len(re.findall(r"\S[^\r\n]*", log.rest(hit.last))) > pattern.last:
                continue
            level = pattern.level if signature.id != "unknown" else "unknown"
            level = "symptom" if signature.of_request else level
            if pattern.lasting or not _is_harmless(hit, log, level):
                facts = {name: value.strip() for name, value in match.groupdict().items() if value}
                facts = {name: _fill_sentence(value, facts) for name, value in pattern.says} | facts
                yield _Candidate(signature, pattern, hit, facts, match.end() - match.start())


def _is_harmless(hit: Hit, log: Log, level: str) -> bool:
    """Return whether training went on, or ended well, after a hit of a pattern of this level.

    After a warning or hint a single step is enough.
    """
    steps, ended_well = log.steps_after(hit.last), log.is_followed_by(ENDED_WELL, hit.last)
    warning = bool(_WARNING.search(hit.text))
    if warning and level == "echo":
        return True  # connections close at the end of a healthy run too; a rank that failed also prints an error
    if level == "hint" or warning:
        return steps > 0 or ended_well
    may_be_late = level == "unknown" or (level == "echo" and log.last_match(ENDED_WELL) >= 0)
    if may_be_late and _is_ignored(log, hit):
        return True
    if level != "cause" and log.last_match(SERVES) > max(hit.last, log.last_match(DIED)):
        return True  # one request failed, and the server answers the next
    died = log.is_followed_by(DIED, hit.last)
    death = log.last_match(DIED) if died else hit.last
    if log.is_followed_by(FINISHED, death):
        return True
    if died:  # what counts then is whether training outlived that too
        steps, ended_well = log.steps_after(death), log.is_followed_by(ENDED_WELL, death)
    enough = 2 if level == "unknown" or _GOES_ON.search(hit.text) else GOES_ON_STEPS
    return steps >= enough or (ended_well and (steps > 1 or level == "unknown"))  # the summary line counts as one


def _is_ignored(log: Log, hit: Hit, lines: int = 25) -> bool:
    """Return whether one of the `lines` before a hit says that it is ignored, or that of a thread beside training."""
    ignored = [other for other in log.hits if hit.line - lines < other.line < hit.line and IGNORED.search(other.text)]
    if not ignored or "in thread" not in ignored[-1].text:
        return bool(ignored)
    return log.last_match(ENDED_WELL) >= 0 or log.steps_between(0, hit.offset) > 0


def _finding(candidate: _Candidate, candidates: Sequence[_Candidate], program: Program, lang: str) -> Finding:
    """Return the finding for a candidate in a language and a program's words, with the facts of all of its cause."""
    signature, hit = candidate.signature, candidate.hit
    level = candidate.pattern.level if signature.id != "unknown" else "unknown"
    text = signature.unsure if level == "symptom" else signature.text
    title, explain, confirm = (each.get(lang, each["en"]) for each in (text.title, text.explain, text.confirm))
    same = [candidate, *(c for c in candidates if c.signature.id == signature.id)]
    facts: dict[str, str] = {}
    for other in same:
        facts = other.facts | facts
    _add_facts(signature.facts, hit, facts)
    _add_foreign_memory(facts)
    fix = [_fill_sentence(program.speak(step, lang), facts) for step in text.fix.get(lang, text.fix["en"])]
    return Finding(
        cause=_cause(signature),
        fatal=True,
        title=_fill_sentence(title, facts) or re.sub(r" ?[(（]\{\w+\}[)）]", "", title),
        explanation=" ".join(filter(None, (_fill_sentence(s, facts) for s in SENTENCE.split(explain)))),
        evidence="\n".join(_evidence(candidate, same if level == "unknown" else ())),
        file=hit.source,
        line=hit.line,
        host=hit.host,
        rank=hit.rank,
        fix="\n".join(filter(None, fix)),
        confirm=_fill_sentence(program.speak(confirm, lang), facts) or "",
        confidence={"cause": "high", "symptom": "medium"}.get(level, "low") if signature.names_cause else "low",
        doctor=signature.doctor if program.is_finlm else None,
        threads=signature.threads,
        facts=facts,
        by_rule=candidate.pattern.cause == "unknown" != signature.id,
        kind="" if signature.names_cause else signature.id,
    )


def _cause(signature: Signature) -> str:
    """Return the signature's id, or "unknown" if it does not name a cause."""
    return signature.id if signature.names_cause else "unknown"


def _evidence(candidate: _Candidate, others: Sequence[_Candidate]) -> list[str]:
    """Return up to 6 different lines: the hit's, its frame, at most 4 more of its message, then those of `others`."""
    raised, hit = candidate.raised, candidate.hit
    evidence = [hit.text.strip()[:400]]
    lines = [raised.frame if raised else frame_before(hit)]
    if raised:
        lines += [line.strip()[:400] for line in raised.message[:4] if line.strip()]
    lines += [text for _, _, text in sorted({(c.hit.source, c.hit.line, c.hit.text.strip()[:400]) for c in others})][:5]
    for line in lines:
        if line and line not in evidence:
            evidence.append(line)
    return evidence[:6]


def _add_facts(expressions: Sequence[str], hit: Hit, facts: dict[str, str]) -> None:
    """Add to `facts` the named groups that the expressions match in the lines around a hit, its own line first."""
    lines = [hit.text, *(clean(line)[0] for line in re.split("[\r\n]", hit.around.decode("utf-8", errors="replace")))]
    for regex in expressions:
        match = next(filter(None, (re.search(regex, line) for line in lines)), None)
        for name, value in match.groupdict().items() if match else ():
            if value:
                facts.setdefault(name, value.strip())


def _add_foreign_memory(facts: dict[str, str]) -> None:
    """Add to `facts` how much GPU memory other processes use, if total, free and this process's memory are known."""
    total, free, mine = (_gibibytes(facts.get(name, "")) for name in ("total", "free", "mine"))
    if total and free is not None and mine is not None and total - free - mine > 2:  # below: this process's context
        facts["foreign"] = f"{total - free - mine:.1f} GiB"


def _gibibytes(text: str) -> float | None:
    """Return the GiB that a text such as "512 MiB" says; None for other texts."""
    match = re.match(r"([\d.]+) ?(MiB|GiB|MB|GB)$", text)
    return float(match[1]) / (1024 if match[2][0] == "M" else 1) if match else None


def _fill_sentence(sentence: str, facts: dict[str, str]) -> str:
    """Return a sentence with the log's facts in its placeholders; "" if the log lacks one of them."""
    if any(name not in facts for name in PLACEHOLDER.findall(sentence)):
        return ""
    return PLACEHOLDER.sub(lambda match: facts[match[1]], sentence).strip()
