"""Take from a log line what launchers, schedulers and log collectors put before it; read the frames of notebooks."""

from __future__ import annotations

import json
import re

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07")
_PREFIX = re.compile(
    r"""^\s*(?:
        \[?(?:default|rank\s?)?(?P<rank>\d+)\]:?(?:\[rank\d+\]:?)?(?=[\s\[]|\w)(?!\])   # [rank3]:  [default3]:  [3]:
      | \[?std(?:err|out)(?:\]|:(?=\s))                                                # accelerate test, wrappers
      | (?P<task>\d{1,4}):(?=\s)                                                        # srun --label
      | [A-Za-z][\w-]*/(?P<replica>\d{1,3})(?=\s)                                        # torchx
      | \((?P<actor>\w+)\s+pid=\d+(?:,\s*ip=(?P<ip>[\w.:-]+))?\)                        # Ray, vLLM
      | \[(?P<tag>[A-Za-z][\w.-]*-[\w.-]+|[A-Za-z][\w.]*\d)\](?=:?\s)(?::|\s(?:out|err):)?  # [gpu-a]  [gpu-a] out:
      | >(?=\s)                                                                         # quoted
      | (?P<pod>[\w.-]+)\s+\|(?=\s)                                                     # docker compose
      | (?!python|pip|gcc|g\+\+|nvidia-c|E[A-Z]?\d{4,5}:|[\w-]*(?:\.[\w-]+)*\.[A-Z]|\S*(?:Error|Exception|Warning):)
        (?P<host>(?:[\dx]{1,3}\.){3}[\dx]{1,3}|[A-Za-z][\w-]*[-\d][\w.-]*):(?=\s)         # pdsh
      | \d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[.\d]*(?:Z|[+-]\d\d:?\d\d)?(?:\s(?:stdout|stderr)\s[FP])?(?=\s)  # containers
      | ERROR\s\d\d-\d\d\s\d\d:\d\d:\d\d(?:\.\d+)?\s\[?[\w./]+:\d+\]                    # vLLM
      | \d{4}-\d\d-\d\d\s\d\d:\d\d:\d\d[.,\d]*\s(?:-\s)?\|?\s?(?:ERROR|CRITICAL)\s*\|\s\S+:\d+\s-  # loguru
      | (?:ERROR|CRITICAL):[\w.]+:(?=\s?\S)                                             # logging
      | \[\d+,(?:mpirank:)?\d+(?:,[\w-]+)?\]<std\w{3,4}>:                               # mpirun, SageMaker
      | (?:[A-Z][a-z]{2}|\d{1,2}月)\s+\d{1,2}\s\d\d:\d\d:\d\d\s\S+\s[\w./@-]+\[\d+\]:(?=\s)  # systemd's journal
      | \[\d{4}-\d\d-\d\d[^\]]{0,30}\]\s\{\w+\.py:\d+\}\s[A-Z]+\s-(?=\s)                # Airflow
      | \d+\|[\w.-]+\s*\|(?=\s)                                                         # pm2
      | \[pod/[\w./-]+\](?=\s)                                                          # kubectl logs --prefix
      | \[rank:\s\d+\](?=\s)                                                            # Lightning
      # A time or a level, and what may follow it, before the words of a failure or a traceback's line of code.
      | (?:(?:(?:ERROR|CRITICAL|INFO|WARNING)\s)?
        \[?(?:\d{4}[-/]\d\d[-/]\d\d[T\s]|[A-Z][a-z]{2}\s+\d{1,2}\s|[IWEF]\d{4}\s)?
        \d\d:\d\d:\d\d[.,\d]*(?:Z|[+-]\d\d:?\d\d)?\]?
        (?:(?:\s?\[[^\]\s]*\]|\s+\d+\s[\w./-]+:\d+\]|\s-\s[\w.-]+\s-)*(?=\s{5}\S)|(?:[\s\[](?:[^"']{0,80}?[\s\]\[])??)?)|
        (?:ERROR|CRITICAL):(?=\s))
        (?=\s?(?:Traceback\s\(most|\s*File\s"|\[rank\d+\]:|(?:[a-z_]\w*\.)*[A-Z]\w*(?:Error|Exception)(?::\s|$)|
        (?:fatal|make|curl|wget|slurmstepd|srun|tar|cp|\S{0,40}sh):\s|(?<=[\d\]Z-])\s{5}\S|
        (?:Killed|Terminated|Aborted|Segmentation\sfault)(?:$|\s\()))
    )[ ]?""",
    re.VERBOSE,
)
# What a program lists as possible reasons is no evidence of any of them.
_ADVICE = re.compile(r"(?:There are some potential root causes|[Ss]ome common causes include|[Pp]ossible reasons)\b.*")
# A line of a log collector, as JSON.
_PACKED = re.compile(r'^[\[,]?(\{"(?:log|stream_name|stream|time|ts|timestamp|level|severity|levelname)":.*\})\]?$')
# IPython 7, Colab: `/usr/lib/x.py in f(a, b)`, `<ipython-input-3-ab12> in <cell line: 1>()`, `~/lib/x.py in f(a)`.
_FRAME = re.compile(
    r"^(?P<file><(?!module)\S+>|(?:~?/|[A-Z]:\\|[\w./-]+/)[^\s:]*\.(?:pyx?|pxi)) in (?P<name><?[\w.]+(?: \w+: ?\d+)?>?)"
    r"(?:\(.*\))?$"
)
_ARROW = re.compile(r"^-+> ?(?P<line>\d+)\s+(?P<code>\S.*)")  # `---> 12     x = f(x)`
CONTEXT = re.compile(r"^ +\d+(?: {2,}|$)")  # the lines around it


def _unpack(text: str) -> str:
    """Return the message of a line that a log collector wrote as JSON (Docker, Kaggle, structlog), else the line."""
    match = _PACKED.match(text) if text[:2] in ('{"', "[{", ",{") else None
    if not match:
        return text
    try:
        record = json.loads(match[1])
    except ValueError:
        return text
    said = next((record[key] for key in ("log", "data", "msg", "message", "event") if key in record), None)
    return said.rstrip() if isinstance(said, str) else text


def clean(text: str) -> tuple[str, dict[str, str]]:
    """Return a log line without colours and up to 5 launchers' prefixes, and {group of _PREFIX: text} of these.

    A list of possible causes at the line's end is cut off too.
    """
    text = frame(_unpack(_ANSI.sub("", text).rstrip()))
    said: dict[str, str] = {}
    for _ in range(5):
        match = _PREFIX.match(text)
        if not match or match.end() == 0:
            break
        said.update({key: value for key, value in match.groupdict().items() if value})
        text = text[match.end() :]
    return _ADVICE.sub("", text) if " causes" in text or " reasons" in text else text, said


def frame(text: str) -> str:
    """Return a frame that a notebook printed as `File x.py:0, in f`, its line being unknown; another line as it is."""
    match = _FRAME.match(text) if " in " in text else None
    return f"File {match['file']}:0, in {match['name']}" if match else text


def failing_code(text: str, frames: list[str]) -> str:
    """Return the code of a line with a notebook's arrow, "" for another line; gives the last of `frames` its number."""
    match = _ARROW.match(text)
    if match and frames:
        frames[-1] = frames[-1].replace(":0, in ", f":{match['line']}, in ")
    return match["code"] if match else ""
