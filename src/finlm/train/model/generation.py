"""Generate answers to many prompts at once: a static cache, a CUDA graph of one token of all rows, rows refilled.

Tensors on the device decide what a row of the batch reads and writes next: its tokens so far, those of its answer,
whether that has ended. So one graph, captured once, serves every length, and the host launches nothing else. Every
CHECKED tokens the host looks which answers have ended and gives their rows to the next prompts. The answers to a prompt
share a forward pass over all its tokens but the last, which is the first that a step reads.

A drawn token is a function of (key of the row, token, scores), whatever rows are generated together.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional
from transformers import AttentionInterface, TopPLogitsWarper
from transformers.integrations.sdpa_attention import repeat_kv

from finlm.plan.memory import PROMPT_TOKENS
from finlm.recipe.models import traits
from finlm.train.model import causal_lm, delta_net
from finlm.train.model.kernels import attention_modules, run_layer

Bounds = tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None
NAME = "finlm_generation"
CHECKED = 16  # tokens on a GPU between two looks at which answers have ended, each of which waits for the GPU
WIDEST_HEAD = 256  # numbers of a head that the kernel takes


@dataclass(frozen=True)
class Drawing:
    """How tokens are drawn: the temperature, and top_p of nucleus sampling (1 = off)."""

    temperature: float = 1.0
    top_p: float = 1.0


@dataclass(frozen=True)
class Answer:
    """The ids of an answer, its end token included, and their log-probabilities at the temperature, before top_p."""

    ids: list[int]
    log_probs: list[float]


@dataclass(frozen=True)
class Limits:
    """Limits of a generation; ids from vocab_size on are never chosen.

    `most` is the tokens of an answer, `ends` the ids that end it, `rows` the answers generated at once, and `room` the
    tokens of prompt and answer together.
    """

    most: int
    ends: Sequence[int]
    rows: int
    room: int
    vocab_size: int


def generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    limits: Limits,
    keys: torch.Tensor | None = None,
    drawing: Drawing = Drawing(),
    compiled: bool = False,
) -> list[Answer]:
    """Return an answer to each prompt, in order. Prompts are lists of ids, none of which is empty.

    With `keys`, int64 [prompts], tokens are drawn by `drawing`, the same for the same key; without, the likeliest is
    taken. `model` is a causal model of transformers in evaluation mode, or one with peft's adapters; its attention and
    its layers' forward are replaced during the call. `compiled` compiles its layers where _is_static() allows it.
    """
    batch = _Batch(model, prompts, limits, keys, drawing, compiled)
    try:
        with torch.no_grad():
            return batch.run()
    finally:
        batch.close()


class _LayerCache:
    """What a layer keeps of each row: keys and values, or what it makes them from; or states of linear attention."""

    def __init__(self, batch: _Batch) -> None:
        """Begin without tensors; the rows, lengths and room are read from `batch` at each use."""
        self.batch, self.states = batch, dict[str, torch.Tensor]()

    def update(self, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a token's keys and values of each row, [rows, heads, 1, head size]; return the caches of all tokens."""
        both = self._get("key", key), self._get("value", value)
        for cache, new in zip(both, (key, value), strict=True):
            cache[self.batch.rows, :, self.batch.lengths] = new[:, :, 0]
        return both

    def write(self, name: str, new: torch.Tensor, rows: torch.Tensor, sources: torch.Tensor) -> None:
        """Copy `new` of prompts, [prompts, ...], to `rows`; `sources` has the prompt of each row."""
        self._get(name, new)[rows, :, : new.shape[2]] = new[sources]

    def _get(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """Return the tensor `name`, [rows, ...]; the first call makes it, with the sizes and dtype of `like`."""
        if name not in self.states:
            sizes = list(like.shape[1:])
            if name in ("key", "value"):  # [heads, tokens, head size]
                sizes[1] = self.batch.limits.room
            self.states[name] = like.new_zeros(len(self.batch.rows), *sizes)
        return self.states[name]

    def get_conv_state(self, *_: Any, **__: Any) -> torch.Tensor:
        """Return what the convolution reads next to a token, [rows, channels, taps]; the layer shifts it in place."""
        return self.states["convolution"]

    def get_recurrent_state(self, *_: Any, **__: Any) -> torch.Tensor:
        """Return the state of linear attention, [rows, value heads, key size, value size]."""
        return self.states["rule"]

    def update_recurrent_state(self, new: torch.Tensor, *_: Any) -> None:
        """Replace the state of linear attention in place."""
        self.states["rule"].copy_(new)

    def is_recording_past(self, *_: Any) -> bool:
        """Return False: no token is taken back."""
        return False


@dataclass
class _PromptCache:
    """The cache that transformers' layers get while prompts are computed: copies what they keep to the rows."""

    layers: Sequence[_LayerCache]
    rows: torch.Tensor
    sources: torch.Tensor  # the prompt of each row
    is_empty: bool  # the prompts have no token, and what is computed is padding

    def update(self, key: torch.Tensor, value: torch.Tensor, layer: int, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy keys and values, [prompts, heads, tokens, head size], to the rows of `layer`; return both as given."""
        for name, new in (("key", key), ("value", value)):
            self.layers[layer].write(name, new, self.rows, self.sources)
        return key, value

    def get_conv_state(self, *_: Any, **__: Any) -> None:
        """Return None: a prompt has nothing before it."""

    get_recurrent_state = get_conv_state

    def update_conv_state(self, new: torch.Tensor, layer: int, conv_kernel_size: int) -> torch.Tensor:
        """Copy the last inputs `new` [prompts, channels, tokens] of a layer's convolution to the rows; return `new`."""
        self._write(layer, "convolution", functional.pad(new, (conv_kernel_size, 0))[..., -conv_kernel_size:])
        return new

    def update_recurrent_state(self, new: torch.Tensor, layer: int) -> None:
        """Copy the states `new` [prompts, ...] after the prompts to the rows."""
        self._write(layer, "rule", new)

    def _write(self, layer: int, name: str, new: torch.Tensor) -> None:
        """Write `new`, or zeros for empty prompts, as state `name` of a layer to the rows."""
        new = torch.zeros_like(new) if self.is_empty else new
        self.layers[layer].write(name, new, self.rows, self.sources)


class _Batch:
    """The rows that are generated together, and the prompts that wait for a row."""

    def __init__(
        self,
        model: Any,
        prompts: Sequence[Sequence[int]],
        limits: Limits,
        keys: torch.Tensor | None,
        drawing: Drawing,
        compiled: bool,
    ) -> None:
        """Make empty rows, at most limits.rows; the arguments are those of generate()."""
        self.model, self.prompts, self.limits, self.given_keys = model, prompts, limits, keys
        inner = causal_lm.base_model(model)
        self.decoder, device = inner.model, inner.model.embed_tokens.weight.device
        self.has_states = any(delta_net.mixers(self.decoder))
        self.is_static = device.type == "cuda" and _is_static(inner.config) and not self.has_states
        count = min(limits.rows, len(prompts))
        self.rows = torch.arange(count, device=device)
        self.lengths = torch.zeros_like(self.rows)  # tokens in the cache, and where the next one is written
        self.tokens = torch.zeros_like(self.rows)  # of the answer
        self.ids = torch.zeros_like(self.rows)  # that the next step reads
        self.is_live = torch.zeros_like(self.rows, dtype=torch.bool)
        self.asked = torch.zeros_like(self.rows)  # tokens of the prompt in the cache
        self.sources = self.rows.clone()  # the row whose cache each row reads its prompt from
        self.keys = None if keys is None else torch.zeros_like(self.rows)
        self.ends = torch.tensor(list(limits.ends), dtype=torch.int64, device=device)
        # A row that has ended goes on writing behind its answer, in the last column at most.
        self.answers = torch.zeros(count, limits.most + 1, dtype=torch.int64, device=device)
        self.log_probs = torch.zeros(count, limits.most + 1, device=device)
        self.caches = [_LayerCache(self) for _ in self.decoder.layers]
        self.choose: Callable[..., tuple[torch.Tensor, torch.Tensor]] = partial(choose, drawing=drawing)
        self.run_layer = torch.compile(run_layer, dynamic=False) if self.is_static and compiled else run_layer
        if self.is_static:
            self.choose = torch.compile(self.choose, dynamic=False)
        self.graph: torch.cuda.CUDAGraph | None = None

    def run(self) -> list[Answer]:
        """Generate until every prompt has an answer; return the answers in the order of the prompts."""
        waiting = deque(range(len(self.prompts)))
        holders: dict[int, int] = {}  # prompt by row
        answers: dict[int, Answer] = {}
        with _attention(self.decoder, self._forward_layer):
            while waiting or holders:
                free = [row for row in range(len(self.rows)) if row not in holders][: len(waiting)]
                if free and len(free) >= min(len(waiting), len(self.rows) // 8):  # prompts pay when they are many
                    new = {row: waiting.popleft() for row in free}
                    self._admit(new)
                    holders |= new
                for _ in range(CHECKED if self.is_static else 1):
                    self._step()
                live = self.is_live.tolist()
                if ended := [row for row in holders if not live[row]]:
                    columns = (each[ended].tolist() for each in (self.tokens, self.answers, self.log_probs))
                    for row, count, ids, log_probs in zip(ended, *columns, strict=True):
                        answers[holders.pop(row)] = Answer(ids[:count], log_probs[:count])
        return [answers[place] for place in range(len(self.prompts))]

    def close(self) -> None:
        """Free the graph and the caches now: Python would collect their reference cycles much later."""
        self.graph = None
        self.caches.clear()

    def _admit(self, new: Mapping[int, int]) -> None:
        """Give rows to new prompts, {row: index of prompt}: compute each distinct one, set what the next step reads."""
        sharing = defaultdict[tuple[int, ...], list[int]](list)
        for row, place in new.items():
            sharing[tuple(self.prompts[place])].append(row)
        together = defaultdict[int, list[tuple[int, ...]]](list)  # padding behind a prompt would change a state
        for prompt in sharing:
            together[len(prompt) if self.has_states else 0].append(prompt)
        for every in together.values():
            most = max(1, PROMPT_TOKENS // max(map(len, every)))
            for part in (every[start : start + most] for start in range(0, len(every), most)):
                self._compute_prompts(part, [sharing[prompt] for prompt in part])
        rows = self._tensor(list(new))
        asked = [self.prompts[place] for place in new.values()]
        self.ids[rows] = self._tensor([prompt[-1] for prompt in asked])
        self.lengths[rows] = self.asked[rows] = self._tensor([len(prompt) - 1 for prompt in asked])
        self.sources[torch.isin(self.sources, rows)] = -1  # whose prompt is overwritten: each has a copy
        self.sources.copy_(torch.where(self.sources < 0, self.rows, self.sources))
        self.sources[rows] = self._tensor([sharing[tuple(prompt)][0] for prompt in asked])
        self.tokens[rows] = 0
        self.is_live[rows] = True
        if self.keys is not None and self.given_keys is not None:
            self.keys[rows] = self.given_keys[list(new.values())].to(self.keys.device)

    def _compute_prompts(self, prompts: Sequence[tuple[int, ...]], rows: Sequence[list[int]]) -> None:
        """Write keys and values of each prompt's tokens, all but the last, to the list of rows of that prompt."""
        longest = max(2, *map(len, prompts)) - 1  # a token at least: the caches are made here
        # Padded on the right: no token looks there, and answers overwrite it.
        ids = self._tensor([[*prompt[:-1], *[0] * (longest + 1 - len(prompt))] for prompt in prompts])
        places = [place for place, sharing in enumerate(rows) for _ in sharing]
        held = self._tensor([row for sharing in rows for row in sharing])
        cache = _PromptCache(self.caches, held, self._tensor(places), max(map(len, prompts)) == 1)
        self._forward(ids, torch.arange(longest, device=ids.device)[None], cache, None)

    def _step(self) -> None:
        """Generate a token of each row; if is_static, the first call captures the CUDA graph that later ones replay."""
        if self.graph is not None:
            self.graph.replay()
            return
        self._advance()
        if self.is_static:  # the graph is of the steps that follow: capturing runs nothing
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                self._advance()

    def _advance(self) -> None:
        """Run the model on the last token of each row, choose the next, and update the rows' tensors in place."""
        reach = torch.where(self.is_live, self.lengths + 1, 1)
        bounds = reach.int(), self.asked.int(), self.sources.int()
        logits = self._forward(self.ids[:, None], self.lengths[:, None], self.caches[0], bounds)
        ids, log_probs = self.choose(logits[:, -1, : self.limits.vocab_size], self.keys, self.tokens)
        self.answers[self.rows, self.tokens] = ids
        self.log_probs[self.rows, self.tokens] = log_probs
        self.ids.copy_(ids)
        self.tokens.add_(self.is_live)
        has_ended = (ids[:, None] == self.ends).any(1) | (self.tokens >= self.limits.most)
        self.is_live.logical_and_(~has_ended)
        # A row that has ended writes where no prompt is: others may read theirs from it.
        self.lengths.copy_(torch.where(self.is_live, reach, self.limits.room - 1))

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, cache: Any, bounds: Bounds) -> Any:
        """Set _attend's `bounds`; return the logits of each row's last token: [rows, 1, vocabulary]."""
        for module in attention_modules(self.decoder):  # not as an argument: some types do not hand further ones down
            module.generation_bounds = bounds
        given = {"past_key_values": cache, "use_cache": True, "logits_to_keep": 1}
        return self.model(input_ids=ids, position_ids=positions, **given).logits

    def _forward_layer(self, layer: Any, number: int, *arguments: Any, **named: Any) -> Any:
        """Run layer `number` of the decoder with its own cache, or that of the prompts, and return its output."""
        if isinstance(named["past_key_values"], _PromptCache):
            return run_layer(layer, *arguments, **named)
        return self.run_layer(layer, *arguments, **named | {"past_key_values": self.caches[number]})

    def _tensor(self, values: Any) -> torch.Tensor:
        """Return (nested) lists of numbers as a tensor on the rows' device."""
        return torch.tensor(values, device=self.rows.device)


@contextmanager
def _attention(decoder: Any, forward: Callable[..., Any]) -> Iterator[None]:
    """Within the block, run the decoder's layers by forward(layer, index, ...), and attend by _attend."""
    AttentionInterface.register(NAME, _attend)
    former = decoder.config._attn_implementation, [layer.__dict__.get("forward") for layer in decoder.layers]
    decoder.config._attn_implementation = NAME
    for number, layer in enumerate(decoder.layers):
        layer.forward = partial(forward, layer, number)
    try:
        yield
    finally:
        decoder.config._attn_implementation = former[0]
        for module in attention_modules(decoder):
            module.__dict__.pop("generation_bounds", None)
        for layer, before in zip(decoder.layers, former[1], strict=True):
            del layer.forward
            if before is not None:
                layer.forward = before


def _is_static(config: Any) -> bool:
    """Return whether a forward pass never reads values from the GPU: no experts, no RoPE that depends on length."""
    values = config.to_dict()
    kinds = {str(rope.get("rope_type", rope.get("type"))) for rope in traits.ropes(values)}
    return not kinds & set(traits.LIMITED_ROPE) and not any(values.get(key) for key in traits.EXPERTS)


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **given: Any,
) -> tuple[torch.Tensor, None]:
    """Attend from prompts to themselves, causally, or from a token of each row to the tokens before it.

    `query` is [rows, heads, tokens, head size]; `key` and `value` may have fewer heads, and value heads a size of their
    own. module.generation_bounds is None for prompts, else the `bounds` of token_attention.attend. `given` may have
    scaling, sliding_window, softcap and s_aux, the sinks. Returns ([rows, tokens, heads, size of value heads], None).
    """
    bounds, groups = module.generation_bounds, query.shape[1] // key.shape[1]
    sliding_window, softcap, sinks = (given.get(key) for key in ("sliding_window", "softcap", "s_aux"))
    rows, heads, tokens, size = query.shape
    scale = size**-0.5 if given.get("scaling") is None else given["scaling"]
    if bounds is not None and sinks is None and _has_kernel(query, key, value):
        from finlm.train.model import token_attention  # needs Triton, which comes with torch for GPUs

        scoring = token_attention.Scoring(scale, softcap or 0.0, sliding_window or key.shape[2])
        return token_attention.attend(query, key, value, bounds, scoring), None
    mask = _visible(tokens, key.shape[2], None if bounds is None else bounds[0], sliding_window, query.device)
    if softcap or sinks is not None:
        scores = query @ repeat_kv(key, groups).transpose(2, 3) * scale
        scores = torch.where(mask, softcap * torch.tanh(scores / softcap) if softcap else scores, -torch.inf)
        beside = [] if sinks is None else [sinks[:, None, None].expand(rows, -1, tokens, 1)]
        shares = torch.cat((scores, *beside), -1).softmax(-1, dtype=torch.float32)[..., : key.shape[2]]
        return (shares.to(value.dtype) @ repeat_kv(value, groups)).transpose(1, 2), None
    if bounds is not None:  # the query heads that share keys are its queries: nothing is repeated
        shared = query.reshape(rows, key.shape[1], groups, size)
        out = functional.scaled_dot_product_attention(shared, key, value, mask, scale=scale)
        return out.reshape(rows, 1, heads, value.shape[-1]), None
    is_plain = sliding_window is None or tokens <= sliding_window
    k, v = (repeat_kv(part, groups) for part in (key, value))
    seen = None if is_plain else mask
    out = functional.scaled_dot_product_attention(query, k, v, seen, is_causal=is_plain, scale=scale)
    return out.transpose(1, 2), None


def _has_kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether token_attention takes these: 16-bit, compute capability 8.0 or later, heads not too wide."""
    is_short = query.dtype in (torch.float16, torch.bfloat16) and query.shape[-1] <= WIDEST_HEAD
    # The caches themselves, not what a layer makes of them.
    is_cache = key.shape == value.shape and key.is_contiguous() and value.is_contiguous()
    return query.is_cuda and is_short and is_cache and torch.cuda.get_device_capability(query.device) >= (8, 0)


def _visible(
    tokens: int, seen: int, reach: torch.Tensor | None, window: int | None, device: torch.device
) -> torch.Tensor:
    """Return which of `seen` keys each query sees, at most `window`: bool [rows or 1, 1, tokens, seen].

    `reach` has the number of tokens that each row sees, [rows]; None means causal attention of `tokens` queries.
    """
    places = torch.arange(seen, device=device)
    ends = torch.arange(1, tokens + 1, device=device)[None] if reach is None else reach[:, None]
    mask = places < ends[..., None]
    if window is not None:
        mask &= places >= ends[..., None] - window
    return mask[:, None]


def choose(
    logits: torch.Tensor, keys: torch.Tensor | None, tokens: torch.Tensor, drawing: Drawing
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (ids, their log-probabilities before top_p), each [rows]: drawn by `keys`, or the likeliest without keys.

    `logits` is [rows, vocabulary]; `keys` and `tokens`, the index of each token in its answer, are int64 [rows].
    """
    scores = plain = logits.float() / drawing.temperature
    if keys is not None:
        if drawing.top_p < 1:
            scores = TopPLogitsWarper(drawing.top_p)(None, scores)
        scores = scores + noise(keys, tokens, logits.shape[1])
    ids = scores.argmax(1)
    return ids, plain.gather(1, ids[:, None])[:, 0] - plain.logsumexp(1)


def noise(keys: torch.Tensor, tokens: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return Gumbel noise, fp32 [rows, vocab_size]: the largest of scores + noise is a draw from softmax(scores).

    It hashes (key, token, entry of the vocabulary), so it is equal on every device up to rounding.
    """
    # Numbers of torch's generators would depend on the row's place in the batch.
    words = _mix(keys + tokens * _GAMMA)[:, None]
    bits = torch.arange(vocab_size, device=keys.device, dtype=torch.int32) + words.int()
    bits = bits.bitwise_xor_(bits >> 16 & 0xFFFF).mul_(_THIRD).bitwise_xor_((words >> 32).int())
    bits = bits.bitwise_xor_(bits >> 15 & 0x1FFFF).mul_(_FOURTH)
    bits = bits.bitwise_xor_(bits >> 16 & 0xFFFF).bitwise_and_(0x7FFFFFFF)
    uniform = bits.float().add_(0.5).mul_(2**-31 - 2**-55)  # below 1
    return -torch.log1p(-uniform).neg_().log_()  # precise where it is large: small numbers keep all their bits


_GAMMA, _FIRST, _SECOND = (
    value - (1 << 64) for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)  # as int64
_THIRD, _FOURTH = 0x7FEB352D, 0x846CA68B - (1 << 32)  # as int32: GPUs multiply 64 bits in many steps


def _mix(z: torch.Tensor) -> torch.Tensor:
    """Apply splitmix64's output function (rows/shards.py) to int64 `z` in place and return it; products wrap around."""
    for shift, factor in ((30, _FIRST), (27, _SECOND), (31, 1)):
        z.bitwise_xor_(z >> shift & (1 << 64 - shift) - 1).mul_(factor)
    return z


def row_keys(seed: str, rows: range) -> torch.Tensor:
    """Return a key for the noise of each row in the range, int64 [rows]: a hash of `seed` and the row."""
    digests = (hashlib.blake2b(f"{seed}/{row}".encode(), digest_size=8).digest() for row in rows)
    return torch.tensor([int.from_bytes(digest, "little", signed=True) for digest in digests])
