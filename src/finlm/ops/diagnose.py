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
    signatures = _signatures()
    logs = []
    for path in paths:
        if path == "-":
            logs.append(scan(standard_input, "-", signatures.prefilter))
            continue
        with Path(path).open("rb") as file:
            former = sum(1 for _ in islice(file, since.get(path, 0))) if since else 0
            logs.append(scan(file, path, signatures.prefilter, 1 + former))
    return diagnose(_distinct(logs), signatures, lang)


def of_run(run: Path, lang: str = "en", since: Mapping[str, int] | None = None) -> list[Finding]:
    """The findings of all logs of a run directory, fixes made concrete by its recipe and plan; kept in diagnosis.json.

    since: lines of each log that former launches wrote, which then count for nothing. Raises OSError when a log cannot
    be read.
    """
    findings = of_logs([str(path) for path in diagnose_run.logs(run)], lang, since=since)
    findings = diagnose_run.concrete(findings, run, lang)
    diagnose_run.keep(findings, run)
    return findings


@lru_cache(maxsize=1)
def _signatures() -> Signatures:
    return Signatures()


def _distinct(logs: list[Log]) -> list[Log]:
    """Logs without those named twice."""
    return list({log.name: log for log in logs}.values())


def run(paths: Sequence[str], lang: str, as_json: bool) -> int:
    """Diagnose and print; 0 = nothing fatal, 1 = a fatal cause, 2 = a file that cannot be read."""
    findings: list[Finding] = []
    files = []
    try:
        for path in paths:
            if path != "-" and Path(path).is_dir():
                findings += of_run(Path(path), lang)
            else:
                files.append(path)
        findings += of_logs(files, lang) if files else []
    except OSError as error:
        print(f"error: cannot read {error.filename or paths[0]}", file=sys.stderr)
        print(f"  evidence: {error.strerror or error}", file=sys.stderr)
        print("  fix:      give log files, - for standard input, or a run directory", file=sys.stderr)
        return 2
    diagnose_show.show(findings, lang, as_json)
    return 1 if any(finding.fatal for finding in findings) else 0


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
