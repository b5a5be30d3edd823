"""Tokens a second of answers to many prompts: finlm's generation beside transformers' `generate`, in one run.

    .venv/bin/python benchmarks/gpu_rollouts.py [--rows 512] [--prompt 256] [--answer 512] [--profile]

A Qwen2.5-1.5B shape with drawn weights, 8 answers to a prompt, none of which ends early ("full"), then with answers
that end at random tokens and rows that are refilled ("ragged", 2 answers a row). Before the times, the log-probability
of every drawn token is computed again from the whole text. About five minutes on an H100; --toy: a small model on a
CPU, to see that the program runs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import torch
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

from finlm.train.model import generation
from finlm.train.model.generation import Drawing, Limits

SHAPE = {
    "vocab_size": 151_936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
TOY = {"vocab_size": 500, "hidden_size": 96, "intermediate_size": 128, "num_hidden_layers": 2}
GROUP = 8  # answers to a prompt


def options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--answer", type=int, default=512)
    parser.add_argument("--profile", action="store_true", help="print the kernels of 8 tokens")
    parser.add_argument("--toy", action="store_true")
    return parser.parse_args()


def make_model(toy: bool) -> Any:
    """Return the model in evaluation mode, bf16 on a GPU."""
    torch.manual_seed(0)
    config = Qwen2Config(**(SHAPE | (TOY if toy else {})), max_position_embeddings=4096, initializer_range=0.02)
    with torch.device("cpu" if toy else "cuda"):
        dtype = torch.float32 if toy else torch.bfloat16
        model = Qwen2ForCausalLM._from_config(config, dtype=dtype, attn_implementation="sdpa")
    return model.eval()


def make_prompts(rows: int, tokens: int, vocab_size: int) -> list[list[int]]:
    """Return a prompt for each row, the same for GROUP rows, of `tokens` tokens or a few less."""
    drawn = torch.randint(3, vocab_size, (-(-rows // GROUP), tokens)).tolist()
    return [drawn[row // GROUP][row // GROUP % 8 :] for row in range(rows)]


def largest_difference(model: Any, prompts: list[list[int]], answers: list[generation.Answer]) -> tuple[float, float]:
    """Return (mean, largest) difference of the log-probabilities and those of a pass over the whole text."""
    apart = []
    for prompt, answer in list(zip(prompts, answers, strict=True))[:: max(1, len(prompts) // 16)]:
        ids = torch.tensor([prompt + answer.ids], device=model.device)
        with torch.no_grad():
            logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        again = logits.log_softmax(1).gather(1, ids[0, len(prompt) :, None])[:, 0]
        apart.append((again - torch.tensor(answer.log_probs, device=again.device)).abs())
    every = torch.cat(apart)
    return float(every.mean()), float(every.max())


def synchronize(model: Any) -> None:
    """Wait for the GPU, if there is one."""
    if model.device.type == "cuda":
        torch.cuda.synchronize()


def timed(model: Any, run: Any) -> tuple[float, Any]:
    """Return (seconds of a second call, its result)."""
    run()
    synchronize(model)
    begun = time.perf_counter()
    result = run()
    synchronize(model)
    return time.perf_counter() - begun, result


def plain_generate(model: Any, prompts: list[list[int]], answer: int) -> torch.Tensor:
    """Return ids drawn by transformers' generate with its own cache."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=model.device)
    settings = GenerationConfig(
        do_sample=True, top_k=0, max_new_tokens=answer, min_new_tokens=answer, pad_token_id=0, disable_compile=True
    )
    with torch.no_grad():
        out: torch.Tensor = model.generate(ids, attention_mask=mask, generation_config=settings, use_cache=True)
    return out


def profile(run: Any) -> None:
    """Print the kernels of a generation by their time."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    with record(activities=[ProfilerActivity.CUDA]) as recorded:
        run()
    print(recorded.key_averages().table(sort_by="cuda_time_total", row_limit=22, max_name_column_width=90))


def main() -> int:
    """Print the table and its rows as JSON; return the exit code."""
    asked = options()
    if not asked.toy and not torch.cuda.is_available():
        print("needs a GPU; --toy runs without", file=sys.stderr)
        return 2
    rows, prompt, answer = (16, 12, 12) if asked.toy else (asked.rows, asked.prompt, asked.answer)
    model = make_model(asked.toy)
    vocab_size = model.config.vocab_size
    prompts = make_prompts(rows, prompt, vocab_size)
    print(f"{torch.cuda.get_device_name() if not asked.toy else 'cpu'}, torch {torch.__version__}")
    results: list[dict[str, Any]] = []

    def note(name: str, seconds: float, tokens: int, **more: Any) -> None:
        """Print and keep a row of the table."""
        row = {"case": name, "seconds": round(seconds, 3), "tokens_per_second": round(tokens / seconds), **more}
        results.append(row)
        print(json.dumps(row), flush=True)

    def ours(compiled: bool, repeat: int = 1, ends: tuple[int, ...] = ()) -> list[generation.Answer]:
        """Generate answers to all prompts, `repeat` times as many as there are rows."""
        keys = generation.row_keys("0", range(rows * repeat))
        limits = Limits(answer, ends, rows, prompt + answer, vocab_size)
        return generation.generate(model, prompts * repeat, limits, keys, Drawing(), compiled)

    for compiled in (False, True):
        begun = time.perf_counter()
        answers = ours(compiled)
        first = time.perf_counter() - begun
        seconds, again = timed(model, lambda compiled=compiled: ours(compiled))
        mean, largest = largest_difference(model, prompts, answers)
        same = sum(a.ids == b.ids for a, b in zip(answers, again, strict=True)) / len(answers)
        note(
            "full, compiled layers" if compiled else "full",
            seconds,
            rows * answer,
            first_seconds=round(first, 1),
            log_prob_mean=mean,
            log_prob_largest=largest,
            repeated=same,
        )
    if asked.profile:
        short = Limits(8, (), rows, prompt + answer, vocab_size)
        keys = generation.row_keys("0", range(rows))
        profile(lambda: generation.generate(model, prompts, short, keys, Drawing(), True))
    # A 400th of the vocabulary ends an answer: half of them are over after some 277 tokens.
    ends = tuple(range(0, vocab_size, 400 if not asked.toy else 8))
    seconds, answers = timed(model, lambda: ours(True, 2, ends))
    mean, largest = largest_difference(model, prompts * 2, answers)
    tokens = sum(len(each.ids) for each in answers)
    note("ragged, compiled layers", seconds, tokens, log_prob_mean=mean, log_prob_largest=largest)
    seconds, _ = timed(model, lambda: plain_generate(model, prompts, answer))
    note("transformers generate", seconds, rows * answer)
    ratio = results[1]["tokens_per_second"] / results[-1]["tokens_per_second"]
    peak = torch.cuda.max_memory_allocated() / 2**30 if not asked.toy else 0.0
    print(f"ratio {ratio:.2f}; peak memory {peak:.1f} GiB")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
