"""`finlm self-qa`: the recipe's documents to questions and answers for SFT, in the three stages of arXiv 2305.11952.

Documents are what pretraining would read: cleaned, deduplicated, not held out. Of each drawn one a passage is asked
about, every question that passes the rules is answered from the passage, and what passes again is written as messages.

A finished document is a line in <output>.ledger, replies included, and is never paid for twice: a killed run goes on,
and a changed rule is applied to what is there already. The output appears whole, after the last document. Changed
prompts, model or sampling start anew in the same ledger.
"""

from __future__ import annotations

import fcntl
import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from finlm.base import files, screen
from finlm.base.errors import UserError
from finlm.data import self_qa_text
from finlm.data.chat_api import Endpoint, Messages, NoAnswer, Refused, Reply
from finlm.data.self_qa_draw import Passage, passages
from finlm.recipe.schema import Recipe
from finlm.recipe.schema_self_qa import SelfQA

_STOP_AFTER = 5  # documents in a row that failed: it is not the documents
_QUESTION_TOKENS = 64  # a question
_TOKENS = ("prompt_tokens", "completion_tokens")


class Model(Protocol):
    """Who is asked: chat_api.Endpoint, or a checkpoint on this machine."""

    def ask(self, messages: Messages, temperature: float, max_tokens: int) -> Reply:
        """The reply to messages."""


def run(recipe: Recipe, model: Model | None = None, fingerprint: str | None = None) -> Path:
    """Ask about every drawn document that the ledger does not have, and publish; the output's path.

    model: asked instead of the endpoint; fingerprint: of its weights, as its name says little. Raises UserError, with
    everything that was answered kept.
    """
    settings = _settings(recipe)
    asked: Model = Endpoint(settings) if model is None else model
    output = Path(settings.output).expanduser()
    ledger = output.with_name(output.name + ".ledger")
    key = _key(settings, fingerprint)
    with _held(ledger):
        drawn = passages(recipe, settings)
        done = {row["document"]: row for row in files.read_json_lines(ledger) if row["key"] == key}
        missing = [one for one in drawn if one.document not in done]
        kept = len(drawn) - len(missing)
        screen.say(f"self-qa: {len(drawn):,} documents, {kept:,} of them in {ledger} already; model {settings.model}")
        spent = _spent(files.read_json_lines(ledger))
        done |= {row["document"]: row for row in _asked(missing, settings, asked, ledger, key, spent)}
        rows = [done[one.document] for one in drawn if one.document in done]
        if len(rows) < len(drawn):
            screen.say(f"self-qa: max_cost is reached; {len(drawn) - len(rows):,} documents were not asked about")
        return _publish(output, rows, settings, key, getattr(asked, "retries", 0))


def _settings(recipe: Recipe) -> SelfQA:
    if recipe.self_qa is None:
        raise UserError(
            f"the recipe {recipe.name} has no self_qa section",
            fix="add self_qa: {endpoint: http://host:8000/v1, model: NAME}, or give both by --set",
        )
    return recipe.self_qa


def _key(settings: SelfQA, fingerprint: str | None) -> str:
    """What the replies depend on. Where the model is, how fast it is asked and what is kept are not part of it."""
    names = ("model", "passage_characters", "questions", "language", "temperature", "max_answer_tokens", "seed")
    values = {name: getattr(settings, name) for name in names}
    if fingerprint is not None:
        values["model"] = fingerprint
    return files.sha256_json({"prompts": self_qa_text.VERSION, **values})[:16]


@contextmanager
def _held(ledger: Path) -> Iterator[None]:
    """Hold the ledger alone."""
    ledger.parent.mkdir(parents=True, exist_ok=True)
    with ledger.with_name(f".{ledger.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another `finlm self-qa` writes {ledger} now", fix="wait for it, or end it") from None
        yield


def _asked(
    missing: list[Passage], settings: SelfQA, model: Model, ledger: Path, key: str, spent: Counter[str]
) -> Iterator[dict[str, Any]]:
    """A row of each passage as it ends, at most `concurrency` under way; what did not fail is in the ledger by then."""
    waiting = iter(missing)
    under_way: set[Future[dict[str, Any]]] = set()
    failed_in_a_row = 0
    workers = settings.concurrency if settings.endpoint else 1
    with ThreadPoolExecutor(workers) as pool, screen.progress("self-qa", len(missing)) as advance:
        try:
            while True:
                while len(under_way) < workers and not _too_dear(settings, spent):
                    passage = next(waiting, None)
                    if passage is None:
                        break
                    under_way.add(pool.submit(_about, passage, settings, model))
                if not under_way:
                    return
                ended, under_way = wait(under_way, return_when=FIRST_COMPLETED)
                rows = [{"key": key, **future.result()} for future in ended if future.exception() is None]
                for row in rows:  # all that was paid for, before anything is raised
                    advance(1)
                    spent.update({name: row[name] for name in _TOKENS})
                    if not row["failed"]:  # such a document is tried again by the next run
                        files.append_json_line(ledger, row)
                for future in ended:
                    future.result()
                for row in rows:
                    yield row
                    failed_in_a_row = failed_in_a_row + 1 if row["failed"] else 0
                    if failed_in_a_row >= _STOP_AFTER:
                        raise UserError(
                            f"{settings.endpoint or settings.model} failed on {failed_in_a_row} documents in a row",
                            evidence=row["detail"],
                            fix=f"what was answered is in {ledger}; the same command goes on from there",
                        )
        except BaseException:
            if isinstance(model, Endpoint):
                model.stopped.set()  # requests under way end by themselves; no new one starts
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _about(passage: Passage, settings: SelfQA, model: Model) -> dict[str, Any]:
    """One document: its questions, and the answers to those that pass the rules."""
    row: dict[str, Any] = {"document": passage.document, "source": passage.source, "passage": passage.text}
    row |= {"pairs": [], "requests": 0, "prompt_tokens": 0, "completion_tokens": 0, "uncounted": 0, "failed": None}

    def said(prompt: str, temperature: float, tokens: int) -> Reply:
        row["requests"] += 1
        reply = model.ask([{"role": "user", "content": prompt}], temperature, tokens)
        if reply.prompt_tokens is None or reply.completion_tokens is None:
            row["uncounted"] += 1
        row["prompt_tokens"] += reply.prompt_tokens or 0
        row["completion_tokens"] += reply.completion_tokens or 0
        return reply

    try:
        count, language = settings.questions, settings.language
        prompt = self_qa_text.question_prompt(passage.text, count, language)
        replied = said(prompt, settings.temperature, _QUESTION_TOKENS * count + settings.max_answer_tokens)
        seen = set()
        for question in self_qa_text.questions(replied.text)[:count]:
            pair: dict[str, Any] = {"question": question}
            row["pairs"].append(pair)
            if self_qa_text.normalised(question) not in seen and self_qa_text.question_reason(question) is None:
                seen.add(self_qa_text.normalised(question))
                prompt = self_qa_text.answer_prompt(passage.text, question, language)
                answer = said(prompt, 0.0, settings.max_answer_tokens)
                pair |= {"answer": self_qa_text.spoken(answer.text), "finish": answer.finish_reason}
    except Refused as error:
        row |= {"failed": "refused", "detail": str(error)}
    except NoAnswer as error:
        row |= {"failed": "no answer", "detail": str(error)}
    return row


def _spent(rows: Iterator[dict[str, Any]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for row in rows:
        total.update({name: row[name] for name in _TOKENS})
    return total


def cost(settings: SelfQA, tokens: Counter[str]) -> float:
    """Of these tokens, in the currency of the recipe's prices."""
    return (
        tokens["prompt_tokens"] * settings.input_price + tokens["completion_tokens"] * settings.output_price
    ) / 1_000_000


def _too_dear(settings: SelfQA, spent: Counter[str]) -> bool:
    return settings.max_cost is not None and cost(settings, spent) >= settings.max_cost


def _publish(output: Path, rows: list[dict[str, Any]], settings: SelfQA, key: str, retries: int) -> Path:
    """Stage 3: prune, and write the output with its account beside it. Raises UserError when nothing is left."""
    lines, reasons = _pruned(rows, settings)
    total: Counter[str] = Counter()
    for row in rows:
        total.update({name: row[name] for name in ("requests", *_TOKENS, "uncounted")})
    if not lines:
        raise UserError(
            "no question and answer is left",
            evidence=f"{len(rows):,} documents answered; dropped: {_listed(reasons) or 'nothing'}",
            fix=f"read the replies in {output}.ledger: the model may not follow the prompts, or answer in another "
            "language than self_qa.language",
        )
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    files.write_text(output, text)
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
    screen.say(f"self-qa: dropped {_listed(reasons) or 'nothing'}")
    price = f", cost {account['cost']:,}" if settings.input_price or settings.output_price else ""
    uncounted = f" ({total['uncounted']:,} replies without a count)" if total["uncounted"] else ""
    screen.say(
        f"self-qa: {total['requests']:,} requests, {total['prompt_tokens']:,} prompt tokens, "
        f"{total['completion_tokens']:,} generated{uncounted}, {retries:,} tries again{price}"
    )
    return output


def _pruned(rows: list[dict[str, Any]], settings: SelfQA) -> tuple[list[dict[str, Any]], Counter[str]]:
    """The messages that are kept, and how many pairs (or documents) every rule dropped."""
    kept, reasons, seen = [], Counter[str](), set()
    for row in rows:
        if row["failed"]:
            reasons[f"document {row['failed']}"] += 1
        elif not row["pairs"]:
            reasons["document without a question"] += 1
        for pair in row["pairs"]:
            question, answer = pair["question"], pair.get("answer")
            reason = self_qa_text.question_reason(question)
            if reason is None and self_qa_text.normalised(question) in seen:
                reason = "question asked before"
            if reason is None and answer is None:
                reason = "not answered"  # a rule that is newer than the reply had dropped the question
            if reason is None:
                about = row["passage"], question, answer, pair["finish"], settings.language
                reason = self_qa_text.answer_reason(*about, settings.min_answer_characters, settings.grounded_numbers)
            if reason is not None:
                reasons[reason] += 1
                continue
            seen.add(self_qa_text.normalised(question))
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            kept.append({"messages": messages, "meta": {"source": row["source"], "document": row["document"]}})
    return kept, reasons


def _listed(reasons: Counter[str]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in reasons.most_common())
