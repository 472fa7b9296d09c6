"""Watch what happens between a loss and its step: GradScaler, backward, and clipping."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from prove.rank_record import Backward, Flag
from prove.watch.rank_run import RankRun, source_line, wrap

MAX_BACKWARDS = 64
LOSSES = (
    "cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div",
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "ctc_loss", "gaussian_nll_loss",
    "poisson_nll_loss", "cosine_embedding_loss", "triplet_margin_loss", "margin_ranking_loss",
)  # fmt: skip
CLIPPING = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_")


def watch_scaling(run: RankRun) -> None:
    """Watch the scaling of a loss by a GradScaler, and the clipping of gradients still scaled."""
    unscaled = False

    @wrap(torch.amp.GradScaler, "scale")
    def scale(original: Callable, self: Any, outputs: Any) -> Any:
        nonlocal unscaled
        result = original(self, outputs)
        if self.is_enabled():
            run.record.loss_scale, unscaled = self.get_scale(), False
        return result

    @wrap(torch.amp.GradScaler, "unscale_")
    def unscale(original: Callable, self: Any, optimizer: Any) -> Any:
        nonlocal unscaled
        unscaled = True
        return original(self, optimizer)

    for name in CLIPPING:

        @wrap(nn.utils, name)
        def clip(original: Callable, *args: Any, **kwargs: Any) -> Any:
            scaled = run.record.loss_scale != 1 and not unscaled
            run.flag(Flag.CLIPS_SCALED if scaled else Flag.CLIPS)
            return original(*args, **kwargs)

        setattr(nn.utils.clip_grad, name, clip)


def watch_backward(run: RankRun) -> None:
    """Watch backward, and the loss functions of torch, to name the line of the loss."""
    inside, loss_at = False, ""

    for name in LOSSES:

        @wrap(nn.functional, name)
        def loss(original: Callable, *args: Any, **kwargs: Any) -> Any:
            nonlocal loss_at
            if run.record.step_count == 0:
                loss_at = source_line()
            return original(*args, **kwargs)

    @wrap(Tensor, "backward")
    def backward(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal inside, loss_at
        if inside:  # with --cpu, a mode of torch calls this function once more
            return original(self, *args, **kwargs)
        run.models.backwards += 1
        with run.draws.paused():
            for tell in run.events.backwards:
                tell(self)
        if len(run.record.backwards) < MAX_BACKWARDS:
            run.record.backwards.append(Backward(source_line(), run.record.step_count, loss_at))
            loss_at = ""
        inside = True
        try:
            with run.draws.in_model():
                return original(self, *args, **kwargs)
        finally:
            inside = False


def install(run: RankRun) -> None:
    watch_scaling(run)
    watch_backward(run)
