"""Findings as text for people or one JSON document for programs. Python 3.8, standard library only."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

from finlm.ops.diagnose_match import Finding

_WORDS = {
    "en": {
        "nothing": "nothing fatal found",
        "evidence": "evidence",
        "fix": "fix",
        "confirm": "confirm",
        "doctor": "found before launch by `finlm doctor`, check",
        "threads": "see",
        "also": "also possible",
        "at": "line",
    },
    "zh": {
        "nothing": "没有发现致命问题",
        "evidence": "证据",
        "fix": "处理",
        "confirm": "确认",
        "doctor": "启动前可由 `finlm doctor` 的这项检查发现",
        "threads": "参考",
        "also": "其他可能",
        "at": "行",
    },
}


def text(findings: Sequence[Finding], lang: str = "en") -> str:
    """The first finding in full, the others in a line each."""
    words = _WORDS[lang]
    if not findings:
        return words["nothing"]
    first = findings[0]
    lines = [f"{first.title}  [{first.cause}]", "", first.explanation, ""]
    lines += [f"{words['evidence']}: {where(first, words['at'])}", *_indented(first.evidence)]
    lines += [f"{words['fix']}:", *(f"  {i}. {step}" for i, step in enumerate(first.fix.splitlines(), 1))]
    lines += [f"{words['confirm']}: {first.confirm}"] if first.confirm else []
    lines += [f"{words['doctor']}: {first.doctor}"] if first.doctor else []
    lines += [f"{words['threads']}: {' '.join(first.threads)}"] if first.threads else []
    if len(findings) > 1:
        lines += ["", f"{words['also']}:"]
        lines += [f"  {other.cause}: {other.title} ({where(other, words['at'])})" for other in findings[1:]]
    return "\n".join(lines)


def where(finding: Finding, line: str = "line") -> str:
    """File, line, host and rank of a finding's evidence."""
    place = f"{finding.file}, {line} {finding.line}"
    place += f", {finding.host}" if finding.host else ""
    return place if finding.rank is None else f"{place}, rank {finding.rank}"


def _indented(block: str) -> list[str]:
    return [f"  {line}" for line in block.splitlines()]


def show(findings: Sequence[Finding], lang: str, as_json: bool) -> None:
    """Text to stdout, or JSON to stdout and the text to stderr. A reader that stops early (`| head -1`) is no error."""
    try:
        print(text(findings, lang), file=sys.stderr if as_json else sys.stdout)
        if as_json:
            print(json.dumps({"findings": [finding.to_json() for finding in findings]}, ensure_ascii=False))
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter's own last flush fails
