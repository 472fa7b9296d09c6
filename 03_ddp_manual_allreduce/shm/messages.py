"""Messages between two ranks: a box of shared memory for each pair and direction.

A longer message goes in pieces. Nothing runs in the background: a message moves on while its sender
or its receiver waits for something. A message that fits an empty box makes no rank wait.
"""

from collections import defaultdict, deque
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from shm.segment import LINE, Segment

BOX = 2**16  # bytes


class Message(dist.Work):  # what isend and irecv return
    def __init__(self, messages: "Messages", rank: int) -> None:
        super().__init__()
        self.messages, self.rank, self.done = messages, rank, False

    def is_completed(self) -> bool:
        self.messages.advance()
        return self.done

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.messages.segment.wait(self.rank, self.is_completed)
        return True


class Messages:
    """The boxes lie in the segment from `offset` on, their counters from line `line` on."""

    def __init__(self, segment: Segment, line: int, offset: int) -> None:
        self.segment, self.line, self.offset = segment, line, offset
        self.counted: dict[int, int] = defaultdict(int)  # of each box: pieces sent or received here
        self.running: dict[int, deque[Iterator[None]]] = defaultdict(deque)  # of each box
        segment.progress = self.advance

    def advance(self) -> None:
        for queue in self.running.values():
            while queue and next(queue[0], "done") == "done":
                queue.popleft()

    def start(self, tensor: Tensor, source: int, target: int) -> Message:
        """Send or receive bytes, (N,): this rank is the source or the target."""
        sends = source == self.segment.rank
        message = Message(self, target if sends else source)
        box = source * self.segment.ranks + target
        self.running[box].append(self.move(message, box, tensor, sends))
        self.advance()
        return message

    def move(self, message: Message, box: int, tensor: Tensor, sends: bool) -> Iterator[None]:
        counters, buffer = self.segment.counters, self.segment.tensor(self.offset + box * BOX, BOX)
        sent, received = ((self.line + 2 * box + side) * LINE // 8 for side in (0, 1))
        theirs, ours = (received, sent) if sends else (sent, received)
        for start in range(0, max(1, len(tensor)), BOX):
            while (counters[theirs] == self.counted[box]) != sends:  # full, or empty
                yield  # it has to wait for the other rank
            part = tensor[start : start + BOX]
            if sends:
                buffer[: len(part)] = part
                counters[sent + 1] = len(tensor)
            elif (size := counters[sent + 1]) != len(tensor):
                self.segment.fail(f"rank {message.rank} sends {size} bytes, not {len(tensor)}")
            else:
                part.copy_(buffer[: len(part)])
            self.counted[box] += 1
            self.segment.post(ours, self.counted[box])
        message.done = True
