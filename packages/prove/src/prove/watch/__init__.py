"""Watch a script from inside its own process. observe.py begins it; read on in this order:

rank_run.py      the run of a rank, and how a function of torch's is replaced
float64.py       how the script comes to compute in float64
data.py, schedule.py          loaders; learning rates
model.py, outputs.py, loss.py, steps.py, model_tensors.py    forward, backward, steps
process_io.py    files, printed lines, and messages between the ranks
operations.py, random_numbers.py    changed parameters, and random numbers
draws.py, batches.py, feeder.py     how one rank gets the draws and the samples of all
loop_watcher.py, loop_feeder.py     the same for what a loop without a DataLoader reads
pretend_gpus.py, sync_batchnorm.py  scripts written for GPUs
"""
