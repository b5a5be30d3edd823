"""docs/troubleshooting.md and its Chinese twin, generated from head.<lang>.txt and signatures.yaml.

`python -m finlm.diagnose.pages` writes both, `--check` says whether they are current.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from finlm.base import files, screen
from finlm.diagnose.findings import PLACEHOLDER
from finlm.diagnose.signatures import Signatures

DOCS = Path(__file__).resolve().parents[3] / "docs"
PAGES = {"en": DOCS / "troubleshooting.md", "zh": DOCS / "troubleshooting.zh-CN.md"}

_WORDS = {
    "en": {"causes": "Causes", "fix": "Fix", "confirm": "Confirm", "doctor": "Doctor check", "threads": "Threads"},
    "zh": {"causes": "原因", "fix": "处理", "confirm": "确认", "doctor": "doctor 检查项", "threads": "参考"},
}


def page(lang: str) -> str:
    """The whole page in one language."""
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
    """On the page there is no log, so what a log would lend shows as its name; <words> are no HTML."""
    plain = PLACEHOLDER.sub(r"‹\1›", text)
    return re.sub(r"(`[^`]*`)|<(?=[A-Za-z/])", lambda found: found[1] or r"\<", plain)


def main(argv: Sequence[str] | None = None) -> int:
    """Write or check both pages; 1 when --check finds a stale one."""
    check = "--check" in (sys.argv[1:] if argv is None else argv)
    stale = 0
    for lang, path in PAGES.items():
        text = page(lang)
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale += 1
        if check:
            screen.say(f"{path.name} is stale: run python -m finlm.diagnose.pages")
        else:
            path.parent.mkdir(exist_ok=True)
            files.write_text(path, text)
    return int(check and stale > 0)


if __name__ == "__main__":
    sys.exit(main())
