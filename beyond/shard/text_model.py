"""A small language model, and a text for it: Shakespeare's Richard III, byte by byte.

python beyond/shard/text_model.py

The play is in the public domain. richard_iii.txt is a part of Andrej Karpathy's tiny Shakespeare
(data/tinyshakespeare/input.txt in github.com/karpathy/char-rnn).
"""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from common import data, models
from common.options import Parser, UsageError

IGNORED = -100  # the label of what nobody has to predict: the default of F.cross_entropy
PLAY = Path(__file__).with_name("richard_iii.txt")
LENGTH, BYTES = 128, 256  # tokens of a sample; size of the vocabulary


class Text(Dataset):
    """Lines of bytes. A sample is (128,) tokens, and for each the next one, which is its label.

    Lines have unequal lengths, so behind the end of a line, labels are IGNORED.
    """

    classes: ClassVar = list(range(BYTES))

    def __init__(self, lines: Sequence[bytes]) -> None:
        padded = b"".join(line.ljust(LENGTH, b"\0") for line in lines)
        byte_values = torch.frombuffer(bytearray(padded), dtype=torch.uint8).view(-1, LENGTH).long()
        is_behind_end = torch.arange(LENGTH) >= torch.tensor([[len(line)] for line in lines])
        self.labels = byte_values.masked_fill(is_behind_end, IGNORED)  # (lines, 128)
        # 0 fills the end of a line, and also begins each one.
        self.tokens = F.pad(byte_values, (1, -1)).masked_fill(is_behind_end, 0)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int | Sequence[int]) -> tuple[Tensor, Tensor]:
        return self.tokens[index], self.labels[index]

    __getitems__ = __getitem__  # DataLoader calls it with the indices of a batch


DataSet: TypeAlias = Text | data.ImageSet


class Block(nn.Module):
    """Attention to all earlier tokens, then a network on each token."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:  # (B, T, width) -> the same
        qkv = self.qkv(self.norm1(hidden)).unflatten(-1, (3, self.heads, -1))  # (B, T, 3, heads, d)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # 3 × (B, heads, T, d)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        hidden = hidden + self.out(attended.transpose(1, 2).flatten(2))
        return hidden + self.down(F.gelu(self.up(self.norm2(hidden))))


class Embedding(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(BYTES, width), nn.Embedding(LENGTH, width)

    def forward(self, tokens: Tensor) -> Tensor:  # (B, T) -> (B, T, width)
        return self.token(tokens) + self.position.weight[: tokens.shape[1]]


class Transformer(nn.Module):
    """Predicts the next byte. It holds about 12 × layers × width² parameters."""

    def __init__(self, width: int = 128, layers: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.embedding = Embedding(width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, BYTES))

    def forward(self, tokens: Tensor) -> Tensor:  # (B, T) -> (B, T, 256)
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def load_dataset(args: Namespace) -> tuple[DataSet, DataSet]:
    """The training set and the test set; of `text`, every tenth line is for the test."""
    if args.dataset != "text":
        return data.load_dataset(args)
    whole_lines = [line for line in PLAY.read_bytes().splitlines(keepends=True) if line.strip()]
    lines = [line[i : i + LENGTH] for line in whole_lines for i in range(0, len(line), LENGTH)]
    train_set = Text([line for number, line in enumerate(lines) if number % 10])
    test_set = Text(lines[::10])
    data.require_a_batch(train_set, args)
    return train_set, test_set


def build_model(args: Namespace, dataset: Any, local_batch: int) -> nn.Module:
    """A new model: the transformer, or one of the stages' networks."""
    if (args.model == "transformer") != (args.dataset == "text"):
        why = f"--model {args.model} does not go with --dataset {args.dataset}"
        raise UsageError(f"{why}: try --model transformer --dataset text, or net and digits")
    if args.model != "transformer":
        return models.build_model(args.model, dataset, local_batch)
    if args.width % 4:
        raise UsageError(f"--width {args.width} is no multiple of 4, the number of heads: try 128")
    return Transformer(args.width, args.layers)


if __name__ == "__main__":
    Parser(__doc__).parse_args()
    train_set, test_set = load_dataset(Namespace(dataset="text", batch_size=1))
    print(f"{len(train_set)} lines to train, {len(test_set)} to test")
    tokens, labels = train_set[0]
    print(bytes(labels[labels != IGNORED].tolist()))
    print(f"{sum(p.numel() for p in Transformer().parameters()):,} parameters")
