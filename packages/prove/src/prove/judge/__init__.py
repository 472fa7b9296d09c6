"""What the records of the ranks say. Read on in this order:

effects.py, samples.py, epochs.py, evaluation.py, model.py    the run of all ranks
replay.py, compare_steps.py, place.py    what all ranks computed against what one rank computed
replay_checks.py, schedule.py, printed_numbers.py    what else a replay says
reasons.py, run_reasons.py, replay_reasons.py, wording.py    the words of each verdict
table.py         the rows that are printed
"""
