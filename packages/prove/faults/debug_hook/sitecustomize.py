"""Lets TORCH_DISTRIBUTED_DEBUG=DETAIL run on CPUs.

In torch 2.14, DDP's constructor ends in a segmentation fault there (gloo, no GPU) when it logs how
it was made. Only this log is left out; every check of DETAIL is as it was.
"""

import torch

logger = torch._C._distributed_c10d.Logger
logger.set_construction_data_and_log = lambda *_: None
