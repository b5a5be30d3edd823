"""What a recipe may say about its data: sources, cleaning, duplicates, benchmark questions, shards, packing, Self-QA.

Defaults are safe for any finance text: they mend the form, mask personal numbers, and drop only what is no text. A
recipe switches on what the XuanYuan reports list beyond that: punctuation, keyword lists, perplexity, near-duplicates.
"""

from __future__ import annotations

import codecs
from datetime import date
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, NonNegativeFloat, PositiveFloat, Strict

from finlm.base.units import parse_bytes, parse_count

Auto = Literal["auto"]
MOST = 1024  # ranks of a host, and hosts of a kind: lists of them are made


def _integral(value: Any) -> Any:
    """Return a whole float as an integer: YAML reads 1e6 as a float. Other values are returned as they are."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _bytes(value: Any) -> Any:
    """Return the number of bytes of 4096, 1e6 or "16MB". Raises ValueError on anything else."""
    return parse_bytes(_integral(value))


def _count(value: Any) -> Any:
    """Return the number of 4096, 1e6 or "3.9M". Raises ValueError on anything else."""
    return parse_count(_integral(value))


Int = Annotated[int, BeforeValidator(_integral)]
Positive = Annotated[int, BeforeValidator(_integral), Field(gt=0)]
Small = Annotated[int, BeforeValidator(_integral), Field(gt=0, le=MOST)]
Seed = Annotated[int, BeforeValidator(_integral), Field(ge=0, lt=2**32)]  # numpy takes no other
Bytes = Annotated[int, BeforeValidator(_bytes)]
Count = Annotated[int, BeforeValidator(_count), Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """A frozen part of a recipe."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=(), allow_inf_nan=False)


def _list(value: Any) -> Any:
    """Return text as a list of one, None and "none" as the empty list; other values are returned as they are."""
    return () if value is None or value == "none" else (value,) if isinstance(value, str) else value


Paths = Annotated[tuple[str, ...], Strict(False), BeforeValidator(_list)]
Masks = Annotated[tuple[Literal["id_card", "phone", "bank_card"], ...], Strict(False), BeforeValidator(_list)]


class Perplexity(Section):
    """Drops documents with a high perplexity under a character n-gram model of your clean set."""

    clean_set: Annotated[Paths, Field(min_length=1)] = Field(
        description="Files or globs of clean JSON lines to train the n-gram model on."
    )
    text_field: str = Field("text", description="Key of the text in their rows.")
    order: Annotated[Int, Field(ge=2, le=5)] = Field(3, description="Characters per n-gram.")
    clean_bytes: Bytes = Field(
        64_000_000, description="Bytes of the clean set that are used, sampled by hash from all files, e.g. 64MB."
    )
    max_perplexity: Annotated[float, Field(gt=1)] | Auto = Field(
        "auto", description="Perplexity per character above which a document is dropped; auto: see sigmas."
    )
    sigmas: PositiveFloat = Field(
        4.0, description="auto: standard deviations of log perplexity above the mean of the clean set's held-out part."
    )


class Clean(Section):
    """Changes to and filters of single documents; `clean: none` switches all of them off."""

    html: bool = Field(True, description="Remove the remains of HTML: tags, scripts, entities.")
    repeated_symbols: bool = Field(True, description="Shorten runs of one symbol to three, of blanks to four.")
    boilerplate_lines: bool = Field(False, description="Remove navigation and other boilerplate lines of web pages.")
    simplified: bool = Field(True, description="Convert documents written in traditional Chinese to simplified.")
    punctuation: bool = Field(
        False, description="Convert half-width punctuation between Chinese characters to full width."
    )
    mask: Masks = Field(
        ("id_card", "phone", "bank_card"),
        description="Personal numbers to replace by placeholders, in dialogues too; none = keep them.",
    )
    garbled: bool = Field(True, description="Drop documents with a broken encoding.")
    max_digits: Fraction = Field(0.7, description="Drop documents with a larger share of digits; 1 = keep all.")
    max_symbols: Fraction = Field(0.6, description="Drop documents with a larger share of symbols; 1 = keep all.")
    min_chinese: Fraction = Field(0.0, description="Drop documents with a smaller share of Chinese letters.")
    max_short_lines: Fraction = Field(
        1.0, description="Drop documents of ten lines or more with a larger share under 10 characters; 1 = keep all."
    )
    bad_keywords: str | None = Field(None, description="File of bad words, one per line.")
    bad_keyword_limit: Positive = Field(3, description="Number of different bad words at which a document is dropped.")
    perplexity: Perplexity | None = Field(None, description="Filter by the perplexity of an n-gram model.")


_OFF = {
    "html": False,
    "repeated_symbols": False,
    "simplified": False,
    "mask": (),
    "garbled": False,
    "max_digits": 1.0,
    "max_symbols": 1.0,
}


def clean_or_none(value: Any) -> Any:
    """Return the section with every rule off for `clean: none` or null; other values are returned as they are."""
    return _OFF if value is None or value == "none" else value


class Dedup(Section):
    """How duplicates are found; `dedup: near` is short for {method: near}."""

    method: Literal["none", "exact", "near"] = Field(
        "exact",
        description="exact: the same normalised text. near: also MinHash near-duplicates without information of their "
        "own.",
    )
    threshold: Annotated[float, Field(ge=0.5, lt=1)] = Field(
        0.8, description="near: Jaccard similarity of character 5-grams at which two documents count as duplicates."
    )


def method_name(value: Any) -> Any:
    """Return {"method": name} for a method's name; other values are returned as they are."""
    return {"method": value} if isinstance(value, str) else value


def _sources(value: Any) -> Any:
    """Return a list of sources, with {path: ...} for each that is text; a single value is a list of one."""
    items = value if isinstance(value, (list, tuple)) else [value]
    return [{"path": item} if isinstance(item, str) else item for item in items]


def _check_encoding(value: Any) -> Any:
    """Return the value unchanged. Raises ValueError for text that is neither "auto" nor the name of a text encoding."""
    if isinstance(value, str) and value != "auto":
        try:
            codec = codecs.lookup(value)
            if not codec._is_text_encoding or codec.incrementaldecoder is None:  # as base64 is not
                raise LookupError
        except LookupError:
            raise ValueError(f"no text encoding {value!r}; utf-8, utf-16 and gb18030 are some") from None
    return value


Encoding = Annotated[str, BeforeValidator(_check_encoding)]


def _date(value: Any) -> Any:
    """Return a date as text, YYYY-MM-DD. Raises ValueError for other text; returns other values unchanged."""
    return date.fromisoformat(str(value)).isoformat() if isinstance(value, (str, date)) else value


Date = Annotated[str, BeforeValidator(_date)]


class Synthetic(Section):
    """The embedded corpus (world/writer.py)."""

    size: Bytes = Field(description="Bytes of training text in the four files together, e.g. 16MB.")
    held_out_size: Bytes = Field(1_000_000, description="Bytes of held-out text about other companies.")
    seed: Seed = Field(0, description="Seed of the fictional world.")
    about: Literal["exam", "figures", "laws"] = Field(
        "exam",
        description="Subject of dialogues and prompts. exam: the exam's questions. figures: two or three steps of "
        "arithmetic on a company's figures, four of ten with a chain of thought. laws: the laws of the world. figures "
        "and laws are for sft (with dialogues) and grpo.",
    )
    dialogues: bool = Field(False, description="Questions and answers about the world instead of documents; for sft.")


class Source(Section):
    """A source of documents: files, a data set of the Hugging Face Hub, or the embedded generator."""

    path: str | None = Field(
        None,
        description="File or glob, as a path or a URL such as s3://bucket/*.jsonl, or directory of "
        "datasets.save_to_disk: .jsonl, .txt (.gz, .zst), .parquet.",
    )
    dataset: str | None = Field(None, description="Id of a data set on the Hugging Face Hub instead of a path.")
    revision: str | None = Field(None, description="Commit of the data set, 40 digits.")
    files: str | None = Field(None, description="Glob within the data set; absent = files named after the split.")
    split: str = Field("train", description="Split to read, if there are several.")
    synthetic: Synthetic | None = Field(None, description="Generate the embedded corpus instead of reading files.")
    name: str | None = Field(
        None,
        description="Name in reports; absent = the file's stem. With a name, several .jsonl files are one source; "
        "without, one each.",
    )
    format: Literal["auto", "jsonl", "lines", "txt", "parquet", "arrow"] = Field(
        "auto",
        description="Format of the files. auto: by file name. txt: one document per file. lines: one document per "
        "line.",
    )
    encoding: Encoding = Field("auto", description="Text encoding, e.g. gb18030; auto: UTF-8, or UTF-16 by its mark.")
    text_field: str = Field("text", description="Key or column of the document's text; a.b for a nested key.")
    null_text: Literal["broken", "empty"] = Field(
        "broken", description="Whether a row with null text counts as broken, or as empty and thus too short."
    )
    meta: dict[str, str] = Field(
        default_factory=dict, description="Fields whose values are counted, by the name to print: {site: meta.source}."
    )
    sha256: str | None = Field(None, description="Expected hash of the (single) file.")


def _stages(value: Any) -> Any:
    """Return a mapping as a list of one; other values are returned as they are."""
    return [value] if isinstance(value, dict) else value


Weights = dict[str, NonNegativeFloat]


class Stage(Section):
    """A stage of the run with each source's share of its tokens. Sources are names or globs, such as fin_*."""

    weights: Weights | None = Field(
        None, description="Relative tokens of each source; sources that are not named get none."
    )
    to: Weights | None = Field(
        None, description="Weights at the stage's end; the mixture moves there linearly from weights."
    )
    tokens: dict[str, Count] | None = Field(None, description="Tokens from each source, instead of weights and share.")
    share: Fraction | None = Field(None, description="Share of the run; absent = an equal part of the rest.")


class Data(Section):
    """Sources, cleaning, deduplication, mixture and packing."""

    sources: Annotated[tuple[Source, ...], Strict(False), Field(min_length=1), BeforeValidator(_sources)] = Field(
        description="Sources of text: paths, globs or mappings."
    )
    num_proc: Positive = Field(4, description="Maximum worker processes; also limited by cores, memory and open files.")
    engine: Literal["local", "ray"] = Field(
        "local",
        description="local: worker processes on this machine. ray: Ray tasks on the hosts of the hostfile, for "
        "documents. The shards are the same.",
    )
    ray_address: Annotated[str, Field(pattern=r"^(auto|[A-Za-z0-9._-]+:[0-9]{1,5})$")] | None = Field(
        None,
        description="engine ray: host:port of a running cluster, or auto; absent = finlm starts a cluster and stops "
        "it.",
    )
    held_out_fraction: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.01, description="Share of each file source that is held out of training, for held-out perplexity."
    )
    held_out_documents: Int = Field(
        500,
        description="Maximum held-out documents per source that are evaluated; further ones stay out of training too.",
    )
    held_out_by: str | None = Field(
        None,
        description="Field to group by, such as a company's code: all documents with the same value are either "
        "trained on or held out. held_out_fraction is then a share of the values.",
    )
    held_out_from: Date | None = Field(
        None, description="Hold out the documents from this date (YYYY-MM-DD) on, instead of a share."
    )
    held_out_date_field: str = Field("date", description="Field with the date of a row, for held_out_from.")
    max_broken_fraction: Fraction = Field(
        0.001, description="Share of unreadable rows, or of unusable dialogues, above which prepare stops."
    )
    min_characters: Int = Field(10, description="Shorter documents are dropped.")
    clean: Annotated[Clean, BeforeValidator(clean_or_none)] = Field(
        default_factory=Clean, description="Changes to and filters of single documents; none = no rule."
    )
    dedup: Annotated[Dedup, BeforeValidator(method_name)] = Field(
        default_factory=Dedup, description="How duplicates are found; exact, near and none are short for {method: ...}."
    )
    decontaminate: Paths = Field(
        (), description="CSV files or globs of benchmark questions; documents that contain one are dropped."
    )
    encoder: Literal["auto", "sentencepiece", "tokenizers", "gigatoken"] = Field(
        "auto",
        description="Library that tokenizes. auto: gigatoken if it gives the same ids, else the tokenizer's own "
        "library. The shards are the same.",
    )
    token_dtype: Literal["auto", "uint16", "uint32"] = Field("auto", description="Integer type of the shards.")
    shard_tokens: Count = Field(100_000_000, description="Maximum tokens per shard.")
    packing: Literal["concat", "blocks", "best_fit"] = Field(
        "concat",
        description="How rows are filled. concat: cut the token stream into windows. blocks: as the released XuanYuan "
        "code, within each 1,000 documents. best_fit: cut no document that fits a row.",
    )
    document_masks: bool = Field(
        False,
        description="Attend within a document only and restart positions; otherwise the documents of a row see each "
        "other.",
    )
    mixture: Annotated[tuple[Stage, ...], Strict(False), BeforeValidator(_stages)] = Field(
        (), description="Stages of the run with the weights of the sources; absent = every row once per epoch."
    )
    cache_dir: str = Field("cache", description="Directory of prepared data, keyed by content.")
    prepared: str | None = Field(
        None,
        description="Directory of prepared shards to use instead of the sources; stage and tokenizer must be the same.",
    )

    @property
    def sides(self) -> dict[str, str]:
        """{recipe key: document field} of the fields that decide whether a document is held out or trained on."""
        dated = {"held_out_from": self.held_out_date_field} if self.held_out_from else {}
        return ({"held_out_by": self.held_out_by} if self.held_out_by else {}) | dated


# No user:password@, which would be written to every place that the recipe is.
Url = Annotated[str, Field(pattern=r"^https?://[^\s@?#]+$")]


class SelfQA(Section):
    """Questions and answers that a model generates from the recipe's documents (arXiv 2305.11952)."""

    output: str = Field("data/self_qa.jsonl", description="Output file of messages, a source for SFT.")
    endpoint: Url | None = Field(
        None, description="Base URL of an OpenAI-compatible server, e.g. http://host:8000/v1; absent = model is local."
    )
    model: str = Field(
        description="Name of the model at the endpoint; without an endpoint, an exported directory or step-N."
    )
    api_key_env: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None = Field(
        None, description="Environment variable that holds the endpoint's key; the key itself is never written."
    )
    documents: Positive = Field(1000, description="Documents drawn from the training documents, one passage of each.")
    passage_characters: Annotated[Int, Field(ge=100)] = Field(
        1500, description="Maximum characters of a passage; a part of a longer document is drawn."
    )
    questions: Positive = Field(5, description="Questions to request per passage.")
    language: Literal["zh", "en"] = Field("zh", description="Language of the prompts, questions and answers.")
    temperature: Annotated[float, Field(ge=0, le=2)] = Field(
        0.8, description="Sampling temperature of the questions; answers are generated at 0."
    )
    max_answer_tokens: Positive = Field(512, description="Maximum tokens of an answer; a truncated answer is dropped.")
    min_answer_characters: Positive = Field(2, description="Shorter answers are dropped.")
    grounded_numbers: bool = Field(True, description="Drop answers with a number that is not in the passage.")
    seed: Seed = Field(0, description="Seed for drawing documents and passages.")
    concurrency: Positive = Field(8, description="Concurrent requests; 1 for a local model.")
    requests_per_minute: Positive | None = Field(None, description="Maximum requests started per minute.")
    timeout_seconds: PositiveFloat = Field(120.0, description="Seconds without data after which a request fails.")
    attempts: Positive = Field(6, description="Attempts per request after 429, 5xx, a timeout or an invalid answer.")
    input_price: NonNegativeFloat = Field(0.0, description="Price per million prompt tokens.")
    output_price: NonNegativeFloat = Field(0.0, description="Price per million generated tokens.")
    max_cost: PositiveFloat | None = Field(
        None, description="Cost over all runs of this output at which no further document is started."
    )
