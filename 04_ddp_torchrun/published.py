"""Scaling that others have published, and what the model predicts for it.

    python 04_ddp_torchrun/published.py

Each prediction uses the published rate of one GPU, the model's layers and the nominal link. Nothing
is fitted. `spread` is the same for ranks whose computing times vary by 3 %.
"""

from dataclasses import dataclass, replace
from textwrap import fill as wrap

from tabulate import tabulate

from alpha_beta import Job
from cluster import LINKS, Forecast
from common.options import Parser
from ready import fill, named

SPREAD = 0.03  # assumed, for the last column; the sources give none
EXAMPLES = "github.com/NVIDIA/DeepLearningExamples"
BENCHMARKS = "github.com/tensorflow/docs: site/en/r1/guide/performance/benchmarks.md (P100)"
HOROVOD = "horovod, docs/benchmarks.rst (512 GPUs: 128 servers of 4 Pascal GPUs, 25 Gbit/s RoCE)"


@dataclass(frozen=True)
class Curve:
    """rate: samples/s of one GPU with this local batch. efficiency: of gpus, relative to base."""

    name: str
    model: str
    batch: int
    rate: float
    gpus: int
    a_node: int
    inside: str
    between: str
    efficiency: float
    source: str
    note: str
    base: int = 1
    trees: bool = False  # NCCL has had them since 2.4 (2019)


CURVES = (
    Curve(
        *("8 H100", "resnet50", 256, 3000.0, 8, 8, "nvlink-h100", "infiniband-8x400", 0.989),
        "none found; we have seen the figure quoted",
        "The rate of one GPU is assumed too. In one node, the model finds nothing to wait for.",
        trees=True,
    ),
    Curve(
        *("8 A100, TF32", "resnet50", 256, 938.0, 8, 8, "nvlink-a100", "infiniband-200"),
        7248 / 938 / 8,
        f"{EXAMPLES}: PyTorch/Classification/ConvNets/resnet50v1.5, 938 and 7,248 img/s",
        "NVLink has time to spare. The model has no loading of data; these rates have it.",
        trees=True,
    ),
    Curve(
        *("8 A100, mixed", "resnet50", 256, 2470.0, 8, 8, "nvlink-a100", "infiniband-200"),
        16621 / 2470 / 8,
        f"{EXAMPLES}: the same table, 2,470 and 16,621 img/s",
        "The same machine and bytes, 2.6 times faster. It is not the all-reduce that holds it up.",
        trees=True,
    ),
    Curve(
        *("16 V100, mixed", "resnet50", 256, 894.41, 16, 16, "nvlink-v100", "infiniband-200"),
        13443.82 / 894.41 / 16,
        f"{EXAMPLES}: the same page as of pytorch-19.10, DGX-2, 894.41 and 13,443.82 img/s",
        "As above. We have seen 93 % quoted, without a source.",
    ),
    Curve(
        *("128 P100, TCP", "inception_v3", 64, 142.0, 128, 4, "pcie-3", "ethernet-25", 0.88),
        f"Sergeev and Del Balso, arXiv 1802.05799, figure 6; one GPU: {BENCHMARKS}",
        "TCP does not reach the nominal rate, and takes time of the CPU (arXiv 2006.10103).",
    ),
    Curve(
        *("512 P100, RoCE", "resnet101", 64, 1656.82 / 16, 512, 4, "pcie-3", "roce-25", 0.90),
        f"{HOROVOD}; one GPU: a sixteenth of the rate of 16 there, so at least that",
        "The link has time to spare. The slowest of 512 ranks does not.",
    ),
    Curve(
        *("512 P100, RoCE", "vgg16", 64, 154.0, 512, 4, "pcie-3", "roce-25", 0.68),
        f"{HOROVOD}; one GPU: {BENCHMARKS}",
        "553 MB of gradients, 9 in 10 of them ready at once: the link is the limit.",
    ),
    Curve(
        *(
            "256 P100, 1 hour",
            "resnet50",
            32,
            32 / 0.180,
            256,
            8,
            "nvlink-p100",
            "ethernet-50",
            0.90,
        ),
        "Goyal et al., arXiv 1706.02677, abstract; section 4.3: backward 120 ms, so a step of 180",
        "Against 8 GPUs. The paper reckons that 15 of the 50 Gbit/s are enough, as does the model.",
        base=8,
    ),
)


def forecast(curve: Curve) -> Forecast:
    seconds = curve.batch / curve.rate
    image = 299 if curve.model == "inception_v3" else 224
    job = Job(seconds / 3, 2 * seconds / 3, 0.0, fill(named(curve.model, image)))
    links = LINKS[curve.inside], LINKS[curve.between]
    return Forecast(job, curve.batch, curve.a_node, *links, trees=curve.trees)


def predict(curve: Curve, spread: float = 0.0) -> float:
    """The efficiency of curve.gpus, against that of curve.base."""
    found = replace(forecast(curve), spread=spread)
    return found.efficiency(curve.gpus) / found.efficiency(curve.base)


def rows() -> list[tuple[str, str, str, str, str]]:
    """Each curve: its name, model, and efficiency: published, predicted, with a spread."""
    return [
        (
            curve.name,
            curve.model,
            f"{curve.efficiency:.1%}",
            f"{predict(curve):.1%}",
            f"{predict(curve, SPREAD):.1%}",
        )
        for curve in CURVES
    ]


def main() -> None:
    heads = ("", "model", "published", "predicted", f"spread {SPREAD:.0%}")
    right = ("left", "left", "right", "right", "right")
    print(tabulate(rows(), heads, disable_numparse=True, colalign=right) + "\n")
    for curve in CURVES:
        print(wrap(f"{curve.name}, {curve.model}: {curve.note} Source: {curve.source}.", 96))


if __name__ == "__main__":
    Parser(__doc__).parse_args()
    main()
