"""`finlm prepare`: turn a recipe's sources into a directory of token shards, in steps that are never done twice.

The steps run in order: sources, documents, selection, tokenizer, shards; for fine-tuning sources, then dialogues. Each
is a directory named by the hash of what it depends on (base/step_cache.py), so a killed run continues with the
finished steps and a changed setting redoes only what follows from it. 20 MB of text with a tokenizer of 32,000 pieces
take 9 s on two cores; with a tokenizer at hand 250 MB take 14 s.

Training, export and report need the shards directory alone. Without torch and process group nothing here can time out.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from finlm.base import files, screen
from finlm.base.errors import UserError
from finlm.base.step_cache import Cache, NotPrepared
from finlm.corpus import contamination, encode, perplexity, ray_engine, steps, vocabulary
from finlm.corpus.read import remote, sources
from finlm.corpus.workers import Context, Engine
from finlm.dialogues import convert, lint, templates
from finlm.launch import ray_cluster
from finlm.plan import planner
from finlm.plan.plan import Plan
from finlm.recipe import parents, shape, weights
from finlm.recipe.cluster import Cluster, Host
from finlm.recipe.schema import Recipe
from finlm.recipe.schema_data import Stage
from finlm.rows import dialogues, packing
from finlm.rows.shards import IGNORED, Rows, Shards
from finlm.runs import lineage
from finlm.tokens import encoders, pretrained, tokenizer_json, vocab

RUNS = Path("runs")  # where `finlm prepare` looks for the run of a recipe in model.init_from
_CONTROL = str.maketrans({code: f"\\x{code:02x}" for code in (*range(9), *range(11, 32), 127)})  # but tab and newline


def run(recipe: Recipe, hosts: Cluster | None = None, *, accept_new_keys: bool = False) -> Shards:
    """Prepare the recipe's token shards unless the cache has them, print what the run reads, and return the shards.

    Waits while another process writes to the cache. With data.prepared only checks that directory, builds a missing
    index and prints no more. `hosts` run the workers of data.engine ray; None is this machine. accept_new_keys lets ssh
    accept unknown hosts. Raises UserError for data, a start model, a cache or a Ray that cannot be used.
    """
    check_engine(recipe)
    weights.check_layers(recipe)
    if recipe.data.prepared is not None:
        shards = _check_prepared(recipe, recipe.data.prepared)
        dialogues.open_rows(shards, recipe)
        return shards
    place = Path(recipe.data.cache_dir)
    cache = Cache(place.absolute() if recipe.data.engine == "ray" else place, build=True)
    with cache.lock_cache(), _open_engine(recipe, hosts, accept_new_keys) as engine:
        shards = Shards(run_steps(recipe, cache, engine))
        print_reading(describe_reading(recipe, shards))
        return shards


def run_steps(recipe: Recipe, cache: Cache, engine: Engine | None = None) -> Path:
    """Run the prepare steps that the cache lacks, in order; return the directory of the shards. `engine` None is local.

    Raises UserError for data that cannot be used, NotPrepared when a step is missing and cache.build is False.
    """
    context = Context(recipe, cache, engine)
    if recipe.stage != "pretrain":
        return convert.make_shards(context, lineage.model_directory(recipe, RUNS, must_exist=cache.build)).path
    tokenizer_file = _existing_tokenizer(recipe, cache)
    vocabulary.check_file(context, tokenizer_file)  # before hours of reading
    contamination.check_benchmarks(context)
    perplexity.check_clean_set(context)
    inputs = steps.list_inputs(context)
    read = steps.read_documents(context, inputs)
    chosen = steps.select_documents(context, read, inputs)
    tokenizer = vocabulary.make_tokenizer(context, read, chosen, tokenizer_file)
    return encode.make_shards(context, read, chosen, tokenizer).path


def _existing_tokenizer(recipe: Recipe, cache: Cache) -> Path | None:
    """Return the tokenizer's file, of the recipe or of its start model, which may be fetched; None if to be trained.

    Raises UserError if there is none, NotPrepared if the start model is not here and the cache may not build.
    """
    path, settings = recipe.tokenizer.path, recipe.tokenizer
    if path is None and settings.vocab_size is not None:
        return None
    model = (
        Path(path).expanduser() if path is not None else lineage.model_directory(recipe, RUNS, must_exist=cache.build)
    )
    return vocab.find(model)


def check_engine(recipe: Recipe) -> None:
    """Raise UserError when data.engine is ray, data are to be prepared, and the package ray is not installed."""
    if recipe.data.engine == "ray" and recipe.data.prepared is None:
        ray_engine.check_installed()


@contextmanager
def _open_engine(recipe: Recipe, hosts: Cluster | None, accept_new_keys: bool) -> Iterator[Engine | None]:
    """Yield a RayEngine for data.engine ray, else None; its first use starts or joins Ray, or raises UserError."""
    if recipe.data.engine == "local":
        yield None
        return
    data, words = recipe.data, recipe.data.clean.bad_keywords

    def open_cluster() -> contextlib.AbstractContextManager[str]:
        """Return a context manager that yields the address of data.ray_address, or of a Ray cluster started here."""
        if data.ray_address is not None:
            return contextlib.nullcontext(data.ray_address)
        return ray_cluster.start_ray(recipe, hosts or Cluster((Host("localhost", 1),)), accept_new_keys)

    reads = [Path(words).expanduser().absolute()] if words else []
    cache, joins = Path(data.cache_dir).absolute(), data.ray_address is not None
    with ray_engine.RayEngine(cache, data.num_proc, open_cluster, reads, joins) as engine:
        yield engine


def locate(recipe: Recipe) -> Shards | None:
    """Return the recipe's shards, or None if a step, the start model or a file of the data is missing. Makes nothing.

    Files of the data are those of sources (also of Hub sets), benchmarks and the clean set. Raises UserError for a
    data.prepared, a source or a tokenizer that cannot be used, and for damaged shards.
    """
    if recipe.data.prepared is not None:
        return _check_prepared(recipe, recipe.data.prepared)
    try:
        return Shards(run_steps(recipe, Cache(Path(recipe.data.cache_dir), build=False)))
    except NotPrepared:
        return None


def dropped_samples(recipe: Recipe) -> list[dict[str, object]]:
    """Return samples of dropped documents: the rows of dropped.jsonl in all steps before the first that is missing."""
    cache = Cache(Path(recipe.data.cache_dir), build=False)
    with contextlib.suppress(NotPrepared, UserError):
        run_steps(recipe, cache)
    return [row for step in cache.used for row in files.read_json_lines(step / "dropped.jsonl")]


def check_sources(recipe: Recipe, *, only_urls: bool = False) -> None:
    """Raise UserError when a path or URL in data.sources matches no file, or rows of dialogues have another form.

    Rows are read, and broken ones written to data.cache_dir, unless the stage is pretrain. only_urls checks URLs alone.
    """
    inputs = list[sources.Input]()
    for number, source in enumerate(recipe.data.sources):
        if source.path is not None and (remote.is_url(source.path) or not only_urls):
            inputs += sources.find_inputs(source, f"data.sources[{number}]")
    if recipe.stage != "pretrain" and not only_urls:
        convert.check_rows(recipe, inputs)


def plan_with_data(recipe: Recipe, hosts: Cluster, shards: Shards | None = None) -> Plan:
    """Return the plan of a recipe on these hosts; with `shards`, vocabulary size and tokens an epoch are theirs.

    Builds their missing index. Raises PlanError when nothing fits; UserError without shards and known vocabulary size.
    """
    if shards is None:
        return planner.make(recipe, hosts, shape.of(recipe))
    return planner.make(recipe, hosts, shape.of(recipe, shards.vocab_size), epoch_tokens(recipe, shards))


def summary(shards: Shards, recipe: Recipe | None = None) -> dict[str, object]:
    """Return the record of a run's data: documents and tokens by source, lengths, drop reasons, files, tokenizer.

    With a recipe also `reading`, the fields of describe_reading(); then builds a missing index of rows, and raises
    UserError for a mixture that does not fit the run.
    """
    manifest, counts = shards.manifest, files.read_json(shards.directory / "documents.json")
    train, held_out = manifest["totals"]["train"], manifest["totals"].get("held_out", {})
    tokens = {
        source: {
            "train_tokens": row["tokens"],
            "held_out_tokens": held_out.get(source, {}).get("tokens", 0),
            "bytes_per_token": row["text_bytes"] / row["tokens"],
        }
        for source, row in train.items()
    }
    names = ("key", "dtype", "vocab_size", "tokenizer_sha256", "add_bos", "encoder")
    about = {name: manifest[name] for name in names if name in manifest}
    more = {name: counts[name] for name in ("files", "pinned", "lengths", "cleaned", "values") if name in counts}
    reading = {"reading": asdict(describe_reading(recipe, shards))} if recipe else {}
    return about | {"documents": counts["sources"], "shards": tokens} | more | reading


def warnings(recipe: Recipe, shards: Shards | None) -> list[str]:
    """Return a list with one sentence if dialogue rows are longer than the start model's context, else an empty list.

    Rows are counted in the shards, else batch.sequence_length is compared. Raises NotJson for a damaged config.json.
    """
    if recipe.stage == "pretrain":
        return []
    if shards is not None:
        counts, manifest = lint.prepared_counts(shards), shards.manifest
        beyond = counts["beyond_context"]
        return [lint.beyond_context(beyond, counts["rows"], manifest["context_tokens"])] if beyond else []
    try:
        context = parents.context_tokens(lineage.model_directory(recipe, RUNS, must_exist=False))
    except NotPrepared:
        return []
    longest = recipe.batch.sequence_length // recipe.sequences_per_row
    said = f"rows have up to {longest:,} tokens, and the start model reads {context:,} at once"
    return [f"{said}; `finlm prepare` counts those that are longer"] if longest > context else []


def _check_prepared(recipe: Recipe, prepared: str) -> Shards:
    """Open data.prepared and return it. Raises UserError if it is incomplete, or made for another stage or recipe."""
    shards = Shards(prepared)
    holds = shards.manifest.get("stage", "pretrain")
    if holds != recipe.stage:
        raise UserError(
            f"data.prepared was made for stage {holds}, this is stage {recipe.stage}",
            evidence=f"{shards.directory}/manifest.json",
            fix=f"give the directory that `finlm prepare` printed for a recipe of stage {recipe.stage}, "
            "or drop data.prepared",
        )
    if recipe.stage != "pretrain":
        _check_dialogues(recipe, shards)
    elif recipe.tokenizer.path is not None:
        _check_documents(recipe, shards, vocab.find(Path(recipe.tokenizer.path).expanduser()))
    return shards


def _check_documents(recipe: Recipe, shards: Shards, tokenizer: Path) -> None:
    """Raise UserError unless the file `tokenizer`, extended to tokenizer.extend_to if set, is the one of the shards."""
    kind, wanted = tokenizer_json if encoders.is_json(tokenizer) else vocab, shards.manifest["tokenizer_sha256"]
    kind.load(tokenizer)
    fingerprint = kind.fingerprint(tokenizer)
    size = recipe.tokenizer.extend_to
    fits = fingerprint == wanted if size is None else kind.is_extension(shards.tokenizer, tokenizer, size)
    if not fits:
        raise UserError(
            "the tokenizer does not match the shards",
            evidence=f"{tokenizer} has sha256 {fingerprint}\n{shards.directory} was encoded with {wanted}"
            + (f", which is not the former extended to {size:,} pieces" if size else ""),
            fix=f"set tokenizer.path to {shards.tokenizer}{' without extend_to' if size else ''}, "
            "or drop data.prepared to encode again",
        )


def _check_dialogues(recipe: Recipe, shards: Shards) -> None:
    """Raise UserError when the dialogues were encoded with other settings, another tokenizer or chat template.

    Tokenizer and template are checked only if the model that the recipe starts from is on this machine.
    """
    wanted = convert.settings(recipe)
    former = shards.manifest.get("settings", wanted)
    if former != wanted:
        keys = [key for key in former | wanted if former.get(key) != wanted.get(key)]
        changed = [f"{key}: then {former.get(key)}, now {wanted.get(key)}" for key in keys]
        raise UserError(
            "data.prepared was written by other settings than this recipe's",
            evidence="\n".join(changed),
            fix="set these as they were, or drop data.prepared to encode again",
        )
    try:
        begin = lineage.model_directory(recipe, RUNS, must_exist=False)
    except NotPrepared:
        return
    theirs, ours = pretrained.fingerprint(begin), pretrained.fingerprint(shards.directory / "tokenizer")
    differing = [name for name in pretrained.COPIED if theirs.get(name) != ours.get(name)]
    if differing:
        raise UserError(
            "data.prepared was encoded with another tokenizer than the model's",
            evidence=f"{', '.join(differing)} of {begin}\nis not that of {shards.directory / 'tokenizer'}",
            fix="start from the model that the data was prepared for, or drop data.prepared to encode again",
        )
    assert recipe.chat is not None
    of_model = pretrained.open_tokenizer(begin).chat_template
    source = templates.find_source(recipe.chat.template, of_model, recipe.chat.system)
    if source != (shards.directory / "chat_template.jinja").read_text("utf-8"):
        raise UserError(
            f"data.prepared was written with another chat template than {recipe.chat.template}",
            evidence=f"{shards.directory}/chat_template.jinja",
            fix="set chat.template as it was, or drop data.prepared to encode again",
        )


def run_tokens(recipe: Recipe, shards: Shards) -> int:
    """Return the tokens that the run reads (train.steps, tokens or epochs), unrounded. Raises as open_rows() does."""
    train, step = recipe.train, recipe.batch.tokens_per_step
    if train.steps is not None:
        return train.steps * step
    if train.tokens is not None:
        return train.tokens
    return int((train.epochs or 1) * epoch_tokens(recipe, shards))


def run_rows(recipe: Recipe, shards: Shards) -> int:
    """Return the rows that the run reads, in whole steps, rounded down, at least one. Raises as open_rows() does."""
    step = recipe.batch.tokens_per_step
    return max(1, run_tokens(recipe, shards) // step) * step // recipe.batch.sequence_length


def epoch_tokens(recipe: Recipe, shards: Shards) -> int:
    """Return an epoch's tokens: all rows as full, times recipe.uses_of_row. Builds and raises as open_rows() does."""
    return len(dialogues.open_rows(shards, recipe)) * recipe.uses_of_row * recipe.batch.sequence_length


@dataclass(frozen=True)
class SourceReading:
    """What a run reads of a source: tokens, share of the run (0 to 1), epochs, share of each part of the run."""

    source: str
    tokens: int
    share: float
    epochs: float
    share_by_part: list[float]


@dataclass(frozen=True)
class Reading:
    """How a run reads the shards: packing, row length in tokens, rows, and each source."""

    packing: str
    sequence_length: int
    rows: int
    sources: list[SourceReading]


def describe_reading(recipe: Recipe, shards: Shards) -> Reading:
    """Return how the run reads the shards; build a missing index of rows. UserError for a mixture that does not fit."""
    length, rows = recipe.batch.sequence_length, dialogues.open_rows(shards, recipe)
    ranges, read_rows = rows.source_ranges(), run_rows(recipe, shards)
    if recipe.data.mixture:
        check_mixture(recipe.data.mixture, run_tokens(recipe, shards))
        read = describe_sources(ranges, packing.parts(ranges, recipe.data.mixture, read_rows, length), length)
    else:
        sizes = tuple(len(part) for part in ranges.values())
        epochs = read_rows / max(1, len(rows) * recipe.uses_of_row)
        read = [
            replace(row, tokens=round(row.share * read_rows * length), epochs=epochs)
            for row in describe_sources(ranges, [packing.Part(0, sum(sizes), sizes)], length)
        ]
    how = dialogues.packing_of(recipe) if "stage" in shards.manifest else recipe.data.packing
    return Reading(how, length, len(rows), read)


def check_mixture(stages: Sequence[Stage], run_tokens: int) -> None:
    """Raise UserError when the stages together are longer than the run: the last would be cut short or left out."""
    budgets = sum(sum(stage.tokens.values()) for stage in stages if stage.tokens)
    left = run_tokens * (1 - sum(stage.share or 0.0 for stage in stages)) - budgets
    rounding = 1e-9 * run_tokens
    if left < -rounding or (left <= rounding and any(stage.tokens is None and stage.share is None for stage in stages)):
        raise UserError(
            "data.mixture: the stages are longer than the run, so the last would be cut short or left out",
            evidence=f"their tokens are {budgets:,}, those of the run {run_tokens:,}, and with the shares given "
            f"{round(max(left, 0)):,} are left",
            fix="lower data.mixture[i].tokens or share, or train longer",
        )


def describe_sources(
    ranges: Mapping[str, range], parts: Sequence[packing.Part], sequence_length: int
) -> list[SourceReading]:
    """Return what the run reads of each source. `ranges` are row ids by source, `parts` say how many rows are read."""
    rows = np.sum([part.rows for part in parts], axis=0)
    return [
        SourceReading(
            source=name,
            tokens=int(count) * sequence_length,
            share=float(count / rows.sum()),
            epochs=float(count / len(ranges[name])) if len(ranges[name]) else 0.0,
            share_by_part=[part.rows[number] / (part.end - part.start) for part in parts],
        )
        for number, (name, count) in enumerate(zip(ranges, rows.tolist(), strict=True))
    ]


def print_reading(reading: Reading) -> None:
    """Print to stderr the number of rows and, one line each, what the run reads of every source."""
    screen.say(f"rows: {reading.rows:,} of {reading.sequence_length:,} tokens ({reading.packing}); the run reads")
    width = max(len(row.source) for row in reading.sources)
    for row in reading.sources:
        change = f", {row.share_by_part[0]:.1%} -> {row.share_by_part[-1]:.1%}" if len(row.share_by_part) > 1 else ""
        screen.say(
            f"  {row.source:<{width}}  {row.tokens:>15,} tokens  {row.share:>6.1%}{change}  ({row.epochs:.2f} epochs)"
        )


def show_rows(recipe: Recipe, shards: Shards, count: int) -> None:
    """Print the first `count` rows to stdout: pretraining rows in the run's order, or dialogues with their labels.

    Builds a missing index of rows. Raises UserError when that or the shards' tokenizer cannot be used.
    """
    if recipe.stage != "pretrain":
        lint.print_label_rows(recipe, shards, count)
        return
    rows = dialogues.prepare_rows(shards, recipe.batch.sequence_length, recipe.data.packing)
    ranges, read_rows = rows.source_ranges(), run_rows(recipe, shards)
    order = packing.order(ranges, recipe.data.mixture, read_rows, rows.sequence_length, recipe.train.seed)
    tokenizer = pretrained.open_tokenizer(shards.tokenizer.parent)
    for position, row in enumerate(order[np.arange(count)].tolist()):
        source = next(name for name, part in ranges.items() if row in part)
        screen.show("\n".join(row_lines(rows, row, source, tokenizer, position)))


def row_lines(
    rows: Rows | packing.PackedRows, row: int, source: str, tokenizer: pretrained.Tokenizer, position: int
) -> list[str]:
    """Return row `row` of `rows` as lines: a header, then its documents. `position` is its index in the run's order."""
    ids = np.array([row])
    (inputs,), (labels,) = rows.read(ids)
    (documents,) = rows.documents(ids)
    used, counted = int((documents >= 0).sum()), int((labels != IGNORED).sum())
    numbers = list(dict.fromkeys(documents[documents >= 0].tolist()))
    lines = [
        "",
        f"== position {position}: row {row:,} of {source}, {len(numbers)} documents, "
        f"{used:,} tokens, {counted:,} labels, {len(inputs) - used:,} padding",
    ]
    is_start, at = dict[int, bool](), 0  # by a piece's place in the row: whether a document begins there
    for shard, start, count in rows.pieces(row):
        is_start[at] = int(shard.offsets[shard.documents_before([start])[0]]) == start
        at += count
    for number in numbers:
        here = np.flatnonzero(documents == number)
        begins = is_start.get(int(here[0]), True)
        lines.append(f"-- document {number + 1}, {len(here):,} tokens{'' if begins else ', continued'}")
        lines += _decode_row(tokenizer, inputs[here], labels[here] == IGNORED).translate(_CONTROL).split("\n")
    return lines


def _decode_row(tokenizer: pretrained.Tokenizer, ids: Sequence[int], masked: Sequence[bool]) -> str:
    """Return tokens as text, masked ones (labels that do not count) between ⟦ and ⟧, and bos and eos by their names."""
    names, text = {number: name for name, number in filter(None, (tokenizer.bos, tokenizer.eos))}, ""
    for is_masked, pairs in itertools.groupby(zip(ids, masked, strict=True), key=lambda pair: bool(pair[1])):
        part = ""
        for name, tokens in itertools.groupby((int(token) for token, _ in pairs), key=names.get):
            some = list(tokens)
            part += tokenizer.decode(some) if name is None else name * len(some)
        text += f"⟦{part}⟧" if is_masked else part
    return text
