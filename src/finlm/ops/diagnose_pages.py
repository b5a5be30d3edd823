"""docs/troubleshooting.md and its Chinese twin, generated from signatures.yaml.

`python -m finlm.ops.diagnose_pages` writes both, `--check` says whether they are current.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from finlm.base import files, screen
from finlm.ops.diagnose_match import PLACEHOLDER
from finlm.ops.diagnose_signatures import SIGNATURES, read_yaml

DOCS = Path(__file__).resolve().parents[3] / "docs"
PAGES = {"en": DOCS / "troubleshooting.md", "zh": DOCS / "troubleshooting.zh-CN.md"}

_HEAD = {
    "en": """# Troubleshooting

[中文](troubleshooting.zh-CN.md). Generated from [signatures.yaml](../src/finlm/ops/signatures.yaml) by
`python -m finlm.ops.diagnose_pages`.

```bash
.venv/bin/python -m finlm diagnose runs/RUN
.venv/bin/python -m finlm diagnose A.log B.log --lang zh
.venv/bin/python -m finlm diagnose - --json < A.log
```

These read all logs of a run, the logs of several hosts together, and standard input. Exit code 0: nothing fatal; 1: a
cause was found; 2: a file cannot be read, or there is no log. A host without finlm needs only
`src/finlm/ops/diagnose*.py`, `src/finlm/ops/signatures.yaml`, Python 3.8 and PyYAML:
`python src/finlm/ops/diagnose.py LOG`.

**Adding a signature**: one entry in signatures.yaml (its header explains the keys) and one log that you wrote or
produced in `tests/ops/logs/<id>.log`; then run the generator and the tests.
""",
    "zh": """# 故障排查

[English](troubleshooting.md)。由 `python -m finlm.ops.diagnose_pages` 根据
[signatures.yaml](../src/finlm/ops/signatures.yaml) 生成。

```bash
.venv/bin/python -m finlm diagnose runs/RUN
.venv/bin/python -m finlm diagnose A.log B.log --lang zh
.venv/bin/python -m finlm diagnose - --json < A.log
```

它们分别读取一次运行的全部日志、多台主机的日志（一起分析）、标准输入。
退出码 0：没有致命问题；1：找到原因；2：文件无法读取，或没有日志。
没有安装 finlm 的机器只需要 `src/finlm/ops/diagnose*.py`、`src/finlm/ops/signatures.yaml`、Python 3.8 和 PyYAML：
`python src/finlm/ops/diagnose.py LOG`。

**添加一条特征**：在 signatures.yaml 中加一项（文件开头说明了各个键），
并在 `tests/ops/logs/<id>.log` 放一份自己写的或自己产生的日志；然后运行生成命令和测试。
""",
}
_WORDS = {
    "en": {"causes": "Causes", "fix": "Fix", "confirm": "Confirm", "doctor": "Doctor check", "threads": "Threads"},
    "zh": {"causes": "原因", "fix": "处理", "confirm": "确认", "doctor": "doctor 检查项", "threads": "参考"},
}


def page(lang: str) -> str:
    """The whole page in one language."""
    words = _WORDS[lang]
    entries = [entry for entry in read_yaml(SIGNATURES) if entry["id"] != "unknown"]
    lines = [_HEAD[lang], f"## {words['causes']}", ""]
    lines += [f"- [{_title(entry, lang)}](#{entry['id']})" for entry in entries]
    for entry in entries:
        lines += ["", f'<a id="{entry["id"]}"></a>', "", f"### {_title(entry, lang)}", "", f"`{entry['id']}`", ""]
        lines += [_named(entry["explain"][lang]), "", f"**{words['fix']}**", ""]
        lines += [f"{i}. {_named(step)}" for i, step in enumerate(entry["fix"][lang], 1)]
        lines += ["", f"**{words['confirm']}**: {_named(entry['confirm'][lang])}"]
        if entry.get("doctor"):
            lines += ["", f"**{words['doctor']}**: `{entry['doctor']}`"]
        lines += ["", f"**{words['threads']}**: " + ", ".join(f"<{url}>" for url in entry["threads"])]
    return "\n".join(lines) + "\n"


def _title(entry: dict[str, Any], lang: str) -> str:
    return str(entry["title"][lang])


def _named(text: str) -> str:
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
            screen.say(f"{path.name} is stale: run python -m finlm.ops.diagnose_pages")
        else:
            path.parent.mkdir(exist_ok=True)
            files.write_text(path, text)
    return int(check and stale > 0)


if __name__ == "__main__":
    sys.exit(main())
