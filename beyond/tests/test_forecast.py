"""A step on paper: what the chapters forecast, and when backward really has each gradient.

The READMEs show what other chapters print, and test_readmes.py runs them. How a forecast compares
with a measured step: see test_bench.py.
"""

import pytest
import torch
import torchvision
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from helpers.stage_files import chapter, output_of

FORECAST = "forecast --parameters=7e7 --step-ms=23 --batch-size=32 --gbit=50 --latency-us=800"
FORECAST += " --gpus=16 --gpus-per-node=4 --inside=pcie-3"
PRINTED = {  # by a chapter with these flags: rows, with one space between their cells
    "step_model": "the step takes 316 ms | 8 100 100 123 | 30 140 140 225 | 25 200 225 295 | "
    "25 280 295 366 | 10 300 366 395 | the step takes 405 ms",
    "gradient_order": "resnet50 7.8 0% | resnet50 30.0 9% | resnet50 25.0 17% | "
    "resnet50 25.3 49% | resnet50 9.3 100% | vgg16 15.6 0% | vgg16 392.0 1% | vgg16 27.0 10% | "
    "vgg16 27.0 64%",
    FORECAST: "1 32 23.0 1,391 100% computing | 8 256 105.6 2,424 22% bytes | "
    "send bf16 (bf16_compress_hook) 512 105.7 4,844 22% bytes | fewer ranks: 1 32 23.0 1,391 "
    "100% computing | send bf16, and accumulate 4 2,048 174.7 11,723 53% bytes",
    "forecast --parameters=7e7 --step-ms=23 --gpus=1": "Advice: nothing to mend: one GPU waits for "
    "no other.",
    f"{FORECAST} --gpus-per-node=1 --gbit=5": "Advice: take a faster link, or fewer ranks: 1: 1 "
    "does 1,391 samples/s, 16 do 526.",
}


@pytest.mark.parametrize("call", PRINTED)
def test_what_a_chapter_prints(call):
    """Of step_model.py, forecast.py and gradient_order.py."""
    name, *flags = call.split()
    lines = [" ".join(line.split()) for line in output_of("forecast", name, *flags).splitlines()]
    assert [row for row in PRINTED[call].split(" | ") if row not in lines] == []


CLASSIFIERS = ["vit_b_16", "swin_t", "convnext_tiny", "googlenet", "maxvit_t", "regnet_y_400mf"]


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_a_forecast_counts_every_parameter_of_a_classifier(name):
    """Attention multiplies by weights of layers that it does not call, and has some of its own.

    googlenet has classifiers of its own in the middle, which are trained too.
    """
    with torch.device("cpu" if name.startswith("regnet") else "meta"):
        options = {"init_weights": False} if name == "googlenet" else {}
        model = torchvision.models.get_model(name, **options)
    gradients = chapter("forecast", "gradient_order").gradients_of_classifier(name, 224)
    assert sum(size for size, _ in gradients) == 4 * sum(p.numel() for p in model.parameters())
    ready = [share for _, share in gradients]
    assert ready == sorted(ready)
    assert ready[-1] == 1.0


def really_ready(name: str) -> list[tuple[float, float]]:
    """(bytes, ready) of each gradient in a real backward, where torch counts multiplications."""
    with torch.device("meta"):
        model = torchvision.models.get_model(name)
        loss = model(torch.empty(2, 3, 224, 224)).sum()
    with FlopCounterMode(display=False) as counter:
        gradients = []

        def note(parameter: nn.Parameter) -> None:
            gradients.append((parameter.numel() * 4, counter.get_total_flops()))

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(note)
        loss.backward()
    return [(size, flops / counter.get_total_flops()) for size, flops in gradients]


@pytest.mark.parametrize("name", ["vit_b_16", "swin_t"])
def test_a_gradient_of_attention_is_forecast_when_backward_really_has_it(name):
    """Bytes that are ready at each tenth of backward. Queries times keys, 4 %, is left out."""

    def ready_at(share, gradients):
        return sum(size for size, ready in gradients if ready <= share)

    forecast = chapter("forecast", "gradient_order").gradients_of_classifier(name, 224)
    real = really_ready(name)
    for tenth in range(1, 10):
        expected = ready_at(tenth / 10, real)
        assert ready_at(tenth / 10, forecast) == pytest.approx(expected, rel=0.1)
