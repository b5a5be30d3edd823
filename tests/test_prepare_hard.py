"""Preparation in adversity: killed at random moments, a full disk, few open files and many workers."""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers import QUICKSTART, ROOT, finlm, sets

WORDS = ("公司", "营业收入", "净利润", "同比增长", "报告期", "现金流量", "股东大会", "亿元", "12.3%", "\n")


def corpus(directory: Path, documents: int) -> None:
    directory.mkdir()
    for number in range(2):
        dice = random.Random(number)
        rows = (
            json.dumps({"text": f"{row}" + "".join(dice.choices(WORDS, k=dice.randrange(20, 300)))}, ensure_ascii=False)
            for row in range(documents)
        )
        (directory / f"part{number}.jsonl.gz").write_bytes(gzip.compress("\n".join(rows).encode(), 1))


def settings(directory: Path, cache: str) -> tuple[str, ...]:
    return (
        f"data.sources={directory}/corpus/*.jsonl.gz",
        f"data.cache_dir={directory}/{cache}",
        "data.clean=none",
        "data.shard_tokens=200k",
        "data.packing=best_fit",
        "tokenizer.vocab_size=400",
        "tokenizer.sample_bytes=200KB",
    )


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_killed_at_ten_random_moments_it_still_gives_the_same_bytes(tmp_path: Path) -> None:
    corpus(tmp_path / "corpus", 4_000)
    started = time.monotonic()
    reference = finlm("prepare", QUICKSTART, *sets(settings(tmp_path, "reference")))
    whole = time.monotonic() - started
    assert reference.returncode == 0, reference.stderr
    wanted = Path(reference.stdout.strip())
    dice = random.Random()
    print(f"an uninterrupted run takes {whole:.1f} s; state of the dice {dice.getstate()[1][:3]}")
    command = [sys.executable, "-m", "finlm", "prepare", str(QUICKSTART), *sets(settings(tmp_path, "cache"))]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    killed = 0
    while killed < 10:
        begun = time.monotonic()
        process = subprocess.Popen(
            command, env=environment, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(timeout=dice.uniform(0.1, 1.0) * whole)
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)  # the parent alone: its workers must notice
            process.wait()
            killed += 1
        assert process.returncode in (0, -signal.SIGKILL)
        shards = tmp_path / "cache" / wanted.name
        if process.returncode == 0:  # it came to its end: the next begins from nothing
            assert contents(shards) == contents(wanted)
            shutil.rmtree(tmp_path / "cache")
            whole = min(whole, time.monotonic() - begun)  # the first one may have had a busier machine
    last = finlm("prepare", QUICKSTART, *sets(settings(tmp_path, "cache")))
    assert last.returncode == 0, last.stderr
    assert contents(tmp_path / "cache" / wanted.name) == contents(wanted)
    assert not list((tmp_path / "cache").glob(".*.tmp"))


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
@pytest.mark.parametrize(("limit", "says"), [("12m", "not enough disk space"), ("40m", "the disk is full")])
def test_a_small_disk_is_a_clear_refusal_and_a_rerun_completes(tmp_path: Path, limit: str, says: str) -> None:
    """The second limit is met while writing: text that compresses a hundredfold is larger than was estimated."""
    (tmp_path / "corpus").mkdir()
    row = json.dumps({"text": "净利润同比增长" * 900}, ensure_ascii=False)
    rows = "\n".join(f"{row[:-2]}{number}{row[-2:]}" for number in range(4000))
    (tmp_path / "corpus/part0.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
    (tmp_path / "cache").mkdir()
    wanted = " ".join(f"--set '{override}'" for override in (*settings(tmp_path, "cache"), "tokenizer.vocab_size=300"))
    script = f"""
        mount -t tmpfs -o size={limit} none {tmp_path}/cache || exit 77
        {sys.executable} -m finlm prepare {QUICKSTART} {wanted}; code=$?
        ls -A {tmp_path}/cache >&2
        mount -o remount,size=400m {tmp_path}/cache
        {sys.executable} -m finlm prepare {QUICKSTART} {wanted} || exit 78
        exit $code
    """
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    result = subprocess.run(
        ["unshare", "-m", "bash", "-c", script], env=environment, capture_output=True, text=True, check=False, cwd=ROOT
    )
    if result.returncode in (1, 77) and "error: " not in result.stderr:
        pytest.skip(f"no small file system can be mounted here: {result.stderr.strip()[:200]}")
    assert result.returncode == 2, result.stderr
    assert says in result.stderr and "Traceback" not in result.stderr and ".tmp" not in result.stderr
    assert result.stdout.strip().endswith(tuple("0123456789abcdef"))  # the rerun's shards


def test_a_thousand_workers_and_256_open_files(tmp_path: Path) -> None:
    corpus(tmp_path / "corpus", 300)
    wanted = " ".join(f"--set '{override}'" for override in (*settings(tmp_path, "cache"), "data.num_proc=1024"))
    command = f"ulimit -n 256; exec {sys.executable} -m finlm prepare {QUICKSTART} {wanted} --show 2"
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    result = subprocess.run(
        ["bash", "-c", command], env=environment, capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert result.returncode == 0, result.stderr
    assert "1024 workers asked, " in result.stderr and " used: this process may " in result.stderr
    assert "== position 1: row " in result.stdout and "-- document 1, " in result.stdout and "⟦</s>⟧" in result.stdout
