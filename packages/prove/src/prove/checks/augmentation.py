"""Do ranks draw different random numbers while loading, in the rank or in its workers?"""

from prove import random_state
from prove.checks.base import Check, CheckContext, Phase
from prove.checks.mistake import plain
from prove.judge.loader_passes import same_dataset, same_on_all_ranks
from prove.judge.reasons import OWN_SEED, Reason
from prove.judge.table import WARNING, ReportRow, right, warning

NAME = "augmentation"


class Sentence(Reason):
    WORKER_SEEDS_ALIKE = (
        "the workers of all ranks draw the same numbers: one seed (loader at {at})",
        OWN_SEED,
    )
    DRAWS_ALIKE = (
        "all ranks draw the same numbers of {generators} while they load ({at})",
        OWN_SEED,
    )
    DRAWS_DIFFER = "the ranks draw different random numbers"
    WORKER_SEEDS_DIFFER = "the loaders of the ranks give their workers different seeds"


def judge(context: CheckContext) -> list[ReportRow]:
    if not context.epochs:
        return []
    passes = context.epochs[0]
    first = passes[0]
    drew = [
        number
        for number in range(len(random_state.GENERATORS))
        if all(loader_pass.drew[number] for loader_pass in passes)
    ]
    same = [
        random_state.GENERATORS[number]
        for number in drew
        if len({loader_pass.generators[number] for loader_pass in passes}) == 1
    ]
    seeds_workers = first.workers and first.base_seed is not None
    if seeds_workers and same_on_all_ranks(passes, "base_seed"):
        drew_nothing = not any(loader_pass.workers_drew for loader_pass in passes)
        if first.is_stream or drew_nothing or not same_dataset(passes):
            return []
        return [warning(NAME, Sentence.WORKER_SEEDS_ALIKE, at=first.source_line)]
    if same:
        return [warning(NAME, Sentence.DRAWS_ALIKE, generators=same, at=first.source_line)]
    if drew:
        return [right(NAME, Sentence.DRAWS_DIFFER)]
    if seeds_workers:
        return [right(NAME, Sentence.WORKER_SEEDS_DIFFER)]
    return []


PLANTED = (
    plain(
        "the same augmentation on all ranks", WARNING, NAME,
        ("torch.manual_seed(rank + 1)", "torch.manual_seed(1)"),
    ),
    plain(
        "the same numbers of numpy on all ranks", WARNING, NAME,
        ("torch.randn(6)", "torch.tensor(np.random.randn(6), dtype=torch.get_default_dtype())"),
        ("np.random.seed(rank + 1)", "np.random.seed(1)"),
    ),
    plain(
        "the same numbers of random on all ranks", WARNING, NAME,
        ("torch.randn(6)", "random.gauss(0, 1)"),
        ("    random.seed(rank + 1)", "    random.seed(1)"),
    ),
)  # fmt: skip
CHECK = Check(NAME, judge, Phase.ALL_RECORDS, planted=PLANTED)
