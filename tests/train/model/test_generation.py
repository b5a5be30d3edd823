"""Answers that are generated together are those that each text alone gives, for every type of model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from finlm.admit import cells, command
from finlm.recipe.models import traits
from finlm.train.model import generation
from finlm.train.model.causal_lm import plain_attention
from finlm.train.model.generation import Answer, Drawing, Limits

VOCAB, MOST = 389, 6
ENDS = list(range(0, VOCAB, 9))
LONG = [5, 6, 7] * 9  # beyond the windows that shrink() leaves
PROMPTS = [LONG, [8], [9, 10, 11, 12, 13], [14, 15], [8], LONG, LONG]
KEYS = generation.row_keys("7/0", range(len(PROMPTS)))
DRAWING = Drawing(0.9, 0.95)


def make_model(name: str) -> Any:
    """A small model of a type, in evaluation mode."""
    row = traits.shipped()[name]
    small = cells.shrink(command.read_config(name)[0], row, VOCAB)
    return cells.build(small, plain_attention(small)).eval()


def generate(model: Any, rows: int, keys: torch.Tensor | None = KEYS, ends: list[int] = ENDS) -> list[Answer]:
    """Answers to PROMPTS, `rows` of them at once."""
    limits = Limits(MOST, ends, rows, len(LONG) + MOST, VOCAB)
    return generation.generate(model, PROMPTS, limits, keys, DRAWING if keys is not None else Drawing())


def check(model: Any, answers: list[Answer], keys: torch.Tensor | None, ends: list[int] = ENDS) -> None:
    """Each token and its log-probability are those that the whole text before it gives."""
    drawing = DRAWING if keys is not None else Drawing()
    for place, answer in enumerate(answers):
        count, tokens = len(answer.ids), torch.arange(len(answer.ids))
        with torch.no_grad():
            scores = model(torch.tensor([PROMPTS[place] + answer.ids]), use_cache=False).logits[0, -count - 1 : -1]
        chosen, log_probs = generation.choose(
            scores, None if keys is None else keys[place].repeat(count), tokens, drawing
        )
        assert answer.ids == chosen.tolist()
        torch.testing.assert_close(torch.tensor(answer.log_probs), log_probs, atol=1e-5, rtol=0)
        assert not set(answer.ids[:-1]) & set(ends)
        assert answer.ids[-1] in ends or count == MOST


@pytest.mark.parametrize("name", sorted(traits.shipped()))
def test_a_token_from_the_cache_is_that_of_the_whole_text(name: str) -> None:
    model = make_model(name)
    check(model, generate(model, 3), KEYS)


@pytest.mark.parametrize("name", sorted(name for name, row in traits.shipped().items() if row.linear))
def test_likeliest_answers_after_a_state_are_those_of_transformers_own_generate(name: str) -> None:
    model = make_model(name)
    answers = generate(model, 3, None)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        given = torch.tensor([prompt])
        how = {"do_sample": False, "max_new_tokens": MOST, "eos_token_id": ENDS, "pad_token_id": 0}
        whole = model.generate(given, attention_mask=torch.ones_like(given), **how)
        assert answer.ids == whole[0, len(prompt) :].tolist()


def test_answers_do_not_depend_on_how_many_are_generated_at_once() -> None:
    model = make_model("qwen2")
    each = [generate(model, rows) for rows in (1, 2, len(PROMPTS), 100)]
    assert all([answer.ids for answer in answers] == [answer.ids for answer in each[0]] for answers in each)
    lengths = {len(answer.ids) for answer in each[0]}
    assert len(lengths) > 1, "some end early, and their rows are given to others"
    likeliest = generate(model, 4, None)
    check(model, likeliest, None)
    said = [answer.ids for answer in likeliest]  # log-probabilities may differ by rounding
    assert said[0] == said[5] == said[6] != said[1] == said[4]
    assert all(len(answer.ids) == MOST for answer in generate(model, 4, ends=[]))


def test_the_model_is_left_as_it_was() -> None:
    model = make_model("llama")
    layer, attention = model.model.layers[0], model.config._attn_implementation
    layer.forward = own = lambda states, **_: states
    with pytest.raises(ValueError, match="too many dimensions"):  # in the middle of it
        generation.generate(model, [["no id"]], Limits(MOST, ENDS, 1, 99, VOCAB))  # type: ignore[list-item]
    assert layer.forward is own and "forward" not in model.model.layers[1].__dict__
    assert model.config._attn_implementation == attention
    assert not hasattr(layer.self_attn, "generation_bounds")


def test_what_is_drawn_follows_the_scores_and_depends_on_the_row_alone() -> None:
    count = 20_000
    scores, tokens = torch.tensor([2.0, 1.0, 0.0, -1.0]).repeat(count, 1), torch.full((count,), 2)
    keys = generation.row_keys("7/3", range(count))
    drawn, log_probs = generation.choose(scores, keys, tokens, Drawing())
    shares = drawn.bincount(minlength=4) / count
    torch.testing.assert_close(shares, scores[0].softmax(0), atol=0.01, rtol=0)
    torch.testing.assert_close(log_probs, scores.log_softmax(1).gather(1, drawn[:, None])[:, 0])
    noise = generation.noise(keys, tokens, 4)
    assert torch.equal(generation.noise(keys[5:7], tokens[5:7], 4), noise[5:7]), "whatever rows are beside it"
    assert not torch.equal(generation.noise(keys, tokens + 1, 4), noise), "every token has noise of its own"
    assert not torch.equal(generation.row_keys("7/4", range(count)), keys)
    torch.testing.assert_close(float(noise.mean()), 0.5772, atol=0.02, rtol=0)  # of Gumbel's distribution
    torch.testing.assert_close(float(noise.var()), torch.pi**2 / 6, atol=0.04, rtol=0)
    many = torch.arange(300), torch.full((300,), 5)
    noise = generation.noise(*many, 4096)
    shares = (-noise).exp().neg().exp()  # uniform
    assert float(shares.min()) > 0 and bool(noise.isfinite().all())
    counts = (shares * 256).long().clamp(max=255).flatten().bincount(minlength=256)
    expected = shares.numel() / 256
    assert 150 < float(((counts - expected) ** 2 / expected).sum()) < 380, "chi-squared of 255 degrees"
    beside = [noise.roll(1, 1), noise.roll(1, 0), generation.noise(many[0], many[1] + 1, 4096)]
    for other in beside:  # a standard error of 0.0009
        assert abs(float(torch.corrcoef(torch.stack((noise.flatten(), other.flatten())))[0, 1])) < 0.005
    nucleus, _ = generation.choose(scores, keys, tokens, Drawing(top_p=0.8))
    assert set(nucleus.tolist()) == {0, 1}, "the likeliest that make up the share"
