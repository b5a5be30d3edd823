"""Parse one line of a log: its text without colours and prefixes of launchers and loggers, and what those prefixes say.

Some lines are no statement of the program: a traceback's source line, pip's messages, a scheduler's report, the help
text of a command. Signatures are not matched against such lines (see `kind`). Other lines show where one launch ends
and the next begins in a log that several were appended to.
"""

from __future__ import annotations

import re
from pathlib import Path

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07")
_PREFIX = re.compile(
    r"""^\s*(?:
        \[?(?:default|rank\s?)?(?P<rank>\d+)\]:?(?:\[rank\d+\]:?)?(?=[\s\[]|\w)(?!\])   # [rank3]:  [default3]:  [3]:
      | \[?std(?:err|out)(?:\]|:(?=\s))                                                # accelerate test, wrappers
      | (?P<task>\d{1,4}):(?=\s)                                                        # srun --label
      | [A-Za-z][\w-]*/(?P<replica>\d{1,3})(?=\s)                                        # torchx
      | \((?P<actor>\w+)\s+pid=\d+(?:,\s*ip=(?P<ip>[\w.:-]+))?\)                        # Ray, vLLM
      | \[(?P<tag>[A-Za-z][\w.-]*-[\w.-]+|[A-Za-z][\w.]*\d)\](?=\s)                     # [gpu-a]
      | >(?=\s)                                                                         # quoted
      | (?P<pod>[\w.-]+)\s+\|(?=\s)                                                     # docker compose
      | (?!python|pip|gcc|g\+\+|E[A-Z]?\d{4,5}:|[\w-]*(?:\.[\w-]+)*\.[A-Z]|\S*(?:Error|Exception|Warning):)
        (?P<host>(?:[\dx]{1,3}\.){3}[\dx]{1,3}|[A-Za-z][\w-]*[-\d][\w.-]*):(?=\s)         # pdsh
      | \d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[.\d]*(?:Z|[+-]\d\d:?\d\d)?(?:\s(?:stdout|stderr)\s[FP])?(?=\s)  # containers
      | ERROR\s\d\d-\d\d\s\d\d:\d\d:\d\d(?:\.\d+)?\s\[?[\w./]+:\d+\]                    # vLLM
      | \d{4}-\d\d-\d\d\s\d\d:\d\d:\d\d[.,\d]*\s(?:-\s)?\|?\s?(?:ERROR|CRITICAL)\s*\|\s\S+:\d+\s-  # loguru
      | (?:ERROR|CRITICAL):[\w.]+:(?=\s?\S)                                             # logging
      | \[?\d{4}-\d\d-\d\d[T\s]\d\d:\d\d:\d\d[.,\d]*\]?\s[^"']{0,80}?(?<=[\s\]])  # a parent about its child
        (?=Traceback\s\(most|\s*File\s"|\[rank\d+\]:|(?:\w+\.)*[A-Z]\w*(?:Error|Exception)(?::\s|$))
    )[ ]?""",
    re.VERBOSE,
)
# What a program lists as possible reasons is no evidence of any of them.
_ADVICE = re.compile(r"(?:There are some potential root causes|[Ss]ome common causes include)\b.*")
_NCCL_HOST = re.compile(r"^(?P<host>[A-Za-z][\w.-]*):\d+:\d+ \[\d+\]")
_RANK = re.compile(r"\[Rank (\d+)\]|\brank(?:\s*:\s*|=)(\d+)")
_DATE = re.compile(r"\b\d{4}-(\d\d)-(\d\d)[T _](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,6}))?")
_GLOG = re.compile(r"(?:^|[\s\[])[IWEF](\d{1,2})(\d\d) (\d\d):(\d\d):(\d\d)\.(\d{1,6})")

FRAME = re.compile(r'^\s*File (?:"[^"]+", line \d+(?:,? in .+)?|[^"\s]\S*:\d+, in .+)$')  # Python's, IPython's
# A frame of an installed package, or of a program that is run from a clone of its repository.
IN_LIBRARY = re.compile(
    r"-packages/|/(?:llamafactory|llmtuner|swift|axolotl|verl|openrlhf|torchtune|megatron|nemo\w*|deepspeed|transformers|"
    r"accelerate|peft|trl|vllm[\w-]*|mindspeed\w*|sglang|lmdeploy|xtuner|fastchat|unsloth\w*|colossalai|lightning\w*|fairseq|gpt-neox|torchtitan|mlx_lm)/",
    re.IGNORECASE,
)
_BOX = re.compile(r"^\s*[│┃|]\s*(?:❱\s*)?\d*\s*[│┃|]")  # of rich's tracebacks
_CODE = re.compile(
    r"^    +(?:from [\w.]+ import |raise |return |assert |import \w)|^-+> \[?\d+|^ +\d+ (?:    |def |raise |return )"
)
_PIP = re.compile(
    r"^\s*(?:Requirement already satisfied|Collecting \S|Downloading \S+\.(?:whl|tar|metadata)|Using cached |"
    r"Attempting uninstall|Installing collected|Successfully (?:un)?installed|WARNING: Ignoring invalid distribution|"
    r"ERROR: pip's dependency)|"
    r"^\s*\S+ \S+ (?:requires|depends on) \S.*(?:but you have|which is not installed|incompatible)"
)
_SCHEDULER = re.compile(r"^(?:Started|Terminated|Results reported) at \w{3} |^\s*#(?:SBATCH|BSUB|PBS|\$) |^export \w+=")
_HELP = re.compile(r"^usage: |^\s+\[-")


def clean(text: str) -> tuple[str, dict[str, str]]:
    """Return a log line without colours and up to 5 launchers' prefixes, and {group of _PREFIX: text} of these."""
    text = _ANSI.sub("", text).rstrip()
    said: dict[str, str] = {}
    for _ in range(5):
        match = _PREFIX.match(text)
        if not match or match.end() == 0:
            break
        said.update({key: value for key, value in match.groupdict().items() if value})
        text = text[match.end() :]
    return _ADVICE.sub("", text) if " causes" in text else text, said


def speaker(text: str, said: dict[str, str]) -> tuple[str, int | None]:
    """Return (host, rank) that a cleaned line or its prefixes (`said`, from clean) name; "" and None if unknown."""
    nccl = _NCCL_HOST.match(text)
    host = said.get("ip") or said.get("host") or said.get("tag") or said.get("pod") or (nccl["host"] if nccl else "")
    named = _RANK.search(text)
    rank = said.get("rank") or said.get("task") or said.get("replica") or (named and (named[1] or named[2]))
    return host, int(rank) if rank else None


def kind(text: str, before: list[str]) -> str:
    """Return what a line is if it is no statement of the program: "source", "pip", "scheduler" or "help"; else "".

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
    for name, expression in (("pip", _PIP), ("scheduler", _SCHEDULER), ("help", _HELP)):
        if expression.search(text):
            return name
    return ""


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
MARKS = (_BEGINS.pattern, _NEVER_BEGAN.pattern, _RANK_BEGINS.pattern, _LAUNCHER_ENDS.pattern)


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
    r"^goroutine \d+ \[|^Exception in thread \"|Check failed: |"
    r"SIG(?:SEGV|ABRT|BUS|FPE|ILL|KILL|QUIT)\b.{0,20}(?:received|caught)|^(?:[a-z_]\w*\.)+[A-Z]\w+(?:: |$)|"
    r"^[A-Z]\w*(?:NotFound|Missing|Invalid|Exceeded|Refused|Denied|Failed|Failure): "
)
_SCHEDULER_ENDS = (
    r"^srun: (?:Terminating|Force)|PBS: job killed|MPI_A(?:bort|BORT)|has exited due to process|marked (?:as )?dead|"
    r"^[Jj]ob \S+ (?:has )?(?:failed|aborted)|FailedMount|OutOf(?:cpu|memory|nvidia|pods)|Docker daemon|"
    r"failed to mount|module\(s\) are unknown|Unable to locate a modulefile"
)
LAST_WORDS = re.compile(
    r"(?:^|[\s\[|:(])(?:ERROR|FATAL|CRITICAL|PANIC)\b|^\s*[×✗✘❌]|NCCL WARN|"
    r"^(?:\S+: )?(?:[Ff]atal(?: error)?|[Ee]rror)\b:?\s|"
    r": (?:fatal|error): |command not found|_InactiveRpcError|(?:^|[.:!] )[Aa]bort(?:ing|ed)\b(?! \w+:)|"
    r"\b(?:is|was|been|[Jj]ob|[Rr]un|[Tt]raining|[Pp]rocess|[Ee]xecution) [Aa]bort(?:ed|ing)\b|"
    r"\b(?:[Tt]raining|[Ff]ine-?[Tt]un(?:e|ing)|[Jj]ob|[Pp]rocess|[Rr]un|[Ww]orker|[Rr]ank \d+) (?:has |was |been )*"
    r"(?:failed|killed|crashed|died)|"
    r"(?:训练|任务|进程|程序|运行|执行|加载|启动).{0,4}(?:失败|出错|异常|崩溃|被杀)|^(?:错误|报错|异常|失败)[:：]|"
    r"^(?!.*(?:warn|Warn|WARN)).*(?:unrecoverable|not responding|[Ss]ervice [Uu]navailable)|"
    + "|".join((_SHELL_ENDS, _RUNTIME_ENDS, _SCHEDULER_ENDS))
)
GOES_ON_AFTER = re.compile(r"\bINFO\b|\b200 OK\b|(?i:\bdone\b|complete|finished|success|saved)")
