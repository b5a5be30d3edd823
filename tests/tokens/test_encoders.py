"""gigatoken writes what sentencepiece would, or is not used."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path

import gigatoken
import numpy as np
import pytest
import sentencepiece

from finlm import prepare
from finlm.base import files
from finlm.base.errors import UserError
from finlm.recipe import recipe
from finlm.tokens import encoders, vocab

from helpers import QUICKSTART

WORDS = ("公司", "营业收入", "净利润", "同比增长", "报告期", "</s>", " ", "  ", "12.3%", "A股", "😀", "\n")


def texts(count: int) -> list[str]:
    dice = random.Random(3)
    return ["".join(dice.choices(WORDS, k=dice.randrange(1, 80))) for _ in range(count)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    lines = (line for text in texts(300) for line in text.split("\n"))  # a newline is a byte, as in Llama
    vocab.train(lines, directory, 350, 0.9995)
    return directory / "tokenizer.model"


def test_the_ids_are_those_of_sentencepiece_also_where_it_is_easy_to_go_wrong(model: Path) -> None:
    assert encoders.find_disagreement(model) == ""
    batch = [text.encode() for text in (*encoders.TRAPS, *texts(200))]
    fast, slow = encoders.Gigatoken(model), encoders.Sentencepiece(model)
    assert encoders.difference(fast, slow, batch) == ""
    ids, lengths = fast(batch)
    assert lengths[batch.index(b"")] == 0 and not {1, 2} & set(ids.tolist())


def test_the_comparison_sees_a_difference(model: Path) -> None:
    """What gigatoken's own loader does: </s> in a document becomes the end of the document."""
    ours = encoders.Gigatoken(model)
    ours._tokenizer = gigatoken.Tokenizer.from_sentencepiece(model)
    assert encoders.difference(ours, encoders.Sentencepiece(model), [b"a", "甲</s>".encode()]) == repr("甲</s>")


def test_user_defined_symbols_are_left_to_sentencepiece(tmp_path: Path) -> None:
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts(300)), model_writer=written, model_type="bpe", vocab_size=360, byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, user_defined_symbols=["<表格>", "净利润率"],
        pad_id=-1, minloglevel=2,
    )  # fmt: skip
    path = tmp_path / "tokenizer.model"
    path.write_bytes(written.getvalue())
    assert "<表格>" in encoders.find_disagreement(path)


@pytest.mark.parametrize("settings", [{"model_type": "unigram"}, {"byte_fallback": False}])
def test_a_model_that_gigatoken_does_not_take_is_named(tmp_path: Path, settings: dict[str, object]) -> None:
    written = io.BytesIO()
    chosen = {"model_type": "bpe", "byte_fallback": True} | settings
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts(300)), model_writer=written, vocab_size=340, minloglevel=2, **chosen
    )
    (tmp_path / "tokenizer.model").write_bytes(written.getvalue())
    assert "only" in encoders.find_disagreement(tmp_path / "tokenizer.model")


def test_one_difference_sends_the_whole_step_to_sentencepiece_aloud(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [json.dumps({"text": f"{number}{text}"}) for number, text in enumerate(texts(400))]
    (tmp_path / "news.jsonl").write_text("\n".join(rows))

    def make(encoder: str, cache: str) -> Path:
        settings = (
            f"data.sources={tmp_path}/news.jsonl", f"data.cache_dir={tmp_path}/{cache}", "data.clean=none",
            "tokenizer.vocab_size=null", f"tokenizer.path={model}", f"data.encoder={encoder}", "data.num_proc=1",
        )  # fmt: skip
        return prepare.run(recipe.load(QUICKSTART, settings).recipe).directory

    wanted = make("sentencepiece", "reference")
    assert make("auto", "fast").name == wanted.name
    monkeypatch.setattr(encoders, "find_disagreement", lambda model: "")  # passes the traps, then fails on the corpus
    build = encoders._settings

    def broken(path: Path) -> str:
        settings = json.loads(build(path))
        settings["model"]["merges"] = [pair for pair in settings["model"]["merges"] if "".join(pair) != "公司"]
        return json.dumps(settings)

    monkeypatch.setattr(encoders, "_settings", broken)
    from finlm.corpus import encode

    encode._load_encoder.cache_clear()
    capsys.readouterr()
    found = make("auto", "other")
    assert "encoding with sentencepiece, at half the speed: gigatoken differs" in capsys.readouterr().err
    assert files.read_json(found / "manifest.json")["encoder"] == "sentencepiece"
    for item in files.read_json(wanted / "manifest.json")["shards"]:
        for cache in ("fast", "other"):
            assert files.sha256_file(tmp_path / cache / wanted.name / item["file"]) == item["sha256"]
    with pytest.raises(UserError, match="gigatoken does not give sentencepiece's ids"):
        make("gigatoken", "strict")
    encode._load_encoder.cache_clear()


def test_a_tokenizer_is_tested_once_and_a_changed_one_again(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "tokenizer.model"
    here.write_bytes(model.read_bytes())
    batch = [text.encode() for text in texts(20)]
    wanted = encoders.Gigatoken(here)(batch)[0]
    assert encoders.check_gigatoken(here) == ""
    monkeypatch.setattr(encoders, "find_disagreement", lambda model: "tested again")
    assert encoders.check_gigatoken(here) == ""
    monkeypatch.setattr(encoders, "_convert", lambda *_: pytest.fail("converted again"))
    assert np.array_equal(encoders.Gigatoken(here)(batch)[0], wanted)
    here.write_bytes(model.read_bytes() + b"\0")
    assert encoders.check_gigatoken(here) == "tested again"


def test_long_documents_are_cut_without_a_trace(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = [
        text.encode() for text in ("", "短", "。\n" * 40, "".join(texts(300)), "公司" * 99, "，".join(texts(20)), " ")
    ]
    cuts = encoders.Cuts(model)
    for encoder in (encoders.Sentencepiece(model), encoders.Gigatoken(model)):
        whole, lengths = encoder(batch)
        for limit in (16, 50, 1000):
            monkeypatch.setattr(encoders, "_LONG", limit)
            ids, counts = cuts.encode(encoder, batch)
            assert ids.tolist() == whole.tolist() and counts.tolist() == lengths.tolist()
            assert len(list(cuts._parts(batch[3]))) > 3


def test_its_caches_are_thrown_away_when_they_grow(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = encoders.Gigatoken(model)
    monkeypatch.setattr(encoders, "_MOST_GROWTH", -1)
    fast._build()
    before = fast._tokenizer
    ids, _ = fast(["净利润".encode()])
    assert fast._tokenizer is not before and ids.tolist() == fast(["净利润".encode()])[0].tolist()
