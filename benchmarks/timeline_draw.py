"""Draw one step of each recording: what each rank computes and sends, on one axis of time."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from svg import SIZE, WIDTH, Drawing

MESSAGES = ("message", "started message", "bucket")  # as timeline_record.py calls them
KINDS = ("forward", "backward", "optimizer", "waiting", "sending")
BLOCKING = ("message", "main")  # kind and thread
LEFT, RIGHT = 90, 10  # of the axis: the names of the ranks, and a margin
Step = Mapping[str, Any]  # its milliseconds, and the spans of each rank
Part = tuple[str, float, float]  # kind, begin, end


class Lane(NamedTuple):
    name: str
    height: int
    parts: Sequence[Part]


def arrivals(step: Step) -> list[float]:
    """When the last rank has come to each message; nothing where the ranks send unlike numbers."""
    begins = [sorted(s[2] for s in rank["spans"] if s[0] in MESSAGES) for rank in step["ranks"]]
    same = len({len(each) for each in begins}) == 1
    return [max(each) for each in zip(*begins, strict=True)] if same else []


def messages(rank: Mapping[str, Any], last: Sequence[float]) -> list[Part]:
    """Waiting for the last rank, or for the message before, and then sending."""
    parts: list[Part] = []
    spans = sorted((s for s in rank["spans"] if s[0] in MESSAGES), key=lambda span: span[2])
    before = 0.0
    for number, (_, _, begin, end, _) in enumerate(spans):
        starts = min(end, max(begin, before, last[number] if last else begin))
        parts += [("waiting", begin, starts), ("sending", starts, end)]
        before = end
    return sorted(parts, key=lambda part: part[0] == "sending")  # waiting lies below


def lanes(step: Step) -> list[Lane]:
    """Of each rank: what it computes, and its messages. DataParallel: its process and threads."""
    rows, last = [], arrivals(step)
    for rank in step["ranks"]:
        several = len(step["ranks"]) > 1
        threads: dict[str, list[Part]] = {}
        for kind, thread, begin, end, _ in rank["spans"]:
            if kind not in MESSAGES:
                threads.setdefault(thread, []).append((kind, begin, end))
        main = threads.pop("main", [])
        inside = [part for parts in threads.values() for part in parts]
        if inside:  # the replicas run forward, and around it the process copies
            main = [part for part in main if part[0] != "forward"] + copies(main, inside)
        main = computing(main, rank["spans"])
        rows.append(Lane(f"rank {rank['rank']}" if several else "process", 20, main))
        names = sorted(threads, key=lambda name: threads[name][0][1])
        rows += [Lane(f"replica {i}", 20, threads[name]) for i, name in enumerate(names)]
        if several:
            rows.append(Lane("messages", 12, messages(rank, last)))
    return rows


def computing(main: Sequence[Part], spans: Sequence[Any]) -> list[Part]:
    """The parts without the time in which a message keeps the rank from computing."""
    waits = [(begin, end) for kind, thread, begin, end, _ in spans if (kind, thread) == BLOCKING]
    buckets = [begin for kind, _, begin, _, _ in spans if kind == "bucket"]
    for kind, begin, end in main:
        if kind == "backward" and (last := [at for at in buckets if begin <= at <= end]):
            waits.append((max(last), end))  # its gradients are the last: backward only waits
    parts: list[Part] = []
    for kind, begin, end in main:
        now = begin
        for start, stop in sorted(waits):
            if begin <= start and stop <= end and now <= start:
                parts.append((kind, now, start))
                now = stop
        parts.append((kind, now, end))
    return [part for part in parts if part[2] > part[1]]


def copies(main: Sequence[Part], inside: Sequence[Part]) -> list[Part]:
    """What the forward of DataParallel does before and after that of its replicas."""
    parts: list[Part] = []
    for begin, end in [(b, e) for kind, b, e in main if kind == "forward"]:
        threads = [(b, e) for _, b, e in inside if begin <= b and e <= end]
        if threads:
            parts.append(("sending", begin, min(b for b, _ in threads)))
            parts.append(("sending", max(e for _, e in threads), end))
    return parts


def ticks(longest: float) -> list[float]:
    """Round numbers, from four to nine of them."""
    unit = next(u * 10**p for p in range(-2, 6) for u in (1, 2, 5) if longest / (u * 10**p) < 9)
    return [unit * i for i in range(int(longest / unit) + 1)]


def draw(rows: Sequence[tuple[str, Step]], caption: Sequence[str]) -> str:
    """rows: of each recording, its name and the step that is shown."""
    longest = max(step["ms"] for _, step in rows)
    scale = (WIDTH - LEFT - RIGHT) / longest
    names = ", ".join(f"{name}: {step['ms']:.1f} ms" for name, step in rows)
    drawing = Drawing("What a training step is spent on", names)
    seen = {kind for _, step in rows for lane in lanes(step) for kind, *_ in lane.parts}
    drawing.legend(4, [kind for kind in KINDS if kind in seen])
    y = 30.0
    for name, step in rows:
        y += 20
        drawing.words(4, y, f"{name}: {step['ms']:.1f} ms", bold=True)
        y += 8
        for lane in lanes(step):
            drawing.words(LEFT - 8, y + lane.height / 2 + 5, lane.name, anchor="end")
            for kind, begin, end in lane.parts:
                if end - begin > 0.002 * longest or kind not in ("waiting", "sending"):
                    least = 2.5 if kind == "optimizer" else 1.0
                    width = max(least, (end - begin) * scale - 0.7)  # a gap between neighbors
                    drawing.box(LEFT + begin * scale, y, width, lane.height, kind)
            y += lane.height + (2 if lane.height == 20 else 8)
        y += 6
    y += 4
    drawing.line(LEFT, y, WIDTH - RIGHT, y)
    for tick in ticks(longest):
        x = LEFT + tick * scale
        drawing.line(x, y, x, y + 5)
        drawing.words(x, y + 20, f"{tick:g}", anchor="middle")
    drawing.words(LEFT - 8, y + 20, "ms", anchor="end")
    y += 28
    for line in caption:
        y += SIZE + 2
        drawing.words(4, y, line)
    return drawing.text(y + 8)


def covered(parts: Sequence[Part]) -> float:
    """How long at least one of them lasts."""
    total, until = 0.0, 0.0
    for _, begin, end in sorted(parts, key=lambda part: part[1]):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


class Summary(NamedTuple):
    name: str
    times: dict[str, float]  # milliseconds of each kind, and of none of them


def summary(step: Step) -> list[Summary]:
    """Of each rank, replica or process."""
    table: list[Summary] = []
    parts: list[Part] = []
    for lane in reversed(lanes(step)):  # the messages of a rank stand below it
        parts += lane.parts
        if lane.name == "messages":
            continue
        times = {kind: sum(e - b for k, b, e in parts if k == kind) for kind in KINDS}
        table.append(Summary(lane.name, times | {"nothing": step["ms"] - covered(parts)}))
        parts = []
    return table[::-1]
