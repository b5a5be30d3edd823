"""JSONL.gz to packed token rows, side by side: finlm and the two usual ways with Hugging Face `datasets`.

    .venv/bin/python benchmarks/data_prepare.py --size 1GB --work /tmp/data-benchmark
    .venv/bin/python benchmarks/data_prepare.py --only shares --sources rows.jsonl --questions 'exams/*.csv'
    .venv/bin/python benchmarks/data_prepare.py --toy          # does it run? 1 MB, held to no target

The corpus is grown by the synthetic generator, the tokenizer is trained on it, and each way runs in processes of its
own on the same files with the same number of workers. Speed is text per CPU second (user and system time of the whole
process tree), because wall time on a shared machine says little; memory is the tree's largest proportional set size.

per row   the method of the released XuanYuan code, as its readers describe it: a map over single rows that returns
          torch tensors, then a map that concatenates 1,000 documents and cuts blocks, then save_to_disk
batched   the same with batched maps over lists, the way of most tutorials

Encode and pack only: finlm runs with clean and dedup off, but counts, hashes and checks all the same.

shares    finlm on one core with no rule, with its default cleaning and near-duplicates, and with the rules of
          recipes/xuanyuan-6b (its decontamination needs --questions); before and after each, gigatoken alone on 200 MB
          of the same text, whose speed is the mean of both. The speed of prepare as its share is what a user pays for
          everything around the encoder; starting Python counts too.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

RECIPE = ROOT / "recipes/quickstart/pretrain.yaml"
LENGTH = 2048
VOCAB_SIZE = 16_000
TOKENIZER_BYTES, YARDSTICK_BYTES = 30_000_000, 20_000_000  # text of the tokenizer, and of the speed of encoding alone
ALONE_BYTES, BATCH_BYTES = 200_000_000, 8_000_000  # text that the encoder gets in all, and in a call
XUANYUAN = ("punctuation=true", "boilerplate_lines=true", "min_chinese=0.1", "max_digits=0.6", "max_short_lines=0.8")
SHARES = {"bare": 0.8, "near": 0.5, "xuanyuan": 0.35}  # targets
TARGETS = {"finlm": 25.0, "per row": 8.0, "batched": 4.0}  # MB of text a core-second; times faster than the peers


def main() -> int:
    """Run all ways and print the table; the exit code says whether the targets are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="100MB", help="text of the corpus (%(default)s)")
    parser.add_argument("--peer-size", help="text that the peers are given; the same when absent")
    parser.add_argument("--workers", type=int, default=2, help="processes of each way (%(default)s)")
    parser.add_argument("--work", type=Path, default=Path("/tmp/finlm-data-benchmark"), help="where (%(default)s)")
    parser.add_argument("--only", choices=[*WAYS, "shares"], help="one way alone")
    parser.add_argument("--sources", type=Path, help="JSON lines with a `text`, for --only shares; else synthetic text")
    parser.add_argument("--questions", default="", help="CSV files that the rules of xuanyuan-6b keep out")
    parser.add_argument("--toy", action="store_true", help="1 MB and a small tokenizer, to try the program")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--corpus", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        print(json.dumps(run(options)))
        return 0
    if options.sources and options.only != "shares":
        parser.error("--sources is for --only shares")
    if options.toy:
        options.size, scale = "1MB", 20
    else:
        scale = 1
    pieces = VOCAB_SIZE // 8 if options.toy else VOCAB_SIZE  # 2,000: the corpus has 1,018 characters
    if options.sources:
        options.work = options.work / f"sources-{options.sources.stem}"  # with a tokenizer of its own
    tokenizer(options.work, pieces, TOKENIZER_BYTES // scale, options.sources)
    print(f"tokenizer of {pieces:,} pieces, {options.workers} workers, {os.cpu_count()} cores")
    print(yardstick(options.work, YARDSTICK_BYTES // scale), flush=True)
    results = {}
    for way in [options.only] if options.only in WAYS else [] if options.only else list(WAYS):
        size = options.peer_size if options.peer_size and way in ("per row", "batched") else options.size
        results[way] = measured(way, corpus(options.work, size), options.work, options.workers)
        print(line(way, results[way]), flush=True)
    missed = False
    if options.only in (None, "shares"):
        missed = shares(options.sources or corpus(options.work, options.size), options.work, options.questions)
    return 0 if options.toy else verdict(results) | missed


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run --way in this process, which was started for it."""
    if options.way in WAYS:
        return WAYS[options.way](options.corpus, options.work, options.workers)
    rules = {
        "bare": ["data.clean=none", "data.dedup=none", "data.held_out_fraction=0.001"],
        "near": ["data.dedup=near"],
        "xuanyuan": ["data.dedup=near", *(f"data.clean.{rule}" for rule in XUANYUAN)],
    }
    if options.way not in rules:
        return encode_alone(options.corpus, options.work)
    if options.way == "xuanyuan" and options.questions:
        rules["xuanyuan"].append(f"data.decontaminate={options.questions}")
    return prepared(options.corpus, options.work, 1, *rules[options.way])


def shares(files: Path, work: Path, questions: str) -> bool:
    """Print the speed of each setting of prepare on one core beside the encoder's; whether a target is missed."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    size = sum(len(text.encode()) for text in texts_of(files))
    before, missed = measured("encoder", files, work, 1), False
    for way, target in SHARES.items():
        found = measured(way, files, work, 1, questions) | {"text_bytes": size}  # also what cleaning removes
        after = measured("encoder", files, work, 1)
        alone = (speed(before) + speed(after)) / 2
        share, before = speed(found) / alone, after
        missed |= share < target
        print(f"{line(way, found)}, encoder alone {alone:.1f}, share {share:.2f}, target {target:g}", flush=True)
    return missed


def encode_alone(files: Path, work: Path) -> dict[str, Any]:
    """Encode the first texts with gigatoken; the CPU seconds are those of its calls."""
    from finlm.tokens import encoders

    encoder = encoders.Gigatoken(work / "tokenizer/tokenizer.model")
    waiting, size, done, rows, seconds = list[bytes](), 0, 0, 0, 0.0
    for text in chain(texts_of(files), [""]):  # the last stands for the end
        waiting.append(text.encode())
        size += len(waiting[-1])
        if size >= BATCH_BYTES or not text:
            started = time.process_time()
            encoder(waiting)
            seconds += time.process_time() - started
            done, rows, waiting, size = done + size, rows + len(waiting), [], 0
        if done >= ALONE_BYTES:
            break
    return {"text_bytes": done, "rows": rows, "cpu_seconds": seconds}


def texts_of(files: Path) -> Iterator[str]:
    """The texts that are not empty of a file of JSON lines, or of a directory of such .jsonl.gz files."""
    for path in [files] if files.is_file() else sorted(files.glob("*.jsonl.gz")):
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            yield from filter(None, (json.loads(row)["text"] for row in file))


def line(way: str, found: dict[str, Any]) -> str:
    """One row of the table."""
    return (
        f"{way:<10} {found['text_bytes'] / 1e6:>7,.0f} MB of text {found['cpu_seconds']:>8.1f} CPU s "
        f"{found['wall_seconds']:>8.1f} s {speed(found):>7.2f} MB/core-s {found['peak_bytes'] / 2**20:>7,.0f} MiB peak "
        f"{found['rows']:>9,} rows"
    )


def yardstick(work: Path, size: int) -> str:
    """How fast this machine is now: both encoders alone, in this process, on the same text."""
    from finlm.tokens import encoders
    from finlm.world import writer

    texts = [row["text"].encode() for row in writer.documents("fin_news", size, 9, "train")]
    found = []
    for kind in (encoders.Sentencepiece, encoders.Gigatoken):
        encode = kind(work / "tokenizer/tokenizer.model")
        started = time.process_time()
        encode(texts)
        found.append(f"{kind.name} {sum(map(len, texts)) / 1e6 / (time.process_time() - started):.1f} MB/core-s")
    return f"encoding alone: {', '.join(found)}"


def speed(found: dict[str, Any]) -> float:
    """MB of text a core-second."""
    return float(found["text_bytes"] / 1e6 / found["cpu_seconds"])


def verdict(results: dict[str, dict[str, Any]]) -> int:
    """Print how finlm compares with the targets; 1 when one is missed."""
    if "finlm" not in results:
        return 0
    ours, missed = speed(results["finlm"]), False
    for way, target in TARGETS.items():
        if way in results:
            found = ours if way == "finlm" else ours / speed(results[way])
            missed |= found < target
            what = "MB/core-s" if way == "finlm" else f"times {way}"
            print(f"{found:.1f} {what}, target {target:g}: {'met' if found >= target else 'MISSED'}")
    return int(missed)


def corpus(work: Path, size: str) -> Path:
    """A directory of .jsonl.gz files with that much text."""
    from finlm.base.units import parse_bytes
    from finlm.world import writer

    directory = work / f"corpus-{size}"
    if not directory.is_dir():
        writer.write(directory.with_name(f".{directory.name}"), parse_bytes(size), 7, "train")
        directory.with_name(f".{directory.name}").rename(directory)
    return directory


def tokenizer(work: Path, pieces: int, size: int, sources: Path | None) -> Path:
    """A sentencepiece model of so many pieces, trained on so many bytes of such a corpus of another seed, or `sources`.

    Of `sources` its first texts are taken.
    """
    from finlm.tokens import vocab
    from finlm.world import writer

    directory = work / "tokenizer"
    if not (directory / "tokenizer.model").is_file():
        directory.mkdir(parents=True, exist_ok=True)
        if sources:
            texts = islice(texts_of(sources), size // 2000)
        else:
            texts = (row["text"] for name in writer.SOURCES for row in writer.documents(name, size, 8, "train"))
        lines = (part for text in texts for part in text.split("\n"))
        vocab.train(lines, directory, pieces, 0.9995)
    return directory / "tokenizer.model"


def measured(way: str, files: Path, work: Path, workers: int, questions: str = "") -> dict[str, Any]:
    """A way run as a process of its own: its CPU and wall seconds, its largest memory, and what it reports."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.monotonic()
    command = [sys.executable, __file__, "--way", way, "--corpus", files, "--work", work, "--workers", str(workers)]
    command += ["--questions", questions]
    log = (work / f"{way.replace(' ', '-')}.log").open("w")
    process = subprocess.Popen([str(part) for part in command], stdout=subprocess.PIPE, stderr=log, text=True)
    peak = [0]
    watcher = threading.Thread(target=watch, args=(process, peak), daemon=True)
    watcher.start()
    output, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"{way} failed: see {log.name}")
    watcher.join()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    about = json.loads(output.splitlines()[-1])
    return {"cpu_seconds": cpu, "wall_seconds": time.monotonic() - started, "peak_bytes": peak[0]} | about


def watch(process: subprocess.Popen[str], peak: list[int]) -> None:
    """Keep the largest sum of proportional set sizes of the process tree."""
    while process.poll() is None:
        peak[0] = max(peak[0], sum(map(proportional_bytes, tree(process.pid))))
        time.sleep(0.2)


def tree(root: int) -> Iterator[int]:
    """The process and all below it."""
    yield root
    try:
        children = Path(f"/proc/{root}/task/{root}/children").read_text().split()
    except OSError:
        return
    for child in children:
        yield from tree(int(child))


def proportional_bytes(pid: int) -> int:
    """Memory of a process, what it shares counted by share."""
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return next((1024 * int(row.split()[1]) for row in rollup.splitlines() if row.startswith("Pss:")), 0)


def prepared(files: Path, work: Path, workers: int, *rules: str) -> dict[str, int]:
    """This project's prepare."""
    import shutil

    from finlm import prepare
    from finlm.recipe import recipe

    shutil.rmtree(work / "finlm", ignore_errors=True)
    settings = [
        f"data.sources={files if files.is_file() else f'{files}/*.jsonl.gz'}",
        f"data.cache_dir={work}/finlm",
        f"data.num_proc={workers}",
        f"batch.sequence_length={LENGTH}",
        "batch.tokens_per_step=65536",
        "data.packing=blocks",
        "tokenizer.vocab_size=null",
        f"tokenizer.path={work}/tokenizer/tokenizer.model",
        *rules,
    ]
    wanted = recipe.load(RECIPE, settings).recipe
    about = prepare.summary(prepare.run(wanted), wanted)
    read = [json.loads(path.read_text()) for path in (work / "finlm").glob("documents-*/manifest.json")]
    return {"text_bytes": sum(row["bytes"] for row in read[0]["inputs"]), "rows": about["reading"]["rows"]}


def encode_and_pack(files: Path, work: Path, workers: int) -> dict[str, int]:
    """finlm with every rule off."""
    return prepared(files, work, workers, "data.clean=none", "data.dedup=none", "data.held_out_fraction=0.001")


def all_rules(files: Path, work: Path, workers: int) -> dict[str, int]:
    """finlm with its default cleaning and near-duplicates."""
    return prepared(files, work, workers, "data.dedup=near")


def opened(files: Path, work: Path) -> tuple[Any, Any]:
    """(the rows as a data set of one column, the tokenizer as transformers gives it) for the peers."""
    from datasets import concatenate_datasets, load_dataset
    from transformers import LlamaTokenizer

    # Of each file alone: load_dataset fails on files whose `meta` have different keys.
    parts = [
        load_dataset("json", data_files=str(path), split="train", cache_dir=str(work / "peer-cache"))
        for path in sorted(files.glob("*.jsonl.gz"))
    ]
    rows = concatenate_datasets([part.select_columns(["text"]) for part in parts])
    return rows, LlamaTokenizer.from_pretrained(str(work / "tokenizer"), legacy=False)


def per_row(files: Path, work: Path, workers: int) -> dict[str, int]:
    """A map over single rows to torch tensors, a torch-formatted concatenating map, save_to_disk."""
    import torch

    rows, tokenize = opened(files, work)

    def encode(row: dict[str, Any]) -> dict[str, Any]:
        found = tokenize(row["text"] + tokenize.eos_token, return_tensors="pt", split_special_tokens=False)
        return {"input_ids": found["input_ids"][0], "attention_mask": found["attention_mask"][0]}

    def pack(batch: dict[str, list[torch.Tensor]]) -> dict[str, Any]:
        joined = {name: torch.cat(list(parts)) for name, parts in batch.items()}
        total = len(joined["input_ids"]) // LENGTH * LENGTH
        packed = {name: list(part[:total].split(LENGTH)) for name, part in joined.items()}
        return packed | {"labels": [part.clone() for part in packed["input_ids"]]}

    encoded = rows.map(encode, num_proc=workers, remove_columns=["text"]).with_format("torch")
    return saved(rows, encoded.map(pack, batched=True, batch_size=1000, num_proc=workers), work / "per-row", workers)


def batched(files: Path, work: Path, workers: int) -> dict[str, int]:
    """Batched maps over lists, save_to_disk."""
    rows, tokenize = opened(files, work)

    def encode(batch: dict[str, list[str]]) -> dict[str, Any]:
        return dict(tokenize([text + tokenize.eos_token for text in batch["text"]]))

    def pack(batch: dict[str, list[list[int]]]) -> dict[str, Any]:
        joined = {name: list(chain.from_iterable(parts)) for name, parts in batch.items()}
        total = len(joined["input_ids"]) // LENGTH * LENGTH
        packed = {name: [part[at : at + LENGTH] for at in range(0, total, LENGTH)] for name, part in joined.items()}
        return packed | {"labels": [list(part) for part in packed["input_ids"]]}

    encoded = rows.map(encode, batched=True, num_proc=workers, remove_columns=["text"])
    return saved(rows, encoded.map(pack, batched=True, batch_size=1000, num_proc=workers), work / "batched", workers)


def saved(rows: Any, packed: Any, directory: Path, workers: int) -> dict[str, int]:
    """Write the packed rows; what was read and written."""
    import pyarrow.compute as compute

    packed.save_to_disk(directory, max_shard_size="500MB", num_proc=workers)
    text_bytes = compute.sum(compute.binary_length(rows.data.column("text"))).as_py()
    return {"text_bytes": text_bytes, "rows": len(packed)}


WAYS = {"finlm": encode_and_pack, "batched": batched, "per row": per_row, "all rules": all_rules}

if __name__ == "__main__":
    sys.exit(main())
