"""Chat templates, formats of rows, and which tokens of a dialogue are learnt from."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from finlm.base.errors import UserError
from finlm.base.rundir import RunDir
from finlm.dialogues import encode
from finlm.dialogues import templates as chat_templates
from finlm.dialogues.templates import Refused
from finlm.recipe.schema_train import Chat, Sft
from finlm.rows import dialogues
from finlm.rows.shards import IGNORED
from finlm.tokens import encoders, pretrained, vocab

from dialogues import prepared, sample, sft, turns, write

TWO = turns("你好", "您好！", "再见", "回见。")["messages"]
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "price", "arguments": "{}"}}]}
SYSTEM = [{"role": "system", "content": "你是助手。"}]
CHATML_WITHOUT_MARKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def model(finished: tuple[RunDir, str]) -> Path:
    return Path(finished[0].export)


def encoder(model: Path, limit: int = 257, **settings: Any) -> encode.Encoder:
    chats = {key: settings.pop(key) for key in ("template", "system", "overlong") if key in settings}
    return encode.Encoder(encode.Rules(model, Chat(**chats), Sft(**settings), limit))


def learnt(made: encode.Encoder, found: encode.Encoded) -> str:
    return made.tokenizer.decode([token for token, counts in zip(found.ids, found.mask, strict=True) if counts])


@pytest.mark.parametrize("name", [*chat_templates.TEMPLATES, "own"])
def test_a_prompt_is_the_beginning_of_the_dialogue_and_the_answers_are_the_rest(name: str) -> None:
    template = chat_templates.Template(chat_templates.TEMPLATES.get(name, CHATML_WITHOUT_MARKS), "<s>", "</s>")
    end = {"chatml": "<|im_end|>", "own": "<|im_end|>", "llama3": "<|eot_id|>"}.get(name, "</s>")
    text, spans = template.render([*SYSTEM, *TWO])
    answers = [text[first:last] for first, last in spans]
    assert [answer.strip().removesuffix(end).strip() for answer in answers] == ["您好！", "回见。"]
    assert all(answer.endswith(end) for answer in answers), "the end of the turn is learnt with it"
    prompt, _ = template.render([*SYSTEM, *TWO[:-1]], generation=True)
    assert text.startswith(prompt) and len(prompt) == spans[-1][0]
    assert "你是助手。" in text


def test_the_released_models_format_is_kept_to_the_letter() -> None:
    text, _ = chat_templates.Template(chat_templates.TEMPLATES["xuanyuan"], "<s>", "</s>").render([*SYSTEM, *TWO])
    assert text == "<s>你是助手。 Human: 你好 Assistant: 您好！</s>Human: 再见 Assistant: 回见。</s>"


def test_a_template_cannot_reach_python() -> None:
    with pytest.raises(Refused):
        chat_templates.Template(
            "{{ messages.__class__.__mro__ }}{{ ''.__class__.__base__.__subclasses__() }}", "", ""
        ).render(TWO)
    with pytest.raises(UserError, match="not valid Jinja: line 1"):
        chat_templates.Template("{% for %}", "", "")


@pytest.mark.parametrize(
    "row",
    [
        {"messages": TWO[:2]},
        {"conversations": [{"from": "human", "value": "你好"}, {"from": "gpt", "value": "您好！"}]},
        {"conversation": [{"human": "你好", "assistant": "您好！"}]},
        {"instruction": "你好", "response": "您好！"},
        {"instruction": "你好", "input": "", "output": "您好！"},
        {"prompt": "你好", "completion": "您好！"},
        {"question": "你好", "answer": "您好！"},
    ],
    ids=lambda row: "+".join(row),
)
def test_every_usual_format_gives_the_same_messages(row: dict[str, Any]) -> None:
    assert chat_templates.read_messages(row) == TWO[:2]


@pytest.mark.parametrize(("passage", "answer"), [("input", "output"), ("context", "response")])
def test_passage_history_and_system_of_alpaca_and_dolly_are_not_lost(passage: str, answer: str) -> None:
    row = {
        "instruction": "翻译",
        passage: "profit",
        answer: "利润",
        "history": [["你好", "您好！"]],
        "system": "你是助手。",
    }
    found = chat_templates.read_messages(row)
    assert [message["content"] for message in found] == ["你是助手。", "你好", "您好！", "翻译\nprofit", "利润"]


@pytest.mark.parametrize(
    ("row", "asked"),
    [
        ({"question": "多少？", "context": "收入三亿元。", "answer": "三亿元。"}, "多少？\n收入三亿元。"),
        ({"instruction": "", "input": "利润", "output": "profit"}, "利润"),
        ({"instruction": "翻译", "input": None, "output": "translate"}, "翻译"),
        ({"input": "利润", "target": "profit"}, "利润"),
    ],
    ids=["question", "empty instruction", "null", "input alone"],
)
def test_the_users_turn_is_every_text_of_the_prompt_that_is_not_empty(row: dict[str, Any], asked: str) -> None:
    assert [message["content"] for message in chat_templates.read_messages(row)][:-1] == [asked]


@pytest.mark.parametrize(
    "answers", [("利润", "收入"), (turns("？", "利润")["messages"], turns("？", "收入")["messages"])]
)
def test_passage_history_and_system_of_a_preference_are_not_lost(answers: tuple[Any, Any]) -> None:
    texts: dict[str, Any] = {"instruction": "翻译", "input": "profit", "history": [["你好", "您好！"]]}
    is_whole = isinstance(answers[0], list)
    row = {"system": "你是助手。", "chosen": answers[0], "rejected": answers[1]} | ({} if is_whole else texts)
    asked = ["？"] if is_whole else ["你好", "您好！", "翻译\nprofit"]
    found = encode.read_preference(row)
    assert [message["content"] for message in found.prompt] == ["你是助手。", *asked]
    assert (found.chosen, found.rejected) == ("利润", "收入")


def test_a_passage_that_is_no_text_refuses_the_row_of_dialogues_and_of_preferences() -> None:
    row = {"instruction": "翻译", "input": ["profit"]}
    with pytest.raises(Refused, match="input is not text"):
        chat_templates.read_messages(row | {"output": "利润"})
    with pytest.raises(Refused, match="input is not text"):
        encode.read_preference(row | {"chosen": "利润", "rejected": "收入"})


@pytest.mark.parametrize("said", ["B", "b", "(B)", "B. 农业监督总局", "答案：B"])
def test_a_right_answer_is_stored_as_the_letter_that_earns_the_reward(model: Path, said: str) -> None:
    made, row = encoder(model), {"prompt": "选哪个？", "answer": said}
    (found,) = encode.encode_preference(made, encode.read_preference(row), "grpo", 200, checked=("option",))
    assert learnt(made, found).strip() == "B"
    (found,) = encode.encode_preference(made, encode.read_preference(row), "grpo", 200, checked=())
    assert learnt(made, found).strip() == said


@pytest.mark.parametrize("answer", [42, None])
def test_a_prompt_without_a_right_letter_is_refused_where_the_reward_is_the_letter(model: Path, answer: Any) -> None:
    preference = encode.read_preference({"prompt": "选哪个？", "answer": answer})
    with pytest.raises(Refused, match="no right letter"):
        encode.encode_preference(encoder(model), preference, "grpo", 200, checked=("option",))
    assert encode.encode_preference(encoder(model), preference, "grpo", 200, checked=())


@pytest.mark.parametrize("template", ["xuanyuan", "llama2", "own"])
def test_whoever_renders_the_template_begins_with_the_system_prompt_of_the_training(
    model: Path, tmp_path: Path, template: str
) -> None:
    from transformers import AutoTokenizer

    system = '你是“助手”：\n只说"是"，不说 %} 或 {{ 否 }}。\U0001f600'
    (own := tmp_path / "own.jinja").write_text(CHATML_WITHOUT_MARKS)
    made = encoder(model, template=str(own) if template == "own" else template, system=system)
    theirs = AutoTokenizer.from_pretrained(model)
    theirs.chat_template = made.template.source
    trained = made.tokenizer.decode(made.encode(TWO).ids)
    used = theirs.apply_chat_template(TWO[:-1], tokenize=False, add_generation_prompt=True)
    assert system in used and trained.startswith(used)
    assert made.round_trip(TWO) == {"text": True, "prompt": True}
    told = theirs.apply_chat_template([*SYSTEM, *TWO], tokenize=False)
    assert system not in told and "你是助手。" in told


def test_the_end_of_a_turn_is_what_the_template_writes_behind_an_answer(model: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    fast = Tokenizer.from_file(str(model / "tokenizer.json"))
    fast.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    fast.save(str(tmp_path / "tokenizer.json"))
    templates = {
        "marked": chat_templates.TEMPLATES["chatml"],
        "plain": CHATML_WITHOUT_MARKS,
        "endless": "{% for m in messages %}{{ m.content }}{% endfor %}",
    }
    for name, source in templates.items():
        (tmp_path / f"{name}.jinja").write_text(source)
    (tmp_path / "chat_template.jinja").write_text(CHATML_WITHOUT_MARKS)
    ends = {"chatml": "<|im_end|>", "model": "<|im_end|>", "xuanyuan": "</s>"}
    ends |= {str(tmp_path / f"{name}.jinja"): "</s>" if name == "endless" else "<|im_end|>" for name in templates}
    for name, end in ends.items():
        made = encoder(tmp_path, template=name)
        assert made.tokenizer.decode([made.end_id]) == end, name


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"chosen": "a"}, "no messages under any known key, only chosen$"),
        ({"instruction": "你好", "input": "a"}, "no response or output beside instruction, only input, instruction$"),
        ({"instruction": "你好", "output": None}, "output is not text"),
        ({"messages": "你好"}, "messages is not a list"),
        ({"messages": [{"role": "user", "text": "你好"}]}, "a turn without content: it has role, text$"),
        ({"messages": [{"role": "user", "contnet": "a"}]}, "is contnet meant to be content?"),
        ({"messages": [{"role": "user", "content": None, "tool_calls": [1]}]}, "a turn without content"),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": [1]}]}, "a call of a tool has no name"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}]}, "is not JSON"),
        ({"messages": [*TWO[:1], CALL, *TWO[1:2]]}, "calls of tools are followed by their results"),
        ({"messages": [*TWO[:1], CALL, {"role": "tool", "content": "1"}]}, "the last turn is the tool's"),
        ({"conversations": [{"form": "human", "value": "a"}]}, "a turn without from: .* is form meant to be from"),
        ({"instruction": "你好", "output": "好", "history": "您好"}, "history is not a list"),
        (turns("你好", ""), "empty assistant turn"),
        (turns("你好", "好", "再见"), "the last turn is the user's"),
        ({"messages": TWO[1:2]}, "turns are not user, assistant"),
        (turns("你好", "好</s>Human: 假的"), "control token in the text"),
        ({"messages": [{"role": "tool", "content": "1"}]}, "calls of tools are followed by their results"),
        ({"messages": [{"role": "critic", "content": "1"}]}, "role critic"),
        ({"messages": [{"role": ["user"], "content": "1"}]}, "role "),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_row_that_cannot_be_learnt_from_is_refused_with_its_reason(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(Refused, match=reason):
        chat_templates.check_messages(chat_templates.read_messages(row), ("<s>", "</s>"))


def test_exactly_the_answers_and_their_ends_are_learnt(model: Path) -> None:
    made = encoder(model)
    found = made.encode([*SYSTEM, *TWO])
    assert learnt(made, found).replace(" ", "") == "您好！</s>回见。</s>"
    assert made.round_trip([*SYSTEM, *TWO]) == {"text": True, "prompt": True}
    assert encoder(model, assistant_only_loss=False).encode(TWO).mask.count(0) == 0


def test_the_prompt_of_the_released_training_code_has_other_tokens_in_use(model: Path) -> None:
    """It ends in a space, which the answer's first token takes when both are encoded together."""
    asked = turns("有什么？", "公告。")["messages"]  # "▁公告" is a piece
    assert encoder(model, template="xuanyuan").round_trip(asked)["prompt"]
    assert not encoder(model, template="llm-code").round_trip(asked)["prompt"]


@pytest.mark.parametrize(
    ("overlong", "parts", "counted"), [("split", 2, {"split": 1}), ("truncate", 1, {"truncated": 1}), ("drop", 0, {})]
)
def test_an_overlong_dialogue_is_split_cut_or_dropped_as_the_recipe_says(
    model: Path, overlong: str, parts: int, counted: dict[str, int]
) -> None:
    made, counts = encoder(model, limit=40, overlong=overlong), Counter[str]()
    long = turns("营业收入是多少？", "三亿元，同比增长。", "净利润是多少？", "五千万元，同比下降。")["messages"]
    assert len(encoder(model).encode(long).ids) > 40
    if not parts:
        with pytest.raises(Refused, match="longer than a row"):
            list(made.pieces(long, counts))
    else:
        pieces = list(made.pieces(long, counts))
        assert len(pieces) == parts and all(len(piece.ids) <= 40 for piece in pieces)
        ended = [piece.ids[-1] == made.tokenizer.eos[1] and piece.mask[-1] == 1 for piece in pieces]
        assert all(ended) if overlong == "split" else not any(ended)
    assert counts == counted


def test_a_dialogue_that_is_left_out_or_not_cut_apart_is_not_counted_as_cut_or_split(model: Path) -> None:
    counts = Counter[str]()
    asked = turns("营业收入是多少？" * 20, "三亿元。")["messages"]
    with pytest.raises(Refused, match="before the answer begins"):
        list(encoder(model, limit=40, overlong="truncate").pieces(asked, counts))
    assert not +counts
    both = turns("营业收入是多少？" * 20, "三亿元。", "净利润是多少？", "五千万元。")["messages"]
    assert len(list(encoder(model, limit=40).pieces(both, counts))) == 1
    assert counts == {encode.LEFT_OUT: 1}


def test_sentencepiece_tokenizers_and_transformers_give_the_same_ids_and_text(
    finished: tuple[RunDir, str], tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    (tmp_path / "tokenizer.model").write_bytes((finished[0].shards / "tokenizer.model").read_bytes())
    pieces, fast = (pretrained.open_tokenizer(path) for path in (tmp_path, Path(finished[0].export)))
    theirs = AutoTokenizer.from_pretrained(finished[0].export)
    dialogue = "<s>Human: 你好 Assistant: 2023年，①  空格\n换行</s>Human: 再见</s>"
    for text in (dialogue, "<s>", "<s> 公告", "无开头", " 公告", "  公告", " ", "公告 </s> 公告"):
        expected = theirs(text, add_special_tokens=False)["input_ids"]
        assert pieces.encode(text) == fast.encode(text) and pieces.encode(text)[0] == expected
        assert pieces.decode(expected) == fast.decode(expected) == theirs.decode(expected)
    assert pieces.decode(pieces.encode(dialogue)[0]) == dialogue


def test_a_document_among_dialogues_has_the_ids_of_pretraining(model: Path, tmp_path: Path) -> None:
    legacy = json.loads((model / "tokenizer.json").read_text())  # as Llama-2's own file is
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    legacy["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u2581"}, replace]}
    legacy["pre_tokenizer"] = None
    shutil.copytree(model, tmp_path / "legacy")
    (tmp_path / "legacy/tokenizer.json").write_text(json.dumps(legacy))
    pretraining = vocab.load(model / "tokenizer.model")
    for made in (encoder(model), encoder(model, tokenizer="sentencepiece"), encoder(tmp_path / "legacy")):
        for text in (
            "公司2023年净利润",
            *(trap for trap in encoders.TRAPS if "<s>" not in trap and "</s>" not in trap),
        ):
            if not any(name in text for name in made.tokenizer.control):
                expected = [1, *vocab.encode(pretraining, [text])[0].tolist(), 2]
                assert made.document(text) == (expected, b"\1" * len(expected)), text


@pytest.mark.parametrize(
    ("overrides", "ends"),
    [
        (("tokenizer.document_begin=<unk>", "tokenizer.document_end=<s>"), (0, 1)),
        (("tokenizer.document_end=<s>", "tokenizer.add_bos=false"), (None, 1)),
        (("tokenizer.add_bos=false",), (None, 2)),
        ((), (1, 2)),
    ],
)
def test_a_document_among_dialogues_begins_and_ends_as_the_recipes_pretraining(
    model: Path, tmp_path: Path, overrides: tuple[str, ...], ends: tuple[int | None, int]
) -> None:
    texts = [f"公司{number}年净利润" for number in range(20)]
    source = write(tmp_path / "rows.jsonl", [*({"text": text} for text in texts), turns("你好", "您好！")])
    shards = prepared(sft(tmp_path, model, source, "data.num_proc=2", *overrides))
    made, pretraining = shards.split("train")[0], vocab.load(model / "tokenizer.model")
    rows = [made.ids[a:b].tolist() for a, b in pairwise(made.offsets.astype(int).tolist())]
    begin = [] if ends[0] is None else [ends[0]]
    expected = [[*begin, *vocab.encode(pretraining, [text])[0].tolist(), ends[1]] for text in texts]
    assert sum(row in expected for row in rows) >= 15


def test_a_token_that_documents_cannot_begin_with_is_named(model: Path, tmp_path: Path) -> None:
    wanted = sft(tmp_path, model, write(tmp_path / "rows.jsonl", sample(3)), "tokenizer.document_end=<|endoftext|>")
    with pytest.raises(UserError, match=r"document_end: the tokenizer has no token <\|endoftext\|>"):
        prepared(wanted)


def test_chatml_is_refused_where_its_tokens_do_not_exist(model: Path, tmp_path: Path) -> None:
    wanted = sft(tmp_path, model, write(tmp_path / "rows.jsonl", sample(3)), "chat.template=chatml")
    with pytest.raises(UserError, match=r"chatml needs tokens that this tokenizer does not have: <\|im_start\|>"):
        prepared(wanted)


def test_prepared_rows_hold_every_token_once_and_no_label_crosses(model: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "rows.jsonl", [*sample(40), *sample(40)[:5], turns("只有问题")])
    wanted = sft(tmp_path, model, source, "data.held_out_fraction=0.1", "data.max_broken_fraction=0.02")
    shards = prepared(wanted)
    counts, made = shards.manifest["dialogues"]["rows"], encoder(model)
    assert counts["duplicate"] == 5 and shards.manifest["refused"]["rows"] == {"the last turn is the user's": 1}
    assert counts["held_out"] > 0 and counts["kept"] + counts["held_out"] + counts["reserved"] == 80
    rows = dialogues.train_rows(shards, wanted)
    _, labels = rows.read(np.arange(len(rows)))
    documents = rows.documents(np.arange(len(rows)))
    held = (documents >= 0).sum() + (labels[:, -1] == shards.eos_id).sum()  # a last label's token is no input
    assert held == shards.manifest["totals"]["train"]["rows"]["tokens"]
    learnt_here = (labels != IGNORED).sum()
    assert learnt_here == shards.manifest["totals"]["train"]["rows"]["learnt"] == rows.supervised(np.arange(len(rows)))
    crossing = documents[:, 1:] != documents[:, :-1]
    assert (labels[:, :-1][crossing] == IGNORED).all()
    text = made.tokenizer.decode([int(token) for token in labels[0] if token != IGNORED])
    assert text.count("</s>") >= 2 and "Human" not in text
    assert len(rows) < 40, "several dialogues share a row"


def test_a_json_list_a_table_and_documents_are_read_too(model: Path, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    (tmp_path / "alpaca.json").write_text(json.dumps([{"instruction": f"问{n}", "output": f"答{n}"} for n in range(9)]))
    parquet.write_table(pa.Table.from_pylist(sample(6)), tmp_path / "rows.parquet")
    write(tmp_path / "news.jsonl", [{"text": f"第{n}条新闻：公司公告。" * 20} for n in range(4)])
    sources = "[{path: %s, name: a}, {path: %s, name: b}, {path: %s, name: c}]"
    wanted = sft(
        tmp_path,
        model,
        tmp_path / "x",
        "data.sources=" + sources % tuple(tmp_path / name for name in ("alpaca.json", "rows.parquet", "news.jsonl")),
        "data.held_out_fraction=0",
    )
    shards = prepared(wanted)
    train = shards.manifest["totals"]["train"]
    assert {name: row["documents"] for name, row in train.items()} == {"a": 9, "b": 12, "c": 4}
    assert train["c"]["learnt"] == train["c"]["tokens"], "every word of a document is learnt"
