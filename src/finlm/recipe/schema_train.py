"""What a recipe may say about the stages after pretraining, incidents, promised numbers and trackers.

In stages dpo and reward a row is a pair: its two sequences have half of batch.sequence_length each, and the
micro-batch counts pairs. In stage grpo a row is one prompt with one answer; grpo says what answers earn and how they
are learnt from.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, Strict

from finlm.recipe.schema_data import Auto, Fraction, Int, Positive, Section


class Chat(Section):
    """How a dialogue becomes text; training, evaluation and chat share it."""

    template: str = Field(
        "xuanyuan",
        description="xuanyuan, llm-code, zephyr, chatml, llama2, llama3, deepseek-r1, model (its own) or a Jinja file.",
    )
    system: str | None = Field(
        None, description="System prompt of the dialogues that bring none, in training and, by the template, in use."
    )
    overlong: Literal["split", "drop", "truncate"] = Field(
        "split",
        description="Dialogues longer than a row: split between turns, left out, or cut (the answer's end goes).",
    )


class Sft(Section):
    """Which tokens of a dialogue are learnt from, and how dialogues fill rows.

    The keys after `profile` repeat mistakes of the XuanYuan project's released llm-code, for faithful reproductions.
    """

    assistant_only_loss: bool = Field(True, description="Only the assistant's words and end of turn are learnt from.")
    packing: bool = Field(True, description="A row holds several dialogues, none of which sees another.")
    profile: Literal["corrected", "faithful"] = Field(
        "corrected", description="faithful: the label lint reports what the keys below break, but does not refuse it."
    )
    answer_apart: bool = Field(
        False, description="Prompt and answer tokenised apart: </s> and <s> before the answer, </s> after it."
    )
    pad_labels: bool = Field(False, description="A row's padding is </s>, and counts in the loss; needs no packing.")
    hide_eos: bool = Field(
        False, description="The attention mask hides every </s>, not only padding; needs no packing."
    )
    mask_eos: bool = Field(False, description="No label that is </s> counts, so that no end is learnt.")
    tokenizer: Literal["auto", "sentencepiece", "tokenizers"] = Field(
        "auto", description="Library that encodes: auto takes tokenizer.json where there is one, else tokenizer.model."
    )
    order: Literal["stateless", "sampler"] = Field(
        "stateless", description="sampler: torch's DistributedSampler; an epoch repeats rows until the ranks divide it."
    )


Linear = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Lora(Section):
    """Low-rank adapters (arXiv 2106.09685) instead of training every weight."""

    rank: Positive = Field(16, description="Rank of the adapters.")
    alpha: Positive = Field(32, description="Scale of the adapters: alpha / rank.")
    dropout: Fraction = Field(0.0, description="Dropout before the adapters.")
    targets: Annotated[tuple[Linear, ...], Strict(False), Field(min_length=1)] = Field(
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        description="Linear layers that get one.",
    )
    quantize: Literal["none", "nf4"] = Field(
        "none", description="nf4: the decoder's frozen matrices in 4 bits (QLoRA, arXiv 2305.14314)."
    )


Coefficient = Annotated[float, Field(ge=0)]


class Dpo(Section):
    """Direct preference optimization (arXiv 2305.18290), or ORPO (arXiv 2403.07691)."""

    beta: Annotated[float, Field(gt=0)] = Field(
        0.1, description="How strongly the policy is held to its start; of orpo the weight of the odds ratio."
    )
    loss: Literal["sigmoid", "hinge", "ipo", "robust", "apo_zero", "sigmoid_norm", "orpo"] = Field(
        "sigmoid",
        description="Loss of a pair, by trl's names; sigmoid is DPO's paper's. orpo: SFT on the chosen answer and the "
        "odds ratio of both, without a reference.",
    )
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = Field(
        0.0, description="Share of pairs labelled the wrong way round; robust only."
    )


class Reward(Section):
    """A reward model: the start's body with a linear head on the last token, by the Bradley-Terry loss."""

    margin: Coefficient = Field(0.0, description="By how much the chosen answer must be ahead; XuanYuan-6B: 0.5.")
    center: Coefficient = Field(
        0.0, description="Weight of the squared sum of a pair's rewards, which keeps them around 0."
    )


class Spike(Section):
    """A loss far above the recent ones."""

    z_score: Annotated[float, Field(gt=0)] = Field(
        8.0, description="Deviations (1.4826 MAD, at least 1 % of the median) above the median that make a spike."
    )
    window: Annotated[Int, Field(ge=10)] = Field(100, description="Recent steps that median and MAD are taken of.")
    then: Literal["record", "stop", "skip", "roll_back"] = Field(
        "record",
        description="record: only name it. skip: leave the weights as they were. roll_back: go back to a checkpoint "
        "roll_back_steps before it and leave out the data since. stop: end the run.",
    )
    roll_back_steps: Annotated[Int, Field(ge=0)] = Field(
        0, description="Steps before the spike that the checkpoint must be at least, for then: roll_back."
    )


class Straggler(Section):
    """A rank that is slower than the others for long."""

    ratio: Annotated[float, Field(gt=1)] = Field(1.3, description="Own time over the ranks' median that is slow.")
    steps: Positive = Field(50, description="Steps whose median counts.")


class Corruption(Section):
    """Ranks that compute wrongly without an error, in pretraining below ZeRO-3."""

    every_steps: Positive | None = Field(
        200,
        description="Steps after which neighbours compute each other's gradients and compare the bits, or the norms "
        "where kernels are not deterministic; null: never.",
    )


class Rollouts(Section):
    """Answers that game the reward, against the first steps of the run; in stages that learn from own answers."""

    length: Annotated[float, Field(gt=1)] = Field(2.0, description="Times the first steps' length that is told.")
    entropy: Fraction = Field(0.1, description="Share of the first steps' entropy below which it is told.")
    repetition: Fraction = Field(0.3, description="Share of repeated text above which it is told.")
    mismatch: Annotated[float, Field(gt=0)] = Field(
        0.1, description="Nats a token by which rollout and trainer may differ in the mean of a step."
    )
    unanswered: Fraction = Field(0.3, description="Share of answers that name none above which it is told.")


class Incidents(Section):
    """What is done about trouble in a step. A step whose loss or gradient is not finite never changes the weights."""

    stop_after: Positive = Field(
        5, description="The run ends at the first incident after so many: skipped steps of the last 100, or roll backs."
    )
    spike: Spike = Field(default_factory=Spike, description="Loss spikes.")
    straggler: Straggler = Field(default_factory=Straggler, description="Slow ranks.")
    corruption: Corruption = Field(default_factory=Corruption, description="Ranks that compute wrongly.")
    rollouts: Rollouts = Field(default_factory=Rollouts, description="Answers that game the reward.")


def _steps(value: object) -> object:
    """Return a mapping with its numeric keys as integers: YAML keys arrive as words."""
    if not isinstance(value, dict):
        return value
    return {
        int(key) if isinstance(key, str) and key.isascii() and key.isdecimal() else key: loss
        for key, loss in value.items()
    }


def _interval(value: object) -> object:
    """Return the value unchanged. Raises ValueError unless it is a number or [lowest, highest], in this order."""
    ends = value if isinstance(value, (list, tuple)) else [value]
    if not all(type(end) in (int, float) for end in ends) or len(ends) != (2 if ends is value else 1):
        raise ValueError(f"should be a number or [lowest, highest], got {value!r}")
    if list(ends) != sorted(ends):
        raise ValueError(f"the lowest value comes first: {sorted(ends)}, not {value!r}")
    return value


def _share(value: float | tuple[float, float]) -> float | tuple[float, float]:
    if not all(0 <= end <= 1 for end in (value if isinstance(value, tuple) else (value,))):
        raise ValueError(f"a share lies between 0 and 1, got {value!r}")
    return value


Number = Annotated[float | Annotated[tuple[float, float], Strict(False)], BeforeValidator(_interval)]
Share = Annotated[Number, AfterValidator(_share)]
Losses = Annotated[dict[int, Number], BeforeValidator(_steps)]


class Expect(Section):
    """Holds for the recipe as it is written: a run whose --set changes the training is not checked.

    A value is [lowest, highest], or a number that may be missed by the tolerance.
    """

    hardware: str | None = Field(
        None, description="Where it was measured: cpu, or a part of the GPU's name; elsewhere nothing is checked."
    )
    origin: str = Field("", description="Which runs the values come from: how many, on what, and what they had apart.")
    loss: Losses = Field(default_factory=dict, description="Training loss by optimizer step.")
    before: dict[str, Number] = Field(
        default_factory=dict,
        description="Held-out loss by source before the first step: that of the model a run starts from.",
    )
    held_out: dict[str, Number] = Field(
        default_factory=dict, description="Held-out loss of the last evaluation by source; `all` is the total."
    )
    accuracy: dict[str, Share] = Field(
        default_factory=dict,
        description="Share of held-out pairs in the right order at the last evaluation, by source.",
    )
    reward: dict[str, Number] = Field(
        default_factory=dict, description="Mean reward of held-out prompts at the last evaluation, by source."
    )
    rise: dict[str, Number] = Field(
        default_factory=dict,
        description="What answers drawn to held-out prompts earn more at the last evaluation than before the first "
        "step, by source.",
    )
    suites: dict[str, Share] = Field(
        default_factory=dict, description="Share of right answers after training, over all questions, by suite."
    )
    suite_tolerance: Annotated[float, Field(ge=0)] = Field(
        0.03, description="Difference allowed in a share (suites, accuracy) that is a number."
    )
    tolerance: Annotated[float, Field(ge=0)] = Field(
        0.02, description="Difference allowed in a loss or reward that is a number."
    )
    toy: Losses = Field(
        default_factory=dict, description="Training loss of `train --toy` by step, on a CPU, to 0.001 nats."
    )


Tracker = Literal["tensorboard", "wandb", "trackio"]


class Record(Section):
    """Trackers that get the metrics of events.jsonl as well, each from a process of its own beside the run."""

    tracking: Annotated[tuple[Tracker, ...], Strict(False)] = Field(
        (), description="tensorboard, wandb, trackio: any of them; the last two are optional packages."
    )
    project: str = Field("finlm", pattern=r"^[A-Za-z0-9._-]+$", description="Project in W&B and trackio.")
    online: bool = Field(
        False, description="W&B sends while the run goes on; otherwise it writes into the run, for `wandb sync`."
    )


CHECKED = ("option", "words", "number", "terms")  # rules that need the right answer of a row


class Term(Section):
    """One part of what an answer earns; the reward is the sum of all, each times its weight."""

    rule: Literal["option", "words", "number", "terms", "format", "length", "function", "model"] = Field(
        description="option: 1 for the right letter. words: 1 for the words of the right option and no other. number: "
        "1 for the right number in its unit. terms: F1 of a list. format: 1 for an answer that the pattern matches "
        "whole. length: 1 up to `most` tokens, falling to 0 at max_new_tokens. function: a Python function of yours. "
        "model: a reward model."
    )
    weight: float = Field(1.0, description="Factor of the term in the reward; below 0 it costs.")
    tolerance: Annotated[float, Field(ge=0, lt=1)] | None = Field(
        None, description="number: share of the right number that may be missed; 0.001 when absent."
    )
    pattern: str | None = Field(None, description="format: regular expression, in which . is any character.")
    most: Positive | None = Field(None, description="length: tokens that cost nothing.")
    path: str | None = Field(
        None,
        description="function: FILE.py:NAME, called with prompts, completions, answers. model: the directory of a run "
        "or export, or a recipe of stage reward, which stands for its newest finished run and is trained first.",
    )
    sha256: str | None = Field(None, description="function: hash of the file, filled in; another file is refused.")

    @property
    def name(self) -> str:
        """The term's name in events: the function's name for a rule `function`, else the rule."""
        return str(self.path).rpartition(":")[2] if self.rule == "function" else self.rule

    @property
    def file(self) -> str:
        """The file of a function in `path`, without the function's name."""
        return str(self.path).rpartition(":")[0]


def terms_of(value: Any) -> Any:
    """Return reward terms as a list of mappings; a word is a rule (choice: option), else a model's directory.

    Values of other types are returned unchanged.
    """
    values = [value] if isinstance(value, (str, dict)) else value
    if not isinstance(values, (list, tuple)):
        return value
    rules = {"choice": "option"} | {rule: rule for rule in CHECKED}
    return [
        ({"rule": rules[each]} if each in rules else {"rule": "model", "path": each}) if isinstance(each, str) else each
        for each in values
    ]


class Ppo(Section):
    """The value head of proximal policy optimization (arXiv 1707.06347, 1506.02438); of form ppo."""

    gamma: Fraction = Field(1.0, description="Discount of a later token's reward.")
    gae_lambda: Fraction = Field(0.95, description="How far an advantage trusts rewards over values: 1 = rewards only.")
    value_weight: Coefficient = Field(0.1, description="Weight of the value head's loss.")
    value_clip: Annotated[float, Field(gt=0)] = Field(0.2, description="Most that a value may move in an update.")


class Grpo(Section):
    """Group relative policy optimization (arXiv 2402.03300): answers of one prompt are judged against each other."""

    reward: Annotated[tuple[Term, ...], Strict(False), BeforeValidator(terms_of), Field(min_length=1)] = Field(
        default_factory=lambda: (Term(rule="option"),),
        description="What an answer is worth: terms. A word is a term of that rule (option, also called choice; "
        "words; number; terms), other text a reward model, as `path` names it. option when absent.",
    )
    form: Literal["dapo", "grpo", "dr-grpo", "gspo", "ppo"] = Field(
        "dapo",
        description="How answers of a step are weighed, as trl has it. dapo: every token alike (arXiv 2503.14476). "
        "grpo: every answer alike. dr-grpo: by max_new_tokens, and rewards not by their deviation (2503.20783). gspo: "
        "one ratio an answer (2507.18071). ppo: an advantage a token, by a value head.",
    )
    engine: Literal["transformers", "vllm", "vllm-server"] = Field(
        "transformers",
        description="What generates the answers. transformers: the training weights, where they are. vllm: vLLM on the "
        "same GPUs; vllm-server: one that `trl vllm-serve` runs at `server`. vLLM is an optional package, and no seed "
        "of the recipe decides what it draws.",
    )
    server: str | None = Field(None, description="Address of the server of engine vllm-server, http://HOST:PORT.")
    generations: Annotated[Int, Field(ge=2)] = Field(8, description="Answers a prompt.")
    max_new_tokens: Positive = Field(64, description="Tokens an answer has at most.")
    temperature: Annotated[float, Field(gt=0)] = Field(1.0, description="Sampling temperature.")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(1.0, description="Nucleus of the sampling.")
    held_out_answers: Annotated[Int, Field(ge=0)] = Field(
        1,
        description="Answers drawn as in training to each held-out prompt, beside the likeliest: what they earn more "
        "than before the first step is the rise. 0 = none.",
    )
    beta: Coefficient = Field(
        0.0,
        description="Weight of the divergence from the start, with ppo in the reward of each token; above 0 a second "
        "copy of the model is held.",
    )
    epsilon: Annotated[Fraction, Field(gt=0)] = Field(
        0.2, description="Clip of the probability ratio; the paper of gspo has 0.0003."
    )
    epsilon_high: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Clip above 1; epsilon when absent, 0.28 in the paper of dapo, 0.0004 in that of gspo."
    )
    iterations: Positive = Field(1, description="Updates from the same answers.")
    importance_cap: Coefficient = Field(
        2.0,
        description="Most that an answer's token weighs for being likelier to the trainer than to what generated it "
        "(truncated importance sampling); 0 = no token is weighed.",
    )
    ppo: Ppo = Field(default_factory=Ppo, description="The value head; of form ppo.")
    generation_rows: Positive | Auto = Field(
        "auto", description="Answers that a GPU generates at once; auto = as many as have room for keys and values."
    )

    @property
    def checked(self) -> tuple[str, ...]:
        """The rules that need a right answer, in the order of the terms; empty where none does."""
        return tuple(dict.fromkeys(term.rule for term in self.reward if term.rule in CHECKED))
