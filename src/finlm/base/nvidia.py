"""What nvidia-smi says of this machine's GPUs."""

from __future__ import annotations

import subprocess


def gpus(*keys: str) -> list[dict[str, str]]:
    """The keys of --query-gpu for every GPU that is listed, in order; empty without a driver."""
    command = ["nvidia-smi", f"--query-gpu={','.join(keys)}", "--format=csv,noheader"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in output.splitlines() if line.strip()]
    return [dict(zip(keys, row, strict=True)) for row in rows if len(row) == len(keys)]
