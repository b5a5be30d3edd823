"""Talking to a model: in a pipe, over several turns, interrupted."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from finlm.base.errors import UserError
from finlm.base.rundir import RunDir
from finlm.cli import main
from finlm.evals import suite
from finlm.inference import chat
from finlm.inference.chat import Talker
from finlm.inference.open import Opened, generate, open_model

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'assistant' %}Assistant: {{ message.content }}"
    "{{ eos_token }}{% else %}{{ message.role }}: {{ message.content }} {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)


@pytest.fixture(scope="module")
def assistant(finished: tuple[RunDir, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The export of the finished run with a chat template and a longer context; what it says is of no use."""
    directory = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(finished[0].export, directory, ignore=shutil.ignore_patterns("finlm.json"))
    (directory / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    config = directory / "config.json"
    config.write_text(config.read_text().replace('"max_position_embeddings": 64', '"max_position_embeddings": 512'))
    return directory


@pytest.fixture(scope="module")
def opened(assistant: Path) -> Opened:
    return open_model(assistant)


def said(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_a_turn_that_reuses_the_conversation_says_what_a_fresh_start_says(opened: Opened) -> None:
    talker, messages = Talker(opened), [said("什么是净利润？")]
    for question in ("它怎么计算？", "举个例子。"):
        reply = talker.ask(messages, 0.0, 12)
        assert reply == Talker(opened).ask(messages, 0.0, 12)
        messages += [{"role": "assistant", "content": reply.text}, said(question)]
    assert talker.reused_tokens > 10
    changed = [said("什么是毛利率？"), *messages[1:]]  # an edited beginning: the cache is cut back to what is the same
    assert talker.ask(changed, 0.0, 12) == Talker(opened).ask(changed, 0.0, 12)


def test_pieces_are_whole_characters_and_make_up_the_reply(opened: Opened) -> None:
    talker = Talker(opened, seed=5)
    pieces = list(talker.stream([said("你好")], 1.0, 0.95, 60))
    assert talker.reply is not None and "".join(pieces) == talker.reply.text
    assert talker.reply.finish_reason in ("stop", "length") and talker.reply.completion_tokens <= 60
    assert not any(piece.endswith("\ufffd") for piece in pieces[:-1])
    again = Talker(opened, seed=5)
    assert "".join(again.stream([said("你好")], 1.0, 0.95, 60)) == "".join(pieces)


def test_an_answer_left_in_the_middle_leaves_a_conversation_that_goes_on(opened: Opened) -> None:
    talker, messages = Talker(opened), [said("什么是净利润？")]
    stream = talker.stream(messages, 0.0, 1.0, 40)
    part = next(stream)
    stream.close()
    assert talker.reply is None
    messages += [{"role": "assistant", "content": part}, said("接着说")]
    assert talker.ask(messages, 0.0, 10) == Talker(opened).ask(messages, 0.0, 10)


def test_a_conversation_longer_than_the_context_is_refused(opened: Opened) -> None:
    with pytest.raises(UserError, match="the model's context 512"):
        Talker(opened).ask([said("净利润" * 3000)], 0.0, 10)


def test_a_template_that_refuses_the_conversation_is_a_mistake_of_the_user(
    assistant: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = Path(shutil.copytree(assistant, tmp_path / "strict"))
    strict = "{% if messages[0].role == 'system' %}{{ raise_exception('no system prompt') }}{% endif %}" + TEMPLATE
    (directory / "chat_template.jinja").write_text(strict, encoding="utf-8")
    monkeypatch.setattr("sys.stdin", io.StringIO("你好\n"))
    assert main.main(["chat", str(directory), "--system", "你是助手", "--tokens", "4"]) == 2
    assert "does not take this conversation" in (printed := capsys.readouterr().err) and "no system prompt" in printed


def test_input_in_another_encoding_is_a_mistake_of_the_user(
    assistant: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("你好\n".encode("gb18030")), "utf-8"))
    assert main.main(["chat", str(assistant), "--tokens", "4"]) == 2
    assert "the input is not UTF-8" in capsys.readouterr().err


def test_the_smallest_temperature_takes_the_likeliest_token(opened: Opened) -> None:
    logits = torch.tensor([3.0, 90.0, -5.0])
    assert Talker(opened)._draw_token(logits, 1e-45, 1.0) == Talker(opened)._draw_token(logits, 0.0, 1.0) == 1


class Keys(io.StringIO):
    """Input in which a line "^C" is an interrupt."""

    def readline(self, size: int = -1) -> str:
        line = super().readline()
        if line == "^C\n":
            raise KeyboardInterrupt
        return line


def test_a_pipe_gets_one_answer_a_line_and_commands_none(
    assistant: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", Keys("你好\n/reset\n\n/what\n^C\n你好\n/exit\n没人听\n"))
    assert main.main(["chat", str(assistant), "--temperature", "0", "--tokens", "8"]) == 0
    printed = capsys.readouterr()
    first, second = printed.out.splitlines()
    assert first == second  # the same question in a new conversation
    assert "/reset begins a new conversation" in printed.err and "once more to leave" in printed.err
    monkeypatch.setattr("sys.stdin", Keys("^C\n^C\n你好\n"))
    assert chat.run(assistant) == 130


FUNCTION = {"name": "revenue", "description": "营业收入", "parameters": {"type": "object", "properties": {}}}
WITH_TOOLS = "{% if tools %}tools: {{ tools | tojson }} {% endif %}" + TEMPLATE


def test_tools_reach_the_template_and_a_line_is_what_one_answers(
    assistant: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = Path(shutil.copytree(assistant, tmp_path / "caller"))
    (directory / "chat_template.jinja").write_text(WITH_TOOLS, encoding="utf-8")
    (tmp_path / "tools.json").write_text(json.dumps([FUNCTION]), encoding="utf-8")
    prompts = []
    answer = chat.Talker._sample_tokens

    def tokens(self: Talker, prompt: list[int], *sampling: float) -> Iterator[int]:
        prompts.append(self.opened.tokenizer.decode(prompt))
        return answer(self, prompt, *sampling)

    monkeypatch.setattr(chat.Talker, "_sample_tokens", tokens)
    monkeypatch.setattr("sys.stdin", Keys("甲公司的营业收入？\n/what\n/tool 3亿元\n"))
    line = ["chat", str(directory), "--temperature", "0", "--tokens", "4", "--tools", str(tmp_path / "tools.json")]
    assert main.main(line) == 0
    assert capsys.readouterr().err.count("/tool TEXT gives the model") == 2
    assert len(prompts) == 2 and all('"name": "revenue"' in prompt and '"function"' in prompt for prompt in prompts)
    assert "user: 甲公司的营业收入？" in prompts[1] and "tool: 3亿元" in prompts[1]


def test_a_call_is_shown_and_kept_with_its_control_tokens(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    written = opened.tokenizer("你好", add_special_tokens=False)["input_ids"]
    call = [opened.tokenizer.bos_token_id, *written]
    monkeypatch.setattr(Talker, "_sample_tokens", lambda *_: iter([*call, opened.eos_ids[0]]))
    assert not Talker(opened).ask([said("收入？")], 0.0, 9).text.startswith("<s>")
    monkeypatch.setattr(opened.tokenizer, "chat_template", WITH_TOOLS)
    assert Talker(opened, tools=[{"type": "function", "function": FUNCTION}]).ask([said("收入？")], 0.0, 9).text == (
        opened.tokenizer.decode(call)
    )


def test_tools_that_no_template_or_file_has_are_a_mistake(
    assistant: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tools.json"
    for text, says in (("[]", "lists no function"), ("[{}]", "functions with names"), ("{", "is not JSON")):
        file.write_text(text, encoding="utf-8")
        assert main.main(["chat", str(assistant), "--tools", str(file)]) == 2
        assert says in capsys.readouterr().err
    file.write_text(json.dumps([FUNCTION]), encoding="utf-8")
    assert main.main(["chat", str(assistant), "--tools", str(file)]) == 2
    assert "writes no tools" in capsys.readouterr().err


def test_a_base_model_is_sent_to_sample(finished: tuple[RunDir, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["chat", str(finished[0].export)]) == 2
    assert "finlm sample" in capsys.readouterr().err


def test_a_model_with_half_its_weights_answers_nothing(assistant: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(assistant, tmp_path / "model"))
    file = directory / "model.safetensors"
    weights = load_file(file)
    save_file({name: tensor for name, tensor in weights.items() if name != "lm_head.weight"}, file, {"format": "pt"})
    with pytest.raises(UserError, match="lack 1 of the model's weights"):
        open_model(directory)
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(UserError, match="cannot be loaded"):
        open_model(directory)


def test_what_a_model_writes_cannot_steer_the_terminal() -> None:
    assert chat._strip_controls("a\x1b[2Jb\r\x07净\n\t") == "a[2Jb净\n\t"
    assert chat._strip_controls("a\u202eb\u2066c\x9b\ud800") == "abc"
    written = "表\u3000格\xa0%👩\u200d💻"  # ideographic and no-break space, joined emoji
    assert chat._strip_controls(written) == written


def test_a_model_without_an_end_writes_as_far_as_it_is_let(assistant: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(assistant, tmp_path / "endless"))
    for name, keys in (("config", ["eos_token_id"]), ("generation_config", ["eos_token_id"])):
        file = directory / f"{name}.json"
        values = json.loads(file.read_text())
        file.write_text(json.dumps(values | dict.fromkeys(keys)))
    opened = open_model(directory)
    assert opened.eos_ids == (opened.tokenizer.eos_token_id,), "the tokenizer's end"
    opened.model.generation_config.eos_token_id = None
    endless = dataclasses.replace(opened, eos_ids=())
    rows = [[5, 6, 7], [8]]
    assert [len(row) for row in generate(endless, rows, 6)] == [6, 6]
    reply = Talker(endless).ask([said("你好")], 0.0, 7)
    assert (reply.finish_reason, reply.completion_tokens) == ("length", 7)


def test_a_checkpoint_in_memory_is_opened_as_one_on_disk(finished: tuple[RunDir, str], tmp_path: Path) -> None:
    """checkpoints/step-N is a link out of the run directory then."""
    run = RunDir(Path(shutil.copytree(finished[0].path, tmp_path / finished[0].path.name, symlinks=True)))
    shutil.rmtree(run.export)
    step, directory = run.complete_checkpoints()[-1]
    whole = open_model(directory)
    memory = tmp_path / "memory" / f"step-{step}"
    memory.parent.mkdir()
    directory.rename(memory)
    directory.symlink_to(memory)
    for path in (run.path, directory):
        assert open_model(path).fingerprint == whole.fingerprint
    assert suite.measure_perplexity(directory)["loss"] == suite.measure_perplexity(run.path)["loss"]
    assert main.main(["export", str(directory), str(tmp_path / "model")]) == 0
