"""Clean a row's text: the changes and filters of data.clean, in order, each with a name.

A filter takes a normalised text and returns None, or the reason why the document is dropped; counts by reason and
samples are kept by the documents step. Filters judge the form of a document, never its subject, and pass documents of
fewer than 50 characters. Broken mark-up goes first, since every later rule counts characters. `clean: none` makes only
the one spelling of normalize.py. Perplexity and duplicates have steps of their own.

Personal numbers (Chinese identity cards, telephones, bank cards) become placeholders. Finance text is full of amounts,
codes and ids that look alike, so a number counts as personal when its form, its check digit and what stands around it
allow nothing else. Of eleven digits that begin with 13 to 19 the nearest words decide: a telephone's (电话, Tel) or an
amount's (营业收入, 人民币, a unit behind); without either, digits that stand between other numbers of a row are an
amount, and others a telephone. Names, addresses, e-mail and chat accounts are not looked for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from finlm.base.errors import UserError
from finlm.corpus import normalize
from finlm.corpus.normalize import CHINESE, normalise, shape
from finlm.recipe.schema_data import Clean

Filter = Callable[[str], str | None]
Rules = frozenset[str]  # keys of data.clean

ENOUGH = 50
_SHORT_LINE = 10
ENOUGH_LINES = 10

_NOT_CHINESE = re.compile(f"[^{CHINESE}]+")
_LETTERS = re.compile(r"[^\W\d_]+")
_WORD = re.compile(rf"[^\W\d_{CHINESE}]{{3,}}")
# Without number forms (Ⅱ) and enclosed numbers (②), which name an exam's options.
_SYMBOL = re.compile("[!-/:-@\\[-`{-~\u00a1-\u00bf\u2010-\u214f\u2190-\u245f\u2500-\u2bff\u3001-\u303f\uff01-\uff65]")
_DIGITS_A_WORD = 200
_LABELLED = re.compile(r"[\d:：\t |]")
# UTF-8 read as GBK and back, and UTF-8 read as Latin-1.
MAY_BE_GARBLED = "[\ufffd锟烫屯\xc0-\xff]"
_SUSPECT = re.compile(MAY_BE_GARBLED)
_MOJIBAKE = re.compile("\ufffd|锟斤拷|烫烫烫|屯屯屯|ï»¿|ï¿½|[ÃÂ][\x80-\xbf]|[äåæçèé][\x80-\xbf»¼½¾¿¡-¹]{2}")


def garbled(text: str) -> str | None:
    """Return "garbled" for text whose encoding was lost: more than one replacement sequence in 200 characters."""
    if _SUSPECT.search(text):
        lost = len(_MOJIBAKE.findall(text))
        if lost > 2 and 200 * lost > len(text):
            return "garbled"
    return None


def numeric_table(most: float) -> Filter:
    """Return a filter of documents with more than this share of digits and no names: tables that lost their words."""

    def check(text: str) -> str | None:
        """Return "numeric_table" for a text to drop, else None."""
        digits, letters, _ = _count_kinds(text)
        if len(text) < ENOUGH or digits <= most * (digits + letters):
            return None
        return "numeric_table" if digits > most * _visible(text) and not _names_numbers(text, digits) else None

    return check


def _names_numbers(text: str, digits: int) -> bool:
    """Return whether half of a table's rows have a name, or one of its first lines names the columns."""
    words = [len(_LETTERS.findall(line)) for line in text.split("\n") if line]
    named = sum(map(bool, words))
    if 2 * named < len(words):
        return max(words[:3]) > 1
    return digits <= _DIGITS_A_WORD * sum(words)


def symbols(most: float) -> Filter:
    """Return a filter of documents whose punctuation and symbols are more than this share."""

    def check(text: str) -> str | None:
        """Return "symbols" for a text to drop, else None."""
        digits, letters, others = _count_kinds(text)
        if len(text) < ENOUGH or others * (1 - most) <= most * (digits + letters):
            return None
        return "symbols" if len(_SYMBOL.findall(text)) > most * _visible(text) else None

    return check


def language(least: float) -> Filter:
    """Return a filter of documents whose letters are Chinese in less than this share.

    Other letters count in words of three and more, and from 50 on: formulas and tables are of no language.
    """

    def check(text: str) -> str | None:
        """Return "language" for a text to drop, else None."""
        if len(text) < ENOUGH or shape(text).count(b"c") >= least * len(text):
            return None
        other = sum(map(len, _WORD.findall(text)))
        chinese = len(_NOT_CHINESE.sub("", text))
        return "language" if other >= ENOUGH and chinese < least * (chinese + other) else None

    return check


def short_lines(most: float) -> Filter:
    """Return a filter of documents of ten lines or more with more than this share of short lines: menus, tag clouds.

    A short line has fewer than 10 characters, and no figures, columns or colon, which tables and lists have.
    """

    def check(text: str) -> str | None:
        """Return "short_lines" for a text to drop, else None."""
        if text.count("\n") < ENOUGH_LINES - 1:
            return None
        lines = [line for line in text.split("\n") if line]
        short = sum(len(line) < _SHORT_LINE and not _LABELLED.search(line) for line in lines)
        return "short_lines" if len(lines) >= ENOUGH_LINES and short > most * len(lines) else None

    return check


def bad_keywords(words: frozenset[str], limit: int) -> Filter:
    """Return a filter of documents with at least `limit` different words of the list (Aho-Corasick, one pass)."""
    import ahocorasick  # only recipes with a list

    automaton: Any = ahocorasick.Automaton()
    for word in sorted(words):
        automaton.add_word(word, word)
    automaton.make_automaton()

    def check(text: str) -> str | None:
        """Return "bad_keyword" for a text to drop, else None."""
        words_found: set[str] = set()
        for _, word in automaton.iter(text):
            words_found.add(word)
            if len(words_found) >= limit:
                return "bad_keyword"
        return None

    return check


def read_keywords(path: Path, key: str) -> frozenset[str]:
    """Return the words of a list file: a word per line, # starts a comment line.

    Raises UserError, naming the recipe key `key`, for a file that cannot be read or has no words.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{key}: cannot read {path}", evidence=str(error), fix="give a UTF-8 text file") from None
    words = frozenset(line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#"))
    if not words:
        raise UserError(f"{key}: {path} holds no word", fix="write one word a line, or take the key out")
    return words


def _count_kinds(text: str) -> tuple[int, int, int]:
    """Return (digits, ASCII and Chinese letters, other visible characters) of a text."""
    kinds = shape(text)
    return kinds.count(b"0"), kinds.count(b"a") + kinds.count(b"c"), kinds.count(b"s")


def _visible(text: str) -> int:
    """Return the number of characters that are not white space."""
    return sum(map(len, text.split()))


VERSION = 6


class Cleaner:
    """Maps a raw text to (clean text, None) or ("", reason); pickled as its settings.

    Raises UserError for a keyword list that cannot be read.
    """

    def __init__(self, settings: Clean) -> None:
        self.settings = settings
        self._changes = list(_changes(settings))
        self._filters = list(_filters(settings))

    def __call__(self, text: str) -> tuple[str, str | None]:
        """Return (clean text, None), or ("", reason) for a document to drop."""
        return self.finish(self.spell(text), self.rules)

    @property
    def rules(self) -> Rules:
        """The names of all rules that the settings ask for."""
        return frozenset(name for name, _ in (*self._changes, *self._filters))

    def spell(self, text: str) -> str:
        """Return the text without HTML, where the settings say so, and in its normal spelling."""
        return normalise(normalize.strip_html(text) if self.settings.html else text)

    def finish(self, spelled: str, rules: Rules) -> tuple[str, str | None]:
        """Apply to a spelled text those of the rules that are named; all that follow once one has changed the text.

        Returns (clean text, None), or ("", reason) for a document to drop.
        """
        text = spelled
        for name, change in self._changes:
            if name in rules or text is not spelled:
                text = change(text)
        if text is not spelled:  # what was removed may leave blanks at the ends
            text = normalise(text)
        for name, judge in self._filters:
            if (name in rules or text is not spelled) and (reason := judge(text)):
                return "", reason
        return text, None

    def __reduce__(self) -> tuple[Any, ...]:
        return Cleaner, (self.settings,)


def depends_on(settings: Clean) -> dict[str, Any]:
    """Return what the cleaned documents depend on: the rules and the words of the keyword list, for step keys.

    Raises UserError for a keyword list that cannot be read.
    """
    chosen = settings.model_dump(exclude={"perplexity"})
    if settings.bad_keywords is not None:
        chosen["bad_keywords"] = sorted(_keywords(settings.bad_keywords))
    return {"version": VERSION, **chosen}


def _changes(settings: Clean) -> Iterator[tuple[str, Callable[[str], str]]]:
    """Yield (key of data.clean, function that changes a text), in order, for the changes that the settings ask for."""
    if settings.repeated_symbols:
        yield "repeated_symbols", normalize.compress_repeats
    if settings.boilerplate_lines:
        yield "boilerplate_lines", normalize.drop_boilerplate
    if settings.simplified:
        yield "simplified", normalize.simplify
    if settings.punctuation:
        yield "punctuation", normalize.width_of_punctuation
    if settings.mask:
        yield "mask", make_masker(settings.mask)


def _filters(settings: Clean) -> Iterator[tuple[str, Filter]]:
    """Yield (key of data.clean, filter), in order, for the filters that the settings ask for."""
    if settings.garbled:
        yield "garbled", garbled
    if settings.max_digits < 1:
        yield "max_digits", numeric_table(settings.max_digits)
    if settings.max_symbols < 1:
        yield "max_symbols", symbols(settings.max_symbols)
    if settings.min_chinese > 0:
        yield "min_chinese", language(settings.min_chinese)
    if settings.max_short_lines < 1:
        yield "max_short_lines", short_lines(settings.max_short_lines)
    if settings.bad_keywords is not None:
        yield "bad_keywords", bad_keywords(_keywords(settings.bad_keywords), settings.bad_keyword_limit)


def _keywords(path: str) -> frozenset[str]:
    """Read the list of data.clean.bad_keywords. Raises UserError for a file without words."""
    return read_keywords(Path(path).expanduser(), "data.clean.bad_keywords")


# Any of the numbers below holds seven digits, with at most one blank or hyphen between the fourth and the fifth.
_CANDIDATE = re.compile(b"0000[ s]?000")
_RUN = re.compile(r"[0-9(（+][-0-9 ()（）+—－]{6,}")  # where they may stand: a tenth of the time of the patterns below

_DATE = "(?:18|19|20)[0-9]{2}[ -]?(?:0[1-9]|1[0-2])(?:0[1-9]|[12][0-9]|3[01])"
_ID_CARD = (
    rf"(?:(?<![0-9A-Za-z])|(?<=ID))(?P<id_card>[1-9][0-9]{{5}}[ -]?{_DATE}[ -]?[0-9]{{3}}[0-9Xx]"
    r"|[1-9][0-9]{7}(?:0[1-9]|1[0-2])(?:0[1-9]|[12][0-9]|3[01])[0-9]{3})(?![0-9A-Za-z])"
)
_BANK_CARD = (
    r"(?<![0-9A-Za-z/_=.\-])(?P<bank_card>[3-69][0-9]{3}(?:[ -]?[0-9]{4}){3}(?:[ -]?[0-9]{1,3})?)"
    r"(?![0-9A-Za-z]|[.,][0-9])"
)
_NAMED = "".join(
    rf"|(?<={word})" for word in ("tel", "phone", "phone=", "mobile", "mobile=", "tel=", "wx", "vx", "weixin")
)
_MOBILE = (
    rf"(?:(?<![0-9A-Za-z/_=.\-])|(?<=[0-9]/){_NAMED})(?P<mobile>(?:(?:\+|00)?86[ -]?)?"
    r"1[3-9][0-9](?:[0-9]{8}|[ -][0-9]{4}[ -][0-9]{4}))(?![0-9]|\.[0-9]|,[0-9]{3}(?![0-9]))"
)
_LANDLINE = (
    r"(?<![0-9A-Za-z/_=.\-])(?P<landline>[(（]?0(?:10|2[0-57-9]|[3-9][0-9]{2})(?:[)）]|[ ]?[-—－][ ]?|)[2-8][0-9]{6,7}"
    r"(?:[-—][0-9]{1,5})?)(?![0-9])"
)
_PATTERNS = {"id_card": (_ID_CARD,), "bank_card": (_BANK_CARD,), "phone": (_MOBILE, _LANDLINE)}
KINDS = tuple(_PATTERNS)
PLACEHOLDERS = {"id_card": "[身份证号]", "bank_card": "[银行卡号]", "mobile": "[手机号]", "landline": "[电话号码]"}

_ID_WEIGHTS = (7, 9, 10, 5, 8, 4, 2, 1, 6, 3, 7, 9, 10, 5, 8, 4, 2)
_UNIT = re.compile(
    r"\s*(?:[%％‰]|[万亿千](?!分|一)|百(?!度)|元(?!旦)|股(?!吧|东)|份(?!证)|户(?!主|名|口)|笔(?!名|记)|号(?!码|机)|手(?!机|续)|吨|桶|[美港]元"
    r"|港币|人民币|欧元|日元|平方)"
)
_NOT_A_PHONE = re.compile(r"(?:编号|代码|单号|流水号|文号|订单号|注册号|证号|合同号?|[¥￥$€£])[:：\s]*$")
_PHONE_WORD = re.compile(
    r"手机|电话|热线|传真|联系方式|联系人|微信|致电|拨打|来电|短信|客服|号码|(?<![a-z])(?:tel|phone|mobile|wx|vx|call|fax)",
    re.IGNORECASE,
)
_AMOUNT_WORD = re.compile(
    r"(?:收入|利润|资产|负债|权益|股本|股数|股份|[总金余净差限]额|额|成本|费用?|支出|税金?|现金|存货|款项?|资金|资本|市值|规模|价值|产值|"
    r"价款|对价|合计|总计|小计|累计|总量|数量|成交|销售|亏损|收益|商誉|准备|公积|折旧|摊销|投资|[人美港欧日英]\w?[币元镑]|港币|单位[:：]?\s*元|"
    r"(?<![a-z])(?:rmb|cny|usd|hkd|eur|jpy|gbp|us))",
    re.IGNORECASE,
)
# What may stand between an amount and its word: other numbers of the row, marks, "2023 年末", "为", "(元)".
_BETWEEN = re.compile(r"[\W\d_为是达约共计仅元年度月末期初本上同比至到于按]*\Z")
_NUMBER_BEFORE = re.compile(r"(?:(?P<joined>[0-9][,;/])|[0-9%)][ \t|]{1,8})\Z")
_NUMBER_AFTER = re.compile(r"(?:(?P<joined>[,;/]\s?)|[ \t|]{1,8})[-(]?(?P<number>[0-9][0-9,]*(?:\.[0-9]+)?)")
_RANGE = re.compile(r"\s?[-~～—至到]\s?[0-9]")
_OPENED = re.compile(r"(?:\A|[\s|])[(（]\Z")  # with nothing before it, a bracket stands for minus
_LOOKS_MOBILE = re.compile(r"(?<![0-9])1[3-9][0-9]{9}(?=[,;/、，；]?\Z)")
_ABOUT_CARDS = re.compile(r"卡号|账号|帐号|账户|帐户|银行卡|信用卡|储蓄卡|借记卡")
_CARD_NUMBER = re.compile(r"卡号(?:码|为|是)?[:：\s]*\Z")
_ABOUT_IDENTITY = re.compile(r"身份证|证件号")
_A_DATE = re.compile(r"[-—－] ?20[0-9]{2}(?:0[1-9]|1[0-2])(?:0[1-9]|[12][0-9]|3[01])\Z")
_BEFORE = 48


def make_masker(kinds: Collection[str]) -> Callable[[str], str]:
    """Return a function that replaces the personal numbers of these kinds (of KINDS) in a text by placeholders."""
    pattern = re.compile("|".join(part for kind in KINDS if kind in kinds for part in _PATTERNS[kind]), re.IGNORECASE)

    def mask(text: str) -> str:
        """Return the text with placeholders for its personal numbers."""
        kinds = shape(text)
        if not _CANDIDATE.search(kinds):
            return text
        parts, done = [], 0
        for run in _RUN.finditer(text):
            if not _CANDIDATE.search(kinds, run.start(), run.end() + 1):
                continue
            for near in pattern.finditer(text, max(done, run.start()), run.end() + 1):
                match = pattern.match(text, near.start())  # with all that follows in sight
                if match and match.start() >= done:
                    parts += [text[done : match.start()], _replace(match)]
                    done = match.end()
        return "".join(parts) + text[done:]

    return mask


def _replace(match: re.Match[str]) -> str:
    """Return the placeholder for a match that is a personal number, else the matched text."""
    kind = match.lastgroup
    assert kind is not None
    before = match.string[max(0, match.start() - _BEFORE) : match.start()]
    after = match.string[match.end() : match.end() + 16]
    return PLACEHOLDERS[kind] if _CHECKS[kind](match[0], before, after) else match[0]


def _is_id_card(number: str, before: str, after: str) -> bool:
    """Check an identity card's number (GB 11643-1999): its last character is the ISO 7064 MOD 11-2 check of the others.

    A number after words about identity papers passes whatever its check, and is all that lets 15 digits (before 1999)
    pass.
    """
    plain = re.sub("[ -]", "", number)
    if _ABOUT_IDENTITY.search(before[-24:]):
        return True
    total = sum(weight * int(digit) for weight, digit in zip(_ID_WEIGHTS, plain, strict=False))
    return len(plain) == 18 and "10X98765432"[total % 11] == plain[-1].upper()


def _is_bank_card(number: str, before: str, after: str) -> bool:
    """Check a bank card's number (ISO/IEC 7812): 16 to 19 digits, Luhn's check; UnionPay's prefix 62, or card words
    before.

    A number that 卡号 names is a card whatever its check.
    """
    if _CARD_NUMBER.search(before):
        return True
    digits = [int(character) for character in number if character.isdigit()]
    doubled = sum(sum(divmod(2 * digit, 10)) for digit in digits[-2::-2])
    if (doubled + sum(digits[-1::-2])) % 10 or _UNIT.match(after):
        return False
    return bool(_ABOUT_CARDS.search(before[-24:])) or (number.startswith("62") and not _is_amount(before))


def _is_mobile(number: str, before: str, after: str) -> bool:
    """Return whether a number is a mobile telephone's, by the words and numbers around it."""
    if _UNIT.match(after) or _NOT_A_PHONE.search(before):
        return False
    if len(number) > 11:  # +86, or in groups: no amount is written so
        return True
    phone = max((word.end() for word in _PHONE_WORD.finditer(before)), default=0)
    if _is_amount(before[phone:]):
        return False
    return bool(phone) or not _is_in_a_row(before, after)


def _is_amount(before: str) -> bool:
    """Return whether the last word before a number is about an amount."""
    last = max((word.end() for word in _AMOUNT_WORD.finditer(before)), default=0)
    return bool(last) and _BETWEEN.match(before, last) is not None


def _is_in_a_row(before: str, after: str) -> bool:
    """Return whether a number stands beside another of a table: after blanks any, after a comma any but a mobile's."""
    if _RANGE.match(after) or (_OPENED.search(before) and after[:1] in {")", "）"}):
        return True
    left, right = _NUMBER_BEFORE.search(before), _NUMBER_AFTER.match(after)
    beside_left = left is not None and not (left["joined"] and _LOOKS_MOBILE.search(before))
    if right is None:
        return beside_left
    is_mobile = right["joined"] and re.fullmatch("1[3-9][0-9]{9}[0-9,]*", right["number"])
    is_long = right["joined"] or "." in right["number"] or len(right["number"]) > 4
    return beside_left or bool(is_long and not is_mobile)


def _is_landline(number: str, before: str, after: str) -> bool:
    """Return whether a number is a landline's: clear by its brackets or hyphen, or named by a word before it."""
    opened, closed = number[0] in "(（", set(number) & set(")）")
    is_clear = bool(closed) or (re.search("[-—－]", number) and not _A_DATE.search(number))
    return opened == bool(closed) and bool(is_clear or _PHONE_WORD.search(before))


_CHECKS: dict[str, Callable[[str, str, str], bool]] = {
    "id_card": _is_id_card,
    "bank_card": _is_bank_card,
    "mobile": _is_mobile,
    "landline": _is_landline,
}
