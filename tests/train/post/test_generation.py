"""How answers are generated: with a cache of keys and values, which changes no token."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from finlm.train.post import grpo, rollouts

PAD, VOCAB, ANSWER = 0, 40, 12
ENDS = [1, 20, 21, 22, 23]
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13], [14, 15]]
KEYS = rollouts.row_keys("7/0", range(len(PROMPTS)))


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, **heads, initializer_range=0.3, use_cache=False, pad_token_id=PAD, eos_token_id=ENDS)
    return LlamaForCausalLM(config).eval()


class Generating(grpo.GroupTrainer):
    """What of a trainer generates answers."""

    def __init__(self) -> None:
        sampling = SimpleNamespace(temperature=0.9, top_p=0.95)
        self.rank = SimpleNamespace(device=torch.device("cpu"), recipe=SimpleNamespace(grpo=sampling))
        self.generation_config = SimpleNamespace(pad_token_id=PAD, eos_token_id=ENDS, max_new_tokens=ANSWER)
        self.eos_token_ids = ENDS


@pytest.mark.parametrize("keys", [None, KEYS], ids=["likeliest", "drawn"])
def test_a_token_is_generated_from_the_cache_and_equal_to_one_from_the_whole_text(keys: Any, model: Any) -> None:
    lengths = list[int]()
    hook = model.model.register_forward_pre_hook(
        lambda module, given, named: lengths.append(named["input_ids"].shape[1]), with_kwargs=True
    )
    with torch.no_grad():
        answers = Generating()._generate_rows(model, PROMPTS, keys, 5)
    hook.remove()
    assert lengths[0] == 5 and set(lengths[1:]) == {1}, "after the prompts a token at a time"
    for row, (ids, log_probs) in enumerate(answers):
        text = torch.tensor([PROMPTS[row]])
        for token in range(len(ids)):
            with torch.no_grad():
                scores = model(text, use_cache=False).logits[:, -1]
            if keys is not None:
                noise = rollouts.Noise(keys[row : row + 1], 5, rollouts.Kept())
                padded = torch.zeros(1, 5 + token, dtype=torch.int64)
                chosen = Generating()._sampling(noise)(padded, scores).argmax(1)
                assert log_probs[token] == pytest.approx(float(noise.log_probs[0]), abs=1e-5)
            else:
                chosen = scores.argmax(1)
            assert ids[token] == int(chosen)
            text = torch.cat((text, chosen[:, None]), dim=1)
    assert keys is None or any(len(ids) < ANSWER for ids, _ in answers), "some end early"
