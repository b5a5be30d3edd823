"""The laws of the synthetic world: what its train and its held-out half have in common.

A code's first two digits name the exchange, the board and its daily price limit; an industry names the regulator, the
income tax rate and the typical risk; a city lies in one province; the debt ratio decides the rating, rating and term
decide the coupon. A model that has learnt these on one half can be examined on companies of the other.

Exchanges, regulators, places and firms are invented; nothing here describes a real market.
"""

from __future__ import annotations

from typing import NamedTuple


class Board(NamedTuple):
    """A market segment and the first digits of its codes."""

    prefix: str
    exchange: str
    name: str
    limit_percent: int


class Industry(NamedTuple):
    """What all companies of an industry have in common."""

    name: str
    words: tuple[str, ...]
    regulator: str
    risk: str
    tax_percent: int
    margin_percent: tuple[int, int]
    goods: tuple[str, ...]
    up: tuple[str, ...]
    down: tuple[str, ...]


BOARDS = (
    Board("71", "东屏证券交易所", "主板", 10),
    Board("73", "东屏证券交易所", "创新板", 20),
    Board("21", "南屿证券交易所", "主板", 10),
    Board("25", "南屿证券交易所", "成长板", 20),
    Board("95", "北原证券交易所", "精选板", 30),
)


def _industry(
    name: str,
    words: str,
    regulator: str,
    risk: str,
    tax: int,
    margin: tuple[int, int],
    goods: str,
    up: str,
    down: str,
) -> Industry:
    parts = [tuple(text.split()) for text in (words, goods, up, down)]
    return Industry(name, parts[0], regulator, risk, tax, margin, parts[1], parts[2], parts[3])


INDUSTRIES = (
    _industry(
        *("精密制造", "精密 重工 智造", "装备产业监督局", "订单交付延期与设备利用率波动", 15, (18, 36)),
        "工业机器人 数控机床 高速轴承 减速器 液压部件 检测仪器",
        "海外订单放量 新产线达产后单位成本下降 高端机型占比提高 大客户追加采购",
        "下游客户推迟资本开支 设备利用率不足 中低端机型价格竞争加剧 部分订单延期交付",
    ),
    _industry(
        *("新能源", "储能 光电 新能", "能源监督总局", "补贴退坡与弃电率上升", 15, (14, 30)),
        "储能电池组 光伏逆变器 风电叶片 充电模块 能量管理系统 薄膜组件",
        "储能装机需求旺盛 海外渠道铺开 组件转换效率提升 电站并网规模扩大",
        "补贴退坡 产能集中释放导致价格下行 弃电率上升 海外库存去化缓慢",
    ),
    _industry(
        *("生物医药", "医药 生物 制药", "药品审评监督局", "研发失败与集中采购降价", 15, (45, 78)),
        "抗肿瘤新药 胰岛素注射液 诊断试剂盒 疫苗佐剂 缓释片剂 骨科植入物",
        "新品种进入医保目录 核心品种医院覆盖率提高 海外授权收入确认 基层市场推广见效",
        "主力品种集中采购中标价下降 临床试验费用增加 部分适应症审批慢于预期 渠道清理库存",
    ),
    _industry(
        *("食品饮料", "食品 乳业 饮品", "食品安全监督总局", "食品安全事件与渠道库存积压", 25, (28, 60)),
        "低温鲜奶 即饮茶 复合调味料 坚果礼盒 冷冻面点 气泡果汁",
        "节庆备货需求旺盛 新品动销良好 渠道下沉提速 产品结构升级",
        "消费需求偏弱 渠道库存积压 促销力度加大 包装材料涨价",
    ),
    _industry(
        *("半导体", "半导体 微电 芯微", "信息产业监督局", "技术迭代与供应链受限", 10, (25, 55)),
        "电源管理芯片 车规级控制器 射频前端模组 存储主控芯片 图像传感器 刻蚀设备",
        "车规级产品导入新客户 先进制程良率提升 国产替代需求释放 晶圆代工价格回落",
        "消费电子需求疲软 库存跌价计提增加 新制程导入费用高企 供应链交付受限",
    ),
    _industry(
        *("软件服务", "软件 数智 信息", "数据安全监督局", "核心人员流失与数据泄露", 10, (40, 75)),
        "财务云平台 风控引擎 智能客服系统 工业仿真软件 政务中台 数据治理平台",
        "订阅收入占比提高 大客户续约率上升 行业版本快速复制 人均产出提高",
        "项目验收周期拉长 研发人员成本上升 政企客户预算收紧 低毛利集成业务占比提高",
    ),
    _industry(
        *("现代物流", "物流 速运 供应链", "交通运输监督局", "燃油价格上涨与运力过剩", 25, (8, 20)),
        "冷链干线 城配专线 跨境专线 仓配一体服务 大件快运 多式联运班列",
        "电商件量增长 干线装载率提高 冷链业务扩张 自动分拣降低单票成本",
        "燃油价格上涨 单票收入下降 新转运中心爬坡 运力阶段性过剩",
    ),
    _industry(
        *("基础化工", "化工 新材 化学", "环境与安全监督局", "原材料价格波动与安全生产事故", 20, (12, 32)),
        "特种涂料 聚酯薄膜 高纯溶剂 改性塑料 水性树脂 电子级硫酸",
        "主要产品价差扩大 新装置满产 特种品类占比提高 能耗成本下降",
        "原材料价格上涨 装置检修影响产量 下游开工率走低 产品价差收窄",
    ),
    _industry(
        *("现代农业", "农业 种业 牧业", "农业监督总局", "自然灾害与动物疫病", 5, (10, 34)),
        "杂交水稻种子 饲料添加剂 商品仔猪 设施蔬菜 水产苗种 有机肥料",
        "优质品种推广面积扩大 养殖成本下降 订单农业合作增加 销售价格回升",
        "饲料原料涨价 气候异常影响产量 销售价格低迷 疫病防控支出增加",
    ),
    _industry(
        *("环保水务", "环保 水务 环境", "生态环境监督局", "应收账款回收缓慢与特许经营到期", 20, (20, 42)),
        "污水处理设备 膜分离组件 固废焚烧装置 烟气脱硫系统 再生水服务 土壤修复工程",
        "新项目投入运营 水价调整落地 再生水业务放量 地方欠款集中回收",
        "工程进度放缓 应收账款计提增加 特许经营项目到期 药剂与电力成本上升",
    ),
    _industry(
        *("港口航运", "航运 港务 海运", "海事监督局", "运价大幅波动与航线拥堵", 25, (12, 38)),
        "集装箱班轮 散货码头服务 滚装运输 船舶代理 化学品船运 港口拖轮服务",
        "航线网络扩张 集装箱吞吐量增长 长期协议运价上调 船队周转效率提高",
        "即期运价回落 航线拥堵推高成本 散货需求走弱 船舶集中坞修",
    ),
    _industry(
        *("商贸零售", "百货 商贸 零售", "市场秩序监督局", "客流下滑与存货减值", 25, (16, 36)),
        "自有品牌服饰 家居用品 母婴用品 进口日化 生鲜礼盒 智能小家电",
        "会员复购率提高 自有品牌占比提升 新开门店成熟 线上到家业务增长",
        "客流下滑 门店租金上涨 存货减值增加 线上分流加剧",
    ),
)
PROVINCES = {
    "青垣省": ("澜州市", "霁城市", "望川市", "松陵市"),
    "沧屿省": ("沧浦市", "鹭津市", "屿南市", "珠汀市"),
    "朔原省": ("朔城市", "雁原市", "铁川市", "霜河市"),
    "岚西省": ("岚都市", "栗坪市", "岷口市", "竹溪市"),
    "澄湖省": ("澄湖市", "苇州市", "荷陵市", "渡江市"),
    "琼岭省": ("琼岭市", "榕浦市", "蕉城市", "茶川市"),
}
CITIES = tuple((city, province) for province, cities in PROVINCES.items() for city in cities)
AUDITORS = ("恒谨", "正衡", "明允", "信则", "公度", "致审")
BROKERS = ("北辰", "观澜", "长策", "九思", "远衡", "知微", "同舟", "望岳")
# Grade, the debt ratio (in 0.01 %) it ends below, its spread (in 0.01 %), the band in words.
RATINGS = (
    ("AAA", 3000, 20, "30%以下"),
    ("AA+", 4500, 60, "30%（含）至45%"),
    ("AA", 6000, 110, "45%（含）至60%"),
    ("A", 7000, 180, "60%（含）至70%"),
    ("BBB", 10**9, 300, "70%（含）以上"),
)
SPREAD = {grade: spread for grade, _, spread, _ in RATINGS}
BAND = {grade: band for grade, _, _, band in RATINGS}


def hundredths_of_percent(part: int, whole: int) -> int:
    """part / whole in 0.01 %, rounded half up away from zero; exact, so every file quotes the same figure."""
    if part >= 0 and whole > 0:
        return (20_000 * part + whole) // (2 * whole)
    rounded = (20_000 * abs(part) + abs(whole)) // (2 * abs(whole))
    return rounded if (part < 0) == (whole < 0) else -rounded


def rating(debt_ratio: int) -> str:
    """The credit rating that a debt ratio (in 0.01 %) earns."""
    return next(grade for grade, below, _, _ in RATINGS if debt_ratio < below)


def coupon(grade: str, years: int) -> int:
    """The coupon of a bond in 0.01 %: 2.00 % and the spread of its rating and 0.10 % for each year of its term."""
    return 200 + SPREAD[grade] + 10 * years
