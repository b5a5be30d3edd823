"""Announcements of the synthetic world: what a listed company files, with headings and small tables.

Nine kinds, 400 to 1,500 characters each. Every second announcement is an annual summary of the last year until each
company has had one: the exam's closed-book questions rest on those.

The forms are invented; no filing follows the rules of a real exchange.
"""

from __future__ import annotations

from collections.abc import Iterator

from finlm.data.synthetic_archive import Archive, Stage
from finlm.data.synthetic_facts import LAST_YEAR, Facts, Meta, Row
from finlm.data.synthetic_grammar import Form, Paragraph, Press, Readings, by_weight, forms, phrases
from finlm.data.synthetic_world import Dice


def _table(rows: str) -> Readings:
    """A table of this year, the year before and the change in several layouts; rows are `label=name`."""
    cells = [row.split("=") for row in rows.split()]
    tables = []
    for number in "wn":
        for gap, edge in ((" | ", ""), (" | ", "| "), ("　", ""), ("\t", "")):
            end = " |" if edge else ""
            for head in (("项目", "{y}年", "{y0}年", "同比变动"), ("指标", "{y}年度", "{y0}年度", "增减幅度")):
                lines = [head]
                lines += [(label, f"{{{k}_{number}}}", f"{{{k}1_{number}}}", f"{{{k}_p}}") for label, k in cells]
                tables.append("\n" + "\n".join(edge + gap.join(line) + end for line in lines) + "\n")
    return tuple(tables)


_TABLES = {
    "income": _table(
        "营业收入=rev 营业成本=cost 销售费用=sell 管理费用=admin 研发费用=rnd 财务费用=fin 利润总额=profit "
        "所得税费用=tax 净利润=net"
    ),
    "balance": _table(
        "流动资产=cur 非流动资产=fixed 资产总计=assets 流动负债=cdebt 非流动负债=ldebt 负债合计=debts "
        "所有者权益合计=equity"
    ),
    "key": _table("营业收入=rev 利润总额=profit 净利润=net 资产总计=assets 负债合计=debts 所有者权益合计=equity"),
}
_BODIES = forms(
    """
== annual 24 report
*
- {full}{y}年年度报告摘要|{full}关于{y}年年度报告的公告|{short}：{y}年年度报告（摘要）
*
- (本摘要|本公告)(摘自|内容来自)年度报告全文，(投资者欲了解详情，请查阅全文|详细情况请查阅全文)。
| 公司(董事会|第{no}次董事会会议)(审议通过了|已批准){y}年年度报告，现将(主要内容|要点)(披露|公告)如下。
# 公司基本情况|公司概况|公司简介|基本信息
- {full}(成立|设立)于{founded}年，(总部|注册地)位于{prov}{city}，{listed}年在{exch}{board}(上市|挂牌上市)，证券代码为{code}。
| 公司(创立|设立)于{founded}年，(总部设在|注册地为){prov}{city}，自{listed}年起在{exch}{board}交易，证券代码{code}。
- 公司(属于|归属于){ind}行业，行业(主管|监管)机构为{reg}，主要产品为{prod}，(此外还经营|并经营|同时提供){prod2}。
| 公司主营{prod}，(第二大产品|另一主要产品)为{prod2}，(行业分类|所属行业)为{ind}，由{reg}(负责监管|实施行业监管)。
- (报告期末，|)公司董事长为{chair}，总经理为{ceo}，财务总监为{cfo}，董事会秘书为{sec}。
| 董事长{chair}(主持董事会工作|为公司法定代表人)，总经理{ceo}(负责日常经营|主持经营管理)，财务总监{cfo}，董事会秘书{sec}。
- (年度财务报表|{y}年度财务报表)(经|已经){auditor}审计(，并获得无保留意见|，审计意见为无保留意见|)。
| {auditor}为公司{y}年度(审计机构|财务报表的审计机构)，(出具了|发表了)无保留意见。
# 主要财务数据|利润表主要项目|主要会计数据（合并口径）
- (单位：万元|金额单位：人民币万元|下表金额单位均为万元)
@ income
- (报告期内|{y}年度)，公司实现营业收入{rev_w}万元，同比{rev_g}，(主要原因是|主要系|主要由于){why}(，{why2}也有影响|)。
| 公司全年营业收入{rev_y}，(较上年|同比){rev_g}；(录得|全年){net_l}，同比{net_g}。(收入变动主要与{why}有关|收入变动的主要原因为{why})。
- (综合毛利率|毛利率)为{gm_r}，较上年{gm_k}；(净利率|销售净利率)为{nm_r}。
| (毛利率|主营业务毛利率){gm_r}，净利率{nm_r}，基本每股收益{eps_d}元，净资产收益率{roe_r}。
| 研发费用{rnd_w}万元，占营业收入的{rd_r}；基本每股收益为{eps_d}元。
- 公司适用的所得税税率为{rate}%(，与{ind}行业的统一税率一致|)，(全年|当期)所得税费用为{tax_w}万元。
| 按{ind}行业{rate}%的所得税税率计算，(当期|全年)所得税费用为{tax_w}万元。
# 资产负债情况|财务状况|资产与负债构成
- (单位：万元|金额单位：人民币万元)
@ balance
- (期末|报告期末|{y}年末)资产负债率为{dr_r}，较上年末{dr_k}，(处于|位于){band}区间，对应(主体信用等级|主体评级){grade}。
| (按照|依照)评级标准，资产负债率{band}对应{grade}级，公司(期末|年末)资产负债率为{dr_r}，主体信用等级为{grade}。
- 经营活动现金流量净额{ocf_w}万元，(上年|上年同期){ocf1_w}万元。|
# 利润分配预案|分红安排|利润分配
- {plan}
# 经营情况讨论|管理层讨论与展望|下一年度经营计划 70%
- (过去一年|报告期内)，公司经营{mood}，(持续完善{prod}的产品线|把{prod}作为投入重点)，(并加快推广{prod2}|兼顾{prod2}的销售)。
| {y}年，管理层(在总经理{ceo}的带领下|按照董事会部署)，(以{prod}为核心|紧抓{prod}主业)，经营{mood}。
- (展望{yn}年|{yn}年)，公司(预计|判断){hope}(有望成为主要看点|将是业绩的主要支撑)，(将继续控制费用、优化现金流|将稳步推进产能与渠道建设|计划把研发投入保持在合理水平)。
# 风险提示|主要风险|可能面对的风险 80%
- 公司(面临的主要风险为|所处的{ind}行业的典型风险是|需重点关注的风险包括){risk}(，{worry}可能影响公司业绩|，同时关注{worry}|)。
| {ind}行业(普遍面临|的典型风险是){risk}。(公司将积极应对|提请投资者关注){worry}(带来的影响|)。

== payout 12 record
*
- {full}{y}年年度权益分派实施公告|{short}：{y}年度现金红利派发公告|{full}关于实施{y}年度利润分配的公告
*
- (本次|{y}年度)利润分配方案已(经|获){meeting_c}召开的股东大会审议通过，现将(实施事项|有关事宜|具体安排)公告如下。
# 分配方案|利润分派方案|本次分派内容
- 本次分派以公司总股本{shares_w}万股为基数，每10股派发现金红利{per10_t}元（含税），(合计派发现金红利|共计派发现金){div_w}万元，(占{y}年度净利润{net_w}万元的{payout_r}|分红金额占净利润的{payout_r})。
| 公司以总股本{shares_w}万股为基数，向全体股东每10股派现{per10_t}元（含税），派现总额{div_w}万元。{y}年度公司实现净利润{net_w}万元，现金分红比例为{payout_r}。
- 本次不送红股，不转增股本。|本次分派不涉及送股和转增。
# 股权登记日与除息日|重要日期|相关日期安排
- 股权登记日为{record_c}，除息日为{ex_c}，现金红利(于除息日发放|发放日与除息日相同)。|股权登记日：{record_c}\\n除息日：{ex_c}\\n现金红利发放日：{ex_c}\\n
- 股权登记日收市后登记在册的(全体股东|股东)(享有|有权参与)本次分派，除息日起买入的股份不再享有本次红利。|
# 分派办法|派发对象与方式|实施办法
- 控股股东{holder}持有{held_w}万股，(其现金红利由公司直接划付|红利由公司自行派发)；其他股东的红利由登记机构(代为派发|划入其资金账户)。
- 个人股东的应纳税款按持股期限计算。|有关税款由公司按规定代扣代缴。|
# 公司财务情况|与分红有关的财务数据|分红能力说明
- (单位：万元|金额单位：万元)
@ key
- 公司{y}年末所有者权益为{equity_w}万元，每股净资产{bps_d}元，(派现不影响公司正常经营|本次派现与公司现金流状况相匹配)。
- 资产负债率为{dr_r}，对应主体信用等级{grade}。|
# 咨询方式|联系办法|咨询机构 80%
- (咨询部门|联系部门)：公司证券事务部，联系人为董事会秘书{sec}，办公地址在{prov}{city}。|投资者可(联系|咨询)公司证券事务部（{city}），由董事会秘书{sec}(负责解答|负责接待)。

== pledge 11 pledge
*
- {full}关于控股股东部分股份质押的公告|{short}：关于控股股东股份质押的公告|{full}关于股东股份质押情况的公告
*
- 公司(近日|日前)(收到|接到)控股股东{holder}的(通知|函告)，(获悉|得知)其将所持(部分|部分公司)股份(办理了质押|用于质押融资)，(具体情况|有关情况)如下。
# 本次质押情况|股份质押的基本情况|质押登记情况
- {holder}于{pledge_c}将{pledged_w}万股(质押给|出质给){broker}，占其所持股份的{pledged_of_r}，占公司总股本的{pledged_in_r}。|出质人：{holder}\\n质权人：{broker}\\n质押股数：{pledged_w}万股\\n质押日期：{pledge_c}\\n占其所持股份比例：{pledged_of_r}\\n占总股本比例：{pledged_in_r}\\n
- 质押(所得资金|融资)用于(补充流动资金|偿还到期借款|对外投资|项目建设)，(质押期限为十二个月|质押至办理解除登记之日止|质押期限为两年)。
# 累计质押情况|控股股东持股及累计质押|股东持股与质押概况
- 截至(本公告日|公告披露日)，{holder}(共|合计)持有公司{held_w}万股，占总股本{shares_w}万股的{held_of_r}；累计质押{allpledged_w}万股，占其所持股份的{allpledged_of_r}。
# 对公司的影响|质押风险说明|对上市公司的影响
- (本次质押|上述质押)不会(导致控制权变更|影响公司控制权稳定)，对公司(日常经营|生产经营和治理)(无重大影响|没有不利影响)。
- (控股股东资信状况良好，|控股股东财务状况稳健，)(具备偿还能力|有能力按期解除质押)(，如股价大幅波动，将采取补充质押、提前还款等措施应对|，目前不存在平仓风险|)。
# 公司最近一年财务数据|上市公司主要财务指标|公司财务概况
- (单位：万元|金额单位：万元)
@ key
- {y}年末资产负债率为{dr_r}，(处于|位于){band}区间，主体信用等级为{grade}。|
# 其他说明|后续安排|备查事项 70%
- 公司股票在{exch}{board}上市，代码{code}以{prefix}开头，单日涨跌幅限制为{limit}%。|公司将持续关注(质押变动|股份质押的进展)，(依规|及时)履行披露义务(，敬请投资者注意风险|)。

== bond 12 bond
*
- {full}{yn}年公司债券发行公告|{full}关于公开发行公司债券的公告|{short}：{yn}年公司债券发行结果公告
*
- 公司于{bond_c}(完成公司债券的发行|发行公司债券)，现将(发行情况|主要条款)公告如下。|(经股东大会授权|根据董事会决议)，公司{yn}年公司债券于{bond_c}发行(完毕|完成)，(有关情况|主要内容)如下。
# 债券主要条款|本期债券基本情况|发行要素
- 本期债券(发行规模|发行总额)为{bond_w}万元，期限{term}年，票面利率为{cpn_r}，按年付息、到期一次还本，起息日为{bond_c}，到期日为{due_c}。|发行规模：{bond_w}万元\\n债券期限：{term}年\\n票面利率：{cpn_r}\\n起息日：{bond_c}\\n到期日：{due_c}\\n还本付息方式：按年付息，到期一次还本\\n
- (每年|年度)利息为{interest_w}万元，存续期内利息合计{allinterest_w}万元。|按票面利率计算，每年应付利息{interest_w}万元，{term}年合计{allinterest_w}万元。
# 利率的确定|票面利率构成|定价说明
- 票面利率由基准利率、信用利差和期限溢价构成：基准利率2.00%，{grade}级信用利差{spread_r}，期限溢价{premium_r}（每年0.10%），合计{cpn_r}。
| 按照定价规则，2.00%的基准利率加上{grade}级对应的利差{spread_r}和{term}年期对应的期限溢价{premium_r}，票面利率为{cpn_r}。
# 发行人信用状况|信用评级|偿债能力
- {y}年末，公司资产总计{assets_w}万元，负债合计{debts_w}万元，所有者权益合计{equity_w}万元，资产负债率{dr_r}，处于{band}区间，主体信用等级为{grade}。
| 公司主体信用等级为{grade}，依据是{y}年末资产负债率{dr_r}（{band}）。(期末|年末)资产总计{assets_w}万元，负债合计{debts_w}万元，所有者权益合计{equity_w}万元。
- 经营活动现金流量净额为{ocf_w}万元。|{y}年度(录得|实现){net_l}，经营活动现金流量净额为{ocf_y}。
# 募集资金用途|资金用途 85%
- 募集资金扣除发行费用后，(拟用于|将用于)(偿还到期债务和补充流动资金|{prod}相关项目建设|{city}生产基地的建设|置换成本较高的银行借款)。
- 主承销商{broker2}(负责监督|将监督)资金使用。|公司设立专项账户，由{broker2}担任受托管理人。
# 发行人简介|发行人基本情况 80%
- {full}(成立|设立)于{founded}年，总部位于{prov}{city}，在{exch}{board}上市（证券代码{code}），属于{ind}行业，主要产品为{prod}和{prod2}。
- 公司董事长为{chair}，总经理为{ceo}。|公司由{auditor}审计，行业监管机构为{reg}。|
# 投资者提示|风险因素 70%
- (投资者应关注|本期债券的主要风险来自){ind}行业的{risk}，(以及利率波动带来的影响|以及发行人现金流的变化)。

== rating 8 board
*
- {full}{yn}年主体信用评级公告|{short}：关于主体信用评级结果的公告|{full}信用评级跟踪公告
*
- (根据评级机构出具的跟踪报告|评级机构近日完成跟踪评级)，公司{yn}年主体信用等级为{grade}，(现公告如下|具体情况如下)。
# 评级结论|跟踪评级结果
- 以{y}年末财务数据为依据，公司资产负债率为{dr_r}，处于{band}区间，主体信用等级确定为{grade}；上一次评级所依据的资产负债率为{dr1_r}，对应{grade1}。
# 评级标准|评级依据
- 评级标准以资产负债率划分：低于30%为AAA，30%（含）至45%为AA+，45%（含）至60%为AA，60%（含）至70%为A，70%（含）以上为BBB。
| 资产负债率低于30%评为AAA，30%及以上但低于45%评为AA+，45%及以上但低于60%评为AA，60%及以上但低于70%评为A，达到70%评为BBB。
# 财务分析|主要财务指标
- (单位：万元|金额单位：万元)
@ balance
- (公司|发行人)全年营业收入{rev_y}，同比{rev_g}；毛利率{gm_r}，净资产收益率{roe_r}。
# 经营与行业风险|关注事项
- {ind}行业的(典型|主要)风险是{risk}，公司还需关注{worry}；(有利因素是|积极因素在于){hope}。
- 公司由{reg}监管，注册地为{prov}{city}，主要产品为{prod}。|
# 影响说明|对公司的影响 80%
- 按现行定价规则，{grade}级的信用利差为{spread_r}，(三年期债券的票面利率以基准利率2.00%加利差和0.30%的期限溢价确定|公司新发债券的票面利率将以此为依据)。
- 本次评级结果不影响存续债券的还本付息。|

== forecast 9 forecast
*
- {full}{y}年度业绩预告|{short}：{y}年年度业绩预告公告|{full}关于{y}年度业绩预计情况的公告
*
- (本公告所载数据未经审计|以下数据为初步测算结果，未经审计)，(请以年度报告披露的数据为准|最终数据以{y}年年度报告为准)。
# 业绩预告情况|本期业绩预计
- 预计{y}年度净利润为{netlow_w}万元至{nethigh_w}万元，上年同期为{net1_w}万元。|\\n业绩预告期间：{y}年1月1日至12月31日\\n预计净利润：{netlow_w}万元至{nethigh_w}万元\\n上年同期净利润：{net1_w}万元\\n
- (上年同期|上年度)营业收入为{rev1_w}万元，基本每股收益为{eps1_d}元。
# 业绩变动原因|变动原因说明
- (业绩变动的主要原因为|影响业绩的主要因素是){cause}，(此外，{cause2}也影响了利润|同时{cause2})。
- {prod}(仍是公司的主要利润来源|是影响利润的主要产品)，{prod2}(贡献有限|的影响相对较小)。|
# 公司情况说明|相关背景
- {full}总部位于{prov}{city}，属于{ind}行业，在{exch}{board}上市，证券代码{code}，适用所得税税率{rate}%。
- 公司董事长为{chair}，总经理为{ceo}。|
# 上年同期主要数据|可比期间数据
- {y0}年度公司营业收入{rev1_w}万元，营业成本{cost1_w}万元，利润总额{profit1_w}万元，所得税费用{tax1_w}万元，净利润{net1_w}万元；年末资产总计{assets1_w}万元，负债合计{debts1_w}万元，所有者权益合计{equity1_w}万元，资产负债率{dr1_r}。
# 风险提示|其他说明
- (本次预告由公司财务部门初步测算|预告数据由财务总监{cfo}组织测算)，(与审计机构不存在重大分歧|已与{auditor}进行预沟通)。
- (年度报告预计于{report_c}披露|公司拟于{report_c}披露年度报告)，{ind}行业的{risk}(可能影响最终结果|值得投资者关注)。

== contract 10 contract
*
- {full}关于签订重大合同的公告|{short}：重大经营合同公告|{full}签订{prod}合同的公告
*
- 公司于{contract_c}与{b_full}（以下简称“{b_short}”）(签订|签署)了{prod}合同，(现将有关情况公告如下|主要内容如下)。
# 合同主要内容|合同基本情况
- (合同标的为|标的产品为){prod}，合同金额{contract_w}万元（含税），履行期限为{months}个月，(分批交付、按进度结算|先预付后按月结算|验收合格后分期付款)。|合同标的：{prod}\\n合同金额：{contract_w}万元（含税）\\n履行期限：{months}个月\\n签订日期：{contract_c}\\n
- 合同金额(占公司{y}年度营业收入{rev_w}万元的|相当于公司{y}年度营业收入（{rev_w}万元）的){contract_of_r}。
# 交易对方情况|合同对方介绍
- {b_full}(成立|设立)于{b_founded}年，位于{b_prov}{b_city}，属于{b_ind}行业，在{b_exch}{b_board}上市，证券代码{b_code}。(其总经理为{b_ceo}。|{y}年度营业收入{b_rev_w}万元。|)
- (双方不存在关联关系|交易对方与公司无关联关系)，(资信状况良好|具备履约能力)。
# 对公司的影响|合同履行的影响
- 合同履行(将对公司未来收入产生积极影响|有助于提高{prod}的市场份额)，(不影响公司业务独立性|公司不会因此对对方形成依赖)。
- 公司{y}年度营业收入同比{rev_g}，毛利率{gm_r}，(合同的执行有望带来{hope}|本合同有助于缓解{worry}的压力)。|
# 公司概况|本公司情况 80%
- {full}总部位于{prov}{city}，主要产品为{prod}和{prod2}，在{exch}{board}上市，证券代码{code}，董事长{chair}，总经理{ceo}。
# 最近一年财务数据|主要财务数据
- (单位：万元|金额单位：万元)
@ key
# 风险提示|合同风险 80%
- (合同履行期较长|合同在执行中)，(可能受{risk}影响|存在{worry}等不确定因素)，(提请投资者注意|敬请投资者谨慎决策)。

== board 14 board
*
- {full}董事会决议公告|{full}第{no}次董事会会议决议公告|{short}：董事会决议公告
*
- 公司第{no}次董事会会议于{board_c}在{city}(以现场方式|以现场结合通讯的方式)召开，应到董事{directors}人，实到{directors}人，会议由董事长{chair}主持，总经理{ceo}(列席|参加)会议。
# 关于{prod}扩产项目的议案|关于投资建设{prod}项目的议案
- (同意|会议同意)公司在{city}投资{project_w}万元建设{prod}项目，(建设期|建设周期)为{months}个月，(资金来源为自有资金和银行贷款|所需资金由公司自筹)。项目投资额(占{y}年末资产总计的{project_of_r}|相当于{y}年末资产总计{assets_w}万元的{project_of_r})。
- 表决结果：同意{directors}票，反对0票，弃权0票，议案获得通过。
# 关于回购公司股份的议案|关于股份回购方案的议案
- (同意|会议同意)以自有资金回购股份，回购金额不低于{backlow_w}万元、不超过{backhigh_w}万元，回购价格不超过{backcap_d}元/股，(用于员工持股计划|用于股权激励|用于减少注册资本)，(实施期限为十二个月|自决议之日起十二个月内实施)。
- 表决结果：同意{directors}票，反对0票，弃权0票，议案获得通过。
# 关于聘请审计机构的议案|关于续聘会计师事务所的议案 70%
- (同意|会议同意)续聘{auditor}为公司{yn}年度审计机构，(并提交股东大会审议|审计费用由管理层协商确定)。
- 表决结果：同意{directors}票，反对0票，弃权0票，议案获得通过。
# 关于申请综合授信的议案|关于向银行申请授信额度的议案 60%
- 截至{y}年末，公司负债合计{debts_w}万元，资产负债率{dr_r}，主体信用等级{grade}；(同意|会议同意)公司向银行申请授信额度，(由财务总监{cfo}办理|授权财务总监{cfo}签署文件)。
# 公司经营情况汇报|总经理工作报告
- 总经理{ceo}(汇报|报告)了经营情况：{y}年度营业收入{rev_w}万元，同比{rev_g}；(录得|全年){net_l}，同比{net_g}；公司经营{mood}，{why}是收入变化的主要原因。
- (会议要求管理层关注{risk}|与会董事提示关注{worry})，(并做好{prod2}的市场开拓|确保年度预算完成)。|
# 主要财务数据|会议审阅的财务数据 75%
- (单位：万元|金额单位：万元)
@ key
""",  # noqa: E501
    _TABLES,
)
_HEADER = (
    "证券代码：{code}　证券简称：{short}　公告编号：{@_o}|证券代码：{code}    证券简称：{short}    编号：{@_o}"
    "|股票代码：{code}　股票简称：{short}　公告编号：{@_o}"
)
_CLOSING = "特此公告。\n{full}董事会\n{@_c}|特此公告。\n{full}\n董事会\n{@_c}|{full}董事会\n{@_c}"


def _framed(form: Form) -> Form:
    """The form between the header and the closing line of its day, which is its label."""
    header, closing = (Paragraph((), (phrases(text.replace("@", form.label)),), 1) for text in (_HEADER, _CLOSING))
    title, *body = form.paragraphs
    return form._replace(paragraphs=(title, header, *body, closing))


_PRESSES = tuple(Press(_framed(form)) for form in _BODIES)
_BY_NAME = {press.name: press for press in _PRESSES}
_DRAW = by_weight(_PRESSES, _BODIES)


def filings(archive: Archive, dice: Dice, stride: int, part: int = 0, parts: int = 1) -> Iterator[Row]:
    """Announcements without end; every stride-th is the annual summary of the next company that has had none.

    Of several parts each introduces its own share of the companies.
    """
    companies = archive.world.companies[part::parts]
    stage = Stage(archive)
    number = 0
    while True:
        due, extra = divmod(number, stride)
        number += 1
        if not extra and due < len(companies):
            yield _filing(archive, dice, _BY_NAME["annual"], archive.facts(companies[due], LAST_YEAR))
        else:
            facts = stage.draw(dice)
            press = dice.pick(_DRAW)
            if press.name == "payout" and not facts.books.div:
                press = _BY_NAME["board"]
            yield _filing(archive, dice, press, facts)


def _filing(archive: Archive, dice: Dice, press: Press, facts: Facts) -> Row:
    words = facts.with_others({"b": archive.customer(facts)}) if press.name == "contract" else facts
    meta: Meta = {"code": facts["code"], "company": facts["full"], "date": facts[press.label + "_i"]}
    # A table that ends its paragraph brings a line break of its own.
    return press.render(dice, words).replace("\n\n", "\n"), meta
