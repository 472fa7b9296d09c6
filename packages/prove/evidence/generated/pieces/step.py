# How the ranks average, and how a step is made: from an unpacked batch to the next weights.

# %% STEP, if window is of a gan
FORWARD


# fmt: off
# %% STEP, if window is of lbfgs
def closure():
    optimizer.zero_grad()
    FORWARD
    loss.backward()
    AVERAGE
    value = loss.detach().clone()
    dist.all_reduce(value)
    return value / world
loss = optimizer.step(closure)
AFTER_STEP
# fmt: on
# %% STEP, if window is of autograd
DIFFERENTIATE
for grad in grads:
    dist.all_reduce(grad)
    DIVIDE
with torch.no_grad():
    UPDATE
AFTER_STEP
# %% STEP, if window is a batch
ZERO
FORWARD
BACKWARD
CHANGE
# %% STEP, if window is several batches
FORWARD
BACKWARD
if (step + 1) % ACCUMULATE == 0:
    CHANGE
    ZERO
# %% STEP, if window is several batches, with DDP
last = (step + 1) % ACCUMULATE == 0
with nullcontext() if last else model.no_sync():
    FORWARD
    BACKWARD
if last:
    CHANGE
    ZERO
# %% STEP, if window is several batches, with fully_shard
last = (step + 1) % ACCUMULATE == 0
model.set_requires_gradient_sync(last)
FORWARD
BACKWARD
if last:
    CHANGE
    ZERO

# %% DIFFERENTIATE, if optimizer is autograd.grad
FORWARD
grads = torch.autograd.grad(loss, params)


# fmt: off
# %% DIFFERENTIATE, if optimizer is torch.func
def loss_of(values):
    FORWARD
    return loss
names = [name for name, p in net.named_parameters()]
grads, loss = grad_and_value(loss_of)(dict(zip(names, params)))
grads = list(grads.values())
# fmt: on

# From p.grad of this rank to the next weights.

# %% CHANGE
AVERAGE
UNSCALE
CLIP
APPLY
AVERAGE_WEIGHTS
STEP_OF_SCHEDULER
AFTER_STEP
# %% APPLY, if steps is by an optimizer
optimizer.step()
# %% APPLY, if steps is by a scaler
scaler.step(optimizer)
scaler.update()
# %% APPLY, if steps is of masters
for p, master in zip(params, masters):
    master.grad = p.grad
optimizer.step()
for p, master in zip(params, masters):
    p.data.copy_(master.data)
# %% APPLY, if steps is by hand
grads = [p.grad for p in params]
with torch.no_grad():
    UPDATE
# %% ZERO, if steps is by an optimizer or by a scaler
optimizer.zero_grad()
# %% ZERO, if steps is of masters or by hand or in backward
for p in params:
    p.grad = None
# %% UNSCALE, if steps is by a scaler
scaler.unscale_(optimizer)
# %% AVERAGE_WEIGHTS, if averaging is weights after step
for p in params:
    dist.all_reduce(p.data)
    p.data /= world
# %% STEP_OF_SCHEDULER, if schedule is cosine or OneCycle or warm-up
scheduler.step()

# By hand, after backward: p.grad becomes that of all ranks.

# %% average, if averaging is all_reduce
for p in params:
    dist.all_reduce(p.grad)
    p.grad /= world
# %% average, if averaging is all_reduce, sum
for p in params:
    dist.all_reduce(p.grad)
# %% average, if averaging is all_reduce, async
works = [dist.all_reduce(p.grad, async_op=True) for p in params]
for work, p in zip(works, params):
    work.wait()
    p.grad.div_(world)
# %% average, if averaging is flattened
flat = torch.cat([p.grad.flatten() for p in params])
dist.all_reduce(flat)
flat /= world
for p, part in zip(params, flat.split([p.numel() for p in params])):
    p.grad.copy_(part.view_as(p))
# %% average, if averaging is gathered
for p in params:
    grads = [torch.empty_like(p.grad) for _ in range(world)]
    dist.all_gather(grads, p.grad)
    p.grad = torch.stack(grads).mean(0)


# In step() of the script's own optimizer.


# %% averaging, if averaging is in step or owned in step or orthogonal in step
class Own(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        rank, world = dist.get_rank(), dist.get_world_size()
        for group in self.param_groups:
            for i, p in enumerate(group["params"]):
                dist.all_reduce(p.grad)
                STEP_OF_PARAMETER


# %% STEP_OF_PARAMETER, if averaging is in step
velocity = self.state[p].setdefault("velocity", torch.zeros_like(p))
velocity.mul_(0.9).add_(p.grad, alpha=1 / world)
p.sub_(velocity, alpha=group["lr"])
# %% STEP_OF_PARAMETER, if averaging is owned in step
if i % world == rank:
    velocity = self.state[p].setdefault("velocity", torch.zeros_like(p))
    velocity.mul_(0.9).add_(p.grad, alpha=1 / world)
    p.sub_(velocity, alpha=group["lr"])
dist.broadcast(p.detach(), src=i % world)
# %% STEP_OF_PARAMETER, if averaging is orthogonal in step
update = p.grad / world
if i % world == rank:
    velocity = self.state[p].setdefault("velocity", torch.zeros_like(p))
    update = velocity.mul_(0.9).add_(update).clone()
    if p.ndim > 1:
        x = update.flatten(1) / (update.norm() + 1e-7)
        for _ in range(3):
            x = 1.5 * x - 0.5 * (x @ x.T) @ x
        update = x.view_as(p).contiguous()
dist.broadcast(update, src=i % world)
p.sub_(update, alpha=group["lr"])


# In hooks.


# %% averaging, if averaging is fused in backward
def average_and_step(p):
    dist.all_reduce(p.grad)
    p.grad /= dist.get_world_size()
    p.own.step()
    p.grad = None


# %% averaging, if averaging is own comm hook
def average(state, bucket):
    work = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return work.then(lambda done: done.value()[0] / dist.get_world_size())


# %% averaging, if averaging is gradient hooks
def average_gradient(p):
    dist.all_reduce(p.grad)
    p.grad /= dist.get_world_size()


# From `net` to `model`.

# %% wrap, if averaging is DDP
model = DDP(OPTIONS_OF_DDP)
# %% wrap, if averaging is DDP, static graph
model = DDP(net, static_graph=True)
# %% wrap, if averaging is DDP, bucket views
model = DDP(net, gradient_as_bucket_view=True, bucket_cap_mb=1)
# %% wrap, if averaging is own comm hook
model = DDP(net)
model.register_comm_hook(None, average)
# fmt: off
# %% wrap, if averaging is library comm hook
model = DDP(net)
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
model.register_comm_hook(None, default_hooks.allreduce_hook)
# fmt: on
# %% wrap, if averaging is ZeRO
model = DDP(net)
# %% wrap, if averaging is gradient hooks
model = net
for p in params:
    p.register_post_accumulate_grad_hook(average_gradient)
# %% wrap, if averaging is fused in backward
model = net
for p in params:
    p.own = torch.optim.SGD([p], lr=LR, momentum=0.9)
    p.register_post_accumulate_grad_hook(average_and_step)
# %% wrap, if averaging is fully_shard
mesh = init_device_mesh("cpu", (world,))
model = fully_shard(net, mesh=mesh)
params = list(model.parameters())

# Who makes the step.

# %% optimizer, if optimizer is sgd
optimizer = torch.optim.SGD(params, lr=LR, momentum=0.9)
# %% optimizer, if optimizer is sgd, weight decay
optimizer = torch.optim.SGD(params, lr=LR, momentum=0.9, nesterov=True, weight_decay=1e-4)
# %% optimizer, if optimizer is adam or two adams
optimizer = torch.optim.Adam(params, lr=LR / 10)
# %% optimizer, if optimizer is foreach
optimizer = torch.optim.Adam(params, lr=LR / 10, foreach=True)
# %% optimizer, if optimizer is adamw, groups
optimizer = torch.optim.AdamW(
    [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.ndim <= 1], "weight_decay": 0.0},
    ],
    lr=LR / 10,
)
# %% optimizer, if optimizer is rmsprop
optimizer = torch.optim.RMSprop(params, lr=LR / 10)
# %% optimizer, if optimizer is lbfgs
optimizer = torch.optim.LBFGS(params, lr=0.1, max_iter=3)
# %% optimizer, if optimizer is plain sgd
optimizer = torch.optim.SGD(params, lr=LR)
# %% optimizer, if optimizer is adagrad
optimizer = torch.optim.Adagrad(params, lr=LR / 3)
# %% optimizer, if optimizer is masters
masters = [p.detach().clone().requires_grad_() for p in params]
optimizer = torch.optim.SGD(masters, lr=LR, momentum=0.9)
# %% optimizer, if optimizer is own
optimizer = Own(params, lr=LR)
# %% optimizer, if optimizer is ZeRO adam
optimizer = ZeroRedundancyOptimizer(params, optimizer_class=torch.optim.Adam, lr=LR / 10)
# %% optimizer, if optimizer is ZeRO sgd
optimizer = ZeroRedundancyOptimizer(params, optimizer_class=torch.optim.SGD, lr=LR)
# %% optimizer, if optimizer is momentum by hand
velocity = [torch.zeros_like(p) for p in params]

# By hand, with the gradients `grads`.

# %% update, if optimizer is p -= lr * grad or autograd.grad or torch.func
for p, grad in zip(params, grads):
    p -= lr * grad
# %% update, if optimizer is p.data.add_
for p, grad in zip(params, grads):
    p.data.add_(grad, alpha=-lr)
# %% update, if optimizer is _foreach_add_
torch._foreach_add_(params, grads, alpha=-lr)
# %% update, if optimizer is momentum by hand
for p, grad, v in zip(params, grads, velocity):
    v.mul_(0.9).add_(grad)
    p.sub_(v, alpha=lr)

# Learning rates.

# %% scheduler, if schedule is StepLR
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
# %% scheduler, if schedule is cosine
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(
    optimizer, T_max=EPOCHS * STEPS // ACCUMULATE
)
# %% scheduler, if schedule is OneCycle
scheduler = torch.optim.lr_scheduler.OneCycleLR(
    optimizer, max_lr=LR, total_steps=EPOCHS * STEPS // ACCUMULATE
)
# %% scheduler, if schedule is warm-up
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
# %% scheduler, if schedule is plateau
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)

# Clipping.

# %% clip, if clipping is norm
nn.utils.clip_grad_norm_(net.parameters(), 0.5)
# %% clip, if clipping is value
nn.utils.clip_grad_value_(net.parameters(), 0.05)
# %% clip, if clipping is by hand
norm = torch.cat([p.grad.flatten() for p in params]).norm()
for p in params:
    p.grad.mul_(torch.clamp(0.5 / (norm + 1e-6), max=1.0))
