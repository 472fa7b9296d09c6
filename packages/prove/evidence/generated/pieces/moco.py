# A queue of keys, gathered from all ranks before they are enqueued.

# %% from pairs
# %% choices
collate = "default"
model = "moco"
loss = "queue of all ranks"
# %% facts
own_state = True
fixed_batch = True

# %% build
net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
# %% after_wrap
key_net = copy.deepcopy(net).requires_grad_(False)
start = torch.randn(32, 4, generator=torch.Generator().manual_seed(5))
queue = F.normalize(start, dim=1)

# %% forward
with torch.no_grad():
    for old, new in zip(key_net.parameters(), net.parameters()):
        old.mul_(0.9).add_(new, alpha=0.1)
    keys = F.normalize(key_net(y), dim=1)
queries = F.normalize(model(x), dim=1)
positive = (queries * keys).sum(1, keepdim=True)
negative = queries @ queue.clone().T
logits = torch.cat([positive, negative], 1) / 0.2
loss = F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))
parts = [torch.empty_like(keys) for _ in range(world)]
dist.all_gather(parts, keys.contiguous())
queue.copy_(torch.cat([*parts, queue])[: len(queue)])
