"""News of the synthetic world: flashes of one to four sentences, 60 to 250 characters, most under a headline.

The same event may be told several times in other words, as news is; its figures are those of the announcements.

Prices exist on one day a month per company only, so two flashes can never disagree about a chain of closes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from finlm.data.synthetic_archive import Archive, Stage
from finlm.data.synthetic_facts import Facts, Row, chinese, decimal, in_yi, weekday
from finlm.data.synthetic_grammar import Form, Press, forms, phrases
from finlm.data.synthetic_laws import hundredths_of_percent
from finlm.data.synthetic_world import Dice, mix

# The label is the column of the paper and the day of the event.
_WHO = phrases(
    "|{short}总部位于{city}，(主要产品为|主营){prod}。|公司属{ind}行业，{listed}年在{exch}{board}上市。"
    "|(资料显示|公开资料显示)，{short}(成立于{founded}年|主营{prod}和{prod2})，(董事长为{chair}|总经理为{ceo})。"
    "|{ind}行业由{reg}监管，(主要|典型)风险为{risk}。|{prov}企业{short}自{founded}年起经营{prod}业务。"
)
_FIGURES = phrases(
    "|{y}年(公司|{short})营业收入{rev_y}，同比{rev_g}。|公司{y}年(毛利率{gm_r}，净利率{nm_r}|净资产收益率{roe_r})。"
    "|(截至|){y}年末公司资产负债率为{dr_r}，主体信用等级{grade}。|公司上年营业收入{rev_w}万元，营业成本{cost_w}万元。"
    "|(年报显示|财报显示)，{y}年公司录得{net_l}，(同比{net_g}|每股收益{eps_d}元)。|{y}年末公司总资产{assets_y}，净资产{equity_y}。"
)
_OUTLOOK = phrases(
    "|(市场人士|分析人士|业内人士)(认为|指出)，{hope}值得期待，但需(防范|留意){worry}。"
    "|(从行业看|行业方面)，{ind}企业(普遍|仍)要面对{risk}。|后续关注点(在于|包括){hope}以及{prod}的(销售|推广)情况。"
    "|(有投资者询问|投资者关心){prod}的进展，(公司|董事会秘书{sec})(回应称|表示)一切正常。"
)
_BODIES = forms(
    """
== earnings 20 公司快讯/report
* 75%
- {short}：{y}年(净利|净利润)同比{net_g}|{short}(披露|公布|发布){y}年年报：(收入|营收)同比{rev_g}|{short}{y}年(营收|营业收入){rev_y}|(年报速递|财报速览)：{short}{y}年录得{net_l}
*
- {short}（{code}）{report_m}(晚间|盘后|)(披露|公布|发布)(年报|{y}年年度报告)(显示，|，)(公司|全年)实现营业收入{rev_y}，同比{rev_g}；(录得|全年){net_l}，同比{net_g}。
| {full}(披露的|公布的|)年报显示，{y}年(公司|)营业收入为{rev_w}万元，上年为{rev1_w}万元，同比{rev_g}；净利润为{net_w}万元，同比{net_g}。
| (记者获悉，|)总部位于{city}的{short}(公布|披露)了{y}年成绩单：营业收入{rev_y}，同比{rev_g}，(录得|全年){net_l}，同比{net_g}，基本每股收益{eps_d}元。
- (公司表示，|公司称，|年报指出，)(业绩变动|利润变化)(主要是因为{cause}|主要由于{cause}|与{cause}有关)(|，{cause2}也有影响)。|毛利率为{gm_r}，较上年{gm_k}。|收入变化的主要原因是{why}，(净利率为{nm_r}|毛利率为{gm_r})。|(年末|期末)资产负债率为{dr_r}，主体信用等级{grade}。|
@ who
@ outlook

== costs 9 公司快讯/report
* 60%
- {short}{y}年毛利率{gm_k}|{short}研发费用占比{rd_r}|{short}费用结构一览|{short}：{y}年研发投入{rnd_y}
*
- {short}（{code}）{y}年(营业收入|营收){rev_y}，营业成本{cost_y}，(综合毛利率|毛利率){gm_r}，较上年{gm_k}。
| (从费用看|从成本费用看)，{short}{y}年营业成本{cost_w}万元，毛利率{gm_r}，(比上年|较上年){gm_k}。
- (销售费用、管理费用、研发费用和财务费用|四项费用)分别为{sell_w}万元、{admin_w}万元、{rnd_w}万元和{fin_w}万元，(利润总额为{profit_w}万元|合计扣除后利润总额为{profit_w}万元)。|研发费用{rnd_y}，占营业收入的{rd_r}，(主要投向{prod}|重点投向{prod}和{prod2})。|利润总额{profit_w}万元，按{rate}%的税率计提所得税{tax_w}万元，净利润{net_w}万元。
@ who

== balance 7 公司快讯/report
* 60%
- {short}{y}年末资产负债率{dr_r}|{short}总资产{assets_g}|{short}：净资产{equity_y}，负债{debts_y}
*
- (截至|){y}年末，{short}（{code}）资产总计{assets_w}万元，负债合计{debts_w}万元，所有者权益{equity_w}万元，资产负债率{dr_r}，(比上年末|较上年末){dr_k}。
| {short}年报显示，(期末|年末)总资产{assets_y}、总负债{debts_y}、净资产{equity_y}，资产负债率{dr_r}，较上年末{dr_k}。
- (流动资产{cur_y}，流动负债{cdebt_y}。|按评级标准，(其主体信用等级为{grade}|对应主体信用等级{grade})。|每股净资产为{bps_d}元，净资产收益率{roe_r}。|经营活动现金流量净额为{ocf_y}。)
@ who

== payout 8 权益分派/record
* 70%
- {short}：每10股派{per10_t}元|{short}{record_m}股权登记|{short}拟派现{div_y}|{short}{y}年度分红方案(落地|即将实施)
*
- {short}（{code}）(公告|公告称|发布公告)，(公司|){y}年度(分红方案|利润分配方案)为每10股派发现金红利{per10_t}元（含税），(合计派发|派现总额){div_y}，股权登记日为{record_c}，除息日为{ex_c}。
| (按总股本{shares_w}万股计算，|){short}本次每10股派现{per10_t}元（含税），共计派发{div_w}万元，占{y}年净利润的{payout_r}，{record_m}登记、{ex_m}除息。
- (公司{y}年|{y}年公司)实现净利润{net_y}，(现金分红比例为{payout_r}|分红金额占净利润的{payout_r})。|(控股股东|大股东){holder}持股{held_w}万股。|
@ who
@ figures

== pledge 7 股东动态/pledge
* 70%
- {short}：控股股东质押{pledged_w}万股|{short}(大股东|控股股东)(新增质押|办理股份质押)|{short}控股股东累计质押比例{allpledged_of_r}
*
- {short}（{code}）(公告|公告称|发布公告)，(公司|)控股股东{holder}于{pledge_m}将{pledged_w}万股质押给{broker}，占其所持股份的{pledged_of_r}，占总股本的{pledged_in_r}。
| {holder}(将所持|把所持){short}{pledged_w}万股(质押给|出质给){broker}，占其持股{held_w}万股的{pledged_of_r}，占公司总股本的{pledged_in_r}。
- (截至公告日|质押完成后)，其累计质押{allpledged_w}万股，占所持股份的{allpledged_of_r}。|(公司称，|公司表示，)(本次质押不影响控制权稳定|质押风险可控)。|
@ who
@ figures

== bond 8 债券通/bond
* 70%
- {short}发行{term}年期公司债{bond_y}|{short}：公司债票面利率{cpn_r}|{grade}级{short}(完成发债|新发公司债)
*
- {short}（{code}）{bond_m}(完成发行|发行){bond_y}公司债券，期限{term}年，票面利率{cpn_r}，(到期日为{due_c}|{due_c}到期)。
| (债券市场消息，|){full}本期公司债规模{bond_w}万元，{term}年期，票面利率{cpn_r}，发行人主体评级{grade}，{bond_m}起息。
- (年度利息为|每年付息){interest_w}万元，存续期利息合计{allinterest_w}万元。|利率由2.00%的基准、{spread_r}的{grade}级利差和{premium_r}的期限溢价构成。|(发行人|公司){y}年末资产负债率{dr_r}，主体信用等级{grade}，由{broker2}主承销。
@ who
@ figures

== rating 7 债券通/board
* 65%
- {short}主体信用等级{grade}|评级跟踪：{short}获{grade}|{short}资产负债率{dr_r}，评级{grade}
*
- (评级机构|跟踪评级报告)(将|把){short}（{code}）主体信用等级(定为|确定为){grade}，依据是{y}年末资产负债率{dr_r}，(处于|位于){band}区间。
| {short}（{code}）{y}年末资产负债率为{dr_r}，上年末为{dr1_r}，(按评级标准|依评级标准)主体信用等级为{grade}(，上次评级为{grade1}|)。
- (报告提示|评级报告提示)，{ind}行业(主要风险为|需关注){risk}。|{grade}级发行人的信用利差为{spread_r}。|(公司|该公司)总部位于{city}，主要产品为{prod}。
@ outlook

== forecast 7 业绩预告/forecast
* 70%
- {short}：预计{y}年净利润{netlow_w}万元至{nethigh_w}万元|{short}发布{y}年业绩预告|业绩预告：{short}
*
- {short}（{code}）{forecast_m}(发布|披露)业绩预告，预计{y}年净利润{netlow_w}万元至{nethigh_w}万元，上年同期为{net1_w}万元。
| {full}预计{y}年度净利润(介于|在){netlow_w}万元至{nethigh_w}万元之间，(去年同期|上年)净利润为{net1_w}万元，数据未经审计。
- (公司表示|公司称)，(变动原因|业绩变动)主要是{cause}(，{cause2}也有影响|)。|{y0}年公司营业收入为{rev1_y}，年末资产负债率{dr1_r}。
@ who
@ outlook

== contract 9 公司快讯/contract
* 70%
- {short}签下{contract_y}{prod}合同|{short}与{b_short}签约|{short}：重大合同占(营收|上年收入){contract_of_r}
*
- {short}（{code}）(公告|公告称|发布公告)，(公司|)于{contract_m}与{b_short}（{b_code}）签订{prod}合同，金额{contract_y}，占{y}年营业收入的{contract_of_r}，履行期限{months}个月。
| {b_city}的{b_short}向{short}采购{prod}，合同金额{contract_w}万元，相当于{short}{y}年营业收入{rev_w}万元的{contract_of_r}。
- (公司表示，|公司称，)(合同履行将对未来收入产生积极影响|双方无关联关系)。|(合同对方|交易对方){b_short}属于{b_ind}行业，在{b_exch}{b_board}上市。|
@ who
@ figures

== buyback 6 股东动态/buyback
* 65%
- {short}：拟回购{backlow_w}万元至{backhigh_w}万元股份|{short}(抛出|推出)回购方案|{short}拟回购股份
*
- {short}（{code}）(公告|公告称)，(公司|)拟以自有资金回购股份，金额不低于{backlow_w}万元且不超过{backhigh_w}万元，价格不超过{backcap_d}元/股。
| {full}推出回购方案，(资金总额|金额)为{backlow_w}万元至{backhigh_w}万元，回购价上限{backcap_d}元/股，(所需资金为自有资金|资金来源为自有资金)。
- 回购股份(拟用于|将用于)(员工持股计划|股权激励)，(实施期限为十二个月|期限十二个月)。|公司{y}年末净资产{equity_y}，每股净资产{bps_d}元，总股本{shares_w}万股。
@ who
@ figures
@ outlook

== project 7 产业观察/project
* 65%
- {short}投资{project_y}扩产{prod}|{short}{city}新项目(开工|启动)|{short}：{prod}项目落户{city}
*
- {short}（{code}）(拟在|将在){prov}{city}投资{project_y}建设{prod}项目，(建设期|建设周期){months}个月，投资额占{y}年末资产总计的{project_of_r}。
| {short}{prod}项目(近日在{city}启动|在{city}开工)，(总投资|计划投资){project_w}万元，(预计{months}个月后完工|工期{months}个月)。
- 总经理{ceo}(表示|称)，(看好{hope}带来的机会|{prod}需求(稳定|值得期待))。|(公司|{short})属{ind}行业，{y}年营业收入{rev_y}，资产负债率{dr_r}。
@ who
@ figures
@ outlook

== talk 8 高管视线/meeting
* 60%
- {short}总经理{ceo}：{hope}(值得期待|是今年看点)|{short}董事长{chair}谈{prod}|{short}(召开|举行)业绩说明会
*
- {short}（{code}）总经理{ceo}在{meeting_m}的(业绩说明会|股东大会)上(表示|称)，{y}年公司营业收入{rev_y}、同比{rev_g}，(今年将继续做好{prod}|今年重点推广{prod2}|下一步将聚焦{prod})。
| (在业绩说明会上，|)(谈及{yn}年经营|被问及{yn}年计划)，{short}董事长{chair}(表示|回应称)，(公司将围绕{prod}加大投入|公司会控制资产负债率，年末该比率为{dr_r}|{hope}有望成为增长动力)。
- 财务总监{cfo}(补充称|介绍)，(公司|去年)研发费用{rnd_y}，毛利率{gm_r}。|(公司{y}年|{y}年)录得{net_l}，每股收益{eps_d}元。|董事会秘书{sec}(介绍|透露)，(公司股东结构稳定|{holder}持股{held_of_r})。
@ who
@ figures

== profile 8 公司档案/meeting
* 50%
- 公司档案：{short}|认识{short}（{code}）|{city}企业{short}一览
*
- {full}{founded}年(成立于|创立于){prov}{city}，{listed}年在{exch}{board}上市，证券代码{code}，(主要产品|主营产品)为{prod}和{prod2}。
| {short}（{code}）(总部位于|注册地为){prov}{city}，{founded}年成立，属{ind}行业，由{reg}监管，(主要产品|主打产品)是{prod}。
- 公司董事长为{chair}，总经理为{ceo}(，财务总监为{cfo}|)。|(其股票|公司股票)代码以{prefix}开头，属{exch}{board}，单日涨跌幅限制{limit}%。|审计机构为{auditor}，所得税税率{rate}%。
@ figures

== watch 6 监管之声/board
* 60%
- {reg}(部署|开展){ind}行业(风险排查|专项检查)|{ind}行业：警惕{risk}|{reg}(提示|关注){ind}行业风险
*
- {reg}(日前|近日)(在{city}召开座谈会|到{city}调研)，(要求|提示){ind}企业(防范|关注){risk}，(并做好信息披露|依法合规经营)。
| {ind}行业的监管机构{reg}(表示|指出)，(当前|眼下)行业的主要风险是{risk}，(将加强日常检查|将完善风险监测)。
- (参会企业|与会企业){short}（{code}）(总经理{ceo}|董事长{chair})(表示|称)，(公司{y}年营业收入{rev_y}，经营{mood}|公司已建立应对机制|将重视{worry}的影响)。|(调研组走访了|走访企业包括){short}，该公司{y}年营业收入{rev_y}、资产负债率{dr_r}。
@ outlook

== market 16 市场动态/market
* 65%
- {short}(收|){turn}{move}，(成交额|成交){turnover}|{short}{market_m}{turn}{move}|(异动|盘面)：{short}{turn}{move}
*
- ({market_c}|{market_m})，{short}（{code}）(报收于|收于|收报){close}元，{turn}{move}，(前收盘价|前一日收盘价){before}元，(成交额|全天成交){turnover}。
| ({market_c}|{market_m})收盘，{board}公司{short}{turn}{move}，(报|收报){close}元，成交额{turnover}，换手率{churn}。
- (公司股票|该股)在{exch}{board}交易，单日涨跌幅限制为{limit}%。|(公司|该公司){y}年(每股收益{eps_d}元|录得{net_l})，(总股本|股本){shares_w}万股。|(消息面上，|)(市场关注{hope}|投资者关注{worry})。
@ who
@ figures

== rank 6 产业观察/meeting
* 60%
- {ind}行业{y}年报对比：{short}与{b_short}|{short}、{b_short}谁的毛利率更高|{ind}板块财报(观察|对比)
*
- (同处|同属){ind}行业，{short}（{code}）{y}年营业收入{rev_y}，{b_short}（{b_code}）为{b_rev_y}；两家公司毛利率分别为{gm_r}和{b_gm_r}。
| (从年报看|对比年报)，{ind}公司{short}{y}年营业收入同比{rev_g}，{b_short}同比{b_rev_g}，(资产负债率|年末资产负债率)分别为{dr_r}和{b_dr_r}。
- (净利润方面|利润方面)，{short}录得{net_l}，{b_short}录得{b_net_l}。|(评级方面|按评级标准)，(前者为{grade}，后者为{b_grade}|{short}为{grade}，{b_short}为{b_grade})。
@ outlook
""",  # noqa: E501
    {"who": _WHO, "figures": _FIGURES, "outlook": _OUTLOOK},
)
_LEADS = "||||(快讯|财讯|本报讯)：|【快讯】|【{@_m}】|{@_m}消息，|本报{city}{@_m}电 "
_CLOCK = tuple(f"{minute // 60:02d}:{minute % 60:02d}" for minute in range(9 * 60, 22 * 60))


class _Flash(NamedTuple):
    press: Press
    column: str
    event: str


def _flash(form: Form) -> _Flash:
    """The form with a dateline before its body, its label taken apart."""
    column, event = form.label.split("/")
    title, body = form.paragraphs
    body = body._replace(sentences=(phrases(_LEADS.replace("@", event)), *body.sentences))
    return _Flash(Press(form._replace(paragraphs=(title, body))), column, event)


_FLASHES = tuple(flash for form in _BODIES for flash in [_flash(form)] * form.weight)


def news(archive: Archive, dice: Dice) -> Iterator[Row]:
    """Flashes without end."""
    random = dice.random
    stage = Stage(archive)
    while True:
        facts = stage.draw(dice)
        press, column, event = _FLASHES[int(random() * len(_FLASHES))]
        if press.name == "payout" and not facts.books.div:
            press, column, event = _FLASHES[0]
        words: dict[str, str] = facts
        if press.name == "market":
            words = facts.with_others({})
            words.update(_session(facts, 1 + int(random() * 12)))
        elif press.name == "contract":
            words = facts.with_others({"b": archive.customer(facts)})
        elif press.name == "rank":
            words = facts.with_others({"b": archive.facts(dice.pick(archive.peers(facts.company)), facts.year)})
        time = f"{words[event + '_i']} {_CLOCK[int(random() * len(_CLOCK))]}"
        yield press.render(dice, words), {"time": time, "column": column}


def _session(facts: Facts, month: int) -> dict[str, str]:
    """The one trading day of that month that the papers report on, in words; closes keep the daily limit."""
    day = weekday(facts.year + 1, month, 2 + mix(facts.company.salt, facts.year, 100 + month) % 24)
    limit = facts.company.board.limit_percent * 100
    before = max(100, facts.numbers["price"] * (85 + mix(facts.company.salt, facts.year, 120 + month) % 31) // 100)
    swing = mix(facts.company.salt, facts.year, 140 + month) % 1000 - 500
    # Most days are quiet: the cube of the draw, scaled to the limit.
    close = before + before * limit * swing**3 // 500**3 // 10_000
    change = hundredths_of_percent(close - before, before)
    shares = facts.company.shares
    churn = 30 + mix(facts.company.salt, facts.year, 160 + month) % 470
    return {
        "market_c": chinese(day),
        "market_m": f"{day.month}月{day.day}日",
        "market_i": day.isoformat(),
        "close": decimal(close),
        "before": decimal(before),
        "turn": "涨" if change > 0 else "跌" if change < 0 else "平盘，涨幅",
        "move": decimal(abs(change)) + "%",
        "churn": decimal(churn) + "%",
        "turnover": in_yi(max(1, shares * churn // 10_000 * close // 100)),
    }
