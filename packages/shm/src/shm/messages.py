"""Messages between two ranks: a box of shared memory for each pair and direction.

A longer message goes in pieces. A message that fits an empty box makes no rank wait. The receiver
takes the messages of a box in their order, and keeps those that nobody has asked for yet.
"""

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from shm.fast import put
from shm.segment import COUNTERS_PER_CACHE_LINE, MESSAGE_BELL, CallSteps, Segment
from shm.work import CallQueue

PIECE_BYTES = 2**18
SLOTS = 4  # pieces that a box holds, so that the sender writes while the receiver reads
BOX_BYTES = SLOTS * PIECE_BYTES
CACHE_LINES_PER_BOX = 2 + SLOTS  # for the pieces sent, the pieces received, and each slot's header
SENT, RECEIVED = 0, COUNTERS_PER_CACHE_LINE
SIZE, TAG, START = 0, 1, 2  # a slot's header: size and tag of the message, first byte of the piece


def header_of_slot(piece: int) -> int:
    """Return the index of the first counter in the header of this piece's slot."""
    return (2 + piece % SLOTS) * COUNTERS_PER_CACHE_LINE


class Box(NamedTuple):
    """Where one rank puts its messages to another one. Only this file writes the counters."""

    number: int
    slots: list[Tensor]
    counters: memoryview


@dataclass(eq=False)  # so that remove() takes this message, and no other of the same content
class Message:
    """A message that arrives, or a request to receive one.

    content: bytes, (N,). source: a rank, or None for any.
    """

    content: Tensor
    source: int | None
    tag: int
    filled: int = 0  # how many bytes have arrived
    complete: bool = False

    def matches(self, source: int | None, tag: int) -> bool:
        return self.source in (None, source) and self.tag == tag


class Messages:
    """All messages of one group.

    The boxes lie in the segment from `offset` on, their counters from `first_cache_line` on.
    """

    def __init__(self, segment: Segment, first_cache_line: int, offset: int) -> None:
        self.segment = segment
        self.first_cache_line = first_cache_line
        self.offset = offset
        self.others = [rank for rank in range(segment.world_size) if rank != segment.rank]
        self.outgoing: list[CallQueue] = []  # the queue of the messages to each rank
        for _ in range(segment.world_size):
            self.outgoing.append(deque())
        self.boxes: dict[int, Box] = {}  # the boxes in use, by number
        self.piece_counts: dict[int, int] = {}  # pieces that this rank sent or received, by box
        self.requests: list[Message] = []  # in the order in which the program asked
        self.arriving: dict[int, Message] = {}  # the message from each rank that is not complete
        self.unclaimed: list[Message] = []  # messages that nobody has asked for yet

    def box(self, source: int, target: int) -> Box:
        """Return the box from one rank to another."""
        number = source * self.segment.world_size + target
        if number not in self.boxes:
            content = self.segment.tensor(self.offset + number * BOX_BYTES, BOX_BYTES)
            first = self.first_cache_line + CACHE_LINES_PER_BOX * number
            counters = self.segment.counters_in(first, CACHE_LINES_PER_BOX)
            self.boxes[number] = Box(number, list(content.view(SLOTS, PIECE_BYTES)), counters)
        return self.boxes[number]

    def send(self, content: Tensor, target: int, tag: int) -> CallSteps:
        """Send bytes, (N,)."""
        box_number, slots, counters = self.box(self.segment.rank, target)
        for start in range(0, max(1, content.numel()), PIECE_BYTES):
            count = self.piece_counts.get(box_number, 0)
            while counters[RECEIVED] <= count - SLOTS:
                yield [target]  # which has not taken the piece that lies in this slot
            part = content[start : start + PIECE_BYTES]
            put(slots[count % SLOTS][: part.numel()], part)
            header = header_of_slot(count)
            counters[header + SIZE], counters[header + TAG] = content.numel(), tag
            counters[header + START] = start
            self.piece_counts[box_number] = count + 1
            self.segment.post(counters, SENT, count + 1, MESSAGE_BELL)

    def receive(self, content: Tensor, source: int | None, tag: int) -> CallSteps:
        """Receive bytes, (N,), from that rank or from any; returns the rank that sent them."""
        request = Message(content, source, tag)
        for message in self.unclaimed:
            if request.matches(message.source, message.tag):
                self.unclaimed.remove(message)
                self.check_size(message.source, message.content.numel(), content.numel())
                break
        else:
            message = request  # the content arrives directly where the program wants it
            self.requests.append(request)
        sources = self.others if message.source is None else [message.source]
        while not message.complete:
            if not any(map(self.receive_piece, sources)):
                yield sources
        if message is not request:
            content.copy_(message.content)
        return message.source

    def receive_piece(self, source: int) -> bool:
        """Take a piece out of the box from that rank; False if the box is empty."""
        box_number, slots, counters = self.box(source, self.segment.rank)
        count = self.piece_counts.get(box_number, 0)
        if counters[SENT] == count:
            return False
        header = header_of_slot(count)
        if (message := self.arriving.get(source)) is None:
            message = self.begin(source, counters[header + SIZE], counters[header + TAG])
        if (start := counters[header + START]) != message.filled:
            what = f"sends a message from byte {start} on, not from {message.filled}"
            self.segment.fail(f"rank {source} {what}: one of the two was interrupted")
        part = message.content[message.filled : message.filled + PIECE_BYTES]
        part.copy_(slots[count % SLOTS][: part.numel()])
        message.filled += part.numel()
        self.piece_counts[box_number] = count + 1
        self.segment.post(counters, RECEIVED, count + 1, MESSAGE_BELL)
        if message.filled == message.content.numel():
            message.complete = True
            del self.arriving[source]
        return True

    def begin(self, source: int, size: int, tag: int) -> Message:
        """Return where the next message of that rank goes: the first request that it matches.

        If there is none, the message gets memory of its own.
        """
        for message in self.requests:
            if message.matches(source, tag):
                self.requests.remove(message)
                message.source = source
                self.arriving[source] = message
                self.check_size(source, size, message.content.numel())
                return message
        message = Message(torch.empty(size, dtype=torch.uint8), source, tag)
        self.unclaimed.append(message)
        self.arriving[source] = message
        return message

    def check_size(self, source: int | None, size: int, expected: int) -> None:
        """Fail if the message and the request for it have different sizes."""
        if size != expected:
            self.segment.fail(f"rank {source} sends {size} bytes, not {expected}")
