"""The exceptions in the end of a log, and rules that name the cause of one that no signature knows.

A signature knows words; a rule of endings.yaml knows only what most exceptions of a class mean, by the package that
raised it and the words of its message. It counts where no signature explains the exception, and is never certain.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finlm.diagnose.lines import FRAME, IN_LIBRARY, clean, moment, speaker
from finlm.diagnose.read import Hit, Log

CUT_LINES = 60  # within so many lines of its end a log is cut inside a traceback
MESSAGE_LINES = 12  # of a message over several lines, what signatures may explain
RAISED = re.compile(r"^(?:[A-Za-z_]\w*\.)*(?P<name>[A-Za-z_]\w*)(?:\(\w+\))?(?:: (?P<message>.*)|:?)$")
NO_ERROR = re.compile(r"^(?:\w+\.)*(?:KeyboardInterrupt|SystemExit: 0|\w*Warning)\b")
# Where a message over several lines ends at the latest: another speaker's line.
SPEAKS = re.compile(
    r"^(?:srun|slurmstepd|sbatch|salloc): |^\[?[EWI]\d{3,4} |^(?:ERROR|WARNING|INFO|DEBUG)\b|^\[?\d{4}-\d\d-\d\d|"
    r"^Killing subprocess|^={20}|^torch\.distributed\.elastic|^(?:Terminated|Killed|Aborted|Segmentation fault)\b|"
    r"^\s*\d+%\||^>> |^wandb: |^make: "
)
# What only says that another process, or an exception shown before, ended this one.
DERIVED = re.compile(
    r"ChildFailedError|RayTaskError|RayActorError|ActorDiedError|SignalException|SystemExit|CalledProcessError|"
    r"DatasetGenerationError|RendezvousConnectionError|ProcessRaisedException|ProcessExitedException|BrokenProcessPool|"
    r"EngineDeadError|EngineGenerateError|Engine (?:core|process)\S* (?:initialization )?failed|WorkerProc init|"
    r"RemoteTraceback|RemoteError|Worker failed with error|DistBackendError|DistNetworkError|DistStoreError|"
    r"subprocesses has abruptly died|scheduler died during|returned non-zero exit status|^EOFError$|"
    r"Error: .*\b(?:[Ss]erver|[Ee]ngine|[Ww]orker|[Pp]rocess|[Jj]ob|[Cc]hild|[Cc]ase)\b.{0,30}\b"
    r"(?:failed|died|crashed|exited)(?: unexpectedly| with (?:exit |return )?(?:code|status) \S+)?\.?$"
)


def read_yaml(path: Path) -> Any:
    """Return the content of a YAML file; uses PyYAML if installed, ten times as fast, else ruamel.yaml."""
    text = path.read_text(encoding="utf-8")
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError:
        from ruamel.yaml import YAML

        return YAML(typ="safe", pure=True).load(text)
    return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


@dataclass
class Raised:
    """An exception in a log: its line as a hit, the frame that raised it, and the lines of its message."""

    hit: Hit
    frames: list[str]  # of its traceback
    first: int  # line that its traceback begins with
    source: str = ""  # the line of code of the last frame
    message: list[str] = field(default_factory=list)
    chained: bool = False  # raised while another one was handled, which is its cause
    is_cut: bool = False  # the log ends inside its traceback, before the exception's own line

    @property
    def frame(self) -> str:
        """The last frame, which raised it; "" if there is none."""
        return self.frames[-1] if self.frames else ""

    @property
    def speaker(self) -> tuple[str, str, int | None]:
        """The log, host and rank that printed it."""
        return self.hit.source, self.hit.host, self.hit.rank

    @property
    def derived(self) -> bool:
        """Whether the exception only reports the death of another process, or is cut off."""
        return self.is_cut or bool(DERIVED.search(self.hit.text))

    def covers(self, hit: Hit) -> bool:
        """Return whether a line is this exception's, or belongs to its traceback or message."""
        return hit.source == self.hit.source and self.first <= hit.line <= self.hit.line + len(self.message)


@dataclass
class _Traceback:
    """A traceback whose exception has not been printed yet; `between` counts the other lines since its last frame."""

    first: int
    frames: list[str]
    source: str = ""
    between: int = 0


def exceptions(log: Log) -> list[Raised]:
    """Return the exceptions in the stored end of a log, in the order of their lines.

    Tracebacks without an exception that stand in the last CUT_LINES lines come last, with `is_cut`.
    """
    shown: list[Raised] = []
    opened: dict[tuple[str, int | None], _Traceback] = {}  # by speaker
    told: Raised | None = None  # whose message may go on
    chained: set[tuple[str, int | None]] = set()  # speakers whose next exception follows from their last
    number = 0
    for number, offset, line in tail_lines(log):
        text, said = clean(line)
        who = speaker(text, said)
        text = re.sub(r"^\s*(?:\| )+", "", text)  # an ExceptionGroup's branches
        if "another exception occurred:" in text or "direct cause of the following" in text:
            chained.add(who)
        frame = FRAME.match(text)
        if frame or "Traceback (most recent call last)" in text:
            now = opened.get(who) if frame else None
            opened[who] = _Traceback(
                now.first if now else number, [*(now.frames if now else ()), *([text.strip()] if frame else ())]
            )
            told = None
        elif who in opened:
            now = opened[who]
            match = RAISED.match(text)
            if match and (now.between == 0 or match["name"][:1].isupper()) and not NO_ERROR.match(text):
                del opened[who]
                hit = Hit(log.name, number, offset, text, *who, moment(line), last=offset)
                told = Raised(hit, now.frames, now.first, now.source, chained=who in chained)
                chained.discard(who)
                shown.append(told)
            elif text[:1].strip() and not text.startswith(("^", "[Previous line")):
                now.between += 1
                if now.between > 41:
                    del opened[who]
            elif text.strip(" ~^"):
                now.source = now.source or text.strip()
        elif told and len(told.message) < MESSAGE_LINES and not SPEAKS.match(text):
            if number == told.hit.line + len(told.message) + 1:
                told.message.append(text)
        else:
            told = None
    for who, now in opened.items():
        if now.frames and not now.between and number - now.first < CUT_LINES:
            hit = Hit(log.name, now.first, log.size, now.frames[-1], *who, None, last=log.size)
            shown.append(Raised(hit, now.frames, now.first, now.source, is_cut=True))
    return shown


def tail_lines(log: Log) -> Iterator[tuple[int, int, str]]:
    """Yield (line number, byte offset, text) of the lines in the stored end of a log; a redrawn bar's last state."""
    offset, number = log.size - len(log.tail), log.tail_line
    for raw in log.tail.split(b"\n"):
        yield number, offset, raw.rsplit(b"\r", 1)[-1].decode("utf-8", errors="replace")
        number += 1
        offset += len(raw) + 1


_DUMP = re.compile(r"(?<=Error): \{['\"].*")  # a dictionary printed as a message says nothing in words
# Frames that pass on what another did: the interpreter's own files, torch's wrappers, a lookup in a module.
_PASSES_ON = re.compile(
    r"/lib/python3[\d.]*/(?!(?:site|dist)-packages)|torch/(?:nn/modules/(?:module|container)|utils/_contextlib|_ops|"
    r"_dynamo/eval_frame|amp/autocast_mode|autograd/(?:__init__|graph|function)|_tensor|utils/checkpoint)\.py|"
    r"functools\.py|contextlib\.py|<frozen |<string>|<decorator"
)


@dataclass(frozen=True)
class Ending:
    """A rule that names the cause of an exception which no signature knows, by its class, words and place.

    `says` has (name, text) of facts; {names} of other facts in a text are replaced.
    """

    cause: str
    error: re.Pattern[str]  # of the exception's line
    frame: re.Pattern[str]  # of the last frame that does not only pass on what another did
    source: re.Pattern[str]  # of the last frame's line of code
    library: bool | None  # whether an installed package raised it; None for any place, and for no place
    says: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, rule: Mapping[str, Any]) -> Ending:
        """Return the rule that an entry of endings.yaml describes. Raises KeyError without cause, re.error."""
        error, frame, source = (re.compile(rule.get(key, "")) for key in ("error", "frame", "source"))
        return cls(rule["cause"], error, frame, source, rule.get("library"), tuple(rule.get("says", {}).items()))

    def facts(self, error: str, frames: Sequence[str], source: str) -> dict[str, str] | None:
        """Return what the rule says of an exception: {name: text}; None if the rule does not fit it.

        `error` is the exception's line, `source` the last frame's line of code, "" if unknown. Names are error, why,
        source, place, package, those of `says` and the groups of the rule's expression, as far as they are known.
        """
        telling = next((frame for frame in reversed(frames) if not _PASSES_ON.search(frame)), "".join(frames[-1:]))
        match = self.error.search(_DUMP.sub("", error))
        if not match or not self.frame.search(telling) or not self.source.search(source):
            return None
        if self.library is not None and (not telling or self.library != bool(IN_LIBRARY.search(telling))):
            return None
        facts = {name: value.strip() for name, value in match.groupdict().items() if value}
        error = error.strip(" .:")[:200]
        facts |= {"error": error, "why": error.partition(": ")[2] or error}
        facts |= {"source": source[:200]} if source else {}
        place = re.match(r'File "?(?P<file>[^"]+?)"?(?:, line |:)(?P<line>\d+)', telling)
        if place:
            facts["place"] = f"{Path(place['file']).name}:{place['line']}"
            package = re.search(r"-packages/(\w+)", place["file"]) or IN_LIBRARY.search(place["file"])
            facts |= {"package": package[package.lastindex or 0].strip("/")} if package else {}
        known = [(name, text) for name, text in self.says if set(re.findall(r"\{(\w+)\}", text)) <= set(facts)]
        return facts | {name: text.format_map(facts) for name, text in known}
