"""`finlm diagnose LOG...`: the cause of a failed run from its logs, what it means and what ends it.

Also a script for hosts without finlm: `python src/finlm/ops/diagnose.py LOG` needs Python 3.8 and PyYAML or
ruamel.yaml, nothing else of this repository but the files beside it. Reading, matching and printing are in
diagnose_read, diagnose_match and diagnose_show; what a run directory adds is in diagnose_run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import BinaryIO

if __name__ == "__main__" and not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from finlm.ops import diagnose_run, diagnose_show
from finlm.ops.diagnose_match import Finding, diagnose
from finlm.ops.diagnose_read import Log, scan
from finlm.ops.diagnose_signatures import Signatures

__all__ = ["Finding", "main", "of_logs", "of_run", "run"]


def of_logs(
    paths: Sequence[str],
    lang: str = "en",
    standard_input: BinaryIO = sys.stdin.buffer,
    since: Mapping[str, int] | None = None,
) -> list[Finding]:
    """The findings of logs taken together, the most probable cause first. `-` is standard input.

    since: how many lines of a path are not looked at. Raises OSError when one cannot be read.
    """
    return diagnose(_read(paths, standard_input, since), _signatures(), lang)


def of_run(run: Path, lang: str = "en", since: Mapping[str, int] | None = None) -> list[Finding]:
    """The findings of all logs of a run directory, fixes made concrete by its recipe and plan; kept in diagnosis.json.

    since: lines of each log that former launches wrote, which then count for nothing. Raises OSError when a log cannot
    be read.
    """
    return _of_run(_read_run(run, since), run, lang)


def _of_run(logs: Sequence[Log], run: Path, lang: str) -> list[Finding]:
    findings = diagnose_run.concrete(diagnose(logs, _signatures(), lang), run, lang)
    diagnose_run.keep(findings, run)
    return findings


def _read_run(run: Path, since: Mapping[str, int] | None = None) -> list[Log]:
    return _read([str(path) for path in diagnose_run.logs(run)], since=since)


def _read(
    paths: Sequence[str], standard_input: BinaryIO = sys.stdin.buffer, since: Mapping[str, int] | None = None
) -> list[Log]:
    """The logs, each once, however often it is named."""
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
    return Signatures()


def run(paths: Sequence[str], lang: str, as_json: bool) -> int:
    """Diagnose and print; 0 = nothing fatal, 1 = a fatal cause, 2 = a file that cannot be read, or nothing to read."""
    findings: list[Finding] = []
    logs: list[Log] = []
    files = []
    try:
        for path in paths:
            if path == "-" or not Path(path).is_dir():
                files.append(path)
            elif own := _read_run(Path(path)):
                findings += _of_run(own, Path(path), lang)
                logs += own
        given = _read(files)
    except OSError as error:
        return _refused(f"cannot read {error.filename or paths[0]}", error.strerror or str(error))
    findings += diagnose(given, _signatures(), lang)
    logs += given
    lines = sum(log.lines for log in logs)
    if not lines:
        ends = ", ".join(f"*{suffix}" for suffix in diagnose_run.LOG_SUFFIXES)
        return _refused(f"no logs in {', '.join(paths)}", f"{len(logs)} empty files; of a directory {ends} are read")
    diagnose_show.show(findings, lang, as_json, len(logs), lines)
    return 1 if any(finding.fatal for finding in findings) else 0


def _refused(problem: str, evidence: str) -> int:
    print(f"error: {problem}", file=sys.stderr)
    print(f"  evidence: {evidence}", file=sys.stderr)
    print("  fix:      give log files, - for standard input, or a run directory", file=sys.stderr)
    return 2


def main(argv: Sequence[str] | None = None) -> int:
    """The command line of the script."""
    parser = argparse.ArgumentParser(description="Name the cause of a failed run from its logs.")
    parser.add_argument("logs", nargs="+", metavar="LOG", help="log file, run directory, or - for standard input")
    parser.add_argument("--lang", choices=("en", "zh"), default="en", help="language of the text")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON on stdout")
    options = parser.parse_args(argv)
    return run(options.logs, options.lang, options.json)


if __name__ == "__main__":
    sys.exit(main())
