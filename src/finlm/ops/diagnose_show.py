"""Findings as text for people or one JSON document for programs. Python 3.8, standard library only."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

from finlm.ops.diagnose_match import Finding

_WORDS = {
    "en": {
        "nothing": "{logs} log(s), {lines:,} line(s), nothing fatal",
        "evidence": "evidence",
        "fix": "fix",
        "confirm": "confirm",
        "doctor": "found before launch by `finlm doctor`, check",
        "threads": "see",
        "also": "also possible",
        "at": "line",
    },
    "zh": {
        "nothing": "{logs} 份日志，{lines:,} 行，没有发现致命问题",
        "evidence": "证据",
        "fix": "处理",
        "confirm": "确认",
        "doctor": "启动前可由 `finlm doctor` 的这项检查发现",
        "threads": "参考",
        "also": "其他可能",
        "at": "行",
    },
}


def text(findings: Sequence[Finding], lang: str, logs: int, lines: int) -> str:
    """The first finding in full, the others in a line each; without any, how many logs and lines were read."""
    words = _WORDS[lang]
    if not findings:
        return words["nothing"].format(logs=logs, lines=lines)
    first = findings[0]
    shown = [f"{first.title}  [{first.cause}]", "", first.explanation, ""]
    shown += [f"{words['evidence']}: {where(first, words['at'])}", *_indented(first.evidence)]
    shown += [f"{words['fix']}:", *(f"  {i}. {step}" for i, step in enumerate(first.fix.splitlines(), 1))]
    shown += [f"{words['confirm']}: {first.confirm}"] if first.confirm else []
    shown += [f"{words['doctor']}: {first.doctor}"] if first.doctor else []
    shown += [f"{words['threads']}: {' '.join(first.threads)}"] if first.threads else []
    if len(findings) > 1:
        shown += ["", f"{words['also']}:"]
        shown += [f"  {other.cause}: {other.title} ({where(other, words['at'])})" for other in findings[1:]]
    return "\n".join(shown)


def where(finding: Finding, line: str = "line") -> str:
    """File, line, host and rank of a finding's evidence."""
    place = f"{finding.file}, {line} {finding.line}"
    place += f", {finding.host}" if finding.host else ""
    return place if finding.rank is None else f"{place}, rank {finding.rank}"


def _indented(block: str) -> list[str]:
    return [f"  {line}" for line in block.splitlines()]


def show(findings: Sequence[Finding], lang: str, as_json: bool, logs: int, lines: int) -> None:
    """Text to stdout, or JSON to stdout and the text to stderr. A reader that stops early (`| head -1`) is no error."""
    try:
        print(text(findings, lang, logs, lines), file=sys.stderr if as_json else sys.stdout)
        if as_json:
            print(json.dumps({"findings": [finding.to_json() for finding in findings]}, ensure_ascii=False))
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter's own last flush fails
