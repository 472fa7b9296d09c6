# A loss of `out` and the labels y, and what is evaluated.

# %% choices
loss = ("mean", "module", "mse", "bce", "sum / local")
loss += ("sum / global", "weighted / global", "focal / global")
# %% facts, if loss is sum / global or weighted / global or focal / global
divides = True

# %% forward
out = model(INPUTS)
# %% forward, if loss is mean
loss = F.cross_entropy(out, y)
# %% forward, if loss is module
loss = nn.CrossEntropyLoss(label_smoothing=0.1)(out, y)
# %% forward, if loss is mse
loss = F.mse_loss(out, F.one_hot(y, 3).to(out.dtype))
# %% forward, if loss is bce
loss = F.binary_cross_entropy_with_logits(out, F.one_hot(y, 3).to(out.dtype))
# %% forward, if loss is sum / local
loss = F.cross_entropy(out, y, reduction="sum") / len(y)
# %% forward, if loss is sum / global
seen = torch.tensor(float(len(y)))
dist.all_reduce(seen)
loss = F.cross_entropy(out, y, reduction="sum") * WORLD / seen
# %% forward, if loss is weighted / global
weight = torch.tensor([1.0, 3.0, 9.0])[y]
weights = weight.sum()
dist.all_reduce(weights)
each = F.cross_entropy(out, y, reduction="none")
loss = (weight * each).sum() * WORLD / weights
# %% forward, if loss is focal / global
each = F.cross_entropy(out, y, reduction="none")
focal = (1 - torch.exp(-each)) ** 2 * each
positive = (y > 0).sum().to(out.dtype)
dist.all_reduce(positive)
loss = focal.sum() * WORLD / positive.clamp(min=1)

# %% evaluate
value = F.cross_entropy(net(INPUTS), y, reduction="sum")
n = len(y)
