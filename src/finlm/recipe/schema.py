"""What a recipe may say: every key, its unit, its default. Strict: unknown keys and wrong types are refused.

The reference page of all keys is generated from the descriptions here. "auto" is allowed only here; the planner
resolves it. Checks that need more than one key live in recipe.rules.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeFloat, PositiveFloat, Strict, ValidationError
from ruamel.yaml import YAML

from finlm.base.errors import UserError
from finlm.recipe.schema_data import (
    Auto,
    Bytes,
    Count,
    Data,
    Fraction,
    Int,
    Positive,
    Section,
    Seed,
    SelfQA,
    Small,
    Weights,
)
from finlm.recipe.schema_train import Chat, Dpo, Expect, Grpo, Incidents, Lora, Record, Reward, Sft

Absolute = Annotated[str, Field(pattern=r"^/[^\r\n\x00]*$")]


class Model(Section):
    """A causal decoder of transformers; without `config` it is a Llama: RMSNorm, RoPE, SwiGLU."""

    init_from: str | None = Field(
        None,
        description="Initial weights: a Hugging Face directory or id, modelscope:ORG/NAME, a run (its export), or a "
        "recipe (the newest finished run of exactly this recipe).",
    )
    revision: str | None = Field(None, description="Commit of init_from when it is an id of the Hub or of ModelScope.")
    config: dict[str, Any] | None = Field(
        None,
        description="Keys of config.json that have no key here, such as model_type; absent = config.json of "
        "init_from, or a Llama without init_from.",
    )
    hidden_size: Positive = Field(description="Width of the residual stream.")
    layers: Positive = Field(description="Number of decoder layers.")
    heads: Positive = Field(description="Number of attention heads.")
    kv_heads: Positive | None = Field(None, description="Number of key/value heads; the number of heads when absent.")
    ffn_size: Positive = Field(description="Inner width of the feed-forward block.")
    vocab_size: Positive | Auto = Field("auto", description="Rows of the embedding; auto = the tokenizer's size.")
    tie_embeddings: bool = Field(False, description="Output head shares the embedding's weights.")
    rope_theta: float = Field(10000.0, description="RoPE base.")
    former_rope_theta: float | None = Field(
        None, description="RoPE base of init_from, when continued pretraining uses another one for longer rows."
    )
    norm_eps: float = Field(1e-5, description="Epsilon of the norms.")
    init_std: float = Field(0.02, description="Standard deviation of the initial weights.")


class Tokenizer(Section):
    """An existing tokenizer, one extended with Chinese pieces, or a sentencepiece model of the recipe's documents."""

    path: str | None = Field(
        None,
        description="Existing tokenizer.json or tokenizer.model, or a directory with one (tokenizer.json first). "
        "Without path and vocab_size, the tokenizer of model.init_from is used.",
    )
    extend_to: Positive | None = Field(
        None,
        description="Vocabulary size after adding Chinese pieces to the tokenizer of path; existing ids and encodings "
        "stay the same.",
    )
    extend_longest: Positive = Field(16, description="Maximum characters of a new piece; XuanYuan used 1.")
    vocab_size: Positive | None = Field(None, description="Vocabulary size of a tokenizer trained on the documents.")
    sample_bytes: Bytes = Field(
        200_000_000, description="Bytes of text sampled to train or extend the tokenizer, e.g. 200MB."
    )
    sample_weights: Weights | None = Field(
        None,
        description="Shares of the sample by source or glob, others 0; absent = in proportion to the sources' text.",
    )
    character_coverage: Fraction = Field(0.9995, description="Share of characters kept as pieces; the rest are bytes.")
    add_bos: bool = Field(
        True,
        description="Begin every document with <s>; with tokenizer.json only if the tokenizer itself adds a bos token.",
    )
    document_begin: str | None = Field(
        None, description="Token before every document, given as text; absent = the tokenizer's bos token."
    )
    document_end: str | None = Field(
        None, description="Token after every document, e.g. <|endoftext|>; absent = the tokenizer's eos token."
    )

    @property
    def pieces(self) -> int | None:
        """Number of pieces if the recipe sets it (vocab_size or extend_to); None for an existing file as it is."""
        return self.vocab_size or self.extend_to


class Batch(Section):
    """Sequence length and tokens per optimizer step."""

    sequence_length: Annotated[Int, Field(ge=2)] = Field(description="Tokens per row.")
    tokens_per_step: Count = Field(
        description="Tokens per optimizer step over all GPUs; rounded to whole micro-batches."
    )
    micro_batch: Positive | Auto | dict[str, Positive] = Field(
        "auto",
        description="Rows per GPU and micro-step; for unequal GPUs by host name or GPU kind, {A100-40G: 4, T4: 1}.",
    )


Beta = Annotated[float, Field(ge=0, lt=1)]


class Optim(Section):
    """AdamW and its learning-rate schedule."""

    optimizer: Literal["adamw", "adam"] = Field("adamw", description="adamw decouples weight decay, adam does not.")
    lr: PositiveFloat = Field(description="Peak learning rate.")
    min_lr: NonNegativeFloat = Field(0.0, description="Learning rate at the end.")
    schedule: Literal["cosine", "linear", "constant"] = Field("cosine", description="Decay after warmup.")
    warmup_steps: Annotated[Int, Field(ge=0)] = Field(50, description="Steps of warmup.")
    warmup: Literal["linear", "log"] = Field(
        "linear",
        description="Shape of the warmup; log, which rises fast at first, is the default of DeepSpeed and llm-code.",
    )
    betas: Annotated[tuple[Beta, Beta], Strict(False)] = Field((0.9, 0.95), description="Adam's moment decay rates.")
    eps: float = Field(1e-8, description="Adam's epsilon.")
    decay_steps: Positive | None = Field(
        None, description="Steps the schedule is made for; absent = the steps of the run, which is almost always right."
    )
    weight_decay: NonNegativeFloat = Field(0.1, description="Weight decay.")
    clip: NonNegativeFloat = Field(1.0, description="Gradient norm limit; 0 = none.")


class Fp16(Section):
    """Loss scaling; used only when the precision is fp16."""

    loss_scale: NonNegativeFloat = Field(0.0, description="Fixed loss scale; 0 = dynamic.")
    initial_scale_power: Int = Field(16, description="The first loss scale is 2 to this power.")
    loss_scale_window: Positive = Field(1000, description="Steps without overflow before the scale doubles.")
    hysteresis: Positive = Field(2, description="Overflows tolerated before the scale halves.")
    consecutive_hysteresis: bool = Field(False, description="Refill the hysteresis after every good step.")
    min_loss_scale: PositiveFloat = Field(1.0, description="The run stops when the scale would fall below.")


class Zero(Section):
    """ZeRO stage and offload."""

    stage: Literal[0, 1, 2, 3, "auto"] = Field("auto", description="ZeRO stage.")
    offload_optimizer: Literal["none", "stream", "cpu", "nvme", "auto"] = Field(
        "auto",
        description="Where optimizer states are kept. none: on the GPU. stream: on the host, updated by the GPU in "
        "parts. cpu: on the host, updated by its cores. nvme: on a disk.",
    )
    offload_param: Literal["none", "cpu", "nvme", "auto"] = Field(
        "auto", description="Where parameters are kept (stage 3)."
    )
    nvme_path: str | None = Field(None, description="Directory on the NVMe disk for offload.")
    hpz_partition_size: Positive = Field(1, description="ZeRO++ hpZ: ranks of the secondary shard; 1 = off.")
    quantized_weights: bool = Field(False, description="ZeRO++ qwZ: int8 all-gather.")
    quantized_gradients: bool = Field(False, description="ZeRO++ qgZ: int4 reduce.")


class Train(Section):
    """Length of training, seed, precision, recompute and compilation."""

    steps: Positive | None = Field(
        None,
        description="Optimizer steps. Give one of steps, tokens and epochs; it replaces the one of a base recipe, and "
        "--set replaces the recipe's.",
    )
    tokens: Count | None = Field(None, description="Training tokens, e.g. 3.9M, instead of steps.")
    epochs: PositiveFloat | None = Field(
        None, description="Passes over the data, instead of steps; needs prepared data."
    )
    seed: Seed = Field(0, description="Seed of weights and data order.")
    precision: Literal["auto", "bf16", "fp16", "fp32", "fp8"] = Field(
        "auto",
        description="auto: bf16, fp16 or fp32 by hardware. fp8: bf16 with float8 matrix products in linear layers "
        "(Hopper).",
    )
    grad_accum_dtype: Literal["auto", "fp32"] = Field(
        "auto",
        description="Type in which gradients of micro-batches are accumulated. auto: as the weights. fp32: at ZeRO "
        "stages 2 and 3, for 2 more bytes per parameter of a rank's share.",
    )
    fp16: Fp16 = Field(default_factory=Fp16, description="Loss scaling.")
    recompute: Literal["auto", "none", "selective", "full"] = Field(
        "auto", description="Activation checkpointing. none: off. selective: feed-forward blocks. full: whole layers."
    )
    compile: Literal["auto"] | bool = Field("auto", description="torch.compile of each layer; auto = on GPUs.")
    deterministic: bool = Field(
        False, description="Make two runs on GPUs bit-equal, at a cost (docs/determinism.md); CPU runs always are."
    )
    cpu_ranks: Small = Field(2, description="Number of ranks on a machine without GPUs.")


class Checkpoint(Section):
    """How often checkpoints are saved, where, and how many are kept."""

    every_steps: Positive | None = Field(
        None, description="Optimizer steps between checkpoints; absent = only after the last step."
    )
    keep_last: Positive = Field(2, description="Number of newest checkpoints to keep.")
    keep_every_steps: Positive | None = Field(
        None, description="Also keep checkpoints at multiples of this step; absent = only the newest."
    )
    copies: Literal[0, 1] = Field(
        0,
        description="1 = the machine that runs `train` copies the other hosts' parts of each checkpoint in the "
        "background, so that any other host may be lost with its disk. Not needed with a shared file system.",
    )
    memory_minutes: PositiveFloat | Auto | None = Field(
        None,
        description="Minutes between checkpoints in host memory, besides those on disk. The newest is kept, each "
        "host's part in a neighbour's memory too. auto = from the measured stall and the failure rate; absent = none.",
    )
    memory_directory: Absolute = Field(
        "/dev/shm",
        description="Directory on a tmpfs of every host for checkpoints in memory; needs room for two, or four times "
        "a host's share with the neighbour's part.",
    )
    asynchronous: bool = Field(
        True,
        description="Copy to host memory and write in a background thread; false = training waits for the disk. If "
        "the recipe does not set it, the plan uses false where nothing else fits.",
    )


class Eval(Section):
    """Held-out perplexity and multiple-choice questions during and after training."""

    every_steps: Positive | None = Field(
        None, description="Steps between evaluations; the model is always evaluated at the start and the end."
    )
    max_tokens_per_source: Count = Field(200_000, description="Maximum held-out tokens per source.")
    suites: Annotated[tuple[Literal["exam", "recall"], ...], Strict(False)] = Field(
        (), description="Questions about the fictional world, asked after training, and of the start model too."
    )
    mode: Literal["auto", "likelihood", "chat", "cloze"] = Field(
        "auto",
        description="How questions are asked. likelihood: the likeliest letter. chat: a written answer. cloze: the "
        "likeliest option per character. auto: chat for models with a chat template, else likelihood.",
    )


class HardwareHost(Section):
    """One host of the hardware a recipe was written for."""

    name: str = Field(description="Host name as in the hostfile.")
    slots: Small = Field(description="GPUs (or CPU ranks) used.")
    gpu: str | None = Field(None, description="GPU kind of plan/gpus.yaml, e.g. A100-40G; absent = CPU ranks.")
    memory: Bytes | None = Field(
        None,
        description="Host RAM, e.g. 256GiB. For a host with GPUs it overrides the measured value, also on localhost.",
    )
    count: Small = Field(1, description="Number of identical hosts; above 1 they are called name-1 to name-N.")


class Hardware(Section):
    """The cluster this recipe was written for; `plan` uses it by default."""

    hosts: Annotated[tuple[HardwareHost, ...], Strict(False), Field(min_length=1)] = Field(description="Hosts.")
    network_gbit: PositiveFloat = Field(10.0, description="Speed of the link between hosts.")
    price_per_gpu_hour: NonNegativeFloat | None = Field(
        None, description="Price of one GPU-hour in your currency; `plan` then prints the cost of the run."
    )


def _write_number(value: Any) -> Any:
    """Return an integer as text; other values, booleans too, are returned as they are."""
    return str(value) if type(value) is int else value  # YAML reads `OMP_NUM_THREADS: 4` as a number


Text = Annotated[str, BeforeValidator(_write_number), Field(pattern=r"^[^\r\n\x00]*$")]
Environment = dict[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], Text]
Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$")]


class HostAccess(Section):
    """Settings of one host that a hostfile cannot express."""

    user: Word | None = Field(None, description="User for ssh; absent = as in ~/.ssh/config, or the current user.")
    port: Annotated[int, Field(gt=0, lt=65536)] | None = Field(None, description="Port of the host's ssh server.")
    python: Absolute | None = Field(
        None, description="Python interpreter of the ranks; absent = the same path as on this machine."
    )
    work_dir: Absolute | None = Field(
        None, description="Directory that corresponds to the one `train` is started in; absent = the same path."
    )
    address: Word | None = Field(
        None, description="Address at which other hosts reach this host; absent = the one that ssh connects to."
    )
    env: Environment = Field(
        default_factory=dict, description="Environment variables of its ranks; they override the recipe's env."
    )


class Launch(Section):
    """How ranks are started, watched and restarted."""

    master_port: Annotated[int, Field(gt=0, lt=65536)] | Auto = Field(
        "auto", description="TCP port of the rendezvous on the first host; auto = a free one."
    )
    start_minutes: PositiveFloat = Field(
        60.0, description="End the run if the first step takes longer than this, with loading and compiling."
    )
    stall_minutes: PositiveFloat = Field(
        30.0, description="End the run after this time without a finished step, evaluation or checkpoint."
    )
    outage_seconds: Annotated[float, Field(ge=10)] = Field(
        60.0,
        description="Time without a message after which a host counts as lost, and its ranks end themselves. TCP may "
        "notice the end of an outage late: with 60 an outage of 25 seconds passes, with 150 one of 60.",
    )
    grace_seconds: NonNegativeFloat = Field(
        60.0, description="Time that ranks get after SIGTERM or SIGINT to finish their step and write a checkpoint."
    )
    restarts: Annotated[Int, Field(ge=0)] = Field(
        8,
        description="Automatic restarts of a failed run without a new checkpoint in between; 0 = never. There is no "
        "restart if the logs show a cause that would recur, or if the same step fails twice. A host that is lost or "
        "fails twice is replaced by a spare of the hostfile, or the run continues without it.",
    )
    restart_wait_seconds: NonNegativeFloat = Field(
        15.0,
        description="Wait before the first restart; it doubles each time, up to 10 minutes. Also the interval at "
        "which a lost host is asked whether it is back.",
    )
    host_failures: Annotated[Int, Field(ge=2)] = Field(
        2,
        description="Failures of a host in one `finlm train` after which the run continues without it, even if it "
        "still answers.",
    )
    notify: str | None = Field(
        None,
        description="Shell command to run on this machine at every incident, restart and end of the run, with "
        "FINLM_EVENT, FINLM_RUN and FINLM_TEXT in its environment.",
    )


class Recipe(Section):
    """A run, fully determined together with a hostfile."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,99}$", description="Short name; the prefix of run directories.")
    description: str = Field("", description="One-line description.")
    forked_from: str | None = Field(
        None, description="The recipe this one was made from, path@sha256; written by `finlm new`."
    )
    stage: Literal["pretrain", "sft", "dpo", "reward", "grpo"] = Field("pretrain", description="Kind of training.")
    hardware: Hardware
    model: Model
    tokenizer: Tokenizer = Field(default_factory=Tokenizer)
    data: Data
    batch: Batch
    optim: Optim
    chat: Chat | None = Field(None, description="How dialogues become text, in stages after pretraining.")
    sft: Sft | None = Field(None, description="Labels and packing of dialogues, in stage sft.")
    dpo: Dpo | None = Field(None, description="Direct preference optimization, in stage dpo.")
    reward: Reward | None = Field(None, description="Training a reward model, in stage reward.")
    grpo: Grpo | None = Field(None, description="Reinforcement learning from rewards, in stage grpo.")
    lora: Lora | None = Field(None, description="Train low-rank adapters; absent = train every weight.")
    zero: Zero = Field(default_factory=Zero)
    train: Train
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    eval: Eval = Field(default_factory=Eval)
    incidents: Incidents = Field(
        default_factory=Incidents, description="What to do about loss spikes, slow ranks and wrong results."
    )
    record: Record = Field(default_factory=Record, description="Trackers that metrics are sent to.")
    expect: Expect | None = Field(None, description="Results that every run of this recipe is checked against.")
    env: Environment = Field(
        default_factory=dict,
        description="Environment variables of every rank. They are written in plain text to the run directory: no "
        "passwords here.",
    )
    hosts: dict[str, HostAccess] = Field(
        default_factory=dict, description="Settings of single hosts, by hostfile name."
    )
    launch: Launch = Field(default_factory=Launch, description="How ranks are started, watched and restarted.")
    self_qa: SelfQA | None = Field(
        None, description="Questions and answers that `self-qa` generates from the documents."
    )

    @property
    def sequences_per_row(self) -> int:
        """Sequences in a row that is not packed: 2 in stages dpo and reward, whose rows are pairs, else 1."""
        return 2 if self.stage in ("dpo", "reward") else 1

    @property
    def uses_of_row(self) -> int:
        """How many rows of a run's steps an epoch makes of one row: in grpo generations times iterations, else 1."""
        return self.grpo.generations * self.grpo.iterations if self.grpo is not None else 1

    @classmethod
    def read(cls, path: Path) -> Recipe:
        """Return the recipe of a run directory, in which every key is written; recipe.load reads what people write.

        Raises UserError when another version of finlm wrote it, with other keys, YAMLError when it is no YAML, and
        OSError when it cannot be read.
        """
        try:
            return _parse(path.read_text(encoding="utf-8"))
        except ValidationError as error:
            keys = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()]
            raise UserError(
                f"cannot read {path}", evidence="\n".join(keys), fix="use the version that made it: the run's code/"
            ) from None


@functools.lru_cache(maxsize=2)  # a rank asks for the same one several times: 0.2 s each
def _parse(text: str) -> Recipe:
    """Return the recipe in a YAML text with every key; cached. Raises ValidationError, YAMLError if it is no YAML."""
    return Recipe.model_validate(YAML(typ="safe").load(text))
