"""Articles of the synthetic world: analysis over several paragraphs, 500 to 1,800 characters.

Six kinds: a year in review, three years of one company, a comparison of three peers, a credit view, a lesson that
works the sums of one statement, and a look at an industry. All figures are those of the announcements.

Opinions are drawn from the direction of the figures, not argued from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from finlm.data.synthetic_archive import Archive, Stage
from finlm.data.synthetic_facts import Facts, Meta, Row
from finlm.data.synthetic_grammar import Press, by_weight, forms
from finlm.data.synthetic_world import Dice

# The label is the tag. b and c are peers; x and z are the company one and two years before.
_FORMS = forms(
    """
== review 24 年报解读
*
- {short}{y}年年报解读：(收入{rev_g}，利润{net_g}|经营{mood}，评级{grade})|读懂{short}：{prod}撑起了什么|{short}（{code}）：{why}之后，(看点在哪里|还有什么变化)|从年报看{short}的{y}年
*
- (总部位于|来自){prov}{city}的{short}（{code}）(近日|日前)(披露|公布)了{y}年年度报告。这家{founded}年成立、{listed}年在{exch}{board}上市的{ind}企业，(全年|当年)实现营业收入{rev_y}，同比{rev_g}；录得{net_l}，同比{net_g}。
| {report_c}，{ind}行业的{short}（{code}）(披露|公布)年报：{y}年营业收入{rev_w}万元，上年为{rev1_w}万元，同比{rev_g}；净利润{net_w}万元，同比{net_g}。公司{founded}年成立于{prov}{city}，{listed}年登陆{exch}{board}。
- (公司主营{prod}|公司以{prod}为核心产品)，(同时经营|并提供){prod2}，由董事长{chair}和总经理{ceo}(掌舵|共同带领)。|公司的主要产品是{prod}，总经理{ceo}在年报中(把{prod2}称为第二增长点|强调要把{prod2}做大)。
*
- (先看收入|收入端|从收入看)，(变化的主要原因是{why}|{why}是主要推动因素)，{why2}也(产生了影响|不可忽视)。(营业成本{cost_w}万元|同期营业成本为{cost_w}万元，上年{cost1_w}万元)，(毛利率|综合毛利率){gm_r}，较上年{gm_k}。
- (毛利率的变化(说明|反映)|这一毛利率水平取决于)(产品结构和成本控制|定价能力与成本)，(后续仍需跟踪|值得继续观察)。|(放在行业里比较|横向来看)，同为{ind}企业的{b_short}毛利率为{b_gm_r}，营业收入{b_rev_y}。
*
- (再看费用|费用端|费用方面)，销售费用{sell_w}万元、管理费用{admin_w}万元、研发费用{rnd_w}万元、财务费用{fin_w}万元，(研发费用占收入的|研发投入占营业收入的){rd_r}。(扣除成本和四项费用后|收入减去成本与四项费用)，利润总额为{profit_w}万元，(按{rate}%的税率|适用税率{rate}%，)缴纳所得税{tax_w}万元，净利润{net_w}万元。
- (折合|对应)每股收益{eps_d}元，净资产收益率{roe_r}。|净利率为{nm_r}，每股收益{eps_d}元。|
*
- (资产负债表上|资产端)，年末资产总计{assets_w}万元，负债合计{debts_w}万元，所有者权益合计{equity_w}万元，资产负债率{dr_r}，较上年末{dr_k}，(按评级标准对应{grade}|主体信用等级为{grade})。
| 年末公司总资产{assets_y}，其中流动资产{cur_y}、非流动资产{fixed_y}；总负债{debts_y}，净资产{equity_y}，资产负债率{dr_r}，评级{grade}。
- 经营活动现金流量净额为{ocf_y}，上年为{ocf1_y}。|(净资产的变化不难核对：|)年初净资产{equity1_w}万元，加上净利润{net_w}万元，减去已派发的上年度红利{div1_w}万元，正好等于年末的{equity_w}万元。
* 85%
- (风险方面|不过)，{ind}行业(普遍面临|最典型的风险是){risk}，{worry}(同样需要留意|也可能拖累业绩)。(监管机构{reg}近年来持续加强检查，|)(投资者应结合现金流和负债水平判断|这对管理层的应对能力提出了要求)。
* 75%
- (年报之外，|除了年报，|)(公司|{short}){yn}年的(几项动作|几则公告)(也值得记录|也值得一读)：(董事会批准在{city}投资{project_w}万元建设{prod}项目，建设期{months}个月|{prod}扩产项目获董事会批准，投资额{project_y}，占总资产的{project_of_r})；拟以{backlow_w}万元至{backhigh_w}万元回购股份，价格不超过{backcap_d}元/股；{bond_m}发行{term}年期公司债{bond_y}，票面利率{cpn_r}。
- (控股股东{holder}于{pledge_c}质押{pledged_w}万股，占其持股的{pledged_of_r}。|{holder}持股{held_of_r}，其中累计质押的占其所持股份的{allpledged_of_r}。|)
*
- (展望{yn}年|往后看)，{hope}(仍是主要看点|可能成为新的支撑)，{ceo}(带领的管理层|和他的团队)(能否兑现计划|能否把握机会)，(还要看{prod}的市场表现|取决于{prod2}的推广进度)。|(总体上|综合来看)，{short}经营{mood}，(资产负债率{dr_r}的水平意味着财务空间(尚可|有限)|主体信用等级{grade}决定了其融资成本)，{yn}年(重点看|关注){prod}和{prod2}的销售。

== trend 18 公司研究
*
- 三年看{short}：从{z_rev_y}到{rev_y}|{short}三年财报(复盘|回顾)：毛利率与负债率的变化|{short}（{code}）这三年
*
- (把{short}（{code}）最近三份年报放在一起看|翻开{short}（{code}）的三份年报)，(能看出经营的轨迹|变化一目了然)：{z_y}年营业收入{z_rev_y}，{x_y}年{x_rev_y}，{y}年{rev_y}，三年的同比变动依次为{z_rev_p}、{x_rev_p}和{rev_p}。
- (公司位于{prov}{city}|公司总部在{city})，{founded}年成立，属{ind}行业，主要产品为{prod}和{prod2}，董事长为{chair}，总经理为{ceo}。
*
- 利润方面，{z_y}年录得{z_net_l}，{x_y}年录得{x_net_l}，{y}年录得{net_l}。(最近一年的利润变化主要是因为{cause}|{y}年的变化与{cause}有关)，(毛利率则|毛利率)从{z_gm_r}到{x_gm_r}，再到{gm_r}。
- (研发投入占比|研发费用占收入的比例)三年分别为{z_rd_r}、{x_rd_r}和{rd_r}。|净资产收益率依次为{z_roe_r}、{x_roe_r}和{roe_r}。
*
- (再看负债|负债水平方面)，三年末资产负债率分别为{z_dr_r}、{x_dr_r}和{dr_r}，主体信用等级依次为{z_grade}、{x_grade}和{grade}。(评级只取决于资产负债率所在的区间，{dr_r}落在{band}区间，因此为{grade}|按评级标准，{band}对应{grade})。
- {y}年末资产总计{assets_w}万元，等于负债{debts_w}万元与所有者权益{equity_w}万元之和。|年末净资产{equity_y}，每股净资产{bps_d}元，总股本{shares_w}万股。
* 80%
- (分红上|股东回报方面)，公司对{z_y}年度、{x_y}年度和{y}年度利润的派现分别为{z_div_w}万元、{x_div_w}万元和{div_w}万元，(控股股东{holder}持股{held_of_r}|总股本为{shares_w}万股)。
- (净资产的变动(遵循同一规则|可以验算)：|)年初{equity1_w}万元，加净利润{net_w}万元，减派发的上年度红利{div1_w}万元，得年末{equity_w}万元。
*
- (与同行相比|同行之中)，{b_short}{y}年营业收入{b_rev_y}、毛利率{b_gm_r}、资产负债率{b_dr_r}，{c_short}分别为{c_rev_y}、{c_gm_r}和{c_dr_r}。{short}的毛利率为{gm_r}，(三家中毛利率最高的是{top_gm}|其中{top_gm}的毛利率最高，{low_gm}最低)。
* 60%
- (年报之外，|除了年报，|)(公司|{short}){yn}年的(几项动作|几则公告)(也值得记录|也值得一读)：(董事会批准在{city}投资{project_w}万元建设{prod}项目，建设期{months}个月|{prod}扩产项目获董事会批准，投资额{project_y}，占总资产的{project_of_r})；拟以{backlow_w}万元至{backhigh_w}万元回购股份，价格不超过{backcap_d}元/股；{bond_m}发行{term}年期公司债{bond_y}，票面利率{cpn_r}。
- (控股股东{holder}于{pledge_c}质押{pledged_w}万股，占其持股的{pledged_of_r}。|{holder}持股{held_of_r}，其中累计质押的占其所持股份的{allpledged_of_r}。|)
*
- ({ind}行业的典型风险是{risk}|{ind}企业都要面对{risk})，{worry}(是短期的不确定因素|值得警惕)；{hope}则(是中期的机会|可能带来转机)。(我们会继续跟踪{prod}的销售情况。|总经理{ceo}的下一步动作值得关注。|)

== peers 22 行业比较
*
- {ind}三家公司{y}年报对比：{short}、{b_short}、{c_short}|谁是{ind}行业的优等生：(三份年报的比较|{y}年财报横评)|{short}对比{b_short}：(规模、利润与负债|一张账单看懂{ind})
*
- {ind}行业的年报(披露完毕|陆续出齐)，(本文|我们)选取{short}（{code}）、{b_short}（{b_code}）和{c_short}（{c_code}）三家公司(作一比较|进行对比)。三家公司总部分别位于{city}、{b_city}和{c_city}，主要产品分别是{prod}、{b_prod}和{c_prod}。
*
- (规模上|从规模看)，{y}年三家公司营业收入分别为{rev_w}万元、{b_rev_w}万元和{c_rev_w}万元，{top_rev}最大，{low_rev}最小；增速上，{short}同比{rev_g}，{b_short}同比{b_rev_g}，{c_short}同比{c_rev_g}，{top_speed}(增速居首|表现最好)。
*
- (盈利能力方面|从盈利看)，{short}毛利率{gm_r}，{b_short}为{b_gm_r}，{c_short}为{c_gm_r}，{top_gm}(领先|最高)。净利润分别为{net_w}万元、{b_net_w}万元和{c_net_w}万元，净利率依次是{nm_r}、{b_nm_r}和{c_nm_r}。
- {ind}行业适用{rate}%的所得税税率，{short}的所得税费用为{tax_w}万元，{b_short}为{b_tax_w}万元，{c_short}为{c_tax_w}万元。|研发费用占比方面，三家分别为{rd_r}、{b_rd_r}和{c_rd_r}。
*
- (负债方面|财务稳健性上)，{short}资产负债率{dr_r}，评级{grade}；{b_short}资产负债率{b_dr_r}，评级{b_grade}；{c_short}资产负债率{c_dr_r}，评级{c_grade}。(负债率最低的是{low_dr}，最高的是{top_dr}|{low_dr}的资产负债率最低)。
- 三家公司年末净资产分别为{equity_y}、{b_equity_y}和{c_equity_y}，(净资产收益率|ROE)分别为{roe_r}、{b_roe_r}和{c_roe_r}，{top_roe}(最高|居前)。
* 85%
- (为什么会有差异|差异从何而来)？{short}的收入变动(主要与{why}有关|源于{why})，{b_short}(则受{b_why}影响|的主要原因是{b_why})，{c_short}的年报(提到了|归因于){c_why}。
* 75%
- (治理层面|管理团队上)，{short}由{chair}任董事长、{ceo}任总经理，{b_short}的董事长和总经理分别为{b_chair}和{b_ceo}，{c_short}则为{c_chair}和{c_ceo}。三家公司(同受{reg}监管|的行业监管机构都是{reg})。
* 60%
- (年报之外，|除了年报，|)(公司|{short}){yn}年的(几项动作|几则公告)(也值得记录|也值得一读)：(董事会批准在{city}投资{project_w}万元建设{prod}项目，建设期{months}个月|{prod}扩产项目获董事会批准，投资额{project_y}，占总资产的{project_of_r})；拟以{backlow_w}万元至{backhigh_w}万元回购股份，价格不超过{backcap_d}元/股；{bond_m}发行{term}年期公司债{bond_y}，票面利率{cpn_r}。
- (控股股东{holder}于{pledge_c}质押{pledged_w}万股，占其持股的{pledged_of_r}。|{holder}持股{held_of_r}，其中累计质押的占其所持股份的{allpledged_of_r}。|)
*
- (风险上|需要提示的是)，{ind}行业的{risk}(对三家公司都构成压力|是共同的课题)，负债率较高的{top_dr}(缓冲空间更小|对利率变化更敏感)。|(综合来看|总体上)，{top_rev}胜在规模，{top_gm}胜在毛利，{low_dr}胜在稳健；{risk}(仍是共同的风险|是三家公司都要面对的课题)。

== credit 14 信用观察
*
- {short}信用分析：资产负债率{dr_r}，评级{grade}|债券投资者如何看{short}|{grade}级{short}的{term}年期公司债(值不值|怎么算)
*
- {short}（{code}）(将于|于){bond_c}发行{term}年期公司债，规模{bond_w}万元，票面利率{cpn_r}。(发行人|公司)是{prov}{city}的{ind}企业，{founded}年成立，主要产品为{prod}，总经理为{ceo}。
*
- (评级从何而来|先看评级)：{y}年末公司资产总计{assets_w}万元，负债合计{debts_w}万元，两者相除，资产负债率为{dr_r}。评级标准规定，低于30%为AAA，30%至45%为AA+，45%至60%为AA，60%至70%为A，70%以上为BBB，(因此公司评级为{grade}|公司落在{band}区间，评级为{grade})。
- 上年末这一比率为{dr1_r}，对应{grade1}。|与上年末相比，资产负债率{dr_k}。
*
- (票面利率怎么定|再看利率)：基准利率2.00%，{grade}级信用利差{spread_r}，期限每年加0.10%，{term}年合计{premium_r}，三项相加即为{cpn_r}。(以{bond_w}万元本金计算|按发行规模计算)，每年利息{interest_w}万元，{term}年共{allinterest_w}万元，{due_c}到期还本。
*
- (偿债能力上|从现金流看)，{y}年经营活动现金流量净额{ocf_w}万元，利润总额{profit_w}万元，(而本期债券的年利息为{interest_w}万元|财务费用{fin_w}万元)。(流动资产{cur_w}万元，流动负债{cdebt_w}万元。|全年营业收入{rev_y}，同比{rev_g}。)
* 85%
- (同行对照|与同行比)，{b_short}资产负债率{b_dr_r}、评级{b_grade}，其{b_term}年期债券票面利率{b_cpn_r}；{c_short}资产负债率{c_dr_r}、评级{c_grade}，{c_term}年期债券票面利率{c_cpn_r}。(评级越低，利差越高|同样的期限下，评级决定利率高低)。
* 70%
- (股权质押也值得一看|此外)，控股股东{holder}持有{held_w}万股，占总股本的{held_of_r}，累计质押{allpledged_w}万股，占其所持股份的{allpledged_of_r}，(质押比例的变化需要跟踪|最近一笔于{pledge_c}质押给{broker})。
*
- ({ind}行业的典型风险是{risk}|持有人应关注{risk})，{worry}(会压缩利润|会影响现金流)，进而推高负债率；(一旦跨过评级门槛，新债的利差就会上升|评级下调则意味着新债利差走阔)。

== lesson 12 财务课堂
*
- 财务课堂：用{short}的年报(学会三张表|学看财报)|跟着{short}（{code}）学算账|一家{ind}公司的账是怎么算的：以{short}为例
*
- (本期课堂|这一课)以{short}（{code}）{y}年年报为例。公司在{exch}{board}上市，(代码前两位{prefix}就表明了这一点|从代码前两位{prefix}即可判断)，该板块单日涨跌幅限制为{limit}%。公司位于{prov}{city}，主要产品是{prod}，董事长为{chair}。
*
- (第一步|首先)，算利润。营业收入{rev_w}万元，减去营业成本{cost_w}万元，再减去销售费用{sell_w}万元、管理费用{admin_w}万元、研发费用{rnd_w}万元和财务费用{fin_w}万元，得到利润总额{profit_w}万元。{ind}行业的所得税税率为{rate}%，所得税费用{tax_w}万元，净利润就是{net_w}万元。
*
- (第二步|其次)，算比率。毛利率等于收入减成本后除以收入，即{gm_r}；净利率等于净利润除以收入，即{nm_r}；净利润除以总股本{shares_w}万股，每股收益为{eps_d}元。|(第二步|其次)，算增速。今年收入{rev_w}万元，去年{rev1_w}万元，差额除以去年的数，就是{rev_p}，(也就是说收入{rev_g}|即同比{rev_g})；毛利率为{gm_r}，净利率为{nm_r}。
*
- (第三步|再次)，看资产负债表。资产总计{assets_w}万元等于负债合计{debts_w}万元加所有者权益合计{equity_w}万元；负债除以资产，资产负债率为{dr_r}，(落在{band}区间|按标准)，评级为{grade}。
- 年初净资产{equity1_w}万元，加当年净利润{net_w}万元，减派发的上年度红利{div1_w}万元，(正好是|等于)年末的{equity_w}万元。|
* 85%
- (第四步|最后)，算债券。{grade}级的信用利差是{spread_r}，{term}年的期限溢价是{premium_r}，加上2.00%的基准利率，票面利率为{cpn_r}；公司发行的{bond_w}万元债券每年付息{interest_w}万元。
* 70%
- (课后练习|留一道题)：同行业的{b_short}{y}年营业收入{b_rev_w}万元，营业成本{b_cost_w}万元，毛利率是多少？答案是{b_gm_r}。它的负债为{b_debts_w}万元，资产为{b_assets_w}万元，资产负债率{b_dr_r}，评级是{b_grade}。
* 60%
- (年报之外，|除了年报，|)(公司|{short}){yn}年的(几项动作|几则公告)(也值得记录|也值得一读)：(董事会批准在{city}投资{project_w}万元建设{prod}项目，建设期{months}个月|{prod}扩产项目获董事会批准，投资额{project_y}，占总资产的{project_of_r})；拟以{backlow_w}万元至{backhigh_w}万元回购股份，价格不超过{backcap_d}元/股；{bond_m}发行{term}年期公司债{bond_y}，票面利率{cpn_r}。
- (控股股东{holder}于{pledge_c}质押{pledged_w}万股，占其持股的{pledged_of_r}。|{holder}持股{held_of_r}，其中累计质押的占其所持股份的{allpledged_of_r}。|)
*
- (记住|别忘了)，{ind}行业的典型风险是{risk}，由{reg}监管，(看懂数字之外还要看懂风险|数字背后的风险同样重要)。{short}的(收入变动|收入变化)主要是因为{why}，(这也要从年报正文里读出来|答案就在年报正文里)。

== industry 10 产业观察
*
- {ind}行业观察：(机会与{risk}并存|{hope}之后)|{y}年{ind}行业(盘点|小结)：{short}等公司年报透露了什么|{reg}视野下的{ind}行业
*
- {ind}行业由{reg}监管，(统一适用|企业适用){rate}%的所得税税率，(典型风险|最大的风险)是{risk}。(从已披露的年报看|{y}年)，行业里的公司(表现不一|冷暖不均)。
*
- {short}（{code}）总部位于{city}，主要产品为{prod}，{y}年营业收入{rev_y}，同比{rev_g}，毛利率{gm_r}，(公司把原因归结为{why}|主要受{why}影响)。
*
- {b_short}（{b_code}）位于{b_city}，(以{b_prod}为主|主打{b_prod})，营业收入{b_rev_y}，同比{b_rev_g}，毛利率{b_gm_r}，(总经理{b_ceo}|董事长{b_chair})(在业绩说明会上|对投资者)提到了{b_why}。
*
- {c_short}（{c_code}）来自{c_city}，(核心产品是{c_prod}|主营{c_prod})，营业收入{c_rev_y}，同比{c_rev_g}，录得{c_net_l}，资产负债率{c_dr_r}，评级{c_grade}。
*
- (三家之中|比较三家公司)，收入规模最大的是{top_rev}，增速最快的是{top_speed}，毛利率最高的是{top_gm}，资产负债率最低的是{low_dr}。(规模与效率未必同步|大公司不一定赚得更多)，(净资产收益率最高的是{top_roe}|从净资产收益率看，{top_roe}更胜一筹)。
*
- (投资端|产能方面)，{short}拟在{city}投资{project_w}万元建设{prod}项目，建设期{months}个月；{b_short}的{b_prod}项目投资{b_project_w}万元。(这些投入能否见效|扩产的效果)，取决于{hope}(是否持续|能否成为趋势)。
*
- (对监管而言|从监管的角度)，{reg}(提示|要求)企业重视{risk}；(对企业而言|对公司来说)，{worry}(是当下最现实的压力|仍要设法应对)。(评级较低的{top_dr}应把控制负债放在首位|资产负债率最高的{top_dr}需要更加谨慎)，(而{low_dr}则有余力投入研发|{low_dr}的财务空间更大)。
""",  # noqa: E501
)
_DRAW = by_weight(tuple(Press(form) for form in _FORMS), _FORMS)
_MEASURES: dict[str, Callable[[Facts], float]] = {
    "rev": lambda facts: facts.books.rev,
    "gm": lambda facts: facts.numbers["gm"],
    "dr": lambda facts: facts.numbers["dr"],
    "roe": lambda facts: facts.numbers["roe"],
    "speed": lambda facts: facts.books.rev / facts.numbers["rev1"],
}


def _first_and_last(facts: Facts, others: dict[str, Facts]) -> dict[str, str]:
    """Which of the three peers is first and last by each measure: `top_gm`, `low_dr`."""
    peers = (facts, others["b"], others["c"])
    names = {"top_" + name: max(peers, key=measure)["short"] for name, measure in _MEASURES.items()}
    return names | {"low_" + name: min(peers, key=measure)["short"] for name, measure in _MEASURES.items()}


def articles(archive: Archive, dice: Dice) -> Iterator[Row]:
    """Articles without end."""
    stage = Stage(archive)
    while True:
        facts = stage.draw(dice)
        press = dice.pick(_DRAW)
        if press.name == "trend":
            facts = archive.facts(facts.company, max(facts.year, 2022))
        peers = dice.shuffled(archive.peers(facts.company))
        others = {letter: archive.facts(peer, facts.year) for letter, peer in zip("bc", peers, strict=False)}
        if press.name == "trend":
            others["x"] = archive.facts(facts.company, facts.year - 1)
            others["z"] = archive.facts(facts.company, facts.year - 2)
        tags = [facts["ind"], press.label, facts["short"]]
        if press.name in ("peers", "industry"):
            tags += [others["b"]["short"], others["c"]["short"]]
        meta: Meta = {"author": dice.pick(archive.world.writers), "tags": tags}
        words = facts.with_others(others)
        words.update(_first_and_last(facts, others))
        yield press.render(dice, words), meta
