"""Judge the records of the ranks. Read on in this order:

several of prove.checks ask:     rank_exits.py, loader_passes.py, epoch_ends.py, rank_steps.py
all ranks against one rank:      replay.py, compare_steps.py, distances.py,
                                 explain_difference.py
other rows of a replay:          replay_checks.py, replay_schedule.py, printed_numbers.py,
                                 original_epoch.py
the words of each verdict:       reasons.py, replay_reasons.py, wording.py
the printed rows:                table.py
"""
