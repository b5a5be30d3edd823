"""Name the values of a recipe that training reads, as types; recipe.schema.Recipe has them all.

What trains imports this and not the schema, with its keys for data and launch, its descriptions and its checks. The
units and meanings are the schema's (docs/recipe-reference.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from finlm.recipe.models import traits


class ModelSettings(Protocol):
    """The keys of `model`: its shape, and what it starts from."""

    @property
    def init_from(self) -> str | None: ...
    @property
    def revision(self) -> str | None: ...
    @property
    def config(self) -> Mapping[str, Any] | None: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int | None: ...
    @property
    def ffn_size(self) -> int: ...
    @property
    def tie_embeddings(self) -> bool: ...
    @property
    def rope_theta(self) -> float: ...
    @property
    def former_rope_theta(self) -> float | None: ...
    @property
    def norm_eps(self) -> float: ...
    @property
    def init_std(self) -> float: ...


class MixtureStage(Protocol):
    """A stage of `data.mixture`: each source's weight or tokens, and the stage's share of the run."""

    @property
    def weights(self) -> Mapping[str, float] | None: ...
    @property
    def to(self) -> Mapping[str, float] | None: ...
    @property
    def tokens(self) -> Mapping[str, int] | None: ...
    @property
    def share(self) -> float | None: ...


class DataSettings(Protocol):
    """The keys of `data` by which prepared shards become rows."""

    @property
    def packing(self) -> Literal["concat", "blocks", "best_fit"]: ...
    @property
    def mixture(self) -> Sequence[MixtureStage]: ...
    @property
    def document_masks(self) -> bool: ...


class BatchSettings(Protocol):
    """The keys of `batch`."""

    @property
    def sequence_length(self) -> int: ...
    @property
    def tokens_per_step(self) -> int: ...


class OptimSettings(Protocol):
    """The keys of `optim` that the advice about a gradient overflow names; DeepSpeed reads all from ds_config.json."""

    @property
    def lr(self) -> float: ...
    @property
    def warmup_steps(self) -> int: ...


class LossScaling(Protocol):
    """The keys of `train.fp16`."""

    @property
    def loss_scale(self) -> float: ...


class TrainSettings(Protocol):
    """The keys of `train` that the plan does not decide."""

    @property
    def seed(self) -> int: ...
    @property
    def deterministic(self) -> bool: ...
    @property
    def fp16(self) -> LossScaling: ...


class CheckpointSettings(Protocol):
    """The keys of `checkpoint`, as schema.Checkpoint describes them."""

    @property
    def every_steps(self) -> int | None: ...
    @property
    def keep_last(self) -> int: ...
    @property
    def keep_every_steps(self) -> int | None: ...
    @property
    def copies(self) -> int: ...
    @property
    def memory_minutes(self) -> float | Literal["auto"] | None: ...
    @property
    def memory_directory(self) -> str: ...
    @property
    def asynchronous(self) -> bool: ...


class EvalSettings(Protocol):
    """The keys of `eval` that evaluation on held-out data reads."""

    @property
    def every_steps(self) -> int | None: ...
    @property
    def max_tokens_per_source(self) -> int: ...


class SpikeSettings(Protocol):
    """The keys of `incidents.spike`."""

    @property
    def z_score(self) -> float: ...
    @property
    def window(self) -> int: ...
    @property
    def then(self) -> Literal["record", "stop", "skip", "roll_back"]: ...
    @property
    def roll_back_steps(self) -> int: ...


class StragglerSettings(Protocol):
    """The keys of `incidents.straggler`."""

    @property
    def ratio(self) -> float: ...
    @property
    def steps(self) -> int: ...


class CorruptionSettings(Protocol):
    """The keys of `incidents.corruption`."""

    @property
    def every_steps(self) -> int | None: ...


class IncidentSettings(Protocol):
    """The keys of `incidents`, without those of stage grpo."""

    @property
    def stop_after(self) -> int: ...
    @property
    def spike(self) -> SpikeSettings: ...
    @property
    def straggler(self) -> StragglerSettings: ...
    @property
    def corruption(self) -> CorruptionSettings: ...


class TokenizerSettings(Protocol):
    """The keys of `tokenizer` that change the model."""

    @property
    def extend_to(self) -> int | None: ...


class SftSettings(Protocol):
    """The keys of `sft` that change attention."""

    @property
    def hide_eos(self) -> bool: ...


class Settings(Protocol):
    """The values of a recipe that training reads, in every stage."""

    @property
    def stage(self) -> str: ...
    @property
    def sequences_per_row(self) -> int: ...
    @property
    def model(self) -> ModelSettings: ...
    @property
    def tokenizer(self) -> TokenizerSettings: ...
    @property
    def data(self) -> DataSettings: ...
    @property
    def batch(self) -> BatchSettings: ...
    @property
    def optim(self) -> OptimSettings: ...
    @property
    def train(self) -> TrainSettings: ...
    @property
    def checkpoint(self) -> CheckpointSettings: ...
    @property
    def eval(self) -> EvalSettings: ...
    @property
    def incidents(self) -> IncidentSettings: ...
    @property
    def sft(self) -> SftSettings | None: ...


def config_of(model: ModelSettings) -> traits.Config:
    """Return config.json of a recipe's model, without vocab_size and special tokens. UserError for an unknown type."""
    config = dict(model.config or {"model_type": "llama"})
    row = traits.record_of(config)
    config |= {
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads or model.heads,
        row.ffn_key: model.ffn_size,
        "tie_word_embeddings": model.tie_embeddings,
        "initializer_range": model.init_std,
    }
    for key in traits.NORM_EPS:
        if row.defaults.get(key) is not None:  # where it is null, the class takes its norms' other kind
            config[key] = model.norm_eps
    is_scratch = model.init_from is None and "rope_parameters" not in row.defaults  # which has kinds of layers
    if is_scratch or model.former_rope_theta is not None:
        return traits.with_rope_theta(config, model.rope_theta)
    return config
