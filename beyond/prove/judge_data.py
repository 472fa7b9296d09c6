"""What the records say about the data: the samples of training, and those of evaluation."""

from typing import Any

import torch

from prove.table import NOT_SEEN, RIGHT, WARNING, WRONG, Row

ORDER = "every-epoch-has-the-same-order"
ACCURACY = "test-accuracy-differs-with-the-number-of-ranks"
LOSS = "the-loss-is-not-that-of-one-process"
UNEVEN = "the-last-batch-of-an-epoch-hangs"

SHARD = "DataLoader(dataset, sampler=DistributedSampler(dataset)), or split the data by rank"
OWN_SEED = "torch.manual_seed(seed + rank) after the model is built; numpy and random alike"
GENERATORS = ("torch", "random", "numpy")


def indices(p: dict) -> list[int]:
    """The samples of a whole epoch of one rank, as numbers of the data set below all Subsets."""
    return torch.load(p["file"])["indices"].tolist() if p["file"] else []


def held(p: dict) -> set[int] | None:
    """The samples that a Subset holds; None: all."""
    chosen = torch.load(p["file"])["held"] if p["file"] else None
    return None if chosen is None else set(chosen.tolist())


def contents(p: dict) -> list[int]:
    return [x for batch in p["samples"] for x in batch]


def shared_contents(a: list[int], b: list[int]) -> float:
    """The share of samples with the same content; 0 if the samples are too much alike to tell."""
    if not a or not b or len({*a}) < len(a) / 2 or len({*b}) < len(b) / 2:
        return 0.0
    return len({*a} & {*b}) / min(len({*a}), len({*b}))


def same_dataset(passes: list[dict]) -> bool:
    prints = [(p["base_length"], str(p["fingerprint"])) for p in passes]
    return bool(passes[0]["fingerprint"]) and len({*prints}) == 1


def trained_passes(ranks: list[dict]) -> list[list[dict]]:
    """For each pass in which all ranks made steps: the records of the ranks."""
    chosen = [[p for p in rank["passes"] if p["steps"]] for rank in ranks]
    return [list(group) for group in zip(*chosen, strict=False)]


def rows_are_split(ranks: list[dict]) -> bool:
    """The script gives each rank a part of the rows of a batch that all have loaded."""
    passes = trained_passes(ranks)
    if not passes or not all(indices(p) == indices(passes[0][0]) for p in passes[0]):
        return False
    used: dict = {}  # rows of each batch of each rank, in all of its forward passes
    for rank in ranks:
        for _, rows, given, batch in rank["roots"]:
            if given and given > 1:
                size, total = used.get((rank["rank"], batch), (given, 0))
                used[rank["rank"], batch] = size, total + rows
    n = len(ranks)
    return bool(used) and all(rows in (size // n, -(-size // n)) for size, rows in used.values())


def same_contents(ranks: list[dict]) -> bool:
    passes = trained_passes(ranks)
    return bool(passes) and all(contents(p) == contents(passes[0][0]) for p in passes[0])


def data_rows(ranks: list[dict]) -> list[Row]:
    passes = trained_passes(ranks) if ranks else []
    if len(ranks) < 2 or "groups of some ranks" in ranks[0]["notes"]:
        return []
    if not passes:
        return inputs_of_forward(ranks)
    first = passes[0]
    rows = samples(ranks, first) + lengths(ranks, first) + order(passes)
    return rows + random_numbers(ranks, first) + evaluation(ranks)


def inputs_of_forward(ranks: list[dict]) -> list[Row]:
    """A script without a DataLoader: do the ranks call the model with different tensors?"""
    check = "samples"
    inputs = [[digest for digest, *_ in rank["roots"]] for rank in ranks]
    if not all(inputs) or not ranks[0]["steps"]:
        return [Row(NOT_SEEN, check, "no optimizer step inside a pass over a DataLoader")]
    if len({*inputs[0]}) < 2:
        return [Row(NOT_SEEN, check, "no DataLoader, and the model gets the same input each time")]
    if all(x == inputs[0] for x in inputs[1:]):
        text = f"all ranks call the model with the same tensors, {len(inputs[0])} times"
        return [Row(WRONG, check, text, "seed by rank, or split the data by rank", LOSS)]
    return [Row(RIGHT, check, "no DataLoader; the ranks call the model with different tensors")]


def samples(ranks: list[dict], passes: list[dict]) -> list[Row]:
    first, check = passes[0], "samples"
    at = f"the loader at {first['at']}, sampler {first['sampler']}"
    if "Dispatcher" in first["class"]:
        return [Row(NOT_SEEN, check, "rank 0 loads for all ranks")]
    drawn = [indices(p) for p in passes]
    if first["iterable"] or not all(drawn) or not same_dataset(passes):
        return samples_by_content(passes, at)
    window = [d[: sum(p["sizes"][: p["given"]])] for d, p in zip(drawn, passes, strict=True)]
    if rows_are_split(ranks):
        return [
            Row(RIGHT, check, f"all ranks load the same batches, and each takes its part ({at})")
        ]
    sets, union = [{*d} for d in drawn], set().union(*drawn)
    holds = [held(p) for p in passes]
    size = (
        len(set().union(*(h or () for h in holds))) if None not in holds else first["base_length"]
    )
    twice = sum(map(len, sets)) - len(union)
    if all(w == window[0] for w in window[1:]) and len({*window[0]}) > 1:
        text = f"all ranks draw the same samples in the same order: {at}"
        return [Row(WRONG, check, text, SHARD, LOSS)]
    if any(h != holds[0] for h in holds) and None not in holds and len(sets[0] & sets[1]) > 1:
        common = len(set.intersection(*holds))  # type: ignore[arg-type]
        if common < len(holds[0] or ()):
            text = (
                f"the ranks split the data set differently: of {len(holds[0] or ())} samples that "
            )
            text += f"rank 0 may draw, all ranks may draw {common} ({at})"
            cure = "give random_split a generator with the same seed on all ranks"
            return [Row(WRONG, check, text, cure, LOSS)]
    replacement = "Weighted" in first["sampler"] or any(
        len(s) < 0.9 * len(d) for s, d in zip(sets, drawn, strict=True)
    )
    if replacement:
        return [
            Row(RIGHT, check, f"{first['sampler']} draws with replacement, other samples per rank")
        ]
    padding = len(ranks) * (1 + first["last_size"])
    if twice <= padding:
        each = " + ".join(str(len(s)) for s in sets)
        lost = size - len(union)
        if lost > padding + len(ranks) * max(first["sizes"]):
            text = (
                f"{len(union)} of {size} samples are in an epoch, {lost} in that of no rank ({at})"
            )
            return [
                Row(WARNING, check, text, "meant so only if the others are left out on purpose")
            ]
        return [Row(RIGHT, check, f"{each} of {size} samples, {twice} of them twice ({at})")]
    if min(map(len, sets)) >= 0.98 * size:
        text = (
            f"each rank draws all {size} samples, in another order: an epoch is {len(ranks)} epochs"
        )
        cure = f"{SHARD}; meant so only if the number of epochs was divided, too"
        return [Row(WARNING, check, f"{text} ({at})", cure, LOSS)]
    text = f"{len(union)} of {size} samples are seen in an epoch, {twice} of them twice ({at})"
    if first["sampler"] == "DistributedSampler":
        cure = "the same seed for the sampler of all ranks, and the right num_replicas and rank"
        return [Row(WRONG, check, text, cure, LOSS)]
    return [Row(WARNING, check, text, SHARD, LOSS)]


def samples_by_content(passes: list[dict], at: str) -> list[Row]:
    first, check = passes[0], "samples"
    shown = [contents(p) for p in passes]
    kind = "an IterableDataset" if first["iterable"] else "another data set on each rank"
    rows = []
    share = max(shared_contents(shown[0], other) for other in shown[1:])
    text = f"{share:.0%} of the first {len(shown[0])} samples are those of another rank, by content"
    cure = "split by rank and by worker in __iter__: islice(all_samples, rank, None, world_size)"
    if not any(shown) or len({*shown[0]}) < len(shown[0]) / 2:
        return [Row(NOT_SEEN, check, f"samples cannot be told apart ({at}; {kind})")]
    if share > 0.5:
        rows.append(Row(WRONG, check, f"{text} ({at}; {kind})", cure, LOSS))
    elif share > 0.05:
        rows.append(Row(WARNING, check, f"{text} ({at}; {kind})", cure, LOSS))
    else:
        rows.append(
            Row(RIGHT, check, f"{share:.0%} of {len(shown[0])} samples are shared ({kind})")
        )
    batches = first["samples"][: first["workers"]]
    if first["iterable"] and len(batches) > 1 and all(b == batches[0] for b in batches):
        text = f"each of the {first['workers']} workers of a rank yields the same samples ({at})"
        rows.append(Row(WRONG, "workers", text, cure, LOSS))
    lengths = {p["base_length"] for p in passes}
    if first["fingerprint"] and len(lengths) == 1 and first["sampler"] == "DistributedSampler":
        text = f"sample 0 differs between the ranks, and DistributedSampler splits it again ({at})"
        cure = "make the data with the same seed on all ranks, or load it from a file"
        rows.append(Row(WARNING, "one data set", text, cure, LOSS))
    return rows


def lengths(ranks: list[dict], passes: list[dict]) -> list[Row]:
    check, first = "batches per epoch", passes[0]
    counts = [p["batches"] for p in passes]
    if None in counts:
        counts = [p["given"] for p in passes]
        if not any(p["ended"] for p in passes):
            return [Row(NOT_SEEN, check, "no rank reached the end of its data")]
    cut = [p["given"] < min(n, p["limit"]) for p, n in zip(passes, counts, strict=True)]
    sizes = [p["sizes"][: p["given"]] for p in passes]
    uneven = [s for s in zip(*sizes, strict=False) if len({*s}) > 1]
    if len({*counts}) > 1:
        if "join" in ranks[0]["notes"]:
            return [Row(RIGHT, check, f"{counts}, and Join lets the shorter ones wait")]
        if any(cut):
            return [Row(NOT_SEEN, check, f"{counts}, but the script ends its epochs earlier")]
        text = f"{counts} batches on the ranks: whoever has more waits for ever ({first['at']})"
        cure = "DistributedSampler makes them equal; or drop_last; or Join"
        return [Row(WRONG, check, text, cure, UNEVEN)]
    if uneven:
        text = f"{counts[0]} on each rank, but local batches of {uneven[0]} samples weigh the same"
        cure = "equal local batches, or a mean over the global batch"
        return [Row(WARNING, check, f"{text} ({first['at']})", cure, LOSS)]
    return [Row(RIGHT, check, f"{counts[0]} on each rank")]


def order(passes: list[list[dict]]) -> list[Row]:
    check, first = "order of an epoch", passes[0]
    again = [later for later in passes[1:] if later[0]["dataset"] == first[0]["dataset"]]
    if not again:
        return [Row(NOT_SEEN, check, "there was no second epoch")]
    pairs = list(zip(first, again[0], strict=True))
    by_index = all(a["file"] and b["file"] for a, b in pairs)
    read: Any = indices if by_index else contents
    if not all(read(a) == read(b) for a, b in pairs):
        return [Row(RIGHT, check, "epochs 1 and 2 differ")]
    p = first[0]
    same_contents = all(contents(a) == contents(b) for a, b in pairs)
    if by_index and not same_contents and not any(p["drew"]) and not p["workers"]:
        return [Row(RIGHT, check, "the data set itself changes from epoch to epoch")]
    text = f"epochs 1 and 2 have the same order: loader at {p['at']}, sampler {p['sampler']}"
    asked = p["sampler"] == "DistributedSampler" and p["shuffle"]
    if asked or p["sampler"] == "RandomSampler":
        return [Row(WRONG, check, text, "sampler.set_epoch(epoch) before each epoch", ORDER)]
    if (by_index and p["sorted"]) or p["shuffle"] is False:
        return [Row(RIGHT, check, "fixed, and no shuffling was asked for")]
    cure = "another order in each epoch; meant so only if the order is part of the data"
    return [Row(WARNING, check, text, cure, ORDER)]


def random_numbers(ranks: list[dict], passes: list[dict]) -> list[Row]:
    rows, first = [], passes[0]
    lines = set.intersection(*({*rank["dropout"]} for rank in ranks))
    equal = [line for line in lines if len({rank["dropout"][line] for rank in ranks}) == 1]
    if equal:
        text = f"all ranks drop the same positions ({equal[0]})"
        cure = f"{OWN_SEED}; no mistake, but less noise than one process has"
        rows.append(Row(WARNING, "dropout", text, cure))
    elif lines:
        rows.append(Row(RIGHT, "dropout", "the ranks draw different masks"))
    used = [k for k in range(3) if all(p["drew"][k] for p in passes)]
    alike = [k for k in used if len({p["generators"][k] for p in passes}) == 1]
    workers = first["workers"] and first["base_seed"] is not None
    if workers and len({p["base_seed"] for p in passes}) == 1:
        text = f"the workers of all ranks draw the same numbers: one seed (loader at {first['at']})"
        if not first["iterable"] and same_dataset(passes):
            rows.append(
                Row(WARNING, "augmentation", text, f"{OWN_SEED}; harmless without augmentation")
            )
    elif alike:
        names = ", ".join(GENERATORS[k] for k in alike)
        text = f"all ranks draw the same numbers of {names} while they load ({first['at']})"
        rows.append(Row(WARNING, "augmentation", text, OWN_SEED))
    elif used:
        rows.append(Row(RIGHT, "augmentation", "the ranks draw different random numbers"))
    return rows


def collectives_after(rank: dict, evaluated: dict) -> int:
    """How many collectives follow an evaluation, before training goes on."""
    later = [p for p in rank["passes"] if p["number"] > evaluated["number"] and p["training"]]
    end = later[0]["collectives_before"] if later else len(rank["collectives"])
    return int(end - evaluated["collectives_before"])


def evaluation(ranks: list[dict]) -> list[Row]:
    check = "evaluation"
    chosen = [
        [p for p in rank["passes"] if not p["training"] and p["given"] and p["steps_before"]]
        for rank in ranks
    ]
    here = [passes[0] for passes in chosen if passes]
    if not here:
        return [Row(NOT_SEEN, check, "no pass over a loader without gradients, after a step")]
    at = here[0]["at"]
    if len(here) < len(ranks):
        return [Row(RIGHT, check, f"by {len(here)} of {len(ranks)} ranks ({at})")]
    drawn = [indices(p) for p in here]
    if not all(drawn) or not same_dataset(here):
        return [Row(NOT_SEEN, check, f"the samples of {at} cannot be told apart")]
    holds = [held(p) for p in here]
    size = here[0]["base_length"]
    if None not in holds:
        size = len(set().union(*(h or () for h in holds)))
    everything = [x for d in drawn for x in d]
    twice, lost = len(everything) - len({*everything}), size - len({*everything})
    sums = all(collectives_after(rank, p) for rank, p in zip(ranks, here, strict=True))
    if all(len({*d}) >= 0.98 * size for d in drawn):
        text = f"each rank evaluates all {size} samples ({at})"
        cure = "each rank a part, then all_reduce; no mistake if the results are not added up"
        return [Row(WARNING, check, text, cure, ACCURACY)]
    if twice and "gather_for_metrics" not in ranks[0]["notes"]:
        text = f"{twice} of {size} samples are counted twice ({at}, {here[0]['sampler']})"
        cure = "Subset(dataset, range(rank, len(dataset), world_size))"
        return [Row(WARNING, check, text, cure, ACCURACY)]
    if lost:
        text = f"{lost} of {size} samples are left out ({at})"
        return [Row(WARNING, check, text, "no drop_last for evaluation", ACCURACY)]
    if not sums:
        text = f"each rank evaluates a part of the {size} samples, and no collective follows ({at})"
        return [Row(WARNING, check, text, "all_reduce sums and counts, then divide", ACCURACY)]
    return [Row(RIGHT, check, f"each of {size} samples once ({at})")]
