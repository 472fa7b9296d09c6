"""The pictures' words in Chinese, as docs/zh/glossary.md and the Chinese pages have them.

A `{}` stands for any text, whose Chinese is looked up in turn. So a new measurement needs no new
entry. A text without an English word stays as it is.
"""

import re

from docs.pictures.svg import Language

# The names of programs, folders and options, and words that the Chinese pages leave in English.
NAMES = """
convert prove survive forecast shard puzzles torchrun --node-rank net-bn contiguous torch notebook
local rank epoch dropout right Conv Linear ms
"""

# Of two entries that fit, the first one counts. A line break is where the Chinese needs it.
WORDS = {
    # several sentences or clauses, and what joins them
    "Rank 0 holds {} and rank 1 {}; afterwards both hold the sum {}, and divide it by 2.": (
        "rank 0 有 {}，rank 1 有 {}；全归约之后，两者都有总和 {}，再除以 2。"
    ),
    "After {} steps, the weights of two ranks are {} of their length apart; "
    "with averaging, {} in every step.": (
        "{} 步之后，两个 rank 的权重相差权重范数的 {}；求平均时，每一步都相差 {}。"
    ),
    "{} GPUs do the work of {}; with one change, {}": (
        "{} 个 GPU 相当于 {} 个；改一处，相当于 {} 个"
    ),
    "{}, global batch {}. The median recorded step; bench.md has speeds.": (
        "{}，全局批次 {}。\n图中是耗时为中位数的那一步；速度见 bench.md。"
    ),
    "{machine}, {} cores, torch {}, {}. This machine was busy: {}. Measure again when it rests.": (
        "{}，{} 个核心，torch {}，{}。\n测量时这台机器很忙：{}。\n请等它空闲时再测一次。"
    ),
    "Two hours: {}. Then: {}.": "两个小时：{}。然后：{}。",
    "{}. {}: WRONG are {}. {}": "第 {} 步，{}：WRONG 的行：{}。{}",
    "{}. {}": "{}。{}",
    "{}; {}": "{}；{}",
    # all pictures
    "process": "进程",
    "step": "步",
    "step {}": "第 {} 步",
    "node {}": "节点 {}",
    "forward": "前向",
    "backward": "反向",
    "optimizer": "优化器",
    "waiting": "等待",
    "sending": "发送",
    "loading": "加载",
    "parameters": "参数",
    "gradients": "梯度",
    "activations": "激活值",
    "optimizer state": "优化器状态",
    "batch": "批次",
    "all-reduce": "全归约（all-reduce）",
    "images": "图像",
    "loss": "损失",
    "none": "无",
    "{machine}, {} cores, torch {}, {}.": "{}，{} 个核心，torch {}，{}。",
    "other programs used {} of {} cores": "其他程序用了 {1} 个核心中的 {0} 个",
    "its load was {} before": "测量之前的负载是 {}",
    # allreduce
    "An all-reduce of two ranks": "两个 rank 的全归约（all-reduce）",
    "its gradient": "自己的梯度",
    "the sum": "总和",
    "divided by 2": "除以 2",
    # autocast
    "Which layers autocast computes in 16 bits": "autocast 用 16 位计算哪些层",
    "Of the {} parts of a forward, {} convert their input and their weights to bf16": (
        "前向传播有 {} 个部分，其中 {} 个把输入和权重转换成 bf16"
    ),
    "The layers between them take what comes": "它们之间的层，输入是什么格式就用什么格式",
    "The images, the loss, the weights and their gradients are in fp32": (
        "图像、损失、权重和权重的梯度都是 fp32"
    ),
    "all weights, all .grad": "所有权重和 .grad",
    "16-bit product": "用 16 位相乘",
    "stays in 16 bits": "保持 16 位",
    "32 bits": "32 位",
    # buckets
    "Buckets are sent while backward fills the next one": (
        "发送一个桶的同时，反向传播在装填后一个桶"
    ),
    "backward, from the last layer to the first": "反向传播，从最后一层到第一层",
    "bucket {}: {} MiB, full after {} of backward": "桶 {}：{} MiB，反向传播到 {} 时装满",
    "fills": "装桶",
    "its all-reduce": "这个桶的全归约",
    "Counted in ResNet-18's multiplications, not in time.": (
        "横轴是 ResNet-18 的乘法次数，不是时间。"
    ),
    # convert; the rows of prove's table stay as it prints them
    "Six steps from one GPU to many": "从单卡到多卡的六个步骤",
    "your script, for one GPU": "你的脚本，单卡",
    "your script, for many GPUs: nothing WRONG": "你的脚本，多卡：没有任何 WRONG",
    "new lines": "新增行数",
    "Start: {}": "启动：{}",
    "Data: {}": "数据：{}",
    "Model: {}": "模型：{}",
    "Loss: divided over all ranks": "损失：除以所有 rank 的总计数",
    "Evaluation: all_reduce of sums": "评估：用 all_reduce 求总和",
    "State: only rank 0 saves": "状态：只有 rank 0 保存",
    "what prove says after each step: ✓ right, ✗ WRONG": (
        "每一步之后 prove 的判定：✓ right，✗ WRONG"
    ),
    "✓ evaluation": "✓ evaluation",
    "✓ {}": "✓ {}",
    "✗ {}": "✗ {}",
    **{row: row for row in ("samples", "weights", "averaged gradients", "one rank", "files")},
    # course
    "The map of the course": "课程地图",
    "You are here: the first page": "你在这里：首页",
    "01 single GPU": "01 单卡",
    "six things that go wrong": "六个会出错的地方",
    "one line, but don't use it": "只要一行，但别用它",
    "{} by hand": "{} 手写梯度平均",
    "the mean of all gradients": "所有梯度的平均值",
    "04 DDP, torchrun": "04 DDP 与 torchrun",
    "the same, but faster": "结果相同，但更快",
    "05 AMP, SyncBN": "05 AMP 与 SyncBN",
    "16 bits, global BatchNorm": "16 位，全局 BatchNorm",
    "which stages agree": "哪些阶段结果一致",
    "two hours": "两个小时",
    "in a hurry": "赶时间",
    "DDP in {} lines": "{} 行写出 DDP",
    "all in {} lines": "功能齐全，{} 行",
    "Your own script": "你自己的脚本",
    "six small steps": "六个小步骤",
    "is it right?": "结果对吗？",
    "runs for days": "连续训练好几天",
    "When you need it": "用到时再读",
    "how many GPUs pay?": "用几个 GPU 才划算？",
    "the model does not fit": "模型放不下",
    "slow network: talk less": "网络慢：少通信",
    "write it, find the mistake": "自己写，找错误",
    "the core": "必读",
    "may wait, if you are short of time": "时间紧的话，可以以后再读",
    # dataparallel
    "One step with DataParallel": "DataParallel 的一步训练",
    "The main device cuts a batch of {} and copies the weights to device 1": (
        "主设备切分一个有 {} 个样本的批次，并把权重复制到设备 1"
    ),
    "Both run forward on {} samples, the main device computes the loss of all {} outputs, "
    "and gradients go back to it": (
        "两个设备各对 {} 个样本做前向传播，主设备计算全部 {} 个输出的损失，梯度再传回主设备"
    ),
    "The copy on device 1 is then thrown away.": "最后丢弃设备 1 上的副本。",
    "main device": "主设备",
    "device {}": "设备 {}",
    "1 model, batch": "1 模型、批次",
    "2 scatter samples": "2 分发样本",
    "3 all weights": "3 全部权重",
    "4 forward": "4 前向",
    "5 gather outputs": "5 收集输出",
    "6 loss of {}": "6 损失（{} 个）",
    "7 output gradients": "7 输出的梯度",
    "7 backward": "7 反向",
    "7 weight gradients": "7 权重的梯度",
    "sum, optimizer": "求和、更新",
    "thrown away": "丢弃",
    # drift, losses
    "Stage 03 without its averaging: two ranks drift apart": (
        "去掉求平均的阶段 03：两个 rank 越走越远"
    ),
    "Without averaging, two models drift apart": "不求平均，两个模型越走越远",
    "distance of their weights, in % of their length": "权重的距离（占权重范数的百分比）",
    "averaged: {} in every step": "求平均：每一步都是 {}",
    "averaged": "求平均",
    "not averaged": "不求平均",
    "Stage 03 without its averaging: both start alike\nand see different samples.": (
        "去掉求平均的阶段 03：两个 rank 的初始权重相同，\n看到的样本不同。"
    ),
    "Both losses fall, and one run is wrong": "两条损失曲线都在下降，其中一次训练是错的",
    "Both losses fall. One run is wrong.": "两条损失曲线都在下降，其中一次训练是错的",
    "training loss": "训练损失",
    "test accuracy {}": "测试准确率 {}",
    "{}: the loss falls to {}": "{}：损失降到 {}",
    "Stage 03 on two ranks, with its averaging or without.": (
        "两个 rank 上的阶段 03，求平均与不求平均。"
    ),
    # formats, speeds
    "What a number of 32 or 16 bits holds": "32 位和 16 位的数能表示什么",
    "sign": "符号",
    "exponent: how large": "指数：范围多大",
    "fraction: how exact": "尾数：多精确",
    "from the smallest to the largest number": "从最小的数到最大的数",
    "{}: from {} to {}": "{}：从 {} 到 {}",
    "a gradient of 1e-8 is 0 in fp16;\ntimes 65536, it fits": (
        "1e-8 的梯度在 fp16 中是 0；\n乘以 65536 之后就能表示"
    ),
    "{} on one {}: images per second": "{}，一块 {}：每秒处理的图像数",
    "{}, the default for convolutions{}": "{}，卷积的默认格式{}",
    "{}: take this, it needs no scaler{}": "{}：选它，不需要梯度缩放器{}",
    "{}, which also needs a scaler{}": "{}，还需要梯度缩放器{}",
    # levels
    "What each of four ranks holds": "四个 rank 各自保存什么",
    "{}: {} × the parameters' bytes on each rank": "{}：每个 rank 保存参数字节数的 {} 倍",
    "{}: {} × the parameters' bytes": "{}：参数字节数的 {} 倍",
    # mean
    "One step of data-parallel training": "数据并行的一步训练",
    "Two ranks hold the same weight and different samples": "两个 rank 的权重相同，样本不同",
    "Their gradients, {} and {}, are averaged to {}, and both make the same update, "
    "which is that of one process with all samples": (
        "两者的梯度 {} 和 {} 求平均，得到 {}，所以两者的更新相同，也等于单进程用全部样本时的更新"
    ),
    "(The model is weight × x, the target 2x, the loss the squared error, the samples {}, "
    "the rate {}.)": "（模型是权重 × x，目标是 2x，损失是平方误差，样本是 {}，学习率是 {}。）",
    "a batch of samples": "一个批次的样本",
    "forward, backward": "前向、反向",
    "the same gradient": "相同的梯度",
    "all-reduce: the mean of both": "全归约（all-reduce）：求平均",
    "learning rate {}": "学习率 {}",
    "weight: {}": "权重：{}",
    "One process with all samples: gradient {}, too": "单进程用全部样本：梯度也是 {}",
    # memory
    "{}: {} MiB in one process": "{}：一个进程占用 {} MiB",
    "{} pixels, global batch {}, at the end of forward.": (
        "图像边长 {} 像素，全局批次 {}，前向传播结束时。"
    ),
    # padding, samples
    "What padding and drop_last do": "填充和 drop_last 的作用",
    "Seven samples, dealt to two ranks.": "七个样本，分配给两个 rank。",
    "DistributedSampler(data): one comes twice": "DistributedSampler(data)：有一个重复",
    "with drop_last=True: one is left out": "加上 drop_last=True：有一个用不到",
    "range(rank, 7, 2), to evaluate: each sample once": (
        "range(rank, 7, 2)，用于评估：每个样本一次"
    ),
    "again": "重复",
    "Shown with shuffle=False; by default, it shuffles.": (
        "图中设了 shuffle=False；默认会打乱顺序。"
    ),
    "Who gets which sample": "哪个样本分配给谁",
    "{} samples, a global batch of {}, two epochs.": "{} 个样本，全局批次为 {}，两个 epoch。",
    "{}, one process, epoch {}": "{}，单进程，epoch {}",
    "{}, dealt by hand, epoch {}": "{}，手写分配，epoch {}",
    "left out": "用不到",
    # ranks
    "Node, rank, local rank and GPU": "节点、rank、local rank 和 GPU",
    "{} is {} of {} and takes {}": "{0} 是{2} 上的 {1}，使用 {3}",
    "rank = node × {} + local rank, GPU = local rank": (
        "rank = 节点 × {} + local rank，GPU = local rank"
    ),
    # scaling
    "ResNet-50, forecast: {} with gradients of 32 bits, {} with 16.": (
        "ResNet-50 的预测：梯度用 32 位时是 {}，用 16 位时是 {}。"
    ),
    "work of so many single GPUs": "相当于多少个单独的 GPU",
    "GPUs": "GPU 数",
    "none waits: {}": "没有等待：{}",
    "gradients of {} bits: {}": "{} 位的梯度：{}",
    "measured": "实测",
    "A forecast for ResNet-50, 45 ms per step on one GPU,\n"
    "8 GPUs per machine, 25 Gbit/s between the machines.": (
        "ResNet-50 的预测：单个 GPU 每步 45 ms，\n每台机器 8 个 GPU，机器之间 25 Gbit/s。"
    ),
    # step
    "A step of stage 01, and its six places": "阶段 01 的一步训练，以及六个地方",
    "Place {}: {}": "第 {} 处：{}",
    "a step": "一步训练",
    "each copy would have": "两份脚本都会用",
    "the same samples": "相同的样本",
    "the same GPU": "同一个 GPU",
    "forward, dropout": "前向、dropout",
    "the same masks": "相同的掩码",
    "a gradient of its own": "自己的梯度",
    "optimizer step": "优化器更新",
    "evaluation": "评估",
    "the whole test set": "整个测试集",
    "checkpoint": "检查点",
    "the same file": "同一个文件",
    "next batch": "下一个批次",
    "at the end of an epoch": "每个 epoch 结束时",
    # syncbn
    "SyncBatchNorm on two ranks": "两个 rank 上的 SyncBatchNorm",
    "Each rank computes count, mean and variance of its three samples": (
        "每个 rank 计算自己三个样本的个数、均值和方差"
    ),
    "One all-reduce makes of them the mean and the variance of all six, by which both ranks "
    "scale their own: {} gets {}": (
        "一次全归约由此得出全部六个样本的均值和方差，两个 rank 都用它们缩放自己的样本：{} 得到 {}"
    ),
    "{} gets {}": "{} 得到 {}",
    "{}: its samples": "{} 的样本",
    "mean {}": "均值 {}",
    "variance {}": "方差 {}",
    "its samples, scaled": "缩放之后的样本",
    "all-reduce: count, mean, variance": "全归约：个数、均值、方差",
    "of all six: mean {}, variance {}": "全部六个样本：均值 {}，方差 {}",
    "Without it, both get {}.": "不做这次全归约，两个 rank 都得到 {}。",
    # timeline
    "What a training step is spent on": "一步训练的时间花在哪里",
    "{} one process": "{} 单进程",
    "{}, for comparison": "{}（供对比）",
    "05 DDP, SyncBN": "05 DDP 与 SyncBN",
    "replica {}": "副本 {}",
    "messages": "消息",
    "{}: {} ms, {} messages": "{}：{} ms，{} 条消息",
    "{}: {} ms, 1 message": "{}：{} ms，1 条消息",
    # vote
    "Both ranks stop after the same step": "两个 rank 在同一步之后停止",
    "Rank 1 receives SIGTERM during step {}": "rank 1 在第 {} 步收到 SIGTERM",
    "After step {}, both vote, and train step {} while the votes travel": (
        "第 {} 步之后，两个 rank 都表决，在传送表决的同时训练第 {} 步"
    ),
    "After step {}, both read that one has received SIGTERM: rank 0 saves a checkpoint with its "
    "checksum, and both end with status 0.": (
        "第 {} 步之后，两个 rank 都读到有一个 rank 收到了 SIGTERM："
        "rank 0 保存带校验和的检查点，两个 rank 都以退出码 0 结束。"
    ),
    "saves, ends": "保存并结束",
    "ends": "结束",
    "both vote": "都表决",
    "both read: stop": "都读到：停止",
    "the votes": "表决",
    "Both train step {},": "两个 rank 都训练第 {} 步，",
    "and none waits for the votes.": "谁也不停下来等表决结果。",
    # what joins the parts of a text
    "{}.": "{}。",
    "{}: {}": "{}：{}",
    "{}, {}": "{}、{}",
}


def compiled(form: str) -> re.Pattern[str]:
    """A form with a group for each {}, whose Chinese is looked up, and for {machine}, a name."""
    groups = {r"\{\}": "(.*?)", r"\{machine\}": "(?P<machine>.*?)"}
    return re.compile(re.sub(r"\\{\w*\\}", lambda each: groups[each[0]], re.escape(form)))


PATTERNS = [(compiled(form), chinese) for form, chinese in WORDS.items() if "{" in form]
ENGLISH_WORD = re.compile(r"(?<![\w.])[A-Za-z][a-z]+(?![\w(=]|\.\w)")
NAME = re.compile(rf"(?<![\w-])({'|'.join(NAMES.split())})(?![\w-])")


def say(text: str) -> str:
    """The Chinese for the text; an English word that has none is an error."""
    if text in WORDS:
        return WORDS[text]
    if not ENGLISH_WORD.search(NAME.sub("", text)):
        return text.replace(": ", "：")
    for pattern, chinese in PATTERNS:
        if match := pattern.fullmatch(text):
            machine = match.groupdict().get("machine")
            parts = [part if part == machine else say(part) for part in match.groups()]
            return chinese.format(*parts)
    raise LookupError(f"docs/pictures/chinese.py has no Chinese for {text!r}")


CHINESE = Language(
    say,
    "lang=\"zh-CN\" font-family=\"'Noto Sans CJK SC', 'Source Han Sans SC', 'PingFang SC', "
    "'Microsoft YaHei', sans-serif\"",
)
