"""Draw one step of each recording: what each rank loads, computes and sends, on one time axis."""

from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.measure.timeline_recorder import MESSAGES, Kind, RecordedStep, Span
from benchmarks.result_files import Results, origin_line
from benchmarks.variants import VARIANTS
from docs.pictures.svg import SIZE, WIDTH, Drawing

WAITING, SENDING = "waiting", "sending"
# What a part may be: svg.py has a color for each.
KINDS = (*(kind.value for kind in Kind if kind not in MESSAGES), WAITING, SENDING)
LEFT, RIGHT = 96, 14  # of the axis: the names of the ranks, and a margin
FEW = 9  # so many messages have numbers, which the text can name
BASE = "01"  # the stage with which each other one is compared


class Part(NamedTuple):
    kind: str
    begin: float
    end: float


class Lane(NamedTuple):
    name: str
    height: int
    parts: Sequence[Part]


class Row(NamedTuple):
    """A recorded step: a pale one is only there to compare with, so it has no lane of messages."""

    name: str
    step: RecordedStep
    is_pale: bool = False

    @property
    def lanes(self) -> list[Lane]:
        if self.is_pale:
            return [Lane("", 12, lanes(self.step)[0].parts)]
        return lanes(self.step)


def messages_of(spans: Sequence[Span]) -> list[Span]:
    return sorted((s for s in spans if s.kind in MESSAGES), key=lambda span: span.begin)


def arrivals(ranks: Sequence[Sequence[Span]]) -> list[float]:
    """When the last rank has come to each message; nothing where the ranks send unlike numbers."""
    begins = [[span.begin for span in messages_of(spans)] for spans in ranks]
    same = len({len(each) for each in begins}) == 1
    return [max(each) for each in zip(*begins, strict=True)] if same else []


def message_parts(spans: Sequence[Span], last: Sequence[float]) -> list[Part]:
    """Waiting for the last rank, or for the message before, and then sending."""
    parts: list[Part] = []
    before = 0.0
    for number, span in enumerate(messages_of(spans)):
        last_arrival = last[number] if last else span.begin
        starts = min(span.end, max(span.begin, before, last_arrival))
        parts += [Part(WAITING, span.begin, starts), Part(SENDING, starts, span.end)]
        before = span.end
    return sorted(parts, key=lambda part: part.kind == SENDING)  # waiting lies below


def lanes(step: RecordedStep) -> list[Lane]:
    """A lane for what each rank does, and one for its messages; or the threads of DataParallel."""
    ranks = [[Span(*span) for span in rank["spans"]] for rank in step["ranks"]]
    rows, last, several = [], arrivals(ranks), len(ranks) > 1
    for rank, spans in zip(step["ranks"], ranks, strict=True):
        threads: dict[str, list[Part]] = {}
        for span in spans:
            if span.kind not in MESSAGES:
                part = Part(Kind(span.kind).value, span.begin, span.end)
                threads.setdefault(span.thread, []).append(part)
        main = threads.pop("main", [])
        inside = [part for parts in threads.values() for part in parts]
        if inside:  # the replicas run forward, and around it the process copies
            main = [part for part in main if part.kind != Kind.FORWARD] + copies(main, inside)
        name = f"rank {rank['rank']}" if several else "process"
        rows.append(Lane(name, 20, computing(main, spans)))
        names = sorted(threads, key=lambda name: threads[name][0].begin)
        rows += [Lane(f"replica {i}", 20, threads[name]) for i, name in enumerate(names)]
        if several:
            rows.append(Lane("messages", 12, message_parts(spans, last)))
    return rows


def computing(main: Sequence[Part], spans: Sequence[Span]) -> list[Part]:
    """The parts without the time in which a message keeps the rank from computing."""
    blocking = [span for span in spans if span.kind == Kind.MESSAGE and span.thread == "main"]
    waits = [(span.begin, span.end) for span in blocking]
    buckets = [span.begin for span in spans if span.kind == Kind.BUCKET]
    for kind, begin, end in main:
        if kind == Kind.BACKWARD and (last := [at for at in buckets if begin <= at <= end]):
            waits.append((max(last), end))  # its gradients are the last: backward only waits
    parts: list[Part] = []
    for kind, begin, end in main:
        now = begin
        for start, stop in sorted(waits):
            if begin <= start and stop <= end and now <= start:
                parts.append(Part(kind, now, start))
                now = stop
        parts.append(Part(kind, now, end))
    return [part for part in parts if part.end > part.begin]


def copies(main: Sequence[Part], inside: Sequence[Part]) -> list[Part]:
    """What the forward of DataParallel does before and after that of its replicas."""
    parts: list[Part] = []
    for begin, end in [(b, e) for kind, b, e in main if kind == Kind.FORWARD]:
        threads = [(b, e) for _, b, e in inside if begin <= b and e <= end]
        if threads:
            parts.append(Part(SENDING, begin, min(b for b, _ in threads)))
            parts.append(Part(SENDING, max(e for _, e in threads), end))
    return parts


def ticks(longest: float) -> list[float]:
    """Round numbers, from four to nine of them."""
    unit = next(u * 10**p for p in range(-2, 6) for u in (1, 2, 5) if longest / (u * 10**p) < 9)
    return [unit * i for i in range(int(longest / unit) + 1)]


def title(name: str, step: RecordedStep) -> str:
    """Its name and length, and how many messages each rank sends."""
    counts = {len(messages_of([Span(*span) for span in rank["spans"]])) for rank in step["ranks"]}
    text = f"{name}: {step['ms']:.1f} ms"
    if len(counts) == 1 and (count := counts.pop()):
        text += f", {count} messages" if count > 1 else ", 1 message"
    return text


def draw(rows: Sequence[Row], caption: Sequence[str], longest: float = 0) -> str:
    """longest: how many milliseconds the axis must have room for, at least."""
    longest = max(longest, *(row.step["ms"] for row in rows))
    scale = (WIDTH - LEFT - RIGHT) / longest
    titles = [title(row.name, row.step) for row in rows]
    drawing = Drawing("What a training step is spent on", ". ".join(titles))
    seen = {kind for row in rows for lane in row.lanes for kind, *_ in lane.parts}
    y = drawing.legend(4, [kind for kind in KINDS if kind in seen])
    for row, text in zip(rows, titles, strict=True):
        y += 20
        drawing.words(4, y, text, bold=not row.is_pale)
        y += 8
        for lane in row.lanes:
            drawing.words(LEFT - 8, y + lane.height / 2 + 5, lane.name, anchor="end")
            for kind, begin, end in lane.parts:
                if end - begin > 0.002 * longest or kind not in (WAITING, SENDING):
                    least = 2.5 if kind == Kind.OPTIMIZER else 1.0
                    width = max(least, (end - begin) * scale - 0.7)  # a gap between neighbors
                    x = LEFT + begin * scale
                    drawing.box(x, y, width, lane.height, kind, is_pale=row.is_pale)
            y += lane.height + (2 if lane.height == 20 else 8)
        if not row.is_pale and row.lanes[-1].name == "messages":
            y = number_messages(drawing, row.lanes[-1].parts, y, scale)
        y += 6
    y += 4
    drawing.line(LEFT, y, WIDTH - RIGHT, y)
    for tick in ticks(longest):
        x = LEFT + tick * scale
        drawing.line(x, y, x, y + 5)
        drawing.words(x, y + 20, f"{tick:g}", anchor="middle")
    drawing.words(LEFT - 8, y + 20, "ms", anchor="end")
    y += SIZE + 30
    for text in caption:
        y = drawing.words(4, y, text, spacing=SIZE + 2)
    return drawing.text(y - SIZE + 6)


def number_messages(drawing: Drawing, parts: Sequence[Part], y: float, scale: float) -> float:
    """Number the messages below their lane, if they are few; returns where the numbers end."""
    sent = sorted((part for part in parts if part.kind == SENDING), key=lambda part: part.begin)
    if not 1 < len(sent) <= FEW:
        return y
    x = 0.0
    for number, part in enumerate(sent, start=1):
        x = max(x + SIZE * 0.7, LEFT + (part.begin + part.end) / 2 * scale)  # no two overlap
        drawing.words(x, y + 6, str(number), anchor="middle")
    return y + 8


def covered(parts: Sequence[Part]) -> float:
    """How long at least one of them lasts."""
    total, until = 0.0, 0.0
    for _, begin, end in sorted(parts, key=lambda part: part.begin):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def table(step: RecordedStep) -> str:
    """Say for a terminal how many milliseconds each rank, replica or process spends on what."""
    rows: list[list[str]] = []
    parts: list[Part] = []
    for lane in reversed(lanes(step)):  # the messages of a rank stand below it
        parts += lane.parts
        if lane.name == "messages":
            continue
        times = [
            sum(each.end - each.begin for each in parts if each.kind == kind) for kind in KINDS
        ]
        times.append(step["ms"] - covered(parts))
        rows.insert(0, [lane.name, *(f"{ms:.1f}" for ms in times)])
        parts = []
    lines = [["", *KINDS, "nothing"], *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.rjust, line, widths)) for line in lines)


def picture(results: Results, stages: Sequence[str] = ()) -> str:
    """Draw the recorded stages: those that are named, or all, on the same axis."""
    steps = {stage: each["shown"] for stage, each in results["stages"].items()}
    shown = stages or [*steps]
    rows = [Row(VARIANTS[stage].label, steps[stage]) for stage in shown]
    if BASE in steps and BASE not in shown:
        rows.insert(0, Row(f"{BASE}, for comparison", steps[BASE], is_pale=True))
    about = f"{results['model']}, global batch {results['global_batch']}. "
    about += "The median recorded step; bench.md has speeds."
    longest = max(step["ms"] for step in steps.values())
    return draw(rows, [about, origin_line(results["provenance"])], longest)
