"""What a notebook prints of a traceback: its frames as Python's other tools show them, and the line that failed."""

import re

# IPython 7, Colab: `/usr/lib/x.py in f(a, b)`, `<ipython-input-3-ab12> in <cell line: 1>()`, `~/lib/x.py in f(a)`.
_FRAME = re.compile(
    r"^(?P<file><(?!module)\S+>|(?:~?/|[A-Z]:\\|[\w./-]+/)[^\s:]*\.(?:pyx?|pxi)) in (?P<name><?[\w.]+(?: \w+: ?\d+)?>?)"
    r"(?:\(.*\))?$"
)
_ARROW = re.compile(r"^-+> ?(?P<line>\d+)\s+(?P<code>\S.*)")  # `---> 12     x = f(x)`
CONTEXT = re.compile(r"^ +\d+(?: {2,}|$)")  # the lines around it


def frame(text: str) -> str:
    """Return a frame that a notebook printed as `File x.py:0, in f`, its line being unknown; another line as it is."""
    match = _FRAME.match(text) if " in " in text else None
    return f"File {match['file']}:0, in {match['name']}" if match else text


def failing_code(text: str, frames: list[str]) -> str:
    """Return the code of a line with a notebook's arrow, "" for another line; gives the last of `frames` its number."""
    match = _ARROW.match(text)
    if match and frames:
        frames[-1] = frames[-1].replace(":0, in ", f":{match['line']}, in ")
    return match["code"] if match else ""
