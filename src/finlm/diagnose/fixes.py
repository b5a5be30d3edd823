"""The program that a log is of, and the words of its own configuration in which a fix is said.

signatures.yaml names finlm's keys, `section.name: value` between backticks. programs.yaml says what another program
calls them; a step that no word of the program fits is left out, and so are finlm's own commands.

The first step of a fix for a run of finlm has the run's own values: recipe.yaml, plan.json, doctor.json and env/ are
read as plain files, so that a directory of another machine or version works too.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finlm.diagnose.read import Log
from finlm.diagnose.signatures import read_yaml

if TYPE_CHECKING:
    from finlm.diagnose.findings import Finding  # which speaks a program's words

PROGRAMS = Path(__file__).with_name("programs.yaml")
_KEY = re.compile(r"`(?P<key>(?:batch|zero|train|optim|data|model|env|checkpoint|launch)\.\w+)(?:: (?P<value>[^`]+))?`")
_SENTENCE = re.compile(r"(?<=[.!?。])\s+|(?<=。)")


@dataclass(frozen=True)
class Program:
    """What a program calls the things that fixes speak of; finlm's words are those of signatures.yaml."""

    id: str = "finlm"
    known_by: str = ""
    words: dict[str, str | dict[str, str]] = field(default_factory=dict)

    @property
    def is_finlm(self) -> bool:
        """Whether the log is of this repository's own run, or names no other program."""
        return self.id == "finlm"

    def speak(self, text: str, lang: str) -> str:
        """A text in this program's words; sentences that only a user of finlm can follow are left out."""
        if self.is_finlm:
            return text
        text = re.sub(r"`finlm train`(?:, |、)", "", text)
        kept = [sentence for sentence in _SENTENCE.split(text) if "`finlm " not in sentence]
        spoken = (self._sentence(sentence, lang) for sentence in kept)
        return " ".join(filter(None, spoken)) if lang == "en" else "".join(filter(None, spoken))

    def _sentence(self, sentence: str, lang: str) -> str:
        missing = []

        def word(match: re.Match[str]) -> str:
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
    entries = read_yaml(PROGRAMS)
    plain = entries.pop("plain")
    return tuple(Program(name, entry["known_by"], {**plain, **entry["words"]}) for name, entry in entries.items())


def program_of(logs: Sequence[Log]) -> Program:
    """The first program of programs.yaml that a log's beginning, end or evidence names; finlm where none does."""
    text = b"\n".join(part for log in logs for part in (log.head, log.tail, *(hit.around for hit in log.hits[:20])))
    shown = text.decode("utf-8", errors="replace")
    if re.search(r"/finlm/\w+|-m finlm\b|\bfinlm (?:train|launch)\b", shown):
        return Program()
    return next((program for program in _programs() if re.search(program.known_by, shown)), Program())


class Run:
    """The parts of a run directory that make a fix concrete; what cannot be read is empty."""

    def __init__(self, path: Path) -> None:
        self.recipe = _mapping(path / "recipe.yaml")
        self.plan = _mapping(path / "plan.json")
        self.doctor = _mapping(path / "doctor.json")
        self.env = {file.stem: _variables(file) for file in sorted((path / "env").glob("*.env"))}

    def value(self, key: str) -> Any:
        """A value of the recipe by its dotted key, else the plan's value of the last name."""
        found: Any = self.recipe
        for name in key.split("."):
            found = found.get(name) if isinstance(found, dict) else None
        if found in (None, "auto"):
            return self.plan.get(key.split(".")[-1], self.plan.get("zero_" + key.split(".")[-1]))
        return found


def _mapping(path: Path) -> Mapping[str, Any]:
    try:
        value = json.loads(path.read_text("utf-8")) if path.suffix == ".json" else read_yaml(path)
    except Exception:  # a damaged file of a failed run must not hide its diagnosis
        return {}
    return value if isinstance(value, dict) else {}


def _variables(file: Path) -> dict[str, str]:
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))


def concrete(findings: Sequence[Finding], path: Path, lang: str) -> list[Finding]:
    """The findings, with a first step that names the run's own values and the doctor's warning of the same thing."""
    run = Run(path)
    improved = []
    for finding in findings:
        step = STEPS[finding.cause](run, finding) if finding.cause in STEPS else None
        fix = [step[lang == "zh"]] if step else []
        warned = [w for w in run.doctor.get("findings", ()) if finding.doctor and w.get("check") == finding.doctor]
        seen = f"finlm doctor: {warned[0].get('evidence')}" if warned else ""
        evidence = "\n".join(filter(None, (finding.evidence, seen)))
        improved.append(dataclasses.replace(finding, fix="\n".join([*fix, finding.fix]), evidence=evidence))
    return improved


def _interface(run: Run, finding: Finding) -> tuple[str, str] | None:
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
    micro = run.value("batch.micro_batch") or 1
    rows = {host["gpu"] or host["name"]: host.get("micro_batch", 1) for host in run.plan.get("hosts", ())}
    if isinstance(micro, dict) or len(set(rows.values())) > 1:
        micro = micro if isinstance(micro, dict) else rows
        fewer: Any = {name: max(1, int(count) // 2) for name, count in micro.items()}
    else:
        fewer = max(1, int(micro) // 2)
    ladder = [
        ("batch.micro_batch", micro, fewer),
        ("train.recompute", run.value("train.recompute"), "full"),
        ("zero.stage", run.value("zero.stage"), 3),
        ("zero.offload_optimizer", run.value("zero.offload_optimizer"), "cpu"),
        ("zero.offload_param", run.value("zero.offload_param"), "cpu"),
    ]
    return next((_change(*rung) for rung in ladder if rung and rung[1] is not None and rung[1] != rung[2]), None)


def _learning_rate(run: Run, _: Finding) -> tuple[str, str] | None:
    rate = run.value("optim.lr")
    return _change("optim.lr", rate, float(rate) / 3) if rate else None


def _host_memory(run: Run, _: Finding) -> tuple[str, str] | None:
    for key in ("zero.offload_param", "zero.offload_optimizer"):
        if run.value(key) == "cpu":
            return _change(key, "cpu", "none")
    workers = run.value("data.num_proc") or 1
    return _change("data.num_proc", workers, max(1, int(workers) // 2)) if int(workers) > 1 else None


def _workers(run: Run, _: Finding) -> tuple[str, str] | None:
    workers = run.value("data.num_proc")
    return _change("data.num_proc", workers, max(1, int(workers) // 4)) if workers and int(workers) > 1 else None


def _precision(run: Run, _: Finding) -> tuple[str, str] | None:
    return _change("train.precision", run.value("precision"), "auto")


def _change(key: str, now: Any, better: Any) -> tuple[str, str]:
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
