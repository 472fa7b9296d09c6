"""Exercise survive: save a checkpoint so that a full disk does not destroy the one before.

As it stands, torch.save empties the old file first. If the disk is full, the new file is cut off
and the old one is gone. After an error, the old file should be whole, and the caller should get the
error. Fix safe_save, then type: make exercise STAGE=survive
"""

from pathlib import Path

import torch


def safe_save(state: dict, path: Path) -> None:
    """Save the state at this path."""
    torch.save(state, path)
