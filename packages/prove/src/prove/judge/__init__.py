"""Judge the records of the ranks. Read on in this order:

ends.py, loader_passes.py, epoch_ends.py, steps.py    questions that several of prove.checks ask
replay.py, compare_steps.py, place.py    compare all ranks with one rank
replay_checks.py, schedule.py, printed_numbers.py, original_epoch.py    other rows of a replay
reasons.py, replay_reasons.py, wording.py    the words of each verdict
table.py         the printed rows
"""
