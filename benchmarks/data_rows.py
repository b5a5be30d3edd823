"""What a training step of packed dialogues costs the host before the GPU can begin: ours and trl's, side by side.

    .venv/bin/python benchmarks/data_rows.py                  # 65,536 tokens a step, rows of 512 and of 4,096
    .venv/bin/python benchmarks/data_rows.py --length 2048 --longest 256

The same random dialogues (log-normal lengths, the second half learnt), best-fit packing on both sides, one core, no
reader beside the trainer, which is the default of both. A step is what the trainers ask for: of ours the order, the
number of labels that count, inputs, labels and the documents' bounds; of trl SFTTrainer's packed `datasets.Dataset`
through a shuffling DataLoader and its padding-free collator. The median step counts; packing itself is told apart.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from finlm.rows import dialogues
from finlm.rows.dialogues import DialogueRows
from finlm.rows.shards import Order, Shards
from finlm.train import batches

sys.path.insert(0, str(Path(__file__).resolve().parent))
import gpu_sft  # its dialogues

WARMUP = 3


def ours(texts: list[np.ndarray], directory: Path, length: int, rows_a_step: int) -> Iterator[int]:
    """Tokens of each step's rows."""
    parts = Shards(gpu_sft.write_shards(directory, texts)).split("train")
    rows = DialogueRows(parts, dialogues.build_index(directory, parts, "best_fit", length))
    order = Order(len(rows), 7)
    step = 0
    while True:
        ids = order[np.arange(step * rows_a_step, (step + 1) * rows_a_step, dtype=np.uint64)]
        rows.supervised(ids)
        inputs, labels = rows.read(ids)
        numbers = rows.documents(ids)
        for part in (inputs, labels, batches.document_bounds(numbers)):
            torch.from_numpy(part)
        yield int(np.count_nonzero(numbers >= 0))
        step += 1


def trl(texts: list[np.ndarray], directory: Path, length: int, rows_a_step: int) -> Iterator[int]:
    """Tokens of each step's rows."""
    from datasets import Dataset, disable_progress_bars
    from torch.utils.data import DataLoader
    from trl import pack_dataset
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    disable_progress_bars()
    columns = {
        "input_ids": [ids.tolist() for ids in texts],
        "labels": [np.where(gpu_sft.learnt(ids) == 1, ids.astype(int), -100).tolist() for ids in texts],
    }
    packed = pack_dataset(Dataset.from_dict(columns), length, "bfd")
    collator = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    torch.manual_seed(0)
    while True:
        for batch in DataLoader(packed, rows_a_step, shuffle=True, collate_fn=collator, drop_last=True):
            yield batch["input_ids"].numel()


Way = Callable[[list[np.ndarray], Path, int, int], Iterator[int]]
WAYS: dict[str, Way] = {"finlm": ours, "trl": trl}


def main() -> None:
    """Run both and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, nargs="*", default=[512, 4096], help="tokens of a row")
    parser.add_argument("--longest", type=int, help="tokens of the longest dialogue; a row's unless given")
    parser.add_argument("--tokens", type=int, default=65_536, help="tokens of a step")
    parser.add_argument("--dialogues", type=int, default=20_000)
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for length in arguments.length:
        texts = gpu_sft.dialogues(arguments.dialogues, min(arguments.longest or length, length))
        mean = sum(map(len, texts)) / len(texts)
        print(f"rows of {length:,} tokens, dialogues of {mean:.0f} on average", flush=True)
        taken = {}
        for name, way in WAYS.items():
            with tempfile.TemporaryDirectory() as directory:
                begun = time.perf_counter()
                steps = way(texts, Path(directory), length, arguments.tokens // length)
                next(steps)
                packing_seconds = time.perf_counter() - begun
                seconds, rates = [], []
                for _ in range(WARMUP + arguments.steps):
                    begun = time.perf_counter()
                    tokens = next(steps)
                    seconds.append(time.perf_counter() - begun)
                    rates.append(tokens / seconds[-1])
            taken[name] = statistics.median(rates[WARMUP:])
            milliseconds = 1e3 * statistics.median(seconds[WARMUP:])
            print(
                f"  {name:<6}{milliseconds:>8.1f} ms a step {taken[name] / 1e6:>8.1f} M tokens/s"
                f"   (written and packed in {packing_seconds:.1f} s)",
                flush=True,
            )
        print(f"  ratio {taken['finlm'] / taken['trl']:.1f}")


if __name__ == "__main__":
    main()
