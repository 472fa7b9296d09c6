"""Mistakes of the training as a whole, and what looks like a mistake and is none: each is planted
alone in one of right_scripts.

A mistake of which one check speaks stands with this check, as PLANTED.
"""

from dataclasses import replace
from pathlib import Path

from evidence.case import Case
from evidence.changes import apply_diff, replace_once
from evidence.run_prove import RIGHT, TORCHRUN, WARNING, WRONG
from prove.checks import CHECKS
from prove.checks.mistake import (
    AVERAGE,
    LOADING,
    LOSS,
    NO_DDP,
    NO_SET_EPOCH,
    SAMPLER,
    STEP,
    Mistake,
    accumulate,
    amp,
    iterable,
    own_step,
    plain,
)

SCRIPTS = Path(__file__).parent / "right_scripts"
RANKS = (1, 2, 3)  # numbers of ranks on which the five right scripts are judged
ONE_GPU = (  # turns plain.py into its original for one GPU
    ('    dist.init_process_group("gloo")\n', ""),
    ("dist.get_rank(), dist.get_world_size()", "0, 1"),
    ("DDP(build_model())", "build_model()"),
    ("    sampler = DistributedSampler(train_set, seed=0)\n", ""),
    ("sampler=sampler", "shuffle=True"),
    NO_SET_EPOCH,
    ("        dist.all_reduce(total)\n", ""),
    ("    dist.all_reduce(totals)\n", ""),
    ("evaluate(ddp.module,", "evaluate(ddp,"),
    ("ddp.module.state_dict()", "ddp.state_dict()"),
    ("    dist.destroy_process_group()\n", ""),
)


def converted(mistake: Mistake, *changes: tuple[str, str]) -> Mistake:
    """Make a mistake whose script is compared with an original; change both scripts."""
    all_changes = (*mistake.changes, *changes)
    return replace(mistake, changes=all_changes, original=(*ONE_GPU, *changes))


def variant(name: str, mistake: Mistake) -> Mistake:
    """Plant a mistake in a variant of own_step.py, which own_step.NAME.diff makes."""
    return replace(mistake, script=f"{mistake.script}.{name}")


SUM = "            for p in ddp.parameters():\n                dist.all_reduce(p.grad)\n"
EVALUATION_LOADER = "DataLoader(shard, batch_size=8)"
STOPS_EARLY = (
    "        totals[2] += len(labels)\n",
    "        totals[2] += len(labels)\n        if totals[2] == 8:\n            break\n",
)
NO_GRAD = "@torch.no_grad()\n"
LAYERS = "nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, CLASSES)"
ATTENTION = "nn.Unflatten(1, (2, 3)), nn.TransformerEncoderLayer(3, 1, 8), nn.Flatten(), "
ATTENTION += "nn.Linear(6, CLASSES)"
SGD = "torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)"
ADAM = (SGD, "torch.optim.Adam(ddp.parameters(), lr=0.01, weight_decay=0.03)")
SHRINK = "            for p in ddp.parameters():\n                p.data *= 0.9 ** world_size\n"
A_REST = ("SAMPLES, TEST_SAMPLES, CLASSES = 96", "SAMPLES, TEST_SAMPLES, CLASSES = 100")

IN_STEP = "                average(p.grad)\n"
NO_AVERAGE = (IN_STEP, "")

MISTAKES = [
    # Differences from the original.
    converted(plain("drop_last, which the original has not", WARNING, "the original's epoch",
                    (LOADING, LOADING[:-1] + ", drop_last=True)")), A_REST),
    converted(plain("each rank keeps the original's batch size", WARNING, "the original's epoch",
                    (LOADING, "batch_size=12, sampler=sampler)"))),
    # The mean over the ranks.
    plain("gradients are summed by hand", WRONG, "one rank", *NO_DDP, (STEP, SUM + STEP)),
    plain("gradients are divided once more after DDP", WRONG, "one rank",
          (STEP, "            for p in ddp.parameters():\n                p.grad /= world_size\n" + STEP)),
    plain("gradients are summed once more after DDP", WRONG, "one rank", (STEP, SUM + STEP)),
    plain("after each step of Adam, weights shrink once per rank", WRONG, "one rank",
          ADAM, (STEP, STEP + SHRINK)),
    # The loss.
    plain("a sum as the loss", WRONG, "one rank",
          (LOSS, "F.cross_entropy(ddp(points), labels, reduction='sum')")),
    plain("the loss is divided by the number of ranks", WRONG, "one rank",
          (LOSS, LOSS + " / world_size")),
    plain("class weights: a local normalizer", WRONG, "one rank",
          (LOSS, "F.cross_entropy(ddp(points), labels, weight=torch.tensor([1.0, 3.0, 9.0]))")),
    plain("a mean over the chosen samples of a rank", WRONG, "one rank",
          (LOSS, "F.cross_entropy(ddp(points), labels, reduction='none')[points[:, 0] > 0].mean()")),
    plain("class weights, and random numbers without an effect", WRONG, "one rank",
          (LOSS, "F.cross_entropy(ddp(points), labels + 0 * torch.randint(9, (1,)), weight=torch.tensor([1.0, 3.0, 9.0]))")),
    plain("attention that takes the batch for the sequence", WRONG, "one rank",
          (LAYERS, ATTENTION)),
    accumulate("divided by the words of one rank", WRONG, "one rank",
               ("            dist.all_reduce(words)  # the words of all ranks: what the loss is divided by\n", ""),
               ("loss * world_size / words", "loss / words")),
    accumulate("divided by the words, but not multiplied by the ranks", WRONG, "one rank",
               ("loss * world_size / words", "loss / words")),
    accumulate("each rank clips its own gradient", WRONG, "one rank",
               ("    ddp = DDP(model)\n", "    ddp = model\n"),
               ("nullcontext() if last else ddp.no_sync()", "nullcontext()"),
               ("clip_grad_norm_(ddp.parameters(), 0.5)\n",
                "clip_grad_norm_(ddp.parameters(), 0.1)\n" + AVERAGE)),
    iterable("a contrastive loss over the local batch", WRONG, "one rank",
             ("map(all_rows, ddp(pairs))", "ddp(pairs)"), ("(loss * world_size)", "loss")),
    iterable("rows of all ranks, but not multiplied by the ranks", WRONG, "one rank",
             ("(loss * world_size)", "loss")),
    # Learning rates.
    plain("the scheduler is stepped once per rank", WARNING, "schedule",
          ("        scheduler.step()\n", "        for _ in range(world_size):\n            scheduler.step()\n")),
    plain("the learning rate depends on the number of ranks", WARNING, "schedule",
          ("lr=0.1", "lr=0.1 * world_size")),
    accumulate("the warm-up depends on the number of ranks", WARNING, "schedule",
               ("total_iters=4", "total_iters=4 * world_size")),
    # Printed numbers and BatchNorm.
    plain("accuracy is divided by the length of a shard", WARNING, "printed numbers",
          ("correct / samples", "correct / len(shard)")),
    plain("the loss of one rank is printed", WARNING, "printed numbers",
          ("        dist.all_reduce(total)\n", "")),
    amp("BatchNorm over a small local batch", WARNING, "batchnorm",
        ("nn.BatchNorm2d(4)", "nn.BatchNorm1d(4)"),
        ("F.relu(self.norm(self.conv(x))).mean((2, 3))", "F.relu(self.norm(self.conv(x).mean((2, 3))))")),
    # Steps that the script makes itself.
    own_step("the step sums and does not average", WRONG, "one rank",
             ("    tensor /= dist.get_world_size()\n", "")),
    own_step("the step takes the gradient of rank 0", WRONG, "one rank",
             (IN_STEP, "                dist.broadcast(p.grad, 0)\n")),
    own_step("a sum, which Adam hides in the weights", WARNING, "one rank",
             ("    tensor /= dist.get_world_size()\n", ""),
             ("                p -= group",
              "                size = self.state[p].setdefault('size', torch.zeros_like(p))\n"
              "                size.mul_(0.99).add_(p.grad ** 2)\n"
              "                momentum = momentum / (size.sqrt() + 1e-12)\n"
              "                p -= group")),
    own_step("rank 0 counts more", WRONG, "one rank", NO_AVERAGE,
             ("            loss.backward()\n",
              "            loss.backward()\n"
              "            for p in params:\n"
              "                p.grad *= 1.5 - rank\n"
              "                average(p.grad)\n")),
    variant("masters", own_step(
        "masters are stepped by each rank for itself", WRONG, "weights",
        ("            average(flat.grad)\n", ""))),
    variant("masters", own_step(
        "masters of half the gradient", WRONG, "one rank",
        ("average(flat.grad)", "average(flat.grad.div_(world_size))"))),
    variant("torch_func", own_step(
        "torch.func without an average", WRONG, "weights", ("average(grad)", "pass"))),
    variant("torch_func", own_step(
        "torch.func with a sum", WRONG, "one rank", ("    tensor /= dist.get_world_size()\n", ""))),
    variant("in_backward", own_step(
        "steps in backward, without an average", WRONG, "weights",
        ("    def step_now(p):\n        average(p.grad)\n", "    def step_now(p):\n"))),
    variant("complex", own_step(
        "real parts are averaged, imaginary ones are not", WRONG, "weights",
        (IN_STEP, "                real = p.grad.real.contiguous()\n"
                  "                average(real)\n"
                  "                p.grad = torch.complex(real, p.grad.imag)\n"))),
]  # fmt: skip

# Changes that look like mistakes but are right: no row may be WRONG, and the named check is right.
HARMLESS = [
    plain("a group of all ranks comes and goes", RIGHT, "one rank",
          ("    torch.manual_seed(0)\n", "    torch.manual_seed(0)\n    group = dist.new_group()\n"
           "    dist.barrier(group)\n    dist.destroy_process_group(group)\n")),
    plain("batches are taken from one iterator, one by one", RIGHT, "one rank",
          ("        for points, labels in loader:\n",
           "        batches = iter(loader)\n        for _ in range(8):\n            points, labels = next(batches)\n")),
    plain("the last samples are evaluated by all ranks, from a second loader", RIGHT, "evaluation",
          ("    shard = Subset(dataset, range(rank, len(dataset), world_size))\n",
           "    sampler = DistributedSampler(dataset, shuffle=False, drop_last=True)\n"
           "    rest = Subset(dataset, range(len(sampler) * world_size, len(dataset)))\n"),
          (EVALUATION_LOADER, "DataLoader(dataset, batch_size=8, sampler=sampler)"),
          ("    dist.all_reduce(totals)\n",
           "    dist.all_reduce(totals)\n    for points, labels in DataLoader(rest, batch_size=8):\n"
           "        totals += torch.tensor([F.cross_entropy(model(points), labels, reduction='sum'),\n"
           "                                (model(points).argmax(1) == labels).sum(), len(labels)])\n")),
    amp("two micro-batches, clipped, with a loss scale and fp16", RIGHT, "one rank",
        ("            with torch.autocast(\"cpu\", torch.bfloat16):\n                loss = F.cross_entropy(ddp(pictures), labels)\n            scaler.scale(loss).backward()\n",
         "            for x, y in zip(pictures.chunk(2), labels.chunk(2)):\n"
         "                with torch.autocast(\"cpu\", torch.float16):\n"
         "                    loss = F.cross_entropy(ddp(x), y) / 2\n"
         "                scaler.scale(loss).backward()\n"),
        ("clip_grad_norm_(ddp.parameters(), 1.0)", "clip_grad_norm_(ddp.parameters(), 0.01)")),
    plain("a one-cycle schedule, stepped once per rank, changes the momentum too", RIGHT, "one rank",
          ("StepLR(optimizer, step_size=1, gamma=0.5)", "OneCycleLR(optimizer, max_lr=0.1, total_steps=400)"),
          ("            optimizer.step()\n",
           "            optimizer.step()\n            for _ in range(world_size):\n                scheduler.step()\n"),
          ("        scheduler.step()\n        dist", "        dist")),
    plain("the samples of a batch lie along its second dimension", RIGHT, "",
          ("batch_size=12 // world_size, sampler=sampler)",
           "batch_size=24 // world_size, sampler=sampler,\n"
           "                        collate_fn=lambda samples: (torch.stack([x for x, _ in samples], 1),\n"
           "                                                    torch.tensor([y for _, y in samples])))"),
          (LOSS, "F.cross_entropy(ddp(points.T), labels)")),
    plain("a sum as the loss, with a batch size per rank", RIGHT, "",
          ("batch_size=12 // world_size", "batch_size=6"),
          (LOSS, "F.cross_entropy(ddp(points), labels, reduction='sum')")),
    plain("all ranks load one batch, each with its noise, and take their rows", RIGHT, "",
          (SAMPLER, "sampler = DistributedSampler(train_set, 1, 0, seed=0)"),
          ("batch_size=12 // world_size", "batch_size=12"),
          ("            loss = F", "            points, labels = points[rank::world_size], labels[rank::world_size]\n"
           "            loss = F")),
    plain("all ranks load one batch, and each takes its rows", RIGHT, "",
          ("Points(SAMPLES, 0.1)", "Points(SAMPLES, 0.0)"),
          (SAMPLER, "sampler = DistributedSampler(train_set, 1, 0, seed=0)"),
          ("batch_size=12 // world_size", "batch_size=12"),
          ("            loss = F", "            points, labels = points[rank::world_size], labels[rank::world_size]\n"
           "            loss = F")),
    plain("divided by the ranks, and summed by hand", RIGHT, "", *NO_DDP,
          (LOSS, LOSS + " / world_size"), (STEP, SUM + STEP)),
    plain("weights are averaged in every second step", RIGHT, "", *NO_DDP,
          (STEP, STEP + "            turn = getattr(optimizer, 'turn', 0) + 1\n"
           "            optimizer.turn = turn\n            for p in ddp.parameters():\n"
           "                if turn % 2 == 0:\n                    dist.all_reduce(p.data)\n"
           "                    p.data /= world_size\n")),
    plain("gradients are clipped by hand", RIGHT, "",
          (STEP, "            norm = torch.stack([p.grad.norm() for p in ddp.parameters()]).norm()\n"
           "            for p in ddp.parameters():\n                p.grad *= min(1, 0.1 / norm)\n" + STEP)),
    plain("gradients are limited by a hook", RIGHT, "",
          ("    optimizer = torch", "    for p in ddp.parameters():\n"
           "        p.register_hook(lambda g: 2 * g)\n    optimizer = torch")),
    plain("a batch in two halves, one after the other", RIGHT, "",
          ("            loss = F.cross_entropy(ddp(points), labels)\n            optimizer.zero_grad()\n            loss.backward()\n",
           "            optimizer.zero_grad()\n            for x, y in zip(points.chunk(2), labels.chunk(2)):\n"
           "                loss = F.cross_entropy(ddp(x), y) / 2\n                loss.backward()\n")),
    plain("each rank has a data set of its own", RIGHT, "",
          ("manual_seed(size)", "manual_seed(size + 1000 * dist.get_rank())"),
          (SAMPLER, "sampler = torch.utils.data.RandomSampler(train_set)"),
          NO_SET_EPOCH),
    plain("unequal numbers of batches, and the epoch ends before", RIGHT, "",
          (SAMPLER, "sampler = range(0, 60) if rank == 0 else range(60, 96)"),
          NO_SET_EPOCH,
          (STEP, STEP + "            if total[1] == 2:\n                break\n")),
    plain("a bootstrap, drawn anew by each rank", RIGHT, "",
          (SAMPLER, "sampler = torch.utils.data.WeightedRandomSampler([1.0] * 96, 48)"),
          NO_SET_EPOCH),
    plain("noise in the step", RIGHT, "", (LOSS, "F.cross_entropy(ddp(points + torch.randn(6)), labels)")),
    plain("optimizer states are divided over the ranks", RIGHT, "one rank",
          (SGD,
           "__import__('torch.distributed.optim').distributed.optim.ZeroRedundancyOptimizer(\n"
           "        ddp.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)")),
    plain("attention over the sequence", RIGHT, "one rank",
          (LAYERS, ATTENTION.replace("1, 8)", "1, 8, batch_first=True)"))),
    plain("attention with Adam, which divides by gradients that are rounding", RIGHT, "one rank",
          (LAYERS, ATTENTION.replace("1, 8)", "1, 8, batch_first=True)")), ADAM),
    converted(plain("a rest of the epoch, as in the original", RIGHT, "the original's epoch"), A_REST),
    converted(plain("drop_last, as in the original", RIGHT, "the original's epoch"),
              A_REST, ("batch_size=12 // world_size", "batch_size=12 // world_size, drop_last=True")),
    plain("evaluation with gradients", RIGHT, "evaluation", (NO_GRAD, "")),
    plain("evaluation stops early, after the first samples", RIGHT, "evaluation",
          (EVALUATION_LOADER, "DataLoader(shard, batch_size=8 // world_size)"),
          (STOPS_EARLY[0], STOPS_EARLY[1].replace("== 8", "== 8 // world_size"))),
    plain("each rank appends to a log of its own", RIGHT, "",
          ("        scheduler.step()\n", '        scheduler.step()\n        open(f"log{rank}.txt", "w").write(".")\n')),
    accumulate("fewer micro-batches, because there are more ranks", RIGHT, "",
               ("ACCUMULATE, WORDS", "MICRO_BATCHES, WORDS"),
               ("    torch.manual_seed(0)\n", "    torch.manual_seed(0)\n    ACCUMULATE = 4 // world_size\n"),
               ("batch_size=12 // world_size", "batch_size=3"),
               ("start_factor=0.25, total_iters=4", "start_factor=1.0, total_iters=1")),
    accumulate("a batch size per rank, and a loss per word of all ranks", RIGHT, "",
               ("batch_size=12 // world_size", "batch_size=6")),
    amp("the batch of BatchNorm is that of a rank", RIGHT, "",
        ("batch_size=24 // world_size", "batch_size=4")),
    variant("masters", own_step("masters, of which the parameters are views", RIGHT, "one rank")),
    variant("torch_func", own_step("weights in a dict, and torch.func", RIGHT, "one rank")),
    variant("in_backward", own_step("steps in backward", RIGHT, "one rank")),
    own_step("weights are averaged after each step", RIGHT, "one rank", NO_AVERAGE,
             ("            optimizer.step()\n",
              "            optimizer.step()\n"
              "            for p in params:\n"
              "                average(p.data)\n")),
    variant("complex", own_step("complex weights", RIGHT, "one rank")),
    variant("sparse", own_step("a sparse gradient", RIGHT, "one rank")),
    own_step("optimizer states are divided by hand", RIGHT, "one rank",
             ('p in group["params"]:', 'number, p in enumerate(group["params"]):'),
             ('                p -= group["lr"] * momentum\n',
              "                if number % dist.get_world_size() == dist.get_rank():\n"
              '                    p -= group["lr"] * momentum\n'
              "                dist.broadcast(p, number % dist.get_world_size())\n")),
    own_step("layers that begin to train are wrapped anew", RIGHT, "one rank",
             ("    params = list(model.parameters())\n",
              "    model[0].requires_grad_(False)\n"
              "    ddp = nn.parallel.DistributedDataParallel(model)\n"
              "    params = list(model.parameters())\n"),
             ("AveragingSGD(params, lr=0.1)", "torch.optim.SGD(params, lr=0.1)"),
             ("model(x)", "ddp(x)"),
             ("        sampler.set_epoch",
              "        if epoch == 2:\n"
              "            model.requires_grad_(True)\n"
              "            ddp = nn.parallel.DistributedDataParallel(model)\n"
              "        sampler.set_epoch")),
]  # fmt: skip


def right_script(name: str) -> str:
    """Read one of the scripts that mistakes are planted into, or a variant such as own_step.masters."""
    file, _, is_variant = name.partition(".")
    script = (SCRIPTS / f"{file}.py").read_text()
    return apply_diff(script, (SCRIPTS / f"{name}.diff").read_text()) if is_variant else script


def planted_cases() -> dict[str, Case]:
    """Make a case of each mistake in its script, and of each script alone."""
    patience = "--timeout=20"
    cases = []
    of_checks = [mistake for check in CHECKS for mistake in check.planted]
    for mistake in [*MISTAKES, *of_checks, *HARMLESS]:
        script = right_script(mistake.script)
        options, files = [patience], {}
        if mistake.original:
            options.append("--original=torchrun --nproc-per-node=1 single.py")
            files["single.py"] = replace_once(script, *mistake.original)
        changed = replace_once(script, *mistake.changes)
        says = mistake.verdict, mistake.check
        cases.append(Case(mistake.name, changed, *says, options=tuple(options), files=files))
    for file in sorted(SCRIPTS.glob("*.py")):
        for ranks in RANKS:
            command = (*TORCHRUN[:-1], f"--nproc-per-node={ranks}", "train.py")
            name = f"clean {file.stem}, {ranks} ranks"
            cases.append(Case(name, file.read_text(), command=command, options=(patience,)))
    return {case.name: case for case in cases}
