"""The tokenizer: Llama's conventions, the exact size."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest

from finlm.base.errors import UserError
from finlm.corpus import vocabulary
from finlm.tokens import pretrained, vocab

WORDS = (
    *("公司", "营业收入", "净利润", "同比增长", "报告期", "现金流量", "股东大会", "审计"),
    *("资产负债表", "亿元", "万元", "其中", "主要系", "所致"),
)


def texts(count: int, seed: int = 0) -> list[str]:
    dice = random.Random(seed)

    def sentence() -> str:
        return "".join(dice.choices(WORDS, k=8)) + f"{dice.random() * 100:.2f}%，"

    return ["\n".join(sentence() for _ in range(5)) for _ in range(count)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("vocab")
    manifest = vocab.train(vocabulary.lines(texts(300)), directory, 400, 1.0)
    assert (manifest["vocab_size"], manifest["unk_id"], manifest["bos_id"], manifest["eos_id"]) == (400, 0, 1, 2)
    return vocab.load(directory / "tokenizer.model")


@pytest.mark.parametrize(
    "text",
    ["净利润12.5亿元", "第一行\n\n第二行", "a  b\tc", "罕见字龘😀㎡", "</s> <s> <unk> <0x0A>", "①％", "x" * 50_000],
)
def test_every_text_survives_encoding_and_gets_no_control_token(model: Any, text: str) -> None:
    (ids,) = vocab.encode(model, [text])
    assert model.decode(ids.tolist()) == text
    assert not set(ids.tolist()) & {vocab.UNK_ID, vocab.BOS_ID, vocab.EOS_ID}


def test_pieces_follow_llama(model: Any) -> None:
    pieces = [model.id_to_piece(number) for number in range(model.vocab_size())]
    assert pieces[:3] == ["<unk>", "<s>", "</s>"] and pieces[3:259] == [f"<0x{byte:02X}>" for byte in range(256)]
    assert model.pad_id() == -1
    assert model.encode("净", out_type=str)[0].startswith("▁")  # add_dummy_prefix
    assert model.encode("净\n利", out_type=str)[-2:] == ["<0x0A>", "利"]
    learnt = pieces[259:]
    assert not [piece for piece in learnt if len(piece) > 1 and any(character.isdigit() for character in piece)]
    assert max(map(len, learnt)) <= 16


def test_the_same_sample_gives_the_same_bytes(tmp_path: Path) -> None:
    hashes = set()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        hashes.add(vocab.train(vocabulary.lines(texts(100)), tmp_path / name, 330, 1.0)["sha256"])
    assert len(hashes) == 1


@pytest.mark.parametrize(("wrong", "word"), [(30_000, "at most"), (270, "at least")])
def test_an_impossible_size_names_one_that_works(tmp_path: Path, wrong: int, word: str) -> None:
    with pytest.raises(UserError, match=r"tokenizer\.vocab_size [0-9,]+ is too") as caught:
        vocab.train(vocabulary.lines(texts(100)), tmp_path, wrong, 1.0)
    found = re.search(rf"tokenizer.vocab_size to {word} (\d+)", caught.value.fix)
    assert found is not None
    assert vocab.train(vocabulary.lines(texts(100)), tmp_path, int(found[1]), 1.0)["vocab_size"] == int(found[1])


def test_long_lines_are_cut_before_sentencepiece_would_drop_them(tmp_path: Path) -> None:
    lines = list(vocabulary.lines(["甲" * 2500 + "\n\n乙"]))
    assert "".join(lines) == "甲" * 2500 + "乙" and max(len(line.encode()) for line in lines) < 4192
    one_line = "".join(texts(200)).replace("\n", "")
    assert vocab.train(vocabulary.lines([one_line]), tmp_path, 330, 1.0)["vocab_size"] == 330


def test_a_file_that_is_no_model_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "text.model").write_text("not a model")
    for name in ("text.model", "missing.model"):
        with pytest.raises(UserError, match="not a sentencepiece model"):
            vocab.load(tmp_path / name)


@pytest.mark.parametrize("content", ["", "version https://git-lfs.github.com/spec/v1\nsize 499723\n"])
def test_a_start_whose_tokenizer_model_is_damaged_is_a_mistake_of_the_user(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.model").write_text(content)
    with pytest.raises(UserError, match=r"tokenizer\.model holds no tokenizer") as error:
        pretrained.open_tokenizer(tmp_path)
    assert error.value.evidence and "Git LFS" in error.value.fix
