"""Run `finlm self-qa`: turn the recipe's documents into questions and answers for SFT, as in arXiv 2305.11952.

Documents are what pretraining would read: cleaned, deduplicated, not held out. Stage 1 asks for questions about a
passage of each drawn document, stage 2 for an answer from the passage to every question that passes the rules, and
stage 3 writes the answers that pass the rules as messages. answer_prompts() asks for the answers that `finlm attempt`
checks.

A finished document is a line in <output>.ledger, replies included, and is never paid for twice: a killed run goes on,
and a changed rule is applied to what is there already. The output appears whole, after the last document. Changed
prompts, model or sampling start anew in the same ledger.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from finlm.base import files, screen
from finlm.base.errors import UserError
from finlm.base.step_cache import Cache
from finlm.corpus import documents, selection, steps
from finlm.corpus.workers import Context
from finlm.recipe.schema import Recipe
from finlm.recipe.schema_data import SelfQA
from finlm.rows.shards import GOLDEN, mix
from finlm.selfqa import endpoint
from finlm.selfqa.endpoint import Conversation, Endpoint, NoAnswer, Refused, Reply

_STOP_AFTER = 5  # documents in a row that failed: it is not the documents
_QUESTION_TOKENS = 64  # a question
_TOKENS = ("prompt_tokens", "completion_tokens")


class Model(Protocol):
    """The model that is asked: endpoint.Endpoint, or a checkpoint on this machine."""

    def ask(self, messages: Conversation, temperature: float, max_tokens: int) -> Reply:
        """Return the reply. Raises Refused or NoAnswer when this request fails, UserError if none can succeed."""


@dataclass
class Pair:
    """A question, and its answer if the question passed the rules."""

    question: str
    answer: str | None = None
    finish: str | None = None  # the server's finish_reason


@dataclass
class Asked:
    """The questions and answers of a document, and the requests and tokens that they took."""

    document: str
    source: str
    passage: str
    pairs: list[Pair] = field(default_factory=list)
    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    uncounted: int = 0  # replies without a count of tokens
    failed: str | None = None
    detail: str = ""  # of the failure

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Asked:
        """Return the Asked of a row of the ledger, without unknown keys. Raises KeyError for a row without pairs."""
        known = {each.name: row[each.name] for each in fields(cls) if each.name in row}
        return cls(**known | {"pairs": [Pair(**pair) for pair in row["pairs"]]})

    def to_json(self, key: str) -> Mapping[str, Any]:
        """Return the row of the ledger, under the key of the settings."""
        row = {"key": key, **asdict(self)}
        del row["detail"]  # no document that failed is kept
        return row

    @property
    def tokens(self) -> dict[str, int]:
        """The prompt and completion tokens that the document took."""
        return {name: getattr(self, name) for name in _TOKENS}


def run(recipe: Recipe, model: Model | None = None, fingerprint: str | None = None) -> Path:
    """Ask about every drawn document that the ledger lacks, and publish the pairs; return the output's path.

    Appends each answered document to <output>.ledger, writes the output and <output>.json, and prints counts and cost.
    `model` is asked instead of the endpoint; `fingerprint` is that of its weights. Raises UserError for a recipe
    without self_qa or whose documents cannot be prepared, when another process has the ledger, when requests fail or no
    pair is left: all answers are in the ledger then.
    """
    settings = recipe.self_qa
    if settings is None:
        raise UserError(
            f"the recipe {recipe.name} has no self_qa section",
            fix="add self_qa: {endpoint: http://host:8000/v1, model: NAME}, or give both by --set",
        )
    asked: Model = Endpoint(settings) if model is None else model
    output = Path(settings.output).expanduser()
    ledger = output.with_name(output.name + ".ledger")
    key = _key(settings, fingerprint)
    ledger.parent.mkdir(parents=True, exist_ok=True)
    busy = UserError(f"another `finlm self-qa` writes {ledger} now", fix="wait for it, or end it")
    with files.lock(ledger.with_name(f".{ledger.name}.lock"), busy):
        drawn = draw_passages(recipe, settings)
        rows = list(files.read_json_lines(ledger))
        done = {row["document"]: Asked.from_json(row) for row in rows if row["key"] == key}
        missing = [passage for passage in drawn if passage.document not in done]
        kept = len(drawn) - len(missing)
        screen.say(f"self-qa: {len(drawn):,} documents, {kept:,} of them in {ledger} already; model {settings.model}")
        spent = sum((Counter({name: row[name] for name in _TOKENS}) for row in rows), Counter[str]())
        done |= {row.document: row for row in _ask_passages(missing, settings, asked, ledger, key, spent)}
        answered = [done[passage.document] for passage in drawn if passage.document in done]
        if len(answered) < len(drawn):
            screen.say(f"self-qa: max_cost is reached; {len(drawn) - len(answered):,} documents were not asked about")
        return _publish(output, answered, settings, key, getattr(asked, "retries", 0))


def _key(settings: SelfQA, fingerprint: str | None) -> str:
    """Return a key of 16 hex digits of what replies depend on: prompts, model or `fingerprint`, and sampling."""
    names = ("model", "passage_characters", "questions", "language", "temperature", "max_answer_tokens", "seed")
    values = {name: getattr(settings, name) for name in names}
    if fingerprint is not None:
        values["model"] = fingerprint
    return files.sha256_json({"prompts": endpoint.VERSION, **values})[:16]


def _ask_passages(
    passages: list[Passage], settings: SelfQA, model: Model, ledger: Path, key: str, spent: Counter[str]
) -> Iterator[Asked]:
    """Ask about each passage, `concurrency` at a time, and yield the results as they come.

    Appends each result that did not fail to the ledger, under `key`, before it is yielded, and adds its tokens to
    `spent`. Shows the progress. Ends early when max_cost is spent. Raises UserError after five failures in a row; an
    error stops the pool and the endpoint.
    """
    asking = endpoint.ask_in_parallel(
        lambda passage: _ask_about(passage, settings, model),
        passages,
        settings.concurrency if settings.endpoint else 1,
        lambda: _may_spend(settings, spent),
        model.stopped.set if isinstance(model, Endpoint) else lambda: None,  # ends waits for a retry
    )
    with closing(asking), screen.progress("self-qa", len(passages)) as advance:

        def keep(row: Asked) -> str:
            """Count a document's tokens and append it to the ledger if it did not fail; return why it failed, or ""."""
            advance(1)
            spent.update(row.tokens)
            if not row.failed:  # such a document is tried again by the next run
                files.append_json_line(ledger, row.to_json(key))
            return row.detail

        yield from _keep_all(asking, keep, settings, ledger)


Row = TypeVar("Row")


def _keep_all(asking: Iterator[list[Row]], keep: Callable[[Row], str], settings: SelfQA, ledger: Path) -> Iterator[Row]:
    """Yield every row of the lists that `asking` yields, after keep(row), which returns why it failed ("": it did not).

    Raises UserError, which names `ledger`, after five failures in a row.
    """
    failed_in_a_row = 0
    for rows in asking:
        failures = [keep(row) for row in rows]  # all that was paid for, before anything is raised
        for row, failure in zip(rows, failures, strict=True):
            yield row
            failed_in_a_row = failed_in_a_row + 1 if failure else 0
            if failed_in_a_row >= _STOP_AFTER:
                raise UserError(
                    f"{settings.endpoint or settings.model} failed {failed_in_a_row} times in a row",
                    evidence=failure,
                    fix=f"what was answered is in {ledger}; the same command goes on from there",
                )


def _ask_about(passage: Passage, settings: SelfQA, model: Model) -> Asked:
    """Ask for the questions of a passage and for the answers to those that pass the rules; return all of them.

    A refused or unanswered request ends it, with `failed` and `detail` set. Raises UserError if no request can succeed.
    """
    row = Asked(passage.document, passage.source, passage.text)

    def ask(prompt: str, temperature: float, tokens: int) -> Reply:
        """Return the model's reply; count request and tokens in `row`. Raises Refused, NoAnswer or UserError."""
        row.requests += 1
        reply = model.ask([{"role": "user", "content": prompt}], temperature, tokens)
        row.uncounted += reply.prompt_tokens is None or reply.completion_tokens is None
        row.prompt_tokens += reply.prompt_tokens or 0
        row.completion_tokens += reply.completion_tokens or 0
        return reply

    try:
        count, language = settings.questions, settings.language
        prompt = endpoint.question_prompt(passage.text, count, language)
        replied = ask(prompt, settings.temperature, _QUESTION_TOKENS * count + settings.max_answer_tokens)
        seen = set()
        for question in endpoint.split_questions(replied.text)[:count]:
            pair = Pair(question)
            row.pairs.append(pair)
            if endpoint.normalise_question(question) not in seen and endpoint.question_reason(question) is None:
                seen.add(endpoint.normalise_question(question))
                answer = ask(endpoint.answer_prompt(passage.text, question, language), 0.0, settings.max_answer_tokens)
                pair.answer, pair.finish = endpoint.strip_thoughts(answer.text), answer.finish_reason
    except (Refused, NoAnswer) as error:
        row.failed, row.detail = "refused" if isinstance(error, Refused) else "no answer", str(error)
    return row


def answer_prompts(
    settings: SelfQA,
    prompts: Mapping[str, Conversation],
    limits: tuple[float, int],
    ledger: Path,
    former: Sequence[Mapping[str, Any]],
) -> dict[str, dict[str, Any]]:
    """Ask the endpoint for an answer to each prompt, `concurrency` at a time; return the new rows by key.

    `limits` are (temperature, most tokens of an answer). `former` are rows of the ledger, whose tokens count for
    max_cost. A row has key, text, tokens, prompt_tokens and `fault`: cut off, empty, or "", and is appended to
    `ledger`; a failed request has the fault "refused" or "no answer" and is not. Prints the cost if prices are given.
    Ends early when max_cost is spent. Raises UserError after five failures in a row, without the key, or if the
    endpoint refuses every request.
    """
    server, spent = Endpoint(settings), Counter[str]()

    def count(row: Mapping[str, Any]) -> None:
        """Add a row's tokens to `spent`."""
        spent.update(prompt_tokens=row.get("prompt_tokens", 0), completion_tokens=row["tokens"])

    def ask(task: tuple[str, Conversation]) -> dict[str, Any]:
        """Return the row of a prompt; one that failed has a `detail`. Raises UserError if no request can succeed."""
        key, messages = task
        try:
            reply = server.ask(messages, *limits)
        except (Refused, NoAnswer) as error:
            fault = "refused" if isinstance(error, Refused) else "no answer"
            return {"key": key, "text": "", "tokens": 0, "fault": fault, "detail": str(error)}
        fault = "cut off" if reply.finish_reason == "length" else "" if reply.text.strip() else "empty"
        # Thoughts that the server returns apart, as a model writes them.
        text = f"<think>\n{reply.thoughts.strip()}\n</think>\n\n{reply.text}" if reply.thoughts else reply.text
        tokens = {"tokens": reply.completion_tokens or 0, "prompt_tokens": reply.prompt_tokens or 0}
        return {"key": key, "text": text, **tokens, "fault": fault}

    for row in former:
        count(row)
    asking = endpoint.ask_in_parallel(
        ask, prompts.items(), settings.concurrency, lambda: _may_spend(settings, spent), server.stopped.set
    )
    with closing(asking), screen.progress("attempts", len(prompts), "answered") as advance:

        def keep(row: dict[str, Any]) -> str:
            """Count an answer's tokens and append it to the ledger if it did not fail; return why it failed, or ""."""
            advance(1)
            count(row)
            if "detail" not in row:
                files.append_json_line(ledger, row)
            return str(row.get("detail", ""))

        rows = {row["key"]: row for row in _keep_all(asking, keep, settings, ledger)}
    if settings.input_price or settings.output_price:
        screen.say(f"attempt: the answers of {settings.model} have cost {cost(settings, spent):,.4g} so far")
    return rows


def cost(settings: SelfQA, tokens: Counter[str]) -> float:
    """Return what these tokens cost, in the currency of the recipe's prices per million tokens."""
    price = tokens["prompt_tokens"] * settings.input_price + tokens["completion_tokens"] * settings.output_price
    return price / 1_000_000


def _may_spend(settings: SelfQA, spent: Counter[str]) -> bool:
    """Return whether max_cost, if there is one, is above what these tokens cost."""
    return settings.max_cost is None or cost(settings, spent) < settings.max_cost


def _publish(output: Path, rows: list[Asked], settings: SelfQA, key: str, retries: int) -> Path:
    """Write pairs that pass the rules to `output`, which is returned, and counts beside it. UserError without any."""
    lines, reasons = _prune_pairs(rows, settings)
    total: Counter[str] = Counter()
    for row in rows:
        total.update({name: getattr(row, name) for name in ("requests", *_TOKENS, "uncounted")})
    if not lines:
        raise UserError(
            "no question and answer is left",
            evidence=f"{len(rows):,} documents answered; dropped: {_format_reasons(reasons) or 'nothing'}",
            fix=f"read the replies in {output}.ledger: the model may not follow the prompts, or answer in another "
            "language than self_qa.language",
        )
    files.write_text(output, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    account = {
        "documents": len(rows),
        "pairs": len(lines),
        "dropped": dict(reasons.most_common()),
        **total,
        "retries": retries,
        "cost": round(cost(settings, total), 6),
        "sha256": files.sha256_file(output),
        "key": key,
        "settings": settings.model_dump(mode="json"),
    }
    files.write_json(output.with_name(output.name + ".json"), account)
    screen.say(f"self-qa: {len(lines):,} pairs from {len(rows):,} documents in {output}")
    screen.say(f"self-qa: dropped {_format_reasons(reasons) or 'nothing'}")
    price = f", cost {account['cost']:,}" if settings.input_price or settings.output_price else ""
    uncounted = f" ({total['uncounted']:,} replies without a count)" if total["uncounted"] else ""
    screen.say(
        f"self-qa: {total['requests']:,} requests, {total['prompt_tokens']:,} prompt tokens, "
        f"{total['completion_tokens']:,} generated{uncounted}, {retries:,} tries again{price}"
    )
    return output


def _prune_pairs(rows: list[Asked], settings: SelfQA) -> tuple[list[Mapping[str, Any]], Counter[str]]:
    """Return (rows of messages with the pairs that pass the rules, how many pairs or documents each reason dropped)."""
    kept, reasons, seen = list[Mapping[str, Any]](), Counter[str](), set()
    for row in rows:
        if row.failed:
            reasons[f"document {row.failed}"] += 1
        elif not row.pairs:
            reasons["document without a question"] += 1
        for pair in row.pairs:
            question, answer = pair.question, pair.answer
            reason = endpoint.question_reason(question)
            if reason is None and endpoint.normalise_question(question) in seen:
                reason = "question asked before"
            elif reason is None and answer is None:
                reason = "not answered"  # a rule that is newer than the reply had dropped the question
            elif reason is None and answer is not None:
                reason = endpoint.answer_reason(row.passage, question, answer, pair.finish, settings)
            if reason is not None:
                reasons[reason] += 1
                continue
            seen.add(endpoint.normalise_question(question))
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            kept.append({"messages": messages, "meta": {"source": row.source, "document": row.document}})
    return kept, reasons


def _format_reasons(reasons: Counter[str]) -> str:
    """Return "COUNT REASON, ..." with the highest counts first; "" without reasons."""
    return ", ".join(f"{count:,} {reason}" for reason, count in reasons.most_common())


_ENDS = "。！？!?\n"


@dataclass(frozen=True)
class Passage:
    """The part of a document that is asked about; `document` is the hex hash of the whole document."""

    document: str
    source: str
    text: str


def draw_passages(recipe: Recipe, settings: SelfQA) -> list[Passage]:
    """Prepare the recipe's documents in the cache; return the drawn passages in order. Raises UserError if it fails."""
    cache = Cache(Path(recipe.data.cache_dir), build=True)
    with cache.lock_cache():
        context = Context(recipe, cache)
        inputs = steps.list_inputs(context)
        read = steps.read_documents(context, inputs)
        chosen = steps.select_documents(context, read, inputs)
        decision = chosen.decisions()
        hashes = np.concatenate([documents.read_index(chunk.path)["hash"] for chunk in read.chunks])
        # By hash, so that a larger self_qa.documents draws the same passages and further ones.
        order = mix(hashes[:, 0] ^ np.uint64(settings.seed * int(GOLDEN) % 2**64))
        order[decision != selection.TRAIN] = np.iinfo(np.uint64).max
        count = min(settings.documents, int((decision == selection.TRAIN).sum()))
        places = np.argsort(order, kind="stable")[:count]
        drawn: dict[int, Passage] = {}
        for chunk in read.chunks:
            wanted = np.zeros(chunk.rows.stop - chunk.rows.start, dtype=np.bool_)
            here = np.sort(places[(places >= chunk.rows.start) & (places < chunk.rows.stop)])
            wanted[here - chunk.rows.start] = True
            for place, text in zip(here.tolist(), documents.read_texts(chunk.path, wanted), strict=True):
                part = cut_passage(text, settings.passage_characters, int(order[place]))
                drawn[place] = Passage(hashes[place].tobytes().hex(), chunk.source, part)
    return [drawn[place] for place in places.tolist()]


def cut_passage(text: str, longest: int, draw: int) -> str:
    """Return at most `longest` characters of the text, cut at ends of sentences if it can; `draw` says where."""
    if len(text) <= longest:
        return text
    start = draw % (len(text) - longest + 1)
    after = next((at + 1 for at in range(start, min(start + longest // 3, len(text))) if text[at] in _ENDS), start)
    begin = 0 if start == 0 else after
    part = text[begin : begin + longest]
    last = max(part.rfind(end) for end in _ENDS)
    return part[: last + 1].strip() if last > longest // 2 and begin + longest < len(text) else part.strip()
