# A teacher that stays as it is, one that follows the weights, or an average that is only evaluated.

# %% from samples
# %% choices
model = ("frozen teacher", "mean teacher", "ema")
loss = "mean"
# %% facts
own_state = True

# %% build
net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))

# %% after_wrap, if model is frozen teacher
torch.manual_seed(99)
teacher = nn.Linear(6, 3).eval().requires_grad_(False)
# %% after_wrap, if model is mean teacher
teacher = copy.deepcopy(net)
for p in teacher.parameters():
    p.requires_grad_(False)
# %% after_wrap, if model is ema
ema = torch.optim.swa_utils.AveragedModel(net)

# %% forward
out = model(x)
# %% forward, if model is frozen teacher or mean teacher
with torch.no_grad():
    target = teacher(x)
loss = F.cross_entropy(out, y) + F.mse_loss(out, target)
# %% forward, if model is ema
loss = F.cross_entropy(out, y)

# %% after_step, if model is mean teacher
with torch.no_grad():
    for old, new in zip(teacher.parameters(), net.parameters()):
        old.mul_(0.9).add_(new, alpha=0.1)
# %% after_step, if model is ema
ema.update_parameters(net)

# %% evaluate, if model is frozen teacher or mean teacher
value = F.cross_entropy(net(x), y, reduction="sum")
# %% evaluate, if model is ema
value = F.cross_entropy(ema(x), y, reduction="sum")
# %% evaluate
n = len(y)
