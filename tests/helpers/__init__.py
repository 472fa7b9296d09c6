"""What several tests share. An import says what the fork server of their ranks begins with."""

import torch

from local_ranks.ranks import PROCESS_DEFAULTS

PRELOADED = [  # what the fork server preloads
    "PIL.Image",
    "common.checkpoint",
    "common.models",
    "ipykernel.kernelapp",
    "matplotlib.pyplot",
    "pycocotools.cocoeval",
    "prove.watch.observe",
    "prove.prover",
    "pytest",
    "tabulate",
    "tests.helpers.preload",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torchvision",
    "torchvision.transforms.v2",
]
PROCESS_DEFAULTS.preloaded = PRELOADED
PROCESS_DEFAULTS.context()  # start the fork server now: the first test may be one of a package
torch.set_num_threads(1)  # as every rank has: two tests that run side by side have two cores
