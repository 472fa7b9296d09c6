"""Choose the parts of a script from a seed, and exclude combinations that do not work.

The order of options and draws must not change, or a seed makes another script.
"""

import random
from dataclasses import dataclass
from typing import Any

from evidence.generated.cells import cells, texts

TASKS = (
    *("points", "words", "contrastive", "images", "detection", "diffusion", "bags", "distill"),
    *("vae", "ctc", "mixup", "moco", "gan", "sparse", "complex"),
)
# How the ranks average: after backward by hand, with DDP, or elsewhere.
BY_HAND = ("all_reduce", "all_reduce, sum", "all_reduce, async", "flattened", "gathered")
WITH_DDP = (
    *("DDP", "DDP, static graph", "DDP, bucket views"),
    *("own comm hook", "library comm hook", "ZeRO"),
)
IN_STEP = ("in step", "owned in step", "orthogonal in step")  # by the script's own optimizer
ELSEWHERE = (*IN_STEP, "fused in backward", "weights after step")
# Who makes the step: an optimizer, or the script itself.
USUAL = (
    *("sgd", "sgd, weight decay", "adam", "foreach", "adamw, groups", "rmsprop"),
    *("plain sgd", "adagrad"),
)
UPDATES = ("p -= lr * grad", "p.data.add_", "_foreach_add_", "momentum by hand")
OF_AUTOGRAD = ("autograd.grad", "torch.func")  # gradients without p.grad
NO_MOMENTUM = ("adamw, groups", "rmsprop", "ZeRO adam", "ZeRO sgd", "plain sgd", "adagrad", "own")
SCHEDULES = ("StepLR", "cosine", "OneCycle", "warm-up", "plateau")
CLIPS = ("norm", "value", "by hand")
# How a rank gets its samples; the last ones have no loader.
LOADERS = (
    *("DistributedSampler", "unshuffled", "drop_last", "iterator over epochs", "strided subset"),
    *("block of each rank", "loader made each epoch", "stream", "own sampler", "batch sampler"),
    *("own generator", "batch_size=None"),
)
INDEXED = ("order[rank::world]", "order[i : i + B]")
OF_TENSORS = ("own generator", "batch_size=None", *INDEXED)
LAUNCHERS = ("functions", "Trainer", "main", "module")
WORKERS = ("0", "1", "2", "1, persistent", "2, prefetch")


@dataclass
class Facts:
    """The facts about a task that the rules need."""

    logged: str = "loss.detach()"
    tensors: str = ""  # the data set's tensors, if its samples are nothing but rows of them
    draws: bool = False
    batchnorm: bool = False
    own_state: bool = False  # state outside of the model, such as a teacher or a queue
    frozen: bool = False
    fixed_batch: bool = False  # the batches must not vary
    divides: bool = False  # the loss is divided by a count of all ranks, times their number
    gan: bool = False  # two models and two optimizers
    layout: str = ""  # a parameter's ("complex") or its gradient's ("sparse"), if not all know it
    functional: bool = False  # torch.func may differentiate it
    is_evaluated: bool = False


class Choices:
    """The choices that are drawn from one seed, by name."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.made: dict[str, str] = {}
        self.facts = self.choose_task(TASKS[seed % len(TASKS)])
        # Spawned ranks import torch again, which takes longer than the whole run otherwise.
        styles = ["spawn"] if self.random.random() < 0.05 else LAUNCHERS
        self.choose("launcher", *styles)
        self.choose_step_of_gan() if self.facts.gan else self.choose_step()
        self.choose_loader()
        self.random.seed(f"{seed} after the data")
        self.choose_rest()

    def choose(self, name: str, *options: str) -> str:
        self.made[name] = self.random.choice(options)
        return self.made[name]

    def choose_task(self, task: str) -> Facts:
        self.made["task"] = task
        for cell in cells(task):
            if cell.name == "choices" and cell.holds(self.made):
                for name, options in cell.assigned.items():
                    if isinstance(options, str):
                        self.made[name.replace("_", " ")] = options
                    else:
                        self.choose(name.replace("_", " "), *options)
        facts: dict[str, Any] = {}
        for cell in cells(task):
            if cell.name == "facts" and cell.holds(self.made):
                facts |= cell.assigned
        return Facts(**facts, is_evaluated=bool(texts(task, "evaluate", self.made)))

    # The step

    def choose_step_of_gan(self) -> None:
        self.choose("averaging", "DDP", "all_reduce")
        self.made |= {"optimizer": "two adams", "precision": "float32", "accumulation": "1"}
        self.made |= {"schedule": "none", "clipping": "none", "evaluation": "none"}
        self.choose("saving", "none", "rank 0")

    def choose_step(self) -> None:
        averaging = self.choose("averaging", *self.averagings())
        optimizer = self.choose("optimizer", *self.optimizers(averaging))
        self.choose("precision", *self.precisions(averaging, optimizer))
        steps_once = averaging in ("gradient hooks", "fused in backward", "DDP, static graph")
        once = steps_once or optimizer in ("lbfgs", *OF_AUTOGRAD)
        self.choose("accumulation", *(["1"] if once else ["1", "1", "1", "2", "4", "8"]))
        evaluation = self.choose("evaluation", *self.evaluations(averaging))
        self.choose("schedule", *self.schedules(optimizer, evaluation))
        self.choose("clipping", *self.clips(averaging, optimizer))
        self.choose("saving", *(["none"] if averaging == "fully_shard" else ["none", "rank 0"]))

    def averagings(self) -> list[str]:
        facts = self.facts
        if facts.layout == "sparse":
            return ["DDP", "all_reduce", "in step"]
        if facts.layout == "complex":
            elsewhere = [kind for kind in ELSEWHERE if "orthogonal" not in kind]
            return [*(kind for kind in BY_HAND if kind != "flattened"), *elsewhere]
        by_hand = (*BY_HAND, "gradient hooks")
        often = ["DDP", "DDP", *(by_hand[:2] * 4 if facts.functional else [])]
        is_sharded = not facts.batchnorm and not facts.own_state and not facts.frozen
        shards = ["fully_shard"] * 2 if is_sharded else []
        return [*WITH_DDP, *often, *by_hand, *ELSEWHERE, *shards]

    def optimizers(self, averaging: str) -> list[str]:
        facts = self.facts
        if averaging in IN_STEP:
            return ["own"]
        if averaging == "fused in backward":
            return ["one for each parameter"]
        if averaging == "weights after step":  # equal if the step is linear in the gradient
            return ["sgd", "plain sgd", "sgd, weight decay"]
        if averaging == "fully_shard":
            return ["sgd", "adam", "adamw, groups"] * 2
        autograd = list(OF_AUTOGRAD[:1]) if averaging in BY_HAND[:2] else []
        if facts.layout == "sparse":
            return ["plain sgd", "adagrad"]
        if facts.layout == "complex":
            return ["sgd", "sgd", "adam", "foreach", "masters", *UPDATES, *autograd]
        if averaging == "ZeRO":
            return ["ZeRO adam", "ZeRO sgd"] * 2
        is_steady = not facts.draws and not facts.own_state and not facts.batchnorm
        optimizers = [*USUAL, *(["lbfgs"] if is_steady and "DDP" in averaging else [])]
        functional = list(OF_AUTOGRAD[1:]) if autograd and facts.functional else []
        rest = [*UPDATES, "masters", "masters", *autograd * 3, *functional * 16]
        return [*optimizers, *optimizers, *rest]

    def precisions(self, averaging: str, optimizer: str) -> list[str]:
        if self.facts.layout or optimizer == "torch.func":
            return ["float32"]
        is_unscaled = averaging in ("fully_shard", "ZeRO", "all_reduce, sum", *ELSEWHERE)
        if is_unscaled or optimizer in (*UPDATES, *OF_AUTOGRAD, "lbfgs", "masters"):
            return ["float32", "float32", "autocast"]
        return ["float32", "float32", "autocast", "scaler", "autocast with scaler"]

    def evaluations(self, averaging: str) -> list[str]:
        if not self.facts.is_evaluated:
            return ["none"]
        by_one = [] if averaging == "fully_shard" else ["rank 0", "rank 0, broadcast"]
        return ["strided", "strided", "none", *by_one]

    def schedules(self, optimizer: str, evaluation: str) -> list[str]:
        if optimizer in (*UPDATES, *OF_AUTOGRAD, "lbfgs", "one for each parameter"):
            return ["none", "none"]
        without = []
        if evaluation in ("none", "rank 0") or self.facts.batchnorm:
            without.append("plateau")
        if optimizer in NO_MOMENTUM:
            without.append("OneCycle")
        return ["none", "none", *(each for each in SCHEDULES if each not in without)]

    def clips(self, averaging: str, optimizer: str) -> list[str]:
        if averaging == "fully_shard":
            return ["none", "norm"]
        if optimizer in ("lbfgs", *OF_AUTOGRAD) or averaging in ELSEWHERE or self.facts.layout:
            return ["none"]
        return ["none", "none", *CLIPS]

    # The samples

    def choose_loader(self) -> None:
        cuts_itself = bool(self.facts.tensors) or self.facts.fixed_batch  # the global batch
        per_rank = self.choose("batch size", "global", "per rank") == "per rank"
        styles = [*LOADERS, *INDEXED]
        if not self.facts.tensors:
            styles = [style for style in styles if style not in OF_TENSORS]
        if self.facts.fixed_batch:
            styles.remove("batch sampler")
        style = self.choose("data", *styles)
        workers = self.choose("workers", "0", "0", *self.workers(style))
        is_pinned = self.random.random() < 0.2 and workers != "0"
        self.made["pin memory"] = "said" if is_pinned else "not said"
        self.made["rank"] = "said" if self.random.random() < 0.5 else "asked for"
        is_cut = cuts_itself or style == "batch sampler"
        if per_rank and is_cut:
            self.made["batch size"] = "global"

    def workers(self, style: str) -> list[str]:
        is_unguarded = self.made["launcher"] == "module"  # workers would run the module again
        if is_unguarded or style in ("own generator", *INDEXED):
            return ["0"]
        if style in ("stream", "batch_size=None", "own sampler", "batch sampler"):
            # Persistent workers see no new epoch.
            return [each for each in WORKERS if "persistent" not in each]
        return [*WORKERS]

    # The rest

    def choose_rest(self) -> None:
        made = self.made
        if made["evaluation"] == "strided":
            self.choose("test loader", "Subset", "sampler")
        ways = ["alike"] if made["averaging"] == "fully_shard" else ["alike", "by rank, broadcast"]
        self.choose("weights", *ways)
        if self.facts.gan and made["averaging"] != "DDP":
            made["weights"] = "alike"
        if made["averaging"] == "DDP":
            options = "net", "net, find_unused_parameters=False", "net, broadcast_buffers=False"
            self.choose("DDP", *options)
        if made["optimizer"] in (*UPDATES, *OF_AUTOGRAD):
            self.choose("lr by hand", "LR", "LR * 0.9**epoch")
        self.choose("join", "get_rank", "environment")
        if made["launcher"] == "spawn":
            self.choose("ranks from", "option", "environment")
