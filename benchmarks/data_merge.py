"""The merge of near-duplicates for many synthetic documents: CPU seconds and memory of the search, not of signatures.

    python benchmarks/data_merge.py 10_000_000 [--bands 21] [--workers 1] [--directory DIR]

Every tenth document is an edited copy of an earlier one, 0.8 to 1 alike, and shares each band's key with it as often as
such a copy does; all other keys differ. In place of texts, whether two documents are duplicates is told by arithmetic,
an eighth of the copies' pairs are not. So all parts of the search run: sorting keys, ranges, orphans, several rounds.
With fewer bands the search is as long for each band; a band takes 12 bytes a document on disk.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from finlm.corpus import near, ngrams
from finlm.corpus.selection import list_repeats
from finlm.corpus.workers import LocalEngine
from finlm.rows.shards import GOLDEN, mix

Ids = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]

ngrams.BANDS = int(os.environ.get("MERGE_BANDS", ngrams.BANDS))  # in workers as well


def roots(ids: Ids) -> Ids:
    """The document of which each is a copy, or itself."""
    tenth = np.maximum(ids // 10, 1)
    chosen = (mix(ids.astype(np.uint64) + GOLDEN) >> np.uint64(1)).astype(np.int64) % tenth
    return np.where((ids % 10 == 9) & (ids > 9), chosen * 10 + chosen % 9, ids)


def are_duplicates(left: Ids, right: Ids) -> npt.NDArray[np.bool_]:
    """Whether both have the same root, but for an eighth of the pairs; in place of a Verifier."""
    dice = mix(left.astype(np.uint64) * GOLDEN + right.astype(np.uint64)) % np.uint64(8)
    same: npt.NDArray[np.bool_] = (roots(left) == roots(right)) & (dice != 0)
    return same


near.load_verifier = lambda search: are_duplicates  # type: ignore[assignment]


def make_keys(ids: Ids) -> Hashes:
    """Keys [bands, documents]."""
    keys = np.empty((ngrams.BANDS, len(ids)), dtype=np.uint64)
    root, number = roots(ids), ids.astype(np.uint64)
    similarity = 0.8 + 0.2 * (mix(number) >> np.uint64(11)).astype(np.float64) / 2**53
    for band in range(ngrams.BANDS):
        salt = np.uint64(mix(np.array([band], dtype=np.uint64))[0])
        dice = (mix(number ^ salt) >> np.uint64(11)).astype(np.float64) / 2**53
        keys[band] = mix(np.where(dice < similarity**ngrams.ROWS, root, ids).astype(np.uint64) * GOLDEN + salt)
    return keys


@dataclass(frozen=True)
class Group:
    """Documents whose keys are sorted together."""

    keys: ngrams.SortedKeys
    number: int
    ids: range


def write_group(group: Group) -> tuple[float, float]:
    """Write the sorted keys of a group: the CPU seconds of (making keys, sorting and writing them)."""
    started = time.process_time()
    keys = make_keys(np.arange(group.ids.start, group.ids.stop))
    made = time.process_time()
    group.keys.write(group.number, keys, np.arange(len(group.ids), dtype=np.uint32))
    return made - started, time.process_time() - made


def watch(peaks: list[int]) -> None:
    """Keep the most anonymous memory of this process in peaks[0], in kB, once in 0.2 s."""
    while True:
        status = Path("/proc/self/status").read_text(encoding="ascii")
        peaks[0] = max(peaks[0], int(status.split("RssAnon:")[1].split()[0]))
        time.sleep(0.2)


def main() -> None:
    """Measure one number of documents."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("documents", type=int)
    parser.add_argument("--bands", type=int, default=ngrams.BANDS)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--directory", type=Path)
    options = parser.parse_args()
    os.environ["MERGE_BANDS"] = str(options.bands)
    ngrams.BANDS = options.bands
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        measure(options.documents, options.workers, Path(directory))


def measure(count: int, workers: int, directory: Path) -> None:
    """Print the CPU seconds of sorting and of the search, and the memory of this process and its workers."""
    firsts = range(0, count, near._GROUP)
    keys = ngrams.SortedKeys(directory, tuple(firsts), max(1, -(-count // near._PART)))
    groups = [Group(keys, place, range(first, min(count, first + near._GROUP))) for place, first in enumerate(firsts)]
    search, peaks = near.Search(directory, keys, 0.8), [0]
    threading.Thread(target=watch, args=(peaks,), daemon=True).start()
    times = list[tuple[str, float]]()
    wall = time.time()

    def show(name: str) -> None:
        """Print how far the search is."""
        times.append((name, cpu()))
        seconds = times[-1][1] - times[-2][1] if len(times) > 1 else 0.0
        print(f"  {name}: {seconds:.1f} CPU s since the last line, {time.time() - wall:.0f} s", flush=True)

    with LocalEngine(workers).start(workers) as run:
        made = np.array(list(run(write_group, groups)))
        show("keys are sorted")
        states = np.full(count, near.TAKES_PART | near.IS_OPEN, dtype=np.uint8)

        def run_tasks(name, function, tasks):  # type: ignore[no-untyped-def]
            """Have the workers do the tasks."""
            show(f"before {name}")
            return run(function, tasks)

        started = cpu()
        compared = near.find_likes(search, states, run_tasks)
        searched = cpu() - started
    if workers > 1:  # of workers, known once they have ended
        searched = cpu() - times[0][1] - made.sum()
    like = np.load(directory / "like.npy", mmap_mode="r")
    dropped = sum(len(repeats) for repeats, _ in list_repeats(like))
    disk = sum(path.stat().st_size for path in directory.glob("keys-*.bin"))
    millions, own = count / 1e6, peaks[0] / 1024
    print(f"{count:,} documents, {ngrams.BANDS} bands, {len(groups)} groups, {keys.parts} ranges, {workers} workers")
    print(f"sorting   {made[:, 1].sum() / millions:8.3f} CPU s a million documents")
    print(f"search    {searched / millions:8.3f} CPU s a million documents, {compared:,} pairs, {dropped:,} dropped")
    print(f"memory    {own:8.0f} MiB anonymous in this process, {own * 2**20 / count:.2f} bytes a document")
    for who, name in ((resource.RUSAGE_SELF, "this process"), (resource.RUSAGE_CHILDREN, "the largest worker")):
        print(f"          {resource.getrusage(who).ru_maxrss / 1024:8.0f} MiB with mapped files in {name}")
    print(f"disk      {disk / count:8.1f} bytes a document; {time.time() - wall:.0f} s in all")


def cpu() -> float:
    """CPU seconds of this process and of its workers that have ended."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


if __name__ == "__main__":
    main()
