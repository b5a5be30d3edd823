"""What a recipe may say about its data: sources, cleaning, shards, packing. Part of recipe.schema."""

from __future__ import annotations

import codecs
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, Strict

from finlm.recipe.schema_clean import Clean, Dedup, Paths, clean_or_none, method_name
from finlm.recipe.section import Bytes, Count, Fraction, Int, Positive, Section


def _sources(value: Any) -> Any:
    """A path stands for {path: ...}, and one source for a list of one: `--set data.sources=corpus/*.jsonl.gz`."""
    items = value if isinstance(value, (list, tuple)) else [value]
    return [{"path": item} if isinstance(item, str) else item for item in items]


def _encoding(value: Any) -> Any:
    if isinstance(value, str) and value != "auto":
        try:
            found = codecs.lookup(value)
            if not found._is_text_encoding or found.incrementaldecoder is None:  # as base64 is not
                raise LookupError
        except LookupError:
            raise ValueError(f"no text encoding {value!r}; utf-8, utf-16 and gb18030 are some") from None
    return value


Encoding = Annotated[str, BeforeValidator(_encoding)]


class Synthetic(Section):
    """The embedded corpus (data/synthetic.py)."""

    size: Bytes = Field(description="Bytes of training text over the four files, e.g. 16MB.")
    held_out_size: Bytes = Field(1_000_000, description="Bytes of held-out text about other companies.")
    seed: Int = Field(0, description="Seed of the fictional world.")
    dialogues: bool = Field(False, description="Questions and answers about the world instead of documents; for sft.")


class Source(Section):
    """Where documents come from: files, a data set of the Hugging Face Hub, or the embedded generator."""

    path: str | None = Field(
        None, description="File, glob, or directory of datasets.save_to_disk: .jsonl, .txt (.gz, .zst), .parquet."
    )
    dataset: str | None = Field(None, description="Id of a data set on the Hugging Face Hub instead of a path.")
    revision: str | None = Field(None, description="Commit of the data set, 40 digits.")
    files: str | None = Field(None, description="Glob within the data set; absent = what is named after the split.")
    split: str = Field("train", description="Split of a data set or of a saved one that has several.")
    synthetic: Synthetic | None = Field(None, description="Generate the embedded corpus instead of reading files.")
    name: str | None = Field(
        None,
        description="Name in reports; the file's stem when absent. Several .jsonl files are one source under a name, "
        "and one each without.",
    )
    format: Literal["auto", "jsonl", "lines", "txt", "parquet", "arrow"] = Field(
        "auto", description="auto: by the file's name; txt is a document a file, lines a document a line."
    )
    encoding: Encoding = Field("auto", description="Text encoding, e.g. gb18030; auto: UTF-8, or UTF-16 by its mark.")
    text_field: str = Field("text", description="Key or column of the document's text; a.b for a key within another.")
    meta: dict[str, str] = Field(
        default_factory=dict, description="Fields whose values are counted, by the name to show: {site: meta.source}."
    )
    sha256: str | None = Field(None, description="Expected hash of the (single) file.")


def _stages(value: Any) -> Any:
    """One stage for a list of one."""
    return [value] if isinstance(value, dict) else value


Weights = dict[str, Annotated[float, Field(ge=0)]]


class Stage(Section):
    """A part of the run and the share of each source in its tokens. Sources are named, or globs such as fin_*."""

    weights: Weights | None = Field(None, description="Relative tokens of each source; those not named have none.")
    to: Weights | None = Field(None, description="Weights at the stage's end, reached in equal steps from weights.")
    tokens: dict[str, Count] | None = Field(None, description="Tokens of each source, instead of weights and share.")
    share: Fraction | None = Field(None, description="Share of the run; absent = an equal part of what is left.")


class Data(Section):
    """Documents to packed shards."""

    sources: Annotated[tuple[Source, ...], Strict(False), Field(min_length=1), BeforeValidator(_sources)] = Field(
        description="Where text is read: paths or globs, or mappings."
    )
    num_proc: Positive = Field(4, description="Worker processes at most; bounded by cores, memory and open files.")
    held_out_fraction: Fraction = Field(0.01, description="Share of each file source kept for held-out perplexity.")
    held_out_documents: Int = Field(500, description="At most so many held-out documents a source.")
    max_broken_fraction: Fraction = Field(0.001, description="Share of unreadable rows above which prepare stops.")
    min_characters: Int = Field(10, description="Shorter documents are dropped.")
    clean: Annotated[Clean, BeforeValidator(clean_or_none)] = Field(
        default_factory=Clean, description="Changes and filters of single documents; none = no rule."
    )
    dedup: Annotated[Dedup, BeforeValidator(method_name)] = Field(
        default_factory=Dedup, description="Documents that occur twice; exact, near and none stand for their method."
    )
    decontaminate: Paths = Field(
        (), description="CSV files or globs of benchmark questions; documents that contain one are dropped."
    )
    encoder: Literal["auto", "sentencepiece", "gigatoken"] = Field(
        "auto", description="auto: gigatoken where its ids are sentencepiece's, else sentencepiece; same shards."
    )
    token_dtype: Literal["auto", "uint16", "uint32"] = Field("auto", description="Integer type of the shards.")
    shard_tokens: Count = Field(100_000_000, description="Tokens a shard at most.")
    packing: Literal["concat", "blocks", "best_fit"] = Field(
        "concat",
        description="How rows are filled: the stream cut into windows; the released XuanYuan code's blocks of each "
        "1,000 documents; or no document cut that fits.",
    )
    document_masks: bool = Field(
        False,
        description="Attention and positions end at a document's end; otherwise a row's documents see each other.",
    )
    mixture: Annotated[tuple[Stage, ...], Strict(False), BeforeValidator(_stages)] = Field(
        (), description="Stages of the run with the weights of the sources; absent = every row once an epoch."
    )
    cache_dir: str = Field("cache", description="Directory of prepared data, keyed by content.")
    prepared: str | None = Field(
        None, description="Use these prepared shards, of the same stage and tokenizer, instead of the sources."
    )
