"""Write a FinCorpus-shaped corpus about an invented financial world, made from (size, seed, split) alone.

A recipe runs on it without a download, and learning can be measured: train and held-out share the laws of the world and
no name, and the exam file asks about both. The shares of the sources are FinCorpus's. Companies number 100 *
sqrt(megabytes), but at most one for 20 KB and 12,000 in all. The uncompressed bytes are the same on every machine and
Python from 3.11 on; the compressed ones depend on zlib. One core writes 11 to 16 MB/s, and large sources come in parts
that several cores write; one process takes 135 MB of memory at 1 GB and 195 MB at 10 GB.

Announcements have nine kinds with headings and small tables, 400 to 1,500 characters each; every second one is an
annual summary of the last year until each company has had one, and the exam's closed-book questions rest on those. News
are flashes of 60 to 250 characters, articles analyses of 500 to 1,800, of six kinds. The same event may be told several
times in other words; its figures are those of the announcements. Prices exist on one day a month per company only, so
two flashes can never disagree about a chain of closes.
"""

from __future__ import annotations

import argparse
import gzip
import os
import sys
from collections.abc import Callable, Iterator
from json import JSONEncoder
from json.encoder import encode_basestring
from math import isqrt
from pathlib import Path
from typing import Literal, NamedTuple

from finlm.base.errors import UserError
from finlm.base.units import parse_bytes
from finlm.world.companies import GROUP, MAX_COMPANIES, SPLITS, Dice, World, hundredths_of_percent, mix
from finlm.world.exam import exam
from finlm.world.facts import LAST_YEAR, Archive, Facts, Meta, Row, Stage, decimal, format_day, in_yi, weekday
from finlm.world.grammar import Form, Paragraph, Press, Readings, by_weight, forms, phrases, prose, templates

SOURCES = ("announcement", "fin_news", "fin_articles", "fin_exam")
SHARE_PERCENT = {"announcement": 33, "fin_news": 48, "fin_articles": 16, "fin_exam": 3}
MIN_BYTES = 100_000  # below, the announcements cannot introduce every company the exam asks about
PART_BYTES = 64_000_000  # of a source's text, six seconds of a core
_BLOCK_LINES = 2_000  # about 1 MB
_encode = JSONEncoder(ensure_ascii=False).encode


def write(directory: Path, size_bytes: int, seed: int, split: Literal["train", "held_out"]) -> dict[str, Path]:
    """Write <source>.jsonl.gz for the four sources into directory, which is made if missing; return {source: path}.

    size_bytes is the UTF-8 text of all four together, met within 2 % from 1 MB on. Each file appears under its name
    only when it is whole. Raises UserError for a size below 100 KB or an unknown split.
    """
    about = archive(size_bytes, seed, split)
    directory.mkdir(parents=True, exist_ok=True)
    paths = {source: directory / f"{source}.jsonl.gz" for source in SOURCES}
    for source, path in paths.items():
        _write_one(path, _lines(source, _rows(source, size_bytes, seed, about)))
    return paths


def count_parts(source: str, size_bytes: int) -> int:
    """Return in how many parts a source is written; each may be written alone. KeyError for an unknown source."""
    return -(-size_bytes * SHARE_PERCENT[source] // (100 * PART_BYTES))


def write_part(source: str, directory: Path, size_bytes: int, seed: int, split: str, part: int) -> Path:
    """Write <source>-<part>.jsonl.gz into directory and return its path; all parts in order have the rows of `write`.

    size_bytes is the size of all four sources. Makes the directory if missing. Raises UserError for a size below 100 KB
    or an unknown split, KeyError for an unknown source.
    """
    about = archive(size_bytes, seed, split)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{source}-{part}.jsonl.gz"
    _write_one(path, _lines(source, _part(source, size_bytes, seed, about, part)))
    return path


def documents(source: str, size_bytes: int, seed: int, split: str) -> Iterator[dict[str, str | Meta]]:
    """Yield rows {"text": str, "meta": {"source": str, ...}} of a source as `write` stores them for these arguments.

    size_bytes is the size of all four sources. Raises UserError for a size below 100 KB or an unknown name.
    """
    if source not in SOURCES:
        raise UserError(f"no synthetic source {source!r}", fix=f"use one of {', '.join(SOURCES)}")
    for text, meta in _rows(source, size_bytes, seed, archive(size_bytes, seed, split)):
        yield {"text": text, "meta": {"source": source, **meta}}


def company_count(size_bytes: int) -> int:
    """Return how many companies the world of a corpus of that size has: whole groups of four."""
    by_root = isqrt(size_bytes // 1_600)  # 25 * sqrt(megabytes)
    return min(GROUP * max(2, min(by_root, size_bytes // 80_000)), MAX_COMPANIES)


def archive(size_bytes: int, seed: int, split: str) -> Archive:
    """Return a split's world for a corpus of this size. Raises UserError below 100 KB or for an unknown split."""
    if size_bytes < MIN_BYTES:
        raise UserError(f"{size_bytes:,} bytes are too few for a synthetic corpus", fix="ask for at least 100KB")
    if split not in SPLITS:
        raise UserError(f"no synthetic split {split!r}", fix=f"use one of {', '.join(SPLITS)}")
    return Archive(World(split, seed, company_count(size_bytes)))


def _rows(source: str, size_bytes: int, seed: int, archive: Archive) -> Iterator[Row]:
    """Yield all rows of a source, part by part, as (text, meta). Raises KeyError for an unknown source."""
    for part in range(count_parts(source, size_bytes)):
        yield from _part(source, size_bytes, seed, archive, part)


def _part(source: str, size_bytes: int, seed: int, archive: Archive, part: int) -> Iterator[Row]:
    """Yield the rows (text, meta) of a part of a source; parts are about equally long. Raises KeyError."""
    parts = count_parts(source, size_bytes)
    dice = Dice(archive.world.split, seed, source, *([part] if part else []))
    if source == "announcement":
        # In the smallest corpora the announcements barely suffice to introduce each company once.
        rows = filings(archive, dice, 2 if size_bytes >= 400_000 else 1, part, parts)
    else:
        rows = {"fin_news": news, "fin_articles": articles, "fin_exam": exam}[source](archive, dice)
    left = size_bytes * SHARE_PERCENT[source] // (100 * parts)
    for row in rows:
        text_bytes = len(row[0].encode())
        if 2 * left < text_bytes:
            return
        left -= text_bytes
        yield row


def _lines(source: str, rows: Iterator[Row]) -> Iterator[str]:
    """Yield rows as JSON lines; formatted by hand, because a json.dumps for each row takes a tenth of the run."""
    template: str | None = None  # all rows of a source have the same keys
    for text, meta in rows:
        if template is None:
            entries = "".join(f', "{key}": %s' for key in meta)
            template = f'{{"text": %s, "meta": {{"source": "{source}"{entries}}}}}\n'
        values = [encode_basestring(value) if isinstance(value, str) else _encode(value) for value in meta.values()]
        yield template % (encode_basestring(text), *values)


def _write_one(path: Path, lines: Iterator[str]) -> None:
    """Write lines, which have their newlines, to a gzip file that replaces `path` only when it is whole."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as raw:
            # Neither a time nor a name in the header; level 1 because the files are read about once.
            with gzip.GzipFile(filename="", mode="wb", compresslevel=1, fileobj=raw, mtime=0) as file:
                block: list[str] = []
                for line in lines:
                    block.append(line)
                    if len(block) == _BLOCK_LINES:
                        file.write("".join(block).encode())
                        block.clear()
                file.write("".join(block).encode())
            raw.flush()
            os.fsync(raw.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _table(rows: str) -> Readings:
    """Return templates of a table of this year, the year before and the change, one for each layout.

    `rows` are `label=name` separated by spaces; the cells are placeholders such as {NAME_w}, {NAME1_w} and {NAME_p}.
    """
    cells = [row.split("=") for row in rows.split()]
    tables = []
    for number in "wn":
        for gap, edge in ((" | ", ""), (" | ", "| "), ("　", ""), ("\t", "")):
            end = " |" if edge else ""
            for head in (("项目", "{y}年", "{y0}年", "同比变动"), ("指标", "{y}年度", "{y0}年度", "增减幅度")):
                lines = [head]
                lines += [(label, f"{{{k}_{number}}}", f"{{{k}1_{number}}}", f"{{{k}_p}}") for label, k in cells]
                tables.append("\n" + "\n".join(edge + gap.join(line) + end for line in lines) + "\n")
    return tuple(tables)


def _add_frame(form: Form) -> Form:
    """Return the form with a header after its title and a closing line at its end, whose day its label names."""
    header, closing = (
        Paragraph((), (phrases(text.replace("@", form.label)),), 1) for text in templates("filings").values()
    )
    title, *body = form.paragraphs
    return form._replace(paragraphs=(title, header, *body, closing))


_FILINGS = by_weight(
    map(_add_frame, forms(prose("filings"), {k: _table(rows) for k, rows in templates("tables").items()}))
)
_BY_NAME = {press.name: press for press in _FILINGS}


def filings(archive: Archive, dice: Dice, stride: int, part: int = 0, parts: int = 1) -> Iterator[Row]:
    """Yield announcements without end; every stride-th is the annual summary of the next company without a summary.

    Of several parts, each introduces every parts-th company, from company number `part` on.
    """
    companies = archive.world.companies[part::parts]
    stage = Stage(archive)
    number = 0
    while True:
        due, extra = divmod(number, stride)
        number += 1
        if not extra and due < len(companies):
            yield _filing(archive, dice, _BY_NAME["annual"], archive.facts(companies[due], LAST_YEAR))
        else:
            facts = stage.draw(dice)
            press = dice.pick(_FILINGS)
            if press.name == "payout" and not facts.books.div:
                press = _BY_NAME["board"]
            yield _filing(archive, dice, press, facts)


def _filing(archive: Archive, dice: Dice, press: Press, facts: Facts) -> Row:
    """Return an announcement of the press's kind about the facts, as (text, {code, company, date})."""
    words = facts.with_others({"b": archive.customer(facts)}) if press.name == "contract" else facts
    meta: Meta = {"code": facts["code"], "company": facts["full"], "date": facts[press.label + "_i"]}
    # A table that ends its paragraph brings a line break of its own.
    return press.render(dice, words).replace("\n\n", "\n"), meta


# The label is the column of the paper and the day of the event.
_NEWS = forms(prose("news"), {name: phrases(template) for name, template in templates("news").items()})
_LEADS = templates("leads")["leads"]
_CLOCK = tuple(f"{minute // 60:02d}:{minute % 60:02d}" for minute in range(9 * 60, 22 * 60))


class _Flash(NamedTuple):
    """A kind of news flash: its press, the paper's column, and the event whose day it has."""

    press: Press
    column: str
    event: str


def _flash(form: Form) -> _Flash:
    """Return the form compiled with a dateline before its body; its label `column/event` gives the other two fields."""
    column, event = form.label.split("/")
    title, body = form.paragraphs
    body = body._replace(sentences=(phrases(_LEADS.replace("@", event)), *body.sentences))
    return _Flash(Press(form._replace(paragraphs=(title, body))), column, event)


_FLASHES = tuple(flash for form in _NEWS for flash in [_flash(form)] * form.weight)


def news(archive: Archive, dice: Dice) -> Iterator[Row]:
    """Yield news flashes without end, as (text, {time, column})."""
    random = dice.random
    stage = Stage(archive)
    while True:
        facts = stage.draw(dice)
        press, column, event = _FLASHES[int(random() * len(_FLASHES))]
        if press.name == "payout" and not facts.books.div:
            press, column, event = _FLASHES[0]
        words: dict[str, str] = facts
        if press.name == "market":
            words = facts.with_others({})
            words.update(_session(facts, 1 + int(random() * 12)))
        elif press.name == "contract":
            words = facts.with_others({"b": archive.customer(facts)})
        elif press.name == "rank":
            words = facts.with_others({"b": archive.facts(dice.pick(archive.peers(facts.company)), facts.year)})
        time = f"{words[event + '_i']} {_CLOCK[int(random() * len(_CLOCK))]}"
        yield press.render(dice, words), {"time": time, "column": column}


def _session(facts: Facts, month: int) -> dict[str, str]:
    """Return {name: text} about the trading day of papers in `month` (1 to 12) of the year after facts.year.

    It has the day in three forms, both closes, which keep the daily limit, their change, and the turnover.
    """
    day = weekday(facts.year + 1, month, 2 + mix(facts.company.salt, facts.year, 100 + month) % 24)
    limit = facts.company.board.limit_percent * 100
    before = max(100, facts.numbers["price"] * (85 + mix(facts.company.salt, facts.year, 120 + month) % 31) // 100)
    swing = mix(facts.company.salt, facts.year, 140 + month) % 1000 - 500
    # Most days are quiet: the cube of the draw, scaled to the limit.
    close = before + before * limit * swing**3 // 500**3 // 10_000
    change = hundredths_of_percent(close - before, before)
    shares = facts.company.shares
    churn = 30 + mix(facts.company.salt, facts.year, 160 + month) % 470
    return {
        "market_c": format_day(day),
        "market_m": f"{day.month}月{day.day}日",
        "market_i": day.isoformat(),
        "close": decimal(close),
        "before": decimal(before),
        "turn": "涨" if change > 0 else "跌" if change < 0 else "平盘，涨幅",
        "move": decimal(abs(change)) + "%",
        "churn": decimal(churn) + "%",
        "turnover": in_yi(max(1, shares * churn // 10_000 * close // 100)),
    }


# The label is the tag. b and c are peers; x and z are the company one and two years before.
_ARTICLES = by_weight(forms(prose("articles")))
_MEASURES: dict[str, Callable[[Facts], float]] = {
    "rev": lambda facts: facts.books.rev,
    "gm": lambda facts: facts.numbers["gm"],
    "dr": lambda facts: facts.numbers["dr"],
    "roe": lambda facts: facts.numbers["roe"],
    "speed": lambda facts: facts.books.rev / facts.numbers["rev1"],
}


def _first_and_last(facts: Facts, others: dict[str, Facts]) -> dict[str, str]:
    """Return which of the three peers is highest and lowest by each measure, as words such as `top_gm`, `low_dr`."""
    peers = (facts, others["b"], others["c"])
    names = {"top_" + name: max(peers, key=measure)["short"] for name, measure in _MEASURES.items()}
    return names | {"low_" + name: min(peers, key=measure)["short"] for name, measure in _MEASURES.items()}


def articles(archive: Archive, dice: Dice) -> Iterator[Row]:
    """Yield articles without end, as (text, {author, tags})."""
    stage = Stage(archive)
    while True:
        facts = stage.draw(dice)
        press = dice.pick(_ARTICLES)
        if press.name == "trend":
            facts = archive.facts(facts.company, max(facts.year, 2022))
        peers = dice.shuffle(archive.peers(facts.company))
        others = {letter: archive.facts(peer, facts.year) for letter, peer in zip("bc", peers, strict=False)}
        if press.name == "trend":
            others["x"] = archive.facts(facts.company, facts.year - 1)
            others["z"] = archive.facts(facts.company, facts.year - 2)
        tags = [facts["ind"], press.label, facts["short"]]
        if press.name in ("peers", "industry"):
            tags += [others["b"]["short"], others["c"]["short"]]
        meta: Meta = {"author": dice.pick(archive.world.writers), "tags": tags}
        words = facts.with_others(others)
        words.update(_first_and_last(facts, others))
        yield press.render(dice, words), meta


def main(arguments: list[str] | None = None) -> int:
    """Run `python -m finlm.world.writer OUT --size 16MB --seed 7 [--split train|held_out]`; return the exit code.

    Prints the paths written. The code is 2 after an error, which is printed to stderr.
    """
    parser = argparse.ArgumentParser(prog="python -m finlm.world.writer", description="Write a synthetic corpus.")
    parser.add_argument("out", type=Path, help="directory for the four .jsonl.gz files")
    parser.add_argument("--size", default="16MB", help="text in all, such as 500KB, 16MB, 2GB or bytes (16MB)")
    parser.add_argument("--seed", type=int, default=7, help="which world (7)")
    parser.add_argument("--split", choices=SPLITS, default="train", help="which half of it (train)")
    options = parser.parse_args(arguments)
    try:
        paths = write(options.out, parse_bytes(options.size), options.seed, options.split)
    except ValueError as error:
        print(f"error: --size: {error}", file=sys.stderr)
        return 2
    except UserError as error:
        print(f"error: {error.problem}; {error.fix}", file=sys.stderr)
        return 2
    for path in paths.values():
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
