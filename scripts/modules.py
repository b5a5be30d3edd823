"""Write the table of modules in docs/design.md and its Chinese twin from docs/modules.toml; --check only compares."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEADS = {
    "en": "| folder | does | may import | without torch |",
    "zh": "| 目录 | 作用 | 可以导入 | 不需要 torch |",
}
WORDS = {"en": ("anything", "standard library, rich", "yes", ", "), "zh": ("任意", "标准库、rich", "是", "、")}


def table(language: str) -> str:
    """The rows of docs/modules.toml as a Markdown table."""
    anything, nothing, yes, comma = WORDS[language]
    lines = [HEADS[language], "| --- | --- | --- | --- |"]
    for row in tomllib.loads((ROOT / "docs/modules.toml").read_text(encoding="utf-8"))["folder"]:
        imports = anything if row["imports"] == ["*"] else comma.join(row["imports"]) or nothing
        name = "finlm" if row["name"] == "." else row["name"]
        lines.append(f"| `{name}` | {row[language]} | {imports} | {yes if row['light'] else ''} |")
    return "\n".join(lines)


def main() -> int:
    """Write both pages, or with --check exit 1 and name those that are stale."""
    stale = []
    for name, language in (("design.md", "en"), ("design.zh-CN.md", "zh")):
        page = ROOT / "docs" / name
        before = page.read_text(encoding="utf-8")
        head = re.escape(HEADS[language])
        after = re.sub(rf"^{head}\n(?:\|.*\n)*", table(language) + "\n", before, flags=re.MULTILINE)
        if after != before:
            stale.append(name)
            if "--check" not in sys.argv:
                page.write_text(after, encoding="utf-8")
    if "--check" in sys.argv:
        for name in stale:
            print(f"docs/{name} is stale: run python scripts/modules.py")
        return bool(stale)
    return 0


if __name__ == "__main__":
    sys.exit(main())
