"""Reads logs of any size: finds the lines that hold a signature's words, cleans them, notes rank, host and time.

One combined search over raw blocks picks candidate lines; only those are decoded and matched, and of lines that differ
in digits only the first few. That makes 500 MB a matter of seconds, and bounds memory whatever the log holds.
Python 3.8 and the standard library only: diagnose.py also runs as a script on a bare host.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

BLOCK_BYTES = 1 << 22
LINE_BYTES = 4096  # of a longer line this much on either side of the match is looked at
TAIL_BYTES = 1 << 18
SAME_SHAPE = 4  # lines alike but for their digits that are kept
SAME_WORD = 500  # lines looked at for one literal
SHAPES = 500_000  # hashes of line shapes remembered
AROUND_BYTES = 6000  # text on either side of a hit that may lend numbers to its explanation

_NUMBERS = b"0123456789abcdefABCDEF.:-_"  # what tells lines of one shape apart: decimal and hexadecimal numbers
_COMMON = " etaonirs0123456789lcd:.'hpumg,/-[]()fywbNCLIFOE_v=\"kTSARDPM"  # from frequent to rare in logs
_TEXT = re.compile(rb"[\t -~\x80-\xf4]{12,}|\n")
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07")
_PREFIX = re.compile(
    r"""^\s*(?:
        \[?(?:default|rank\s?)?(?P<rank>\d+)\]:?(?:\[rank\d+\]:?)?(?=[\s\[]|\w)(?!\])   # [rank3]:  [default3]:  [3]:
      | \((?P<actor>\w+)\s+pid=\d+(?:,\s*ip=(?P<ip>[\w.:-]+))?\)                        # Ray
      | \[(?P<tag>[A-Za-z][\w.-]*-[\w.-]+|[A-Za-z][\w.]*\d)\](?=\s)                     # [gpu-a]
      | (?P<pod>[\w.-]+)\s+\|(?=\s)                                                     # docker compose
      | (?P<host>(?:[\dx]{1,3}\.){3}[\dx]{1,3}|[A-Za-z][\w-]*[-\d][\w.-]*):(?=\s)         # pdsh
      | \d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[.\d]*(?:Z|[+-]\d\d:?\d\d)?(?:\s(?:stdout|stderr)\s[FP])?(?=\s)  # containers
    )[ ]?""",
    re.VERBOSE,
)
_NCCL_HOST = re.compile(r"^(?P<host>[A-Za-z][\w.-]*):\d+:\d+ \[\d+\]")
_RANK = re.compile(r"\[Rank (\d+)\]|\brank(?:\s*:\s*|=)(\d+)")
_DATE = re.compile(r"\b\d{4}-(\d\d)-(\d\d)[T _](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,6}))?")
_GLOG = re.compile(r"(?:^|[\s\[])[IWEF](\d{1,2})(\d\d) (\d\d):(\d\d):(\d\d)\.(\d{1,6})")
_MARKS = (b"loss", b"it/s", b"s/it", b"step")
_STEP = re.compile(
    r"""(?:train_)?loss['"]?\s*[:=]\s*['"]?-?\d[\d.e+-]* | \b\d+/\d+\s+\[[\d:]+<[^\]]*(?:it/s|s/it)
      | \b[Ss]tep[\s:=]+\d+ | \bloss\s\d+\.\d+""",
    re.VERBOSE,
)
_PREPARING = re.compile(
    r"(?i)\b(load|map|generat|tokeni|download|fetch|resolv|filter|sav|pack|writ|creat|convert|add|truncat|apply|shard)"
)


@dataclass
class Hit:
    """A line that holds the words of a pattern."""

    source: str
    line: int
    offset: int
    text: str
    host: str
    rank: int | None
    time: float | None
    last: int = 0  # byte offset of the last line of this shape
    around: bytes = b""


@dataclass
class Log:
    """What one log told: candidate lines in order, how often each shape came, and its end."""

    name: str
    hits: list[Hit] = field(default_factory=list)
    size: int = 0
    lines: int = 0
    steps: list[tuple[int, str]] = field(default_factory=list)  # byte offset and text of training progress, the last
    tail: bytes = b""
    ends: dict[re.Pattern[bytes], int] = field(default_factory=dict)  # byte offset at which its last match in tail ends

    def rest(self, offset: int) -> str:
        """The text behind the line at a byte offset, as far as the kept tail reaches back."""
        behind = self.tail[max(0, offset - (self.size - len(self.tail))) :]
        if offset >= self.size - len(self.tail):
            behind = behind.partition(b"\n")[2]
        return behind.decode("utf-8", errors="replace")

    def is_followed_by(self, expression: re.Pattern[bytes], offset: int) -> bool:
        """Whether an expression matches in rest(offset). The tail, long as it is, is searched once for all offsets."""
        first = self.size - len(self.tail)
        if expression not in self.ends:
            self.ends[expression] = max((first + match.end() for match in expression.finditer(self.tail)), default=-1)
        newline = self.tail.find(b"\n", offset - first) if offset >= first else -1
        behind = first + newline + 1 if newline >= 0 else self.size if offset >= first else first
        return self.ends[expression] > behind

    def steps_after(self, offset: int) -> int:
        """Different progress lines behind a byte offset; a bar redrawn in place counts once."""
        return len({text for place, text in self.steps if place > offset})


class Prefilter:
    """One bytes search for every literal. Each is entered at its rarest character, so most positions cost nothing."""

    def __init__(self, literals: set[str]) -> None:
        tails: dict[bytes, set[bytes]] = {}
        for literal in literals:
            cut = rarity(literal)[1].encode("utf-8")
            tails.setdefault(cut[:1], set()).add(cut[1:])
        groups = []
        for first, rests in sorted(tails.items()):
            inner: dict[bytes, list[bytes]] = {}
            for rest in sorted(rests):
                inner.setdefault(rest[:1], []).append(rest[1:])
            parts = [re.escape(c) + b"(?:" + b"|".join(map(re.escape, tail)) + b")" for c, tail in inner.items()]
            groups.append(re.escape(first) + b"(?:" + b"|".join(parts) + b")")
        self.search = re.compile(b"|".join(groups)).search
        self.count: dict[bytes, int] = {}  # lines looked at for each literal, of the log being read


def rarity(literal: str) -> tuple[int, str]:
    """How rare a literal is by its rarest character, and the literal from there on; -100 below four bytes.

    At least six characters are kept where there are so many: short pieces of words are found in any text.
    """
    if len(literal.encode("utf-8")) < 4:
        return -100, literal
    places = range(max(1, len(literal) - 5))
    rank, cut = max(
        (((_COMMON + literal[i]).index(literal[i]), literal[i:]) for i in places), key=lambda place: place[0]
    )
    return (rank if len(literal) > 5 else rank - 30), cut


def scan(file: BinaryIO, name: str, prefilter: Prefilter, first: int = 1) -> Log:
    """Read a log to its end; first: the number of the line it is at.

    Never raises on content: binary, endless lines and broken UTF-8 are all bytes.
    """
    log = Log(name)
    seen: set[int] = set()
    kept: dict[int, list[Hit]] = {}
    host, rank = _of_name(name)
    prefilter.count.clear()
    tail = b""
    for block, offset, line in _blocks(file, first):
        counted = 0
        for start, end, shape in _candidates(block, seen, kept, offset, prefilter):
            line += block.count(b"\n", counted, start)
            counted = start
            hit = _hit(name, block[start:end], block[max(0, start - 2048) : start], host, rank)
            hit.line, hit.offset, hit.last = line, offset + start, offset + start
            hit.around = block[max(0, start - AROUND_BYTES) : end + AROUND_BYTES] if len(log.hits) < 500 else b""
            kept.setdefault(shape, []).append(hit)
            log.hits.append(hit)
        log.size = offset + len(block)
        log.lines += block.count(b"\n")
        tail = (tail + block)[-TAIL_BYTES:]
    log.steps, log.tail = _progress(tail, log.size - len(tail)), tail
    log.lines += bool(tail) and not tail.endswith(b"\n")
    return log


def _blocks(file: BinaryIO, line: int) -> Iterator[tuple[bytes, int, int]]:
    """Blocks of whole lines with their byte offset and first line number; an endless line comes in pieces."""
    rest, offset = b"", 0
    while True:
        read = file.read(BLOCK_BYTES)
        data = rest + read
        if not data:
            return
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if not read:
            end = len(data)
        elif not end:
            end = max(0, len(data) - LINE_BYTES)
        yield data[:end], offset, line
        line += data.count(b"\n", 0, end)
        offset += end
        rest = data[end:]


def _candidates(
    block: bytes, seen: set[int], kept: dict[int, list[Hit]], offset: int, prefilter: Prefilter
) -> Iterator[tuple[int, int, int]]:
    """Start, end and shape of lines that hold a literal and whose shape is not known well enough yet.

    `seen` grows by the shapes that need no further look: without a literal, or kept often enough.
    """
    block = block.replace(b"\r", b"\n")  # a redrawn bar is a line on the screen; the length stays the same
    if b"\0" in block:
        block = _without_garbage(block)
    shapes = [hash(line) for line in block.translate(None, _NUMBERS).split(b"\n")]
    distinct = set(shapes)
    new = distinct - seen
    if not new and not distinct & kept.keys():
        return
    lines = block.split(b"\n")
    starts = [0, *accumulate(len(line) + 1 for line in lines)]
    for i, shape in enumerate(shapes):
        if shape not in new or shape in seen:
            continue
        found = False
        for low, high in _matches(lines[i], prefilter):
            found = True
            yield starts[i] + low, starts[i] + high, shape
        if not found or len(kept[shape]) >= SAME_SHAPE:
            seen.add(shape)
    for shape in distinct & kept.keys():  # also of lines that were not kept: only what comes after all of them is later
        last = offset + starts[len(shapes) - 1 - shapes[::-1].index(shape)]
        kept[shape][-1].last = max(kept[shape][-1].last, last)
    if len(seen) > SHAPES:
        seen.clear()


def _without_garbage(block: bytes) -> bytes:
    """A binary block with everything but lines and runs of text blanked out, of the same length."""
    clean = bytearray(b" " * len(block))
    for run in _TEXT.finditer(block):
        clean[run.start() : run.end()] = run.group()
    return bytes(clean)


def _matches(line: bytes, prefilter: Prefilter) -> Iterator[tuple[int, int]]:
    """The whole line once if it holds a literal; of an endless one the parts around literals."""
    place = 0
    while True:
        match = prefilter.search(line, place)
        if match is None:
            return
        word = match.group()
        prefilter.count[word] = prefilter.count.get(word, 0) + 1
        if prefilter.count[word] > SAME_WORD:
            place = match.end()
            continue
        if len(line) <= LINE_BYTES:
            yield 0, len(line)
            return
        place = min(len(line), match.start() + LINE_BYTES)
        yield max(0, match.start() - LINE_BYTES), place


def clean(text: str) -> tuple[str, dict[str, Any]]:
    """A line without colours and launchers' prefixes, and what those prefixes said."""
    text = _ANSI.sub("", text).rstrip()
    said: dict[str, Any] = {}
    for _ in range(4):
        match = _PREFIX.match(text)
        if not match or match.end() == 0:
            break
        said.update({key: value for key, value in match.groupdict().items() if value})
        text = text[match.end() :]
    return text, said


def _hit(name: str, raw: bytes, before: bytes, host: str, rank: int | None) -> Hit:
    text, said = clean(raw.decode("utf-8", errors="replace"))
    nccl = _NCCL_HOST.match(text)
    own = said.get("ip") or said.get("host") or said.get("tag") or said.get("pod") or (nccl and nccl["host"])
    named = _RANK.search(text)
    if "rank" in said:
        rank = int(said["rank"])
    elif named:
        rank = int(named[1] or named[2])
    whole = raw.decode("utf-8", errors="replace")
    moment = _time(whole)
    if moment is None:
        moments = [_time(line) for line in before.decode("utf-8", errors="replace").splitlines()[-12:]]
        moment = next((moment for moment in reversed(moments) if moment is not None), None)
    return Hit(name, 0, 0, text, own or host, rank, moment)


def _time(text: str) -> float | None:
    """Seconds since the start of the year, for ordering only; the zone is the host's."""
    match = _DATE.search(text) or _GLOG.search(text)
    if match is None:
        return None
    month, day, hour, minute, second = (int(match[i]) for i in range(1, 6))
    return (((month * 31 + day) * 24 + hour) * 60 + minute) * 60 + second + float("0." + (match[6] or "0"))


def _of_name(name: str) -> tuple[str, int | None]:
    """Host and rank of logs/<host>.<rank>.log."""
    match = re.match(r"(.+)\.(\d+)\.log$", Path(name).name)
    return (match[1], int(match[2])) if match else ("", None)


def _progress(data: bytes, offset: int) -> list[tuple[int, str]]:
    """Byte offsets and texts of lines on which training moved."""
    steps = []
    place = offset
    for raw in re.split(rb"[\r\n]", data):
        if any(mark in raw for mark in _MARKS) and len(raw) < LINE_BYTES:
            text = raw.decode("utf-8", errors="replace")
            match = _STEP.search(text)
            if match and not _PREPARING.search(text[: match.start()]):
                steps.append((place, re.sub(r"\s*\[.*", "", match[0]) if "[" in match[0] else match[0]))
        place += len(raw) + 1
    return steps
