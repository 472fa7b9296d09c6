"""What the run of all ranks says by itself: the sentences, in the order of the judges."""

from enum import unique

from prove.judge.reasons import Heading, Reason

APART = "{apart} of {tensors} tensors differ between the ranks {when}: {names} ({at})"
APART_IN_STEP = "the ranks step with different gradients in {apart} of {tensors} tensors: {names} "
APART_IN_STEP += "(step {step} at {at})"
WAS_FROZEN = "frozen when DDP was made ({wrapped_at}), so DDP does not average it"
WRAP_AGAIN = "wrap the model in DDP again after unfreezing"
OVER_ALL_RANKS = (
    "take the mean over all ranks: all_reduce sums and counts, then divide; meant so only if each "
    "rank is to be normalized by itself"
)


@unique
class RunReason(Reason):
    CLIPS_SCALED = (
        "gradients are clipped while they are multiplied by the loss scale ({at})",
        "scaler.unscale_(optimizer) before clipping",
    )
    CLIPS_UNSCALED = "of gradients that are not scaled"
    ZERO_GRADIENTS = (
        "all gradients are exactly zero in all steps ({at})",
        "the loss does not depend on the weights: is it a cross-entropy over one class?",
    )
    GRADIENTS_NOT_FINITE = (
        "the gradients of {steps:n step} are not finite, first those of step {step} ({at}, ranks "
        "{ranks}): such numbers cannot be compared",
        "find the batch: torch.autograd.set_detect_anomaly(True); and all ranks must leave out "
        "the same step",
        Heading.NAN,
    )
    PARAMETERS_HELD = "it holds the {parameters} parameters of the model"
    NO_PARAMETER_HELD = (
        "no optimizer ({optimizers}) holds a parameter of the model that DDP wraps at {at}",
        "make the optimizer from ddp.parameters(), after wrapping",
    )
    PARAMETERS_MISSING = (
        "{missing} of {parameters} parameters are in no optimizer: {names}",
        "add them, or requires_grad_(False)",
    )
    PARAMETERS_OF_SOME = (
        "{names} got a gradient on rank {ranks} only (step {step} at {at}): for DDP, it is zero on "
        "the others, and the mean is over all ranks",
        "let all ranks use the same parameters in a step: what is decided for a batch must be "
        "decided alike; meant so if the loss divides by a number of all ranks",
        Heading.LOSS,
    )
    PARAMETERS_UNUSED = (
        "no gradient ever reached {names}",
        "use them, or freeze them",
        Heading.UNUSED,
    )
    LOSS_NOT_DIVIDED = (
        "{backwards} backwards at {at} add up, and the loss is not divided",
        "loss / {backwards}; meant so only if the loss is a sum, or the rate is divided",
    )
    MODEL_IS_DIVIDED = (
        "the ranks hold different parts of the model, or work in groups",
        "prove it without model-parallel layers and groups; or let the row one rank decide",
    )
    WEIGHTS_ALIKE = "the same on all ranks after {steps:n step}"
    WEIGHTS_AVERAGED_LATER = (
        f"{APART}, and agree again later",
        "meant so only for local SGD, which averages weights now and then",
        Heading.LOSS,
    )
    WEIGHTS_OUTSIDE_DDP = (
        f"{APART}; DDP does not hold {{outside}}",
        "wrap one module that holds all trained parameters",
        Heading.LOSS,
    )
    WEIGHTS_UNFROZEN = (
        f"{APART}; {WAS_FROZEN}",
        WRAP_AGAIN,
        Heading.LOSS,
    )
    WEIGHTS_DIFFER = (
        APART,
        "DDP, or broadcast all weights once and average all gradients in each step",
        Heading.LOSS,
    )
    LOCAL_STEPS = (
        "each rank steps with its own: weights are averaged, it seems",
        "see the rows weights and one rank, which compare what is averaged",
    )
    GRADIENTS_UNFROZEN = (
        f"{APART_IN_STEP}; {WAS_FROZEN}",
        WRAP_AGAIN,
        Heading.LOSS,
    )
    GRADIENTS_DIFFER = (
        APART_IN_STEP,
        "forward and backward through DDP; no_sync for all micro-batches but the last",
        Heading.LOSS,
    )
    GRADIENTS_KEPT = (
        "at {steps} steps, p.grad still held the gradient of the step before ({at})",
        "optimizer.zero_grad() in each step",
        Heading.NAN,
    )
    IMAGINARY_LOST = (
        "the gradient of {names} is complex after backward, and real in the step: its imaginary "
        "part is zero (step {step} at {at})",
        "average both parts: all_reduce of the complex tensor or of torch.view_as_real(grad)",
        Heading.LOSS,
    )
    GRADIENT_OF_SOME = (
        "every rank steps with what rank {ranks} has computed alone, not with the mean over all "
        "ranks (step {step} at {at})",
        "average over all ranks; who receives into p.grad.data or a view of it overwrites p.grad: "
        "receive into a tensor of its own",
        Heading.LOSS,
    )
    WEIGHTED_SUM = (
        "a weighted sum over the ranks, which count {shares:each .3g} times (step {step} at {at})",
        "the mean; meant so if these are the shares of the samples or tokens of each rank",
        Heading.LOSS,
    )
    NO_MULTIPLE_OF_MEAN = (
        "no multiple of the mean over the ranks: changed between backward and step?"
    )
    MEAN_OF_RANKS = "the mean over the ranks, in {steps:n step}"
    CLIPPED = "clipped before the step: {factor:.4g} times the mean (step {step} at {at})"
    CLIPPED_APART = (
        "clipped before the step ({at}), by value or part by part: no multiple of the mean over "
        "the ranks is left to compare",
        "to see the mean here, prove it with so high a limit that nothing is clipped",
    )
    SUM_OF_RANKS = (
        "the sum over the ranks, not their mean (step {step} at {at})",
        "divide by the number of ranks; meant so if the loss is divided by it already",
    )
    CHANGED_BEFORE_STEP = (
        "changed before the step: {factor:.4g} times the mean (step {step} at {at})"
    )
    AROUND_DDP = (
        "{around} training forwards go around DDP at {places}, {through} through it",
        "call ddp(x), not ddp.module(x) or model(x)",
        Heading.LOSS,
    )
    THROUGH_DDP = "{forwards:n training forward}"
    NO_DDP = (
        "no DDP",
        "if gradients are averaged by hand, the rows averaged gradients and weights judge it",
    )
    RATES_BY_RANK = (
        "{rates!s} on the ranks {when}",
        "the same schedule on all ranks: average what it depends on first",
        Heading.LOSS,
    )
    METRICS_BY_RANK = (
        "{values:each .4g} on the ranks go into ReduceLROnPlateau, after {steps:n step} ({at})",
        "average the metric over the ranks first, so that all lower the rate in the same epoch",
        Heading.LOSS,
    )
    METRICS_ALIKE = "the ranks give ReduceLROnPlateau the same {numbers:n number}"
    LOSS_SCALES_BY_RANK = (
        "{scales!s} on the ranks {when}",
        "the same GradScaler settings on all ranks",
    )
    BUFFERS_DIFFER = (
        "{apart} of {buffers} differ between the ranks at {when}: {names}",
        "broadcast them from rank 0 before evaluation, or SyncBatchNorm",
        Heading.BUFFERS,
    )
    BUFFERS_OUTSIDE_DDP = (
        "{module}, which is in no DDP model, has other buffers on each rank at the end of "
        "training: {names}",
        "all_reduce sums and counts of what they are made from; meant so only if each rank keeps "
        "its own on purpose",
        Heading.BUFFERS,
    )
    CENTERED_BY_RANK = (
        "the numbers that each rank makes a tensor of at {at} have mean 0: it has normalized them "
        "by themselves",
        OVER_ALL_RANKS,
        Heading.LOSS,
    )
    STATISTICS_BY_RANK = (
        "the loss depends on the {name} at {at}, which is that of the samples of each rank: "
        "{values:each .4g}",
        OVER_ALL_RANKS,
        Heading.LOSS,
    )
    EVALUATED_MODELS_DIFFER = (
        "{module} is not the same on all ranks: {apart} of its {tensors} tensors differ after "
        "{steps:n step}, among them {names}",
        "update a copy of the model on every rank, or broadcast it before it is evaluated; meant "
        "so only if each rank has a model of its own",
        Heading.BUFFERS,
    )
    EVALUATED_BUFFERS_DIFFER = (
        "{module} has other buffers on each rank: {apart} of its {tensors} tensors differ after "
        "{steps:n step}, among them {names}",
        "broadcast them from rank 0 before evaluation, or SyncBatchNorm",
        Heading.BUFFERS,
    )
    EVALUATED_MODELS_ALIKE = "{modules}: the same on all ranks"
    BUFFERS_ALIKE = "the same on all ranks at {when}"
