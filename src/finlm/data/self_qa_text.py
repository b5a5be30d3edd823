"""The texts of Self-QA: prompts, how a reply becomes questions, and why a pair is dropped. Pure functions.

The stages are those of arXiv 2305.11952: questions from a passage, answers by reading it, pruning. The wording is ours;
what it asks for is the paper's: a question and its answer must be understood by someone who does not see the passage.
Rules read Chinese and English. They judge form and numbers; whether an answer is true they do not know.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator

VERSION = 1  # of the prompts: another one is another data set

UNANSWERABLE = {"zh": "无法回答", "en": "UNANSWERABLE"}
_QUESTIONS = {
    "zh": """阅读下面的材料，围绕其中的知识提出{count}个问题。
1. 读者看不到材料：写出公司、人物、产品和时间的完整名称，不用“本文”“材料”“该公司”一类的指代。
2. 只靠材料就能回答，不需要别的知识。
3. 角度各不相同：数字、原因、比较、流程、概念都可以问。
4. 每行写一个问题，不编号，不写答案。

材料：
{passage}""",
    "en": """Read the passage below and ask {count} questions about what it teaches.
1. The reader cannot see the passage: give companies, people, products and dates their full names, and never point at
   "the text" or "this company".
2. The passage alone must suffice to answer.
3. Ask from different angles: figures, causes, comparisons, procedures, concepts.
4. One question a line, no numbering, no answers.

Passage:
{passage}""",
}
_ANSWER = {
    "zh": """请根据材料回答问题。
1. 只写材料中有依据的内容，数字、日期和名称与材料一致。
2. 读者看不到材料：回答要完整通顺，不提“材料”“上文”。
3. 如果材料不足以回答，只写：{unanswerable}

材料：
{passage}

问题：{question}""",
    "en": """Answer the question from the passage.
1. Write only what the passage supports; keep its figures, dates and names.
2. The reader cannot see the passage: answer in full sentences and do not mention it.
3. If the passage does not suffice, write only: {unanswerable}

Passage:
{passage}

Question: {question}""",
}
_THOUGHT = re.compile(r"<think>.*?(</think>|$)", re.DOTALL)
_NUMBERING = re.compile(
    r"^\s*(?:[-*•#>]+|[（(]?\d{1,2}\s*[.、)）．:：]|(?:问题|第|Q(?:uestion)?)\s*\d{1,2}\s*[题问]?\s*[.、:：)）]?)\s*",
    re.IGNORECASE,
)
_ASKS = re.compile(
    r"[?？]|^(?:请|简述|说明|解释|分析|列举|比较|概述|describe|explain|compare|list|name|state)", re.IGNORECASE
)
_REFERS = re.compile(
    r"本文|该文|此文|文中|文章(?:中|里|内|提)|上文|上述|前述|以上(?:内容|材料|信息)|根据(?:材料|资料|文本|提供的)"
    r"|(?:材料|资料|段落|文本)(?:中|里|内|所|提|显示|指出)"
    r"|(?:the|this|above|given|provided) (?:text|passage|article|document|material|paragraph)",
    re.IGNORECASE,
)
_POINTS = re.compile(
    r"^(?:该|此|其(?!他)|它|他|她|这|那|上述)|本(?:公司|集团|企业|基金|报告|次)"
    r"|\b(?:this|that) (?:company|firm|fund|bond|stock|report)\b|^(?:it|he|she|they)\b",
    re.IGNORECASE,
)
_REFUSES = re.compile(
    r"作为(?:一个|一名)?(?:AI|人工智能|语言模型|大模型)|我(?:无法|不能)(?:回答|提供)|抱歉"
    r"|as an AI|I (?:cannot|can't|am unable)",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"\d+(?:[,，]\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?")
_SHORTEST, _LONGEST = 6, 200  # characters of a question


def question_prompt(passage: str, count: int, language: str) -> str:
    """Stage 1: ask for questions about a passage."""
    return _QUESTIONS[language].format(passage=passage, count=count)


def answer_prompt(passage: str, question: str, language: str) -> str:
    """Stage 2: ask for the answer that the passage gives."""
    return _ANSWER[language].format(passage=passage, question=question, unanswerable=UNANSWERABLE[language])


def spoken(reply: str) -> str:
    """A reply without the thoughts that reasoning models put before it."""
    return _THOUGHT.sub("", reply).strip()


def questions(reply: str) -> list[str]:
    """The questions of a reply: its lines without numbering, or the strings of a JSON list."""
    text = spoken(reply)
    text = re.sub(r"^```\w*\n|\n```$", "", text)
    if text.startswith("["):
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        if isinstance(found, list) and all(isinstance(one, str) for one in found):
            return [one.strip() for one in found if one.strip()]
    lines = (_NUMBERING.sub("", line).strip().strip("*").strip() for line in text.splitlines())
    return [line for line in lines if line]


def normalised(text: str) -> str:
    """What two questions that differ in punctuation, width and case have in common."""
    return "".join(c for c in unicodedata.normalize("NFKC", text).casefold() if c.isalnum())


def question_reason(question: str) -> str | None:
    """Why a question is dropped before it is answered; None = it is kept."""
    if not _SHORTEST <= len(question) <= _LONGEST:
        return "question length"
    if not _ASKS.search(question):
        return "not a question"
    if _REFERS.search(question):
        return "question refers to the passage"
    if _POINTS.search(question):
        return "question points at something unnamed"
    return None


def answer_reason(
    passage: str, question: str, answer: str, finish: str | None, language: str, shortest: int, grounded: bool
) -> str | None:
    """Why a pair is dropped; None = it is kept. finish: the server's finish_reason."""
    if finish == "length":
        return "answer cut off"
    if UNANSWERABLE[language] in answer[: len(UNANSWERABLE[language]) + 20]:
        return "passage does not answer"
    if _REFUSES.search(answer[:80]):
        return "refusal"
    if len(answer) < shortest or normalised(answer) == normalised(question):
        return "answer length"
    if _REFERS.search(answer):
        return "answer refers to the passage"
    if _repeats(answer):
        return "answer repeats itself"
    if grounded and not set(_numbers(answer)) <= set(_numbers(passage)) | set(_numbers(question)):
        return "number not in the passage"
    return None


def _numbers(text: str) -> Iterator[str]:
    """Every number as its digits: 1,234.50 and 1234.5 are one. Numbering at the start of a line is none."""
    flat = unicodedata.normalize("NFKC", text)
    flat = re.sub(r"(?m)^\s*\(?\d{1,2}[.、)](?!\d)", "", flat)
    for found in _NUMBER.findall(flat):
        whole, point, part = found.replace(",", "").partition(".")
        part = part.rstrip("0")
        yield (whole.lstrip("0") or "0") + (point + part if part else "")


def _repeats(text: str, width: int = 8) -> bool:
    """More than half of its character n-grams occur before in it: generation that ran in a circle."""
    count = len(text) - width + 1
    return count > 4 * width and len({text[at : at + width] for at in range(count)}) < count / 2
