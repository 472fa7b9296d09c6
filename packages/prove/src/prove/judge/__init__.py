"""What the records of the ranks say. Read on in this order:

rank_exits.py, loader_passes.py, epoch_ends.py, rank_steps.py    what several of prove.checks ask
replay.py, compare_steps.py, first_difference.py    what all ranks and one rank computed
replay_checks.py, replay_schedule.py, printed_numbers.py, original_epoch.py    what else it says
reasons.py, replay_reasons.py, wording.py    the words of each verdict
table.py         the rows that are printed
"""
