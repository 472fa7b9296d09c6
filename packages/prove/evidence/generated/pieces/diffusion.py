# Noise and a time for each sample, drawn in the step.

# %% from samples
# %% choices
noise_from = ("the default generator", "an own generator")
model = "diffusion"
loss = "mse"
# %% facts
draws = True
# %% facts, if noise from is an own generator
own_state = True

# %% build
net = nn.Sequential(nn.Linear(7, 16), nn.SiLU(), nn.Linear(16, 6))
# %% generators, if noise from is an own generator
noise = torch.Generator().manual_seed(10_000 + rank)

# %% forward, if noise from is the default generator
t = torch.randint(1, 100, (len(x),)) / 100
epsilon = torch.randn_like(x)
# %% forward, if noise from is an own generator
t = torch.randint(1, 100, (len(x),), generator=noise) / 100
epsilon = torch.randn(x.shape, generator=noise)
# %% forward
noisy = t[:, None].sqrt() * epsilon + (1 - t[:, None]).sqrt() * x
loss = F.mse_loss(model(torch.cat([noisy, t[:, None]], 1)), epsilon)
