# ruff: noqa: E501  they are lines of scripts
"""What a script learns: samples, collate function, model and loss, in the styles of many authors.

Each task ends in a `loss` whose mean over the ranks is the loss of one process that has the samples
of all ranks. {times} is " * world" where the ranks take the mean of their gradients, and nothing
where they take the sum.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from textwrap import dedent


class Choices:
    """Draws from one seed, and remembers under which name."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.made: dict[str, str] = {}

    def __call__(self, name: str, *options: str) -> str:
        self.made[name] = self.random.choice(options)
        return self.made[name]


@dataclass
class Task:
    build: list[str]  # makes `net`
    forward: list[str]  # from the unpacked batch to `loss`
    unpack: list[str]  # of `batch`
    count: str  # a number of the local batch: a loss divided by it is a mistake
    prelude: list[str] = field(default_factory=list)  # classes and functions
    collate: str = ""
    after_wrap: list[str] = field(default_factory=list)  # when `model` exists
    after_step: list[str] = field(default_factory=list)
    logged: str = "loss.detach()"
    evaluate: list[str] = field(default_factory=list)  # `value` of `n` test samples
    tensors: str = ""  # of the data set, if its samples are nothing but rows of them
    draws: bool = False
    batchnorm: bool = False
    own_state: bool = False  # outside of the model: a teacher, a queue
    frozen: bool = False
    fixed_batch: bool = False  # the batches must not vary
    divides: bool = False  # by a number of all ranks, so {times} is used
    generators: list[str] = field(default_factory=list)  # that are made before the loop
    gan: bool = False  # two models and two optimizers
    layout: str = ""  # of a parameter ("complex") or its gradient ("sparse"), if not all know it
    functional: bool = False  # torch.func may differentiate it


def block(text: str) -> str:
    return dedent(text).strip()


# Samples with a tensor x and a label y


def xy_dataset(samples: str, maker: str) -> str:
    return block(f"""
class Samples(Dataset):
    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.y = torch.randint(0, 3, (count,), generator=generator)
        self.x = {maker}

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return {samples}
""")


POINTS = "torch.randn(count, 6, generator=generator) + self.y[:, None]"
IMAGES = "torch.randn(count, 1, 6, 6, generator=generator) + self.y[:, None, None, None]"
STACK = "x = torch.stack([sample[0] for sample in samples])\n    y = torch.stack([sample[1] for sample in samples])"
COLLATES = {  # the sample, what stands before the data set, the collate function, how it is unpacked
    "default": ("self.x[i], self.y[i]", "", "", "x, y = batch"),
    "dict": ('{"x": self.x[i], "y": self.y[i]}', "", "", 'x, y = batch["x"], batch["y"]'),
    "dict with ids": (
        '{"id": i, "name": f"sample-{i}", "x": self.x[i], "y": self.y[i]}', "", "", 'x, y = batch["x"], batch["y"]',
    ),
    "strings": ('self.x[i], self.y[i], f"sample-{i}"', "", "", "x, y, names = batch"),
    "numpy": ("self.x[i].numpy(), int(self.y[i])", "", "", "x, y = batch"),
    "namedtuple sample": (
        "Sample(self.x[i], self.y[i])", 'Sample = namedtuple("Sample", "x y")', "", "x, y = batch.x, batch.y",
    ),
    "dataclass": (
        "self.x[i], self.y[i]",
        "@dataclass\nclass Batch:\n    x: torch.Tensor\n    y: torch.Tensor\n    ids: list",
        f"def collate(samples):\n    {STACK}\n    return Batch(x, y, [int(label) for label in y])",
        "x, y = batch.x, batch.y",
    ),
    "namedtuple": (
        "self.x[i], self.y[i]",
        "class Batch(NamedTuple):\n    x: torch.Tensor\n    y: torch.Tensor",
        f"def collate(samples):\n    {STACK}\n    return Batch(x, y)",
        "x, y = batch",
    ),
    "UserDict": (
        "self.x[i], self.y[i]",
        "class Batch(UserDict):\n    def to(self, device):\n"
        "        return Batch({name: value.to(device) for name, value in self.items()})",
        f'def collate(samples):\n    {STACK}\n    return Batch({{"x": x, "y": y}})',
        'batch = batch.to("cpu")\nx, y = batch["x"], batch["y"]',
    ),
    "list": (
        "self.x[i], self.y[i]", "", "def collate(samples):\n    return samples",
        "x = torch.stack([sample[0] for sample in batch])\ny = torch.stack([sample[1] for sample in batch])",
    ),
}  # fmt: skip


def xy_samples(choose: Choices, maker: str) -> tuple[list[str], str, list[str], str]:
    """What stands before the script, its collate function, the lines that unpack, and the tensors."""
    kind = choose(
        "collate", *COLLATES, *["default"] * 5
    )  # the only one whose tensors can be indexed
    sample, before, collate, unpack = COLLATES[kind]
    prelude = [text for text in (before, xy_dataset(sample, maker), collate) if text]
    device = choose("device", "none", "none", "to")
    lines = unpack.split("\n")
    if device == "to":
        prelude.append('device = torch.device("cuda" if torch.cuda.is_available() else "cpu")')
        lines.append("x, y = x.to(device, non_blocking=True), y.to(device)")
    tensors = "train_set.x, train_set.y" if kind == "default" else ""
    return prelude, "collate" if collate else "", lines, tensors


CLASSIFICATION = {  # the lines that make a loss of `out` and `y`
    "mean": ["loss = F.cross_entropy(out, y)"],
    "module": ["loss = nn.CrossEntropyLoss(label_smoothing=0.1)(out, y)"],
    "mse": ["loss = F.mse_loss(out, F.one_hot(y, 3).to(out.dtype))"],
    "bce": ["loss = F.binary_cross_entropy_with_logits(out, F.one_hot(y, 3).to(out.dtype))"],
    "sum / local": ['loss = F.cross_entropy(out, y, reduction="sum") / len(y)'],
    "sum / global": [
        "seen = torch.tensor(float(len(y)))",
        "dist.all_reduce(seen)",
        'loss = F.cross_entropy(out, y, reduction="sum"){times} / seen',
    ],
    "weighted / global": [
        "weight = torch.tensor([1.0, 3.0, 9.0])[y]",
        "weights = weight.sum()",
        "dist.all_reduce(weights)",
        'each = F.cross_entropy(out, y, reduction="none")',
        "loss = (weight * each).sum(){times} / weights",
    ],
    "focal / global": [
        "each = F.cross_entropy(out, y, reduction='none')",
        "focal = (1 - torch.exp(-each)) ** 2 * each",
        "positive = (y > 0).sum().to(out.dtype)",
        "dist.all_reduce(positive)",
        "loss = focal.sum(){times} / positive.clamp(min=1)",
    ],
}
MEAN_LOSSES = ("mean", "module", "mse", "bce", "sum / local")
LOCAL_COUNT = "(y == 0).sum()"
EVALUATE = ['value = F.cross_entropy(net(x), y, reduction="sum")', "n = len(y)"]

MLP = "nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))"
POINT_MODELS = {
    "mlp": ("", f"net = {MLP}"),
    "dropout": (
        "",
        "net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))",
    ),
    "batchnorm": (
        "",
        "net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))",
    ),
    "checkpoint": (
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16))
        self.last = nn.Linear(16, 3)

    def forward(self, x):
        return self.last(checkpoint(self.inner, x, use_reentrant=False))
""",
        "net = Net()",
    ),
    "depth by sample": (
        """
class Net(nn.Module):
    def __init__(self, keep=0.7):
        super().__init__()
        self.first, self.block, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.keep = keep

    def forward(self, x):
        h = torch.tanh(self.first(x))
        branch = torch.tanh(self.block(h))
        if self.training:
            mask = (torch.rand(len(h), 1) < self.keep).to(h.dtype)
            branch = branch * mask / self.keep
        return self.last(h + branch)
""",
        "net = Net()",
    ),
    "depth by batch": (
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.block, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.coin = random.Random(5)  # alike on all ranks

    def forward(self, x):
        h = torch.tanh(self.first(x))
        keep = 1.0 if not self.training or self.coin.random() < 0.6 else 0.1
        return self.last(h + keep * torch.tanh(self.block(h)))
""",
        "net = Net()",
    ),
    "frozen": (
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.Tanh())
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        with torch.no_grad():
            features = self.body(x)
        return self.head(features)
""",
        "net = Net()\nnet.body.requires_grad_(False)",
    ),
    "layernorm": (
        "",
        "net = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 3))",
    ),
}
IMAGE_MODELS = {
    "groupnorm": (
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.output = nn.Linear(4, 3)

    def forward(self, x):
        return self.output(F.relu(self.norm(self.conv(x))).mean((2, 3)))
""",
        "net = Net()",
    ),
    "batchnorm": (
        "",
        "net = nn.Sequential(\n    nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(),\n"
        "    nn.Flatten(), nn.Linear(64, 3)\n)",
    ),
    "resnet": (
        """
class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x):
        return x + self.conv2(F.silu(self.conv1(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3)
        self.blocks = nn.ModuleList(Block(4) for _ in range(2))
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))
""",
        "net = Net()",
    ),
    "channels last": (
        "",
        "net = nn.Sequential(\n    nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(),"
        " nn.Linear(16, 3)\n).to(memory_format=torch.channels_last)",
    ),
    "dropout2d": (
        "",
        "net = nn.Sequential(\n    nn.Conv2d(1, 4, 3), nn.Dropout2d(0.3), nn.ReLU(), nn.Flatten(),"
        " nn.Linear(64, 3)\n)",
    ),
}
DRAWING = ("dropout", "dropout2d", "depth by sample")


def classification(choose: Choices, maker: str, models: dict) -> Task:
    prelude, collate, unpack, tensors = xy_samples(choose, maker)
    model = choose("model", *models)
    before, build = models[model]
    kind = choose("loss", *CLASSIFICATION)
    return Task(
        build=build.split("\n"),
        forward=["out = model(x)", *CLASSIFICATION[kind]],
        unpack=unpack,
        count=LOCAL_COUNT,
        prelude=[*prelude, *([block(before)] if before else [])],
        collate=collate,
        evaluate=EVALUATE,
        tensors=tensors,
        draws=model in DRAWING,
        batchnorm=model == "batchnorm",
        own_state=model == "depth by batch",
        functional=model in ("mlp", "layernorm", "groupnorm", "resnet"),
        frozen=model == "frozen",
        divides=kind not in MEAN_LOSSES,
    )


def points(choose: Choices) -> Task:
    return classification(choose, POINTS, POINT_MODELS)


def images(choose: Choices) -> Task:
    return classification(choose, IMAGES, IMAGE_MODELS)


def mixup(choose: Choices) -> Task:
    """One λ for the batches of all ranks, and a partner in the same local batch."""
    prelude, collate, unpack, tensors = xy_samples(choose, POINTS)
    rng = choose("lambda from", "numpy", "random", "torch")
    made, drawn = {
        "numpy": ("mix = np.random.default_rng(7)", "lam = float(mix.beta(0.4, 0.4))"),
        "random": ("mix = random.Random(7)", "lam = mix.betavariate(0.4, 0.4)"),
        "torch": (
            "mix = torch.Generator().manual_seed(7)",
            "lam = torch.rand(1, generator=mix).item()",
        ),
    }[rng]
    choose.made.update(model="mlp", loss="mixup")
    return Task(
        build=[f"net = {MLP}"],
        forward=[
            drawn,
            "partner = torch.randperm(len(x))",
            "out = model(lam * x + (1 - lam) * x[partner])",
            "loss = lam * F.cross_entropy(out, y) + (1 - lam) * F.cross_entropy(out, y[partner])",
        ],
        unpack=unpack,
        count=LOCAL_COUNT,
        prelude=prelude,
        collate=collate,
        evaluate=EVALUATE,
        tensors=tensors,
        draws=True,
        generators=[made],
        own_state=True,
    )


def distill(choose: Choices) -> Task:
    prelude, collate, unpack, tensors = xy_samples(choose, POINTS)
    kind = choose("model", "frozen teacher", "mean teacher", "ema")
    teacher = [
        "teacher = copy.deepcopy(net)",
        "for p in teacher.parameters():",
        "    p.requires_grad_(False)",
    ]
    update = [
        "with torch.no_grad():",
        "    for old, new in zip(teacher.parameters(), net.parameters()):",
        "        old.mul_(0.9).add_(new, alpha=0.1)",
    ]
    forward = [
        "out = model(x)",
        "with torch.no_grad():",
        "    target = teacher(x)",
        "loss = F.cross_entropy(out, y) + F.mse_loss(out, target)",
    ]
    after_step, evaluate = update, EVALUATE
    if kind == "frozen teacher":
        frozen = "teacher = nn.Linear(6, 3).eval().requires_grad_(False)"
        teacher, after_step = ["torch.manual_seed(99)", frozen], []
    if kind == "ema":  # of the weights that are saved and evaluated; it is not in the loss
        teacher = ["ema = torch.optim.swa_utils.AveragedModel(net)"]
        after_step = ["ema.update_parameters(net)"]
        forward = ["out = model(x)", "loss = F.cross_entropy(out, y)"]
        evaluate = [line.replace("net(x)", "ema(x)") for line in EVALUATE]
    choose.made["loss"] = "mean"
    return Task(
        build=[f"net = {MLP}"],
        forward=forward,
        unpack=unpack,
        count=LOCAL_COUNT,
        prelude=prelude,
        collate=collate,
        after_wrap=teacher,
        after_step=after_step,
        evaluate=evaluate,
        tensors=tensors,
        own_state=True,
    )


# Words


SENTENCES = block("""
class Sentences(Dataset):
    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.lengths = torch.randint(3, 9, (count,), generator=generator).tolist()
        self.words = [torch.randint(1, 12, (n,), generator=generator) for n in self.lengths]
        self.y = torch.tensor([int(words[0]) % 3 for words in self.words])

    def __len__(self):
        return len(self.words)

    def __getitem__(self, i):
        return SAMPLE
""")
LSTM = block("""
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(12, 8, padding_idx=0)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.output = nn.Linear(8, 12)

    def forward(self, words, state):
        hidden, _ = self.lstm(self.embedding(words), state)
        return self.output(hidden)
""")
TRANSFORMER = block("""
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.position = nn.Parameter(torch.zeros(16, 8))
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.output = nn.Linear(8, 12)

    def forward(self, words, padding):
        h = self.embedding(words) + self.position[: words.shape[1]]
        causal = torch.ones(words.shape[1], words.shape[1], dtype=torch.bool).triu(1)
        h = self.layer(h, src_mask=causal, src_key_padding_mask=padding)
        return self.output(h)
""")
PAD = "nn.utils.rnn.pad_sequence(SEQUENCES, batch_first=True)"
WORD_COLLATES = {
    "pad": ("    return words", "words = batch"),
    "pad to dict": (
        '    return {"input_ids": words, "attention_mask": (words > 0).long()}',
        'words = batch["input_ids"]',
    ),
    "pad to UserDict": (
        '    return Encoding({"input_ids": words, "attention_mask": (words > 0).long()})',
        "words = batch.input_ids",
    ),
    "pad to dataclass": (
        "    return Batch(words, [len(sample) for sample in samples])",
        "words = batch.words",
    ),
}
ENCODING = block("""
class Encoding(UserDict):
    def __getattr__(self, name):
        if name == "data":
            raise AttributeError(name)
        return self.data[name]
""")
WORD_BATCH = "@dataclass\nclass Batch:\n    words: torch.Tensor\n    lengths: list"


WORD_MODELS = {  # what is made before its call, and the call
    "lstm": (
        ["state = torch.zeros(1, inputs.size(0), 8), torch.zeros(1, inputs.size(0), 8)"],
        "CALL(inputs, state)",
    ),
    "lstm, constant batch": (
        ["hidden = torch.zeros(1, GLOBAL_BATCH // world, 8)", "state = hidden, hidden"],
        "CALL(inputs, state)",
    ),
    "transformer": ([], "CALL(inputs, inputs == 0)"),
}


def words(choose: Choices) -> Task:
    """The next word of sentences that are padded to the longest of their batch."""
    kind = choose("collate", *WORD_COLLATES)
    returned, unpack = WORD_COLLATES[kind]
    before = {"pad to UserDict": [ENCODING], "pad to dataclass": [WORD_BATCH]}.get(kind, [])
    padded = f"    words = {PAD.replace('SEQUENCES', 'samples')}"
    collate = f"def collate(samples):\n{padded}\n{returned}"
    model = choose("model", *WORD_MODELS)
    choose.made["loss"] = "words of all ranks"
    prepare, call = WORD_MODELS[model]
    arguments = "ignore_index=0, reduction='sum'"
    summed = f"F.cross_entropy(out.flatten(0, 1), target.flatten(), {arguments})"
    evaluate = [
        "inputs, target = words[:, :-1], words[:, 1:]",
        *prepare,
        f"out = {call.replace('CALL', 'net')}",
        f"value = {summed}",
        "n = (target > 0).sum()",
    ]
    return Task(
        build=["net = Net()"],
        forward=[
            "inputs, target = words[:, :-1], words[:, 1:]",
            *prepare,
            f"out = {call.replace('CALL', 'model')}",
            "tokens = (target > 0).sum().to(torch.get_default_dtype())",
            "dist.all_reduce(tokens)",
            f"loss = {summed}{{times}} / tokens",
        ],
        unpack=[unpack],
        count="(target > 0).sum()",
        prelude=[
            *before,
            SENTENCES.replace("SAMPLE", "self.words[i]"),
            collate,
            TRANSFORMER if model == "transformer" else LSTM,
        ],
        collate="collate",
        evaluate=[] if "constant" in model else evaluate,
        fixed_batch="constant" in model,
        divides=True,
    )


BAG = block("""
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(12, 8, mode="mean")
        self.output = nn.Linear(8, 3)

    def forward(self, flat, offsets):
        return self.output(torch.tanh(self.bag(flat, offsets)))
""")
BAG_COLLATE = block("""
def collate(samples):
    lengths = torch.tensor([0] + [len(words) for words, _ in samples[:-1]])
    flat = torch.cat([words for words, _ in samples])
    return flat, lengths.cumsum(0), torch.stack([label for _, label in samples])
""")
PACKED = block("""
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.output = nn.Linear(8, 3)

    def forward(self, words, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embedding(words), lengths, batch_first=True, enforce_sorted=False
        )
        _, (hidden, _) = self.lstm(packed)
        return self.output(hidden[-1])
""")
PACKED_COLLATE = block(f"""
def collate(samples):
    words = {PAD.replace("SEQUENCES", "[words for words, _ in samples]")}
    lengths = torch.tensor([len(words) for words, _ in samples])
    return words, lengths, torch.stack([label for _, label in samples])
""")


def bags(choose: Choices) -> Task:
    """The class of a sentence: words of all sentences in one row, or packed."""
    kind = choose("model", "embedding bag", "packed lstm")
    choose.made["collate"] = "flat with offsets" if kind == "embedding bag" else "pad with lengths"
    names = "flat, offsets" if kind == "embedding bag" else "words, lengths"
    loss = choose("loss", *CLASSIFICATION)
    return Task(
        build=["net = Net()"],
        forward=[f"out = model({names})", *CLASSIFICATION[loss]],
        unpack=[f"{names}, y = batch"],
        count=LOCAL_COUNT,
        prelude=[
            SENTENCES.replace("SAMPLE", "self.words[i], self.y[i]"),
            *((BAG_COLLATE, BAG) if kind == "embedding bag" else (PACKED_COLLATE, PACKED)),
        ],
        collate="collate",
        evaluate=[line.replace("net(x)", f"net({names})") for line in EVALUATE],
        divides=loss not in MEAN_LOSSES,
    )


SPEECH = block("""
class Speech(Dataset):
    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.sound = torch.randn(count, 10, 4, generator=generator)
        self.lengths = torch.randint(1, 4, (count,), generator=generator).tolist()
        self.texts = [torch.randint(1, 5, (n,), generator=generator) for n in self.lengths]

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, i):
        return self.sound[i], self.texts[i]


def collate(samples):
    sound = torch.stack([sample[0] for sample in samples])
    texts = torch.cat([sample[1] for sample in samples])
    return sound, texts, torch.tensor([len(sample[1]) for sample in samples])
""")


def ctc(choose: Choices) -> Task:
    choose.made.update(collate="ctc", model="gru")
    kind = choose("loss", "ctc mean", "ctc / letters of all ranks")
    call = "F.ctc_loss(scores.transpose(0, 1), texts, frames, lengths, reduction={!r})"
    loss = [f"loss = {call.format('mean')}"]
    if kind != "ctc mean":
        loss = [
            "letters = lengths.sum().to(scores.dtype)",
            "dist.all_reduce(letters)",
            f"loss = {call.format('sum')}{{times}} / letters",
        ]
    scores = "scores = MODEL(sound).log_softmax(-1)"
    frames = "frames = torch.full((len(sound),), scores.shape[1])"
    net = block("""
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(4, 8, batch_first=True)
        self.output = nn.Linear(8, 5)

    def forward(self, sound):
        return self.output(self.gru(sound)[0])
""")
    return Task(
        build=["net = Net()"],
        forward=[scores.replace("MODEL", "model"), frames, *loss],
        unpack=["sound, texts, lengths = batch"],
        count="lengths.sum()",
        prelude=[SPEECH, net],
        collate="collate",
        evaluate=[
            scores.replace("MODEL", "net"),
            frames,
            f"value = {call.format('sum')}",
            "n = len(sound)",
        ],
        divides=kind != "ctc mean",
    )


DETECTION = block("""
class Pictures(Dataset):
    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.pictures = torch.randn(count, 1, 5, 5, generator=generator)
        numbers = torch.randint(1, 4, (count,), generator=generator).tolist()
        self.boxes = [torch.rand(n, 4, generator=generator) for n in numbers]

    def __len__(self):
        return len(self.pictures)

    def __getitem__(self, i):
        boxes = self.boxes[i]
        return self.pictures[i], {"boxes": boxes, "labels": (boxes[:, 0] > 0.5).long(), "id": i}


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36, 8))
        self.box, self.label = nn.Linear(8, 4), nn.Linear(8, 2)

    def forward(self, pictures, targets):
        losses = {"box": 0.0, "label": 0.0}
        for picture, target in zip(pictures, targets):
            h = torch.tanh(self.body(picture[None]))
            boxes = self.box(h).expand_as(target["boxes"])
            labels = self.label(h).expand(len(target["labels"]), 2)
            losses["box"] += F.smooth_l1_loss(boxes, target["boxes"], reduction="sum")
            losses["label"] += F.cross_entropy(labels, target["labels"], reduction="sum")
        return losses
""")


def detection(choose: Choices) -> Task:
    kind = choose("collate", "tuple(zip(*batch))", "list of dicts")
    choose.made.update(model="detector", loss="boxes of all ranks")
    collate, unpack = {
        "tuple(zip(*batch))": (
            "def collate(batch):\n    return tuple(zip(*batch))",
            ["pictures, targets = batch"],
        ),
        "list of dicts": (
            "def collate(batch):\n    return [target | {'picture': p} for p, target in batch]",
            ["pictures, targets = [each['picture'] for each in batch], batch"],
        ),
    }[kind]
    count = "sum(len(target['boxes']) for target in targets)"
    return Task(
        build=["net = Detector()"],
        forward=[
            f"boxes = torch.tensor(float({count}))",
            "dist.all_reduce(boxes)",
            "losses = model(pictures, targets)",
            "loss = sum(losses.values()){times} / boxes",
        ],
        unpack=unpack,
        count=count,
        prelude=[DETECTION, collate],
        collate="collate",
        evaluate=["value = sum(net(pictures, targets).values())", f"n = {count}"],
        divides=True,
    )


# Two views of each sample


PAIRS = block("""
class Pairs(Dataset):
    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(count, 6, generator=generator)
        self.y = self.x + torch.randn(count, 6, generator=generator) / 4

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]
""")
TOWERS = block("""
class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(6, 4), nn.Linear(6, 4)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x, y):
        left, right = F.normalize(self.left(x), dim=1), F.normalize(self.right(y), dim=1)
        return left, right, self.scale.exp()
""")
GATHER_FUNCTION = block("""
class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        ctx.rows = len(x)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        first = dist.get_rank() * ctx.rows
        return gradient[first : first + ctx.rows]


def gather(x):
    return Gather.apply(x)
""")
GATHER_LIBRARY = block("""
def gather(x):
    return torch.cat(torch.distributed.nn.functional.all_gather(x))
""")
GATHER_OWN = block("""
def gather(x):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.detach().contiguous())
    parts[dist.get_rank()] = x
    return torch.cat(parts)
""")


def contrastive(choose: Choices) -> Task:
    choose.made.update(collate="default", model="two towers")
    kind = choose("loss", "gather, library", "gather, Function", "gather, own rows", "local rows")
    gathers = {"gather, Function": GATHER_FUNCTION, "gather, own rows": GATHER_OWN}
    both = "F.cross_entropy(a, labels) / 2 + F.cross_entropy(b, labels) / 2"
    of_all = [
        "left, right, scale = model(x, y)",
        "left, right = gather(left), gather(right)",
        "a, b = scale * left @ right.T, scale * right @ left.T",
        "labels = torch.arange(len(a))",
        f"loss = {both}",
    ]
    forward = of_all
    if kind == "gather, own rows":
        # each rank has the gradient of its own rows only; that of the scale is complete on each
        forward = [
            "left, right, scale = model(x, y)",
            "scale = scale / world + (1 - 1 / world) * scale.detach()",
            *of_all[1:-1],
            f"loss = ({both}){{times}}",
        ]
    if kind == "local rows":
        forward = [
            "left, right, scale = model(x, y)",
            "all_left, all_right = gather(left), gather(right)",
            "a, b = scale * left @ all_right.T, scale * right @ all_left.T",
            "labels = rank * len(x) + torch.arange(len(x))",
            f"loss = {both}",
        ]
    return Task(
        build=["net = Towers()"],
        forward=forward,
        unpack=["x, y = batch"],
        count="(x[:, 0] > 0).sum()",
        prelude=[PAIRS, TOWERS, gathers.get(kind, GATHER_LIBRARY)],
        tensors="train_set.x, train_set.y",
        divides=kind == "gather, own rows",
        logged="loss.detach() / world" if kind == "gather, own rows" else "loss.detach()",
    )


def moco(choose: Choices) -> Task:
    """A queue of keys, gathered from all ranks before they are enqueued."""
    choose.made.update(collate="default", model="moco", loss="queue of all ranks")
    return Task(
        build=["net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))"],
        after_wrap=[
            "key_net = copy.deepcopy(net).requires_grad_(False)",
            "start = torch.randn(32, 4, generator=torch.Generator().manual_seed(5))",
            "queue = F.normalize(start, dim=1)",
        ],
        forward=[
            "with torch.no_grad():",
            "    for old, new in zip(key_net.parameters(), net.parameters()):",
            "        old.mul_(0.9).add_(new, alpha=0.1)",
            "    keys = F.normalize(key_net(y), dim=1)",
            "queries = F.normalize(model(x), dim=1)",
            "positive = (queries * keys).sum(1, keepdim=True)",
            "negative = queries @ queue.clone().T",
            "logits = torch.cat([positive, negative], 1) / 0.2",
            "loss = F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))",
            "parts = [torch.empty_like(keys) for _ in range(world)]",
            "dist.all_gather(parts, keys.contiguous())",
            "queue.copy_(torch.cat([*parts, queue])[: len(queue)])",
        ],
        unpack=["x, y = batch"],
        count="(x[:, 0] > 0).sum()",
        prelude=[PAIRS],
        tensors="train_set.x, train_set.y",
        own_state=True,
        fixed_batch=True,
    )


# Noise in the step


def drawn(choose: Choices, shape: str, like: str = "") -> tuple[list[str], str]:
    """A generator that differs by rank, if it is an own one, and the draw of a normal number."""
    kind = choose("noise from", "the default generator", "an own generator")
    if kind == "an own generator":
        made = ["noise = torch.Generator().manual_seed(10_000 + rank)"]
        return made, f"torch.randn({shape}, generator=noise)"
    return [], f"torch.randn_like({like})" if like else f"torch.randn({shape})"


def vae(choose: Choices) -> Task:
    prelude, collate, unpack, tensors = xy_samples(choose, POINTS)
    choose.made.update(model="vae", loss="vae")
    net = block("""
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 6), nn.Linear(3, 6)

    def forward(self, x):
        mean, log_variance = self.encoder(x).chunk(2, dim=1)
        code = mean + torch.exp(log_variance / 2) * torch.randn_like(mean)
        return self.decoder(code), mean, log_variance
""")
    return Task(
        build=["net = Net()"],
        forward=[
            "copied, mean, log_variance = model(x)",
            "divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(1)",
            "loss = F.mse_loss(copied, x) + 0.01 * divergence.mean()",
        ],
        unpack=unpack,
        count=LOCAL_COUNT,
        prelude=[*prelude, net],
        collate=collate,
        tensors=tensors,
        draws=True,
    )


def diffusion(choose: Choices) -> Task:
    prelude, collate, unpack, tensors = xy_samples(choose, POINTS)
    made, noise = drawn(choose, "x.shape", "x")
    choose.made.update(model="diffusion", loss="mse")
    generator = ", generator=noise" if made else ""
    return Task(
        build=["net = nn.Sequential(nn.Linear(7, 16), nn.SiLU(), nn.Linear(16, 6))"],
        forward=[
            f"t = torch.randint(1, 100, (len(x),){generator}) / 100",
            f"epsilon = {noise}",
            "noisy = t[:, None].sqrt() * epsilon + (1 - t[:, None]).sqrt() * x",
            "loss = F.mse_loss(model(torch.cat([noisy, t[:, None]], 1)), epsilon)",
        ],
        unpack=unpack,
        count=LOCAL_COUNT,
        prelude=prelude,
        collate=collate,
        tensors=tensors,
        draws=True,
        generators=made,
        own_state=bool(made),
    )


def gan(choose: Choices) -> Task:
    prelude, collate, unpack, tensors = xy_samples(choose, POINTS)
    made, noise = drawn(choose, "len(x), 3")
    choose.made.update(model="gan", loss="gan")
    bce = "F.binary_cross_entropy_with_logits"
    return Task(
        build=["net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 6))"],
        after_wrap=[
            "critic = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))",
            "critic_params = list(critic.parameters())",
            "critic_model = WRAP(critic)",
            "critic_optimizer = torch.optim.Adam(critic_params, lr=LR / 10, betas=(0.5, 0.9))",
        ],
        forward=[
            f"fake = model({noise})",
            "ones, zeros = torch.ones(len(x), 1), torch.zeros(len(x), 1)",
            "scores = critic_model(torch.cat([x, fake.detach()]))",
            f"loss = {bce}(scores, torch.cat([ones, zeros]))",
            "FAULT",
            "critic_optimizer.zero_grad()",
            "loss.backward()",
            "AVERAGE",
            "critic_optimizer.step()",
            "optimizer.zero_grad()",
            f"loss = {bce}(critic_model(fake), ones)",
            "loss.backward()",
            "AVERAGE",
            "optimizer.step()",
        ],
        unpack=unpack,
        count=LOCAL_COUNT,
        prelude=prelude,
        collate=collate,
        tensors=tensors,
        draws=True,
        generators=made,
        own_state=bool(made),
        gan=True,
    )


# Gradients that are no dense real tensors


SPARSE_BAG = BAG.replace('mode="mean")', 'mode="mean", sparse=True)')
SPARSE_EMBEDDING = block("""
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.Embedding(12, 8, sparse=True)
        self.output = nn.Linear(8, 3)

    def forward(self, flat, offsets):
        sentence = torch.bucketize(torch.arange(len(flat)), offsets, right=True) - 1
        mixed = torch.zeros(len(offsets), 8).index_add(0, sentence, self.bag(flat))
        return self.output(torch.tanh(mixed))
""")


def sparse(choose: Choices) -> Task:
    """Bags of words, whose embedding has sparse gradients."""
    kind = choose("model", "sparse bag", "sparse embedding")
    choose.made["collate"] = "flat with offsets"
    loss = choose("loss", *CLASSIFICATION)
    return Task(
        build=["net = Net()"],
        forward=["out = model(flat, offsets)", *CLASSIFICATION[loss]],
        unpack=["flat, offsets, y = batch"],
        count=LOCAL_COUNT,
        prelude=[
            SENTENCES.replace("SAMPLE", "self.words[i], self.y[i]"),
            BAG_COLLATE,
            SPARSE_BAG if kind == "sparse bag" else SPARSE_EMBEDDING,
        ],
        collate="collate",
        evaluate=[line.replace("net(x)", "net(flat, offsets)") for line in EVALUATE],
        divides=loss not in MEAN_LOSSES,
        layout="sparse",
    )


WAVES = block("""
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        real, imaginary = torch.empty(2, 4, 4).normal_()
        self.weight = nn.Parameter(torch.complex(real, imaginary) / 4)
        self.output = nn.Linear(8, 3)

    def forward(self, x):
        waves = torch.fft.rfft(x, norm="ortho") @ self.weight
        return self.output(torch.view_as_real(waves * torch.sigmoid(waves.abs())).flatten(1))
""")
COMPLEX_LAYERS = block("""
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        dtype = torch.get_default_dtype().to_complex()
        self.first = nn.Linear(6, 8, dtype=dtype)
        self.last = nn.Linear(8, 3, dtype=dtype)

    def forward(self, x):
        hidden = self.first(x.to(self.first.weight.dtype))
        return self.last(hidden * torch.sigmoid(hidden.abs())).real
""")


def complex_weights(choose: Choices) -> Task:
    prelude, collate, unpack, tensors = xy_samples(choose, POINTS)
    model = choose("model", "fourier", "complex layers")
    loss = choose("loss", *CLASSIFICATION)
    return Task(
        build=["net = Net()"],
        forward=["out = model(x)", *CLASSIFICATION[loss]],
        unpack=unpack,
        count=LOCAL_COUNT,
        prelude=[*prelude, WAVES if model == "fourier" else COMPLEX_LAYERS],
        collate=collate,
        evaluate=EVALUATE,
        tensors=tensors,
        divides=loss not in MEAN_LOSSES,
        layout="complex",
    )


TASKS: dict[str, Callable[[Choices], Task]] = {
    "points": points,
    "words": words,
    "contrastive": contrastive,
    "images": images,
    "detection": detection,
    "diffusion": diffusion,
    "bags": bags,
    "distill": distill,
    "vae": vae,
    "ctc": ctc,
    "mixup": mixup,
    "moco": moco,
    "gan": gan,
    "sparse": sparse,
    "complex": complex_weights,
}
