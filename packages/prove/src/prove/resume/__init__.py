"""Is stopping and resuming the same as never stopping? Read in this order.

runs.py    four runs: straight, straight again, stopped, resumed
record.py  what each rank writes down in them
watch.py   how it is recorded, in each rank
pairs.py   step i of the resumed run beside step k + i of the straight one
files.py, order.py, state.py, draws.py, later.py    the checks, each with its sentences
auto.py    finds the flag of a script by which it resumes
"""
