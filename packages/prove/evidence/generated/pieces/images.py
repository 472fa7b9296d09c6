# Small pictures, and three classes.

# %% from samples
# %% X
torch.randn(count, 1, 6, 6, generator=generator) + self.y[:, None, None, None]

# %% choices
model = ("groupnorm", "batchnorm", "resnet", "channels last", "dropout2d")
# %% from classification
# %% facts, if model is dropout2d
draws = True
# %% facts, if model is batchnorm
batchnorm = True
# %% facts, if model is groupnorm or resnet
functional = True


# %% classes, if model is groupnorm
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.output = nn.Linear(4, 3)

    def forward(self, x):
        return self.output(F.relu(self.norm(self.conv(x))).mean((2, 3)))


# %% classes, if model is resnet
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


# %% build, if model is groupnorm or resnet
net = Net()
# fmt: off
# %% build, if model is batchnorm
net = nn.Sequential(
    nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(),
    nn.Flatten(), nn.Linear(64, 3)
)
# fmt: on
# %% build, if model is channels last
net = nn.Sequential(
    nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16, 3)
).to(memory_format=torch.channels_last)
# %% build, if model is dropout2d
net = nn.Sequential(
    nn.Conv2d(1, 4, 3), nn.Dropout2d(0.3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
)
