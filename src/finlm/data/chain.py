"""The steps of one recipe in order: what each depends on, and which function makes it.

synthetic (the embedded corpus) -> documents (read, normalise, hash) -> selection (duplicates, held-out share) ->
tokenizer -> shards. A setting is named in the first step that it changes, and nowhere else; the next step depends on
the key of the one before it. The work itself is in the modules of the steps' names.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from finlm.base import files, screen, units
from finlm.base.errors import UserError
from finlm.data import clean, dedup, documents, encode, sources, vocab, workers
from finlm.data.sources import Input, Split
from finlm.data.steps import Cache, NotPrepared, Step
from finlm.recipe.schema import Recipe

SYNTHETIC_SPLITS: tuple[Split, ...] = ("train", "held_out")


class Chain:
    """The steps of one recipe in a cache, each asking for the one before it."""

    def __init__(self, recipe: Recipe, cache: Cache) -> None:
        self.recipe = recipe
        self.data = recipe.data
        self.cache = cache
        self._workers = 0

    def shards(self) -> Path:
        """The directory of the last step. Raises NotPrepared where the cache may not build."""
        inputs = self._inputs()
        read = self._documents(inputs)
        chosen = self._selection(read)
        tokenizer = self._tokenizer(read, chosen)
        return self._shards(read, chosen, tokenizer).path

    def _inputs(self) -> list[Input]:
        found: list[Input] = []
        for number, source in enumerate(self.data.sources):
            if source.path is not None:
                if not self.cache.build and not sources.expand(source.path):
                    raise NotPrepared("sources")
                found += sources.of_files(source, f"data.sources[{number}]")
                continue
            assert source.synthetic is not None  # recipe.rules asks for one of the two
            step = self._synthetic(source.synthetic.size, source.synthetic.held_out_size, source.synthetic.seed)
            prefix = f"{source.name}-" if source.name else ""
            for name in step.manifest["files"]["train"]:
                for split in SYNTHETIC_SPLITS:
                    path = step.path / split / step.manifest["files"][split][name]
                    found.append(Input(sources.safe(f"{prefix}{name}"), path, split, "text"))
        hashes = self.cache.fingerprints([item.path for item in sources.checked(found)])
        return [sources.verified(item, hashes[item.path]) for item in found]

    def _synthetic(self, size: int, held_out_size: int, seed: int) -> Step:
        def make(directory: Path) -> dict[str, Any]:
            from finlm.data import synthetic  # only recipes without files of their own load the generator

            written = {
                "train": synthetic.write(directory / "train", size, seed, "train"),
                "held_out": synthetic.write(directory / "held_out", held_out_size, seed, "held_out"),
            }
            return {"files": {split: {name: p.name for name, p in paths.items()} for split, paths in written.items()}}

        code = sorted(Path(__file__).parent.glob("synthetic*.py"))
        depends_on = {
            "generator": [files.sha256_file(path) for path in code],
            "size": size,
            "held_out_size": held_out_size,
            "seed": seed,
        }
        step = self.cache.step("synthetic", depends_on, make, size + held_out_size)
        self._say(step, f"{units.format_bytes(size)} about fictional companies, seed {seed}")
        return step

    def _documents(self, inputs: list[Input]) -> Step:
        def make(directory: Path) -> dict[str, Any]:
            count = self._processes()
            return documents.write(directory, inputs, count, self.data.max_broken_fraction, self.cache.directory)

        depends_on = {
            "version": [documents.VERSION, clean.VERSION],
            "inputs": [[item.source, item.split, item.text_field, item.sha256] for item in inputs],
        }
        step = self.cache.step("documents", depends_on, make, documents.estimate_bytes(inputs))
        if self.cache.build:
            documents.check_broken(step.path, step.manifest, self.data.max_broken_fraction, self.cache.directory)
        rows = step.manifest["inputs"]
        self._say(
            step,
            f"{sum(row['rows'] for row in rows):,} rows of {len({row['source'] for row in rows})} sources, "
            f"{sum(row['broken'] for row in rows):,} broken, {units.format_bytes(sum(row['bytes'] for row in rows))}",
        )
        return step

    def _selection(self, read: Step) -> Step:
        def make(directory: Path) -> dict[str, Any]:
            table = dedup.Table.read(read.path, read.manifest)
            decision = dedup.decide(table, [item["split"] for item in read.manifest["inputs"]], self.data)
            counts = dedup.count(table, decision, read.manifest["inputs"])
            dedup.write(directory, decision)
            return {"sources": counts, "total": dedup.total(counts)}

        depends_on = {
            "version": dedup.VERSION,
            "documents": read.key,
            "dedup": self.data.dedup,
            "min_characters": self.data.min_characters,
            "held_out_fraction": self.data.held_out_fraction,
            "held_out_documents": self.data.held_out_documents,
        }
        step = self.cache.step("selection", depends_on, make, sum(i["documents"] for i in read.manifest["inputs"]))
        total = step.manifest["total"]
        self._say(
            step,
            f"{total['duplicate']:,} duplicates, {total['too_short']:,} too short, {total['equals_held_out']:,} equal "
            f"to held-out ones; {total['held_out']:,} held out, kept {total['kept']:,} "
            f"({units.format_bytes(total['bytes'])})",
        )
        return step

    def _tokenizer(self, read: Step, chosen: Step) -> Step:
        settings = self.recipe.tokenizer
        depends_on: dict[str, Any] = {"version": vocab.VERSION}
        if settings.path is not None:
            given = Path(settings.path).expanduser()
            if not self.cache.build and not given.is_file():
                raise NotPrepared("tokenizer")
            vocab.load(given)
            depends_on["sha256"] = vocab.fingerprint(given)
            step = self.cache.step("tokenizer", depends_on, lambda directory: vocab.copy(given, directory), 0)
        else:
            assert settings.vocab_size is not None  # recipe.rules asks for one of the two
            vocab_size = settings.vocab_size
            depends_on |= {
                "selection": chosen.key,
                "vocab_size": vocab_size,
                "sample_bytes": settings.sample_bytes,
                "character_coverage": settings.character_coverage,
                "sentencepiece": vocab.LIBRARY,
            }

            def make(directory: Path) -> dict[str, Any]:
                lines = self._sampled_lines(read, chosen)
                return vocab.train(lines, directory, vocab_size, settings.character_coverage)

            step = self.cache.step("tokenizer", depends_on, make, 64 * vocab_size)
        self._say(step, f"{step.manifest['vocab_size']:,} pieces, sha256 {step.manifest['sha256'][:16]}")
        return step

    def _sampled_lines(self, read: Step, chosen: Step) -> Iterator[str]:
        table = dedup.Table.read(read.path, read.manifest)
        wanted = vocab.sample(table, dedup.read(chosen.path), self.recipe.tokenizer.sample_bytes)
        size = units.format_bytes(int(table.text_bytes[wanted].sum()))
        screen.say(f"tokenizer: training {self.recipe.tokenizer.vocab_size:,} pieces on {size}")
        chunks = documents.chunks(read.path, read.manifest)
        return vocab.lines(text for chunk in chunks for text in documents.read_texts(chunk.path, wanted[chunk.rows]))

    def _shards(self, read: Step, chosen: Step, tokenizer: Step) -> Step:
        dtype = self._dtype(tokenizer.manifest["vocab_size"])
        add_bos = self.recipe.tokenizer.add_bos
        if add_bos and tokenizer.manifest["bos_id"] < 0:
            raise UserError("the tokenizer has no <s>", fix="set tokenizer.add_bos to false")
        model = tokenizer.path / "tokenizer.model"
        total = chosen.manifest["total"]
        text_bytes = total["bytes"] + total["held_out_bytes"]

        def make(directory: Path) -> dict[str, Any]:
            decision = dedup.read(chosen.path)
            tasks = [
                encode.Task(chunk.source, chunk.path, decision[chunk.rows], model, add_bos, dtype)
                for chunk in documents.chunks(read.path, read.manifest)
            ]
            entries = encode.write(directory, tasks, self._processes(), self.data.shard_tokens, text_bytes)
            shutil.copyfile(model, directory / "tokenizer.model")
            read_files = [
                {name: item[name] for name in ("source", "split", "file", "sha256")} for item in read.manifest["inputs"]
            ]
            counts = {name: chosen.manifest[name] for name in ("sources", "total")}
            files.write_json(directory / "documents.json", counts | {"files": read_files})
            special = {name: tokenizer.manifest[name] for name in ("vocab_size", "bos_id", "eos_id")}
            return {
                "version": encode.VERSION,
                "dtype": dtype,
                **special,
                "add_bos": add_bos,
                "tokenizer_sha256": tokenizer.manifest["sha256"],
                "totals": encode.totals(entries),
                "shards": entries,
            }

        depends_on = {
            "version": encode.VERSION,
            "selection": chosen.key,
            "tokenizer": tokenizer.manifest["sha256"],
            "add_bos": add_bos,
            "dtype": dtype,
            "shard_tokens": self.data.shard_tokens,
        }
        # At least 2 bytes of text a token: 3 to 4 in Chinese, 1 for text the tokenizer has never seen.
        step = self.cache.step("shards", depends_on, make, text_bytes * np.dtype(dtype).itemsize // 2)
        tokens = {
            split: sum(row["tokens"] for row in step.manifest["totals"][split].values()) for split in encode.SPLITS
        }
        self._say(
            step,
            f"{tokens['train']:,} training tokens, {tokens['held_out']:,} held out, {dtype}, "
            f"{text_bytes / sum(tokens.values()):.2f} bytes a token",
        )
        return step

    def _dtype(self, vocab_size: int) -> str:
        """The shards' integer type. Raises UserError when it is too small for the tokenizer."""
        wanted = self.data.token_dtype
        if wanted == "uint16" and vocab_size > 65536:
            raise UserError(
                f"data.token_dtype uint16 holds ids up to 65,535, the tokenizer has {vocab_size:,} pieces",
                fix="set data.token_dtype to auto or uint32",
            )
        return wanted if wanted != "auto" else "uint16" if vocab_size <= 65536 else "uint32"

    def _processes(self) -> int:
        """How many workers to use; says once what binds."""
        if not self._workers:
            limits = workers.limits(self.data.num_proc)
            self._workers, sentence = workers.bounded(self.data.num_proc, limits)
            if sentence and self.cache.build:
                screen.say(sentence)
        return self._workers

    def _say(self, step: Step, text: str) -> None:
        if self.cache.build:
            screen.say(f"{step.manifest['step']}: {text}{' (reused)' if step.reused else ''}")
