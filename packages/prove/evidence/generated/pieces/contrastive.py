# How much each view of a sample looks like each view of another, also of another rank's.
# Of `own rows`, each rank has the gradient of its own only; that of the scale is complete on each.

# %% from pairs
# %% choices
collate = "default"
model = "two towers"
loss = ("gather, library", "gather, Function", "gather, own rows", "local rows")
# %% facts, if loss is gather, own rows
divides = True
logged = "loss.detach() / world"


# %% classes
class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(6, 4), nn.Linear(6, 4)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x, y):
        left, right = F.normalize(self.left(x), dim=1), F.normalize(self.right(y), dim=1)
        return left, right, self.scale.exp()


# %% classes, if loss is gather, library or local rows
def gather(x):
    return torch.cat(torch.distributed.nn.functional.all_gather(x))


# %% classes, if loss is gather, Function
class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        ctx.rows = len(x)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        first = dist.get_rank() * ctx.rows
        return gradient[first : first + ctx.rows]


def gather(x):
    return Gather.apply(x)


# %% classes, if loss is gather, own rows
def gather(x):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.detach().contiguous())
    parts[dist.get_rank()] = x
    return torch.cat(parts)


# %% build
net = Towers()

# %% forward
left, right, scale = model(x, y)
# %% forward, if loss is gather, own rows
scale = scale / world + (1 - 1 / world) * scale.detach()
# %% forward, if loss is gather, library or gather, Function or gather, own rows
left, right = gather(left), gather(right)
a, b = scale * left @ right.T, scale * right @ left.T
labels = torch.arange(len(a))
# %% forward, if loss is local rows
all_left, all_right = gather(left), gather(right)
a, b = scale * left @ all_right.T, scale * right @ all_left.T
labels = rank * len(x) + torch.arange(len(x))
# %% forward, if loss is gather, library or gather, Function or local rows
loss = F.cross_entropy(a, labels) / 2 + F.cross_entropy(b, labels) / 2
# %% forward, if loss is gather, own rows
loss = (F.cross_entropy(a, labels) / 2 + F.cross_entropy(b, labels) / 2) * WORLD
