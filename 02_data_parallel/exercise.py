"""Exercise 02: how many samples of a batch each replica of DataParallel gets.

As it stands, the samples are dealt evenly: 5 samples on 4 replicas are 2, 1, 1, 1. DataParallel
cuts the batch with torch.chunk: they are 2, 2, 1, and the fourth replica gets nothing.
Fix it without torch.chunk, then type: make exercise STAGE=02
"""


def split_batch(samples: int, replicas: int) -> list[int]:
    """The sizes of the parts, in the order of the replicas. It skips replicas without one."""
    each, more = divmod(samples, replicas)
    sizes = [each + (replica < more) for replica in range(replicas)]
    return [size for size in sizes if size > 0]
