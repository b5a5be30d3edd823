"""Memory that attention holds a layer for the backward pass, where rows are padded and where heads share keys.

    .venv/bin/python benchmarks/gpu_attention.py

Runs in under a minute on a GPU of compute capability 8.0 or later, with the lists of kernels that finlm takes on Ampere
and Ada ("flash") and on V100 and T4 ("efficient"), whatever the GPU is. "formerly": transformers' own masks and the
lists without the memory-efficient kernel. 2 rows of 1,024 tokens, 32 heads of 128, as Mistral's and Llama-2's. --toy: a
small model on a CPU, which has other kernels and does not count memory; to see that the program runs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification
from transformers.integrations import sdpa_attention
from trl import GRPOTrainer
from trl.trainer.utils import add_fused_lm_head

from finlm.train.model import kernels
from finlm.train.post import grpo, preferences, start

TOY = "--toy" in sys.argv
DEVICE = "cpu" if TOY else "cuda"
ROWS, TOKENS, WIDTH, VOCABULARY = 2, 256 if TOY else 1024, 32 * (8 if TOY else 128), 1024
LISTS = {"flash": [SDPBackend.FLASH_ATTENTION], "efficient": [SDPBackend.EFFICIENT_ATTENTION]}  # formerly
SEEN: list[tuple[str, float]] = []  # (kernel, MiB held) of each layer


def model(kv_heads: int, dtype: torch.dtype) -> LlamaForCausalLM:
    """Two layers of Mistral's attention with a small feed-forward block."""
    shape = {"hidden_size": WIDTH, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 32}
    config = LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=kv_heads, pad_token_id=None, **shape)
    with torch.device(DEVICE):
        return LlamaForCausalLM._from_config(config, attn_implementation="sdpa", dtype=dtype)


def batch(left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, mask): one row is shorter than the other."""
    ids = torch.randint(3, VOCABULARY, (ROWS, TOKENS), device=DEVICE)
    mask = torch.ones_like(ids)
    mask[1, -100:] = 0
    if left:
        mask[0, :100] = 0
    return ids, mask


def watch() -> None:
    """Let every attention of a layer add its kernel and the memory it holds to SEEN."""
    plain, forward = functional.scaled_dot_product_attention, sdpa_attention.sdpa_attention_forward
    chosen: list[str] = []

    def spy(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **named: Any) -> torch.Tensor:
        chosen.append(SDPBackend(torch._fused_sdp_choice(q, k, v, **named)).name.partition("_")[0].lower())
        return plain(q, k, v, **named)

    def measured(*given: Any, **named: Any) -> Any:
        before = torch.cuda.memory_allocated()
        out = forward(*given, **named)
        SEEN.append((chosen[-1], (torch.cuda.memory_allocated() - before) / 2**20))
        return out

    functional.scaled_dot_product_attention = spy
    AttentionInterface.register("sdpa", measured)


def dpo(of: LlamaForCausalLM, now: bool) -> Any:
    """The log-probabilities of a batch of pairs."""
    ids, mask = batch(left=False)
    if now:
        start.swap_head(of, VOCABULARY)
    else:
        add_fused_lm_head(of)
    return of(input_ids=ids, attention_mask=mask, labels=ids, fused_lm_head=True).log_probs


def rewards(of: LlamaForCausalLM, now: bool) -> Any:
    """The rewards of a batch of pairs."""
    ids, mask = batch(left=False)
    judge = preferences.make_reward_model(of, 0)
    if not now:
        judge.forward = lambda **given: LlamaForSequenceClassification.forward(judge, **given)
    return judge(input_ids=ids, attention_mask=mask).logits


def groups(of: LlamaForCausalLM, now: bool) -> Any:
    """The log-probabilities of answers to prompts that are padded on their left."""
    add_fused_lm_head(of)
    trainer = grpo.GroupTrainer if now else GRPOTrainer
    method = trainer._get_per_token_logps_and_entropies
    stub = SimpleNamespace(accelerator=SimpleNamespace(autocast=nullcontext), extra_outputs=(), learnt_from=None)
    return getattr(method, "__wrapped__", method)(stub, of, *batch(left=True), TOKENS // 2)[0]


def pretraining(of: LlamaForCausalLM, now: bool) -> Any:
    """The loss of whole rows."""
    ids, _ = batch(left=False)
    if now:
        kernels.swap_loss(of, VOCABULARY)
        return of(ids, ids)
    return of(input_ids=ids, labels=ids).loss


CASES: list[tuple[str, str, int, torch.dtype, Callable[[LlamaForCausalLM, bool], Any]]] = [
    ("DPO, padded", "flash", 32, torch.bfloat16, dpo),
    ("DPO, padded, 8 key heads", "flash", 8, torch.bfloat16, dpo),
    ("reward, padded", "flash", 32, torch.bfloat16, rewards),
    ("GRPO, padded on both sides", "flash", 32, torch.bfloat16, groups),
    ("DPO, padded", "efficient", 32, torch.float16, dpo),
    ("rows without padding, 8 key heads", "efficient", 8, torch.float16, pretraining),
]


def main() -> int:
    """Print the table; 1 when a case of today runs the definition."""
    if not TOY and not torch.cuda.is_available():
        print("needs a GPU; --toy runs without", file=sys.stderr)
        return 2
    watch()
    rows = []
    print(f"{DEVICE if TOY else torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"{'case':<36}{'list':<11}{'formerly':<12}{'MiB a layer':>12}   {'now':<12}{'MiB a layer':>12}")
    for name, attention, kv_heads, dtype, run in CASES:
        found: list[tuple[str, float]] = []
        for now in (False, True):
            former = sdpa_kernel([*LISTS[attention], SDPBackend.MATH], set_priority=True)
            context: AbstractContextManager[Any] = (
                kernels.attention_backends(SimpleNamespace(attention=attention)) if now else former
            )  # type: ignore[arg-type]
            SEEN.clear()
            with context:
                out = run(model(kv_heads, dtype), now)
                out.sum().backward()
            found.append(SEEN[1])  # the second layer: nothing is allocated for the first time there
            del out
            torch.cuda.empty_cache()  # does nothing where there is no GPU
        (former_kernel, former_mib), (kernel, mib) = found
        print(f"{name:<36}{attention:<11}{former_kernel:<12}{former_mib:>12.1f}   {kernel:<12}{mib:>12.1f}", flush=True)
        rows.append({"case": name, "list": attention, "formerly": found[0], "now": found[1]})
    print(json.dumps(rows))
    return int(not TOY and any(row["now"][0] == "math" for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
