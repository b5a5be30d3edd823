"""Near-duplicate detection against the exact answer, and its speed: prints a table.

    python benchmarks/data_dedup.py corpus/fin_articles_data.jsonl.gz [--threshold 0.8] [--documents 50000]

The exact answer is every pair of documents whose sets of character 5-grams have a Jaccard similarity of at least the
threshold, found by prefix filtering (Chaudhuri et al. 2006: two sets this similar share one of their rarest members),
which loses nothing; on the first 1,500 documents it is compared with plain Python sets, every pair of them.
"""

from __future__ import annotations

import argparse
import gzip
import json
import tempfile
import time
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from finlm.corpus import clean, contamination, documents, near, ngrams
from finlm.corpus.workers import ChunkTask, Kept, load_kept
from finlm.recipe.schema_data import Clean

Ids = npt.NDArray[np.int64]
Pairs = npt.NDArray[np.int64]  # [pairs, 2]


def main() -> None:
    """Measure one file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("file", type=Path, help="JSON lines of documents, .gz or not")
    parser.add_argument("--threshold", type=float, default=0.8)
    parser.add_argument("--documents", type=int, default=50_000, help="so many of the file's first documents")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        measure(read(options.file, options.documents), options.threshold, Path(directory))


def read(path: Path, most: int) -> list[str]:
    """The different clean texts of a file in their order."""
    cleaner, texts = clean.Cleaner(Clean()), dict[str, None]()
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
        for _, line in zip(range(most), lines, strict=False):
            text, reason = cleaner(json.loads(line)["text"])
            if reason is None and text:
                texts[text] = None
    return list(texts)


def measure(texts: list[str], threshold: float, directory: Path) -> None:
    """Print how fast the parts are and how many of the exact pairs are found."""
    chunk = write_chunk(texts, directory)
    kept, seconds = Kept(near.sign_chunk, ChunkTask(chunk.path), directory / "chunk.npz"), time.process_time()
    load_kept(kept)
    signed = time.process_time()
    ngrams.Catalog.write(directory, [chunk], [kept.path])
    search, (group,) = near.plan_search(directory, [chunk], [kept], threshold)
    states = np.full(len(texts), near.TAKES_PART | near.IS_OPEN, dtype=np.uint8)
    started = time.process_time()
    near.sort_group(group)
    compared = near.find_likes(search, states, lambda _, function, tasks: map(function, tasks))
    joined = time.process_time()
    like = np.load(directory / "like.npy")
    megabytes = chunk.path.stat().st_size / 1e6
    print(f"{len(texts):,} documents, {megabytes:.1f} MB, Jaccard >= {threshold}, one core")
    speed = len(texts) / (signed - seconds)
    print(f"signatures         {speed:10,.0f} documents/s {megabytes / (signed - seconds):8.1f} MB/s")
    print(f"bands, verify, join {len(texts) / (joined - started):9,.0f} documents/s ({compared:,} pairs compared)")
    pairs, similar = exact_pairs(texts, threshold)
    checked = check(texts[:1500], threshold)
    print(f"exact              {len(pairs):,} pairs (prefix filter = all pairs of Python sets on {checked:,} pairs)")
    known = [contamination.find_facts(text) for text in texts]
    kept = like == np.arange(len(texts))
    # A pair is a duplicate where its first document stays and says all that the second says.
    counted = np.array(
        [contamination.covers(known[left], known[right]) for left, right in pairs.tolist()], dtype=np.bool_
    )
    counted &= kept[pairs[:, 0]]
    dropped = ~kept[pairs[:, 1]]
    print(
        f"duplicates         {np.count_nonzero(counted):,} of these pairs: the others differ in a number, date or name"
    )
    print(f"recall             {dropped[counted].mean():.4f} ({np.count_nonzero(~dropped & counted):,} missed)")
    for low, high in pairwise((threshold, 0.85, 0.9, 0.95, 1.01)):
        here = (similar >= low) & (similar < high) & counted
        if here.any():
            print(f"  {low:.2f} to {min(high, 1):.2f}     {dropped[here].mean():.4f} of {np.count_nonzero(here):,}")
    gone = np.flatnonzero(~kept)
    closeness = jaccard(grams_of(texts), gone, like[gone].astype(np.int64))
    print(
        f"precision          {np.mean(closeness >= threshold):.4f} of {len(gone):,} dropped documents are that similar "
        f"to the one kept (least {closeness.min(initial=1):.2f})"
    )


def write_chunk(texts: list[str], directory: Path) -> documents.Chunk:
    """The texts as a chunk of the documents step."""
    path = directory / "chunk.txt"
    encoded = [text.encode() for text in texts]
    index = np.zeros(len(texts), dtype=documents.INDEX)
    index["end"] = np.cumsum([len(text) for text in encoded])
    index["characters"] = [len(text) for text in texts]
    path.write_bytes(b"".join(encoded))
    np.save(path.with_suffix(".npy"), index)
    return documents.Chunk(0, "source", path, slice(0, len(texts)))


def grams_of(texts: list[str]) -> ngrams.Grams:
    """The 5-grams that similarity is about."""
    encoded = [text.encode() for text in texts]
    ends = np.cumsum([len(text) for text in encoded])
    return ngrams.hash_grams(ngrams.words_only(ngrams.characters(b"".join(encoded), ends)), ngrams.SHINGLE)


def exact_pairs(texts: list[str], threshold: float) -> tuple[Pairs, npt.NDArray[np.float64]]:
    """(every pair at least this similar [pairs, 2], their similarities)."""
    grams = grams_of(texts)
    unique = np.unique(np.rec.fromarrays([grams.document, grams.hashes], names="document,hash"))
    _, rank, frequency = np.unique(unique["hash"], return_inverse=True, return_counts=True)
    order = np.lexsort((rank, frequency[rank], unique["document"]))
    document, rank = unique["document"][order], rank[order]
    size = np.bincount(document, minlength=len(texts))
    place = np.arange(len(document)) - np.repeat(np.cumsum(size) - size, size)
    prefix = place < (size - np.ceil(threshold * size - 1e-9) + 1)[document]
    document, rank = document[prefix].astype(np.int64), rank[prefix]
    order = np.lexsort((document, rank))
    document, rank = document[order], rank[order]
    candidates = []
    for group in np.split(document, np.flatnonzero(np.diff(rank)) + 1):
        if len(group) > 1:
            left, right = np.triu_indices(len(group), 1)
            left, right = group[left], group[right]
            near_size = np.minimum(size[left], size[right]) >= threshold * np.maximum(size[left], size[right])
            candidates.append((left * len(texts) + right)[near_size])
    packed = np.unique(np.concatenate([*candidates, np.empty(0, dtype=np.int64)]))
    pairs = np.stack((packed // len(texts), packed % len(texts)), axis=1)
    similar = jaccard(grams, pairs[:, 0], pairs[:, 1])
    return pairs[similar >= threshold], similar[similar >= threshold]


def jaccard(grams: ngrams.Grams, left: Ids, right: Ids) -> npt.NDArray[np.float64]:
    """Exact similarity of the sets of n-grams of pairs of documents."""
    sets = ngrams.distinct_grams(grams)
    found = np.empty(len(left))
    for place, (one, other) in enumerate(zip(left.tolist(), right.tolist(), strict=True)):
        common = len(np.intersect1d(sets[one], sets[other], assume_unique=True))
        found[place] = common / max(1, len(sets[one]) + len(sets[other]) - common)
    return found


def check(texts: list[str], threshold: float) -> int:
    """Compare with plain sets; how many pairs were looked at. Raises AssertionError where they differ."""
    sets = []
    for text in texts:
        words = "".join(letter.lower() for letter in text if letter.isalnum())
        sets.append({words[start : start + 5] for start in range(len(words) - 4)})
    plain = {
        (left, right)
        for left, right in combinations(range(len(sets)), 2)
        if sets[left] and len(sets[left] & sets[right]) >= threshold * len(sets[left] | sets[right])
    }
    found = {(int(left), int(right)) for left, right in exact_pairs(texts, threshold)[0]}
    assert found == plain, f"{len(found ^ plain)} pairs differ"
    return len(sets) * (len(sets) - 1) // 2


if __name__ == "__main__":
    main()
