"""Messages between two ranks: a box of shared memory for each pair and direction.

A longer message goes in pieces. A message that fits an empty box makes no rank wait. The receiver
takes the messages of a box in their order. What nobody has asked for yet, it keeps.
"""

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from shm.segment import CACHE_LINE_BYTES, Segment, Steps
from shm.work import CallQueue

BOX_BYTES = 2**16
CACHE_LINES_PER_BOX = 2  # for counters: the sender's and the receiver's
# Counters of a sender: its pieces; of the present one, the size and tag of its message and where it
# begins there
COUNT, SIZE, TAG, START = 0, 1, 2, 3


@dataclass(eq=False)  # a message equals itself only
class Message:
    """A message that arrives, or a request to receive one.

    content: bytes, (N,). source: a rank, or None for any.
    """

    content: Tensor
    source: int | None
    tag: int
    filled: int = 0  # bytes that have arrived
    complete: bool = False

    def matches(self, source: int | None, tag: int) -> bool:
        return self.source in (None, source) and self.tag == tag


class Messages:
    """The boxes lie in the segment from `offset` on, their counters from `first_cache_line` on."""

    def __init__(self, segment: Segment, first_cache_line: int, offset: int) -> None:
        self.segment = segment
        self.first_cache_line = first_cache_line
        self.offset = offset
        self.others = [rank for rank in range(segment.world_size) if rank != segment.rank]
        self.outgoing: list[CallQueue] = []  # to each rank
        for _ in range(segment.world_size):
            self.outgoing.append(deque())
        self.counted: dict[int, int] = {}  # of each box: pieces that this rank sent or received
        self.requests: list[Message] = []  # in the order in which the program asked
        self.arriving: dict[int, Message] = {}  # from each rank: a message that is not complete
        self.unclaimed: list[Message] = []  # what nobody has asked for yet

    def box(self, source: int, target: int) -> tuple[int, Tensor, int, int]:
        """Its number, its bytes, and the places of the sender's and the receiver's counter."""
        box = source * self.segment.world_size + target
        sent = (self.first_cache_line + CACHE_LINES_PER_BOX * box) * CACHE_LINE_BYTES // 8
        received = sent + CACHE_LINE_BYTES // 8
        return box, self.segment.tensor(self.offset + box * BOX_BYTES, BOX_BYTES), sent, received

    def put(self, content: Tensor, target: int, tag: int) -> Steps:
        """Send bytes, (N,)."""
        counters = self.segment.counters
        box, buffer, sent, received = self.box(self.segment.rank, target)
        for start in range(0, max(1, len(content)), BOX_BYTES):
            count = self.counted.get(box, 0)
            while counters[received + COUNT] != count:
                yield [target]  # it has not taken the piece before
            part = content[start : start + BOX_BYTES]
            buffer[: len(part)] = part
            counters[sent + SIZE], counters[sent + TAG] = len(content), tag
            counters[sent + START] = start
            self.counted[box] = count + 1
            self.segment.post(sent + COUNT, count + 1)

    def take(self, content: Tensor, source: int | None, tag: int) -> Steps:
        """Receive bytes, (N,), from that rank or from any; returns the rank that sent them."""
        request = Message(content, source, tag)
        for message in self.unclaimed:
            if request.matches(message.source, message.tag):
                self.unclaimed.remove(message)
                self.check_size(message.source, len(message.content), len(content))
                break
        else:
            message = request  # it will arrive where the program wants it
            self.requests.append(request)
        sources = self.others if message.source is None else [message.source]
        while not message.complete:
            if not any(map(self.take_piece, sources)):
                yield sources
        if message is not request:
            content.copy_(message.content)
        return message.source

    def take_piece(self, source: int) -> bool:
        """Take a piece out of the box from that rank; False if the box is empty."""
        counters = self.segment.counters
        box, buffer, sent, received = self.box(source, self.segment.rank)
        count = self.counted.get(box, 0)
        if counters[sent + COUNT] == count:
            return False
        if (message := self.arriving.get(source)) is None:
            message = self.begin(source, counters[sent + SIZE], counters[sent + TAG])
        if (start := counters[sent + START]) != message.filled:
            what = f"sends a message from byte {start} on, not from {message.filled}"
            self.segment.fail(f"rank {source} {what}: one of the two was interrupted")
        part = message.content[message.filled : message.filled + BOX_BYTES]
        part.copy_(buffer[: len(part)])
        message.filled += len(part)
        self.counted[box] = count + 1
        self.segment.post(received + COUNT, count + 1)
        if message.filled == len(message.content):
            message.complete = True
            del self.arriving[source]
        return True

    def begin(self, source: int, size: int, tag: int) -> Message:
        """Where the next message of that rank goes: to who asked for it first, or to a new one."""
        for message in self.requests:
            if message.matches(source, tag):
                self.requests.remove(message)
                message.source = source
                self.arriving[source] = message
                self.check_size(source, size, len(message.content))
                return message
        message = Message(torch.empty(size, dtype=torch.uint8), source, tag)
        self.unclaimed.append(message)
        self.arriving[source] = message
        return message

    def check_size(self, source: int | None, size: int, expected: int) -> None:
        if size != expected:
            self.segment.fail(f"rank {source} sends {size} bytes, not {expected}")
