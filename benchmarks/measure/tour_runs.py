"""Run each stage in turns with the others, and collect what the runs leave for the tour."""

import json
import math
import os
from argparse import Namespace
from statistics import median

import torch
from torch.utils.data import DataLoader

import peak
from benchmarks.measure.memory import count_in_stages
from benchmarks.measure.timing import AA, timed
from benchmarks.measure.training_step import TrainingStep
from benchmarks.measure.turns import Plan, take_turns, warmed_up
from benchmarks.result_files import Results, provenance
from benchmarks.variants import VARIANTS, Layout, script_of
from common.bar import progress_bar
from common.data import ImageSet, load_dataset, loader_options
from common.models import build_model
from common.options import make_parser
from local_ranks.run_files import read_metrics
from shm.busy import MIN_ROUNDS, LoadWatch

KEYS = ("01", "01-cores", "02", "03", "04", "04-shm", "05", "05-shm", "05-bf16")
CEILING = "ceiling"
SECONDS, MAX_ROUNDS = 40, 9  # of all turns together, and at most so many
MIN_TURN_SECONDS = 0.2


def measure_tour(args: Namespace) -> Results:
    """Run the tour; args: its flags, with the number of `ranks`, and epochs that may be None."""
    watch = LoadWatch()
    origin = provenance(args.device, command="python benchmarks/tour.py")
    keys = [key for key in KEYS if VARIANTS[key].stage in args.stages]
    keys = [key for key in keys if not VARIANTS[key].why_not_on(args.device)]
    on_ranks = [key for key in keys if VARIANTS[key].layout is Layout.RANKS]
    names = {key: key for key in keys} | {AA: keys[0]}
    if on_ranks and args.ranks > 1:
        names[CEILING] = CEILING
    train_set, _ = load_dataset(args)
    plan = make_plan(args, train_set, len(names))
    runs = {name: (key, flags_of(args, key, plan)) for name, key in names.items()}
    print(f"{len(names)} programs train {plan.epochs} epochs each, in turns:", flush=True)
    for name, (key, flags) in runs.items():
        command, number = script_of(key, args.ranks, args.device)
        threads = (os.cpu_count() or 1) if VARIANTS[key].all_cores else 1
        start = f"{number} × " * (number > 1) + f"OMP_NUM_THREADS={threads} python"
        title = VARIANTS[key].title(args.ranks) + " again" * (name == AA)
        print(f"  {title}: {start} {' '.join([*command, *flags])}")
    with progress_bar("counting memory"):
        held = count_memory(keys, args, train_set)
    with warmed_up(runs, args.ranks, plan.epoch_steps, args.run_dir) as programs:
        seconds = take_turns(programs, plan)
        for program in programs.values():
            program.finish()
        labels = {name: program.label for name, program in programs.items()}
    rows: dict[str, Results] = {
        key: {
            "label": labels[key],
            "summary": json.loads((args.run_dir / key / "summary.json").read_text()),
            "losses": [line["loss"] for line in read_metrics(args.run_dir / key)],  # of each step
            "held": held[VARIANTS[key].memory_key]["held"],
        }
        for key in keys
    }
    settings = ("dataset", "model", "device", "ranks")
    return {
        "provenance": origin | watch.load(),
        **{name: getattr(args, name) for name in settings},
        "epochs": plan.epochs,
        "global_batch": args.batch_size,
        "epoch_steps": plan.epoch_steps,
        "rows": rows,
        "labels": labels,
        "step_seconds": seconds,  # of each row in each round
    }


def make_plan(args: Namespace, train_set: ImageSet, programs: int) -> Plan:
    """Choose how much each program trains, by a first measured step; --epochs chooses, too."""
    epoch_steps = int(min(len(train_set) // args.batch_size, args.max_steps))
    if args.epochs or args.max_steps < math.inf:
        epochs = min(args.epochs or 1 + MAX_ROUNDS, args.max_steps // epoch_steps)
        return Plan(epoch_steps, int(epochs) - 1)
    epoch_seconds = epoch_steps * seconds_of_a_step(args, train_set)
    epochs = math.ceil(MIN_TURN_SECONDS / epoch_seconds)
    rounds = int(SECONDS / (programs * epochs * epoch_seconds))
    return Plan(epoch_steps, min(max(rounds, MIN_ROUNDS), MAX_ROUNDS), epochs)


def seconds_of_a_step(args: Namespace, train_set: ImageSet) -> float:
    """Measure a step of one process with one thread, as stage 01 takes it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    images, _ = next(iter(DataLoader(train_set, args.batch_size, **loader_options(args))))
    model = build_model(args.model, train_set).to(args.device)
    classes = len(train_set.classes)
    step = timed(TrainingStep(model, images.to(args.device), classes=classes), 1)
    seconds = median([step() for _ in range(5)])
    torch.set_num_threads(threads)
    return seconds


def flags_of(args: Namespace, key: str, plan: Plan) -> list[str]:
    """List the flags that all stages share, where they differ from a stage's default."""
    values = {**vars(args), "epochs": plan.epochs}
    left_out = {"stage", "run_dir"}
    if key == CEILING:  # each process takes the local batch
        values["batch_size"] = args.batch_size // args.ranks
        left_out |= {"epochs", "max_steps"}
    flags = []
    for name, default in vars(make_parser("", "").parse_args([])).items():
        if name not in left_out and values[name] != default:
            flags.append(f"--{name.replace('_', '-')}={values[name]}")
    return flags


def count_memory(keys: list[str], args: Namespace, train_set: ImageSet) -> Results:
    """Count the bytes of tensors by kind that each process or replica holds after the loss."""
    image, _ = train_set[0]  # (C, H, W)
    optimizer, classes = "momentum" if args.momentum else "sgd", len(train_set.classes)
    plan = peak.Plan(args.model, image.shape[-1], optimizer, args.device, image.shape[0], classes)
    jobs = dict.fromkeys(VARIANTS[key].memory_key for key in keys)
    return count_in_stages(jobs, plan, args.batch_size, args.ranks)
