"""Did prove see how an epoch ends? If not, how many batches would show it?"""

from prove.judge.loader_passes import epochs_of_data_set
from prove.rank_record import Flag, LoaderPass, RankRecord, RunOutcome


def batches_up_to_last_window(record: RankRecord) -> int:
    """How many batches end with the same last window as the whole epoch; 0 if these do.

    This matters if several batches make one step: then a cut epoch may end with a longer or shorter
    window than the whole one.
    """
    for loader_pass in record.loader_passes:
        given, length, window = (
            loader_pass.batches_given,
            loader_pass.length,
            loader_pass.batches_per_step,
        )
        is_cut = loader_pass.most_batches <= given < length and not loader_pass.ended
        if not is_cut or not loader_pass.backwards or window == 1:
            continue
        if window in (0, given):  # perhaps only the cut made the script step
            window = given
        elif loader_pass.ends_as_whole():
            continue
        return min(length, 2 * window + (length - 2 * window) % window)
    return 0


def shortest_of_unequal_epochs(records: list[RankRecord]) -> int:
    """Return the fewest batches of a rank in an epoch of unequal lengths.

    Returns 0 if all ranks have equally many, or if their numbers are unknown.
    """
    if not records:
        return 0
    if Flag.JOINS in records[0].flags:
        return 0
    batches = [
        [each.batches_listed or 0 for each in passes] for passes in epochs_of_data_set(records)
    ]
    return max(
        (min(ranks_batches) for ranks_batches in batches if len({*ranks_batches}) > 1), default=0
    )


def stop_together(outcome: RunOutcome) -> bool:
    """Do all ranks end well, with equally many steps in each epoch?

    A rank that prove ends while it waits inside a step has not counted this step.
    """
    records = outcome.records
    if outcome.status or not all(rank.ended.is_well for rank in records):
        return False
    steps = [{*map(steps_of_epoch, records, passes)} for passes in epochs_of_data_set(records)]
    return bool(steps) and all(len(ranks_steps) == 1 for ranks_steps in steps)


def steps_of_epoch(record: RankRecord, loader_pass: LoaderPass) -> int:
    """Count the steps until the next epoch, including the last one before a `break`."""
    later = record.loader_passes[loader_pass.pass_index + 1 :]
    ends = [
        each.steps_before for each in later if each.dataset_number == loader_pass.dataset_number
    ]
    return (ends[0] if ends else record.step_count) - loader_pass.steps_before
