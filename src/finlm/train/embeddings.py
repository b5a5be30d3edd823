"""Embedding rows for the new pieces of an extended tokenizer: each the mean of the old rows that spelt its piece.

XuanYuan's way (13B and 70B reports): "净" was three byte tokens, its row begins as their mean, in the input embedding
and in the output head alike. Old rows keep their bits, so the logits of old pieces on text without Chinese do too. A
toy model read Chinese at 4.1 bits a byte right afterwards, 4.6 with random rows; 60 steps later at 2.3 and 2.8, while
60 steps without new pieces ended at 3.0.

Works on a model that ZeRO-3 has partitioned: the table is gathered, every rank computes the same larger one, and
deepspeed.initialize partitions that as it does any plain parameter. It needs one whole table a rank meanwhile (0.6 GB
for Llama-2-70B in bf16, twice that in fp32 while the means are taken).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import deepspeed
import sentencepiece
import torch
from sentencepiece.sentencepiece_model_pb2 import ModelProto
from torch.nn import functional
from transformers import LlamaForCausalLM

from finlm.base.errors import UserError


def spellings(tokenizer: Path) -> tuple[int, list[list[int]]]:
    """(number of old pieces, old ids of each new piece) of a tokenizer.model that data/vocab_extend.py has written."""
    model = ModelProto.FromString(tokenizer.read_bytes())
    old = model.trainer_spec.vocab_size  # of the vocabulary it was extended from
    new = [piece.piece for piece in model.pieces[old:]]
    del model.pieces[old:]
    model.normalizer_spec.add_dummy_prefix = False  # a piece stands inside a text
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())
    return old, processor.encode(new)


def enlarged(table: torch.Tensor, ids: Sequence[Sequence[int]], rows: int) -> torch.Tensor:
    """table [old rows, hidden] -> [rows, hidden] of its type: the old rows, the mean of those that each of ids names.

    Rows beyond the last piece, which pad the table to a size that a GPU likes, are zero.
    """
    wide = table.detach().float()
    flat = torch.tensor([number for spelling in ids for number in spelling], device=table.device)
    starts = torch.tensor([0, *(len(spelling) for spelling in ids)], device=table.device).cumsum(0)[:-1]
    new = functional.embedding_bag(flat, wide, starts, mode="mean")
    padding = table.new_zeros(rows - len(table) - len(ids), table.shape[1])
    return torch.cat([table.detach(), new.to(table.dtype), padding])


def extend(model: LlamaForCausalLM, tokenizer: Path, rows: int) -> None:
    """Give model `rows` embedding and head rows, for the pieces that tokenizer has more than model knows.

    Raises UserError when the tokenizer was not extended from the model's.
    """
    old, ids = spellings(tokenizer)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not ids or embedding.num_embeddings != old or rows < old + len(ids):
        raise UserError(
            "the extended tokenizer does not belong to the weights of model.init_from",
            evidence=f"{embedding.num_embeddings:,} embedding rows there; {old:,} old and {len(ids):,} new pieces in "
            f"{tokenizer}, {rows:,} rows wanted",
            fix="take tokenizer.path from the same model as model.init_from",
        )
    for module in [embedding] if model.config.tie_word_embeddings else [embedding, head]:
        with deepspeed.zero.GatheredParameters(module.weight):  # whole on every rank; does nothing below ZeRO-3
            table = enlarged(module.weight, ids, rows)
        module.weight = torch.nn.Parameter(table)
    if model.config.tie_word_embeddings:
        head.weight = embedding.weight
    embedding.num_embeddings = head.out_features = rows
    model.vocab_size = model.config.vocab_size = rows
