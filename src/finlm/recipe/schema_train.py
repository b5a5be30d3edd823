"""What a recipe may say about the stages after pretraining, incidents, promised numbers and trackers.

In stages dpo and reward a row is a pair: its two sequences have half of batch.sequence_length each, and the
micro-batch counts pairs. In stage grpo a row is one prompt with one answer; grpo says what answers earn and how they
are learnt from.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, NonNegativeFloat, PositiveFloat, Strict

from finlm.recipe.schema_data import Auto, Fraction, Int, Positive, Section


class Chat(Section):
    """How a dialogue becomes text, in training, evaluation and chat alike."""

    template: str = Field(
        "xuanyuan",
        description="Chat template: xuanyuan, llm-code, zephyr, chatml, llama2, llama3, deepseek-r1, model (the start "
        "model's) or a Jinja file.",
    )
    system: str | None = Field(
        None, description="System prompt of dialogues without one, in training and (written into the template) in use."
    )
    overlong: Literal["split", "drop", "truncate"] = Field(
        "split",
        description="What happens to dialogues longer than a row: split between turns, drop, or truncate (which loses "
        "the end of the answer).",
    )


class Sft(Section):
    """Which tokens of a dialogue count in the loss, and how dialogues fill rows.

    The keys after `profile` repeat mistakes of the XuanYuan project's released llm-code, for faithful reproductions.
    """

    assistant_only_loss: bool = Field(
        True, description="Count only the assistant's tokens and end of turn in the loss."
    )
    packing: bool = Field(True, description="Put several dialogues in a row; they do not see each other.")
    profile: Literal["corrected", "faithful"] = Field(
        "corrected", description="faithful: the label lint reports what the keys below break, but does not refuse it."
    )
    answer_apart: bool = Field(
        False, description="Tokenise prompt and answer separately: </s> and <s> before the answer, </s> after it."
    )
    pad_labels: bool = Field(
        False, description="Pad rows with </s> and count the padding in the loss; needs packing: false."
    )
    hide_eos: bool = Field(
        False, description="Hide every </s> by the attention mask, not only padding; needs packing: false."
    )
    mask_eos: bool = Field(
        False, description="Leave every </s> out of the loss; the model then does not learn to stop."
    )
    tokenizer: Literal["auto", "sentencepiece", "tokenizers"] = Field(
        "auto", description="Library that encodes. auto: by tokenizer.json if there is one, else by tokenizer.model."
    )
    order: Literal["stateless", "sampler"] = Field(
        "stateless",
        description="Order of rows. sampler: as torch's DistributedSampler, which repeats rows until the ranks divide "
        "an epoch.",
    )


Linear = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Lora(Section):
    """Low-rank adapters (arXiv 2106.09685) instead of training every weight."""

    rank: Positive = Field(16, description="Rank of the adapters.")
    alpha: Positive = Field(32, description="Scale of the adapters: alpha / rank.")
    dropout: Fraction = Field(0.0, description="Dropout before the adapters.")
    targets: Annotated[tuple[Linear, ...], Strict(False), Field(min_length=1)] = Field(
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        description="Linear layers with adapters.",
    )
    quantize: Literal["none", "nf4"] = Field(
        "none", description="nf4: keep the decoder's frozen matrices in 4 bits (QLoRA, arXiv 2305.14314)."
    )


class Dpo(Section):
    """Direct preference optimization (arXiv 2305.18290), or ORPO (arXiv 2403.07691)."""

    beta: PositiveFloat = Field(
        0.1, description="Strength of the KL penalty towards the start model; for orpo, the weight of the odds ratio."
    )
    loss: Literal["sigmoid", "hinge", "ipo", "robust", "apo_zero", "sigmoid_norm", "orpo"] = Field(
        "sigmoid",
        description="Loss of a pair, by trl's names; sigmoid is the loss of the DPO paper. orpo: SFT on the chosen "
        "answer plus the odds ratio of both, without a reference model.",
    )
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = Field(
        0.0, description="Share of pairs assumed to be labelled the wrong way round; only for robust."
    )


class Reward(Section):
    """A reward model: the start model with a linear head on the last token, trained by the Bradley-Terry loss."""

    margin: NonNegativeFloat = Field(
        0.0, description="Margin by which the chosen answer should score higher; XuanYuan-6B used 0.5."
    )
    center: NonNegativeFloat = Field(
        0.0, description="Weight of the squared sum of a pair's rewards, a penalty that keeps rewards around 0."
    )


class Spike(Section):
    """A loss far above recent losses."""

    z_score: PositiveFloat = Field(
        8.0,
        description="Deviations above the median from which a loss is a spike; a deviation is 1.4826 MAD, at least 1 "
        "% of the median.",
    )
    window: Annotated[Int, Field(ge=10)] = Field(100, description="Recent steps for median and MAD.")
    then: Literal["record", "stop", "skip", "roll_back"] = Field(
        "record",
        description="record: only record it. skip: do not update the weights. roll_back: return to a checkpoint at "
        "least roll_back_steps before the spike and skip the data since. stop: end the run.",
    )
    roll_back_steps: Annotated[Int, Field(ge=0)] = Field(
        0, description="Minimum steps between checkpoint and spike, for then: roll_back."
    )


class Straggler(Section):
    """A rank that stays slower than the others."""

    ratio: Annotated[float, Field(gt=1)] = Field(
        1.3, description="Ratio of a rank's time to the median of the ranks above which it is slow."
    )
    steps: Positive = Field(50, description="Steps over which the median is taken.")


class Corruption(Section):
    """Silent data corruption: ranks that compute wrong results without an error. In pretraining, below ZeRO-3."""

    every_steps: Positive | None = Field(
        200,
        description="Steps between checks, in which neighbouring ranks compute the same gradients and compare bits, "
        "or norms if kernels are not deterministic; null = never.",
    )


class Rollouts(Section):
    """Reward hacking, compared with the first steps of the run, in stage grpo."""

    length: Annotated[float, Field(gt=1)] = Field(
        2.0, description="Ratio of answer length to the first steps' above which an incident is recorded."
    )
    entropy: Fraction = Field(
        0.1, description="Ratio of entropy to the first steps' below which an incident is recorded."
    )
    repetition: Fraction = Field(0.3, description="Share of repeated text above which an incident is recorded.")
    mismatch: PositiveFloat = Field(
        0.1,
        description="Mean difference between the log-probabilities of rollout and trainer above which an incident is "
        "recorded, in nats per token.",
    )
    unanswered: Fraction = Field(
        0.3, description="Share of answers without a conclusion above which an incident is recorded."
    )


class Incidents(Section):
    """What to do about trouble. A step whose loss or gradient is not finite never changes the weights."""

    stop_after: Positive = Field(
        5,
        description="End the run at the next incident after this many skipped steps among the last 100, or this many "
        "rollbacks.",
    )
    spike: Spike = Field(default_factory=Spike, description="Loss spikes.")
    straggler: Straggler = Field(default_factory=Straggler, description="Slow ranks.")
    corruption: Corruption = Field(default_factory=Corruption, description="Ranks that compute wrongly.")
    rollouts: Rollouts = Field(default_factory=Rollouts, description="Reward hacking.")


def _steps(value: object) -> object:
    """Return a mapping with its numeric keys as integers: YAML keys arrive as words. Other values stay as they are."""
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
    """Return the value unchanged. Raises ValueError unless the number, or both ends, lie between 0 and 1."""
    if not all(0 <= end <= 1 for end in (value if isinstance(value, tuple) else (value,))):
        raise ValueError(f"a share lies between 0 and 1, got {value!r}")
    return value


Number = Annotated[float | Annotated[tuple[float, float], Strict(False)], BeforeValidator(_interval)]
Share = Annotated[Number, AfterValidator(_share)]
Losses = Annotated[dict[int, Number], BeforeValidator(_steps)]


class Expect(Section):
    """Expected results of exactly this recipe; a run with a --set that changes the training is not checked.

    A value is [lowest, highest], or a number that may be missed by the tolerance.
    """

    hardware: str | None = Field(
        None,
        description="Hardware of the measurement: cpu, or part of a GPU's name; on other hardware nothing is checked.",
    )
    origin: str = Field(
        "", description="Runs that the values come from: how many, on which hardware, and how they differed."
    )
    loss: Losses = Field(default_factory=dict, description="Training loss by optimizer step.")
    before: dict[str, Number] = Field(
        default_factory=dict, description="Held-out loss by source before the first step, thus of the start model."
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
        description="Increase of the reward of sampled answers to held-out prompts, from before the first step to the "
        "last evaluation, by source.",
    )
    suites: dict[str, Share] = Field(
        default_factory=dict, description="Share of correct answers after training, over all questions, by suite."
    )
    suite_tolerance: NonNegativeFloat = Field(
        0.03, description="Allowed difference of a share (suites, accuracy) given as a single number."
    )
    tolerance: NonNegativeFloat = Field(
        0.02, description="Allowed difference of a loss or reward given as a single number."
    )
    toy: Losses = Field(
        default_factory=dict, description="Training loss of `train --toy` by step, on a CPU, to 0.001 nats."
    )


Tracker = Literal["tensorboard", "wandb", "trackio"]


class Record(Section):
    """Trackers that receive the metrics of events.jsonl, each from a separate process."""

    tracking: Annotated[tuple[Tracker, ...], Strict(False)] = Field(
        (), description="Any of tensorboard, wandb and trackio; the last two are optional packages."
    )
    project: str = Field("finlm", pattern=r"^[A-Za-z0-9._-]+$", description="Project in W&B and trackio.")
    online: bool = Field(
        False, description="Send to W&B during the run; otherwise write into the run directory, for `wandb sync`."
    )


CHECKED = ("option", "words", "number", "terms")  # rules that need the right answer of a row


class Term(Section):
    """A term of the reward; the reward is the weighted sum of all terms."""

    rule: Literal["option", "words", "number", "terms", "steps", "format", "length", "function", "model"] = Field(
        description="option: 1 for the right letter. words: 1 for the words of the right option and no other. number: "
        "1 for the right number in its unit. terms: F1 of a list. steps: share of the equations in the answer that are "
        "right. format: 1 if the pattern matches the whole answer. length: 1 up to `most` tokens, falling to 0 at "
        "max_new_tokens. function: your Python function. model: a reward model."
    )
    weight: float = Field(1.0, description="Weight of the term; a negative one is a penalty.")
    tolerance: Annotated[float, Field(ge=0, lt=1)] | None = Field(
        None, description="number: relative error allowed; absent = 0.001."
    )
    pattern: str | None = Field(None, description="format: regular expression, in which . also matches a newline.")
    most: Positive | None = Field(None, description="length: tokens without a penalty.")
    path: str | None = Field(
        None,
        description="function: FILE.py:NAME, called with prompts, completions, answers. model: a run, an export, or a "
        "recipe of stage reward, whose newest finished run is used and which is trained first if there is none.",
    )
    sha256: str | None = Field(
        None, description="function: hash of the file, filled in by finlm; another file is refused."
    )

    @property
    def name(self) -> str:
        """The term's name in events: the function's name for a rule `function`, else the rule."""
        return str(self.path).rpartition(":")[2] if self.rule == "function" else self.rule

    @property
    def file(self) -> str:
        """The file of a function in `path`, without the function's name."""
        return str(self.path).rpartition(":")[0]


def terms_of(value: Any) -> Any:
    """Return reward terms as a list of mappings; values of other types than text, mapping and list unchanged.

    A text is the name of a rule (`choice` that of the rule `option`), else the path of a reward model.
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
    """The value head of proximal policy optimization (arXiv 1707.06347, 1506.02438), for form ppo."""

    gamma: Fraction = Field(1.0, description="Discount factor of rewards.")
    gae_lambda: Fraction = Field(0.95, description="Lambda of generalized advantage estimation; 1 = rewards only.")
    value_weight: NonNegativeFloat = Field(0.1, description="Weight of the value head's loss.")
    value_clip: PositiveFloat = Field(0.2, description="Clip of a value's change in an update.")


class Grpo(Section):
    """Group relative policy optimization (arXiv 2402.03300): the answers to a prompt are compared with each other."""

    reward: Annotated[tuple[Term, ...], Strict(False), BeforeValidator(terms_of), Field(min_length=1)] = Field(
        default_factory=lambda: (Term(rule="option"),),
        description="Terms of the reward. A single word is a term with that rule (option, also called choice; words; "
        "number; terms); any other text is the path of a reward model. Absent = option.",
    )
    form: Literal["dapo", "grpo", "dr-grpo", "gspo", "ppo"] = Field(
        "dapo",
        description="Form of the loss, by trl's names. dapo: every token has the same weight (arXiv 2503.14476). "
        "grpo: every answer has. dr-grpo: divided by max_new_tokens, rewards not divided by their deviation "
        "(2503.20783). gspo: one ratio per answer (2507.18071). ppo: one advantage per token, from a value head.",
    )
    engine: Literal["transformers", "vllm", "vllm-server"] = Field(
        "transformers",
        description="What generates the answers. transformers: the training process itself. vllm: vLLM on the same "
        "GPUs. vllm-server: a `trl vllm-serve` at `server`. vLLM is an optional package, and its sampling does not "
        "follow the recipe's seed.",
    )
    server: str | None = Field(None, description="Address of the server of engine vllm-server, http://HOST:PORT.")
    generations: Annotated[Int, Field(ge=2)] = Field(8, description="Answers per prompt.")
    max_new_tokens: Positive = Field(64, description="Maximum tokens of an answer.")
    temperature: PositiveFloat = Field(1.0, description="Sampling temperature.")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(1.0, description="Nucleus sampling.")
    held_out_answers: Annotated[Int, Field(ge=0)] = Field(
        1,
        description="Answers sampled for each held-out prompt, besides the greedy one. `rise` is how much more reward "
        "they earn than before the first step. 0 = none.",
    )
    beta: NonNegativeFloat = Field(
        0.0,
        description="Weight of the KL divergence from the start model (with ppo, in the reward of each token); above "
        "0 a second copy of the model is held.",
    )
    epsilon: Annotated[Fraction, Field(gt=0)] = Field(
        0.2, description="Clip of the probability ratio; the GSPO paper uses 0.0003."
    )
    epsilon_high: PositiveFloat | None = Field(
        None, description="Upper clip of the ratio; absent = epsilon. The DAPO paper uses 0.28, the GSPO paper 0.0004."
    )
    iterations: Positive = Field(1, description="Optimizer steps per set of answers.")
    importance_cap: NonNegativeFloat = Field(
        2.0,
        description="Cap of the importance weight that corrects for differences between generator and trainer "
        "(truncated importance sampling); 0 = no correction.",
    )
    ppo: Ppo = Field(default_factory=Ppo, description="The value head of form ppo.")
    generation_rows: Positive | Auto = Field(
        "auto", description="Answers that a GPU generates at once; auto = as many as fit with their keys and values."
    )

    @property
    def checked(self) -> tuple[str, ...]:
        """The rules that need a right answer, in the order of the terms; empty where none does."""
        return tuple(dict.fromkeys(term.rule for term in self.reward if term.rule in CHECKED))
