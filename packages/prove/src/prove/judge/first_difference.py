"""Find the first layer whose output differs between all ranks and one rank, before step 1."""

from typing import Any

from prove.judge.reasons import Phrase
from prove.judge.replay import Replay
from prove.judge.wording import phrase
from prove.rank_record import LayerOutput, Mode

LIMIT = 1e-6  # relative to the largest value


def first_difference(replay: Replay) -> dict[str, Any]:
    """Return a phrase for the end of a sentence: the first layer that differs, or none."""
    if replay.name == Mode.SEQUENCE:  # a sequence calls each layer more often
        return phrase(Phrase.NOTHING)
    in_turn = zip(
        *(rank.outputs for rank in replay.records), replay.one_rank_record.outputs, strict=False
    )
    seen = 0
    for *ranks_outputs, one_output in in_turn:
        for rank, own in enumerate(ranks_outputs):
            if (own.layer, own.class_name) != (one_output.layer, one_output.class_name):
                facts = {"rank": rank, "layer": name_of(own), "other": name_of(one_output)}
                return phrase(Phrase.OTHER_LAYER, **facts)
        if len(one_output.rows) != sum(len(own.rows) for own in ranks_outputs):
            continue  # the output has no row for each sample
        if are_apart(ranks_outputs, one_output):
            return phrase(Phrase.FIRST_OUTPUT, layer=name_of(one_output))
        seen += 1
    return phrase(Phrase.AFTER_THE_MODEL if seen else Phrase.NOTHING)


def name_of(output: LayerOutput) -> str:
    return f"{output.layer} ({output.class_name})".strip()


def are_apart(ranks_outputs: list[LayerOutput], one_output: LayerOutput) -> bool:
    """Do the outputs differ, whatever the order of the samples?"""
    rows = sorted(value for own in ranks_outputs for value in own.rows)
    largest = max(map(abs, rows), default=0.0) or 1.0
    return any(
        not abs(own - one) <= LIMIT * largest
        for own, one in zip(rows, sorted(one_output.rows), strict=True)
    )


def source_line_of_loss(replay: Replay) -> str:
    """Return the line of the first loss, or else of its backward; empty if unknown."""
    backwards = replay.rank_0_record.backwards
    return (backwards[0].loss_source_line or backwards[0].source_line) if backwards else ""
