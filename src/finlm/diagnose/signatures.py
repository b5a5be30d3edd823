"""The signatures of signatures.yaml, the lines of logs that match them, and their fixes in the words of a program.

A pattern's level says what it can be: `cause` (names what went wrong), `symptom` (a consequence that may still be all
there is), `echo` (another rank died of something), `hint` (a warning that matters only when nothing moves after it),
`unknown` (an error no signature names).

A fix names finlm's keys, `section.name: value` between backticks. programs.yaml says what another program calls them; a
step that no word of the program fits is left out, and so are finlm's own commands. The first step for a run of finlm
has the run's own values: recipe.yaml, plan.json, doctor.json and env/ are read as plain files, so that a directory of
another machine or version works too.

`python -m finlm.diagnose.signatures` writes docs/troubleshooting.md and its Chinese twin from head.<lang>.txt and
signatures.yaml, `--check` says whether they are current.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finlm.base import screen
from finlm.diagnose.lines import Ending, Hit, Log, read_yaml
from finlm.diagnose.read import LAUNCH_MARKS, Prefilter, rarity

if TYPE_CHECKING:
    from finlm.diagnose.findings import Finding  # which speaks a program's words

Matches = dict[str, list[tuple[Hit, re.Match[str]]]]  # lines that match, by regular expression
SIGNATURES = Path(__file__).with_name("signatures.yaml")
PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")
IGNORED = re.compile(r"Exception ignored in|--- Logging error ---|Error in sys\.excepthook|Exception in thread")


@dataclass(frozen=True)
class Pattern:
    """A regular expression of a signature and the conditions under which a match counts.

    `all`, `none`: expressions that some, and no, line must match. `lacks`: an expression matched on other hosts, not on
    the hit's. `hosted`: the hit names a host. `last`: at most so many lines follow. `lasting`: counts even if training
    goes on. `source`: code counts too. `says`: (name, text) of facts.
    """

    cause: str
    regex: str
    level: str
    all: tuple[str, ...] = ()
    none: tuple[str, ...] = ()
    lacks: str | None = None
    hosted: bool = False
    last: int | None = None
    lasting: bool = False
    source: bool = False
    library: str = ""  # "any", "framed" or "installed": see read.is_of_library
    says: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Wording:
    """The texts of a cause by language, "en" and "zh"; `fix` has a list of steps for each."""

    title: dict[str, str]
    explain: dict[str, str]
    fix: dict[str, list[str]]
    confirm: dict[str, str]


@dataclass(frozen=True)
class Signature:
    """A cause: its id, texts and patterns, and the expressions that read facts from the lines around a match.

    `doctor`: the check of `finlm doctor` that sees it before launch. `threads`: URLs of issues. `waits`: its rank only
    waited for others. `of_request`: a server may refuse one request so and go on. Without `names_cause` it says only
    how a run of unknown cause ended.
    """

    id: str
    text: Wording
    unsure: Wording  # when only symptoms are seen
    patterns: tuple[Pattern, ...]
    facts: tuple[str, ...]
    doctor: str | None
    threads: tuple[str, ...]
    waits: bool = False
    of_request: bool = False
    names_cause: bool = True


class Signatures:
    """All signatures of a file by id, and the search for any of their literals."""

    def __init__(self, path: Path = SIGNATURES) -> None:
        """Read a YAML file of signatures. Raises KeyError for an incomplete entry, ValueError for short literals."""
        self.all = {entry["id"]: _signature(entry) for entry in read_yaml(path)}
        self.rules = path.with_name("endings.yaml")
        self.compiled: dict[str, re.Pattern[str]] = {}  # those that a line needed: most never are
        self.by_literal: dict[str, list[str]] = {}
        patterns = [pattern for signature in self.all.values() for pattern in signature.patterns]
        regexes = [regex for p in patterns for regex in (p.regex, *p.all, *p.none, *filter(None, [p.lacks]))]
        for regex in dict.fromkeys((*regexes, IGNORED.pattern, *LAUNCH_MARKS)):
            for literal in literals(regex):
                self.by_literal.setdefault(literal, []).append(regex)
        self.prefilter = Prefilter(set(self.by_literal))

    @cached_property
    def endings(self) -> list[Ending]:
        """The rules of endings.yaml, beside the file, for exceptions that no signature knows, in order; read once."""
        return [Ending.of(rule) for rule in read_yaml(self.rules)]

    def matches(self, logs: Sequence[Log]) -> Matches:
        """Return {expression: [(hit, match)]} of signatures, exclusions, IGNORED and LAUNCH_MARKS, in reading order."""
        matches: Matches = {}
        for log in logs:
            for hit in log.hits:
                wanted = {regex for word in self.prefilter.words(hit.text) for regex in self.by_literal[word]}
                for regex in wanted:
                    if regex not in self.compiled:
                        self.compiled[regex] = re.compile(regex)
                    match = self.compiled[regex].search(hit.text)
                    if match:
                        matches.setdefault(regex, []).append((hit, match))
        return matches


def _signature(entry: Mapping[str, Any]) -> Signature:
    """Return the signature that an entry of signatures.yaml describes. Raises KeyError if it is incomplete."""
    patterns = []
    for item in entry["patterns"]:
        rule: Mapping[str, Any] = {"match": item} if isinstance(item, str) else item
        level, says = rule.get("level", entry.get("level", "cause")), tuple(rule.get("says", {}).items())
        both = tuple(rule.get("all", ())), (*rule.get("none", ()), *entry.get("none", ()))
        library = "any" if rule.get("library") is True else rule.get("library", "")
        rest = {key: rule[key] for key in ("lacks", "hosted", "last", "lasting", "source") if key in rule}
        patterns.append(Pattern(entry["id"], rule["match"], level, *both, library=library, says=says, **rest))
    text = Wording(*(entry[name] for name in ("title", "explain", "fix", "confirm")))
    return Signature(
        id=entry["id"],
        text=text,
        unsure=replace(text, **entry.get("unsure", {})),
        patterns=tuple(patterns),
        facts=tuple(entry.get("facts", ())),
        doctor=entry.get("doctor"),
        threads=tuple(entry.get("threads", ())),
        **{key: entry[key] for key in ("waits", "of_request", "names_cause") if key in entry},
    )


def literals(regex: str) -> list[str]:
    """Return plain strings, rarest in logs, at least one of which is in every line that the expression matches.

    Raises ValueError when they cannot have four bytes: such an expression cannot be searched for in large logs.
    """
    best = _literals(regex)
    if min(rarity(literal)[0] for literal in best) == -100:
        raise ValueError(f"{regex!r} has no four plain bytes in a row that every match contains")
    return best


# An escaped character, a set, of which ] is a member where it comes first or is escaped, or another character.
_PIECE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^]\\])*\]|.", re.DOTALL)


def _literals(regex: str) -> list[str]:
    """Return for each top-level alternative its rarest literal, or the literals of a group that must match.

    The literal is "" for an alternative without plain characters.
    """
    rarest: list[str] = []
    choices: list[list[str]] = [[""]]
    i = 0
    while i <= len(regex):
        char = regex[i : i + 1]
        if char in ("", "|"):
            rarest += max(choices, key=lambda choice: min(rarity(run)[0] for run in choice))
            choices = [[""]]
        elif char == "(":
            end = _closing(regex, i)
            inner = re.sub(r"^\?(?::|P<\w+>)", "", regex[i + 1 : end])
            if not inner.startswith("?") and regex[end + 1 : end + 2] not in ("?", "*", "{"):
                choices.append(_literals(inner))
            choices.append([""])
            i = end
        elif char == "[":
            i = next(_PIECE.finditer(regex, i)).end() - 1
            choices.append([""])
        elif char in "*?{":
            choices[-1] = [choices[-1][0][:-1]]
            choices.append([""])
            i = regex.index("}", i) if char == "{" else i
        elif (char == "\\" and regex[i + 1].isalnum()) or char in ".^$+":
            i += char == "\\"
            choices.append([""])
        else:
            i += char == "\\"
            choices[-1] = [choices[-1][0] + regex[i]]
        i += 1
    return rarest


def _closing(regex: str, start: int) -> int:
    """Return the index of the parenthesis that closes the one at `start`. Raises ValueError if none does."""
    depth = 0
    for piece in _PIECE.finditer(regex, start):
        depth += (piece[0] == "(") - (piece[0] == ")")
        if not depth:
            return piece.start()
    raise ValueError(f"{regex!r} has a parenthesis that is not closed")


PROGRAMS = Path(__file__).with_name("programs.yaml")
_KEY = re.compile(r"`(?P<key>(?:batch|zero|train|optim|data|model|env|checkpoint|launch)\.\w+)(?:: (?P<value>[^`]+))?`")
SENTENCE = re.compile(r"(?<=[.!?。])\s+|(?<=。)")


@dataclass(frozen=True)
class Program:
    """A training program and its names for finlm's keys in fixes; the default is finlm itself."""

    id: str = "finlm"
    known_by: str = ""
    words: dict[str, str | dict[str, str]] = field(default_factory=dict)

    @property
    def is_finlm(self) -> bool:
        """Whether the log is of finlm's own run, or names no other program."""
        return self.id == "finlm"

    def speak(self, text: str, lang: str) -> str:
        """Return the text with this program's names for keys, without sentences that it has no name for or need finlm.

        `lang` is "en" or "zh". finlm's own text stays as it is.
        """
        if self.is_finlm:
            return text
        text = re.sub(r"`finlm train`(?:, |、)", "", text)
        kept = [sentence for sentence in SENTENCE.split(text) if "`finlm " not in sentence]
        spoken = (self._speak_sentence(sentence, lang) for sentence in kept)
        return " ".join(filter(None, spoken)) if lang == "en" else "".join(filter(None, spoken))

    def _speak_sentence(self, sentence: str, lang: str) -> str:
        """Return the sentence with this program's names for keys; "" if it has no name for one of them."""
        missing = []

        def word(match: re.Match[str]) -> str:
            """Return the name for the key that _KEY matched; for none, add the key to `missing` and return ""."""
            key, value = match["key"], match["value"]
            if key.startswith("env."):
                name = key[4:]
                return f"`export {name}={value}`" if value else f"`{name}`"
            words = self.words.get(f"{key}: {value}", self.words.get(key))
            if words is None:
                missing.append(key)
                return ""
            said = words if isinstance(words, str) else words[lang]
            return said.replace("{value}", value) if value else re.sub(r"[:=]? ?\{value\}", "", said)

        said = _KEY.sub(word, sentence)
        return "" if missing else re.sub(r"\b(?:in the recipe|在配方中)\s?", "", said)


@lru_cache(maxsize=1)
def _programs() -> tuple[Program, ...]:
    """Return the programs of programs.yaml in order, read once in a process."""
    entries = read_yaml(PROGRAMS)
    plain = entries.pop("plain")
    return tuple(Program(name, entry["known_by"], {**plain, **entry["words"]}) for name, entry in entries.items())


def program_of(logs: Sequence[Log]) -> Program:
    """Return the first program of programs.yaml that the logs' begin, end or evidence name; finlm if they name none."""
    text = b"\n".join(part for log in logs for part in (log.head, log.tail, *(hit.around for hit in log.hits[:20])))
    shown = text.decode("utf-8", errors="replace")
    if re.search(r"/finlm/\w+|-m finlm\b|\bfinlm (?:train|launch)\b", shown):
        return Program()
    return next((program for program in _programs() if re.search(program.known_by, shown)), Program())


class Run:
    """The files of a run directory whose values go into a fix; a damaged or missing one is empty."""

    def __init__(self, path: Path) -> None:
        """Read recipe.yaml, plan.json, doctor.json and env/*.env of a run directory. OSError for an unreadable .env."""
        self.recipe = _mapping(path / "recipe.yaml")
        self.plan = _mapping(path / "plan.json")
        self.doctor = _mapping(path / "doctor.json")
        self.env = {file.stem: _variables(file) for file in sorted((path / "env").glob("*.env"))}

    def value(self, key: str) -> Any:
        """Return the recipe's value at a dotted key such as "zero.stage".

        If it is unset or "auto", return plan.json's value of "stage", else of "zero_stage", else None.
        """
        value: Any = self.recipe
        *_, last = names = key.split(".")
        for name in names:
            value = value.get(name) if isinstance(value, dict) else None
        return self.plan.get(last, self.plan.get(f"zero_{last}")) if value in (None, "auto") else value


def _mapping(path: Path) -> Mapping[str, Any]:
    """Return the mapping in a .json or YAML file; {} if the file is missing or damaged or holds something else."""
    try:
        value = json.loads(path.read_text("utf-8")) if path.suffix == ".json" else read_yaml(path)
    except Exception:  # a damaged file of a failed run must not hide its diagnosis
        return {}
    return value if isinstance(value, dict) else {}


def _variables(file: Path) -> dict[str, str]:
    """Return {name: value} of a file's lines NAME=value, without comments. Raises OSError."""
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))


def concrete(findings: Sequence[Finding], path: Path, lang: str) -> list[Finding]:
    """Return copies of the findings with a first step that has the run's own values, and doctor's warning as evidence.

    `path` is the run directory, whose files may be missing; `lang` is "en" or "zh".
    """
    run = Run(path)
    improved = []
    for finding in findings:
        step = STEPS[finding.cause](run, finding) if finding.cause in STEPS else None
        fix = [step[lang == "zh"]] if step else []
        warned = [w for w in run.doctor.get("findings", ()) if finding.doctor and w.get("check") == finding.doctor]
        seen = f"finlm doctor: {warned[0].get('evidence')}" if warned else ""
        evidence = "\n".join(filter(None, (finding.evidence, seen)))
        improved.append(replace(finding, fix="\n".join([*fix, finding.fix]), evidence=evidence))
    return improved


def _interface(run: Run, finding: Finding) -> tuple[str, str] | None:
    """Return in English and Chinese how to set the interface of the finding's host, else the first; None if none."""
    host = finding.host or next(iter(run.env), "")
    if not host:
        return None
    now = run.env.get(host, {}).get("NCCL_SOCKET_IFNAME", "")
    named, now_zh = (f" (now {now})", f"（当前为 {now}）") if now else ("", "")
    key = f"hosts.{host}.env.NCCL_SOCKET_IFNAME"
    return (
        f"Set `{key}` in the recipe to the interface that owns {host}'s address{named}: `ssh {host} ip -br addr`.",
        f"在配方中把 `{key}` 设为 {host} 的 IP 所在网卡{now_zh}：`ssh {host} ip -br addr`。",
    )


def _gpu_memory(run: Run, _: Finding) -> tuple[str, str] | None:
    """Return the next step to less GPU memory: half the micro batch, recompute, ZeRO-3, offload; None after all."""
    micro = run.value("batch.micro_batch") or 1
    rows = {host["gpu"] or host["name"]: host.get("micro_batch", 1) for host in run.plan.get("hosts", ())}
    if isinstance(micro, dict) or len(set(rows.values())) > 1:
        micro = micro if isinstance(micro, dict) else rows
        fewer: Any = {name: max(1, int(count) // 2) for name, count in micro.items()}
    else:
        fewer = max(1, int(micro) // 2)
    better = {"train.recompute": "full", "zero.stage": 3, "zero.offload_optimizer": "cpu", "zero.offload_param": "cpu"}
    ladder = [("batch.micro_batch", micro, fewer), *((key, run.value(key), value) for key, value in better.items())]
    return next((_change(*rung) for rung in ladder if rung[1] is not None and rung[1] != rung[2]), None)


def _learning_rate(run: Run, _: Finding) -> tuple[str, str] | None:
    """Return the step to a third of the learning rate; None if the run names none."""
    rate = run.value("optim.lr")
    return _change("optim.lr", rate, float(rate) / 3) if rate else None


def _host_memory(run: Run, _: Finding) -> tuple[str, str] | None:
    """Return the step that ends offload of parameters, else of the optimizer, else halves the workers, or None."""
    offloads = [key for key in ("zero.offload_param", "zero.offload_optimizer") if run.value(key) == "cpu"]
    return _change(offloads[0], "cpu", "none") if offloads else _workers(run, _, share=2)


def _workers(run: Run, _: Finding, share: int = 4) -> tuple[str, str] | None:
    """Return the step to 1/`share` of the workers that prepare data, at least one; None if there is only one."""
    workers = int(run.value("data.num_proc") or 1)
    return _change("data.num_proc", workers, max(1, workers // share)) if workers > 1 else None


def _precision(run: Run, _: Finding) -> tuple[str, str] | None:
    """Return the step that leaves the precision to finlm."""
    return _change("train.precision", run.value("precision"), "auto")


def _change(key: str, now: Any, better: Any) -> tuple[str, str]:
    """Return (English, Chinese) of the step that changes a recipe's key from `now` to `better`."""
    better = f"{better:.3g}" if isinstance(better, float) else better
    return (
        f"In this run's recipe: `{key}: {better}` (now {now}).",
        f"在本次运行的配方中：`{key}: {better}`（当前为 {now}）。",
    )


STEPS = {  # a step of a fix in English and in Chinese, or None where the run gives nothing to name
    "nccl_ifname_missing": _interface,
    "nccl_net_unreachable": _interface,
    "nccl_unhandled_system_error": _interface,
    "env_not_propagated": _interface,
    "cuda_oom": _gpu_memory,
    "ds_loss_scale_min": _learning_rate,
    "loss_nan": _learning_rate,
    "host_memory_insufficient": _host_memory,
    "too_many_open_files": _workers,
    "bf16_unsupported": _precision,
}


DOCS = Path(__file__).resolve().parents[3] / "docs"
PAGES = {"en": DOCS / "troubleshooting.md", "zh": DOCS / "troubleshooting.zh-CN.md"}

_WORDS = {
    "en": {"causes": "Causes", "fix": "Fix", "confirm": "Confirm", "doctor": "Doctor check", "threads": "Threads"},
    "zh": {"causes": "原因", "fix": "处理", "confirm": "确认", "doctor": "doctor 检查项", "threads": "参考"},
}


def page(lang: str) -> str:
    """Return docs/troubleshooting.md as text, in this language ("en" or "zh")."""
    words = _WORDS[lang]
    entries = [entry for entry in Signatures().all.values() if entry.id != "unknown"]
    lines = [Path(__file__).with_name(f"head.{lang}.txt").read_text("utf-8"), f"## {words['causes']}", ""]
    lines += [f"- [{entry.text.title[lang]}](#{entry.id})" for entry in entries]
    for entry in entries:
        lines += ["", f'<a id="{entry.id}"></a>', "", f"### {entry.text.title[lang]}", "", f"`{entry.id}`", ""]
        lines += [_name_placeholders(entry.text.explain[lang]), "", f"**{words['fix']}**", ""]
        lines += [f"{i}. {_name_placeholders(step)}" for i, step in enumerate(entry.text.fix[lang], 1)]
        lines += ["", f"**{words['confirm']}**: {_name_placeholders(entry.text.confirm[lang])}"]
        if entry.doctor:
            lines += ["", f"**{words['doctor']}**: `{entry.doctor}`"]
        lines += ["", f"**{words['threads']}**: " + ", ".join(f"<{url}>" for url in entry.threads)]
    return "\n".join(lines) + "\n"


def _name_placeholders(text: str) -> str:
    """Return a text for the page: placeholders show as their names, and < is escaped outside of code."""
    plain = PLACEHOLDER.sub(r"‹\1›", text)
    return re.sub(r"(`[^`]*`)|<(?=[A-Za-z/])", lambda match: match[1] or r"\<", plain)


def main(argv: Sequence[str] | None = None) -> int:
    """Write both troubleshooting pages and return 0; with --check write nothing and return 1 if a page is stale."""
    pages = {path: page(lang) for lang, path in PAGES.items()}
    return screen.write_pages(pages, argv, "python -m finlm.diagnose.signatures")


if __name__ == "__main__":
    sys.exit(main())
