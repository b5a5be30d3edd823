"""Run `finlm diagnose LOG...`: print the cause of a failed run from its logs, what it means and how to fix it.

A log of a machine without finlm comes through standard input: `ssh HOST cat LOG | finlm diagnose -`.

All logs of a run directory are read together, and the first step of a fix has the run's own values (signatures.py).

With `--ask ENDPOINT` a language model is asked about a log whose cause no signature knows. ENDPOINT speaks OpenAI's
protocol (vLLM, SGLang, llama.cpp, a hosted service). It gets the exceptions and the last lines, shortened, with
secrets, paths, addresses and names masked; without the option nothing leaves the machine.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from http.client import HTTPException
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from finlm.base import files, screen
from finlm.base.errors import UserError
from finlm.base.processes import send
from finlm.diagnose.findings import Finding, diagnose
from finlm.diagnose.lines import Log, exceptions
from finlm.diagnose.prefix import clean
from finlm.diagnose.read import scan
from finlm.diagnose.signatures import Program, Signatures, concrete

__all__ = ["Finding", "of_logs", "of_run", "run"]


def of_logs(
    paths: Sequence[str],
    lang: str = "en",
    standard_input: BinaryIO = sys.stdin.buffer,
    since: Mapping[str, int] | None = None,
) -> list[Finding]:
    """Return the findings of logs taken together, the most probable cause first. The path `-` is standard input.

    `lang` is "en" or "zh". `since` maps a path to the number of its first lines to skip. Raises OSError when a log
    cannot be read.
    """
    return diagnose(_read(paths, standard_input, since), _signatures(), lang)


def of_run(run: Path, lang: str = "en", since: Mapping[str, int] | None = None, *, keep: bool = True) -> list[Finding]:
    """Return the findings of all logs of a run directory, with values of its recipe and plan in the fixes.

    `since` maps a log's path to the number of lines that former launches wrote, which are skipped. With `keep`, also
    writes diagnosis.json. Raises OSError when a log cannot be read.
    """
    return _of_run(_read_run(run, since), run, lang, keep)


def _of_run(logs: Sequence[Log], run: Path, lang: str, keep: bool = True) -> list[Finding]:
    """Return the findings of a run's logs with the run's values in the fixes; with `keep`, write diagnosis.json."""
    findings = concrete(diagnose(logs, _signatures(), lang, Program()), run, lang)
    if keep:
        keep_findings(findings, run)
    return findings


def _read_run(run: Path, since: Mapping[str, int] | None = None) -> list[Log]:
    """Return all logs of a run directory, scanned; [] if it has none. Raises OSError when one cannot be read.

    `since` maps a path to the number of its first lines to skip; None skips none.
    """
    return _read([str(path) for path in run_logs(run)], since=since)


def _read(
    paths: Sequence[str], standard_input: BinaryIO = sys.stdin.buffer, since: Mapping[str, int] | None = None
) -> list[Log]:
    """Return the logs, scanned, each once even if it is named twice. Raises OSError when one cannot be read.

    `since` maps a path to the number of its first lines to skip.
    """
    prefilter, logs = _signatures().prefilter, []
    for path in dict.fromkeys(paths):
        if path == "-":
            logs.append(scan(standard_input, "-", prefilter))
            continue
        with Path(path).open("rb") as file:
            former = sum(1 for _ in islice(file, since.get(path, 0))) if since else 0
            logs.append(scan(file, path, prefilter, 1 + former))
    return logs


@lru_cache(maxsize=1)
def _signatures() -> Signatures:
    """Return all signatures, read once in a process."""
    return Signatures()


def run(paths: Sequence[str], lang: str, as_json: bool, endpoint: str | None = None) -> int:
    """Diagnose logs and run directories and print the result: `finlm diagnose`. Return the exit code.

    It is 0 if nothing is fatal, 1 for a fatal cause, 2 (printed to stderr) if a file cannot be read or there are no
    logs. Writes diagnosis.json into run directories. `endpoint`, if not None, is the URL of a language model to ask
    when the cause is unknown or a rule's guess; no answer gives a warning on stderr.
    """
    findings: list[Finding] = []
    logs: list[Log] = []
    files = []
    if endpoint is not None and not endpoint.startswith(("http://", "https://")):
        return _print_refusal(f"--ask {endpoint} is no address", "an endpoint begins with http:// or https://")
    try:
        for path in paths:
            if path == "-" or not Path(path).is_dir():
                files.append(path)
            elif runs := sorted(run for run in Path(path).iterdir() if (run / "recipe.yaml").is_file()):
                names = ", ".join(run.name for run in runs[:8])
                return _print_refusal(f"{path} is a directory of runs, not a run", f"it holds {names}")
            elif run_files := _read_run(Path(path)):
                findings += _of_run(run_files, Path(path), lang)
                logs += run_files
        given = _read(files)
    except OSError as error:
        return _print_refusal(f"cannot read {error.filename or paths[0]}", error.strerror or str(error))
    findings += diagnose(given, _signatures(), lang)
    logs += given
    if not any(log.lines for log in logs):
        ends = ", ".join(f"*{suffix}" for suffix in LOG_SUFFIXES)
        return _print_refusal(
            f"no logs in {', '.join(paths)}", f"{len(logs)} empty files; of a directory {ends} are read"
        )
    answer = _ask(endpoint, logs, lang) if endpoint and findings and is_unsure(findings[0]) else None
    former = [launch for log in logs for launch in former_launches(log, _signatures(), lang)]
    show(Shown(findings, former, answer, len(logs), sum(log.lines for log in logs)), lang, as_json)
    return 1 if any(finding.fatal for finding in findings) else 0


@dataclass
class Former:
    """A launch before the last launch of a log: its first and last line, and what it ended with."""

    file: str
    first: int
    last: int
    cause: str
    title: str


def former_launches(log: Log, signatures: Signatures, lang: str = "en") -> list[Former]:
    """Return what the launches before the last one of a log ended with; cause and title are "" if nothing was fatal."""
    former = []
    for index, (_, first) in enumerate(log.launches[:-1]):
        findings = diagnose([log.launch(index)], signatures, lang)
        top = (findings[0].cause, findings[0].title) if findings else ("", "")
        former.append(Former(log.name, first, log.launches[index + 1][1] - 1, *top))
    return former


def is_unsure(finding: Finding) -> bool:
    """Return whether the finding's cause is unknown, or only the guess of a rule of endings.yaml."""
    return finding.by_rule or finding.cause == "unknown"


def _ask(endpoint: str, logs: Sequence[Log], lang: str) -> Answer | None:
    """Return the endpoint's answer; None, with a warning on stderr, if it gives none."""
    try:
        return ask(endpoint, logs, lang)
    except (OSError, HTTPException, ValueError, LookupError, TypeError) as error:
        print(f"warning: {endpoint} gave no answer: {error}", file=sys.stderr)
        return None


def _print_refusal(problem: str, evidence: str) -> int:
    """Print the problem with a fix to stderr and return exit code 2."""
    fix = "give log files, - for standard input, or a run directory"
    screen.print_error(UserError(problem, evidence=evidence, fix=fix))
    return 2


LOG_SUFFIXES = (".log", ".txt", ".out", ".err")


def run_logs(run: Path) -> list[Path]:
    """Return the sorted paths of all logs in a run directory, or in a plain directory of logs, by their suffixes."""
    directory = run / "logs" if (run / "logs").is_dir() else run
    return sorted(path for path in directory.rglob("*") if path.is_file() and path.suffix in LOG_SUFFIXES)


def keep_findings(findings: Sequence[Finding], path: Path) -> None:
    """Write the findings to diagnosis.json for the report, if `path` is a run directory; ignore a failed write."""
    if not (path / "recipe.yaml").exists():
        return
    with suppress(OSError):  # a read-only copy can be diagnosed too
        files.write_json(path / "diagnosis.json", {"findings": [vars(finding) for finding in findings]})


_WORDS = {
    "en": {
        "nothing": "{logs} log(s), {lines:,} line(s), nothing fatal",
        "evidence": "evidence",
        "fix": "fix",
        "confirm": "confirm",
        "doctor": "found before launch by `finlm doctor`, check",
        "threads": "see",
        "also": "also possible",
        "former": "former launches in the same file",
        "no error": "no error",
        "answer": "answer of {model}, a language model; nobody has checked it",
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
        "former": "同一文件中更早的启动",
        "no error": "没有错误",
        "answer": "语言模型 {model} 的回答，未经核实",
        "at": "行",
    },
}


@dataclass
class Answer:
    """What a language model answered; nobody has checked it."""

    endpoint: str
    model: str
    text: str


@dataclass
class Shown:
    """What a diagnosis prints: findings, former launches, a model's answer, and the numbers of logs and lines read."""

    findings: Sequence[Finding]
    former: Sequence[Former]
    answer: Answer | None
    logs: int
    lines: int

    def text(self, lang: str) -> str:
        """Return the text to print: the first finding in full, other findings and former launches a line each."""
        words = _WORDS[lang]
        shown = _finding_text(self.findings, words)
        if not self.findings:
            shown = [words["nothing"].format(logs=self.logs, lines=self.lines)]
        if self.answer:
            shown += ["", words["answer"].format(model=self.answer.model) + ":", *_indent(self.answer.text)]
        if self.former:
            shown += ["", f"{words['former']}:"]
        for launch in self.former:
            end = f"{launch.cause}: {launch.title}" if launch.cause else words["no error"]
            shown.append(f"  {launch.file}, {words['at']} {launch.first}-{launch.last}: {end}")
        return "\n".join(shown)

    def to_json(self) -> str:
        """Return the document of --json: `findings`, and `former` and `answer` if there are any."""
        document: dict[str, object] = {"findings": [vars(finding) for finding in self.findings]}
        if self.former:
            document["former"] = [vars(launch) for launch in self.former]
        if self.answer:
            document["answer"] = vars(self.answer)
        return json.dumps(document, ensure_ascii=False)


def _finding_text(findings: Sequence[Finding], words: Mapping[str, str]) -> list[str]:
    """Return lines of text: the first finding in full, the others a line each; [] for none. `words`: of _WORDS."""
    if not findings:
        return []
    first = findings[0]
    shown = [f"{first.title}  [{first.cause}]", "", first.explanation, ""]
    shown += [f"{words['evidence']}: {where(first, words['at'])}", *_indent(first.evidence)]
    shown += [f"{words['fix']}:", *(f"  {i}. {step}" for i, step in enumerate(first.fix.splitlines(), 1))]
    shown += [f"{words['confirm']}: {first.confirm}"] if first.confirm else []
    shown += [f"{words['doctor']}: {first.doctor}"] if first.doctor else []
    shown += [f"{words['threads']}: {' '.join(first.threads)}"] if first.threads else []
    if len(findings) > 1:
        shown += ["", f"{words['also']}:"]
        shown += [f"  {other.cause}: {other.title} ({where(other, words['at'])})" for other in findings[1:]]
    return shown


def where(finding: Finding, line: str = "line") -> str:
    """Return file, line, host and rank of a finding's evidence as text; `line` is the word for line."""
    place = f"{finding.file}, {line} {finding.line}"
    place += f", {finding.host}" if finding.host else ""
    return place if finding.rank is None else f"{place}, rank {finding.rank}"


def _indent(block: str) -> list[str]:
    """Return the lines of a text, each behind two blanks."""
    return [f"  {line}" for line in block.splitlines()]


def show(shown: Shown, lang: str, as_json: bool) -> None:
    """Print the text to stdout, or with as_json JSON to stdout and the text to stderr; ignore a closed pipe."""
    try:
        print(shown.text(lang), file=sys.stderr if as_json else sys.stdout)
        if as_json:
            print(shown.to_json())
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter's own last flush fails


LAST_LINES = 40
SENT_CHARACTERS = 6000
SECONDS = 60

_PROMPT = {
    "en": "A distributed training run failed. From these lines of its logs, name the most probable cause and one "
    "fix, in at most 80 words. Say that it cannot be told where the lines do not show it.",
    "zh": "一次分布式训练失败了。请根据日志中的这些行，用不超过 120 字指出最可能的原因和一个处理办法；"
    "如果这些行看不出原因，请直接说明。",
}
_MASKS = [  # what must not leave the machine, and what stands for it
    (re.compile(r"://[^/\s:@]+:[^/\s@]+@"), "://***@"),
    (
        re.compile(
            r"(?i)([\w-]*(?:key|token|secret|passw\w*|credential)[\w-]*[\"']?\s*[:= ]\s*[\"']?)(?!\d+\b)[^\s\"']{8,}"
        ),
        r"\1***",
    ),
    (re.compile(r"(?i)\b(bearer|basic)\s+\S{8,}"), r"\1 ***"),
    (re.compile(r"\b(?:hf|sk|pk|gh[opsu]|glpat|xox[abp]|AKIA|eyJ)[-_]?[\w-]{12,}"), "***"),
    (re.compile(r"\b(?=\w*\d)(?=\w*[A-Za-z])\w{32,}\b"), "***"),
    (re.compile(r"[\w.+-]+@[\w-]+\.[\w.-]+"), "<mail>"),
    (re.compile(r"\b(?:\d{1,3}\.){3}\d{1,3}\b"), "<address>"),
    (
        re.compile(r"\b(?:[0-9a-f]{1,4}:){4,7}[0-9a-f]{1,4}\b|\b(?:[0-9a-f]{2}:){5}[0-9a-f]{2}\b", re.IGNORECASE),
        "<address>",
    ),
    (re.compile(r"(?:[A-Za-z]:)?[/\\](?:[^\s/\\:'\"]+[/\\])*(?=(?:site|dist)-packages[/\\])"), ".../"),
    (re.compile(r"(?<![\w.])(?:~|\.\.?)?(?:[A-Za-z]:)?[/\\](?:[^\s/\\:'\",<>]+[/\\])+(?=[^\s/\\:'\",<>]*)"), ".../"),
]


def mask(text: str, names: Sequence[str] = ()) -> str:
    """Return the text without secrets, directories, addresses, mail addresses, home directories' owners and `names`."""
    people = re.findall(r"/(?:home|Users|users)/([\w.-]{3,})", text)
    for expression, stand_in in _MASKS:
        text = expression.sub(stand_in, text)
    for name in sorted({*people, *filter(None, names)}, key=len, reverse=True):
        text = re.sub(rf"\b{re.escape(name)}\b", "<name>", text)
    return text


def evidence(logs: Sequence[Log]) -> str:
    """Return the exceptions of the last launch and the last lines of each log, masked, at most SENT_CHARACTERS."""
    parts = []
    for log in (log.launch(-1) for log in logs):
        shown = [
            line for raised in exceptions(log)[-3:] for line in (raised.frame, raised.hit.text, *raised.message[:3])
        ]
        last = [clean(line)[0][:300] for line in log.tail.decode("utf-8", errors="replace").splitlines()[-LAST_LINES:]]
        parts += [*shown, "--", *last]
    hosts = {hit.host for log in logs for hit in log.hits}
    return mask("\n".join(filter(None, parts)), sorted(hosts))[-SENT_CHARACTERS:]


def ask(endpoint: str, logs: Sequence[Log], lang: str) -> Answer:
    """Send the masked evidence to the first model of an OpenAI-compatible endpoint and return its answer.

    Raises OSError or HTTPException if it cannot be reached, ValueError, LookupError or TypeError if it answers
    something else.
    """
    base = endpoint.rstrip("/")
    models = _call(f"{base}/models", None)["data"]
    if not models:
        raise ValueError("the endpoint serves no model")
    model = str(models[0]["id"])
    messages = [{"role": "system", "content": _PROMPT[lang]}, {"role": "user", "content": evidence(logs)}]
    reply = _call(
        f"{base}/chat/completions", {"model": model, "messages": messages, "temperature": 0, "max_tokens": 400}
    )
    return Answer(endpoint, model, str(reply["choices"][0]["message"]["content"]).strip())


def _call(url: str, body: dict[str, object] | None) -> dict[str, list[dict[str, dict[str, str]]]]:
    """GET the URL, or POST `body` to it unless empty; return the JSON object of the answer.

    Sends OPENAI_API_KEY if it is set. Each wait for the server ends after SECONDS. Raises OSError, HTTPException or
    ValueError.
    """
    data, key = json.dumps(body).encode() if body else None, os.environ.get("OPENAI_API_KEY")
    reply = json.loads(send(url, data, key, SECONDS))
    if not isinstance(reply, dict):
        raise ValueError(f"{url} did not answer with a JSON object")
    return reply
