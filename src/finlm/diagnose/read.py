"""Read logs of any size: find the lines that have a signature's words, clean them, note rank, host and time.

A combined search over raw blocks picks candidate lines; only those are decoded and matched, and of lines that differ in
digits only the first few. That makes 500 MB a matter of seconds, and bounds memory whatever the log has in it.

A file that several launches were appended to (nohup >>, Slurm, LSF) is one log with several launches: a launch begins
at a line that only launchers and starting programs print, once the former launch has ended.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, BinaryIO

import ahocorasick

from finlm.diagnose.lines import FRAME, IN_LIBRARY, Hit, Log, kind, moment, of_name, speaker, tail_lines
from finlm.diagnose.prefix import clean

BLOCK_BYTES = 1 << 22
LINE_BYTES = 4096  # of a longer line this much on either side of the match is looked at
HEAD_BYTES = 1 << 16
TAIL_BYTES = 1 << 18
SAME_SHAPE = 4  # lines alike but for their digits that are kept
SAME_WORD = 500  # lines looked at for one literal
GRAM_BITS, GRAM_BYTES, GRAM_FACTOR = (
    18,
    1 << 18,
    2654435761,
)  # of a table of four bytes in a row; blocks that fit a cache
SHAPES = 500_000  # hashes of line shapes remembered
AROUND_BYTES = 6000  # text on either side of a hit that may lend numbers to its explanation

_NUMBERS = b"0123456789abcdefABCDEF.:-_"  # what tells lines of one shape apart: decimal and hexadecimal numbers
_COMMON = " etaonirs0123456789lcd:.'hpumg,/-[]()fywbNCLIFOE_v=\"kTSARDPM"  # from frequent to rare in logs
_CLOCK = re.compile(rb"\d:\d\d:\d\d")
_TEXT = re.compile(rb"[\t -~\x80-\xf4]{12,}|\n")
_MARKS = (b"loss", b"Loss", b"it/s", b"s/it", b"step", b"Epoch ", b"\t")
_STEP = re.compile(
    r"""(?:train_)?[Ll]oss['"]?\s*[:=]\s*['"]?-?\d[\d.e+-]* | \b\d+/\d+\s+\[[\d:]+<[^\]]*(?:it/s|s/it)
      | \b[Ss]tep[\s:=]+\d+ | \bloss\s\d+\.\d+ | \[\s*\d+/\d+\s[\d:]+(?:\s<\s[\d:]+)?,[^]]*Epoch
      | ^\s*\d+\s?\t\s?\d+\.\d{4,6}\b""",
    re.VERBOSE,
)
_EPOCH = re.compile(r"(?i)\bepoch\W{0,4}\d+(?![.\d])")
_PREPARING = re.compile(
    r"(?i)\b(load|map|generat|tokeni|download|fetch|resolv|filter|sav|pack|writ|creat|convert|add|truncat|apply|shard)"
)
# What only a launcher, or a program that could not even begin, prints: a new launch once the former has ended.
_BEGINS = re.compile(
    r"runner\.py:\d+:main\] cmd = |nohup: ignoring input|Setting OMP_NUM_THREADS environment variable for each|"
    r"INFO:root:Using nproc_per_node|Initializing \d+ distributed tasks at|Started a local Ray instance|"
    r"values were not passed to `accelerate launch`|vLLM API server version|run sh: `|"
    r"^(?:Job (?:started|begins)|Start(?:ing|ed)? (?:job|training|run)\b|SLURM_JOB_?ID)"
)
_NEVER_BEGAN = re.compile(r"^usage: |SyntaxError|IndentationError|can't open file '")
# What a rank prints when it begins: a new launch only when the launcher itself had reported the end of the former.
_RANK_BEGINS = re.compile(r"get_accelerator\] Setting ds_accelerator|checkpoint shards: +0%\|")
TRAINER_ENDS = r"train_runtime(?!': [\d.]+, 'train_tokens)"  # LLaMA-Factory's lines of progress have both
_LAUNCHER_ENDS = re.compile(
    r"ChildFailedError|exits with return code = |exits successfully|Exited with exit code|output \(if any\) is above|"
    r"ON \S+ CANCELLED AT|sigkill_handler\] Killing subprocess|Training completed\. Do not forget|" + TRAINER_ENDS
)
_RANK_ENDS = re.compile(
    r"^(?:\w+\.)*[A-Z]\w*(?:Error|Exception|Interrupt)\b|: error: |command not found|"
    r"core dumped|Segmentation fault|^Killed$"
)
LAUNCH_MARKS = (_BEGINS.pattern, _NEVER_BEGAN.pattern, _RANK_BEGINS.pattern, _LAUNCHER_ENDS.pattern)


def begins_launch(text: str, end: str) -> bool:
    """Return whether a cleaned line begins a launch, given `end`, the line that ended the former launch; "" for any."""
    if _NEVER_BEGAN.search(text):
        return not re.search(r"SyntaxError|IndentationError|: error: |can't open", end)  # each rank prints it
    return bool(_BEGINS.search(text) or (_RANK_BEGINS.search(text) and (not end or ends_launch(end) == "launcher")))


def ends_launch(text: str) -> str:
    """Return who reports the end of a launch in this line, "launcher" or "rank"; "" if the line reports none."""
    if _LAUNCHER_ENDS.search(text):
        return "launcher"
    return "rank" if _RANK_ENDS.search(text) else ""


class Prefilter:
    """A search for all literals at once (Aho-Corasick), whose time does not grow with their number."""

    def __init__(self, literals: set[str]) -> None:
        """Build the automaton of these literals, none of them empty."""
        self.automaton: Any = ahocorasick.Automaton()
        for literal in literals:
            word = literal.encode("utf-8").decode("latin-1")  # it searches text; so every byte is a character
            self.automaton.add_word(word, word)
        self.automaton.make_automaton()
        self.count: dict[str, int] = {}  # lines looked at for each literal, of the launch being read
        self.windows = {_rare_window(literal.encode("utf-8")) for literal in literals}
        self.varied = False  # whether the last block had few lines of known shapes
        self._known: Any = None

    def near(self, block: bytes) -> tuple[list[int], list[int]]:
        """Return (starts, ends), byte offsets of the lines that may have a literal: they have its rarest 8 bytes.

        Sets `varied`. For text in which every line differs, numpy finds these bytes many times as fast as the
        automaton.
        """
        import numpy as np

        if self._known is None:
            table = np.zeros(1 << GRAM_BITS, dtype=np.bool_)
            firsts = np.frombuffer(b"".join(window[:4] for window in self.windows), "<u4")
            table[(firsts * np.uint32(GRAM_FACTOR)) >> np.uint32(32 - GRAM_BITS)] = True
            sizes = sorted({len(window) for window in self.windows})
            whole = {n: b"".join(w.ljust(8, b"\0") for w in self.windows if len(w) == n) for n in sizes}
            masks = {n: np.uint64(256**n - 1) for n in sizes}
            self._known = table, [(masks[n], np.unique(np.frombuffer(whole[n], "<u8"))) for n in sizes]
        table, windows = self._known
        padded = block + b"\0" * 8
        eights = np.ndarray((len(block),), "<u8", buffer=padded, strides=(1,))
        places = []
        for begin in range(0, len(block), GRAM_BYTES):
            size = min(GRAM_BYTES, len(block) - begin)
            here = np.ndarray((size,), "<u4", buffer=padded, offset=begin, strides=(1,))
            hits = begin + np.flatnonzero(table[(here * np.uint32(GRAM_FACTOR)) >> np.uint32(32 - GRAM_BITS)])
            values = eights[hits]
            cut = [(values & mask, known) for mask, known in windows]
            same = [known[np.searchsorted(known, value) % len(known)] == value for value, known in cut]
            places.append(hits[np.logical_or.reduce(same)])
        newlines = np.flatnonzero(np.frombuffer(block, np.uint8) == 10)
        lines = np.unique(np.searchsorted(newlines, np.concatenate([*places, np.zeros(0, np.intp)])))
        self.varied = len(lines) * 2 < len(newlines)
        starts, ends = np.append(0, newlines + 1)[lines], np.append(newlines, len(block))[lines]
        return starts.tolist(), ends.tolist()

    def words(self, text: str) -> set[str]:
        """Return the literals that occur in a text."""
        matches = self.automaton.iter(text.encode("utf-8").decode("latin-1"))
        return {word.encode("latin-1").decode("utf-8") for _, word in matches}

    def places(self, lines: Sequence[bytes]) -> dict[int, list[tuple[int, str]]]:
        """Return {index of a line: [(byte offset in the line, literal)]} for the lines that have literals.

        Literals may overlap and are ordered by their ends; case counts. Each is its UTF-8 bytes read as Latin-1.
        """
        places: dict[int, list[tuple[int, str]]] = {}
        ends = [sum_ + i for i, sum_ in enumerate(accumulate(map(len, lines)), 1)]
        index = 0
        for last, word in self.automaton.iter(b"\n".join(lines).decode("latin-1")):
            while ends[index] <= last:
                index += 1
            places.setdefault(index, []).append((last + 1 - len(word) - (ends[index] - len(lines[index]) - 1), word))
        return places


def _rare_window(literal: bytes) -> bytes:
    """Return eight consecutive bytes of a literal, or all if it has fewer, whose first four are rarest in logs."""
    ranks = [(_COMMON + chr(byte)).index(chr(byte)) for byte in literal]
    first = max(range(max(1, len(literal) - 7)), key=lambda i: sum(ranks[i : i + 4]))
    return literal[first : first + 8]


def rarity(literal: str) -> tuple[int, str]:
    """Return (rank of a literal's rarest character in logs, the literal from there on); rank -100 below four bytes."""
    if len(literal.encode("utf-8")) < 4:
        return -100, literal
    places = range(max(1, len(literal) - 5))
    rank, cut = max(
        (((_COMMON + literal[i]).index(literal[i]), literal[i:]) for i in places), key=lambda place: place[0]
    )
    return (rank if len(literal) > 5 else rank - 30), cut


def scan(file: BinaryIO, name: str, prefilter: Prefilter, first: int = 1) -> Log:
    """Read a log to its end and return it as a Log; `first` is the number of the line that comes next in `file`.

    Never raises on content: binary data, endless lines, UTF-16 and broken UTF-8 are read as bytes. Raises OSError.
    Resets the prefilter's `count` and `varied`.
    """
    log = Log(name, launches=[(0, first)])
    seen: set[int] = set()
    kept: dict[int, list[Hit]] = {}
    host, rank = of_name(name)
    prefilter.count.clear()
    prefilter.varied = False
    tail, ended, former = b"", None, 0
    block, number = b"", first
    for block, offset, number in _blocks(file, first):
        counted, line = 0, number
        log.head = log.head or block[:HEAD_BYTES]
        for start, end, shape in _candidates(block, seen, kept, offset, prefilter):
            line += block.count(b"\n", counted, start)
            counted = start
            hit = _hit(name, block[start:end], block[max(0, start - 2048) : start], host, rank)
            hit.line, hit.offset, hit.last = line, offset + start, offset + start
            if ended and hit.host == ended.host and begins_launch(hit.text, ended.text):
                log.launches.append((hit.offset, line))
                for known in (seen, kept, prefilter.count):  # its lines are looked at anew
                    known.clear()
                for before in log.hits[former:]:
                    before.around = b""
                ended, former = None, len(log.hits)
            if ends_launch(hit.text) and not (ended and ends_launch(ended.text) == "launcher"):
                ended = hit
            hit.around = (
                block[max(0, start - AROUND_BYTES) : end + AROUND_BYTES] if len(log.hits) - former < 500 else b""
            )
            kept.setdefault(shape, []).append(hit)
            log.hits.append(hit)
        log.size = offset + len(block)
        tail = (tail + block)[-TAIL_BYTES:]
    log.lines = number - first + block.count(b"\n")
    log.steps, log.tail = _progress(tail, log.size - len(tail)), tail
    log.tail_line = first + log.lines - tail.count(b"\n")
    log.lines += bool(tail) and not tail.endswith(b"\n")
    return log


def _blocks(file: BinaryIO, line: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield (block of whole lines, its byte offset, its first line number); an endless line comes in pieces.

    `line` is the number of the first line. UTF-16 becomes UTF-8, so offsets count the bytes of UTF-8.
    """
    rest, offset, decoder = b"", 0, None
    while True:
        read = file.read(BLOCK_BYTES if offset else BLOCK_BYTES >> 4)  # a small first: what it teaches saves time
        if not offset and not rest:
            decoder = _utf16(read)
        if decoder:  # PowerShell's > writes UTF-16
            text = decoder.decode(read, not read)
            read = text.encode("utf-8", errors="replace") or (b"\n" if read else b"")
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


def _utf16(data: bytes) -> codecs.IncrementalDecoder | None:
    """Return a decoder if a log begins like UTF-16, with many zeros in every second byte, else None.

    A byte order mark alone is not enough.
    """
    begin = data[:4096]
    zeros = [begin[i::2].count(0) / max(1, len(begin) // 2) for i in (0, 1)]
    if len(begin) < 8 or min(zeros) > 0.02 or max(zeros) < 0.3:
        return None
    marked = data[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    name = "utf-16" if marked else "utf-16-le" if zeros[1] > zeros[0] else "utf-16-be"
    return codecs.getincrementaldecoder(name)(errors="replace")


def _candidates(
    block: bytes, seen: set[int], kept: dict[int, list[Hit]], offset: int, prefilter: Prefilter
) -> Iterator[tuple[int, int, int]]:
    """Yield (start, end, shape), in bytes of the block, of lines with a literal and a shape that is not in `seen`.

    Of an endless line, yields the parts around its literals. A shape is the hash of a line without its numbers. Before
    the next one, the caller must add a hit to kept[shape]; at a launch, first clear seen, kept and prefilter.count.
    Adds to `seen` shapes without a literal and those with SAME_SHAPE hits. Updates the last hits' `last`, and the
    prefilter's `varied` and `count`. `offset` is the block's in the log.
    """
    block = block.replace(b"\r", b"\n")  # a redrawn bar is a line on the screen; the length stays the same
    if b"\0" in block:
        block = _without_garbage(block)
    near = prefilter.near(block) if prefilter.varied else None
    if near:
        block = b"\n".join([block[start:end] for start, end in zip(*near, strict=True)])
    shapes = list(map(hash, block.translate(None, _NUMBERS).split(b"\n"))) if not near or near[0] else []
    distinct = set(shapes)
    starts, lines, begin = near[0] if near else [], [], 0
    if not distinct <= seen:
        lines = block.split(b"\n")
        starts = starts or [0, *(i + size for i, size in enumerate(accumulate(map(len, lines)), 1))]
    if not near:
        prefilter.varied = len(distinct - seen) * 4 > len(shapes)
    while begin < len(lines):
        if begin or distinct & seen:
            unseen: Sequence[int] = [i for i in range(begin, len(lines)) if shapes[i] not in seen]
            places = {unseen[index]: words for index, words in prefilter.places([lines[i] for i in unseen]).items()}
            silent = {shapes[i] for i in unseen} - {shapes[i] for i in places}
        else:  # as in text where every line differs
            places = prefilter.places(lines)
            silent = distinct - {shapes[i] for i in places}
        begin = len(lines)
        for i, words in places.items():
            shape, known = shapes[i], len(seen)
            if shape in seen:
                continue
            spans = _spans(len(lines[i]), words, prefilter)
            for low, high in spans:
                yield starts[i] + low, starts[i] + high, shape
            if len(seen) < known:  # a launch began here: what was known of the former is forgotten
                begin = i + 1
                break
            if not spans or (len(kept[shape]) >= SAME_SHAPE and not begins_launch(kept[shape][-1].text, "")):
                seen.add(shape)
        else:
            seen |= silent
    if common := distinct & kept.keys():
        shapes.reverse()
        back = {shape: shapes.index(shape) for shape in common}  # lines from the block's end, 0 for the last
        if not starts:
            ends = block.rsplit(b"\n", 1 + max(back.values()))[::-1]
            sizes = list(accumulate(len(line) + 1 for line in ends))
        for shape, i in back.items():
            start = starts[len(shapes) - 1 - i] if starts else len(block) + 1 - sizes[i]
            kept[shape][-1].last = max(kept[shape][-1].last, offset + start)  # also of lines that were not kept
    if len(seen) > SHAPES:
        seen.clear()


def _without_garbage(block: bytes) -> bytes:
    """Return a binary block of the same length with blanks for everything but line breaks and runs of text."""
    clean = bytearray(b" " * len(block))
    for run in _TEXT.finditer(block):
        clean[run.start() : run.end()] = run.group()
    return bytes(clean)


def _spans(length: int, places: Sequence[tuple[int, str]], prefilter: Prefilter) -> list[tuple[int, int]]:
    """Return the (start, end) in a line to look at: all of it, or of an endless line the bytes around its literals.

    Returns [] if its literals were looked at too often already; counts them in prefilter.count.
    """
    spans: list[tuple[int, int]] = []
    for start, word in places:
        if spans and start < spans[-1][1]:
            continue
        prefilter.count[word] = prefilter.count.get(word, 0) + 1
        if prefilter.count[word] > SAME_WORD:
            continue
        if length <= LINE_BYTES:
            return [(0, length)]
        spans.append((max(0, start - LINE_BYTES), min(length, start + LINE_BYTES)))
    return spans


def _hit(name: str, raw: bytes, before: bytes, host: str, rank: int | None) -> Hit:
    """Return the Hit of a raw line, with line and offset 0; `host` and `rank` count if the line names none.

    `before` are the bytes before the line, whose last lines may tell its time and kind.
    """
    whole = raw.decode("utf-8", errors="replace")
    text, said = clean(whole)
    said_host, said_rank = speaker(text, said)
    lines_before = before.decode("utf-8", errors="replace").splitlines()[-12:]
    near = [whole, *reversed(lines_before)] if _CLOCK.search(raw) or _CLOCK.search(before) else []
    time = next((time for time in map(moment, near) if time is not None), None)
    said_rank = rank if said_rank is None else said_rank
    return Hit(name, 0, 0, text, said_host or host, said_rank, time, kind=kind(text, lines_before))


def _progress(data: bytes, offset: int) -> list[tuple[int, str]]:
    """Return (byte offset of a line, its words that tell the step) of lines of progress; `data` begins at `offset`."""
    steps = []
    place = offset
    for raw in re.split(rb"[\r\n]", data):
        if any(mark in raw for mark in _MARKS) and len(raw) < LINE_BYTES:
            text = raw.decode("utf-8", errors="replace")
            match = _STEP.search(text)
            if match and not _PREPARING.search(text[: match.start()]):
                epoch = _EPOCH.search(text)  # a bar that was full is full again in the next epoch
                said = re.sub(r"\s*\[.*", "", match[0]) if "[" in match[0] else match[0]
                steps.append((place, f"{epoch[0]} {said}" if epoch else said))
        place += len(raw) + 1
    return steps


def frame_before(hit: Hit) -> str:
    """Return the last frame of the traceback that ends in a hit's line; "" if there is none."""
    before = hit.around.partition(hit.text.encode())[0].decode("utf-8", errors="replace").splitlines()[-12:]
    cleaned = [clean(line)[0] for line in before]
    for i in range(len(cleaned) - 1, -1, -1):
        if FRAME.match(cleaned[i]):
            return cleaned[i].strip()
        if cleaned[i][:1].strip() and not kind(cleaned[i], cleaned[:i]):
            return ""
    return ""


def is_of_library(hit: Hit, kind: str) -> bool:
    """Return whether a library raised the hit, by the last frame before it.

    For the kind "installed" that frame must be of an installed package; for "framed" and "any" it may be of a program
    run from a clone. Without a frame returns False; but for "any" True if no line around the hit is a frame's.
    """
    if kind == "any" and not re.search(rb"File |\.py in |<ipython-input", hit.around):
        return True
    frame = frame_before(hit)
    return "-packages/" in frame if kind == "installed" else bool(IN_LIBRARY.search(frame))


_LOSS = re.compile(
    r"(?<![\w/.-])(?:train(?:ing)?[_/ ])?loss['\"]?\s*[:=]?\s*['\"]?(?P<loss>\d+\.\d+(?:[eE][+-]?\d+)?)", re.IGNORECASE
)
# A model that learns does not leave its lowest loss so far behind for so many steps. Below SMALLEST_LOSS noise does.
DIVERGED_TIMES, DIVERGED_BY, DIVERGED_STEPS, SMALLEST_LOSS = 4.0, 3.0, 4, 0.5
FEWEST_LOSSES = 8


_HEADER = re.compile(r"^\W*(?:Step|Epoch)\b.*\bLoss\b")  # of the table that a notebook shows


def _table_losses(lines: Iterable[tuple[int, int, str]]) -> Iterator[tuple[list[str], tuple[int, int, str]]]:
    """Yield the losses of each row of a notebook's tables among lines, as they are printed, and the row's line."""
    columns = 0
    for at in lines:
        cells = at[2].replace("No log", "-").replace("|", " ").split()
        if _HEADER.match(at[2]):
            columns = len(re.findall(r"\bLoss\b", at[2]))
        elif columns and len(cells) > columns and cells[0].isdigit():
            yield cells[1 : columns + 1], at
        elif any(cell.strip("-:") for cell in cells):
            columns = 0


def diverged(log: Log) -> tuple[str, Hit, dict[str, str]] | None:
    """Return the cause, the last line with a training loss, and facts, if the loss went up for good or a table has nan.

    The last losses in the stored end must all be far above the lowest there: facts `lowest` and `last`. None if not.
    """
    lines = [(number, offset, clean(line)[0]) for number, offset, line in tail_lines(log)]
    losses = [(float(match["loss"]), at) for at in lines if "oss" in at[2] and (match := _LOSS.search(at[2]))]
    rows = list(_table_losses(lines))
    losses += [(float(row[0]), at) for row, at in rows if re.fullmatch(r"\d+\.\d+", row[0])]
    lowest, last = min(losses)[0] if losses else 0.0, [loss for loss, _ in losses[-DIVERGED_STEPS:]]
    far = max(DIVERGED_TIMES * lowest, lowest + DIVERGED_BY)
    if rows and {"nan", "inf"} & {value.lower() for value in rows[-1][0]}:
        cause, (number, offset, text), facts = "loss_nan", rows[-1][1], {}
    elif len(losses) >= FEWEST_LOSSES and lowest >= SMALLEST_LOSS and min(last) >= far:
        cause, (number, offset, text) = "loss_diverged", losses[-1][1]
        facts = {"lowest": f"{lowest:.4g}", "last": f"{last[-1]:.4g}"}
    else:
        return None
    return cause, Hit(log.name, number, offset, text, *of_name(log.name), moment(text), last=offset), facts
