"""Draw the pictures of the pages, in two languages, from committed results and what is computed.

python docs/pictures/draw.py
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.result_files import MACHINE, load
from benchmarks.tables.pages import find_tables
from common.options import Parser
from docs.pictures import curves, flows, formats, lessons, maps, memory, svg, timeline
from docs.pictures.chinese import CHINESE

FOLDER = Path(__file__).parent


def draw_memory() -> str:
    return memory.draw(load(MACHINE)["process_memory"])


def draw_speeds() -> str:
    return formats.draw_speeds(find_tables()["formats"].results())


def draw_losses() -> str:
    return curves.draw_losses(load("drift"))


def draw_drift() -> str:
    return curves.draw_drift(load("drift"))


def draw_timeline(model: str, *stages: str) -> str:
    """A recorded step of these stages; without stages, of all."""
    return timeline.picture(load("timeline")[model], stages)


PICTURES: dict[str, Callable[[], str]] = {
    "course": maps.draw_course,
    "step": flows.draw_step,
    "mean": lessons.draw_mean,
    "dataparallel": lessons.draw_dataparallel,
    "allreduce": lessons.draw_allreduce,
    "samples_01": partial(lessons.draw_samples, "01"),
    "samples_03": partial(lessons.draw_samples, "01", "03"),
    "padding": lessons.draw_padding,
    "buckets": lessons.draw_buckets,
    "ranks": lessons.draw_ranks,
    "formats": formats.draw_formats,
    "autocast": formats.draw_autocast,
    "speeds": draw_speeds,
    "syncbn": flows.draw_syncbn,
    "vote": flows.draw_vote,
    "levels": lessons.draw_levels,
    "memory": draw_memory,
    "convert": maps.draw_convert,
    "drift": draw_drift,
    "losses": draw_losses,
    "scaling": curves.draw_scaling,
    "timeline": partial(draw_timeline, "net-bn"),
    "timeline_01": partial(draw_timeline, "net-bn", "01"),
    "timeline_02": partial(draw_timeline, "net-bn", "02"),
    "timeline_03": partial(draw_timeline, "net-bn", "03"),
    "timeline_04": partial(draw_timeline, "net-bn", "04"),
    "timeline_05": partial(draw_timeline, "net-bn", "05"),
    "timeline_resnet18": partial(draw_timeline, "resnet18", "03", "04"),
}


LANGUAGES = {"": svg.ENGLISH, "zh": CHINESE}  # by folder


def path_of(name: str, folder: str = "") -> Path:
    return FOLDER / folder / f"{name}.svg"


def draw(name: str, folder: str = "") -> str:
    """Draw a picture in the language of the folder."""
    with svg.speaking(LANGUAGES[folder]):
        return PICTURES[name]()


if __name__ == "__main__":
    Parser(__doc__).parse_args()
    for folder in LANGUAGES:
        path_of("", folder).parent.mkdir(exist_ok=True)
        for name in PICTURES:
            path_of(name, folder).write_text(draw(name, folder))
    print(f"wrote {len(PICTURES)} pictures in {len(LANGUAGES)} languages")
