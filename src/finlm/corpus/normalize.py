r"""Change a document's text: one spelling for every document, and the optional normalisers of data.clean.

`normalise` always runs: newline forms to \n; control, zero-width and byte-order characters removed (tab stays);
full-width letters and digits to ASCII, the ideographic space to a space; trailing spaces of lines cut; three or more
newlines to two; white space around the document cut. 100 to 240 MB/s per core; applying it twice changes nothing.

Every other function takes a text and returns the new one, at 130 MB/s or more where there is nothing to change. None is
NFKC, which rewrites symbols that finance texts mean (① to 1, ㎡ to m2).

Personal numbers (Chinese identity cards, telephones, bank cards) become placeholders. Finance text is full of amounts,
codes and ids that look alike, so a number counts as personal when its form, its check digit and what stands around it
allow nothing else. Of eleven digits that begin with 13 to 19 the nearest words decide: a telephone's (电话, Tel) or an
amount's (营业收入, 人民币, a unit behind); without either, digits that stand between other numbers of a row are an
amount, and others a telephone. Names, addresses, e-mail and chat accounts are not looked for.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Collection, Sequence
from functools import cache, lru_cache
from typing import Any

# Control characters, soft hyphen, zero-width space and joiners, direction marks, word joiner, byte-order mark.
_INVISIBLE = "\0-\x08\x0e-\x1f\x7f-\x84\x86-\x9f\xad\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff"
_NEWLINE = "\x0b\x0c\x85\u2028\u2029"  # besides \r
_FULL_WIDTH = "０-９Ａ-Ｚａ-ｚ"
CHINESE = "\u3400-\u4dbf\u4e00-\u9fff"

RARE = f"[{_INVISIBLE}{_NEWLINE}{_FULL_WIDTH}\r]"
_ANY = re.compile(RARE)
_INVISIBLES = re.compile(f"[{_INVISIBLE}]+")
_NEWLINES = re.compile(f"\r\n?|[{_NEWLINE}]")
_FULL_WIDTHS = re.compile(f"[{_FULL_WIDTH}]+")
_HALF_WIDTH = {
    code: code - 0xFEE0 for first, last in ("０９", "ＡＺ", "ａｚ") for code in range(ord(first), ord(last) + 1)
}
_BLANK_LINES = re.compile("\n{3,}")


def normalise(text: str) -> str:
    """Return the text with uniform newlines, spaces and widths, without invisible characters; "" if nothing is left."""
    text = text.replace("\u3000", " ")  # common, and ten times as fast as the search
    if _ANY.search(text):  # one pass that most documents end with
        text = _INVISIBLES.sub("", text)
        text = _NEWLINES.sub("\n", text)
        text = _FULL_WIDTHS.sub(lambda match: match[0].translate(_HALF_WIDTH), text)
    if " \n" in text or "\t\n" in text:
        # Not a regular expression: "[ \t]+\n" takes quadratic time on a long run of spaces inside a line.
        text = "\n".join(line.rstrip(" \t") for line in text.split("\n"))
    if "\n\n\n" in text:
        text = _BLANK_LINES.sub("\n\n", text)
    return text.strip(" \t\n")


_KINDS = (  # of the first byte of a character's UTF-8, see shape(); U+4000 to U+9FFF are Chinese
    b" " * 33
    + bytes(ord("0" if chr(code).isdigit() else "a" if re.match(r"\w", chr(code)) else "s") for code in range(33, 128))
    + b"s" * (0xE4 - 128)
    + b"c" * 6
    + b"s" * (256 - 0xEA)
)
_FURTHER_BYTES = bytes(range(0x80, 0xC0))


@lru_cache(maxsize=1)  # several rules ask for the same text
def shape(text: str) -> bytes:
    """Return a byte per character that tells its class: b"0" is a digit, b"a" an ASCII letter or _.

    b" " is a blank or control character, b"c" is Chinese, b"s" is a symbol or anything else. Every symbol is b"s", but
    not every b"s" is a symbol: rules look here first, and at the text only where it may concern them.
    """
    return text.encode("utf-8", "surrogatepass").translate(_KINDS, _FURTHER_BYTES)


_BLOCK = (
    "address|article|blockquote|br|center|dd|div|dl|dt|footer|form|h[1-6]|header|hr|li|ol|p|pre|section|table|tbody|"
    "tfoot|thead|tr|ul"
)
_INLINE = (
    "a|abbr|b|big|button|code|em|figure|font|i|iframe|img|input|label|link|meta|nobr|o:p|s|small|span|strike|strong|"
    "sub|sup|u|wbr"
)
# Only what has the form of attributes: "x<b 且利润增长，y>d" compares. Possessive, so nothing is tried twice.
_VALUE = r"""(?:"[^"<>]{0,2000}+"|'[^'<>]{0,2000}+'|[^\s<>"']{1,2000}+)"""
_ATTRIBUTE = rf"""(?:[\s/]++|(?<=["']))[a-zA-Z_:@][-a-zA-Z0-9_:.;]{{0,60}}+(?:\s*+=\s*+{_VALUE})?+"""
_ATTRIBUTES = rf"(?:{_ATTRIBUTE}){{0,50}}+[\s/=]*+"
# What all of these begin with: most texts with a "<" have none.
_MAY_BE_TAG = re.compile(rf"<(?:!--|/?(?:script|style|t[dh]|{_BLOCK}|{_INLINE}))", re.IGNORECASE)
_MAY_HIDE = re.compile("<(?:!--|script|style)", re.IGNORECASE)
_HIDDEN = {"<!--": "-->", "<script": "</script>", "<style": "</style>"}
_BLOCK_TAG = re.compile(rf"</?(?:{_BLOCK}){_ATTRIBUTES}>[ \t\n]{{0,8}}", re.IGNORECASE)
_CELL_TAG = re.compile(rf"</?t[dh]{_ATTRIBUTES}>", re.IGNORECASE)
_INLINE_TAG = re.compile(rf"</?(?:{_INLINE}){_ATTRIBUTES}>", re.IGNORECASE)
# A row's cells, until its end, the next row, or a table within it or around it.
_ROW = re.compile(rf"<tr{_ATTRIBUTES}>(.*?)(?:</tr{_ATTRIBUTES}>\s*|(?=</?t(?:able|body|foot|r)\b))", re.I | re.S)
_CELL = re.compile(rf"<t[dh]{_ATTRIBUTES}>", re.IGNORECASE)
_PAGE = 1000  # characters of a cell, above which the table is a frame of the page and its cells keep their lines
_GAP = re.compile(r"(?:\s|&nbsp;|&#(?:0*1[03]|x0*[ad]);)+", re.IGNORECASE)
_ENTITY = re.compile(r"&(?:[a-zA-Z]{2,8}|#[0-9]{1,7}|#[xX][0-9a-fA-F]{1,6});")


def strip_html(text: str) -> str:
    """Return the text without HTML: drops scripts, styles and comments, makes block tags newlines, decodes entities.

    A table row becomes a line with tab-separated cells, unless the table lays out a page. Only names of HTML tags
    count: <N>, a placeholder of FinCUGE's finre, and a < b stay.
    """
    if "<" in text and _MAY_BE_TAG.search(text):
        for start, end in _HIDDEN.items() if _MAY_HIDE.search(text) else ():
            text = _remove_parts(text, start, end)
        text = _ROW.sub(_join_cells, text)
        text = _BLOCK_TAG.sub("\n", text)
        text = _CELL_TAG.sub("\t", text)
        text = _INLINE_TAG.sub("", text)
    if "&" in text:
        text = _ENTITY.sub(lambda match: html.unescape(match[0]), text)
    return text


def _join_cells(row: re.Match[str]) -> str:
    """Return the matched table row as a line of tab-separated cells; as matched if the table lays out a page.

    It lays out a page if a cell has over 1000 characters, or the row is a single cell with block tags.
    """
    parts = _CELL.split(row[1])
    cells = [_GAP.sub(" ", _CELL_TAG.sub("", _BLOCK_TAG.sub(" ", part))).strip() for part in parts]
    cells = cells if cells[0] else cells[1:]
    if max(map(len, cells), default=0) > _PAGE or (len(cells) == 1 and _BLOCK_TAG.search(row[1])):
        return row[0]
    is_last = not row.string.startswith(("<tr", "<TR"), row.end())
    return ("\n" + "\t".join(cells) if any(cells) else "") + "\n" * is_last


def _remove_parts(text: str, start: str, end: str) -> str:
    """Return the text without its parts from `start` to the next `end`, in any case; a part without `end` stays."""
    folded = text.lower()  # and find(): a regular expression would not take linear time
    if start not in folded or len(folded) != len(text):  # a few letters have a longer lower case
        return text
    parts, done = [], 0
    while (first := folded.find(start, done)) >= 0 and (last := folded.find(end, first)) >= 0:
        parts.append(text[done:first])
        done = last + len(end)
    return "".join(parts) + text[done:]


SYMBOL = r"[^\w\s\u4dc0-\u4dff]"  # without hexagrams, whose UTF-8 begins as Chinese does
_SYMBOLS = re.compile(rf"({SYMBOL})\1{{3,}}")
_BLANKS = re.compile(r"(?<=\S)[ \xa0\u2000-\u200a]{5,}")


def compress_repeats(text: str) -> str:
    """Shorten runs of more than three equal symbols to three, and of more than four blanks inside a line to four.

    No-break spaces become spaces. Letters, digits, Chinese and indentation stay: 1000000 and 哈哈哈哈.
    """
    if "\xa0" in text:
        text = text.replace("\xa0", " ")
    if "     " in text:
        text = _BLANKS.sub("    ", text)
    return _SYMBOLS.sub(r"\1\1\1", text) if b"ssss" in shape(text) else text


FULL = {",": "，", ";": "；", ":": "：", "!": "！", "?": "？"}
# The mark first, what stands before it second: the search then jumps from mark to mark.
_HALF_MARK = re.compile(f"[,;:!?](?<=[{CHINESE}》”）][,;:!?])(?=[{CHINESE}《“（]|\n|\\Z)")
_PAIR = re.compile(rf"\((?=[^()\n]{{0,200}}[{CHINESE}])([^()\n]{{1,200}})\)")
WIDE = "[％＋－＝＜＞＆＃＠＊／＄]"
_WIDE = re.compile(WIDE)
WIDE_SIGNS = str.maketrans("％＋－＝＜＞＆＃＠＊／＄", "%+-=<>&#@*/$")


def convert_widths(text: str) -> str:
    """Change half-width , ; : ! ? after Chinese and brackets around Chinese to full width, and ％ ＋ － ＝ to ASCII.

    A mark changes only if Chinese or the end of the line follows it, so 1,000 and 12:30 and (600519) keep theirs.
    """
    if _WIDE.search(text):
        text = text.translate(WIDE_SIGNS)
    text = _HALF_MARK.sub(lambda match: FULL[match[0]], text)
    return _PAIR.sub(r"（\1）", text) if "(" in text else text


# Characters that are frequent in traditional Chinese and absent from simplified Chinese: about one in seven of a
# traditional text. 乾, 昇, 於 and others that names in simplified text keep are left out on purpose.
TRADITIONAL = (
    "[個們這來對國會時說為學經過發後點與開還關種現問動長頭見東車馬電話業產實務總資報價應稅貨幣證險財無從樣"
    "進當間將選區書機萬億圓則產據續達員統計劃議論決設認識該請談讓連運遠選還邊場勢獎環團圖際風]"
)
_TRADITIONAL = re.compile(TRADITIONAL)
TRADITIONAL_SHARE = 0.05


def simplify(text: str) -> str:
    """Convert a document in traditional Chinese to simplified (OpenCC t2s); return any other text unchanged.

    On simplified text, t2s damages names: 乾照光电 to 干照光电, 昇兴 to 升兴 (72 places in 47,000 real documents).
    """
    if not _TRADITIONAL.search(text) or len(_TRADITIONAL.findall(text)) < TRADITIONAL_SHARE * len(text):
        return text
    converted: str = _opencc().convert(text)
    return converted


@cache
def _opencc() -> Any:
    """Return OpenCC's converter from traditional to simplified Chinese; cached."""
    import opencc  # 30 ms and 10 MB, for the documents that need it

    return opencc.OpenCC("t2s")


_OPEN, _CLOSE = r"[（(【\[]?(?:", r")[。.!！]?[）)】\]]?"
_BEGINS = (
    r"(?:责任编辑|责编|编辑|本文编辑|校对|审核|值班编辑|监制|排版)\s*[:：/|].{0,30}"
    r"|(?:来源|文章来源|稿件来源|信息来源|原文链接|本文链接)\s*[:：].{0,40}"
    r"|(?:点击|戳|长按|扫描|扫码|识别).{0,20}(?:二维码|阅读原文|查看|进入|下载|关注|开户|投票|报名).{0,20}"
    r"|(?:更多|海量).{0,16}(?:尽在|请关注|请点击|请下载|欢迎关注).{0,24}"
    r"|(?:欢迎|敬请|请)?(?:关注|订阅).{0,16}(?:公众号|微信|微博).{0,24}"
    r"|(?:上一篇|下一篇|返回(?:首页|顶部|列表)|打印本页|关闭窗口|加入收藏|分享到|字号|相关阅读|热门推荐)\s*[:：]?.{0,30}"
    r"|(?:版权(?:声明|所有)|免责声明|转载声明|风险提示及免责).{0,120}"
    r"|(?:广告|推广|赞助商链接|Advertisement)"
)
_HOLDS = r".{0,30}(?:版权归.{1,20}所有|未经.{0,12}(?:授权|许可|同意).{0,20}(?:转载|镜像)|(?:不得|严禁|谢绝)转载).{0,60}"
BOILERPLATE_HOLDS = ("版权归", "转载", "镜像")  # one of which stands in each of these
_BOILERPLATE_BEGINS = re.compile(_OPEN + _BEGINS + _CLOSE)
_BOILERPLATE_HOLDS = re.compile(_OPEN + _HOLDS + _CLOSE)


def drop_boilerplate(text: str) -> str:
    """Return the text without lines of web page boilerplate: editors, sources, QR codes, navigation, copyright.

    Only lines that is_boilerplate() takes are dropped, so a sentence about copyright stays; so does a single line.
    """
    if "\n" not in text:  # a document of one line is its own content
        return text
    lines = text.split("\n")
    kept = [line for line in lines if not is_boilerplate(line)]
    return "\n".join(kept) if len(kept) < len(lines) else text


def is_boilerplate(line: str) -> bool:
    """Return whether a line has at most 160 characters and a pattern of boilerplate matches all of it."""
    if len(line) > 160:
        return False
    line = line.strip(" \t")
    if _BOILERPLATE_BEGINS.fullmatch(line):
        return True
    return any(word in line for word in BOILERPLATE_HOLDS) and _BOILERPLATE_HOLDS.fullmatch(line) is not None


# Any of the numbers below holds seven digits, with at most one blank or hyphen between the fourth and the fifth.
_CANDIDATES = re.compile(b"(?=0000[ s]?000)")
_RUN = re.compile(r"[0-9(（+][-0-9 ()（）+—－]{6,}")  # where they may stand
_IN_RUN = frozenset("-0123456789 ()（）+—－")

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


def make_masker(kinds: Collection[str]) -> Callable[..., str]:
    """Return mask(text, places=None), which replaces personal numbers of `kinds` (one or more of KINDS) in a text."""
    pattern = re.compile("|".join(part for kind in KINDS if kind in kinds for part in _PATTERNS[kind]), re.IGNORECASE)

    def mask(text: str, places: Sequence[int] | None = None) -> str:
        """Return the text with placeholders for its personal numbers.

        `places` has, ascending, at least an index in each number to replace; None looks for matches of _CANDIDATES.
        """
        if places is None:
            places = [match.start() for match in _CANDIDATES.finditer(shape(text))]
        parts, done, looked = list[str](), 0, 0
        for place in places:
            if place < looked:
                continue
            first = place
            while first and text[first - 1] in _IN_RUN:
                first -= 1
            run = _RUN.search(text, first)
            if run is None or run.start() > place:
                continue
            looked = run.end()
            for near in pattern.finditer(text, max(done, run.start()), run.end() + 1):
                match = pattern.match(text, near.start())  # with all that follows in sight
                if match and match.start() >= done:
                    parts += [text[done : match.start()], _replace(match)]
                    done = match.end()
        return "".join(parts) + text[done:] if parts else text

    return mask


def _replace(match: re.Match[str]) -> str:
    """Return the placeholder for a match that is a personal number, else the matched text."""
    kind = match.lastgroup
    assert kind is not None
    before = match.string[max(0, match.start() - _BEFORE) : match.start()]
    after = match.string[match.end() : match.end() + 16]
    return PLACEHOLDERS[kind] if _CHECKS[kind](match[0], before, after) else match[0]


def _is_id_card(number: str, before: str, after: str) -> bool:
    """Return whether a number is an identity card's (GB 11643-1999): 18 characters with a valid ISO 7064 check digit.

    After words about identity papers any number passes; without them, the 15 digits used before 1999 do not.
    """
    plain = re.sub("[ -]", "", number)
    if _ABOUT_IDENTITY.search(before[-24:]):
        return True
    total = sum(weight * int(digit) for weight, digit in zip(_ID_WEIGHTS, plain, strict=False))
    return len(plain) == 18 and "10X98765432"[total % 11] == plain[-1].upper()


def _is_bank_card(number: str, before: str, after: str) -> bool:
    """Return whether a number is a bank card's: it follows 卡号, or passes the tests below.

    The Luhn check (ISO/IEC 7812) must hold and no unit may follow. Also, a card word stands within 24 characters
    before, or the number begins with 62 (UnionPay) and follows no amount word.
    """
    if _CARD_NUMBER.search(before):
        return True
    digits = [int(character) for character in number if character.isdigit()]
    doubled = sum(sum(divmod(2 * digit, 10)) for digit in digits[-2::-2])
    if (doubled + sum(digits[-1::-2])) % 10 or _UNIT.match(after):
        return False
    return bool(_ABOUT_CARDS.search(before[-24:])) or (number.startswith("62") and not _is_amount(before))


def _is_mobile(number: str, before: str, after: str) -> bool:
    """Return whether a number is a mobile phone number, by the words and numbers around it.

    The first rule that applies decides. A unit after it or a word such as 编号 before it: no. +86 or blanks in it: yes.
    An amount word before it, behind any phone word: no. A phone word: yes. Else yes unless _is_in_a_row().
    """
    if _UNIT.match(after) or _NOT_A_PHONE.search(before):
        return False
    if len(number) > 11:  # +86, or in groups: no amount is written so
        return True
    phone = max((word.end() for word in _PHONE_WORD.finditer(before)), default=0)
    if _is_amount(before[phone:]):
        return False
    return bool(phone) or not _is_in_a_row(before, after)


def _is_amount(before: str) -> bool:
    """Return whether the last word in the text `before` a number is about an amount."""
    last = max((word.end() for word in _AMOUNT_WORD.finditer(before)), default=0)
    return bool(last) and _BETWEEN.match(before, last) is not None


def _is_in_a_row(before: str, after: str) -> bool:
    """Return whether a number between two texts begins a range, belongs to a table row, or stands alone in brackets.

    A neighbour counts if a comma, semicolon or slash joins it and it is no mobile number. One apart by blanks also
    counts, but behind the number only with decimals or more than four characters.
    """
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
    """Return whether a number is a landline's, by brackets, a hyphen, or a telephone word before it.

    Brackets must be balanced. A hyphen before a date such as 20240131 does not count.
    """
    opened, closed = number[0] in "(（", set(number) & set(")）")
    is_clear = bool(closed) or (re.search("[-—－]", number) and not _A_DATE.search(number))
    return opened == bool(closed) and bool(is_clear or _PHONE_WORD.search(before))


_CHECKS: dict[str, Callable[[str, str, str], bool]] = {
    "id_card": _is_id_card,
    "bank_card": _is_bank_card,
    "mobile": _is_mobile,
    "landline": _is_landline,
}
