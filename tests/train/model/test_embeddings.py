"""Rows of an extended vocabulary: means of the old rows, old rows untouched, the same under ZeRO-3."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import sentencepiece
import torch
from sentencepiece.sentencepiece_model_pb2 import ModelProto
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from finlm.base.errors import UserError
from finlm.inference import export
from finlm.tokens import vocab
from finlm.train.model import causal_lm
from finlm.train.post import start
from vocabularies import base, chinese, english

from helpers import ROOT

OLD, NEW = 600, 1400


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base(tmp_path_factory.mktemp("base"), OLD)


@pytest.fixture(scope="module")
def new(old: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("extended")
    vocab.extend(vocab.load_base(old), chinese(300_000), directory, NEW, 16, 0.98)
    return directory / "tokenizer.model"


def llama(tied: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=OLD, tie_word_embeddings=tied, **shape)).bfloat16()


def test_a_text_in_new_pieces_spelt_out_is_the_text_in_old_pieces(old: Path, new: Path) -> None:
    """So a row starts as the mean of exactly those rows that the old model would have read in its place."""
    before, after = vocab.load(old), vocab.load(new)
    count, ids = causal_lm.spellings(new)
    assert count == OLD and len(ids) == NEW - OLD
    spelling = [[number] for number in range(count)] + ids
    lengths = {len(numbers) for numbers in ids}
    assert 3 in lengths and max(lengths) >= 6  # a character is three bytes, a word of two is six
    for text in (*chinese(200_000, seed=6), *english(50, 1)):
        assert [part for number in after.encode(text) for part in spelling[number]] == before.encode(text)


@pytest.mark.parametrize("tied", [False, True])
def test_new_rows_are_means_and_old_rows_keep_their_bits(new: Path, tied: bool) -> None:
    model, start = llama(tied), llama(tied)
    causal_lm.extend_embeddings(model, new, NEW + 48)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert model.config.vocab_size == model.model.embed_tokens.num_embeddings == model.lm_head.out_features == NEW + 48
    _, ids = causal_lm.spellings(new)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        table, before = model.get_parameter(name), start.get_parameter(name)
        assert table.shape == (NEW + 48, 32) and table.dtype == torch.bfloat16 and table.requires_grad
        assert torch.equal(table[:OLD], before)
        for place in (0, 1, 400, NEW - OLD - 1):
            expected = torch.stack([before[number].float() for number in ids[place]]).mean(0)
            assert torch.allclose(table[OLD + place].float(), expected, atol=2e-4)
        assert not table[NEW:].any()


def test_text_of_old_pieces_gets_the_logits_it_had(new: Path) -> None:
    model, start = llama(), llama()
    causal_lm.extend_embeddings(model, new, NEW)
    ids = torch.randint(0, OLD, (2, 16))
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits[..., :OLD], start(input_ids=ids).logits)


def test_weights_of_another_vocabulary_are_refused(old: Path, new: Path, tmp_path: Path) -> None:
    model = ModelProto.FromString(new.read_bytes())
    model.trainer_spec.vocab_size = OLD + 1
    (tmp_path / "other.model").write_bytes(model.SerializeToString())
    for tokenizer, rows in ((tmp_path / "other.model", NEW), (old, NEW), (new, NEW - 1)):
        with pytest.raises(UserError, match="does not belong to the weights") as caught:
            causal_lm.extend_embeddings(llama(), tokenizer, rows)
        assert "600 embedding rows there" in caught.value.evidence


def test_transformers_reads_the_extended_tokenizer_with_sentencepieces_ids(new: Path, tmp_path: Path) -> None:
    start.piece_tokenizer(new, add_bos=False, sequence_length=512).save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(new))
    assert len(loaded) == NEW
    for text in (*chinese(150_000, seed=6), *english(50, 2), *export.PROBES):
        assert loaded(text, split_special_tokens=True)["input_ids"] == pieces.encode(text)


def test_zero_3_on_two_ranks_ends_with_the_same_tables(new: Path, tmp_path: Path) -> None:
    start = llama()
    start.save_pretrained(tmp_path / "start")
    script = Path(__file__).with_name("extend_under_zero3.py")
    command = [sys.executable, str(script), str(tmp_path / "start"), str(new), str(NEW), str(tmp_path / "tables.pt")]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 0, result.stderr[-2000:]
    found = torch.load(tmp_path / "tables.pt")
    causal_lm.extend_embeddings(start, new, NEW)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert found["partition_elements"][name] == NEW * 32 // 2
        assert torch.equal(found["tables"][name], start.get_parameter(name))
    assert found["loss"] > 0
