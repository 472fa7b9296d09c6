# Two models and two optimizers, each with a loss that a mistake can divide.

# %% from samples
# %% choices
noise_from = ("the default generator", "an own generator")
model = "gan"
loss = "gan"
# %% facts
draws = True
gan = True
# %% facts, if noise from is an own generator
own_state = True

# %% build
net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 6))
# %% after_wrap
critic = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
critic_params = list(critic.parameters())
critic_model = CRITIC
critic_optimizer = torch.optim.Adam(critic_params, lr=LR / 10, betas=(0.5, 0.9))
# %% CRITIC, if averaging is DDP
DDP(critic)
# %% CRITIC, if averaging is all_reduce
critic
# %% generators, if noise from is an own generator
noise = torch.Generator().manual_seed(10_000 + rank)

# %% forward, if noise from is the default generator
fake = model(torch.randn(len(x), 3))
# %% forward, if noise from is an own generator
fake = model(torch.randn(len(x), 3, generator=noise))
# %% forward
ones, zeros = torch.ones(len(x), 1), torch.zeros(len(x), 1)
scores = critic_model(torch.cat([x, fake.detach()]))
loss = F.binary_cross_entropy_with_logits(scores, torch.cat([ones, zeros]))
MISTAKE_OF_LOSS
critic_optimizer.zero_grad()
loss.backward()
AVERAGE_CRITIC
critic_optimizer.step()
optimizer.zero_grad()
loss = F.binary_cross_entropy_with_logits(critic_model(fake), ones)
loss.backward()
AVERAGE
optimizer.step()
