"""New Chinese merges behind those of a byte-level tokenizer.json: old text keeps its ids, nothing is lost."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from finlm import prepare
from finlm.base import files
from finlm.base.errors import UserError
from finlm.corpus import vocabulary
from finlm.recipe import recipe
from finlm.tokens import encoders, pretrained, tokenizer_json
from finlm.train.model import causal_lm
from vocabularies import byte_level, chinese, english

from helpers import QUICKSTART

MORE = 1000


@pytest.fixture(scope="module", params=[False, True], ids=["qwen", "llama3"])
def old(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_level(tmp_path_factory.mktemp("base"), begins=request.param)


@pytest.fixture(scope="module")
def new(old: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return extended(old, tmp_path_factory.mktemp("new"))


def extended(old: Path, directory: Path, longest: int = 16) -> Path:
    base = tokenizer_json.load_base(old)
    lines = vocabulary.lines(chinese(300_000))
    tokenizer_json.extend(base, lines, directory, base.size + MORE, longest, 0.98)
    return directory / "tokenizer" / "tokenizer.json"


def ids(path: Path, text: str) -> list[int]:
    return [int(number) for number in encoders.Tokenizers(path)([text.encode()])[0]]


def test_old_tokens_keep_their_ids_and_files_and_new_ones_are_chinese(old: Path, new: Path) -> None:
    before, after = (json.loads(path.read_text()) for path in (old, new))
    assert before["model"]["vocab"].items() <= after["model"]["vocab"].items()
    assert after["added_tokens"] == before["added_tokens"]
    assert after["model"]["merges"][: len(before["model"]["merges"])] == before["model"]["merges"]
    assert new.with_name("tokenizer_config.json").read_bytes() == old.with_name("tokenizer_config.json").read_bytes()
    loaded, base = tokenizers.Tokenizer.from_file(str(new)), tokenizer_json.load_base(old)
    for token in before["added_tokens"]:
        assert loaded.token_to_id(token["content"]) == token["id"]
        assert loaded.encode(f"甲{token['content']}", add_special_tokens=False).ids[-1] == token["id"]
    pieces = [loaded.decode([number]) for number in range(base.size, base.size + MORE)]
    whole = [piece for piece in pieces if "\ufffd" not in piece]
    assert all(tokenizer_json.CHINESE.fullmatch(letter) for piece in whole for letter in piece)
    assert len(whole) > 0.6 * MORE and max(map(len, whole)) >= 2
    assert loaded.get_vocab_size() == base.size + MORE and tokenizer_json.is_extension(new, old, base.size + MORE)


def test_text_without_chinese_is_encoded_as_before_and_every_text_comes_back(old: Path, new: Path) -> None:
    texts = chinese(100_000, seed=6)[:80]
    assert tokenizer_json.check_unchanged(old, new, [*texts, *english(60, 3), *encoders.TRAPS]) > 700
    library, tokens = tokenizer_json.load(new), [0, 0]
    for text in texts:
        found = ids(new, text)
        assert library.decode(found, skip_special_tokens=False) == text
        tokens[0] += len(ids(old, text))
        tokens[1] += len(found)
    assert tokens[1] < 0.6 * tokens[0]
    assert encoders.find_disagreement(new) == "" and {*range(704, 704 + MORE)} & {
        n for text in texts for n in ids(new, text)
    }


def test_a_changed_encoding_would_be_noticed(old: Path, tmp_path: Path) -> None:
    settings = json.loads(old.read_text())
    settings["model"]["merges"] = settings["model"]["merges"][:-50]
    (tmp_path / "tokenizer.json").write_text(json.dumps(settings))
    with pytest.raises(RuntimeError, match="in another way"):
        tokenizer_json.check_unchanged(old, tmp_path / "tokenizer.json", english(40))


def test_the_same_sample_gives_the_same_bytes_and_characters_alone_are_completed(
    old: Path, new: Path, tmp_path: Path
) -> None:
    assert extended(old, tmp_path / "again").read_bytes() == new.read_bytes()
    single = tokenizers.Tokenizer.from_file(str(extended(old, tmp_path / "single", longest=1)))
    first = tokenizer_json.load_base(old).size
    found = [single.decode([number]) for number in range(first, first + MORE)]
    assert {len(piece) for piece in found} == {1} and len(set(found)) > 0.6 * MORE


def test_a_spelt_text_is_the_text_in_old_tokens_and_new_rows_are_means(old: Path, new: Path) -> None:
    first, spelt = causal_lm.spellings(new)
    assert first == tokenizer_json.load_base(old).size and len(spelt) == MORE
    spelling = [[number] for number in range(first)] + spelt
    for text in (*chinese(100_000, seed=7)[:40], *english(20, 1)):
        assert [part for number in ids(new, text) for part in spelling[number]] == ids(old, text)
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=first + 20, **shape))  # rows to spare, as Qwen's tables have
    before = model.model.embed_tokens.weight.detach().clone()
    causal_lm.extend_embeddings(model, new, first + MORE + 12)
    table = model.model.embed_tokens.weight
    assert torch.equal(table[:first], before[:first]) and not table[first + MORE :].any()
    for place in (0, 1, MORE - 1):
        assert torch.allclose(table[first + place], before[spelt[place]].mean(0), atol=1e-6)
    small = LlamaForCausalLM(LlamaConfig(vocab_size=first - 1, **shape))
    for tokenizer, wrong in ((new, small), (old, model)):
        with pytest.raises(UserError, match="does not belong to the weights"):
            causal_lm.extend_embeddings(wrong, tokenizer, first + MORE)


def test_what_cannot_be_is_refused(old: Path, tmp_path: Path) -> None:
    base = tokenizer_json.load_base(old)
    with pytest.raises(UserError, match="adds nothing"):
        tokenizer_json.extend(base, ["净利润"], tmp_path, base.size, 16, 1.0)
    whole = byte_level(tmp_path / "spare")
    whole.with_name("config.json").write_text(json.dumps({"vocab_size": 720}))
    with pytest.raises(UserError, match="the number of rows that the model has already"):
        tokenizer_json.extend(tokenizer_json.load_base(whole), ["净利润"], tmp_path, 720, 16, 1.0)
    shutil.rmtree(whole.parent)
    with pytest.raises(UserError, match="holds no Chinese"):
        tokenizer_json.extend(base, ["profit"], tmp_path, base.size + 9, 16, 1.0)
    with pytest.raises(UserError, match="is too large for this text") as caught:
        tokenizer_json.extend(base, ["净利润同比增长"] * 9, tmp_path, base.size + 900, 16, 1.0)
    assert "at most" in caught.value.fix and not list(tmp_path.iterdir())
    tokenizers.Tokenizer(tokenizers.models.WordPiece({"[UNK]": 0}, unk_token="[UNK]")).save(str(tmp_path / "w.json"))
    with pytest.raises(UserError, match="not a byte-level BPE") as caught:
        tokenizer_json.load_base(tmp_path / "w.json")
    assert caught.value.evidence == "model WordPiece, pre-tokenizers none"


def test_prepare_extends_measures_and_prints(old: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = tokenizer_json.load_base(old).size + MORE

    def made(*more: str) -> Any:
        settings = (
            "data.sources=[{synthetic: {size: 200KB, held_out_size: 100KB, seed: 3}}]", "data.mixture=[]",
            f"data.cache_dir={tmp_path}/cache", f"tokenizer={{path: {old}, extend_to: {size}}}",
        )  # fmt: skip
        return prepare.run(recipe.load(QUICKSTART, (*settings, *more)).recipe)

    shards = made()
    assert shards.vocab_size == size and pretrained.open_tokenizer(shards.tokenizer.parent).vocab_size == size
    (step,) = (tmp_path / "cache").glob("tokenizer-*")
    manifest = files.read_json(step / "manifest.json")
    assert manifest["texts_encoded_as_before"] > 700
    row = manifest["compression"]["fin_news"]
    before, after = (f"{row['bytes'] / row['tokens'][name]:.2f}" for name in ("before", "after"))
    printed = capsys.readouterr().err
    assert f"{before} -> {after}" in printed and f"{size - MORE} old, " in printed
    assert causal_lm.spellings(shards.tokenizer)[0] == size - MORE
    assert made(f"data.prepared={shards.directory}").directory == shards.directory
    with pytest.raises(UserError, match="the tokenizer does not match the shards"):
        made(f"data.prepared={shards.directory}", f"tokenizer.extend_to={size + 1}")
