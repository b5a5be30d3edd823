"""The open-book questions of the synthetic exam: one for each law, each quoting all that its answer needs."""

from __future__ import annotations

from finlm.data.synthetic_choices import (
    Question,
    among,
    amounts,
    bond_coupon,
    bond_due,
    earnings_per_share,
    income_tax,
    limit_up,
    ratios,
    revenue_growth,
)
from finlm.data.synthetic_grammar import bank
from finlm.data.synthetic_laws import BOARDS, INDUSTRIES, PROVINCES, RATINGS

_BOARD_NAMES = [board.exchange + board.name for board in BOARDS]
_GRADES = [grade for grade, *_ in RATINGS]
OPEN_BOOK = (
    Question(
        "市场规则",
        bank(
            "{short}的证券代码为{code}，(根据代码前两位判断，|)该公司股票(在下列哪个市场板块上市|的上市地点是)？"
            "|(投资者买入代码为{code}的{short}股票|某投资者持有{short}（{code}）)，(这只股票属于|其上市板块是)下列哪一项？"
        ),
        among("{exch}{board}", _BOARD_NAMES),
    ),
    Question(
        "市场规则",
        bank(
            "{short}的证券代码为{code}，(按照其所在板块的交易规则，|)该股票的单日涨跌幅限制(是多少|为下列哪一项)？"
            "|代码以{prefix}开头的股票{short}（{code}），(单日最大涨跌幅|每日涨跌幅限制)是下列哪一项？"
        ),
        among("{limit}%", ("5%", "10%", "20%", "30%")),
    ),
    Question(
        "市场规则",
        bank(
            "{short}（{code}）前一交易日收盘价为{price_d}元，(按其所在板块的涨跌幅限制，|)(当日|今日)涨停价(是多少|为)？"
            "|已知股票{short}的代码为{code}，前收盘价{price_d}元，(则其涨停价为|问涨停价是多少)（四舍五入到分）？"
        ),
        limit_up,
    ),
    Question(
        "监管制度",
        bank(
            "{short}（{code}）(主营{prod}，|)属于{ind}行业，(其行业监管机构是|应由下列哪个机构实施行业监管)？"
            "|{ind}企业{short}(受到|接受)行业检查，(负责检查的|有权检查的)行业监管机构是下列哪一个？"
        ),
        among("{reg}", [industry.regulator for industry in INDUSTRIES]),
    ),
    Question(
        "风险管理",
        bank(
            "{short}(主要产品为{prod}，|)属于{ind}行业，(下列哪一项是该行业的典型风险|其面临的典型行业风险是)？"
            "|分析{ind}企业{short}时，(最应关注的典型风险是哪一项|下列属于该行业典型风险的是)？"
        ),
        among("{risk}", [industry.risk for industry in INDUSTRIES]),
    ),
    Question(
        "税务基础",
        bank(
            "{short}（{code}）(主要产品为{prod}，|位于{city}，|)属于{ind}行业，(其适用的所得税税率是|应按什么税率缴纳所得税)？"
            "|{ind}企业{short}(在{exch}{board}上市|总部位于{city})，(适用的|应适用的)所得税税率是下列哪一项？"
        ),
        among("{rate}%", ("5%", "10%", "15%", "20%", "25%")),
    ),
    Question(
        "税务基础",
        bank(
            "{ind}企业{short}{y}年利润总额为{profit_w}万元，按该行业的所得税税率，(所得税费用为|应计提所得税)多少？"
            "|{short}属于{ind}行业，{y}年利润总额{profit_w}万元，(其所得税费用是|当年的所得税费用为)？"
        ),
        income_tax,
        applies=lambda facts: facts.books.profit > 200,
    ),
    Question(
        "财务会计",
        bank(
            "{short}{y}年营业收入{rev_w}万元，营业成本{cost_w}万元，销售费用{sell_w}万元，管理费用{admin_w}万元，"
            "研发费用{rnd_w}万元，财务费用{fin_w}万元，(利润总额为多少|则利润总额是|其利润总额为)？"
        ),
        amounts(
            "profit",
            lambda n: n["profit"] + n["fin"],
            lambda n: n["profit"] + n["rnd"],
            lambda n: n["profit"] - n["fin"],
        ),
    ),
    Question(
        "财务会计",
        bank(
            "{short}（{code}）{y}年利润总额为{profit_w}万元，所得税费用为{tax_w}万元，(净利润是多少|则当年净利润为|其净利润为)？"
        ),
        amounts("net", lambda n: n["profit"] + n["tax"], lambda n: n["profit"], lambda n: n["net"] - n["tax"]),
    ),
    Question(
        "财务会计",
        bank(
            "{y}年末{short}资产总计{assets_w}万元，负债合计{debts_w}万元，(所有者权益合计为|其所有者权益是|净资产为)多少？"
            "|{short}（{code}）{y}年末(总资产|资产总计)为{assets_w}万元，(总负债|负债合计)为{debts_w}万元，所有者权益为？"
        ),
        amounts(
            "equity",
            lambda n: n["assets"] + n["debts"],
            lambda n: n["debts"],
            lambda n: n["equity"] + n["ldebt"],
        ),
        applies=lambda facts: facts.books.debts != facts.books.equity,
    ),
    Question(
        "财务会计",
        bank(
            "{short}{y}年初净资产{equity1_w}万元，当年净利润{net_w}万元，派发上年度现金红利{div1_w}万元，(无其他权益变动，|)"
            "(年末净资产为|则年末净资产是)多少？"
        ),
        amounts(
            "equity",
            lambda n: n["equity1"] + n["net"],
            lambda n: n["equity1"] - n["net"] - n["div1"],
            lambda n: n["equity1"] + n["net"] + n["div1"],
        ),
        applies=lambda facts: facts.numbers["div1"] > 0,
    ),
    Question(
        "财务分析",
        bank(
            "{short}（{code}）{y}年营业收入为{rev_w}万元，{y0}年为{rev1_w}万元，(营业收入同比变动为|则营业收入同比)？"
            "|{y0}年{short}营业收入{rev1_w}万元，{y}年为{rev_w}万元，(收入同比变化是|同比变动幅度为)下列哪一项？"
        ),
        revenue_growth,
    ),
    Question(
        "财务分析",
        bank("{short}（{code}）{y}年营业收入{rev_w}万元，营业成本{cost_w}万元，(其毛利率为|毛利率是|则毛利率为)多少？"),
        ratios(
            "gm",
            lambda n: (n["cost"], n["rev"]),
            lambda n: (n["rev"] - n["cost"], n["cost"]),
            lambda n: (n["net"], n["rev"]),
        ),
    ),
    Question(
        "财务分析",
        bank(
            "{y}年末{short}（{code}）资产总计{assets_w}万元，负债合计{debts_w}万元，(资产负债率为|其资产负债率是)多少？"
        ),
        ratios(
            "dr",
            lambda n: (n["equity"], n["assets"]),
            lambda n: (n["debts"], n["equity"]),
            lambda n: (n["ldebt"], n["assets"]),
        ),
    ),
    Question(
        "财务分析",
        bank("{short}（{code}）{y}年净利润{net_w}万元，总股本{shares_w}万股，(每股收益为|其每股收益是)多少？"),
        earnings_per_share,
    ),
    Question(
        "信用评级",
        bank(
            "{y}年末{short}（{code}）资产负债率为{dr_r}，(按照评级标准，|)其主体信用等级(应为|是)下列哪一项？"
            "|评级机构对{short}进行跟踪评级，(其|该公司)资产负债率为{dr_r}，(应评为|主体信用等级为)？"
        ),
        among("{grade}", _GRADES),
    ),
    Question(
        "信用评级",
        bank(
            "{y}年末{short}资产总计{assets_w}万元，负债合计{debts_w}万元，(据此|按评级标准)，其主体信用等级为下列哪一项？"
        ),
        among("{grade}", _GRADES),
    ),
    Question(
        "固定收益",
        bank(
            "主体信用等级为{grade}的{short}发行{term}年期公司债，(按定价规则，|)票面利率(为多少|应为下列哪一项)？"
            "|{short}（{code}）评级为{grade}，(拟|)发行{term}年期债券，(由基准利率、信用利差和期限溢价|按定价规则)得出的票面利率是？"
        ),
        bond_coupon,
    ),
    Question(
        "固定收益",
        bank(
            "{short}（{code}）发行公司债{bond_w}万元，票面利率{cpn_r}，期限{term}年，按年付息，(每年利息为|每年应付利息)多少？"
        ),
        amounts(
            "interest",
            lambda n: n["allinterest"],
            lambda n: n["interest"] * 10,
            lambda n: n["bond"] // 10_000 * (n["cpn"] - n["premium"]),
        ),
    ),
    Question(
        "固定收益",
        bank("{short}（{code}）于{bond_c}发行{term}年期公司债，(该债券的到期日是|债券到期日为)下列哪一天？"),
        bond_due,
    ),
    Question(
        "股东权益",
        bank(
            "{short}（{code}）总股本{shares_w}万股，{y}年度每10股派发现金红利{per10_t}元（含税），(合计派发|派现总额为)多少？"
        ),
        amounts("div", lambda n: n["div"] * 10, lambda n: n["div"] * 2, lambda n: n["net"]),
        applies=lambda facts: facts.books.div > 0,
    ),
    Question(
        "股东权益",
        bank(
            "{holder}持有{short}{held_w}万股，质押其中{pledged_w}万股，公司总股本{shares_w}万股，(质押股份占其所持股份的|质押占其持股的)比例为？"
        ),
        ratios(
            "pledged_of",
            lambda n: (n["pledged"], n["shares"]),
            lambda n: (n["held"], n["shares"]),
            lambda n: (n["held"] - n["pledged"], n["held"]),
        ),
    ),
    Question(
        "区域常识",
        bank(
            "{short}（{code}）的总部设在{city}，(该市位于|这座城市属于)下列哪个省？"
            "|{ind}企业{short}的注册地为{city}，(公司所在的省份是|其所属省份是)下列哪一个？"
        ),
        among("{prov}", PROVINCES),
    ),
)
