"""Watch a script from inside its own process. observe.py begins it; read on in this order:

rank_run.py      the run of a rank, and how a function of torch's is replaced
float64.py       makes the script compute in float64
data.py, schedule.py          loaders; learning rates
model.py, outputs.py, loss.py, steps.py, model_tensors.py    forward, backward, steps
process_io.py    files, printed lines, and messages between the ranks
operations.py, random_numbers.py    changed parameters, and random numbers
draws.py, batches.py, feeder.py     give one rank the draws and the samples of all
loop_watcher.py, loop_feeder.py     do the same for a loop without a DataLoader
pretend_gpus.py, sync_batchnorm.py  scripts written for GPUs
"""
