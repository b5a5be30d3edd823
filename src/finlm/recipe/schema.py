"""What a recipe may say: every key, its unit, its default. Strict: unknown keys and wrong types are refused.

The reference page of all keys is generated from the descriptions here. "auto" is allowed only here; the planner
resolves it. Checks that need more than one key live in recipe.rules.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict

from finlm.base.units import parse_bytes, parse_count

Auto = Literal["auto"]


def _integral(value: Any) -> Any:
    """YAML reads 1e6 as a float; a whole one is an integer to its author."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _bytes(value: Any) -> Any:
    return parse_bytes(_integral(value))


def _count(value: Any) -> Any:
    return parse_count(_integral(value))


def _sources(value: Any) -> Any:
    """A path stands for {path: ...}, and one source for a list of one: `--set data.sources=corpus/*.jsonl.gz`."""
    items = value if isinstance(value, (list, tuple)) else [value]
    return [{"path": item} if isinstance(item, str) else item for item in items]


Int = Annotated[int, BeforeValidator(_integral)]
Positive = Annotated[int, BeforeValidator(_integral), Field(gt=0)]
Bytes = Annotated[int, BeforeValidator(_bytes)]
Count = Annotated[int, BeforeValidator(_count), Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """A frozen part of a recipe."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=())


class Model(Section):
    """Llama-shaped decoder: RMSNorm, RoPE, SwiGLU."""

    init_from: str | None = Field(None, description="Hugging Face directory or id whose weights are the start.")
    revision: str | None = Field(None, description="Commit of init_from when it is a Hub id.")
    hidden_size: Positive = Field(description="Width of the residual stream.")
    layers: Positive = Field(description="Number of decoder layers.")
    heads: Positive = Field(description="Number of attention heads.")
    kv_heads: Positive | None = Field(None, description="Number of key/value heads; the number of heads when absent.")
    ffn_size: Positive = Field(description="Inner width of the SwiGLU feed-forward.")
    vocab_size: Positive | Auto = Field("auto", description="Rows of the embedding; auto = the tokenizer's size.")
    tie_embeddings: bool = Field(False, description="Output head shares the embedding's weights.")
    rope_theta: float = Field(10000.0, description="RoPE base.")
    norm_eps: float = Field(1e-5, description="Epsilon of RMSNorm.")
    init_std: float = Field(0.02, description="Standard deviation of the initial weights.")


class Tokenizer(Section):
    """A sentencepiece model: an existing file, or one trained on the recipe's documents."""

    path: str | None = Field(None, description="Existing tokenizer.model; absent = train one.")
    vocab_size: Positive | None = Field(None, description="Pieces of the trained tokenizer.")
    sample_bytes: Bytes = Field(200_000_000, description="Text sampled for training it, e.g. 200MB.")
    character_coverage: Fraction = Field(0.9995, description="Share of characters kept as pieces; the rest are bytes.")
    add_bos: bool = Field(True, description="Every document starts with <s>, as in Llama.")


class Synthetic(Section):
    """The embedded corpus (data/synthetic.py)."""

    size: Bytes = Field(description="Bytes of training text over the four files, e.g. 16MB.")
    held_out_size: Bytes = Field(1_000_000, description="Bytes of held-out text about other companies.")
    seed: Int = Field(0, description="Seed of the fictional world.")


class Source(Section):
    """Where documents come from: files, or the embedded generator."""

    path: str | None = Field(None, description="File or glob of JSON lines (.jsonl, .jsonl.gz).")
    synthetic: Synthetic | None = Field(None, description="Generate the embedded corpus instead of reading files.")
    name: str | None = Field(None, description="Name in reports; the file's stem when absent.")
    text_field: str = Field("text", description="Key of the document's text in a row.")
    sha256: str | None = Field(None, description="Expected hash of the (single) file.")


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
    dedup: Literal["exact", "none"] = Field(
        "exact", description="Drop documents whose normalised text was seen before."
    )
    token_dtype: Literal["auto", "uint16", "uint32"] = Field("auto", description="Integer type of the shards.")
    shard_tokens: Count = Field(100_000_000, description="Tokens a shard at most.")
    cache_dir: str = Field("cache", description="Directory of prepared data, keyed by content.")
    prepared: str | None = Field(None, description="Use these prepared shards instead of preparing the sources.")


class Batch(Section):
    """How many tokens make one optimizer step."""

    sequence_length: Positive = Field(description="Tokens a row.")
    tokens_per_step: Count = Field(
        description="Tokens an optimizer step over all GPUs; rounded to whole micro-batches."
    )
    micro_batch: Positive | Auto = Field("auto", description="Rows a GPU holds at once.")


class Optim(Section):
    """AdamW and its learning-rate schedule."""

    optimizer: Literal["adamw", "adam"] = Field("adamw", description="adamw decouples weight decay, adam does not.")
    lr: Annotated[float, Field(gt=0)] = Field(description="Peak learning rate.")
    min_lr: Annotated[float, Field(ge=0)] = Field(0.0, description="Learning rate at the end.")
    schedule: Literal["cosine", "linear", "constant"] = Field("cosine", description="Decay after warmup.")
    warmup_steps: Annotated[Int, Field(ge=0)] = Field(50, description="Steps of linear warmup.")
    betas: Annotated[tuple[float, float], Strict(False)] = Field((0.9, 0.95), description="Adam's moment decay rates.")
    eps: float = Field(1e-8, description="Adam's epsilon.")
    weight_decay: Annotated[float, Field(ge=0)] = Field(0.1, description="Weight decay.")
    clip: Annotated[float, Field(ge=0)] = Field(1.0, description="Gradient norm limit; 0 = none.")


class Fp16(Section):
    """Loss scaling; used only when the precision is fp16."""

    loss_scale: Annotated[float, Field(ge=0)] = Field(0.0, description="Fixed loss scale; 0 = dynamic.")
    initial_scale_power: Int = Field(16, description="The first loss scale is 2 to this power.")
    loss_scale_window: Positive = Field(1000, description="Steps without overflow before the scale doubles.")
    hysteresis: Positive = Field(2, description="Overflows tolerated before the scale halves.")
    consecutive_hysteresis: bool = Field(False, description="Refill the hysteresis after every good step.")
    min_loss_scale: Annotated[float, Field(gt=0)] = Field(
        1.0, description="The run stops when the scale would go below."
    )


class Zero(Section):
    """DeepSpeed ZeRO."""

    stage: Literal[0, 1, 2, 3, "auto"] = Field("auto", description="ZeRO stage.")
    offload_optimizer: Literal["none", "cpu", "nvme", "auto"] = Field(
        "auto", description="Where optimizer states live."
    )
    offload_param: Literal["none", "cpu", "nvme", "auto"] = Field(
        "auto", description="Where parameters live (stage 3)."
    )
    nvme_path: str | None = Field(None, description="Directory on the NVMe disk for offload.")
    hpz_partition_size: Positive = Field(1, description="ZeRO++ hpZ: ranks of the secondary shard; 1 = off.")
    quantized_weights: bool = Field(False, description="ZeRO++ qwZ: int8 all-gather.")
    quantized_gradients: bool = Field(False, description="ZeRO++ qgZ: int4 reduce.")


class Train(Section):
    """How long and from which seed."""

    steps: Positive | None = Field(None, description="Optimizer steps.")
    tokens: Count | None = Field(None, description="Training tokens, e.g. 3.9M; an alternative to steps.")
    epochs: Annotated[float, Field(gt=0)] | None = Field(None, description="Passes over the data; needs prepared data.")
    seed: Int = Field(0, description="Seed of weights and data order.")
    precision: Literal["auto", "bf16", "fp16", "fp32"] = Field(
        "auto", description="auto: bf16, fp16 or fp32 by hardware."
    )
    fp16: Fp16 = Field(default_factory=Fp16, description="Loss scaling.")
    recompute: Literal["auto", "none", "full"] = Field("auto", description="Activation checkpointing.")
    cpu_ranks: Positive = Field(2, description="Processes when there is no GPU.")


class Checkpoint(Section):
    """What is kept."""

    every_steps: Positive | None = Field(
        None, description="Optimizer steps between checkpoints; absent = only the last."
    )
    keep_last: Positive = Field(2, description="Checkpoints kept.")


class Eval(Section):
    """Held-out perplexity."""

    every_steps: Positive | None = Field(None, description="Steps between evaluations; start and end always run.")
    max_tokens_per_source: Count = Field(200_000, description="Held-out tokens a source at most.")


class HardwareHost(Section):
    """One host of the hardware a recipe was written for."""

    name: str = Field(description="Host name as in the hostfile.")
    slots: Positive = Field(description="GPUs (or CPU ranks) used.")
    gpu: str | None = Field(None, description="GPU kind of plan/gpus.yaml, e.g. A100-40G; absent = CPU ranks.")
    memory: Bytes | None = Field(None, description="Host RAM, e.g. 256GiB.")
    count: Positive = Field(1, description="Identical hosts; more than 1 stands for name-1 to name-N.")


class Hardware(Section):
    """The cluster a recipe was written for; `plan` uses it unless told otherwise."""

    hosts: Annotated[tuple[HardwareHost, ...], Strict(False), Field(min_length=1)] = Field(description="Hosts.")
    network_gbit: Annotated[float, Field(gt=0)] = Field(10.0, description="Speed of the link between hosts.")


class Recipe(Section):
    """A run, fully determined together with a hostfile."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]*$", description="Short name; the prefix of run directories.")
    description: str = Field("", description="One line for people.")
    stage: Literal["pretrain"] = Field("pretrain", description="Kind of training.")
    hardware: Hardware
    model: Model
    tokenizer: Tokenizer
    data: Data
    batch: Batch
    optim: Optim
    zero: Zero = Field(default_factory=Zero)
    train: Train
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    eval: Eval = Field(default_factory=Eval)
    env: dict[str, str] = Field(default_factory=dict, description="Environment of every rank; recorded.")
