"""Parse the lines of a log: texts without prefixes, what those prefixes say, and the exceptions in the log's end.

Lines that state nothing (a traceback's source, pip's messages, a scheduler's report) match no signature: see `kind`.

A signature knows words; a rule of endings.yaml knows only what most exceptions of a class mean, by the package that
raised it and the words of its message. It counts where no signature explains the exception, and is never certain.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from finlm.diagnose.prefix import CONTEXT, clean, failing_code

_NCCL_HOST = re.compile(r"^(?P<host>[A-Za-z][\w.-]*):\d+:\d+ \[\d+\]")
_RANK = re.compile(r"\[Rank (\d+)\]|\brank(?:\s*:\s*|=)(\d+)")
_DATE = re.compile(r"\b\d{4}-(\d\d)-(\d\d)[T _](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,6}))?")
_GLOG = re.compile(r"(?:^|[\s\[])[IWEF](\d{1,2})(\d\d) (\d\d):(\d\d):(\d\d)\.(\d{1,6})")

FRAME = re.compile(r'^\s*File (?:"[^"]+", line \d+(?:,? in .+)?|[^"\s]\S*:\d+, in .+)$')  # Python's, IPython's
# A frame of an installed package, or of a program that is run from a clone of its repository.
IN_LIBRARY = re.compile(
    r"-packages[/\\]|external-libraries/|"
    r"/(?:llamafactory|llmtuner|swift|axolotl|verl|openrlhf|torchtune|megatron|nemo\w*|deepspeed|transformers|"
    r"accelerate|peft|trl|vllm[\w-]*|mindspeed\w*|sglang|lmdeploy|xtuner|fastchat|unsloth\w*|colossalai|lightning\w*|fairseq|gpt-neox|torchtitan|mlx_lm)/",
    re.IGNORECASE,
)
_BOX = re.compile(r"^\s*[│┃|]\s*(?:❱\s*)?\d*\s*[│┃|]")  # of rich's tracebacks
_CODE = re.compile(
    r"^    +(?:from [\w.]+ import |raise |return |assert |import \w)|^-+> \[?\d+|^ +\d+ (?:    |def |raise |return )"
)
_PIP = re.compile(
    r"^\s*(?:Requirement already satisfied|Collecting \S|Downloading \S+\.(?:whl|tar|metadata)|Using cached |"
    r"Attempting uninstall|Installing collected|Successfully (?:un)?installed|"
    r"WARNING: (?:Ignoring invalid distribution|Retrying \(Retry\(total=[1-9])|ERROR: pip's dependency)|"
    r"^\s*\S+ \S+ (?:requires|depends on) \S.*(?:but you have|which is not installed|incompatible)"
)
_SCHEDULER = re.compile(r"^(?:Started|Terminated|Results reported) at \w{3} |^\s*#(?:SBATCH|BSUB|PBS|\$) |^export \w+=")
_HELP = re.compile(r"^usage: |^\s+\[-")
# Of what a program works around, and says so; and data that it shows.
_ASIDE = re.compile(
    r"Retrying .Retry.total=|"
    r"Ignore import error when loading|is preempted by PreemptionMode|failed to mlock|batch ?size will be decreased|"
    r"halving the batch|failed to shutdown the rendezvous|"
    r"Error waiting on exit barrier|Cannot use FlashAttention-2 backend for|"
    # a row of data or a conversation, whose words are somebody's
    r"^\s*\[?\{['\"](?:role|from|messages|conversations|instruction|prompt|question|text)['\"]: ?['\"\[]"
)
_CONFIG = re.compile(r"\[config\.py:\d+:print")  # DeepSpeed lists every key, also those that harm nobody


def speaker(text: str, said: dict[str, str]) -> tuple[str, int | None]:
    """Return (host, rank) that a cleaned line or its prefixes (`said`, from clean) name; "" and None if unknown."""
    nccl = _NCCL_HOST.match(text)
    host = said.get("ip") or said.get("host") or said.get("tag") or said.get("pod") or (nccl["host"] if nccl else "")
    named = _RANK.search(text)
    rank = said.get("rank") or said.get("task") or said.get("replica") or (named and (named[1] or named[2]))
    return host, int(rank) if rank else None


def kind(text: str, before: list[str]) -> str:
    """Return "source", "pip", "scheduler", "help", "config" or "aside" for a line that states no failure; else "".

    `before` has the raw lines before it.
    """
    if _BOX.match(text) or _CODE.match(text):
        return "source"
    if text.startswith("    "):
        for line in (clean(line)[0] for line in reversed(before[-12:])):
            if FRAME.match(line):
                return "source"
            if not line.startswith("    "):
                break
    kinds = {"pip": _PIP, "scheduler": _SCHEDULER, "help": _HELP, "config": _CONFIG, "aside": _ASIDE}
    return next((name for name, expression in kinds.items() if expression.search(text)), "")


def moment(text: str) -> float | None:
    """Return the line's time in seconds for ordering only (year and time zone are ignored); None if it has no time."""
    match = _DATE.search(text) or _GLOG.search(text)
    if match is None:
        return None
    month, day, hour, minute, second = (int(match[i]) for i in range(1, 6))
    return (((month * 31 + day) * 24 + hour) * 60 + minute) * 60 + second + float("0." + (match[6] or "0"))


def of_name(name: str) -> tuple[str, int | None]:
    """Return (host, rank) from a log's file name <host>.<rank>.log; ("", None) for other names."""
    match = re.match(r"(.+)\.(\d+)\.log$", Path(name).name)
    return (match[1], int(match[2])) if match else ("", None)


# The last words of a log that no exception ends: level names, and what shells, launchers and allocators print.
_SHELL_ENDS = (
    r"^(?:\^C|(?:[Ss]egmentation fault|Bus error|Aborted!?|Alarm clock|Broken pipe|User defined signal \d|Quit|FAILED|"
    r"Floating point exception|Trace/breakpoint trap|Stopped|Fatal|Killed)(?: \(core dumped\))?\.?)$|"
    r"^(?:zsh|fish|bash|ksh): .*(?:abort|bus error|illegal|floating|segmentation|terminated|killed)|^/usr/bin/env: |"
    r"[Tt]erminated by signal|[Ee]xited with non-zero|exec format error|^exec \S+: |^qsub: |^npm ERR!|"
    r": No such file or directory$|closed by remote host|Connection to \S+ (?:port \d+: )?(?:closed|Broken)"
)
_RUNTIME_ENDS = (
    r"terminate called|uncaught exception|pure virtual|double free|double-linked|Assertion .+ failed|^panic: |"
    r"^goroutine \d+ \[|^Exception in thread \"|Check failed: |^[\w ]+: failed to (?:load m|creat|appl|init|decode)|"
    r"SIG(?:SEGV|ABRT|BUS|FPE|ILL|KILL|QUIT)\b.{0,20}(?:received|caught)|^(?:[a-z_]\w*\.)+[A-Z]\w+(?:: |$)|"
    r"^[A-Z]\w*(?:NotFound|Missing|Invalid|Exceeded|Refused|Denied|Failed|Failure): "
)
_SCHEDULER_ENDS = (
    r"^srun: (?:Terminating|Force)|PBS: job killed|MPI_A(?:bort|BORT)|has exited due to process|marked (?:as )?dead|"
    r"^[Jj]ob \S+ (?:has )?(?:failed|aborted)|FailedMount|OutOf(?:cpu|memory|nvidia|pods)|Docker daemon|"
    r"failed to mount|module\(s\) are unknown|Unable to locate a modulefile"
)
LAST_WORDS = re.compile(
    r"(?:^|[\s\[|:(])(?:ERROR|ERR|FATAL|CRITICAL|PANIC|emerg)\b|^\s*[×✗✘❌]|NCCL WARN|"
    r"^(?:\S+: )?(?:[Ff]atal(?: error)?|[Ee]rror)\b:?\s(?!tracking )|^got exception: |\[E\] Error|&&&& FAILED|"
    r"[:,] (?:fatal|error): |command not found|_InactiveRpcError|(?:^|[.:!] )[Aa]bort(?:ing|ed)\b(?! \w+:)|"
    r"\b(?:is|was|been|[Jj]ob|[Rr]un|[Tt]raining|[Pp]rocess|[Ee]xecution) [Aa]bort(?:ed|ing)\b|"
    r"\b(?:[Tt]raining|[Ff]ine-?[Tt]un(?:e|ing)|[Jj]ob|[Pp]rocess|[Rr]un|[Ww]orker|[Rr]ank \d+) (?:has |was |been )*"
    r"(?:failed|killed|crashed|died)|\bexiting due to\b|\b(?:[Bb]uild|[Ll]oad|[Ee]xport|[Cc]ompil)\w* failed\b|"
    r"(?:训练|任务|进程|程序|运行|执行|加载|启动).{0,4}(?:失败|出错|异常|崩溃|被杀)|^(?:错误|报错|异常|失败)[:：]|"
    r"^(?!.*(?:warn|Warn|WARN)).*(?:unrecoverable|not responding|[Ss]ervice [Uu]navailable)|"
    + "|".join((_SHELL_ENDS, _RUNTIME_ENDS, _SCHEDULER_ENDS))
)
# A command that someone typed at a prompt: what it prints says nothing about the program before it.
_TYPED = re.compile(
    r"^(?:\([\w.-]+\) ?)?(?:[$!] ?[\w#]|[\w.-]+@[\w.-]+[:~ ].{0,60}[#$] ?\S|PS [A-Z]:\\|[A-Z]:\\[^>]{0,80}>\S)"
)
GOES_ON_AFTER = re.compile(r"\bINFO\b|\b200 OK\b|\| 200 \||POST .* 200$|(?i:\bdone\b|complete|finished|success|saved)")


@dataclass
class Hit:
    """A log line that has a literal of some pattern, with its number, byte offset, host, rank and time."""

    source: str
    line: int
    offset: int
    text: str
    host: str
    rank: int | None
    time: float | None
    kind: str = ""  # what the line is when it is no statement of the program: see kind()
    last: int = 0  # byte offset of the last line of this shape
    around: bytes = b""


@dataclass
class Log:
    """What was read of a log: candidate lines in order, progress lines, its first and last bytes, and its launches."""

    name: str
    hits: list[Hit] = field(default_factory=list)
    size: int = 0
    lines: int = 0
    steps: list[tuple[int, str]] = field(default_factory=list)  # byte offset and text of training progress, the last
    head: bytes = b""
    tail: bytes = b""
    tail_line: int = 1  # number of the line that the tail begins with
    launches: list[tuple[int, int]] = field(default_factory=lambda: [(0, 1)])  # first byte offset and line of each
    ends: dict[re.Pattern[bytes], int] = field(default_factory=dict)  # byte offset at which its last match in tail ends

    def rest(self, offset: int) -> str:
        """Return the text after the line at a byte offset, as far as the stored tail reaches back."""
        behind = self.tail[max(0, offset - (self.size - len(self.tail))) :]
        if offset >= self.size - len(self.tail):
            behind = behind.partition(b"\n")[2]
        return behind.decode("utf-8", errors="replace")

    def last_match(self, expression: re.Pattern[bytes]) -> int:
        """Return the byte offset at which the last match in the tail ends, -1 for none; stores it in `ends`."""
        if expression not in self.ends:
            first = self.size - len(self.tail)
            self.ends[expression] = max((first + match.end() for match in expression.finditer(self.tail)), default=-1)
        return self.ends[expression]

    def is_followed_by(self, expression: re.Pattern[bytes], offset: int) -> bool:
        """Return whether the expression matches in rest(offset); searches the tail only once for all offsets."""
        first = self.size - len(self.tail)
        newline = self.tail.find(b"\n", offset - first) if offset >= first else -1
        behind = first + newline + 1 if newline >= 0 else self.size if offset >= first else first
        return self.last_match(expression) > behind

    def launch(self, index: int) -> Log:
        """Return a launch of this log as a Log of its own; index -1 is the last launch."""
        index %= len(self.launches)
        start = self.launches[index][0]
        end = self.launches[index + 1][0] if index + 1 < len(self.launches) else self.size
        first = self.size - len(self.tail)
        return replace(
            self,
            hits=[hit for hit in self.hits if start <= hit.offset < end],
            steps=[step for step in self.steps if start <= step[0] < end],
            tail=self.tail[max(0, start - first) : max(0, end - first)],
            size=end,
            tail_line=self.launches[index][1] if start > first else self.tail_line,
            launches=[self.launches[index]],
            ends={},
        )

    def steps_between(self, first: int, last: int) -> int:
        """Return the number of different progress lines between two byte offsets."""
        return len({text for place, text in self.steps if first < place < last})

    def steps_after(self, offset: int) -> int:
        """Return the number of different progress lines after a byte offset; a bar redrawn in place counts once."""
        return len({text for place, text in self.steps if place > offset})


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
    r"Exception in ASGI application|CheckpointException ranks|RuntimeEnvSetupError|failed to get register_center_actor|"
    r"[Ss]ee root cause above|check the stack trace above|"
    r"Background loop (?:has errored|is not running)|Task finished unexpectedly|[Pp]rocess terminated unexpectedly|"
    r"workers? (?:have not started|\S+ failed to initialize)|Traceback \(most recent|"
    r"Error: .*\b(?:[Ss]erver|[Ee]ngine|[Ee]xecutor|[Ww]orkers?|[Pp]rocess|[Jj]ob|[Cc]hild|[Cc]ase)\b.{0,30}\b"
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


_ROW = r"(?:row|line|sample|record|document|example|image|\w\.(?:jpe?g|png|webp|jsonl?|txt|pdf|wav|mp3|flac|mp4))\b"
_LEFT_OUT = re.compile(
    rf"^(?!.*\b(?:not|n't)\b).*{_ROW}.*\b(?:skipped|skipping|ignored|left out|dropped)\b|"
    rf"\b[Ss]kipping\b.*\b{_ROW}|^Exception ignored in"
)
_CLEAN_UP = re.compile(
    r"multiprocess(?:ing)?/util\.py.* in (?:_remove_temp_dir|_run_finalizers|_exit_function)$|"
    r" in (?:_pin_memory_loop|_call_connection_lost)$"
)


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
    before: str = ""  # the line before its traceback

    @property
    def frame(self) -> str:
        """The last frame, which raised it; "" if there is none."""
        return self.frames[-1] if self.frames else ""

    @property
    def speaker(self) -> tuple[str, str, int | None]:
        """The log, host and rank that printed it."""
        return self.hit.source, self.hit.host, self.hit.rank

    @property
    def is_idle(self) -> bool:
        """Whether the line before says that it is left out, or a process that had done its work raised it."""
        return bool(_LEFT_OUT.search(self.before)) or any(map(_CLEAN_UP.search, self.frames))

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
    before: str = ""


def exceptions(log: Log) -> list[Raised]:
    """Return the exceptions in a log's stored end, in their order; last, with `is_cut`, those that its end cuts."""
    shown: list[Raised] = []
    opened: dict[tuple[str, int | None], _Traceback] = {}  # by speaker
    told: Raised | None = None  # whose message may go on
    chained: set[tuple[str, int | None]] = set()  # speakers whose next exception follows from their last
    number, previous = 0, ""
    for number, offset, line in tail_lines(log):
        text, said = clean(line)
        who = speaker(text, said)
        text = re.sub(r"^\s*(?:\| )+", "", text)  # an ExceptionGroup's branches
        before, previous = previous, text
        if "another exception occurred:" in text or "direct cause of the following" in text:
            chained.add(who)
        frame = FRAME.match(text)
        if frame or "Traceback (most recent call last)" in text:
            now = opened.get(who) if frame else None
            frames = [*(now.frames if now else ()), *([text.strip()] if frame else ())]
            opened[who] = _Traceback(now.first if now else number, frames, before=now.before if now else before)
            told = None
        elif who in opened:
            now = opened[who]
            match = RAISED.match(text)
            if match and (now.between == 0 or match["name"][:1].isupper()) and not NO_ERROR.match(text):
                del opened[who]
                hit = Hit(log.name, number, offset, text, *who, moment(line), last=offset)
                told = Raised(hit, now.frames, now.first, now.source, chained=who in chained, before=now.before)
                chained.discard(who)
                shown.append(told)
            elif code := failing_code(text, now.frames):
                now.source = code
            elif text[:1].strip() and not text.startswith(("^", "[Previous line")):
                now.between += 1
                if now.between > 41:
                    del opened[who]
            elif text.strip(" ~^") and not CONTEXT.match(text):
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


def program_lines(log: Log) -> list[tuple[int, int, str]]:
    """Return tail_lines() cleaned, without empty lines and commands typed at the end that print no last words."""
    lines = [(number, offset, clean(line)[0]) for number, offset, line in tail_lines(log) if line.strip()]
    # What wandb says at the end of any run, and what a program worked around.
    lines = [line for line in lines if not line[2].startswith("wandb:") and not _ASIDE.search(line[2])]
    for index in range(len(lines) - 1, max(0, len(lines) - 30), -1):
        if _TYPED.match(lines[index][2]) and not any(LAST_WORDS.search(text) for _, _, text in lines[index + 1 :]):
            del lines[index:]
    return lines


def tail_lines(log: Log) -> Iterator[tuple[int, int, str]]:
    """Yield (line number, byte offset, text) of the lines in a log's stored end; of a redrawn bar its last state."""
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
        """Return the rule of an entry of endings.yaml. Raises KeyError without `cause`, re.error for a bad regex."""
        error, frame, source = (re.compile(rule.get(key, "")) for key in ("error", "frame", "source"))
        return cls(rule["cause"], error, frame, source, rule.get("library"), tuple(rule.get("says", {}).items()))

    def facts(self, error: str, frames: Sequence[str], source: str) -> dict[str, str] | None:
        """Return what the rule says of an exception: {name: text}; None if the rule does not fit it.

        `error` is the exception's line, `frames` the 'File "...", line 1, in ...' of its traceback, the last one last,
        `source` the last one's line of code; both may be empty. Names are error, why, source, place, package, those of
        `says` and the groups of the rule's expression, as far as they are known.
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
