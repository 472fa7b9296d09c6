# Six numbers a sample, and three classes.

# %% from samples
# %% choices
model = ("mlp", "dropout", "batchnorm", "checkpoint", "depth by sample", "depth by batch")
model += ("frozen", "layernorm")
# %% from classification
# %% facts, if model is dropout or depth by sample
draws = True
# %% facts, if model is batchnorm
batchnorm = True
# %% facts, if model is depth by batch
own_state = True
# %% facts, if model is frozen
frozen = True
# %% facts, if model is mlp or layernorm
functional = True


# %% classes, if model is checkpoint
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16))
        self.last = nn.Linear(16, 3)

    def forward(self, x):
        return self.last(checkpoint(self.inner, x, use_reentrant=False))


# %% classes, if model is depth by sample
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


# %% classes, if model is depth by batch
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.block, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.coin = random.Random(5)  # alike on all ranks

    def forward(self, x):
        h = torch.tanh(self.first(x))
        keep = 1.0 if not self.training or self.coin.random() < 0.6 else 0.1
        return self.last(h + keep * torch.tanh(self.block(h)))


# %% classes, if model is frozen
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.Tanh())
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        with torch.no_grad():
            features = self.body(x)
        return self.head(features)


# %% build, if model is mlp
net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
# %% build, if model is dropout
net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
# %% build, if model is batchnorm
net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
# %% build, if model is layernorm
net = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 3))
# %% build, if model is checkpoint or depth by sample or depth by batch or frozen
net = Net()
# %% build, if model is frozen
net.body.requires_grad_(False)
