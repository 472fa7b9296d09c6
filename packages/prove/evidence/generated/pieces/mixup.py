# One λ for the batches of all ranks, and a partner in the same local batch.

# %% from samples
# %% choices
lambda_from = ("numpy", "random", "torch")
model = "mlp"
loss = "mixup"
# %% facts
draws = True
own_state = True

# %% build
net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
# %% generators, if lambda from is numpy
mix = np.random.default_rng(7)
# %% generators, if lambda from is random
mix = random.Random(7)
# %% generators, if lambda from is torch
mix = torch.Generator().manual_seed(7)

# %% forward, if lambda from is numpy
lam = float(mix.beta(0.4, 0.4))
# %% forward, if lambda from is random
lam = mix.betavariate(0.4, 0.4)
# %% forward, if lambda from is torch
lam = torch.rand(1, generator=mix).item()
# %% forward
partner = torch.randperm(len(x))
out = model(lam * x + (1 - lam) * x[partner])
loss = lam * F.cross_entropy(out, y) + (1 - lam) * F.cross_entropy(out, y[partner])

# %% evaluate
value = F.cross_entropy(net(x), y, reduction="sum")
n = len(y)
