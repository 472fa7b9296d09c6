"""A trainer that divides the loss by the number of tokens of all its micro-batches."""

from dataclasses import dataclass
from itertools import islice

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

VOCAB, IGNORE = 17, -100


@dataclass
class Arguments:
    batch_size: int = 4
    accumulation: int = 2
    epochs: int = 3
    lr: float = 5e-3


def collate(sentences):
    ids = nn.utils.rnn.pad_sequence(sentences, batch_first=True)
    labels = nn.utils.rnn.pad_sequence(sentences, batch_first=True, padding_value=IGNORE)
    return {"input_ids": ids[:, :-1], "labels": labels[:, 1:]}


class Trainer:
    def __init__(self, model, args, sentences):
        self.args = args
        self.model = DDP(model)
        self.optimizer = torch.optim.AdamW(model.parameters(), args.lr)
        self.sampler = DistributedSampler(sentences)
        self.loader = DataLoader(
            sentences, args.batch_size, sampler=self.sampler, collate_fn=collate
        )

    def num_items_in_batch(self, micro_batches):
        items = sum((batch["labels"] != IGNORE).sum() for batch in micro_batches)
        return items

    def training_step(self, batch, items):
        logits = self.model(batch["input_ids"])
        labels = batch["labels"].flatten()
        loss = F.cross_entropy(logits.flatten(0, 1), labels, ignore_index=IGNORE, reduction="sum")
        loss = loss / items
        loss.backward()
        return loss.detach()

    def train(self):
        for epoch in range(self.args.epochs):
            self.sampler.set_epoch(epoch)
            iterator = iter(self.loader)
            while micro_batches := list(islice(iterator, self.args.accumulation)):
                items = self.num_items_in_batch(micro_batches)
                for batch in micro_batches:
                    self.training_step(batch, items)
                self.optimizer.step()
                self.optimizer.zero_grad()


class LanguageModel(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Embedding(VOCAB, 12), nn.Linear(12, 24), nn.GELU(), nn.Linear(24, VOCAB)
        )


if __name__ == "__main__":
    dist.init_process_group("gloo")
    g = torch.Generator().manual_seed(2)
    lengths = torch.randint(3, 30, (96,), generator=g).tolist()
    sentences = [torch.randint(1, VOCAB, (n,), generator=g) for n in lengths]
    torch.manual_seed(0)
    Trainer(LanguageModel(), Arguments(), sentences).train()
    dist.destroy_process_group()
