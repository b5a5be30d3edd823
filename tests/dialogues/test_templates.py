"""Models' own chat templates: what the assistant says is found in every turn, and none of it may be left out."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from finlm.base.errors import UserError
from finlm.cli import main
from finlm.dialogues import encode
from finlm.dialogues.templates import (
    SWALLOWED,
    TEMPLATES,
    Refused,
    Template,
    check_messages,
    read_messages,
    read_template,
    read_tools,
)
from finlm.recipe.schema_train import Chat, Sft
from finlm.tokens import pretrained
from vocabularies import byte_level

from dialogues import sample, turns, write
from helpers import ROOT

REAL = [path.parent for path in sorted(Path(os.environ.get("FINLM_TOKENIZERS", "-")).glob("*/tokenizer.json"))]
TWO = turns("你好", "您好！", "再见", "回见。")["messages"]
REASONED = turns("一加一？", "<think>\n相加。\n</think>\n\n等于二。")["messages"]
# In the way of Qwen3: only the last answer has its reasoning, an empty one where there is none.
QWEN3 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}"
    "{% if '</think>' in m.content %}{{ m.content }}{% else %}<think>\n\n</think>\n\n{{ m.content }}{% endif %}"
    "{% elif m.role == 'assistant' %}{{ m.content.split('</think>')[-1].lstrip() }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# In the way of R1: no reasoning in any answer, and the prompt begins it.
R1 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<U>{{ m.content }}"
    "{% else %}<A>{{ m.content.split('</think>')[-1] }}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<A><think>\n{% endif %}"
)
MUTE = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% else %}!{% endif %}{% endfor %}"


# In the way of Qwen2.5: tools in the system's turn, calls as JSON, results in the user's.
WITH_TOOLS = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n"
    "</tool_response><|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PRICE = {"name": "price", "description": "收盘价", "parameters": {"type": "object", "properties": {"code": {}}}}
CALL = {"name": "price", "arguments": {"code": "600519"}}
IN_OPENAIS_FORM = {
    "tools": [{"type": "function", "function": PRICE}],
    "messages": [
        {"role": "user", "content": "600519收盘价？"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": CALL}]},
        {"role": "tool", "tool_call_id": "1", "content": "1500.2"},
        {"role": "assistant", "content": "收于1500.2元。"},
    ],
}
IN_LLAMA_FACTORYS_FORM = {
    "tools": json.dumps([PRICE]),
    "conversations": [
        {"from": "human", "value": "600519收盘价？"},
        {"from": "function_call", "value": json.dumps(CALL)},
        {"from": "observation", "value": "1500.2"},
        {"from": "gpt", "value": "收于1500.2元。"},
    ],
}


def learnt(source: str, messages: list[dict[str, str]]) -> list[str]:
    text, spans = Template(source, "<s>", "</s>").render(messages)
    return [text[first:last] for first, last in spans]


def test_turns_that_a_template_writes_otherwise_than_the_last_are_found() -> None:
    assert learnt(QWEN3, TWO) == ["您好！<|im_end|>", "<think>\n\n</think>\n\n回见。<|im_end|>"]
    assert learnt(QWEN3, REASONED) == [REASONED[1]["content"] + "<|im_end|>"]
    assert learnt(R1, TWO) == ["您好！</s>", "回见。</s>"]


@pytest.mark.parametrize(
    ("source", "messages"),
    [
        (R1, REASONED),
        (QWEN3, [*REASONED, *TWO]),  # the history has no reasoning
        (MUTE, TWO),
        ("{% for m in messages %}{% if loop.first %}{{ m.content }}{% endif %}{% endfor %}", TWO),
        ("{% for m in messages %}{% generation %}{{ m.role }}{% endgeneration %}{% endfor %}", TWO),
    ],
)
def test_a_template_that_leaves_out_an_answer_is_refused(source: str, messages: list[dict[str, str]]) -> None:
    with pytest.raises(Refused, match=SWALLOWED):
        learnt(source, messages)


def test_reasoning_is_kept_by_the_template_for_it() -> None:
    assert learnt(TEMPLATES["deepseek-r1"], REASONED) == [REASONED[1]["content"] + "</s>"]


@pytest.mark.parametrize("model", REAL or [None], ids=str)
def test_of_a_byte_level_tokenizer_only_answers_and_their_ends_are_learnt(model: Path | None, tmp_path: Path) -> None:
    """A real one's too, where they lie."""
    opened = pretrained.open_tokenizer(model or byte_level(tmp_path / "m").parent)
    assert opened.chat_template is not None
    template = Template(opened.chat_template, opened.bos[0] if opened.bos else "", opened.eos[0])
    text, spans = template.render(TWO)
    ids, starts = opened.encode(text)
    assert opened.decode(ids) == text
    for (first, last), answer in zip(spans, ("您好！", "回见。"), strict=True):
        said = opened.decode([n for n, start in zip(ids, starts, strict=True) if first <= start < last])
        assert answer in said and "你好" not in said and "再见" not in said
        assert said.endswith(opened.control), "the end of the turn is learnt with it"


def test_a_document_among_dialogues_begins_as_in_pretraining(tmp_path: Path) -> None:
    """A token that starts turns, as SmolLM2 names one, begins no document."""
    about = byte_level(tmp_path / "m", begins=True).with_name("tokenizer_config.json")
    for token, begins in (("<|begin_of_text|>", True), ("<|im_start|>", False)):
        about.write_text(json.dumps(json.loads(about.read_text()) | {"bos_token": token}))
        pretrained._open_cached.cache_clear()
        made = encode.Encoder(encode.Rules(tmp_path / "m", Chat(template="chatml"), Sft(), 99))
        assert made.tokenizer.bos is not None
        assert (made.document("甲").ids[0] == made.tokenizer.bos[1]) == begins


@pytest.mark.parametrize("row", [IN_OPENAIS_FORM, IN_LLAMA_FACTORYS_FORM], ids=["openai", "llama-factory"])
def test_calls_of_tools_are_learnt_and_their_results_are_not(row: dict[str, Any]) -> None:
    messages, tools = read_messages(row), read_tools(row)
    assert isinstance(messages, list) and check_messages(messages, ("<|im_end|>",)) == messages
    template = Template(WITH_TOOLS, "", "<|im_end|>")
    text, spans = template.render(messages, tools=tools)
    call = '<tool_call>\n{"name": "price", "arguments": {"code": "600519"}}\n</tool_call><|im_end|>'
    assert [text[first:last] for first, last in spans] == [call, "收于1500.2元。<|im_end|>"]
    assert '收盘价"' in text and "<tool_response>\n1500.2\n" in text
    theirs, _ = render_jinja_template([messages], tools=tools, chat_template=WITH_TOOLS)
    assert [text] == theirs


def test_a_template_without_tools_refuses_them_and_splitting_keeps_an_exchange_whole(tmp_path: Path) -> None:
    messages, tools = read_messages(IN_OPENAIS_FORM), read_tools(IN_OPENAIS_FORM)
    assert isinstance(messages, list)
    with pytest.raises(Refused, match="writes no calls of tools"):
        Template(TEMPLATES["chatml"], "", "<|im_end|>").render(messages, tools=tools)
    about = byte_level(tmp_path / "m").with_name("tokenizer_config.json")
    about.write_text(json.dumps(json.loads(about.read_text()) | {"chat_template": WITH_TOOLS}))
    pretrained._open_cached.cache_clear()

    def encoder(limit: int) -> encode.Encoder:
        return encode.Encoder(encode.Rules(tmp_path / "m", Chat(template="model", overlong="split"), Sft(), limit))

    whole = len(encoder(10_000).encode(messages, tools).ids)
    counts: Counter[str] = Counter()
    parts = list(encoder(whole).pieces([*messages, *TWO[:2], *messages], counts, tools))
    assert len(parts) == 3 and counts["split"] == 1 and len(parts[0].ids) == len(parts[2].ids) == whole


def test_prepare_refuses_it_before_anything_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    about = byte_level(tmp_path / "m").with_name("tokenizer_config.json")
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    (tmp_path / "m/config.json").write_text(json.dumps(config | {"intermediate_size": 128, "vocab_size": 800}))
    rows = [*sample(30), {"messages": REASONED}]

    def prepared(template: str, rows: list[dict[str, object]]) -> int:
        about.write_text(json.dumps(json.loads(about.read_text()) | {"chat_template": template}))
        source = write(tmp_path / "rows.jsonl", rows)
        settings = (f"model.init_from={tmp_path}/m", f"data.sources={source}", f"data.cache_dir={tmp_path}/cache")
        more = ("data.mixture=[]", "eval.suites=[]", "chat.template=model", "data.max_broken_fraction=0")
        sets = [part for setting in (*settings, *more) for part in ("--set", setting)]
        pretrained._open_cached.cache_clear()
        encode.encoder.cache_clear()
        return main.main(["prepare", str(ROOT / "recipes/quickstart/sft.yaml"), *sets])

    assert prepared(MUTE, sample(30)) == 2
    assert SWALLOWED in (printed := capsys.readouterr().err) and "dialogues:" not in printed
    assert prepared(R1, rows) == 2
    assert "its reasoning; the template deepseek-r1 keeps it" in capsys.readouterr().err
    assert not list((tmp_path / "cache").glob("dialogues-*"))
    assert prepared(WITH_TOOLS, [*sample(30), IN_OPENAIS_FORM]) == 0
    assert prepared(QWEN3, rows) == 0


def test_a_template_file_in_another_encoding_is_a_mistake_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_bytes("{# 对话 #}".encode("gb18030"))
    with pytest.raises(UserError, match=r"chat\.template: cannot read"):
        read_template(str(tmp_path / "chat.jinja"), None)
