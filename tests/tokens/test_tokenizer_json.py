"""Pretraining with a byte-level tokenizer.json: its own ids, its own ends of documents, its files unchanged."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from finlm import prepare
from finlm.base import files
from finlm.base.errors import UserError
from finlm.cli import main
from finlm.recipe import cluster, recipe
from finlm.rows.shards import Shards
from finlm.tokens import encoders, pretrained, tokenizer_json
from vocabularies import byte_level, chinese, english

from helpers import QUICKSTART, new_run
from ranks import Ranks

# Where real ones lie, a directory each, they are tried as well.
REAL = [path.parent for path in sorted(Path(os.environ.get("FINLM_TOKENIZERS", "-")).glob("*/tokenizer.json"))]
TEXTS = [*chinese(100_000)[:60], *english(40), "甲<|endoftext|>乙<think>丙</think>", "é 1234.5%\n\n x"]

Make = Callable[..., Shards]


@pytest.fixture(scope="module", params=["qwen", "llama3", *REAL], ids=lambda given: Path(given).name)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if isinstance(request.param, Path):
        return request.param / "tokenizer.json"
    return byte_level(tmp_path_factory.mktemp(request.param), begins=request.param == "llama3")


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """make(tokenizer, "a.b=c", ...) -> the shards of TEXTS."""
    (tmp_path / "news.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))

    def prepared(path: Path, *overrides: str, cache: str = "cache") -> Shards:
        settings = (
            f"data.sources={tmp_path}/news.jsonl", f"data.cache_dir={tmp_path}/{cache}", "data.clean=none",
            "data.dedup.method=none", "data.mixture=[]", "data.min_characters=1",
            f"tokenizer={{path: {path}}}", "model.vocab_size=auto",
        )  # fmt: skip
        return prepare.run(recipe.load(QUICKSTART, (*settings, *overrides)).recipe)

    return prepared


def documents(shards: Shards) -> list[list[int]]:
    parts = [*shards.split("train"), *shards.split("held_out")]
    return [part.ids[a:b].tolist() for part in parts for a, b in itertools.pairwise(part.offsets.astype(int).tolist())]


def test_shards_hold_the_librarys_ids_between_the_models_own_ends(model: Path, make: Make) -> None:
    shards = make(model.parent, "data.token_dtype=uint32", "data.held_out_fraction=0.0")
    library = tokenizers.Tokenizer.from_file(str(model))
    library.encode_special_tokens = True
    own = json.loads((model.parent / "tokenizer_config.json").read_text())
    named = pretrained.open_tokenizer(model.parent)
    begins = own.get("add_bos_token") is True or library.encode("a").ids[0] == (named.bos or ("", -1))[1]
    begin = [named.bos[1]] if begins and named.bos else []
    expected = [[*begin, *library.encode(text, add_special_tokens=False).ids, named.eos[1]] for text in TEXTS]
    assert sorted(documents(shards)) == sorted(expected)
    assert shards.dtype.itemsize == 4 and shards.manifest["encoder"] == "gigatoken"
    assert shards.vocab_size == 1 + max(library.get_vocab().values())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (shards.directory / "tokenizer" / name).read_bytes() == (model.parent / name).read_bytes()


def test_the_bytes_do_not_depend_on_encoder_or_workers_and_a_second_run_does_nothing(
    tmp_path: Path, make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    path = byte_level(tmp_path / "model")
    first = make(path.parent)
    assert first.dtype.itemsize == 2
    capsys.readouterr()
    assert make(path).directory == first.directory and "(reused)" in capsys.readouterr().err
    other = make(path, "data.encoder=tokenizers", "data.num_proc=2", cache="other")
    assert other.manifest["encoder"] == "tokenizers" and other.directory.name == first.directory.name
    for item in first.manifest["shards"]:
        assert files.sha256_file(other.directory / item["file"]) == item["sha256"]
    about = path.with_name("tokenizer_config.json")
    about.write_text(about.read_text().replace("<|endoftext|>", "<|im_end|>"))
    pretrained._open_cached.cache_clear()
    assert make(path).eos_id != first.eos_id


def test_the_recipe_may_name_other_tokens_around_documents(tmp_path: Path, make: Make) -> None:
    path = byte_level(tmp_path / "model", begins=True)
    named = pretrained.open_tokenizer(path.parent)
    start, end = named.id_of("<|im_start|>"), named.id_of("<|im_end|>")
    shards = make(path, "tokenizer.document_begin=<|im_start|>", "tokenizer.document_end=<|im_end|>")
    assert {(ids[0], ids[-1]) for ids in documents(shards)} == {(start, end)}
    assert (shards.bos_id, shards.eos_id) == (start, end)
    assert {ids[0] for ids in documents(make(path, "tokenizer.add_bos=false"))}.isdisjoint({named.id_of(named.bos[0])})
    with pytest.raises(UserError, match=r"document_end: the tokenizer has no token <\|eot\|>"):
        make(path, "tokenizer.document_end=<|eot|>", cache="empty")
    with pytest.raises(UserError, match=r"sentencepiece does not read tokenizer\.json"):
        make(path, "data.encoder=sentencepiece", cache="other")
    assert not list((tmp_path / "empty").glob("documents-*"))


def test_a_tokenizer_with_more_tokens_than_the_model_has_rows_is_refused_before_anything_is_read(
    tmp_path: Path, make: Make
) -> None:
    path = byte_level(tmp_path / "model")
    with pytest.raises(UserError, match="the tokenizer has 704 pieces, the model 703 rows"):
        make(path, "model.vocab_size=703", cache="empty")
    assert [path.name for path in (tmp_path / "empty").iterdir()] == [".lock"]


@pytest.mark.parametrize("content", ["", "{}", '{"model": {"type": "BPE"}}'])
def test_what_is_no_tokenizer_is_refused_before_anything_is_read(tmp_path: Path, make: Make, content: str) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/tokenizer.json").write_text(content)
    with pytest.raises(UserError, match="not a tokenizer that the library tokenizers reads"):
        make(tmp_path / "model", cache="empty")
    (tmp_path / "model/tokenizer.json").unlink()
    with pytest.raises(UserError, match="holds no tokenizer"):
        make(tmp_path / "model", cache="empty")
    assert [path.name for path in (tmp_path / "empty").iterdir()] == [".lock"]


def test_gigatoken_agrees_on_traps_and_a_control_token_in_a_document_is_text(model: Path) -> None:
    assert encoders.find_disagreement(model) == ""
    fast, slow = encoders.Gigatoken(model), encoders.Tokenizers(model)
    assert (
        encoders.difference(fast, slow, [text.encode() for text in (*encoders.TRAPS, *TEXTS, "e\u0301ﬁ\r\n\t")]) == ""
    )
    fast._tokenizer = type(fast._tokenizer).from_json(model.read_text())  # its own way: the name is the token
    token = tokenizer_json.added_tokens(model)[0]
    assert encoders.difference(fast, slow, [b"a", f"甲{token}".encode()]) == repr(f"甲{token}")


def test_long_documents_are_cut_without_a_trace(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [line for text in TEXTS for line in text.split("\n")]
    batch = ["", "\n" * 99, "\n".join(lines), "\r\n\n  ".join(lines[:40]), "字" * 500, "a\n b\n\n!\n" * 60]
    encoded, cuts = [text.encode() for text in batch], encoders.load_cutter(model)
    reference = encoders.reference(model)
    whole, lengths = reference(encoded)
    for limit in (100, 3000):
        monkeypatch.setattr(encoders, "_LONG", limit)
        ids, counts = cuts.encode(reference, encoded)
        assert ids.tolist() == whole.tolist() and counts.tolist() == lengths.tolist()
    assert len(list(cuts._parts(encoded[2]))) > 5


def test_pretraining_goes_on_from_a_model_with_its_own_tokenizer(
    tmp_path: Path, ranks: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    start, out = tmp_path / "start", tmp_path / "out"
    size = pretrained.open_tokenizer(byte_level(start, begins=True).parent).vocab_size
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    ids = {"bos_token_id": size - 1, "eos_token_id": size - 5, "rms_norm_eps": 1e-5}
    LlamaForCausalLM(LlamaConfig(vocab_size=size + 9, **shape, **ids)).save_pretrained(start)
    settings = (
        f"model={{init_from: {start}, hidden_size: 32, layers: 1, heads: 2, ffn_size: 48, vocab_size: {size + 9}}}",
        "tokenizer={}", "data.sources=[{synthetic: {size: 200KB, held_out_size: 100KB, seed: 3}}]", "data.mixture=[]",
        f"data.cache_dir={tmp_path}/cache", "batch={sequence_length: 64, tokens_per_step: 512}", "train.steps=3",
        "optim={lr: 1.0e-3, warmup_steps: 2}", "eval={max_tokens_per_source: 2000}", "checkpoint.every_steps=null",
    )  # fmt: skip
    loaded = recipe.load(QUICKSTART, settings)
    shards = prepare.run(loaded.recipe)
    prepare.show_rows(loaded.recipe, shards, 8)
    assert "<|begin_of_text|>" in (printed := capsys.readouterr().out) and "公司" in printed
    run = new_run(loaded, cluster.Cluster((cluster.Host("localhost", 1, None, 8 * 2**30),)), tmp_path / "runs")
    assert len(ranks.train(run)) == 3
    assert main.main(["export", str(run.path), str(out)]) == 0
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (out / name).read_bytes() == (start / name).read_bytes()
    config = json.loads((out / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (size - 1, size - 5)
    text = TEXTS[0]
    found = AutoTokenizer.from_pretrained(out)(text)["input_ids"]
    assert [*found, size - 5] == next(
        [size - 1, *ids.tolist(), size - 5]
        for ids in [encoders.Tokenizers(start / "tokenizer.json")([text.encode()])[0]]
    )
    assert main.main(["sample", str(run.path), "公司"]) == 0
