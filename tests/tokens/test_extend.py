"""Chinese added to an English vocabulary: what stays, what comes, and that every new piece is of use."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from sentencepiece.sentencepiece_model_pb2 import ModelProto

from finlm import prepare
from finlm.base import files
from finlm.base.errors import UserError
from finlm.recipe import recipe
from finlm.tokens import vocab
from finlm.tokens.vocab import CHINESE
from vocabularies import base, chinese, english

from helpers import QUICKSTART

# Everything that is not Chinese, from control characters to emoji, kana, Hangul and the private use area.
OTHERS = [
    chr(code)
    for code in (*range(1, 0x250), *range(0x370, 0x590), *range(0x1E00, 0x2C00), 0x3000, *range(0x3041, 0x3200))
]
OTHERS += [chr(code) for code in (*range(0xAC00, 0xAD00), *range(0xE000, 0xE100), *range(0x1F300, 0x1F650))]


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def text() -> list[str]:
    return chinese(600_000)


@pytest.fixture(scope="module", params=[16, 1], ids=["pieces", "characters"])
def new(old: Path, text: list[str], tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Any:
    """(tokenizer.model, manifest) of 2,600 pieces."""
    directory = tmp_path_factory.mktemp("extended")
    manifest = vocab.extend(vocab.load_base(old), text, directory, 2600, request.param, 0.999)
    return directory / "tokenizer.model", manifest


def test_old_pieces_keep_their_ids_and_new_ones_are_chinese_and_last_in_rank(old: Path, new: Any) -> None:
    before, after = (ModelProto.FromString(path.read_bytes()) for path in (old, new[0]))
    count, manifest = len(before.pieces), new[1]
    assert list(after.pieces[:count]) == list(before.pieces)
    assert after.normalizer_spec == before.normalizer_spec
    assert after.trainer_spec.vocab_size == count == manifest["old_pieces"]
    added = after.pieces[count:]
    assert len(after.pieces) == manifest["vocab_size"] == 2600
    assert all(CHINESE.fullmatch(character) for piece in added for character in piece.piece)
    assert {piece.type for piece in added} == {ModelProto.SentencePiece.NORMAL}
    assert len({piece.piece for piece in after.pieces}) == 2600
    scores = [min(piece.score for piece in before.pieces), *(piece.score for piece in added)]
    assert all(first > second for first, second in itertools.pairwise(scores))
    assert manifest["new_characters"] + manifest["new_longer_pieces"] == len(added)
    assert vocab.is_extension(new[0], old, 2600) and not vocab.is_extension(old, new[0], 2600)


def test_text_without_chinese_is_encoded_as_before(old: Path, new: Any, text: list[str]) -> None:
    before, after = vocab.load(old), vocab.load(new[0])
    dice = random.Random(1)
    strings = ["".join(dice.choices(OTHERS, k=dice.randrange(200))) for _ in range(3000)]
    strings += [f"{first}{second}\n" for first, second in zip(english(500, 1), strings, strict=False)]
    assert not any(CHINESE.search(string) for string in strings)
    assert before.encode(strings) == after.encode(strings)
    assert vocab.check_unchanged(old, new[0], text) == len(text) + before.vocab_size()


def test_a_changed_encoding_would_be_noticed(old: Path, tmp_path: Path) -> None:
    before, lines = vocab.load(old), english(10)
    joined = "".join(before.encode(lines[0], out_type=str)[:2])  # a new piece that is not Chinese
    model = vocab.append_pieces(vocab.load_base(old), [joined])
    (tmp_path / "new.model").write_bytes(model.SerializeToString())
    with pytest.raises(RuntimeError, match="in another way"):
        vocab.check_unchanged(old, tmp_path / "new.model", lines)


def test_chinese_takes_fewer_tokens_and_survives_and_every_new_piece_is_reached(old: Path, new: Any) -> None:
    before, after = vocab.load(old), vocab.load(new[0])
    for unseen in chinese(200_000, seed=6):
        assert after.decode(after.encode(unseen)) == before.decode(before.encode(unseen))
        assert len(after.encode(unseen)) < 0.8 * len(before.encode(unseen))
    for number in range(before.vocab_size(), after.vocab_size()):
        piece = after.id_to_piece(number)
        assert after.encode(f"\n{piece}\n")[-2] == number, piece  # between newlines: no dummy prefix touches it


def test_a_piece_that_an_old_merge_cuts_through_is_left_out_and_replaced(old: Path, tmp_path: Path) -> None:
    # Learnt alone, 甲有限乙 is 甲有 + 限乙; here the old 有限 merges first, and nothing leads on from 甲, 有限, 乙.
    lines = ["甲有"] * 50 + ["限乙"] * 40 + ["甲有限乙"] * 90 + ["公司"] * 5 + ["丙丁"] * 4
    model = vocab.load_base(old)
    manifest = vocab.extend(model, lines, tmp_path, len(model.pieces) + 9, 16, 1.0)
    after = vocab.load(tmp_path / "tokenizer.model")
    pieces = [after.id_to_piece(number) for number in range(len(model.pieces), after.vocab_size())]
    assert pieces == ["甲", "乙", "公", "丁", "丙", "甲有", "限乙", "公司", "丙丁"]
    assert manifest["dead_pieces_dropped"] == 1


def test_characters_alone_are_completed_from_gb2312(old: Path, tmp_path: Path) -> None:
    model = vocab.load_base(old)
    manifest = vocab.extend(model, ["鑫鑫，司"], tmp_path, len(model.pieces) + 7438, 1, 1.0)
    assert manifest["new_characters"] == 7438 and manifest["not_in_sample"] == 7436
    after = vocab.load(tmp_path / "tokenizer.model")
    first = [after.id_to_piece(len(model.pieces) + number) for number in range(5)]
    assert first == ["鑫", "，", "啊", "阿", "埃"]


def test_the_same_sample_gives_the_same_bytes(old: Path, new: Any, text: list[str], tmp_path: Path) -> None:
    longest = 16 if new[1]["new_longer_pieces"] else 1
    again = vocab.extend(vocab.load_base(old), text, tmp_path, 2600, longest, 0.999)
    assert again["sha256"] == new[1]["sha256"]


def test_sizes_that_cannot_be_are_refused_with_one_that_can(old: Path, tmp_path: Path) -> None:
    model = vocab.load_base(old)
    with pytest.raises(UserError, match="adds nothing to 600 pieces"):
        vocab.extend(model, ["公司"], tmp_path, 600, 16, 1.0)
    with pytest.raises(UserError, match="extend_to 700 is too large for this text") as caught:
        vocab.extend(model, ["公司公司"] * 3, tmp_path, 700, 16, 1.0)
    most = int(caught.value.fix.split("at most ")[1].split(",")[0])
    assert vocab.extend(model, ["公司公司"] * 3, tmp_path, most, 16, 1.0)["vocab_size"] == most
    with pytest.raises(UserError, match="holds no Chinese"):
        vocab.extend(model, ["English only"], tmp_path, 700, 16, 1.0)


def test_only_a_bpe_vocabulary_with_bytes_is_extended(tmp_path: Path) -> None:
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(english(300)),
        model_prefix=str(tmp_path / "unigram"),
        vocab_size=200,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    with pytest.raises(UserError, match="not a BPE vocabulary with byte fallback") as caught:
        vocab.load_base(tmp_path / "unigram.model")
    assert caught.value.evidence == "model_type unigram, byte_fallback False"
    with pytest.raises(UserError, match=r"hf download meta-llama/Llama-2-7b-hf"):
        vocab.load_base(tmp_path / "missing.model")


def test_prepare_extends_measures_and_prints(old: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def made(*more: str) -> Path:
        settings = (
            "data.sources=[{synthetic: {size: 400KB, held_out_size: 100KB, seed: 3}}]",
            f"data.cache_dir={tmp_path}/cache",
            "tokenizer.vocab_size=null",
            f"tokenizer.path={old}",
            "tokenizer.extend_to=1500",
        )
        return prepare.run(recipe.load(QUICKSTART, (*settings, *more)).recipe).directory

    directory = made()
    assert files.read_json(directory / "manifest.json")["vocab_size"] == 1500
    (step,) = (tmp_path / "cache").glob("tokenizer-*")
    manifest = files.read_json(step / "manifest.json")
    assert manifest["texts_encoded_as_before"] > 600
    assert set(manifest["compression"]) == {"announcement", "fin_news", "fin_articles", "fin_exam"}
    for row in manifest["compression"].values():
        assert row["documents"] > 0 and row["characters"] < row["bytes"] <= 2_100_000
        assert row["tokens"]["after"] < 0.7 * row["tokens"]["before"]
    row = manifest["compression"]["fin_news"]
    printed = capsys.readouterr().err
    before, after = (f"{row['bytes'] / row['tokens'][name]:.2f}" for name in ("before", "after"))
    assert f"{before} -> {after}" in printed and "600 old, " in printed
    assert made() == directory
    assert "extending" not in capsys.readouterr().err
    assert made("tokenizer.extend_longest=1") != directory
    assert made(f"data.prepared={directory}") == directory
    with pytest.raises(UserError, match="the tokenizer does not match the shards"):
        made(f"data.prepared={directory}", "tokenizer.extend_to=1501")
    with pytest.raises(UserError, match="not a sentencepiece model"):  # said before anything is read
        made(f"tokenizer.path={tmp_path}/missing.model", f"data.cache_dir={tmp_path}/empty")
    assert [path.name for path in (tmp_path / "empty").iterdir()] == [".lock"]
