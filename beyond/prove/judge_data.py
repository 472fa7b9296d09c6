"""What the records say about the data: the samples of training, and those of evaluation.

A pass is what a rank's record says of one pass over a loader: see watch_data.begin_pass.
"""

from collections import Counter

import torch

from prove.table import (
    ACCURACY,
    LOSS,
    RATE,
    RIGHT,
    SAME_ORDER,
    UNEVEN,
    Row,
    not_seen,
    right,
    warning,
    wrong,
)  # fmt: skip
from prove.watch_data import EVALUATION

ALL_BUT_A_FEW = 0.98  # the share of a data set that counts as the whole
SHARD = "DataLoader(dataset, sampler=DistributedSampler(dataset)), or split the data by rank"
OWN_SEED = "torch.manual_seed(seed + rank) after the model is built; numpy and random alike"
GENERATORS = ("torch", "random", "numpy")


def load_samples(ranks: list[dict]) -> None:
    """Read from the files beside the records which samples each pass drew, and may draw."""
    for p in (p for rank in ranks for p in rank["passes"]):
        listed = torch.load(p["file"]) if p["file"] else {"indices": None, "held": None}
        p["indices"] = [] if listed["indices"] is None else listed["indices"].tolist()
        p["held"] = None if listed["held"] is None else set(listed["held"].tolist())
        p["contents"] = [checksum for batch in p["samples"] for checksum in batch]


def trained_passes(ranks: list[dict]) -> list[list[dict]]:
    """For each pass in which all ranks made steps: the records of the ranks."""
    chosen = [[p for p in rank["passes"] if p["steps"]] for rank in ranks]
    return [list(group) for group in zip(*chosen, strict=False)]


def alike(passes: list[dict], key: str) -> bool:
    return all(p[key] == passes[0][key] for p in passes)


def same_dataset(passes: list[dict]) -> bool:
    known = bool(passes[0]["fingerprint"])
    return known and alike(passes, "fingerprint") and alike(passes, "base_length")


def size_of(passes: list[dict]) -> int:
    """How many samples the ranks may draw together."""
    held = [p["held"] for p in passes]
    return int(passes[0]["base_length"]) if None in held else len(set().union(*held))


def rows_are_split(ranks: list[dict]) -> bool:
    """The script gives each rank a part of the rows of a batch that all have loaded."""
    passes = trained_passes(ranks)
    if not passes or not alike(passes[0], "indices"):
        return False
    given: dict[tuple, int] = {}  # rows of each batch of each rank
    used: Counter = Counter()  # those that went into the model
    for rank in ranks:
        for _, rows, size, batch in rank["roots"]:
            if size and size > 1:
                given.setdefault((rank["rank"], batch), size)
                used[rank["rank"], batch] += rows
    n = len(ranks)
    return bool(used) and all(used[k] in (size // n, -(-size // n)) for k, size in given.items())


def same_contents(ranks: list[dict]) -> bool:
    passes = trained_passes(ranks)
    return bool(passes) and all(alike(group, "contents") for group in passes)


def data_rows(ranks: list[dict]) -> list[Row]:
    if len(ranks) < 2 or "groups of some ranks" in ranks[0]["notes"]:
        return []
    passes = trained_passes(ranks)
    if not passes:
        return inputs_of_forward(ranks)
    rows = samples(ranks, passes[0]) + lengths(ranks, passes[0]) + order(passes)
    return rows + dropout(ranks) + augmentation(passes[0]) + evaluation(ranks)


def inputs_of_forward(ranks: list[dict]) -> list[Row]:
    """A script without a DataLoader: do the ranks call the model with different tensors?"""
    check = "samples"
    inputs = [[digest for digest, *_ in rank["roots"]] for rank in ranks]
    if not all(inputs) or not ranks[0]["steps"]:
        return [not_seen(check, "no optimizer step inside a pass over a DataLoader")]
    if len({*inputs[0]}) < 2:
        return [not_seen(check, "no DataLoader, and the model gets the same input each time")]
    if all(x == inputs[0] for x in inputs):
        text = f"all ranks call the model with the same tensors, {len(inputs[0])} times"
        return [wrong(check, text, "seed by rank, or split the data by rank", LOSS)]
    return [right(check, "no DataLoader; the ranks call the model with different tensors")]


def samples(ranks: list[dict], passes: list[dict]) -> list[Row]:
    first, check = passes[0], "samples"
    at = f"the loader at {first['at']}, sampler {first['sampler']}"
    drawn, held = [p["indices"] for p in passes], [p["held"] for p in passes]
    if "Dispatcher" in first["class"]:
        return [not_seen(check, "rank 0 loads for all ranks")]
    if first["iterable"] or not all(drawn) or not same_dataset(passes):
        return samples_by_content(passes, at, rows_are_split(ranks))
    if rows_are_split(ranks):
        return [right(check, f"all ranks load the same batches, and each takes its part ({at})")]

    used = [d[: sum(p["sizes"][: p["given"]])] for d, p in zip(drawn, passes, strict=True)]
    if all(w == used[0] for w in used) and len({*used[0]}) > 1:
        text = f"all ranks draw the same samples in the same order: {at}"
        return [wrong(check, text, SHARD, LOSS)]
    sets = [{*d} for d in drawn]
    union, size, padding = set().union(*sets), size_of(passes), len(ranks) * (1 + first["last"])
    twice, lost = sum(map(len, sets)) - len(union), size - len(union)
    common = size if None in held else len(set.intersection(*held))
    if common < len(held[0] or ()) and len(sets[0] & sets[1]) > 1:
        text = f"the ranks split the data set differently: of {len(held[0])} samples that rank 0 "
        text += f"may draw, all ranks may draw {common} ({at})"
        cure = "give random_split a generator with the same seed on all ranks"
        return [wrong(check, text, cure, LOSS)]
    repeats = any(len(s) < 0.9 * len(d) for s, d in zip(sets, drawn, strict=True))
    if repeats or "Weighted" in first["sampler"]:
        return [right(check, f"{first['sampler']} draws with replacement, other samples per rank")]
    if twice <= padding and lost > padding + len(ranks) * max(first["sizes"]):
        text = f"{len(union)} of {size} samples are in an epoch, {lost} in that of no rank ({at})"
        return [warning(check, text, "meant so only if the others are left out on purpose")]
    if twice <= padding:
        each = " + ".join(str(len(s)) for s in sets)
        return [right(check, f"{each} of {size} samples, {twice} of them twice ({at})")]
    if min(map(len, sets)) >= ALL_BUT_A_FEW * size:
        text = f"each rank draws all {size} samples, in another order: an epoch is {len(ranks)} "
        cure = f"{SHARD}; meant so only if the number of epochs was divided, too"
        return [warning(check, f"{text}epochs ({at})", cure, LOSS)]
    text = f"{len(union)} of {size} samples are seen in an epoch, {twice} of them twice ({at})"
    if first["sampler"] == "DistributedSampler":
        cure = "the same seed for the sampler of all ranks, and the right num_replicas and rank"
        return [wrong(check, text, cure, LOSS)]
    return [warning(check, text, SHARD, LOSS)]


def samples_by_content(passes: list[dict], at: str, are_split: bool) -> list[Row]:
    """For streams, and for data sets of which each rank holds another: no indices to compare."""
    first, check = passes[0], "samples"
    kind = "an IterableDataset" if first["iterable"] else "another data set on each rank"
    if not first["iterable"] and same_dataset(passes):
        kind = f"{first['sampler']} is too long to list"
    shown = [p["contents"] for p in passes]
    few = len({*shown[0]})  # different samples, which may come again and again
    if few >= 5 and len(shown[0]) >= 20 and alike(passes, "contents") and not are_split:
        text = f"all ranks draw the same {len(shown[0])} samples in the same order ({at}; {kind})"
        return [wrong(check, text, SHARD, LOSS)]
    if not shown[0] or few < len(shown[0]) / 2:
        return [not_seen(check, f"samples cannot be told apart ({at}; {kind})")]
    share = max(shared(shown[0], other) for other in shown[1:])
    text = f"{share:.0%} of the first {len(shown[0])} samples are those of another rank, by content"
    text += f" ({at}; {kind})"
    cure = "split by rank and by worker in __iter__: islice(all_samples, rank, None, world_size)"
    if share > 0.5:
        rows = [wrong(check, text, cure, LOSS)]
    elif share > 0.05:
        rows = [warning(check, text, cure, LOSS)]
    else:
        rows = [right(check, f"{share:.0%} of {len(shown[0])} samples are shared ({kind})")]
    of_workers = first["samples"][: first["workers"]]
    if first["iterable"] and len(of_workers) > 1 and all(b == of_workers[0] for b in of_workers):
        text = f"each of the {first['workers']} workers of a rank yields the same samples ({at})"
        rows.append(wrong("workers", text, cure, LOSS))
    sampler_splits = first["sampler"] == "DistributedSampler" and alike(passes, "base_length")
    if first["fingerprint"] and sampler_splits:
        text = f"sample 0 differs between the ranks, and DistributedSampler splits it again ({at})"
        cure = "make the data with the same seed on all ranks, or load it from a file"
        rows.append(warning("one data set", text, cure, LOSS))
    return rows


def shared(a: list[int], b: list[int]) -> float:
    """The share of samples with the same content; 0 if the samples are too much alike to tell."""
    if not b or len({*b}) < len(b) / 2:
        return 0.0
    return len({*a} & {*b}) / min(len({*a}), len({*b}))


def lengths(ranks: list[dict], passes: list[dict]) -> list[Row]:
    check, first = "batches per epoch", passes[0]
    counts = [p["batches"] for p in passes]
    if None in counts:
        counts = [p["given"] for p in passes]
        if not any(p["ended"] for p in passes):
            return [not_seen(check, "no rank reached the end of its data")]
    if len({*counts}) > 1:
        if "join" in ranks[0]["notes"]:
            return [right(check, f"{counts}, and Join lets the shorter ones wait")]
        if any(p["given"] < min(n, p["limit"]) for p, n in zip(passes, counts, strict=True)):
            return [not_seen(check, f"{counts}, but the script ends its epochs earlier")]
        text = f"{counts} batches on the ranks: whoever has more waits for ever ({first['at']})"
        cure = "DistributedSampler makes them equal; or drop_last; or Join"
        return [wrong(check, text, cure, UNEVEN)]
    for sizes in zip(*(p["sizes"][: p["given"]] for p in passes), strict=False):
        if len({*sizes}) > 1:
            text = f"{counts[0]} on each rank, but local batches of {sizes} samples weigh the same"
            cure = "equal local batches, or a mean over the global batch"
            return [warning(check, f"{text} ({first['at']})", cure, LOSS)]
    return [right(check, f"{counts[0]} on each rank")]


def order(passes: list[list[dict]]) -> list[Row]:
    check, first = "order of an epoch", passes[0]
    later = [group for group in passes[1:] if group[0]["dataset"] == first[0]["dataset"]]
    if not later:
        return [not_seen(check, "there was no second epoch")]
    pairs = list(zip(first, later[0], strict=True))
    by_index = all(p["file"] for pair in pairs for p in pair)
    if any(a["indices"] != b["indices"] for a, b in pairs if by_index):
        return [right(check, "epochs 1 and 2 differ")]
    p = first[0]
    if any(a["contents"] != b["contents"] for a, b in pairs):
        if not by_index:
            return [right(check, "epochs 1 and 2 differ")]
        if not any(p["drew"]) and not p["workers"]:
            return [right(check, "the data set itself changes from epoch to epoch")]
    text = f"epochs 1 and 2 have the same order: loader at {p['at']}, sampler {p['sampler']}"
    asked = p["sampler"] == "DistributedSampler" and p["shuffle"]
    if asked or p["sampler"] == "RandomSampler":
        return [wrong(check, text, "sampler.set_epoch(epoch) before each epoch", SAME_ORDER)]
    if p["shuffle"] is False or (by_index and p["indices"] == sorted(p["indices"])):
        return [right(check, "fixed, and no shuffling was asked for")]
    cure = "another order in each epoch; meant so only if the order is part of the data"
    return [warning(check, text, cure, SAME_ORDER)]


def dropout(ranks: list[dict]) -> list[Row]:
    for line in set.intersection(*({*rank["dropout"]} for rank in ranks)):
        if len({rank["dropout"][line] for rank in ranks}) > 1:
            return [right("dropout", "the ranks draw different masks")]
        cure = f"{OWN_SEED}; no mistake, but less noise than one process has"
        return [warning("dropout", f"all ranks drop the same positions ({line})", cure)]
    return []


def augmentation(passes: list[dict]) -> list[Row]:
    """Random numbers that a rank draws while it loads, in this process or in its workers."""
    check, first = "augmentation", passes[0]
    drew = [k for k in range(len(GENERATORS)) if all(p["drew"][k] for p in passes)]
    same = [GENERATORS[k] for k in drew if len({p["generators"][k] for p in passes}) == 1]
    if first["workers"] and first["base_seed"] is not None and alike(passes, "base_seed"):
        if first["iterable"] or not same_dataset(passes):
            return []
        text = f"the workers of all ranks draw the same numbers: one seed (loader at {first['at']})"
        return [warning(check, text, f"{OWN_SEED}; harmless without augmentation")]
    if same:
        text = f"all ranks draw the same numbers of {', '.join(same)} while they load"
        return [warning(check, f"{text} ({first['at']})", OWN_SEED)]
    if drew:
        return [right(check, "the ranks draw different random numbers")]
    if first["workers"] and first["base_seed"] is not None:
        return [right(check, "the loaders of the ranks give their workers different seeds")]
    return []


def evaluation(ranks: list[dict]) -> list[Row]:
    """Of the data sets that are evaluated: the first whose row is not right, or the first."""
    seen = [(dataset_of(p), p) for rank in ranks for p in rank["passes"] if is_evaluation(p)]
    if not seen:
        text = "no pass over a loader without a backward, after a step"
        return [not_seen("evaluation", f"{text}; if yours comes later, raise --batches")]
    rows = []
    for key in dict(seen):
        of_ranks = (
            [p for p in rank["passes"] if is_evaluation(p) and dataset_of(p) == key]
            for rank in ranks
        )
        rows += evaluation_of_one(ranks, [passes[0] for passes in of_ranks if passes])
    return [next((row for row in rows if row.verdict != RIGHT), rows[0])]


def dataset_of(p: dict) -> str:
    return f"{p['fingerprint']} {p['base_length']}"


def evaluation_of_one(ranks: list[dict], passes: list[dict]) -> list[Row]:
    """passes: the first evaluation of a data set on each rank that evaluates it."""
    check, at = "evaluation", passes[0]["at"]
    if len(passes) < len(ranks):
        return [right(check, f"by {len(passes)} of {len(ranks)} ranks ({at})")]
    drawn = [p["indices"] for p in passes]
    if not all(drawn) or not same_dataset(passes):
        return [not_seen(check, f"the samples of {at} cannot be told apart")]
    if all(stops_early(p) for p in passes):
        return evaluation_of_a_part(passes)
    size, everything = size_of(passes), [x for d in drawn for x in d]
    twice = len(everything) - len({*everything})
    lost = size - len({*everything}.union(*drawn_beside(ranks, passes[0])))
    if all(len({*d}) >= ALL_BUT_A_FEW * size for d in drawn):
        text = f"each rank evaluates all {size} samples ({at})"
        cure = "each rank a part, then all_reduce; no mistake if the results are not added up"
        return [warning(check, text, cure, ACCURACY)]
    if twice and "gather_for_metrics" not in ranks[0]["notes"]:
        text = f"{twice} of {size} samples are counted twice ({at}, {passes[0]['sampler']})"
        cure = "Subset(dataset, range(rank, len(dataset), world_size))"
        return [warning(check, text, cure, ACCURACY)]
    if lost > 0:
        text = f"{lost} of {size} samples are left out ({at})"
        return [warning(check, text, "no drop_last for evaluation", ACCURACY)]
    if not all(collectives_after(rank, p) for rank, p in zip(ranks, passes, strict=True)):
        text = f"each rank evaluates a part of the {size} samples, and no collective follows ({at})"
        return [warning(check, text, "all_reduce sums and counts, then divide", ACCURACY)]
    return [right(check, f"each of {size} samples once ({at})")]


def stops_early(p: dict) -> bool:
    """Was it the script, not we, that ended this evaluation before the end of its loader?"""
    return not p["ended"] and p["given"] < min(p["batches"] or 0, EVALUATION * p["limit"])


def evaluation_of_a_part(passes: list[dict]) -> list[Row]:
    """A loop with a break: are its samples those that one rank would take?"""
    check, first = "evaluation", passes[0]
    read = [p["given"] * p["sizes"][0] for p in passes]
    parts = [p["indices"][:n] for p, n in zip(passes, read, strict=True)]
    together, drawn = {*parts[0]}.union(*parts), sum(map(len, parts))
    text = f"each rank stops after {first['given']} of {first['batches']} batches"
    text += f": {len(together)} of {size_of(passes)} samples ({first['at']})"
    if together == {*range(drawn)}:
        return [right(check, f"{text}, the first ones, each once")]
    cure = "choose this part before it is dealt out, with the same seed on all ranks"
    return [warning(check, f"{text}; on another number of ranks, others", cure, ACCURACY)]


def drawn_beside(ranks: list[dict], first: dict) -> list[list[int]]:
    """What all evaluations of this data set drew between the same two steps: there may be a second
    loader for the last samples."""
    keys = ("steps_before", "fingerprint", "base_length")
    passes = [p for rank in ranks for p in rank["passes"] if is_evaluation(p)]
    return [p["indices"] for p in passes if all(p[key] == first[key] for key in keys)]


def is_evaluation(p: dict) -> bool:
    """Also if gradients are switched off in each batch only, or not at all."""
    whole = p["ended"] or p["given"] >= p["limit"]
    without_backward = whole and not p["steps"] and not p["backwards"]
    return bool(p["given"] and p["steps_before"] and (not p["training"] or without_backward))


def epoch_of_original(ranks: list[dict], one: dict) -> list[Row]:
    """Do all ranks together train on as many samples, in as many batches, as the original would?
    one: the record of the original, which got our batches, but whose loader has its own length."""
    check, passes = "the original's epoch", trained_passes(ranks)
    originals = [p for p in one["passes"] if p["steps"]]
    if not passes or not originals:
        return []
    epochs, epoch = [p["epoch"] for p in passes[0]], originals[0]["epoch"]
    if None in (*epochs, epoch):
        return [not_seen(check, "a loader does not say how many samples it has")]
    batches, samples = epochs[0][0], sum(samples for _, samples in epochs)
    if rows_are_split(ranks):
        samples = epochs[0][1]
    text = f"{samples} samples in {batches} batches on {len(ranks)} ranks together, "
    text += f"{epoch[1]} in {epoch[0]} in the original ({passes[0][0]['at']})"
    if samples < epoch[1]:
        cure = "drop_last in the sampler and in the loader only if the original has it; keep a "
        cure += "sampler of its own, and deal out what that draws"
        return [warning(check, text, cure, LOSS)]
    accumulates = any(p["steps"] < p["given"] for p in (passes[0][0], originals[0]))
    if batches != epoch[0] and not accumulates:
        cure = "the original's batch size / world_size on each rank, and its drop_last; "
        cure += "meant so only if the learning rate was chosen for this global batch"
        return [warning(check, text, cure, RATE)]
    return [right(check, text)]


def collectives_after(rank: dict, evaluated: dict) -> int:
    """How many collectives follow an evaluation, before training goes on."""
    later = [p for p in rank["passes"] if p["number"] > evaluated["number"]]
    trained = [p for p in later if p["training"] and not is_evaluation(p)]
    end = trained[0]["collectives_before"] if trained else len(rank["collectives"])
    return int(end - evaluated["collectives_before"])
