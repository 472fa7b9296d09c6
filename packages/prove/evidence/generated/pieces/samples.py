# Samples with a tensor x and a label y, from data sets and collate functions in many styles.

# %% choices
collate = ("default", "dict", "dict with ids", "strings", "numpy", "namedtuple sample", "dataclass")
collate += ("namedtuple", "UserDict", "list")
collate += ("default", "default", "default", "default", "default")  # it alone can be indexed
device = ("none", "none", "to")
# %% facts, if collate is default
tensors = "train_set.x, train_set.y"
# %% COUNT
(y == 0).sum()
# %% INPUTS
x
# %% X
torch.randn(count, 6, generator=generator) + self.y[:, None]

# %% SAMPLE, if collate is default or dataclass or namedtuple or UserDict or list
self.x[i], self.y[i]
# %% SAMPLE, if collate is dict
{"x": self.x[i], "y": self.y[i]}
# %% SAMPLE, if collate is dict with ids
{"id": i, "name": f"sample-{i}", "x": self.x[i], "y": self.y[i]}
# %% SAMPLE, if collate is strings
self.x[i], self.y[i], f"sample-{i}"
# %% SAMPLE, if collate is numpy
self.x[i].numpy(), int(self.y[i])
# %% SAMPLE, if collate is namedtuple sample
Sample(self.x[i], self.y[i])


# %% classes, if collate is namedtuple sample
Sample = namedtuple("Sample", "x y")


# %% classes, if collate is dataclass
@dataclass
class Batch:
    x: torch.Tensor
    y: torch.Tensor
    ids: list


# %% classes, if collate is namedtuple
class Batch(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


# %% classes, if collate is UserDict
class Batch(UserDict):
    def to(self, device):
        return Batch({name: value.to(device) for name, value in self.items()})


# %% classes
class Samples(Dataset):
    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.y = torch.randint(0, 3, (count,), generator=generator)
        self.x = X

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return SAMPLE


# %% classes, if collate is dataclass
def collate(samples):
    x = torch.stack([sample[0] for sample in samples])
    y = torch.stack([sample[1] for sample in samples])
    return Batch(x, y, [int(label) for label in y])


# %% classes, if collate is namedtuple
def collate(samples):
    x = torch.stack([sample[0] for sample in samples])
    y = torch.stack([sample[1] for sample in samples])
    return Batch(x, y)


# %% classes, if collate is UserDict
def collate(samples):
    x = torch.stack([sample[0] for sample in samples])
    y = torch.stack([sample[1] for sample in samples])
    return Batch({"x": x, "y": y})


# %% classes, if collate is list
def collate(samples):
    return samples


# %% classes, if device is to
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

# %% unpack, if collate is default or numpy or namedtuple
x, y = batch
# %% unpack, if collate is dict or dict with ids
x, y = batch["x"], batch["y"]
# %% unpack, if collate is strings
x, y, names = batch
# %% unpack, if collate is namedtuple sample or dataclass
x, y = batch.x, batch.y
# %% unpack, if collate is UserDict
batch = batch.to("cpu")
x, y = batch["x"], batch["y"]
# %% unpack, if collate is list
x = torch.stack([sample[0] for sample in batch])
y = torch.stack([sample[1] for sample in batch])
# %% unpack, if device is to
x, y = x.to(device, non_blocking=True), y.to(device)
