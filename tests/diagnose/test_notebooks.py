"""A notebook's traceback says the same as Python's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from finlm.diagnose import command, prefix

COLAB = """---------------------------------------------------------------------------
ValueError                                Traceback (most recent call last)
<ipython-input-12-3435b262f1ae> in <cell line: 1>()
----> 1 trainer.train()

3 frames
/usr/local/lib/python3.10/dist-packages/somelib/core.py in run(self, inputs, **kwargs)
   3275         if self.names[0] not in inputs:
-> 3276             raise ValueError(
   3277                 "These kinds of rows do not go together"

ValueError: These kinds of rows do not go together
"""


def test_an_old_notebooks_frames_name_the_place(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text(COLAB, encoding="utf-8")
    finding = command.of_logs([str(log)])[0]
    assert finding.kind == "check_refused"
    assert "core.py:3276" in finding.explanation


@pytest.mark.parametrize(
    ("line", "frame"),
    [
        ("<ipython-input-3-ab12> in <module>", "File <ipython-input-3-ab12>:0, in <module>"),
        ("~/lib/x.py in f(a, b)", "File ~/lib/x.py:0, in f"),
        ("/tmp/ipykernel_33/117.py in <cell line: 4>()", "File /tmp/ipykernel_33/117.py:0, in <cell line: 4>"),
        ("wrote /data/x.py in 3 s", "wrote /data/x.py in 3 s"),
        ("/data/x.py in the list", "/data/x.py in the list"),
    ],
)
def test_only_a_frame_is_written_anew(line: str, frame: str) -> None:
    assert prefix.frame(line) == frame
