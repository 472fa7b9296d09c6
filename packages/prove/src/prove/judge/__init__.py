"""What the records of the ranks say. Read on in this order:

ends.py, loader_passes.py, epoch_ends.py, steps.py    what several of prove.checks ask
replay.py, compare_steps.py, place.py    what all ranks computed against what one rank computed
replay_checks.py, schedule.py, printed_numbers.py, original_epoch.py    what else a replay says
reasons.py, replay_reasons.py, wording.py    the words of each verdict
table.py         the rows that are printed
"""
